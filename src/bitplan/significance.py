"""The statistics of comparisons: every interval, test and verdict about runs with several seeds.

Each claim has its own statistic. "This plan keeps the metric" is a one-sided test of paired differences against a
margin that was fixed before: :func:`judge`, or :func:`judge_all` for several plans beside one reference, whose p-values
are corrected by :func:`holm`. "Groups of schedules that cost more are better" is an ordered alternative:
:func:`trend` is the Jonckheere-Terpstra test. "Accuracy grows with cost" is a correlation: :func:`cost_correlation`.
"Changing the precision helps at equal cost" is a paired difference, too, of the mean of several plans:
:meth:`Difference.of_mean`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from bitplan.errors import RunError

#: Draws of the bootstrap, and the share of them that an interval holds.
DRAWS, SURE = 2_000, 0.95
#: The level of the one-sided tests of verdicts.
LEVEL = (1 - SURE) / 2
#: The fewest plans for a correlation.
LEAST = 4
#: Up to this number of arrangements a permutation test looks at all of them; beyond, at as many random ones.
ARRANGEMENTS = 20_000

# --- One plan against another: paired differences and verdicts


@dataclass(frozen=True)
class Difference:
    """The mean of one plan's metric less another's with the same seed, over seeds."""

    mean: float
    #: The sample standard deviation of the differences; 0 for one pair.
    deviation: float
    pairs: int

    @classmethod
    def of(cls, values: Sequence[float], others: Sequence[float]) -> Difference:
        """
        >>> Difference.of([1.0, 2.0, 3.0], [0.5, 1.0, 3.0])
        Difference(mean=0.5, deviation=0.5, pairs=3)
        """
        if len(values) != len(others):
            raise RunError(f"{len(values)} values cannot be paired with {len(others)}: give both of every seed.")
        pairs = [value - other for value, other in zip(values, others, strict=True)]
        if not pairs:
            raise RunError("no seed was run with both plans: run them with the same seeds.")
        deviation = statistics.stdev(pairs) if len(pairs) > 1 and all(map(math.isfinite, pairs)) else 0.0
        return cls(statistics.fmean(pairs), deviation, len(pairs))

    @classmethod
    def of_mean(cls, plans: Sequence[Mapping[Any, float]], control: Mapping[Any, float]) -> Difference:
        """The mean of several plans less their control, over the seeds that all have.

        A pair is a seed and not a plan: all plans of a seed are compared with one run of the control.

        :param plans: of each plan, seed -> metric.

        >>> Difference.of_mean([{0: 1.0, 1: 2.0}, {0: 2.0, 1: 4.0}], {0: 1.0, 1: 2.5})
        Difference(mean=0.5, deviation=0.0, pairs=2)
        """
        seeds = sorted(set(control).intersection(*plans)) if plans else []
        means = [statistics.fmean(plan[seed] for plan in plans) for seed in seeds]
        return cls.of(means, [control[seed] for seed in seeds])

    @property
    def half_width(self) -> float:
        """Half of the interval of 95 % for normal differences (Student's t); infinite for one pair.

        A bootstrap of three to five pairs is too narrow by a third and more; the tests show both coverages. Without a
        spread (:attr:`is_constant`) it is 0 from six pairs on, and infinite for fewer.
        """
        if self.pairs < 2 or not math.isfinite(self.mean):
            return math.inf
        if self.is_constant:
            return 0.0 if 2 * self._chance_of_one_side < 1 - SURE else math.inf
        return student_quantile((1 + SURE) / 2, self.pairs - 1) * self.deviation / math.sqrt(self.pairs)

    @property
    def is_constant(self) -> bool:
        """Whether all differences are equal, 0 or not, so that Student's t has no spread to work with.

        That is a coincidence of a coarse metric, such as the accuracy on a few hundred samples, or of one at its limit.
        What is left is a sign test: if half of all seeds lost the margin, none of n would with a probability of 2**-n,
        which is below 2.5 % from six seeds on.
        """
        return self.deviation <= 1e-9 * abs(self.mean)

    @property
    def _chance_of_one_side(self) -> float:
        return float(0.5**self.pairs)

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width

    @property
    def is_sure(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0

    def p_value(self, margin: float) -> float:
        """How likely differences as far below `margin` are, if the true one is `margin` (one-sided t-test).

        >>> round(Difference(0.0, 1.0, 4).p_value(1.0), 4)
        0.0697
        """
        if self.pairs < 2 or not math.isfinite(self.mean):
            return 1.0
        distance = self.mean - margin
        if self.is_constant:
            return self._chance_of_one_side if distance < 0 else 1.0
        return student_probability(distance * math.sqrt(self.pairs) / self.deviation, self.pairs - 1)

    def negated(self) -> Difference:
        """The other plan less this one."""
        return Difference(-self.mean, self.deviation, self.pairs)

    def to_dict(self) -> dict[str, float]:
        return {"mean": self.mean, "low": self.low, "high": self.high, "pairs": self.pairs}


Verdict = Literal["keeps", "loses", "undecided"]
Key = TypeVar("Key")


@dataclass(frozen=True)
class Judgement:
    """Whether a plan keeps its reference's metric within a margin."""

    verdict: Verdict
    #: By how much the plan is worse, paired by seed; below zero where it is better. None without a common seed.
    loss: Difference | None
    margin: float
    #: Of the hypothesis that the plan loses the margin or more (one-sided), corrected for the number of plans; *keeps*
    #: needs less than 2.5 %. None without a common seed.
    p_value: float | None = None
    #: Whether the plan is surely better than its reference, with the same correction.
    is_better: bool = False
    #: The plans with two seeds and more that the reference is compared with, which the p-value is corrected for.
    compared: int = 1

    @property
    def is_decided_alone(self) -> bool:
        """Whether the plan alone would keep or lose the metric, and is undecided as one of several."""
        return (
            self.verdict == "undecided"
            and self.loss is not None
            and _verdict(self.loss.p_value(self.margin), self.loss.negated().p_value(-self.margin)) != "undecided"
        )

    @property
    def is_near(self) -> bool:
        """Whether the mean is within the margin, however sure that is."""
        return self.loss is not None and self.loss.mean <= self.margin


def judge(
    values: Mapping[Any, float], reference: Mapping[Any, float], margin: float, better: Literal["higher", "lower"]
) -> Judgement:
    """Compare one plan with its reference over the seeds that both have.

    A plan *keeps* the metric where the interval of 95 % of its loss lies below the margin: a one-sided test at 2.5 %
    of the hypothesis that it loses the margin or more. It *loses* where the interval lies above the margin. All else is
    *undecided*, one seed always. Several plans beside one reference: :func:`judge_all`.

    >>> judge({0: 0.90, 1: 0.91, 2: 0.90}, {0: 0.90, 1: 0.91, 2: 0.901}, 0.009, "higher").verdict
    'keeps'
    >>> judge({0: 0.90}, {0: 0.90}, 0.009, "higher").verdict
    'undecided'
    """
    return judge_all({"": values}, reference, margin, better)[""]


def judge_all(
    plans: Mapping[Key, Mapping[Any, float]],
    reference: Mapping[Any, float],
    margin: float,
    better: Literal["higher", "lower"],
) -> dict[Key, Judgement]:
    """Compare several plans with one reference, as :func:`judge` does with one.

    Of twenty plans that lose exactly the margin, each would be found to keep it with a probability of 2.5 %, and some
    plan in up to 40 % of all studies. The p-values are therefore corrected by :func:`holm` over all plans with two
    seeds or more: the probability that *any* plan keeps the metric by chance alone is at most 2.5 %, and as much that
    any loses it, or is better. The intervals of :attr:`Judgement.loss` are those of each plan alone.

    >>> seeds = {0: 0.90, 1: 0.91, 2: 0.90}
    >>> plan = {0: 0.899, 1: 0.907, 2: 0.897}
    >>> judge(plan, seeds, 0.006, "higher").verdict
    'keeps'
    >>> {judgement.verdict for judgement in judge_all(dict.fromkeys("abc", plan), seeds, 0.006, "higher").values()}
    {'undecided'}
    """
    if better not in ("higher", "lower"):
        raise RunError(f"better is {better!r}: of a metric, 'higher' or 'lower' is better.")
    losses = {key: _loss(values, reference, better) for key, values in plans.items()}
    tested = {key: loss for key, loss in losses.items() if loss is not None and loss.pairs > 1}

    def corrected(p_value: Callable[[Difference], float]) -> dict[Key, float]:
        return dict(zip(tested, holm([p_value(loss) for loss in tested.values()]), strict=True))

    keeps = corrected(lambda loss: loss.p_value(margin))
    loses = corrected(lambda loss: loss.negated().p_value(-margin))
    is_better = corrected(lambda loss: loss.p_value(0.0))
    judgements = {}
    for key, loss in losses.items():
        if key not in tested or loss is None:
            judgements[key] = Judgement("undecided", loss, margin, None if loss is None else 1.0)
            continue
        verdict = _verdict(keeps[key], loses[key])
        judgements[key] = Judgement(verdict, loss, margin, keeps[key], is_better[key] < LEVEL, len(tested))
    return judgements


def _verdict(keeps: float, loses: float) -> Verdict:
    return "keeps" if keeps < LEVEL else "loses" if loses < LEVEL else "undecided"


def _loss(values: Mapping[Any, float], reference: Mapping[Any, float], better: str) -> Difference | None:
    """By how much a plan is worse than its reference; None without a common seed."""
    seeds = sorted(set(values).intersection(reference))
    if not seeds:
        return None
    own, standard = [values[seed] for seed in seeds], [reference[seed] for seed in seeds]
    return Difference.of(standard, own) if better == "higher" else Difference.of(own, standard)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values of several hypotheses, corrected for their number (Holm 1979), whatever their dependence.

    Where hypotheses are rejected whose corrected p-value is below a level, the probability that a true one is among
    them is at most that level.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def student_probability(t: float, freedom: int) -> float:
    """The distribution function of Student's t with a whole number of degrees of freedom.

    >>> round(student_probability(4.3027, 2), 4)
    0.975
    """
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = freedom % 2
    total, term = 0.0, cosine if is_odd else 1.0
    for number in range(freedom // 2):  # the finite series for whole degrees of freedom
        total += term
        term *= cosine * cosine * (2 * number + 1 + is_odd) / (2 * number + 2 + is_odd)
    share = 2 / math.pi * (angle + sine * total) if is_odd else sine * total
    return 0.5 + share / 2


@cache
def student_quantile(share: float, freedom: int) -> float:
    """The value that Student's t stays below with that probability, above a half.

    >>> round(student_quantile(0.975, 1), 3), round(student_quantile(0.975, 4), 3)
    (12.706, 2.776)
    """
    low, high = 0.0, 1.0
    while student_probability(high, freedom) < share:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if student_probability(middle, freedom) < share else (low, middle)
    return high


# --- Cost and metric: correlations


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
