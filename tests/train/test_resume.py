"""A run that was stopped or killed, and resumed, ends with the very bytes of an undisturbed one."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import bitplan
from bitplan.errors import BitplanWarning, RunError
from bitplan.executions.native.backends import Int8Backend
from bitplan.executions.native.paths import NativeTerms
from bitplan.lab.tasks.registry import find_task
from bitplan.lab.tasks.task import Settings
from bitplan.lab.train import RunFolder, train
from bitplan.lab.train.folder import DiskError
from bitplan.plans import Plan

SRC = Path(bitplan.__file__).parents[1]


def stop_after(step: int) -> dict[str, Any]:
    """Options of train() that stop it there."""
    seen: list[int] = []
    return {"on_progress": lambda now: seen.append(now.step), "stop": lambda: bool(seen) and seen[-1] >= step}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_stopped_run_goes_on_bit_for_bit(
    tmp_path: Path, tiny: Any, noisy: Plan, fingerprint: Any, optimizer: str
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    chosen = f"optimizer={optimizer}"
    train(tiny(chosen), noisy, folder=whole)
    for step in (1, 7, 12, 13, 23):  # before, between, at and just after checkpoints and evaluations
        summary = train(tiny(chosen), noisy, folder=parts, **stop_after(step))
        assert (summary.status, summary.step) == ("stopped", step)
    assert train(tiny(chosen), noisy, folder=parts).status == "finished"
    assert fingerprint(parts) == fingerprint(whole)


def test_a_run_under_selectors_records_and_resumes_the_plan_as_it_was_written(
    tmp_path: Path, tiny: Any, fingerprint: Any
) -> None:
    stochastic = {"format": "e4m3", "scale": "tensor", "rounding": "stochastic"}
    plan = Plan.from_dict({"version": 1, "rules": [{"select": ["product", "not last-product"], "x": stochastic}]})
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(tiny(), plan, folder=whole)
    train(tiny(), plan, folder=parts, **stop_after(7))
    assert train(tiny(), plan, folder=parts).status == "finished"
    assert fingerprint(parts) == fingerprint(whole)
    assert "not last-product" in (RunFolder(whole).plan_text() or "")


def test_the_fingerprint_notices_what_a_resumed_run_may_lose(
    tmp_path: Path, tiny: Any, noisy: Plan, fingerprint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part of the state is needed: without it, the resumed run ends otherwise."""
    from bitplan.lab.train.session import Session

    whole = tmp_path / "whole"
    train(tiny("optimizer=adamw"), noisy, folder=whole)
    load = Session.load
    for lost in ("optimizer", "attachment", "memory"):

        def load_less(self: Session, step: int, state: dict[str, Any], lost: str = lost) -> None:
            load(self, step, {**state, lost: self.state()[lost]})

        parts = tmp_path / lost
        train(tiny("optimizer=adamw"), noisy, folder=parts, **stop_after(13))
        monkeypatch.setattr(Session, "load", load_less)
        train(tiny("optimizer=adamw"), noisy, folder=parts)
        monkeypatch.setattr(Session, "load", load)
        assert fingerprint(parts)[0] != fingerprint(whole)[0], lost


def test_the_seed_and_nothing_else_in_the_process_decides(
    tmp_path: Path, tiny: Any, noisy: Plan, fingerprint: Any
) -> None:
    prints = []
    for number, seed in enumerate((0, 0, 1)):
        torch.manual_seed(number)
        before = torch.get_rng_state()
        train(tiny(seed=seed), noisy, folder=tmp_path / str(number))
        assert torch.equal(torch.get_rng_state(), before)  # and the caller's generator is left alone
        prints.append(fingerprint(tmp_path / str(number)))
    assert prints[0] == prints[1]
    assert not set(prints[0]) & set(prints[2])


def test_how_often_checkpoints_are_written_changes_nothing(
    tmp_path: Path, tiny: Any, noisy: Plan, fingerprint: Any
) -> None:
    folders = [tmp_path / str(every) for every in (0, 1, 5)]
    for folder in folders:
        train(tiny(), noisy, folder=folder, checkpoint_every=int(folder.name))
    assert len({fingerprint(folder) for folder in folders}) == 1


# --- killed ---


#: Trains once for each step of the first argument, in a process of its own that dies in that step (-1: it does not);
#: prints exit codes and how the run stands. Forked before torch starts threads: importing torch takes longest.
COMMANDS = """
import os, sys
import torch._dynamo  # as training does: once for all processes
from bitplan import cli
from bitplan.lab.train import RunFolder
steps, folder = sys.argv[1:3]
for step in steps.split():
    child = os.fork()
    if not child:
        os.environ["TINY_DIES_AT"] = step
        cli.main(["train", *sys.argv[3:], "--out", folder, "--checkpoint-every", "4"])
    print("exit", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), RunFolder(folder).status(), flush=True)
"""


def train_in_processes(folder: Path, task: Path, plan: Path, *steps: int, dies_of: str = "SIGKILL") -> tuple[str, str]:
    """A line for each process, and what all wrote to stderr."""
    processes = subprocess.run(
        [sys.executable, "-c", COMMANDS, " ".join(map(str, steps)), str(folder), f"{task}:Tiny", "--plan", str(plan)],
        env={
            **os.environ,
            "PYTHONPATH": str(SRC),
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
            "TINY_DIES_OF": dies_of,
        },
        capture_output=True,
        text=True,
        check=True,
    )
    return "\n".join(line for line in processes.stdout.splitlines() if line.startswith("exit")), processes.stderr


@pytest.fixture
def plan_file(tmp_path: Path, noisy: Plan) -> Path:
    path = tmp_path / "noisy.yaml"
    noisy.save(path)
    return path


def test_killed_at_three_random_steps_it_ends_like_an_undisturbed_run(
    tmp_path: Path, tiny: Callable[..., Any], tiny_file: Path, plan_file: Path, fingerprint: Any
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(tiny(), str(plan_file), folder=whole, checkpoint_every=4)
    seed = random.SystemRandom().randrange(2**32)
    steps = sorted(random.Random(seed).sample(range(1, 24), 3))
    text = f"killed in steps {steps}, drawn with seed {seed}"
    exits, stderr = train_in_processes(parts, tiny_file, plan_file, *steps, -1)
    assert exits == "exit -9 unfinished\n" * 3 + "exit 0 finished", (text, stderr)
    assert fingerprint(parts) == fingerprint(whole), text


#: Trains a policy in a process that is killed in a step.
KILLED_POLICY = """
import os, signal, sys
from bitplan.lab.tasks.registry import find_task
from bitplan.lab.train import train
folder, plan, step, *settings = sys.argv[1:]
def kill(now):
    if now.step == int(step):
        os.kill(os.getpid(), signal.SIGKILL)
train(find_task("rl", settings), plan, folder=folder, checkpoint_every=5, on_progress=kill)
"""


def test_a_policy_that_is_killed_inside_a_rollout_s_updates_ends_like_an_undisturbed_one(
    tmp_path: Path, plan_file: Path, fingerprint: Any
) -> None:
    """Four updates use a rollout; the checkpoint follows the first of them, and episodes last longer than a rollout."""
    pytest.importorskip("gymnasium")
    settings = ("environments=2", "rollout=8", "batch=8", "epochs=2", "features=8", "steps=14", "evaluate_every=7")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(find_task("rl", settings), str(plan_file), folder=whole, checkpoint_every=5)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_POLICY, str(parts), str(plan_file), "8", *settings],
        env={**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": str(torch.get_num_threads())},
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == -9, killed.stderr
    assert RunFolder(parts).status() == "unfinished"
    resumed: list[int] = []
    task = find_task("rl", settings)
    train(task, str(plan_file), folder=parts, checkpoint_every=5, on_progress=lambda now: resumed.append(now.step))
    assert min(resumed) == 6
    assert fingerprint(parts) == fingerprint(whole)
    assert max(task.memory["environments"]["elapsed"]) > 8  # an episode that began before the rollout


def test_killed_between_the_two_files_of_a_checkpoint(
    tmp_path: Path, tiny: Any, noisy: Plan, fingerprint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends there in reality; here an error does the same to the files."""

    class Killed(BaseException):
        pass

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(tiny(), noisy, folder=whole)

    def die(path: Path, text: str) -> None:
        if path.name == "step-00000012.json":
            raise Killed
        write(path, text)

    from bitplan.lab.train import checkpoint

    write = checkpoint.write_durably
    monkeypatch.setattr(checkpoint, "write_durably", die)
    with pytest.raises(Killed):
        train(tiny(), noisy, folder=parts)
    monkeypatch.setattr(checkpoint, "write_durably", write)
    assert (parts / "checkpoints" / "step-00000012.safetensors").exists()
    assert max(line["step"] for line in RunFolder(parts).metrics()) == 12
    train(tiny(), noisy, folder=parts)
    assert fingerprint(parts) == fingerprint(whole)


@pytest.mark.parametrize("damage", ["tensors", "json", "gone", "swapped"])
def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, tiny: Any, noisy: Plan, fingerprint: Any, damage: str
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(tiny(), noisy, folder=whole)
    train(tiny(), noisy, folder=parts, **stop_after(13))
    kept = parts / "checkpoints"
    assert sorted(path.name for path in kept.iterdir()) == [
        f"step-{step:08d}.{ending}" for step in (12, 13) for ending in ("json", "safetensors")
    ]
    newest = kept / "step-00000013.safetensors"
    if damage == "tensors":
        data = bytearray(newest.read_bytes())
        data[-1] ^= 1
        newest.write_bytes(data)
    elif damage == "json":
        text = newest.with_suffix(".json").read_text()
        newest.with_suffix(".json").write_text(text[: len(text) // 2])
    elif damage == "gone":
        newest.unlink()
    else:
        newest.write_bytes((kept / "step-00000012.safetensors").read_bytes())
    with pytest.warns(BitplanWarning, match="step-00000013.* The checkpoint of step 12 is used"):
        train(tiny(), noisy, folder=parts)
    assert fingerprint(parts) == fingerprint(whole)


def test_without_any_whole_checkpoint_it_starts_anew(tmp_path: Path, tiny: Any, noisy: Plan, fingerprint: Any) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(tiny(), noisy, folder=whole)
    train(tiny(), noisy, folder=parts, **stop_after(5))
    (parts / "checkpoints" / "step-00000005.json").write_text("{}")
    with pytest.warns(BitplanWarning, match="No checkpoint is whole: the run starts again at step 0"):
        train(tiny(), noisy, folder=parts)
    assert fingerprint(parts) == fingerprint(whole)


@pytest.mark.parametrize("version", [1, 2])
def test_a_checkpoint_whose_numbers_were_edited_is_passed_over(tmp_path: Path, tiny: Any, version: int) -> None:
    """Only version 2 has a checksum of its JSON; a version 1 without one is read as it is."""
    train(tiny(), folder=tmp_path / "run", **stop_after(13))
    file = tmp_path / "run" / "checkpoints" / "step-00000013.json"
    content = json.loads(file.read_text())
    content["bitplan_checkpoint"] = version
    if version == 1:
        del content["json_sha256"], content["run"]
    content["state"]["optimizer"]["param_groups"][0]["momentum"] = 0.8
    file.write_text(json.dumps(content))
    if version == 1:
        assert train(tiny(), folder=tmp_path / "run").status == "finished"
        return
    with pytest.warns(BitplanWarning, match="step-00000013.json is damaged.*step 12 is used"):
        train(tiny(), folder=tmp_path / "run")


@pytest.mark.parametrize(("change", "token"), [({"seed": 1}, "seed 1, not 0"), ({"lr": 0.5}, "lr=0.5, not 0.1")])
@pytest.mark.parametrize("is_old", [False, True])
def test_the_checkpoint_of_another_run_is_refused(
    tmp_path: Path, tiny: Any, change: dict[str, Any], token: str, is_old: bool
) -> None:
    if is_old and "lr" in change:
        pytest.skip("checkpoints of version 1 record the seed only")
    own, other = tmp_path / "own", tmp_path / "other"
    train(tiny(), folder=own, **stop_after(7))
    settings = [f"{key}={value}" for key, value in change.items() if key != "seed"]
    train(tiny(*settings, seed=change.get("seed", 0)), folder=other, **stop_after(13))
    for file in (other / "checkpoints").iterdir():
        if is_old and file.suffix == ".json":
            content = json.loads(file.read_text()) | {"bitplan_checkpoint": 1}
            del content["run"], content["json_sha256"]
            file.write_text(json.dumps(content))
        shutil.copy(file, own / "checkpoints")
    with pytest.raises(RunError, match=token):
        train(tiny(), folder=own)


def test_a_run_file_whose_settings_were_edited_does_not_fit_its_checkpoints(tmp_path: Path, tiny: Any) -> None:
    train(tiny(), folder=tmp_path / "run", **stop_after(13))
    file = tmp_path / "run" / "run.json"
    content = json.loads(file.read_text())
    content["settings"]["lr"] = 0.2
    file.write_text(json.dumps(content))
    with pytest.raises(RunError, match=r"lr=0\.1, not 0\.2"):
        train(tiny("lr=0.2"), folder=tmp_path / "run")  # as bitplan train --resume reads it


def test_a_missing_checkpoint_folder_is_made_again(tmp_path: Path, tiny: Any, noisy: Plan, fingerprint: Any) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(tiny(), noisy, folder=whole)
    train(tiny(), noisy, folder=parts, **stop_after(8))
    shutil.rmtree(parts / "checkpoints")
    train(tiny(), noisy, folder=parts)
    assert fingerprint(parts) == fingerprint(whole)


def test_checkpoints_removed_while_training_are_not_called_whole(tmp_path: Path, tiny: Any) -> None:
    def remove(now: Any) -> None:
        if now.step == 8:
            shutil.rmtree(tmp_path / "run" / "checkpoints")

    with pytest.raises(DiskError, match="The checkpoint of step 6 is gone") as reported:
        train(tiny(), folder=tmp_path / "run", on_progress=remove)
    assert "is whole" not in str(reported.value)


def test_lost_lines_of_the_metrics_are_said(tmp_path: Path, tiny: Any) -> None:
    train(tiny(), folder=tmp_path / "run", **stop_after(13))
    file = tmp_path / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[2:]))  # of step 1, and the evaluation of step 6
    with pytest.warns(BitplanWarning, match="metrics.jsonl has lost 2 lines from step 1 on"):
        train(tiny(), folder=tmp_path / "run")


def test_the_cost_that_is_shown_after_a_resume_is_that_of_the_steps_made(tmp_path: Path, tiny: Any) -> None:
    def costs(folder: Path, *stops: int) -> dict[int, float]:
        shown: dict[int, float] = {}
        for stop in (*stops, 24):
            train(
                tiny(),
                folder=folder,
                on_progress=lambda now: shown.update({now.step: now.cost}),
                stop=lambda stop=stop: bool(shown) and max(shown) >= stop,
            )
        return shown

    whole, parts = costs(tmp_path / "whole"), costs(tmp_path / "parts", 18)
    assert {step: cost for step, cost in parts.items() if step > 20} == pytest.approx(
        {step: cost for step, cost in whole.items() if step > 20}
    )


def test_a_native_run_goes_on_with_the_crossover_that_it_was_started_with(
    tmp_path: Path, tiny: Any, fingerprint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another table would send other products to the units, which accumulate in another order."""
    int8 = {"format": "int8", "scale": "tensor"}
    plan = Plan.from_dict({"version": 1, "rules": [{"match": "*", "op": "linear", "x": int8, "w": int8, "dy": int8}]})
    module = import_module("bitplan.executions.native.execution")
    monkeypatch.setattr(Int8Backend, "is_available", lambda self, device: device.type == "cpu")

    def measured(min_macs: int) -> None:
        terms = NativeTerms(min_macs_by_backend=(("int8", min_macs),))
        monkeypatch.setattr(module, "load_crossover", lambda device, dtype: terms)

    def run(folder: Path, **options: Any) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*are emulated", BitplanWarning)
            train(tiny(), plan, folder=folder, execution="native", **options)

    whole, emulated, parts, old = (tmp_path / name for name in ("whole", "emulated", "parts", "old"))
    measured(0)
    run(whole)
    run(parts, **stop_after(7))
    run(old, **stop_after(7))
    measured(1 << 40)
    run(emulated)
    assert fingerprint(emulated)[0] != fingerprint(whole)[0]  # the table decides the bits
    run(parts)
    assert fingerprint(parts) == fingerprint(whole)
    assert RunFolder(parts).config().crossover == {"min_macs": {"int8": 0}, "min_channels": {}}
    content = json.loads((old / "run.json").read_text())
    del content["crossover"]
    (old / "run.json").write_text(json.dumps(content))
    for file in (old / "checkpoints").glob("*.json"):
        content = json.loads(file.read_text()) | {"bitplan_checkpoint": 1}
        del content["json_sha256"], content["run"]
        file.write_text(json.dumps(content))
    with pytest.warns(BitplanWarning, match="does not record from which size on"):
        run(old)


def test_a_signal_stops_after_the_step_and_says_how_to_go_on(
    tmp_path: Path, tiny: Any, tiny_file: Path, plan_file: Path, fingerprint: Any
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    exits, stderr = train_in_processes(parts, tiny_file, plan_file, 9, dies_of="SIGINT")
    assert exits == "exit 130 stopped", stderr
    summary = RunFolder(parts).summary()
    assert summary is not None
    assert (summary.status, summary.step) == ("stopped", 10)
    assert f"stopped on request; go on with: bitplan train --resume {parts}" in stderr
    # As many steps without a signal give the same state.
    undisturbed = train(tiny(), str(plan_file), folder=whole, checkpoint_every=4, **stop_after(10))
    assert undisturbed.step == 10
    assert fingerprint(parts) == fingerprint(whole)


def test_a_task_that_has_changed_since_is_a_sentence(tmp_path: Path, tiny: Any) -> None:
    train(tiny(), folder=tmp_path / "run", **stop_after(3))
    wider = tiny()
    wider.model = lambda: torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.Linear(20, 3))
    with pytest.raises(
        RunError, match=r"checkpoint of step 3 does not fit .*: the task has changed since, so train it anew"
    ):
        train(wider, folder=tmp_path / "run")
    assert train(tiny(), folder=tmp_path / "run").status == "finished"  # and nothing was lost


@dataclass(frozen=True)
class OddSettings(Settings):
    widths: tuple[int, ...] = (3, 4)
    limit: float = float("inf")
    data: Path = Path("x")
    optimizer: str = "sgd"


def test_settings_that_json_writes_otherwise_are_known_again(tmp_path: Path, tiny: Any) -> None:
    odd = OddSettings(steps=6, batch=8, evaluate_every=6)
    for stops in (True, False):
        task = tiny()
        task.settings = odd
        train(task, folder=tmp_path / "run", stop=lambda stops=stops: stops)
    assert RunFolder(tmp_path / "run").status() == "finished"


def test_other_threads_are_remarked_upon(tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tiny(), folder=tmp_path / "run", **stop_after(3))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    with pytest.warns(BitplanWarning, match="resumed with 77: its last bits may differ"):
        train(tiny(), folder=tmp_path / "run")
