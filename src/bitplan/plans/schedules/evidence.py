"""Which plan to take for a saving, by the runs that were trained with it, and what they do not show.

The evidence is one study with several seeds: ResNet-20 on CIFAR-10, ten schedules of 3 to 8 bits and static plans
(docs/results). A test compares its figures with the study's file. A plan is preferred for its measured metric, a static
plan where no schedule is clearly better: it needs no schedule.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bitplan.errors import ScheduleError
from bitplan.plans.schedules.base import Schedule
from bitplan.plans.schedules.cyclic import DEFAULT_CYCLES, TEN
from bitplan.plans.schedules.named import schedule
from bitplan.plans.schedules.piecewise import Static
from bitplan.significance import Difference

#: How a saving that was asked for may differ from that of a plan by rounding.
_SLACK = 0.0005


@dataclass(frozen=True)
class Trained:
    """A plan of a study: its saving of static plans' bit operations at the highest bits, and its metric by seed."""

    saving: float
    values: tuple[float, ...]


@dataclass(frozen=True)
class Study:
    """Plans that were trained with the same seeds. The metric is an accuracy in per cent."""

    name: str
    low: int
    high: int
    #: The plan at the highest bits throughout.
    base: Trained
    static: Mapping[str, Trained]
    schedules: Mapping[str, Trained]


#: docs/results/cifar.json, seeds 0 to 2.
CIFAR = Study(
    "ResNet-20 on CIFAR-10, 8,000 iterations, three seeds",
    low=3,
    high=8,
    base=Trained(0.0, (83.97, 83.27, 83.96)),
    static={
        "static at the cost of CR": Trained(0.367, (83.90, 83.79, 83.85)),
        "static 6": Trained(0.437, (83.60, 83.50, 83.58)),
    },
    schedules={
        "CR": Trained(0.367, (83.42, 83.40, 83.26)),
        "LR": Trained(0.373, (83.80, 83.18, 83.63)),
        "ER": Trained(0.178, (84.04, 83.63, 84.25)),
        "RR": Trained(0.601, (82.49, 82.51, 82.44)),
        "CT": Trained(0.366, (83.49, 83.24, 83.33)),
        "LT": Trained(0.372, (83.85, 83.60, 83.68)),
        "ETV": Trained(0.365, (83.61, 83.33, 82.82)),
        "ETH": Trained(0.177, (83.69, 83.83, 83.57)),
        "RTV": Trained(0.363, (83.08, 83.13, 83.31)),
        "RTH": Trained(0.601, (82.76, 82.21, 82.62)),
    },
)


@dataclass(frozen=True)
class Recommendation:
    """A plan for a saving, the evidence for it, and what is not known."""

    schedule: Schedule
    #: Of the bit operations at the highest bits throughout.
    saving: float
    reason: str
    #: The metric less that of the highest bits throughout; None where no such plan was trained.
    difference: Difference | None
    unknown: tuple[str, ...]

    @property
    def name(self) -> str:
        """The schedule's name, or ``static``."""
        return self.schedule.name


def recommend(saving: float, low: int, high: int, total: int = 64_000, cycles: int = DEFAULT_CYCLES) -> Recommendation:
    """The plan that saves that share of the bit operations of static `high` and was measured to be the best.

    A static plan is taken where no schedule is clearly better.

    >>> recommend(0.35, 3, 8).name, recommend(0.5, 3, 8).name
    ('static', 'RTH')
    """
    if not 0 <= saving < 1:
        raise ScheduleError(f"a saving of {saving:g} does not exist: give a share of 0 to 1, such as 0.4.")
    made = {name: schedule(name, low=low, high=high, cycles=cycles) for name in TEN}
    savings = {name: 1 - cyclic.summary(total).relative_cost for name, cyclic in made.items()}
    able = [name for name in made if savings[name] >= saving - _SLACK]
    width = static_width(saving, low, high)
    if not able and width is None:
        most = max(max(savings.values()), 1 - static_cost(low, high))
        raise ScheduleError(
            f"no plan of {low}-{high} bits saves {saving:.0%}: the most is {most:.0%}; lower the lowest bits, if a "
            f"range test allows."
        )
    study = CIFAR if (low, high) == (CIFAR.low, CIFAR.high) else None
    if study is None:
        return _without_study(saving, width, made, savings, able, high)
    static = min(
        (trained for trained in study.static.values() if trained.saving >= saving - _SLACK),
        key=lambda trained: trained.saving,
        default=None,
    )
    schedules = {name: study.schedules[name] for name in able}
    best = max(schedules, key=lambda name: statistics.fmean(schedules[name].values), default=None)
    if static is not None and width is not None:
        gain = None if best is None else Difference.of(schedules[best].values, static.values)
        if gain is None or not gain.is_sure or gain.mean <= 0:
            return _static(saving, width, high, study, static, schedules, None if gain is None else (best, gain))
    if best is None:
        assert width is not None
        return _without_study(saving, width, made, savings, able, high)
    return _scheduled(best, made[best], savings[best], study, schedules, width, high)


def _points(difference: Difference) -> str:
    mean, low, high = (f"{value:+.2f}" for value in (difference.mean, difference.low, difference.high))
    return f"{mean} points ({low} to {high})"


def static_cost(bits: int, high: int) -> float:
    """The cost of these bits throughout, with the backward pass at `high`, relative to `high` throughout.

    >>> static_cost(8, 8), static_cost(4, 8)
    (1.0, 0.4166666666666667)
    """
    return (bits * bits + 2 * bits * high) / (3 * high * high)


def static_width(saving: float, low: int, high: int) -> int | None:
    """The most bits that save that share throughout; layers may have one bit more until the saving is met exactly."""
    return max((bits for bits in range(low, high + 1) if 1 - static_cost(bits, high) >= saving - _SLACK), default=None)


def _static(
    saving: float,
    width: int,
    high: int,
    study: Study,
    trained: Trained,
    schedules: Mapping[str, Trained],
    gain: tuple[str | None, Difference] | None,
) -> Recommendation:
    difference = Difference.of(trained.values, study.base.values)
    sentences = [
        f"A static plan of {width} bits{_and_more(width, high)} that saves {saving:.0%}: in our study ({study.name}) "
        f"the one that saves {trained.saving:.0%} is {_points(difference)} from static {high} bits."
    ]
    alike = [name for name, plan in schedules.items() if abs(plan.saving - trained.saving) < 0.01]
    if alike:
        means = [statistics.fmean(values) for values in zip(*(schedules[name].values for name in alike), strict=True)]
        pooled = Difference.of(means, trained.values)
        verdict = "worse" if pooled.high < 0 else "better" if pooled.low > 0 else "no different as far as one can see"
        sentences.append(f"The {len(alike)} schedules that save as much are {verdict}: {_points(pooled)}.")
    if gain is not None and gain[0] not in alike:
        name, more = gain
        sentences.append(f"The best schedule that saves as much, {name}, is {_points(more)} from it: no clear gain.")
    sentences.append(f"Make it with: bitplan plan cpt TARGET --saving {saving:g}.")
    return Recommendation(Static(width), saving, " ".join(sentences), difference, _unknown(study))


def _scheduled(
    name: str,
    chosen: Schedule,
    saving: float,
    study: Study,
    schedules: Mapping[str, Trained],
    width: int | None,
    high: int,
) -> Recommendation:
    difference = Difference.of(schedules[name].values, study.base.values)
    reason = (
        f"{name} saves {saving:.0%} of the bit operations of static {high} bits: of the schedules that save as much it "
        f"has the best mean in our study ({study.name}), {_points(difference)} from static {high} bits."
    )
    alike = [other for other in schedules if other != name and not _is_surely_better(schedules[name], schedules[other])]
    if alike:
        reason += f" It is not surely better than {', '.join(alike)}."
    unknown = _unknown(study)
    if width is not None:
        static = (
            f"a static plan of {width} bits{_and_more(width, high)} which saves as much as was asked for, was not "
            f"trained; where one was, it was better than the schedules of its cost"
        )
        unknown = (static, *unknown)
    return Recommendation(chosen, saving, reason, difference, unknown)


def _without_study(
    saving: float,
    width: int | None,
    made: Mapping[str, Schedule],
    savings: Mapping[str, float],
    able: Sequence[str],
    high: int,
) -> Recommendation:
    """Outside of the study's range there is only what it suggests: a static plan, or the schedule that saves least."""
    unknown = (
        f"no plan of this range, or with this saving, was trained with several seeds; {CIFAR.low}-{CIFAR.high} bits "
        f"were ({CIFAR.name}), and a static plan was better there than the schedules of its cost",
        *_unknown(CIFAR)[1:],
    )
    if width is not None:
        reason = (
            f"A static plan of {width} bits{_and_more(width, high)} that saves {saving:.0%}. Make it with: bitplan "
            f"plan cpt TARGET --saving {saving:g} --bits {width}-{high}."
        )
        return Recommendation(Static(width), saving, reason, None, unknown)
    name = min(able, key=lambda name: savings[name])
    reason = f"{name} saves {savings[name]:.0%} of the bit operations of static {high} bits, the least that is enough."
    return Recommendation(made[name], savings[name], reason, None, unknown)


def _is_surely_better(plan: Trained, other: Trained) -> bool:
    return Difference.of(plan.values, other.values).low > 0


def _and_more(width: int, high: int) -> str:
    return "," if width == high else f", and {width + 1} in some layers,"


def _unknown(study: Study) -> tuple[str, ...]:
    return (
        f"ranges other than {study.low}-{study.high} bits",
        "other networks and data: on graphs no schedule's mean was 1 % below static 8's, and language models were "
        "trained with one seed (docs/results)",
        "longer runs: after three times the steps, with one seed, RR's loss fell from 1.3 to 0.4 points",
    )
