"""bitplan train, as a user meets it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitplan.lab.train import RunFolder

Bitplan = Callable[..., Any]
TINY = Path(__file__).parents[1] / "train" / "tiny_task.py"
TASK = f"{TINY}:Tiny"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_run_in_a_folder_of_its_own(bitplan: Bitplan) -> None:
    ran = bitplan("train", TASK, "--plan", "bf16-all")
    assert ran.code == 0
    assert "saves neither memory nor time" in ran.err
    assert len(ran.err.splitlines()) == 1
    *steps, last = ran.out.splitlines()
    assert steps[0].startswith("step 1/24: loss ")
    assert steps[-1].startswith("step 24/24: loss ")
    assert all(
        word in steps[-1] for word in (", accuracy ", " bits, cost ", "iB")
    )  # the process holds what tests before it did
    assert last.startswith("tiny, bf16-all, seed 0: accuracy ")
    assert last.endswith("; all of it in runs/tiny-bf16-all-s0")
    assert RunFolder("runs/tiny-bf16-all-s0").status() == "finished"
    assert bitplan("train", TASK, "--plan", "bf16-all").code == 0  # a second one gets a folder of its own
    assert sorted(path.name for path in Path("runs").iterdir()) == ["tiny-bf16-all-s0", "tiny-bf16-all-s0-2"]


def test_json_is_what_came_of_it(bitplan: Bitplan) -> None:
    ran = bitplan("train", TASK, "--set", "steps=5", "--seed", "3", "--out", "mine", "--json")
    assert ran.code == 0
    assert (ran.json["folder"], ran.json["task"], ran.json["plan"], ran.json["seed"]) == ("mine", "tiny", None, 3)
    assert (ran.json["status"], ran.json["step"]) == ("finished", 5)
    assert ran.json["command"] == f"bitplan train {TASK} --seed 3 --set steps=5"
    assert ran.json["cost"]["relative_to_fp32"] == 1.0
    assert "step 5/5" in ran.err
    assert ran.json["metrics"] == json.loads(Path("mine/summary.json").read_text())["metrics"]


def test_a_dry_run_says_what_would_run_and_writes_nothing(bitplan: Bitplan) -> None:
    ran = bitplan("train", TASK, "--plan", "fp8-linear", "--dry-run", "--set", "steps=7")
    assert (ran.code, ran.err) == (0, "")
    for text in (
        "tiny, fp8-linear, seed 0",
        "steps=7",
        "fprop.x",
        "e4m3",
        "% of FP32's",
        "runs/tiny-fp8-linear-s0 (new)",
    ):
        assert text in ran.out
    assert list(Path().iterdir()) == []
    output = bitplan("train", TASK, "--plan", "fp8-linear", "--dry-run", "--json").json
    assert output["dry_run"] is True
    assert output["cost"]["steps"] == 24
    assert {"role": "fprop.x", "format": "e4m3 tensor", "tensors": 2} in output["formats"]


def test_the_same_out_goes_on_and_then_has_nothing_to_do(bitplan: Bitplan, monkeypatch: pytest.MonkeyPatch) -> None:
    from bitplan.lab.train.loop import StopRequest

    requests = StopRequest.__call__
    monkeypatch.setattr(StopRequest, "__call__", lambda self: True)
    stopped = bitplan("train", TASK, "--out", "mine")
    monkeypatch.setattr(StopRequest, "__call__", requests)
    assert stopped.code == 128
    assert stopped.err == f"bitplan: stopped on request; go on with: bitplan train --resume mine --task {TASK}\n"
    assert "would go on from step 1" in bitplan("train", TASK, "--out", "mine", "--dry-run").out
    rest = bitplan("train", TASK, "--out", "mine")
    assert rest.code == 0
    assert "step 1/24" not in rest.out
    again = bitplan("train", TASK, "--out", "mine")
    assert again.code == 0
    assert again.err == "bitplan: mine holds this run already, finished: nothing was trained.\n"


def test_resuming_takes_everything_from_the_folder(bitplan: Bitplan, monkeypatch: pytest.MonkeyPatch) -> None:
    from bitplan.lab.train.loop import StopRequest

    Path("own.yaml").write_text("version: 1\nextends: bf16-all\nrules:\n- {match: '4', keep: true}\n")
    options = ("--plan", "own.yaml", "--seed", 2, "--set", "steps=12", "--set", "lr=0.03")
    bitplan("train", TASK, *options, "--out", "whole")
    requests = StopRequest.__call__
    monkeypatch.setattr(StopRequest, "__call__", lambda self: True)
    bitplan("train", TASK, *options, "--out", "parts")
    monkeypatch.setattr(StopRequest, "__call__", requests)
    Path("own.yaml").unlink()  # the run keeps its plan
    assert bitplan("train", "--resume", "parts", "--task", TASK).code == 0
    for name in ("metrics.jsonl", "model.safetensors", "run.json"):
        assert Path("whole", name).read_bytes() == Path("parts", name).read_bytes()
    ran = bitplan("train", TASK, "--resume", "parts")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("bitplan: --resume takes everything from the run's folder")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a task to train, such as digits"),
        (["digitz"], "there is no task 'digitz'; did you mean digits"),
        ([TASK, "--plan", "fp9"], "there is no preset and no file 'fp9'"),
        ([TASK, "--set", "stepz=3"], "has no setting 'stepz'; did you mean steps?"),
        ([TASK, "--set", "steps"], "'steps' sets nothing: write key=value"),
        ([TASK, "--set", "steps=0"], "steps is 0; it must be at least 1"),
        ([TASK, "--device", "toaster"], "there is no device 'toaster'"),
        ([TASK, "--execution", "magic"], "execution 'magic'"),
        ([TASK, "--shard", "fsdp"], "--shard fsdp is for several processes: start them as torchrun"),
        ([TASK, "--tensor-parallel", "2"], "1 processes cannot be grouped by --tensor-parallel 2"),
        ([TASK, "--out", TINY], "cannot make the folder"),
        ([TASK, "--order", "smallest"], "say how --assign is done: give that, too, or drop them."),
        ([TASK, "--plan", "bf16-all", "--formats", "paper"], "say how --assign is done"),
        ([TASK, "--promotion", "0"], "say how --assign is done"),
        (["--resume", "nowhere", "--order", "random"], "--resume takes everything from the run's folder"),
        (["--resume", "nowhere"], "nowhere is not a run folder (it has no run.json)"),
        (["no_such.py:Task"], "there is no file no_such.py"),
    ],
)
def test_a_mistake_is_one_sentence_on_stderr(bitplan: Bitplan, arguments: list[Any], message: str) -> None:
    ran = bitplan("train", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
    assert ran.err.startswith("bitplan: ")
    assert ran.err.count("\n") == 1
    assert not Path("runs").exists() or not any(Path("runs").iterdir())


def test_a_run_of_several_processes_resumes_under_torchrun_only(bitplan: Bitplan) -> None:
    assert bitplan("train", TASK, "--set", "steps=2", "--out", "two").code == 0
    run_file = Path("two/run.json")
    run_file.write_text(run_file.read_text().replace('"sharding": "none"', '"sharding": "fsdp=2"'))
    ran = bitplan("train", "--resume", "two", "--task", TASK)
    assert ran.code == 2
    assert "start it as torchrun --nproc-per-node 2 -m bitplan train --resume two" in ran.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_library\n", "cannot be run: ModuleNotFoundError: No module named 'no_such_library' (line 1)."),
        ("def broken(:\n", "cannot be run: SyntaxError"),
        ("x = 1\n", "has 0 tasks (none)"),
    ],
)
def test_a_task_file_that_fails_to_import_is_a_sentence(bitplan: Bitplan, text: str, message: str) -> None:
    Path("own.py").write_text(text)
    ran = bitplan("train", "own.py")
    assert (ran.code, ran.out) == (2, "")
    assert f"own.py {message}" in ran.err
    assert ran.err.count("\n") == 1


def test_a_task_that_fails_in_training_names_its_line(bitplan: Bitplan) -> None:
    text = TINY.read_text().replace(
        "        return nn.functional.cross_entropy(output, target)", "        return output @ target"
    )
    Path("own.py").write_text(text)
    line = 1 + text.splitlines().index("        return output @ target")
    ran = bitplan("train", "own.py:Tiny")
    assert ran.code == 2
    assert ran.err.startswith("bitplan: own.py:Tiny failed in training: RuntimeError: ")
    assert ran.err.endswith(f"(line {line}).\n")


def test_a_run_that_diverges_exits_with_1_and_names_the_site(bitplan: Bitplan) -> None:
    text = TINY.read_text().replace(
        "return self.points[chosen]", "return self.points[chosen] * (1e30 if step == 8 else 1)"
    )
    Path("own.py").write_text(text)
    Path("own.yaml").write_text("version: 1\nrules:\n- {match: '0', activation: fp16}\n")
    ran = bitplan("train", "own.py:Tiny", "--plan", "own.yaml", "--json")
    assert ran.code == 1
    assert (ran.json["status"], ran.json["step"], ran.json["site"]) == ("diverged", 8, "0/linear.0:activation")
    assert ran.json["loss"] == "NaN"
    assert "looking for what broke first" in ran.err
    assert "bitplan: the run diverged: step 9 broke at 0/linear.0:activation (fp16" in ran.err


def test_a_damaged_checkpoint_is_remarked_upon(bitplan: Bitplan) -> None:
    bitplan("train", TASK, "--out", "mine")
    Path("mine/summary.json").unlink()
    Path("mine/checkpoints/step-00000024.json").write_text("{")
    ran = bitplan("train", TASK, "--out", "mine")
    assert ran.code == 0
    assert "step-00000024.json cannot be read (JSONDecodeError). The checkpoint of step 18 is used" in ran.err
    assert ran.err.count("\n") == 1


def test_the_plan_decides_the_execution_unless_the_command_does(bitplan: Bitplan) -> None:
    Path("packed.yaml").write_text(
        'version: 1\nexecution: packed\nquantizers: {q: {format: e4m3}}\nrules: [{match: "*", activation: q}]\n'
    )
    arguments = ("train", TASK, "--plan", "packed.yaml", "--set", "steps=3", "--out")
    ran = bitplan(*arguments, "own", "--json")
    assert (ran.code, RunFolder("own").config().execution) == (0, "packed")
    assert "--execution" not in ran.json["command"]
    ran = bitplan(*arguments, "other", "--execution", "emulate", "--json")
    assert (ran.code, RunFolder("other").config().execution) == (0, "emulate")
    assert "--execution emulate" in ran.json["command"]
    dry = bitplan(*arguments, "third", "--dry-run")
    assert "packed on cpu" in dry.out
    # A run keeps its recorded execution, whatever the plan says.
    for folder in ("own", "other"):
        recorded = RunFolder(folder).config().execution
        assert bitplan("train", "--resume", folder, "--task", TASK).code == 0
        assert RunFolder(folder).config().execution == recorded
