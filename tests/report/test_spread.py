from __future__ import annotations

import math

import pytest

from bitplan.lab.report.summaries import spread


def test_mean_and_sample_deviation() -> None:
    result = spread([1.0, 2.0, 6.0])
    assert result is not None
    assert (result.mean, result.low, result.high, result.count) == (3.0, 1.0, 6.0, 3)
    assert result.deviation == pytest.approx(7.0**0.5)


def test_one_value_has_no_deviation_and_none_has_no_spread() -> None:
    one = spread([0.5, None])
    assert one is not None
    assert (one.mean, one.deviation, one.count) == (0.5, 0.0, 1)
    assert spread([]) is spread([None]) is None


def test_a_value_that_is_not_finite_spoils_the_mean_and_says_so() -> None:
    result = spread([1.0, math.inf])
    assert result is not None
    assert not result.is_finite
    assert result.count == 2
