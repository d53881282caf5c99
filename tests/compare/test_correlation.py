from __future__ import annotations

import random

import pytest

from bitplan.errors import RunError
from bitplan.lab.compare import correlation
from bitplan.lab.compare.correlation import (
    LEAST,
    cost_correlation,
    paired_difference,
    pearson,
    seed_share,
    spearman,
    trend,
)


def test_ranks_alone_matter_and_ties_share_theirs() -> None:
    assert spearman([1, 2, 3], [1, 10, 1000]) == 1.0
    assert spearman([1, 2, 3], [3, 2, -8]) == -1.0
    # By hand: ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4.
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert spearman([1, 1, 1], [1, 2, 3]) == 0.0


def test_a_clear_order_is_sure_and_chance_is_not() -> None:
    draws = random.Random(0)
    costs = [float(number) for number in range(12)]
    clear = cost_correlation(costs, [[cost + draws.gauss(0, 0.3) for _ in range(3)] for cost in costs])
    assert clear.value > 0.95
    assert clear.is_sure
    assert clear.low <= clear.value <= clear.high
    chance = cost_correlation(costs, [[draws.gauss(0, 1) for _ in range(3)] for _ in costs])
    assert not chance.is_sure
    assert chance.low < 0 < chance.high
    assert str(chance).count("to") == 1


def test_the_same_figures_give_the_same_interval() -> None:
    values = [[1.0, 2.0], [2.0, 1.0], [3.0, 3.0], [2.5, 4.0]]
    assert cost_correlation([1, 2, 3, 4], values) == cost_correlation([1, 2, 3, 4], values)


def test_seeds_that_disagree_about_the_order_make_it_unsure() -> None:
    costs = [1.0, 2.0, 3.0, 4.0, 5.0]
    falls = [[cost, -cost, cost] for cost in costs]
    assert cost_correlation(costs, falls).low < 0 < cost_correlation(costs, falls).value


def test_how_much_of_the_differences_seeds_make() -> None:
    draws = random.Random(0)
    alike = [[draws.gauss(0, 1) for _ in range(3)] for _ in range(200)]
    assert seed_share(alike) == pytest.approx(1, abs=0.25)
    assert seed_share([[plan + value / 10 for value in each] for plan, each in enumerate(alike)]) < 0.01
    assert seed_share([[1.0, 2.0], [1.0, 2.0]]) == float("inf")


def test_too_few_plans_are_refused() -> None:
    with pytest.raises(RunError, match=rf"takes at least {LEAST} plans"):
        cost_correlation([1, 2, 3], [[1.0], [2.0], [3.0]])


def test_pearson_sees_distances_where_spearman_sees_ranks() -> None:
    x, y = [1.0, 2.0, 3.0, 10.0], [1.0, 3.0, 2.0, 10.0]
    assert pearson(x, y) == pytest.approx(49 / 50)
    assert spearman(x, y) == pytest.approx(0.8)
    assert pearson(x, [1.0] * 4) == 0.0


def test_a_trend_counts_pairs_of_different_groups() -> None:
    # By hand: 1 < 3, 1 < 2, 1 < 5, 4 < 5 are in order; 4 > 3, 4 > 2; 3 < 5, 2 < 5.
    result = trend([[1, 4], [3, 2], [5]])
    assert (result.concordant, result.pairs) == (6, 8)
    assert trend([[1], [1]]).concordant == 0.5
    assert not result.is_sure


def test_the_p_value_is_the_share_of_arrangements() -> None:
    # Two groups of two: of six arrangements one has all four pairs in order.
    assert trend([[1, 2], [3, 4]]).p_value == pytest.approx(1 / 6)
    assert trend([[3, 4], [1, 2]]).p_value == 1.0
    # Ten values in groups of 2, 6 and 2: one pair is out of order in two of the 1,260 arrangements.
    values = [[0.1, 0.2], [0.3, 0.4, 0.5, 0.6, 0.7, 0.9], [0.8, 1.0]]
    result = trend(values)
    assert (result.concordant, result.pairs) == (27, 28)
    assert result.p_value == pytest.approx(3 / 1260)
    assert result.is_sure


def test_many_arrangements_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [[1.0, 2.0, 3.0], [2.5, 3.5, 4.0], [5.0, 6.0, 4.5]]
    exact = trend(groups).p_value
    monkeypatch.setattr(correlation, "ARRANGEMENTS", 1000)
    assert trend(groups).p_value == pytest.approx(exact, abs=0.005)
    assert trend(groups) == trend(groups)


def test_plans_are_paired_with_their_control_by_seed() -> None:
    control = {"0": 1.0, "1": 5.0, "2": 3.0}
    lower = [{seed: value - 0.1 - 0.01 * plan for seed, value in control.items()} for plan in range(6)]
    result = paired_difference(lower, control)
    assert result.mean == pytest.approx(-0.125)
    assert (result.below, result.pairs) == (18, 18)
    assert result.low < result.mean < result.high < 0
    assert result.is_sure
    mixed = paired_difference([{"0": 1.1, "1": 4.9, "7": 9.0}], control)
    assert (mixed.pairs, mixed.below) == (2, 1)  # seed 7 has no control
    assert not mixed.is_sure


def test_nothing_to_compare_is_a_sentence() -> None:
    with pytest.raises(RunError, match="no seed was run"):
        paired_difference([{"0": 1.0}], {"1": 1.0})
    with pytest.raises(RunError, match="at least two groups"):
        trend([[1.0, 2.0], []])
