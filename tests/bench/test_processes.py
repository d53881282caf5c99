"""Contenders in processes of their own."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from counting_contender import Counter

from benchmarks.processes import ContenderError, call_all, contenders, require_all
from benchmarks.speed import bench_speed


@pytest.mark.parametrize("in_processes", [True, False])
def test_each_contender_keeps_its_state_between_calls_and_errors_are_its_own(in_processes: bool) -> None:
    with contenders(Counter, {"a": (1,), "b": (10,), "bad": (-1,)}, in_processes) as started:
        first = dict(call_all(started, "add", 1, jobs=3))
        again = dict(call_all(started, "add", 1))
    assert [first["a"][0], first["b"][0]] == [2, 11]
    assert [again["a"][0], again["b"][0]] == [3, 12]
    assert str(first["bad"]) == "ValueError: starts below zero"
    assert again["a"][1] == first["a"][1]
    assert (len({os.getpid(), again["a"][1], again["b"][1]}) == 3) is in_processes
    with pytest.raises(ContenderError, match="bad: ValueError"):
        require_all(first.items())


def test_a_process_that_is_killed_is_an_error_of_its_contender_alone() -> None:
    with contenders(Counter, {"a": (1,), "b": (10,)}) as started:
        with pytest.raises(ContenderError, match="exit code -9"):
            started["a"].call("end_process")
        assert started["b"].call("add", 1)[0] == 11


def test_rows_of_a_benchmark_are_measured_in_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled here: this process makes neither models nor steps."""
    monkeypatch.setattr(torch, "compile", _refuse)
    monkeypatch.setattr("bitplan.executions.native.crossover.SIZES", {"cpu": ()})
    document = bench_speed(["linear-1024"], ["native-int8-tensor"], turns=1, peers=False, switches=False)
    assert document["processes"] == "one per row"
    rows = document["rows"]["linear-1024"]
    assert [row["variant"] for row in rows] == ["bf16", "native-int8-tensor"]
    assert all(row["graphs"] == 1 and row["milliseconds"] > 0 for row in rows)
    assert rows[1]["fallbacks"] == 0


def _refuse(*arguments: Any, **named: Any) -> None:
    raise AssertionError("a contender was compiled in the process of the benchmark")
