"""Whether plans that cost more do better, and whether plans differ from a control of equal cost.

Each claim has its own statistic. "Groups of schedules that cost more are better" is an ordered alternative:
:func:`trend` is the Jonckheere-Terpstra test. "Accuracy grows with cost" is a correlation: :func:`cost_correlation`.
"Changing the precision helps at equal cost" is a paired difference: :func:`paired_difference`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from bitplan.errors import RunError

#: Draws of the bootstrap, and the share of them that an interval holds.
DRAWS, SURE = 2_000, 0.95
#: The fewest plans for a correlation.
LEAST = 4
#: Up to this number of arrangements a permutation test looks at all of them; beyond, at as many random ones.
ARRANGEMENTS = 20_000


@dataclass(frozen=True)
class Correlation:
    """A correlation with its interval."""

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


def pearson(x: Sequence[float], y: Sequence[float]) -> float:
    """Pearson's correlation of two lists; a constant list gives 0.

    >>> pearson([1, 2, 3], [10, 20, 60])
    0.944911182523
    """
    first, second = (np.asarray(values, dtype=np.float64) for values in (x, y))
    first, second = first - first.mean(), second - second.mean()
    scale = float(np.sqrt((first**2).sum() * (second**2).sum()))
    return round(float((first * second).sum()) / scale, 12) if scale else 0.0


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's correlation of two lists; equal values share the mean of their ranks, and a constant list gives 0.

    >>> spearman([1, 2, 3, 4], [10, 20, 40, 30])
    0.8
    """
    first, second = (_ranks(np.asarray(values, dtype=np.float64)) for values in (x, y))
    return pearson(first.tolist(), second.tolist())


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


def cost_correlation(
    costs: Sequence[float],
    values: Sequence[Sequence[float]],
    seed: int = 0,
    measure: Callable[[Sequence[float], Sequence[float]], float] = spearman,
) -> Correlation:
    """The correlation of plans' costs with the means of their metric over seeds.

    The interval comes from a bootstrap over plans and seeds, drawn with replacement. All plans of a draw have the same
    seeds, since the results of different plans with one seed are correlated.

    :param values: of each plan, its metric with every seed.
    :param measure: :func:`spearman` or :func:`pearson`.
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
        correlations.append(measure([costs[plan] for plan in chosen], [again[plan] for plan in chosen]))
    low, high = (float(bound) for bound in np.quantile(correlations, [(1 - SURE) / 2, (1 + SURE) / 2]))
    return Correlation(measure(costs, means), low, high, len(costs))


# --- Groups in order: the Jonckheere-Terpstra test


@dataclass(frozen=True)
class Trend:
    """Pairs of values of different groups that are in the groups' order, and how likely chance makes as many."""

    #: Equal values count as half a pair.
    concordant: float
    pairs: int
    #: One-sided, from permutations of the values over the groups.
    p_value: float

    @property
    def is_sure(self) -> bool:
        return self.p_value < 1 - SURE

    def __str__(self) -> str:
        return f"{self.concordant:g} of {self.pairs} pairs, p = {self.p_value:.2g}"


def trend(groups: Sequence[Sequence[float]], seed: int = 0) -> Trend:
    """Whether values grow from group to group: the Jonckheere-Terpstra test, by permutations.

    >>> str(trend([[1, 2], [3, 4], [5, 6]]))
    '12 of 12 pairs, p = 0.011'
    """
    sizes = [len(group) for group in groups]
    if sum(size > 0 for size in sizes) < 2:
        raise RunError("a trend takes values of at least two groups: run more plans.")
    values = np.array([value for group in groups for value in group], dtype=np.float64)
    pairs = sum(first * second for first, second in combinations(sizes, 2))
    observed = _concordant(values, sizes)
    arrangements = math.factorial(len(values)) // math.prod(math.factorial(size) for size in sizes)
    if arrangements <= ARRANGEMENTS:
        counts = [_concordant(values[list(order)], sizes) for order in _arrangements(range(len(values)), sizes)]
        p_value = float(np.mean([count >= observed for count in counts]))
    else:
        draws = np.random.default_rng(seed)
        reached = sum(_concordant(draws.permutation(values), sizes) >= observed for _ in range(ARRANGEMENTS))
        p_value = (reached + 1) / (ARRANGEMENTS + 1)
    return Trend(observed, pairs, p_value)


def _concordant(values: NDArray[np.float64], sizes: Sequence[int]) -> float:
    """Pairs of values of different groups where the later group has the larger value; equal ones count half."""
    group = np.repeat(np.arange(len(sizes)), sizes)
    is_ordered = group[:, None] < group[None, :]
    signs = np.sign(values[None, :] - values[:, None])
    return float(((signs + 1) / 2)[is_ordered].sum())


def _arrangements(places: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All ways to distribute places over groups of these sizes."""
    if not sizes:
        yield ()
        return
    for chosen in combinations(places, sizes[0]):
        rest = [place for place in places if place not in chosen]
        for others in _arrangements(rest, sizes[1:]):
            yield (*chosen, *others)


# --- A control: plans less a plan of equal cost, with the same seeds


@dataclass(frozen=True)
class PairedDifference:
    """Plans less their control, run by run with the same seed."""

    mean: float
    low: float
    high: float
    #: Runs that are below their control, and all.
    below: int
    pairs: int

    @property
    def is_sure(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0


def paired_difference(
    plans: Sequence[Mapping[str, float]], control: Mapping[str, float], seed: int = 0
) -> PairedDifference:
    """The mean of the plans' metric less that of `control` with the same seed.

    The interval comes from a bootstrap over plans and seeds. With few seeds it is too narrow: three seeds of one
    control are in all pairs.

    :param plans: of each plan, seed -> metric.

    >>> paired_difference([{"0": 1.0, "1": 2.0}], {"0": 1.5, "1": 2.5}).mean
    -0.5
    """
    seeds = sorted(set(control).intersection(*plans)) if plans else []
    if not seeds:
        raise RunError("no seed was run with all plans and with their control: run the missing ones.")
    differences = np.array([[plan[number] - control[number] for number in seeds] for plan in plans])
    draws = np.random.default_rng(seed)
    means = []
    for _ in range(DRAWS):
        rows, columns = (draws.integers(size, size=size) for size in differences.shape)
        means.append(float(differences[np.ix_(rows, columns)].mean()))
    low, high = (float(bound) for bound in np.quantile(means, [(1 - SURE) / 2, (1 + SURE) / 2]))
    return PairedDifference(float(differences.mean()), low, high, int((differences < 0).sum()), differences.size)
