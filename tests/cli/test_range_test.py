"""``bitplan range-test``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitplan.planners.range_test import RangeTest, WidthResult

TINY = f"{Path(__file__).parents[1] / 'train' / 'tiny_task.py'}:Tiny"


def test_the_table_the_bound_and_the_reason(bitplan: Callable[..., Any]) -> None:
    shown = bitplan("range-test", TINY, "--window", 12, "--bits", "2-5")
    assert shown.code == 0
    assert "lowest bits: " in shown.out or "no bound found" in shown.out
    assert "within 12 steps" in shown.out
    rows = [line.split() for line in shown.out.splitlines() if line.split()[:1] and line.split()[0] in "2345"]
    assert [row[0] for row in rows] == ["2", "3", "4", "5"]


def test_a_fall_that_may_be_chance_is_told_from_none(
    bitplan: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    widths = (WidthResult(2, 0.99, 1.0, False), WidthResult(3, 0.6, 0.99, True), WidthResult(4, 0.4, 0.6, False))
    canned = RangeTest(3, 4, "because", widths, (), 12, 0.1)
    monkeypatch.setattr("bitplan.cli.schedules.range_test_of_task", lambda *arguments, **named: canned)
    shown = bitplan("range-test", TINY).out.splitlines()
    rows = {line.split()[0]: line for line in shown if line.split()[:1] and line.split()[0] in "234"}
    assert " no  " in rows["2"]
    assert " yes " in rows["3"]
    assert "no: may be chance" in rows["4"]


def test_json(bitplan: Callable[..., Any]) -> None:
    result = bitplan("range-test", TINY, "--window", 8, "--threshold", 0.2, "--set", "lr=0.05", "--json").json
    assert [item["bits"] for item in result["widths"]] == [2, 3, 4, 5, 6, 7, 8]
    assert len(result["losses"]) == 8 * result["window"]
    assert result["window"] in range(8, 65, 8)  # as many windows as it needs without a plan
    assert (result["threshold"], result["high"]) == (0.2, 8)
    again = bitplan("range-test", TINY, "--window", 8, "--threshold", 0.2, "--set", "lr=0.05", "--json").json
    assert again == result


def test_mistakes_are_one_sentence(bitplan: Callable[..., Any]) -> None:
    for arguments, sentence in ((["nothing"], "there is no task"), ([TINY, "--bits", "1-8"], "2 to 16 bits")):
        ran = bitplan("range-test", *arguments)
        assert ran.code == 2
        assert sentence in ran.err
        assert len(ran.err.strip().splitlines()) == 1
