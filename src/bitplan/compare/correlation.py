"""Whether plans that cost more do better: rank correlation of cost with a metric, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bitplan.errors import RunError

#: How often plans are drawn anew, and the share of the outcomes that an interval holds.
DRAWS, SURE = 2_000, 0.95
#: Fewer plans than this say nothing.
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
        """Whether the interval has no zero in it."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        return f"{self.value:+.2f} ({self.low:+.2f} to {self.high:+.2f})"


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Of two lists; equal values share the mean of their ranks. 0 where one of them is all alike.

    >>> spearman([1, 2, 3, 4], [10, 20, 40, 30])
    0.8
    """
    first, second = (_ranks(np.asarray(each, dtype=np.float64)) for each in (x, y))
    first, second = first - first.mean(), second - second.mean()
    scale = float(np.sqrt((first**2).sum() * (second**2).sum()))
    return round(float((first * second).sum()) / scale, 12) if scale else 0.0


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    means: NDArray[np.float64] = (last - (counts - 1) / 2).astype(np.float64)
    return means[place.reshape(-1)]


def cost_correlation(costs: Sequence[float], values: Sequence[Sequence[float]], seed: int = 0) -> Correlation:
    """Of plans' costs with the means of their metric over seeds.

    The interval is that of a bootstrap over plans: as many are drawn, with replacement, again and again.

    :param values: of each plan, its metric with every seed.
    """
    if len(costs) != len(values) or len(costs) < LEAST or not all(len(each) for each in values):
        raise RunError(
            f"a correlation takes at least {LEAST} plans with their metrics, not {len(costs)}: run more of them."
        )
    draws = np.random.default_rng(seed)
    means = [float(np.mean(each)) for each in values]
    found = []
    for _ in range(DRAWS):
        chosen = draws.integers(len(costs), size=len(costs))
        found.append(spearman([costs[plan] for plan in chosen], [means[plan] for plan in chosen]))
    low, high = (float(each) for each in np.quantile(found, [(1 - SURE) / 2, (1 + SURE) / 2]))
    return Correlation(spearman(costs, means), low, high, len(costs))
