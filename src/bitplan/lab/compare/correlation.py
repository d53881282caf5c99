"""Whether plans that cost more do better: rank correlation of cost with a metric, with a bootstrap interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bitplan.errors import RunError

#: Draws of the bootstrap, and the share of them that an interval holds.
DRAWS, SURE = 2_000, 0.95
#: The fewest plans for a correlation.
LEAST = 4


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation with its interval."""

    value: float
    low: float
    high: float
    plans: int

    @property
    def is_sure(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        return f"{self.value:+.2f} ({self.low:+.2f} to {self.high:+.2f})"


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's correlation of two lists; equal values share the mean of their ranks, and a constant list gives 0.

    >>> spearman([1, 2, 3, 4], [10, 20, 40, 30])
    0.8
    """
    first, second = (_ranks(np.asarray(values, dtype=np.float64)) for values in (x, y))
    first, second = first - first.mean(), second - second.mean()
    scale = float(np.sqrt((first**2).sum() * (second**2).sum()))
    return round(float((first * second).sum()) / scale, 12) if scale else 0.0


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    means: NDArray[np.float64] = (last - (counts - 1) / 2).astype(np.float64)
    return means[place.reshape(-1)]


def seed_share(values: Sequence[Sequence[float]]) -> float:
    """The share of the variance between plans' means that seeds alone explain: 1 or more where plans do not differ.

    Infinite where all means are equal; 0 where there is only one seed.

    >>> seed_share([[1.0, 3.0], [1.0, 3.0], [2.0, 6.0]])
    1.5
    """
    between = float(np.var([np.mean(metrics) for metrics in values], ddof=1))
    within = float(np.mean([np.var(metrics, ddof=1) / len(metrics) if len(metrics) > 1 else 0.0 for metrics in values]))
    return within / between if between else float("inf")


def cost_correlation(costs: Sequence[float], values: Sequence[Sequence[float]], seed: int = 0) -> Correlation:
    """The correlation of plans' costs with the means of their metric over seeds.

    The interval comes from a bootstrap over plans and seeds, drawn with replacement. All plans of a draw have the same
    seeds, since the results of different plans with one seed are correlated.

    :param values: of each plan, its metric with every seed.
    """
    if len(costs) != len(values) or len(costs) < LEAST or not all(len(metrics) for metrics in values):
        raise RunError(
            f"a correlation takes at least {LEAST} plans with their metrics, not {len(costs)}: run more of them."
        )
    draws = np.random.default_rng(seed)
    means, most = [float(np.mean(metrics)) for metrics in values], max(map(len, values))
    correlations = []
    for _ in range(DRAWS):
        chosen, seeds = draws.integers(len(costs), size=len(costs)), draws.integers(most, size=most)
        again = {plan: float(np.mean([values[plan][place % len(values[plan])] for place in seeds])) for plan in chosen}
        correlations.append(spearman([costs[plan] for plan in chosen], [again[plan] for plan in chosen]))
    low, high = (float(bound) for bound in np.quantile(correlations, [(1 - SURE) / 2, (1 + SURE) / 2]))
    return Correlation(spearman(costs, means), low, high, len(costs))
