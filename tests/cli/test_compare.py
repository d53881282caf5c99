from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Bitplan = Callable[..., Any]
TINY = f"{Path(__file__).parents[1] / 'train' / 'tiny_task.py'}:Tiny"


def test_plans_are_compared_in_a_folder_that_the_same_command_finds_again(
    bitplan: Bitplan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    requests = ("compare", TINY, "--plans", "fp32", "int8-all", "bf16-all", "--seeds", 2, "--set", "steps=6")
    ran = bitplan(*requests)
    assert ran.code == 0
    folder = Path("runs/compare-tiny_task-fp32-int8-all-bf16-all-steps=6")
    assert sorted(item.name for item in folder.glob("*-s?")) == [
        *("bf16-all-s0", "bf16-all-s1", "fp32-s0", "fp32-s1", "int8-all-s0", "int8-all-s1"),
    ]
    assert "[6/6] bf16-all, seed 1: accuracy " in ran.out
    assert "On tiny (2 seeds, 6 steps), " in ran.out
    assert ran.out.endswith(f"The runs are in {folder}. A page about them:\nbitplan report {folder}\n")
    before = {file: file.stat().st_mtime_ns for file in folder.glob("*/summary.json")}
    again = bitplan(*requests)
    assert again.out.splitlines()[6:] == ran.out.splitlines()[6:]
    assert bitplan(*requests, "--margin", 0.5).out.endswith(f"bitplan report {folder} --margin 0.5\n")
    # Nothing was made again.
    assert {file: file.stat().st_mtime_ns for file in folder.glob("*/summary.json")} == before


def test_compare_as_json(bitplan: Bitplan, tmp_path: Path) -> None:
    ran = bitplan("compare", TINY, "--suite", "static", "--set", "steps=6", "-o", tmp_path / "all", "--json")
    (experiment,) = ran.json["experiments"]
    assert [plan["plan"] for plan in experiment["plans"]] == ["FP32", "BF16", "8 bits", "6 bits", "4 bits", "2 bits"]
    assert experiment["runs"][2]["command"] == f"bitplan train {TINY} --plan int8-all --seed 0 --set steps=6"
    assert "[6/6] 2 bits" in ran.err
    assert {plan["verdict"] for plan in experiment["plans"]} <= {"reference", "undecided", "fails"}  # one seed


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        (("digits",), "name what to compare: --plans with files or presets, or --suite static or cpt"),
        (("digits", "--suite", "static", "--plans", "a"), "give --plans or --suite, not both."),
        (("digits", "--suite", "nothing"), "there is no suite 'nothing'"),
        (("digits", "--plans", "int8-al"), "did you mean int8-all"),
        (("digit", "--suite", "static"), "there is no task 'digit'"),
        (("digits", "--plans", "fp32", "--margin", "2"), "the margin is 2; it must be a share between 0 and 1"),
        (("digits", "--suite", "static", "--gpus-per-run", "1"), "--gpus-per-run is for runs on a cluster"),
        (("digits", "--suite", "static", "--jobs", "2", "--cluster", "auto"), "drop --jobs or --cluster"),
    ],
)
def test_mistakes_are_one_sentence(
    bitplan: Bitplan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requests: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = bitplan("compare", *requests)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_stops_cleanly_and_the_same_command_goes_on(bitplan: Bitplan, tmp_path: Path) -> None:
    """Ctrl-C reaches all processes of a terminal's group at once."""
    folder = tmp_path / "all"
    requests = ["compare", TINY, "--plans", "fp32", "int8-all", "--set", "steps=400", "--set", "evaluate_every=400"]
    requests += ["--out", str(folder)]
    process = subprocess.Popen(
        [sys.executable, "-m", "bitplan", *requests, "--jobs", "2"],
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    journals = [folder / name / "metrics.jsonl" for name in ("fp32-s0", "int8-all-s0")]
    while not all(journal.exists() and journal.stat().st_size > 0 for journal in journals):
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130
    assert "bitplan: stopped with" in said
    assert "the same command continues" in said
    assert "Traceback" not in said
    for name in ("fp32-s0", "int8-all-s0"):
        assert (folder / name / "summary.json").exists()
    done = bitplan(*requests, "--json")
    assert done.code == 0
    assert [run["step"] for run in done.json["experiments"][0]["runs"]] == [400, 400]
