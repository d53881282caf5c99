"""Faults that a user meets on the command line end in one sentence and an exit code, never in a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Ran

import bitplan as package
from bitplan.cli import CLOSED_OUTPUT, USER_ERROR
from bitplan.lab.train import RunFolder

Run = Callable[..., Ran]
LONG = "n" * 300
#: A terminal's title, a colour, and the end of a line that hides what stood before.
ESCAPES = "\x1b]0;title\x07\x1b[31mred\r"


def environment(**more: str) -> dict[str, str]:
    source = str(Path(package.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", **more}


def process(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    more = options.pop("environment", {})
    command = [sys.executable, "-m", "bitplan", *arguments]
    return subprocess.Popen(command, env=environment(**more), stderr=subprocess.PIPE, **options)


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", f"{LONG}.py:Task"),
        ("train", "digits", "--plan", LONG),
        ("train", "digits", "--out", LONG),
        ("train", "--resume", LONG),
        ("runs", LONG),
        ("report", LONG),
        ("sites", f"{LONG}.py"),
        ("train", "digits", "--seed", "99999999999999999999"),
        ("train", "digits", "--loss-scale", "1e300"),
    ],
    ids=lambda arguments: " ".join(arguments)[:40],
)
def test_a_fault_is_one_sentence(bitplan: Run, arguments: tuple[str, ...]) -> None:
    ran = bitplan(*arguments)
    assert ran.code == USER_ERROR
    assert ran.err.startswith("bitplan: ")
    assert ran.err.count("\n") == 1


def test_folders_that_may_not_be_read_are_passed_over(
    bitplan: Run, tmp_path: Path, write_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "runs" / "good")
    (tmp_path / "runs" / "secret").mkdir()
    iterdir = Path.iterdir

    def refuse(path: Path) -> Any:
        if path.name == "secret":
            raise PermissionError(13, "Permission denied", str(path))
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    for command in (("runs", tmp_path / "runs"), ("report", tmp_path / "runs", "-o", tmp_path / "page.html")):
        ran = bitplan(*command)
        assert ran.code == 0, ran.err


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("run.json", '{"bitplan_run": 1, "settings": {}}'),
        ("run.json", "[" * 100_000),
        ("run.json", '{"bitplan_run": 1, "seed": ' + "9" * 400 + "}"),
        ("summary.json", '{"status": "finished"}'),
        ("summary.json", "\udcff"),
    ],
    ids=["incomplete", "deep", "long", "summary", "not UTF-8"],
)
def test_a_bad_run_does_not_hide_the_good_ones(
    bitplan: Run, tmp_path: Path, write_run: Any, file: str, text: str
) -> None:
    write_run(tmp_path / "runs" / "bad")
    write_run(tmp_path / "runs" / "good")
    (tmp_path / "runs" / "bad" / file).write_text(text, errors="surrogateescape")
    ran = bitplan("runs", tmp_path / "runs")
    assert ran.code == 0
    assert "good" in ran.out
    assert f"{file} is damaged" in ran.err
    statuses = {Path(record["folder"]).name: record["status"] for record in bitplan("runs", tmp_path, "--json").json}
    assert statuses == {"bad": "unreadable", "good": "finished"}


@pytest.mark.parametrize("site", [{"format": ""}, {"format": []}, {"overflow": [1]}, {"rule": {}}])
def test_odd_sites_do_not_stop_a_report(bitplan: Run, tmp_path: Path, write_run: Any, site: dict[str, Any]) -> None:
    write_run(tmp_path / "run", plan="p", sites=[{"site": "a/linear.0:weight", "role": "weight", **site}])
    ran = bitplan("report", tmp_path / "run", "-o", tmp_path / "page.html")
    assert ran.code == 0, ran.err


@pytest.mark.parametrize("key", ["plan", "task", "command", "metric"])
def test_escape_sequences_of_a_run_folder_reach_no_terminal(
    bitplan: Run, tmp_path: Path, write_run: Any, key: str
) -> None:
    value = {"name": ESCAPES, "better": "higher", "trivial": 0.1} if key == "metric" else ESCAPES
    write_run(tmp_path / "run", **{key: value})
    (tmp_path / "run" / "summary.json").unlink()
    for command in (
        ("runs", tmp_path),
        ("report", tmp_path, "-o", tmp_path / "page.html"),
        ("train", "--resume", tmp_path / "run"),
    ):
        ran = bitplan(*command)
        assert not set("\x1b\x07\r") & set(ran.out + ran.err)
    summary = {"status": ESCAPES}
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "run" / "run.json").write_text(json.dumps({"bitplan_run": ESCAPES}))
    ran = bitplan("runs", tmp_path)
    assert not set("\x1b\x07\r") & set(ran.out + ran.err)


def test_an_output_that_nobody_reads_stops_a_run_with_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ran = process(
        *("train", "digits", "--set", "steps=100000", "--set", "batch=4", "--out", str(folder)),
        stdout=subprocess.PIPE,
    )
    assert ran.stdout is not None
    ran.stdout.close()
    try:
        _, reported = ran.communicate(timeout=120)
    finally:
        ran.kill()
    assert ran.returncode == CLOSED_OUTPUT, reported.decode()
    assert RunFolder(folder).status() == "stopped"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("option", [(), ("--json",)])
def test_an_output_that_cannot_be_written_is_a_sentence(option: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        ran = process("plan", "list", *option, stdout=full)
        _, reported = ran.communicate(timeout=120)
    assert ran.returncode == USER_ERROR
    assert reported.decode().startswith("bitplan: cannot write the output")
    assert "Traceback" not in reported.decode()


def test_a_terminal_without_unicode_gets_escapes(tmp_path: Path, write_run: Any) -> None:
    write_run(tmp_path / "run")
    ran = process(
        *("report", str(tmp_path / "run"), "-o", str(tmp_path / "page.html")),
        stdout=subprocess.PIPE,
        environment={"PYTHONIOENCODING": "ascii"},
    )
    shown, reported = ran.communicate(timeout=120)
    assert ran.returncode == 0, reported.decode()
    assert b"The page: " in shown
