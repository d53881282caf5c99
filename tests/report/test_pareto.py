from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitplan.lab.report.summaries import pareto_front

SMALL = st.integers(0, 5).map(float)  # few values, so that ties are common


def dominates(a: tuple[float, float], b: tuple[float, float], sign: int) -> bool:
    no_worse = a[0] <= b[0] and sign * a[1] >= sign * b[1]
    return no_worse and a != b


@given(st.lists(st.tuples(SMALL, SMALL), max_size=12), st.sampled_from(["higher", "lower"]))
def test_the_front_is_what_nothing_dominates(
    points: list[tuple[float, float]], better: Literal["higher", "lower"]
) -> None:
    sign = 1 if better == "higher" else -1
    expected = {i for i, point in enumerate(points) if not any(dominates(other, point, sign) for other in points)}
    front = pareto_front(points, better)
    assert set(front) == expected
    assert len(front) == len(expected)
    assert [points[i][0] for i in front] == sorted(points[i][0] for i in front)


def test_what_is_no_number_is_on_no_front() -> None:
    nan = float("nan")
    assert pareto_front([(nan, 1.0), (1.0, nan), (2.0, 0.5)], "higher") == [2]


@pytest.mark.parametrize("better", ["higher", "lower"])
def test_of_no_points(better: Literal["higher", "lower"]) -> None:
    assert pareto_front([], better) == []
