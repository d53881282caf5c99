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
            for seed, change in enumerate(facts.pop("seeds", (0.0,))):
                value = {"value": facts.get("value", 0.9) + change} if change else {}
                own = {"plan": None if name == "fp32" else name, "seed": seed} | facts | value
                write_run(tmp_path / f"{name}-{seed}", **own)
        return Report.of([tmp_path]).answer

    return make


def test_the_cheapest_plan_that_keeps_the_metric(answer: Answer) -> None:
    alike = (0.0, 0.01, -0.01)
    assert answer(
        fp32={"value": 0.9, "memory": 1000, "seeds": alike},
        a={"value": 0.9, "cost": 0.25, "memory": 500, "seeds": alike},
        b={"value": 0.895, "cost": 0.0625, "memory": 250, "seeds": (0.0, 0.0101, -0.0099)},
        c={"value": 0.8, "cost": 0.01, "memory": 100, "seeds": alike},
        d={"value": 0.9, "cost": 0.02, "memory": 100, "seeds": (0.01, 0.01, -0.02)},  # as good in the mean, not surely
    ) == (
        "On digits (3 seeds, 30 steps), b keeps the accuracy of fp32 (89.5 % against 90.0 %) and would need 6.2 % of "
        "its bit operations and 25.0 % of its tensors' bytes."
    )


def test_a_plan_that_surely_is_better(answer: Answer) -> None:
    reported = answer(fp32={"seeds": (0.0, 0.01)}, a={"value": 0.95, "cost": 0.5, "seeds": (0.0, 0.0101)})
    assert "a improves on the accuracy of fp32 (95.5 % against 90.5 %)" in reported


def test_what_runs_do_not_decide_is_said(answer: Answer) -> None:
    once = answer(fp32={"value": 0.9}, a={"value": 0.895, "cost": 0.25})
    assert "the mean accuracy of a is at most 1.0 % worse than that of fp32 (89.5 % against 90.0 %)" in once
    assert once.endswith(", but one seed decides nothing.")


def test_several_seeds_that_do_not_decide_are_counted(answer: Answer) -> None:
    reported = answer(fp32={"seeds": (0.0, 0.02)}, a={"cost": 0.25, "seeds": (0.02, 0.0)})
    assert reported.endswith(", but 2 seeds do not decide this.")


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
    assert "no plan is within the margin of the accuracy of fp32 (90.0 %): b comes closest with 80.0 %" in reported


def test_where_all_surely_lose_the_closest_is_named(answer: Answer) -> None:
    several = {name: {"value": value, "seeds": (0.0, 0.0101)} for name, value in (("a", 0.7), ("b", 0.8))}
    reported = answer(fp32={"value": 0.9, "seeds": (0.0, 0.01)}, **several)
    assert "no plan keeps the accuracy of fp32 (90.5 %): b comes closest with 80.5 % and would need" in reported


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
