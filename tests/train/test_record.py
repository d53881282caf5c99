"""`bitplan.record`: a loop of one's own writes the run folder that the lab's loop writes."""

from __future__ import annotations

import gc
import json
import math
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bitplan as bp
from bitplan.errors import BitplanWarning, RunError
from bitplan.lab.report.summaries import Report
from bitplan.lab.train import RunFolder
from bitplan.lab.train.folder import read_lines
from bitplan.lab.train.record import Recorder

STEPS = 25
PROMOTING = {
    "version": 1,
    "rules": [
        {"match": "*", "activation": {"format": "e2m1", "scale": "tensor", "promote": {"to": "e4m3", "error": 0.001}}}
    ],
}
GROWING = {
    "version": 1,
    "schedules": {"grow": {"name": "steps", "bits": [4, 8], "at": [12]}},
    "rules": [{"match": "*", "activation": {"format": "int", "bits": "grow", "scale": "tensor"}}],
}


def perceptron() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.05), torch.randn(32, 8)


def recorded(folder: Path, plan: Any = None, steps: int = STEPS, **options: Any) -> Recorder:
    model, optimizer, x = perceptron()
    target = x[:, :4].relu()
    with bp.record(folder, model, plan, optimizer=optimizer, example=x, **options) as run:
        for _ in range(steps):
            loss = (model(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
        if "metric" in options:
            run.evaluate(**{options["metric"]: loss.item()})
    return run


def lines(folder: Path, evaluation: bool = False) -> list[dict[str, Any]]:
    return [line for line in RunFolder(folder).metrics() if bool(line.get("evaluation")) is evaluation]


def test_the_folder_has_what_the_labs_loop_writes(tmp_path: Path) -> None:
    run = recorded(tmp_path / "a", "int8-all", metric="held-out error", settings={"steps": STEPS, "batch": 32})
    place = RunFolder(tmp_path / "a")
    assert [line["step"] for line in lines(place.path)] == [1, 10, 20, 25]
    losses = [line["loss"] for line in lines(place.path)]
    assert losses[-1] < losses[0]
    assert {line["lr"] for line in lines(place.path)} == {0.05}
    assert all(8 <= line["bits"] < 16 for line in lines(place.path))
    assert lines(place.path)[-1]["cost"] == pytest.approx(run.summary.cost["relative_to_fp32"])  # type: ignore[union-attr]
    assert lines(place.path)[0]["cost"] == pytest.approx(lines(place.path)[-1]["cost"] / STEPS)
    summary = place.summary()
    assert summary == run.summary
    assert summary is not None
    assert (summary.status, summary.step, summary.metrics) == ("finished", STEPS, {"held-out error": losses[-1]})
    assert 0.05 < summary.cost["relative_to_fp32"] < 0.3
    assert summary.peak > 10**7
    assert summary.seconds > 0
    times = read_lines(place.times_file)
    assert [line["step"] for line in times] == [1, 10, 20, 25]
    assert all(line["peak"] > 0 for line in times)
    sites = json.loads(place.sites_file.read_text())
    weight = next(site for site in sites if site["site"] == "0/linear.0:weight")
    assert weight["format"].startswith("int8")
    assert 0 < weight["error"] < 0.05
    statistics = read_lines(place.statistics_file)
    assert [line["step"] for line in statistics] == [1, 25]
    assert statistics[0]["sites"]["0/linear.0:weight"]["error"] > 0
    assert place.plan() == bp.Plan.preset("int8-all").flattened()


def test_the_numbers_are_those_of_the_loop_without_recording(tmp_path: Path) -> None:
    recorded(tmp_path / "a", "int8-all")
    model, optimizer, x = perceptron()
    with bp.attach(model, "int8-all", optimizer=optimizer, example=x):
        for _ in range(STEPS):
            loss = (model(x) - x[:, :4].relu()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model_again, optimizer_again, _ = perceptron()
    run = bp.record(tmp_path / "b", model_again, "int8-all", optimizer=optimizer_again, example=x)
    with run as recorder:
        for _ in range(STEPS):
            loss = (model_again(x) - x[:, :4].relu()).square().mean()
            loss.backward()
            optimizer_again.step()
            optimizer_again.zero_grad()
            recorder.log(loss)
    for ours, theirs in zip(model_again.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert (tmp_path / "a/metrics.jsonl").read_bytes() == (tmp_path / "b/metrics.jsonl").read_bytes()


def test_no_graph_of_a_step_is_kept(tmp_path: Path) -> None:
    class Hook:
        def __call__(self, *gradients: Any) -> None:
            pass

    model, optimizer, x = perceptron()
    with bp.record(tmp_path / "a", model, None, optimizer=optimizer, example=x) as run:
        for _ in range(3):
            hook = Hook()
            loss = model(x).square().mean()
            loss.grad_fn.register_hook(hook)
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        held_by_graph = weakref.ref(hook)
        del hook, loss
        gc.collect()
        assert held_by_graph() is None


def test_runs_are_judged_against_their_reference(tmp_path: Path) -> None:
    """The reference is named by one run, and read although only that run is reported on."""
    recorded(tmp_path / "other", metric="error", steps=60)  # the longest run without a plan is the default reference
    recorded(tmp_path / "fp32", metric="error")
    run = recorded(tmp_path / "int8", "int8-all", metric="error", reference=tmp_path / "fp32")
    (experiment,) = run.report().experiments
    verdicts = [(plan.label, plan.verdict) for plan in experiment.plans]
    assert verdicts == [("fp32", "reference"), ("int8-all", "undecided")]
    (experiment,) = Report.of([tmp_path]).experiments
    assert experiment.reference is not None
    assert experiment.reference.runs[0].folder.name == "fp32"
    (tmp_path / "moved").mkdir()
    for name in ("fp32", "int8"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    assert len(Report.of([tmp_path / "moved" / "int8"]).runs) == 2
    with pytest.raises(RunError, match="nothing"):
        recorded(tmp_path / "c", reference=tmp_path / "nothing")


def test_a_plan_that_is_attached_inside_is_recorded(tmp_path: Path) -> None:
    """As trainers' callbacks attach: without an example, and detached before the block ends."""
    model, optimizer, x = perceptron()
    with bp.record(tmp_path / "a", settings={"steps": STEPS}) as recorder:
        bp.attach(model, "int4-all", example=x).detach()  # without a step: not what is trained
        run = bp.attach(model, PROMOTING, optimizer=optimizer, stats=True)
        assert recorder.run is run
        for _ in range(STEPS):
            (10 * model(x)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        run.detach()
    summary = recorder.summary
    assert summary is not None
    assert (summary.step, summary.loss) == (STEPS, None)
    assert 0 < summary.cost["relative_to_fp32"] <= 1
    assert summary.promotions
    assert lines(tmp_path / "a")[-1]["promoted"] == len(summary.promotions)
    sites = json.loads((tmp_path / "a/sites.json").read_text())
    assert any(site.get("error") for site in sites)


def test_bits_follow_a_schedule_and_the_metric_defaults_to_the_loss(tmp_path: Path) -> None:
    model, optimizer, x = perceptron()
    with bp.record(tmp_path / "a", model, GROWING, optimizer=optimizer, example=x, steps=24, log_every=4) as run:
        for step in range(24):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss, step_number=step)
    bits = [line["mean_bits"] for line in lines(tmp_path / "a")]
    assert bits[0] == bits[2] < bits[-1]
    assert lines(tmp_path / "a")[-1]["step_number"] == 23
    assert RunFolder(tmp_path / "a").config().settings == {"steps": 24}
    (line,) = lines(tmp_path / "a", evaluation=True)
    assert line["training loss"] == pytest.approx(lines(tmp_path / "a")[-1]["loss"])


def test_ends_of_a_loop(tmp_path: Path) -> None:
    def interrupted() -> None:
        model, optimizer, x = perceptron()
        with bp.record(tmp_path / "stopped", model, optimizer=optimizer, example=x) as run:
            for step in range(STEPS):
                if step == 13:
                    raise KeyboardInterrupt
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                run.log(loss=loss)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    summary = RunFolder(tmp_path / "stopped").summary()
    assert summary is not None
    assert (summary.status, summary.step) == ("stopped", 13)
    assert [line["step"] for line in lines(tmp_path / "stopped")] == [1, 10, 13]
    with bp.record(tmp_path / "diverged") as run:
        run.log(loss=1.0)
        run.log(loss=math.inf)
    summary = RunFolder(tmp_path / "diverged").summary()
    assert summary is not None
    assert (summary.status, summary.cost) == ("diverged", {})
    assert [plan.verdict for plan in Report.of([tmp_path / "diverged"]).experiments[0].plans] == ["fails"]
    with pytest.raises(RunError, match="optimizer="), bp.record(tmp_path / "empty"):
        pass
    assert not (tmp_path / "empty").exists()


def test_nothing_that_was_recorded_is_lost(tmp_path: Path) -> None:
    recorded(tmp_path / "a")
    before = (tmp_path / "a/metrics.jsonl").read_bytes()
    with pytest.raises(RunError, match="overwrite=True"):
        recorded(tmp_path / "a")
    with pytest.raises(RunError, match="name another folder"):
        recorded(tmp_path / "a", "int8-all")
    assert (tmp_path / "a/metrics.jsonl").read_bytes() == before
    assert RunFolder(tmp_path / "a").summary() is not None
    recorded(tmp_path / "a", "int8-all", overwrite=True, steps=3)
    summary = RunFolder(tmp_path / "a").summary()
    assert summary is not None
    assert (summary.step, RunFolder(tmp_path / "a").config().plan) == (3, "int8-all")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years")
    with pytest.raises(RunError, match=r"thesis\.txt"):
        recorded(tmp_path / "mine", overwrite=True)


def test_a_resumed_loop_goes_on_behind_its_last_line(tmp_path: Path) -> None:
    model, optimizer, x = perceptron()
    states: dict[str, Any] = {}

    def loop(first: int, last: int) -> None:
        with bp.record(tmp_path / "a", model, "int8-all", optimizer=optimizer, example=x, log_every=1) as run:
            assert run.run is not None
            if states:
                run.run.load_state_dict(states["run"])
            for step in range(first, last):
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)
                if step == 4:
                    states["run"] = run.run.state_dict()
                if step == 6 and first == 0:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop(0, 10)
    loop(5, 10)
    assert [line["step"] for line in lines(tmp_path / "a")] == [*range(1, 11)]
    summary = RunFolder(tmp_path / "a").summary()
    assert summary is not None
    assert (summary.status, summary.step) == ("finished", 10)


@pytest.mark.parametrize(
    ("options", "token"),
    [
        ({"plan": "int8-all", "model": None}, "model"),
        ({"metric": "accuracy", "better": "more"}, "more"),
        ({"log_every": 0}, "log_every"),
        ({"metric": "accuracy", "evaluated": "loss"}, "accuracy"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path: Path, options: Mapping[str, Any], token: str) -> None:
    model, _, _ = perceptron()
    given = {"model": model, **options}
    evaluated = given.pop("evaluated", "accuracy")
    with pytest.raises(RunError, match=token) as error, bp.record(tmp_path / "a", **given) as run:
        run.evaluate(**{evaluated: 1.0})
    assert "\n" not in str(error.value)


def test_a_trainer_of_transformers_is_recorded(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from hf_training import make_trainer

    from bitplan.integrations.transformers import BitplanCallback

    with bp.record(tmp_path / "run", metric="loss", log_every=2) as recorder:
        callbacks = [BitplanCallback("int8-all"), recorder.trainer_callback()]
        trainer = make_trainer(tmp_path / "out", callbacks, save_strategy="no")
        trainer.train()
        trainer.evaluate()
    summary = recorder.summary
    assert summary is not None
    assert (summary.status, summary.step) == ("finished", 6)
    assert 0 < summary.cost["relative_to_fp32"] < 0.5
    logged = {line["step"]: line["loss"] for line in trainer.state.log_history if "loss" in line}
    assert {line["step"]: line["loss"] for line in lines(tmp_path / "run")} == logged
    assert list(logged) == [1, 2, 3, 4, 5, 6]
    assert RunFolder(tmp_path / "run").config().settings["steps"] == 6
    assert summary.metrics["loss"] == next(
        line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line
    )
    assert RunFolder(tmp_path / "run").config().plan == "int8-all"


@pytest.mark.parametrize("plan", [None, "int8-all"])
def test_a_trainer_that_logs_seldom_is_recorded_with_its_steps_and_all_its_losses(
    tmp_path: Path, plan: str | None
) -> None:
    pytest.importorskip("transformers")
    from hf_training import make_trainer

    from bitplan.integrations.transformers import BitplanCallback

    with bp.record(tmp_path / "run", metric="loss") as recorder:
        callbacks = [recorder.trainer_callback(), *([] if plan is None else [BitplanCallback(plan)])]
        trainer = make_trainer(tmp_path / "out", callbacks, save_strategy="no")
        trainer.args.logging_steps = trainer.state.logging_steps = 2
        trainer.train()
        trainer.evaluate()
    assert recorder.step == 6
    logged = {line["step"]: line["loss"] for line in trainer.state.log_history if "loss" in line}
    assert list(logged) == [2, 4, 6]
    assert {line["step"]: line["loss"] for line in lines(tmp_path / "run") if "loss" in line} == logged


@pytest.mark.parametrize(("value", "token"), [("good", "accuracy is str"), (torch.zeros(2), "shape")])
def test_only_numbers_are_recorded(tmp_path: Path, value: Any, token: str) -> None:
    with pytest.raises(RunError, match=token), bp.record(tmp_path / "run") as run:
        run.log(loss=1.0, accuracy=value)


def test_a_metric_that_never_came_is_said(tmp_path: Path) -> None:
    with pytest.warns(BitplanWarning, match="evaluate"), bp.record(tmp_path / "run", metric="accuracy") as run:
        run.log(loss=1.0)
