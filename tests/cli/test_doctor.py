"""bitplan doctor, as a user meets it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitplan.plans import Plan

Bitplan = Callable[..., Any]
TINY = Path(__file__).parents[1] / "train" / "tiny_task.py"
EVIL = 'from pathlib import Path\nPath("executed").touch()\n'
PLANTED = """
version: 1
rules:
- {match: "*", op: linear, x: {format: int8, scale: tensor}, w: {format: int8, scale: tensor}}
- {match: "4", op: linear, dgrad.dy: e2m1}
"""


@pytest.fixture
def run(bitplan: Bitplan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(TINY.read_text())
    Path("planted.yaml").write_text(PLANTED)
    options = ("--plan", "planted.yaml", "--set", "steps=30", "--out", "run")
    assert bitplan("train", "own.py:Tiny", *options).code == 0
    return Path("run")


def test_the_culprit_the_paragraph_and_the_plan(bitplan: Bitplan, run: Path) -> None:
    ran = bitplan("doctor", run, "--task", "own.py:Tiny", "-o", "plans/mended.yaml")
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert lines[0].split()[0] == "replay"
    assert "The cause is 4/linear.0:dgrad.dy (e2m1), in the backward pass" in lines[-1]
    assert "Verified by replay" in lines[-1]
    command = "bitplan train own.py:Tiny --plan plans/mended.yaml --seed 0 --set steps=30"
    assert ran.err == f"bitplan: wrote plans/mended.yaml: train under it with: {command}\n"
    mended = Plan.load("plans/mended.yaml")
    assert mended.decide("4", "linear.0")["dgrad.dy"].quantizer is not None
    assert bitplan("plan", "check", "plans/mended.yaml", "own.py:Tiny").code in (0, 2)
    assert bitplan("train", "own.py:Tiny", "--plan", "plans/mended.yaml", "--set", "steps=3").code == 0


def test_json(bitplan: Bitplan, run: Path) -> None:
    ran = bitplan("doctor", run, "--task", "own.py:Tiny", "--json", "--steps", "30")
    assert ran.code == 0
    assert (ran.json["cause"], ran.json["culprits"][0]["site"]) == ("plan", "4/linear.0:dgrad.dy")
    assert ran.json["replays"][0]["change"] == "the plan as it is"
    assert ran.json["plan"]["version"] == 1


def test_a_run_folder_does_not_choose_the_code_to_run(bitplan: Bitplan, run: Path) -> None:
    (run / "evil.py").write_text(EVIL + TINY.read_text())
    content = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**content, "task_source": "run/evil.py:Tiny", "task_sha256": None}))
    ran = bitplan("doctor", run)
    assert not Path("executed").exists()
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1
    assert ran.err.endswith("bitplan doctor run --task run/evil.py:Tiny\n")


def test_a_task_file_that_changed_is_refused_before_it_runs(bitplan: Bitplan, run: Path) -> None:
    Path("own.py").write_text(EVIL + TINY.read_text())
    ran = bitplan("doctor", run, "--task", "own.py:Tiny")
    assert (ran.code, Path("executed").exists()) == (2, False)
    assert "SHA-256" in ran.err


def test_no_plan_is_written_where_none_mends_it(bitplan: Bitplan, run: Path) -> None:
    ran = bitplan("doctor", run, "--task", "own.py:Tiny", "--tolerance", "0.99", "-o", "mended.yaml")
    assert ran.code == 0
    assert "mended.yaml was not written" in ran.err
    assert not Path("mended.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(("nowhere",), "nowhere"), (("run", "--at", "99", "--task", "own.py:Tiny"), "99")],
)
def test_errors_are_one_sentence(bitplan: Bitplan, run: Path, arguments: tuple[str, ...], word: str) -> None:
    ran = bitplan("doctor", *arguments)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert word in ran.err
