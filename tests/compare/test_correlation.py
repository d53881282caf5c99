from __future__ import annotations

import random

import pytest

from bitplan.errors import RunError
from bitplan.lab.compare.correlation import LEAST, cost_correlation, seed_share, spearman


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
