"""``bitplan measure``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bitplan.analysis.measure import Measurement

KEYS = {"product", "pass", "candidate", "median", "mean", "p99", "sqnr", "underflow", "overflow"}
TINY = f"{Path(__file__).parents[1] / 'train' / 'tiny_task.py'}:Tiny"
FEW = ("--candidate", "int8", "--candidate", "e4m3 vector")


def test_rows_in_json(bitplan: Callable[..., Any]) -> None:
    rows = bitplan("measure", TINY, *FEW, "--steps", 5, "--json").json
    assert all(set(row) >= KEYS for row in rows)
    assert {row["pass"] for row in rows} == {"fprop", "dgrad", "wgrad"}
    assert {row["candidate"] for row in rows} == {"int8 tensor", "e4m3 vector"}
    assert {(row["stage"], row["step"]) for row in rows} == {("early", 1)}
    assert bitplan("measure", TINY, *FEW, "--steps", 5, "--json").json == rows


def test_stages_a_table_and_a_file(bitplan: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "new" / "m.json"
    ran = bitplan("measure", TINY, "--stages", "--steps", 10, "-o", file)
    assert ran.code == 0
    for text in ("early: after 1 steps", "middle: after 5 steps", "late: after 10 steps", "Median backward error"):
        assert text in ran.out
    result = Measurement.load(file)
    assert [result.select(stage=stage)[0].step for stage in result.stages] == [1, 5, 10]
    assert result.command == f"bitplan measure {TINY} --stages --steps 10"
    assert result.select(stage="early")[0].median != result.select(stage="late")[0].median


def test_a_model_is_measured_as_it_is(bitplan: Callable[..., Any]) -> None:
    rows = bitplan("measure", "gpt-tiny", "-c", "e4m3", "--rows", 4, "--terms", 64, "--json").json
    assert {row["stage"] for row in rows} == {"now"}
    assert "blocks.0.attention/matmul.0" in {row["product"] for row in rows}


def test_the_formats_of_a_plan_are_measured_too(bitplan: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "m.json"
    rows = bitplan("measure", TINY, *FEW, "--plan", "int8-linear", "--steps", 5, "-o", file, "--json").json
    assert {row["candidate"] for row in rows} == {"int8 tensor", "e4m3 vector", "plan"}
    assert {row["pass"] for row in rows if row["candidate"] == "plan"} == {"fprop", "dgrad"}
    command = Measurement.load(file).command
    assert command is not None
    assert "--plan int8-linear" in command
    # What reads measurements does not take the plan for a format.
    assert bitplan("advise", TINY, "--measurement", file).code == 0
    assert bitplan("report", file, "-o", tmp_path / "page.html").code == 0
    ran = bitplan("measure", TINY, *FEW, "--plan", "packed-fp8", "--steps", 5)
    assert (ran.code, ran.err.count("\n")) == (2, 1)


def test_mistakes_are_one_sentence(bitplan: Callable[..., Any]) -> None:
    for arguments, sentence in (
        (["nothing"], "there is no built-in model or task"),
        (["gpt-tiny", "--stages"], "without data to train on"),
        ([TINY, "-c", "e4m3 sideways"], "'sideways'"),
        ([TINY, "--steps", 10**6], "steps is 1000000"),
    ):
        ran = bitplan("measure", *arguments)
        assert ran.code == 2
        assert sentence in ran.err
        assert len(ran.err.strip().splitlines()) == 1
