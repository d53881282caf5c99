"""Schedules that hold still and then change, functions, and moments."""

from __future__ import annotations

from fractions import Fraction

import pytest

from bitplan.errors import PlanError, ScheduleError
from bitplan.plans.schedules import RunPoint, Schedule, schedule, schedule_from_data


def test_shares_are_exact() -> None:
    for total in range(1, 3000):
        # 0.3 * 10 is not 3 in floating point; a share is a fraction.
        assert RunPoint.of("30%").first_step(total) == -(-3 * total // 10)
    assert RunPoint.of(0.7) == RunPoint.of("70%") == RunPoint.of(" 70.0 % ")
    assert RunPoint.of("12.5%").share == Fraction(1, 8)
    for text in ("0%", "33.333%", "100%"):
        assert RunPoint.of(text).to_data() == text
    assert RunPoint.of(5000).to_data() == 5000


@pytest.mark.parametrize("wrong", ["90", "101%", "-1%", -3, 1.5, "half", True, None])
def test_what_is_no_moment(wrong: object) -> None:
    with pytest.raises(ScheduleError):
        RunPoint.of(wrong)  # type: ignore[arg-type]


def test_late_switch() -> None:
    assert schedule("late", low=4, high=8).table(20).tolist() == [4] * 18 + [8] * 2
    assert schedule("late", low=4, high=8, last=3).table(20).tolist() == [4] * 17 + [8] * 3
    assert schedule("late", low=4, high=8, last="25%").table(10).tolist() == [4] * 8 + [8] * 2
    assert schedule("late", low=4, high=8, last="90%").bits(1000, 10) == 8


def test_steps_windows_and_pieces() -> None:
    steps = schedule("steps", bits=[8, 4, 6], at=["20%", 6])
    assert steps.table(10).tolist() == [8, 8, 4, 4, 4, 4, 6, 6, 6, 6]
    assert (steps.lowest, steps.highest) == (4, 8)
    assert schedule("deficit", low=3, high=8, start=0, end="40%").table(5).tolist() == [3, 3, 8, 8, 8]
    pieces = schedule("pieces", pieces=[{"name": "LR", "low": 2, "high": 4, "cycles": 1}, steps], at=["50%"])
    assert (
        pieces.table(20).tolist()
        == schedule("LR", low=2, high=4, cycles=1).table(10).tolist() + steps.table(10).tolist()
    )
    assert list(map(str, pieces.run_points())) == ["50%", "20%", "step 6"]
    assert schedule("static", bits=6).summary(10).relative_cost == 1


def test_a_function() -> None:
    chosen = schedule(lambda step, total: 4 if 2 * step < total else 8, low=4, high=8)
    assert chosen.table(6).tolist() == [4, 4, 4, 8, 8, 8]
    with pytest.raises(ScheduleError, match="gave 9 at step 0 of 5"):
        schedule(lambda step, total: 9, low=4, high=8).bits(0, 5)
    with pytest.raises(PlanError, match="allow_code"):
        schedule_from_data(chosen.to_data()).bits(0, 6)


@pytest.mark.parametrize(
    "made",
    [
        schedule("ETH", low=4, high=8, cycles=2),
        schedule("growth", low=3, high=8, profile="C"),
        schedule("decay", low=3, high=8, profile="R", reflection="H"),
        schedule("decay", low=3, high=8),
        schedule("static", bits=6),
        schedule("steps", bits=[8, 4], at=[100]),
        schedule("late", low=4, high=8, last="12.5%"),
        schedule("deficit", low=4, high=8, start="10%", end=500),
        schedule("pieces", pieces=[schedule("CR", low=3, high=4), schedule("static", bits=8)], at=["90%"]),
    ],
    ids=str,
)
def test_data_and_back(made: Schedule) -> None:
    assert schedule_from_data(made.to_data()) == made
    assert hash(schedule_from_data(made.to_data())) == hash(made)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"name": "steps", "bits": [8, 4], "at": []}, "one moment fewer"),
        ({"name": "steps", "bits": [8, 4, 3], "at": ["50%", "20%"]}, "in order"),
        ({"name": "steps", "bits": 8, "at": []}, "bits is a list"),
        ({"name": "deficit", "low": 3, "high": 8, "start": 10, "end": 10}, "in order"),
        ({"name": "pieces", "pieces": [], "at": []}, "one moment fewer"),
        ({"name": "static", "bits": 40}, "1 to 32"),
        ({"low": 3}, "there is no schedule None"),
    ],
)
def test_mistakes_are_sentences(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ScheduleError, match=sentence):
        schedule_from_data(options)
