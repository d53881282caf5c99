"""A run folder never chooses the code that is run: a task that is a file is named by the user, and is the same file."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import py_compile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitplan.lab.train import RunFolder

Bitplan = Callable[..., Any]
TINY = Path(__file__).parents[1] / "train" / "tiny_task.py"
EVIL = 'from pathlib import Path\nPath("executed").touch()\n'


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def stopped(bitplan: Bitplan, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of own.py:Tiny, stopped after its first step."""
    from bitplan.lab.train.loop import StopRequest

    Path("own.py").write_text(TINY.read_text())
    with monkeypatch.context() as patch:
        patch.setattr(StopRequest, "__call__", lambda self: True)
        assert bitplan("train", "own.py:Tiny", "--out", "run").code == 128
    return Path("run")


def rewrite(folder: Path, **facts: Any) -> None:
    """Change what run.json says; None removes a key."""
    content = json.loads((folder / "run.json").read_text())
    content = {key: value for key, value in {**content, **facts}.items() if value is not None or key not in facts}
    (folder / "run.json").write_text(json.dumps(content))


@pytest.mark.parametrize("options", [(), ("--dry-run",), ("--json",)])
def test_a_run_folder_that_names_a_file_does_not_run_it(bitplan: Bitplan, stopped: Path, options: tuple[str]) -> None:
    (stopped / "evil.py").write_text(EVIL + TINY.read_text())
    rewrite(stopped, task_source="run/evil.py:Tiny", task_sha256=None)
    ran = bitplan("train", "--resume", stopped, *options)
    assert not Path("executed").exists()
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1
    assert ran.err.endswith("bitplan train --resume run --task run/evil.py:Tiny\n")


@pytest.mark.parametrize("name", ["a b.py:Tiny", "$(touch executed).py:Tiny", "own.py:Tiny; touch executed"])
def test_what_to_type_is_quoted_for_a_shell(bitplan: Bitplan, stopped: Path, name: str) -> None:
    rewrite(stopped, task_source=name)
    assert bitplan("train", "--resume", stopped).err.endswith(f"--task '{name}'\n")


@pytest.mark.parametrize("name", ["own.py:\x1b[2Jdigits", "own.py:\nbitplan: all is well", 3, ["own.py"]])
def test_a_task_that_no_command_line_names_is_a_damaged_record(bitplan: Bitplan, stopped: Path, name: Any) -> None:
    rewrite(stopped, task_source=name)
    ran = bitplan("train", "--resume", stopped)
    assert (ran.code, ran.out) == (2, "")
    token = "cannot be named" if isinstance(name, str) else "task_source must be a text"
    assert token in ran.err
    assert ran.err.count("\n") == 1
    assert "\x1b" not in ran.err


def test_no_other_reader_of_folders_runs_what_they_name(bitplan: Bitplan, stopped: Path) -> None:
    Path("got").mkdir()
    stopped.rename("got/fp32-s0")
    Path("got/evil.py").write_text(EVIL)
    rewrite(Path("got/fp32-s0"), task_source="got/evil.py:Tiny", command="bitplan train got/evil.py:Tiny")
    entry = {"label": "fp32", "plan": None, "runs": ["fp32-s0"]}
    record = {"bitplan_compare": 1, "task": "got/evil.py:Tiny", "settings": [], "plans": [entry], "seeds": [0]}
    Path("got/compare.json").write_text(json.dumps({**record, "command": "bitplan compare got/evil.py:Tiny"}))
    assert bitplan("runs", "got").code == 0
    assert bitplan("report", "got").code == 0
    ran = bitplan("compare", "own.py:Tiny", "--plans", "fp32", "--out", "got")
    assert ran.code == 2
    assert "got holds a comparison on got/evil.py:Tiny" in ran.err
    Path("got/compare.json").write_text(json.dumps({**record, "task": "own.py:Tiny", "command": ""}))
    assert (
        bitplan("compare", "own.py:Tiny", "--plans", "fp32", "--out", "got").code == 0
    )  # with the file that was named
    assert not Path("executed").exists()


def test_the_file_that_is_named_again_goes_on(bitplan: Bitplan, stopped: Path) -> None:
    digest = hashlib.sha256(Path("own.py").read_bytes()).hexdigest()
    assert RunFolder(stopped).config().task_sha256 == digest
    summary = RunFolder(stopped).summary()
    assert summary is not None
    assert str(summary.why).endswith("go on with: bitplan train --resume run --task own.py:Tiny")
    bitplan("train", "own.py:Tiny", "--out", "whole")
    Path("own.py").rename("moved.py")  # what counts is what it says
    ran = bitplan("train", "--resume", stopped, "--task", "moved.py:Tiny")
    assert (ran.code, ran.err) == (0, "")
    for name in ("metrics.jsonl", "model.safetensors", "run.json"):
        assert Path("whole", name).read_bytes() == (stopped / name).read_bytes()


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "--resume", "run", "--task", "own.py:Tiny"),
        ("train", "--resume", "run", "--task", "own.py:Tiny", "--dry-run"),
        ("train", "own.py:Tiny", "--out", "run"),
    ],
)
def test_a_file_that_has_changed_does_not_go_on(bitplan: Bitplan, stopped: Path, arguments: tuple[str]) -> None:
    then = RunFolder(stopped).config().task_sha256
    is_named_anew = "--resume" not in arguments  # the file is run to find the task, and refused before it trains
    Path("own.py").write_text(TINY.read_text() + ("" if is_named_anew else EVIL) + "# changed\n")
    now = hashlib.sha256(Path("own.py").read_bytes()).hexdigest()
    ran = bitplan(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1
    assert all(word in ran.err for word in ("own.py", str(then), now, "restore", "start a new run"))
    assert not Path("executed").exists()


def test_a_comparison_does_not_mix_two_versions_of_a_file(bitplan: Bitplan) -> None:
    Path("own.py").write_text(TINY.read_text())
    comparing = ("compare", "own.py:Tiny", "--set", "steps=2", "--out", "all")
    assert bitplan(*comparing, "--plans", "fp32", "int8-all", "--jobs", "2").code == 0
    digest = hashlib.sha256(Path("own.py").read_bytes()).hexdigest()
    assert {RunFolder(path.parent).config().task_sha256 for path in Path("all").glob("*/run.json")} == {digest}
    Path("own.py").write_text(TINY.read_text() + "# changed\n")
    ran = bitplan(*comparing, "--plans", "fp32", "int8-all", "int4-all")
    assert ran.code == 2
    assert digest in ran.err


def test_a_run_without_a_hash_goes_on_and_says_that_it_cannot_be_compared(bitplan: Bitplan, stopped: Path) -> None:
    rewrite(stopped, task_sha256=None)
    ran = bitplan("train", "--resume", stopped, "--task", "own.py:Tiny")
    assert ran.code == 0
    assert ran.err.count("\n") == 1
    assert "SHA-256" in ran.err
    assert "cannot be compared" in ran.err
    again = bitplan("train", "--resume", stopped, "--task", "own.py:Tiny")
    assert "cannot be compared" not in again.err  # nothing is left to do


def test_a_run_of_a_task_made_in_python_can_name_its_file(bitplan: Bitplan, stopped: Path) -> None:
    rewrite(stopped, task_source="tiny", task_sha256=None)
    ran = bitplan("train", "--resume", stopped)
    assert ran.code == 2
    assert ran.err.endswith("bitplan train --resume run --task FILE.py:NAME\n")
    assert bitplan("train", "--resume", stopped, "--task", "own.py:Tiny").code == 0


@pytest.mark.parametrize(
    ("recorded", "arguments", "message"),
    [
        ("own.py:Tiny", ("own.py:Tiny", "--task", "own.py:Tiny"), "--task goes with --resume"),
        ("digits", ("--resume", "run", "--task", "own.py:Tiny"), "digits, which comes with bitplan: leave out --task"),
        ("own.py:Tiny", ("--resume", "run", "--task", "digits"), "own.py:Tiny, and digits is no file"),
        ("own.py:Tiny", ("--resume", "run", "--task", "gone.py:Tiny"), "there is no file gone.py"),
        ("own.py:Tiny", ("own.py:Tiny", "--resume", "run"), "--resume takes everything from the run's folder"),
    ],
)
def test_mistakes_with_task(
    bitplan: Bitplan, stopped: Path, recorded: str, arguments: tuple[str], message: str
) -> None:
    rewrite(stopped, task_source=recorded)
    ran = bitplan("train", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
    assert ran.err.count("\n") == 1


def test_bytecode_beside_a_file_is_not_run_in_its_place(bitplan: Bitplan, stopped: Path) -> None:
    """A compiled file that claims to belong to own.py would run, unread and unhashed."""
    Path("evil.py").write_text(EVIL)
    cached = Path(importlib.util.cache_from_source("own.py"))
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile("evil.py", str(cached), invalidation_mode=mode)
    assert bitplan("train", "--resume", stopped, "--task", "own.py:Tiny").code == 0
    assert not Path("executed").exists()
