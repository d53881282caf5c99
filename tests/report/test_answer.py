"""The answer is one sentence, whatever the runs are like."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitplan.lab.report.summaries import Report

WriteRun = Callable[..., Path]
Answer = Callable[..., str]


@pytest.fixture
def answer(write_run: WriteRun, tmp_path: Path) -> Answer:
    def make(**plans: dict[str, Any]) -> str:
        for name, facts in plans.items():
            write_run(tmp_path / name, **({"plan": None if name == "fp32" else name} | facts))
        return Report.of([tmp_path]).answer

    return make


def test_the_cheapest_plan_that_keeps_the_metric(answer: Answer) -> None:
    assert answer(
        fp32={"value": 0.9, "memory": 1000},
        a={"value": 0.9, "cost": 0.25, "memory": 500},
        b={"value": 0.895, "cost": 0.0625, "memory": 250},
        c={"value": 0.8, "cost": 0.01, "memory": 100},
    ) == (
        "On digits (1 seed, 30 steps), b keeps the accuracy of fp32 (89.5 % against 90.0 %) and would need 6.2 % of "
        "its bit operations and 25.0 % of its tensors' bytes."
    )


def test_what_really_runs_in_low_precision_needs_it(answer: Answer) -> None:
    assert " and needs 50.0 %" in answer(fp32={}, a={"execution": "native", "cost": 0.5})


def test_plans_that_fail_are_named(answer: Answer) -> None:
    reported = answer(fp32={}, good={"cost": 0.5}, bad={"value": 0.1}, worse={"status": "diverged", "value": None})
    assert reported.endswith(
        "; bad fails (accuracy 10.0 %, no better than the trivial predictor) and worse fails (diverged in 1 of 1 run)."
    )


def test_many_that_fail_are_counted(answer: Answer) -> None:
    reported = answer(fp32={}, **{f"p{number}": {"value": 0.1} for number in range(6)})
    assert reported.endswith("no plan keeps the accuracy of fp32 (90.0 %); 6 plans fail (p0, p1, p2 and 3 more).")


def test_where_no_plan_keeps_the_metric_the_closest_is_named(answer: Answer) -> None:
    reported = answer(fp32={"value": 0.9}, a={"value": 0.7}, b={"value": 0.8})
    assert "no plan keeps the accuracy of fp32 (90.0 %): b comes closest with 80.0 % and would need" in reported


def test_one_run(answer: Answer) -> None:
    assert answer(a={"value": 0.8, "cost": 0.25}) == (
        "On digits (1 seed, 30 steps), a reaches accuracy 80.0 % with 25.0 % of FP32's bit operations, and the trivial "
        "predictor gets 10.0 %."
    )


def test_runs_that_are_missing_are_counted(answer: Answer) -> None:
    assert answer(fp32={}, a={}, b={"status": "stopped"}).endswith("; 1 of 3 runs is not finished.")


def test_nothing_has_finished(answer: Answer) -> None:
    assert answer(fp32={"status": "unfinished", "value": None}) == (
        "On digits (1 seed, 30 steps), nothing has finished yet; 1 of 1 run is not finished."
    )


def test_nothing_works(answer: Answer) -> None:
    reported = answer(fp32={"status": "diverged", "value": None})
    assert reported == "On digits (1 seed, 30 steps), nothing works; fp32 fails (diverged in 1 of 1 run)."


def test_only_the_reference_has_finished(answer: Answer) -> None:
    reported = answer(fp32={"value": 0.9}, a={"status": "unfinished"})
    assert "fp32 reaches accuracy 90.0 %, and nothing else has finished yet; 1 of 2 runs is not finished." in reported


def test_it_is_one_sentence(answer: Answer) -> None:
    reported = answer(fp32={}, a={"value": 0.1}, b={"status": "unfinished"}, c={"status": "diverged"})
    assert reported.count(". ") == 0
    assert reported.endswith(".")
