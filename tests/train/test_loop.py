"""What a run writes and tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitplan.errors import PlanError, RunError, TaskError
from bitplan.lab.train import Progress, RunFolder, train
from bitplan.lab.train.checkpoint import checkpoints_in
from bitplan.plans import Plan


def lines(folder: Path, key: str) -> list[dict[str, Any]]:
    return [line for line in RunFolder(folder).metrics() if key in line]


def test_a_run_learns_and_says_so(tmp_path: Path, tiny: Any) -> None:
    summary = train(tiny(), folder=tmp_path / "run")
    assert (summary.status, summary.step) == ("finished", 24)
    assert summary.metrics["accuracy"] > 0.9
    assert summary.best == max(line["accuracy"] for line in lines(tmp_path / "run", "accuracy"))
    assert (summary.why, summary.site) == (None, None)
    assert summary.seconds > 0
    assert summary.peak > 2**20
    assert RunFolder(tmp_path / "run").summary() == summary


def test_metrics_have_a_line_for_the_first_step_every_tenth_and_the_last(tmp_path: Path, tiny: Any) -> None:
    train(tiny(), folder=tmp_path / "run")
    reported = lines(tmp_path / "run", "loss")
    assert [line["step"] for line in reported] == [1, 10, 20, 24]
    assert all(set(line) == {"step", "loss", "lr", "bits", "mean_bits", "cost"} for line in reported)
    assert [line["lr"] for line in reported[:2]] == [0.1, 0.1]
    evaluated = lines(tmp_path / "run", "evaluation")
    assert [line["step"] for line in evaluated] == [6, 12, 18, 24]
    assert all(set(line) == {"step", "evaluation", "accuracy"} for line in evaluated)
    steps = [line["step"] for line in RunFolder(tmp_path / "run").metrics()]
    assert steps == sorted(steps)
    train(tiny(), folder=tmp_path / "often", log_every=1)
    assert [line["step"] for line in lines(tmp_path / "often", "loss")] == list(range(1, 25))


def test_cost_and_bits_add_up(tmp_path: Path, tiny: Any) -> None:
    """In FP32 the whole run costs 1; with every operand in 8 bits a sixteenth."""
    eight = Plan.from_dict(
        {"version": 1, "rules": [{"match": "*", "op": "linear", "x": "e4m3", "w": "e4m3", "dy": "e5m2"}]}
    )
    for name, plan, cost, bits in (("fp32", None, 1.0, 32.0), ("eight", eight, 1 / 16, 8.0)):
        summary = train(tiny(), plan, folder=tmp_path / name)
        reported = lines(tmp_path / name, "cost")
        assert [line["cost"] for line in reported] == pytest.approx([cost * step / 24 for step in (1, 10, 20, 24)])
        assert [line["bits"] for line in reported] == pytest.approx([bits] * 4)
        assert [line["mean_bits"] for line in reported] == pytest.approx([32.0] * 4)  # operands alone are rounded
        assert summary.cost["relative_to_fp32"] == pytest.approx(cost)
        assert summary.cost["relative_to_bf16"] == pytest.approx(4 * cost)
        assert summary.cost["bitops"] == 24 * 3 * 8 * (12 * 16 + 16 * 3) * bits**2


def test_memory_is_that_of_one_step_in_the_plans_formats(tmp_path: Path, tiny: Any, noisy: Plan) -> None:
    plain = train(tiny("steps=5"), folder=tmp_path / "plain").memory
    rounded = train(tiny("steps=5"), noisy, folder=tmp_path / "rounded").memory
    weights = 12 * 16 + 16 + 2 * 16 + 16 * 3 + 3
    assert plain["weight"] == 4 * weights
    assert rounded["weight"] == 6 / 8 * weights
    assert rounded["grad_weight"] == plain["grad_weight"]


def test_the_config_says_everything_and_the_command_makes_it_again(tmp_path: Path, tiny: Any, noisy: Plan) -> None:
    path = tmp_path / "my plan.yaml"
    noisy.save(path)
    task = tiny("steps=3", "lr=0.02", seed=4)
    train(task, str(path), folder=tmp_path / "run", task_source="tiny_task.py:Tiny")
    content = json.loads((tmp_path / "run" / "run.json").read_text())
    assert content["bitplan_run"] == 1
    assert (content["task"], content["plan"], content["plan_source"], content["seed"]) == (
        "tiny",
        "noisy",
        str(path),
        4,
    )
    assert content["settings"]["lr"] == 0.02
    assert content["metric"] == {"name": "accuracy", "better": "higher", "trivial": pytest.approx(1 / 3)}
    assert content["command"] == f"bitplan train tiny_task.py:Tiny --plan '{path}' --seed 4 --set steps=3 --set lr=0.02"
    assert content["versions"]["torch"] == torch.__version__
    assert content["machine"]["threads"] == torch.get_num_threads()
    assert Plan.load(tmp_path / "run" / "plan.yaml") == noisy


def test_the_plan_in_the_folder_stands_alone(tmp_path: Path, tiny: Any) -> None:
    (tmp_path / "own.yaml").write_text("version: 1\nextends: bf16-all\nrules:\n- {match: '4', keep: true}\n")
    train(tiny("steps=2"), str(tmp_path / "own.yaml"), folder=tmp_path / "run")
    plan = Plan.load(tmp_path / "run" / "plan.yaml")
    assert plan.extends is None
    assert len(plan.all_rules) == 2
    assert RunFolder(tmp_path / "run").config().plan == "own"


def test_the_reported_loss_is_not_rounded(tmp_path: Path, tiny: Any) -> None:
    """bf16-all rounds the loss like every activation; three digits would hide what a run learns."""
    train(tiny("steps=6"), "bf16-all", folder=tmp_path / "run")
    losses = torch.tensor([line["loss"] for line in RunFolder(tmp_path / "run").metrics() if "lr" in line])
    assert (losses.bfloat16().float() != losses).all()
    plain = train(tiny("steps=6"), folder=tmp_path / "plain").loss
    assert losses[-1].item() == pytest.approx(plain, rel=0.05)


def test_sites_tell_formats_and_errors(tmp_path: Path, tiny: Any, noisy: Plan) -> None:
    train(tiny(), noisy, folder=tmp_path / "run")
    sites = {site["site"]: site for site in json.loads((tmp_path / "run" / "sites.json").read_text())}
    weight = sites["0/linear.0:weight"]
    assert (weight["role"], weight["format"], weight["elements"]) == ("weight", "e3m2 stochastic", 192)
    assert 0.01 < weight["error"] < 0.3
    assert weight["rule"].endswith("rules[0]")
    assert sites["2/relu.0:activation"]["format"] == "int4 tensor minmax eval=ema"
    assert 0 <= sites["2/relu.0:activation"]["underflow"] < 1
    assert sites["0/linear.0:grad_weight"]["format"] is None
    assert "error" not in sites["0/linear.0:grad_weight"]
    assert {site["role"] for site in sites.values()} == {"weight", "activation", "grad_activation", "grad_weight"}
    # Measuring them is not a step of the run: what it ended with is untouched.
    kept = checkpoints_in(tmp_path / "run" / "checkpoints")[0].load()
    assert kept["attachment"]["step"] == 24


def test_progress_is_told_after_every_step(tmp_path: Path, tiny: Any) -> None:
    reported: list[Progress] = []
    train(tiny(), folder=tmp_path / "run", on_progress=reported.append)
    training = [now for now in reported if now.phase == "training"]
    assert [now.step for now in training] == list(range(1, 25))
    assert [now.step for now in reported if now.phase == "evaluating"] == [6, 12, 18, 24]
    assert [now.metric is None for now in training[:6]] == [True] * 5 + [False]
    assert [now.cost for now in training] == pytest.approx([step / 24 for step in range(1, 25)])
    assert all(now.steps == 24 and now.bits == 32 and now.peak > 0 for now in training)


def test_a_finished_run_is_not_made_again(tmp_path: Path, tiny: Any) -> None:
    first = train(tiny(), folder=tmp_path / "run")
    reported: list[Progress] = []
    assert train(tiny(), folder=tmp_path / "run", on_progress=reported.append) == first
    assert reported == []


def test_a_stop_that_comes_with_the_last_step_finds_the_run_finished(tmp_path: Path, tiny: Any) -> None:
    assert train(tiny("steps=1"), folder=tmp_path / "run", stop=lambda: True).status == "finished"


def test_two_checkpoints_are_kept(tmp_path: Path, tiny: Any) -> None:
    train(tiny(), folder=tmp_path / "run")
    assert [item.step for item in checkpoints_in(tmp_path / "run" / "checkpoints")] == [24, 18]


def test_gradients_are_clipped(tmp_path: Path, tiny: Any) -> None:
    plain, clipped = (train(tiny(f"clip={clip}"), folder=tmp_path / str(clip)).loss for clip in (0, 0.01))
    assert plain is not None
    assert clipped is not None
    assert clipped > 1.5 * plain


def test_evaluations_leave_training_alone(tmp_path: Path, tiny: Any) -> None:
    """Dropout draws the same, and frozen modules stay frozen, however often the model is evaluated."""
    losses, means = [], []
    for every in (24, 1):
        task = tiny(f"evaluate_every={every}")
        task.after_evaluation = lambda figures: None
        model = task.model()
        model[1].eval()
        task.model = lambda model=model: model
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5)
        train(task, folder=tmp_path / str(every), log_every=1)
        losses.append([line["loss"] for line in lines(tmp_path / str(every), "loss")])
        means.append(model[1].running_mean.tolist())
    assert losses[0] == losses[1]
    assert means == [[0.0] * 16] * 2


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"device": "toaster"}, RunError, "there is no device 'toaster': use cpu or cuda"),
        ({"device": "meta"}, RunError, "trained on cpu or cuda, not on meta"),
        ({"seed": 5}, RunError, "the task was made with seed 0: make it with seed 5"),
        ({"checkpoint_every": -1}, RunError, "checkpoint_every is -1"),
        ({"log_every": 0}, RunError, "log_every is 0"),
        ({"execution": "magic"}, PlanError, "execution 'magic'"),
        ({"plan": "no-such-plan"}, PlanError, "no preset and no file"),
    ],
)
def test_mistakes_are_sentences_and_leave_no_folder(
    tmp_path: Path, tiny: Any, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        train(tiny(), folder=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_there_is_a_sentence(tmp_path: Path, tiny: Any) -> None:
    with pytest.raises(RunError, match="this machine has no CUDA device: use the device cpu"):
        train(tiny(), folder=tmp_path / "run", device="cuda")


def test_an_evaluation_without_the_metric_is_a_sentence(tmp_path: Path, tiny: Any) -> None:
    task = tiny()
    task.evaluate = lambda model: {"error": 1.0}
    with pytest.raises(
        TaskError, match=r"judged by accuracy, but its evaluate\(\) returned error: let it return accuracy"
    ):
        train(task, folder=tmp_path / "run")


def test_too_little_memory_is_a_sentence(tmp_path: Path, tiny: Any) -> None:
    def exhaust(output: Tensor, target: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    task = tiny()
    task.loss = exhaust
    with pytest.raises(RunError, match="enough memory for step 1: make the batch smaller with --set batch=4"):
        train(task, folder=tmp_path / "run")


@pytest.mark.usefixtures("without_inductor")
def test_a_compiled_run_follows_its_plan_and_resumes(tmp_path: Path, tiny: Any, fingerprint: Any) -> None:
    plan = Plan.from_dict(
        {"version": 1, "rules": [{"match": "*", "weight": {"format": "e3m2", "rounding": "stochastic"}}]}
    )
    eager = train(tiny("steps=4"), plan, folder=tmp_path / "eager", log_every=1)
    whole = train(tiny("steps=4"), plan, folder=tmp_path / "whole", log_every=1, compile=True)
    assert whole.status == eager.status == "finished"
    losses = [[line["loss"] for line in lines(tmp_path / name, "loss")] for name in ("eager", "whole")]
    assert losses[0][0] == pytest.approx(losses[1][0], abs=0.3)  # compiled dropout draws others
    stopped = train(tiny("steps=4"), plan, folder=tmp_path / "parts", log_every=1, compile=True, stop=lambda: True)
    assert stopped.step == 1
    train(tiny("steps=4"), plan, folder=tmp_path / "parts", log_every=1, compile=True)
    assert fingerprint(tmp_path / "parts") == fingerprint(tmp_path / "whole")
