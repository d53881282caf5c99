"""What a schedule is: a whole number of bits for every step of a run.

A schedule knows nothing of tensors. A plan gives it to quantizers, whose width it then moves.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bitplan.errors import ScheduleError

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from bitplan.plans.code import CodeReference


# --- Points of a training run: after so many steps, or after a share of all steps


_PERCENT = re.compile(r"\s*([0-9]{1,3}(?:\.[0-9]{1,9})?)\s*%\s*")


@dataclass(frozen=True)
class RunPoint:
    """A point between two steps. Shares are exact fractions, so that no step falls on the wrong side of one.

    >>> RunPoint.of("90%").first_step(1000), RunPoint.of(250).first_step(1000)
    (900, 250)
    """

    #: After so many steps; None where the moment is a share.
    step: int | None = None
    #: After this share of all steps; None where the moment is a step.
    share: Fraction | None = None

    def __post_init__(self) -> None:
        if (self.step is None) == (self.share is None):
            raise ScheduleError("a moment is a step or a share of all steps: give one of the two.")
        if self.step is not None and self.step < 0:
            raise ScheduleError(f"a run has no step {self.step}: give a step from 0 on, or a share such as 90%.")
        if self.share is not None and not 0 <= self.share <= 1:
            raise ScheduleError(f"{self} of a run do not exist: give a share of 0% to 100%.")

    @classmethod
    def of(cls, value: RunPoint | int | float | str) -> RunPoint:
        """A whole number is a step, ``"90%"`` a share, and so is a number such as 0.9 between 0 and 1."""
        if isinstance(value, RunPoint):
            return value
        if isinstance(value, str) and (percent := _PERCENT.fullmatch(value)):
            return cls(share=Fraction(percent[1]) / 100)
        if isinstance(value, float) and 0 < value < 1:
            return cls(share=Fraction(repr(value)))
        if not isinstance(value, bool) and isinstance(value, (int, float)) and value == int(value):
            return cls(step=int(value))
        raise ScheduleError(f"{value!r} is no moment of a run: give a step such as 5000, or a share such as 90%.")

    def first_step(self, total: int) -> int:
        """The first step that is not before this moment, in a run of `total` steps."""
        if self.step is not None:
            return self.step
        assert self.share is not None
        return math.ceil(self.share * total)

    def to_data(self) -> int | str:
        """As a plan writes it."""
        return self.step if self.step is not None else str(self)

    def __str__(self) -> str:
        if self.share is None:
            return f"step {self.step}"
        percent = f"{float(self.share * 100):.11f}".rstrip("0").rstrip(".")
        return f"{percent}%"


Whole = NDArray[np.int64]

#: The fewest and the most bits that a schedule may ask for.
LEAST_BITS, MOST_BITS = 1, 32
#: A run has at most so many steps; positions are counted in 64-bit numbers.
MOST_STEPS = 2**40
#: Progress that is told as a share is counted in so many steps.
FINE_STEPS = 10**9


@dataclass(frozen=True)
class Position:
    """Where a run is: about to make `step` (from 0) of `total`; after the last step it stays there.

    >>> Position.of_progress(0.25).share
    0.25
    """

    step: int
    total: int

    def __post_init__(self) -> None:
        if self.step < 0:
            raise ScheduleError(f"a run has no step {self.step}: steps are counted from 0.")
        check_total(self.total)
        object.__setattr__(self, "step", min(self.step, self.total - 1))

    @classmethod
    def of_progress(cls, share: float) -> Position:
        """After that share of the run, 0 to 1."""
        if not 0 <= share <= 1:
            raise ScheduleError(f"progress is the share of the run that is done, 0 to 1, not {share!r}.")
        return cls(round(share * FINE_STEPS), FINE_STEPS)

    @property
    def share(self) -> float:
        return self.step / self.total


@dataclass(frozen=True)
class ScheduleSummary:
    """What ``bitplan schedules NAME --json`` tells."""

    name: str
    first: int
    last: int
    mean_bits: float
    #: Share of the steps that run at the schedule's highest bits.
    share_at_max: float
    #: Bit operations, with the backward pass at the highest bits, as a share of those at the highest bits throughout.
    relative_cost: float


class Schedule(ABC):
    """Bits for every step; a frozen value."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What tables call it: ``CR``, or ``late``."""

    @property
    @abstractmethod
    def lowest(self) -> int:
        """The fewest bits it ever asks for."""

    @property
    @abstractmethod
    def highest(self) -> int:
        """The most bits it ever asks for."""

    @abstractmethod
    def at(self, steps: Whole, total: int) -> Whole:
        """The bits at these steps, each in 0..total-1."""

    @abstractmethod
    def to_data(self) -> dict[str, Any]:
        """As a plan writes it; :func:`bitplan.plans.schedules.schedule_from_data` gives the same schedule back."""

    def run_points(self) -> Iterator[RunPoint]:
        """Every point of a run that it names."""
        yield from ()

    def code(self) -> Iterator[CodeReference]:
        """The functions of the user's own that it calls."""
        yield from ()

    def with_code(self) -> Schedule:
        """The same with these functions imported."""
        return self

    def bits(self, step: int, total: int) -> int:
        """The bits of training step `step` (from 0) of `total`; after the last step those of the last.

        >>> from bitplan.plans.schedules import schedule
        >>> [schedule("LR", low=3, high=8, cycles=1).bits(step, 100) for step in (0, 50, 99)]
        [3, 6, 8]
        """
        if step < 0:
            raise ScheduleError(f"a run has no step {step}: steps are counted from 0.")
        check_total(total)
        return int(self.at(np.array([min(step, total - 1)], dtype=np.int64), total)[0])

    def table(self, total: int) -> Whole:
        """The bits of every step of a run."""
        check_total(total)
        return self.at(np.arange(total, dtype=np.int64), total)

    def summary(self, total: int) -> ScheduleSummary:
        """The schedule in six figures, for a run of `total` steps."""
        bits = self.table(total)
        top = self.highest
        # In whole numbers: m (q^2 + 2 q q_backward) a step, see bitplan.estimate_cost.
        cost = int((bits * bits + 2 * bits * top).sum())
        return ScheduleSummary(
            self.name,
            int(bits[0]),
            int(bits[-1]),
            float(bits.mean()),
            float((bits == top).mean()),
            cost / (3 * top * top * total),
        )

    def plot(self, total: int) -> Figure:
        """A drawing of the bits over a run of `total` steps, as a plotly figure; needs plotly."""
        from bitplan.plans.schedules.plots import schedule_figure

        return schedule_figure(self, total)

    def __str__(self) -> str:
        """A few words, such as ``CR 3-8 x8``."""
        width = f"{self.lowest}" if self.lowest == self.highest else f"{self.lowest}-{self.highest}"
        return f"{self.name} {width}"


class LowToHigh(Schedule):
    """A schedule whose fields `low` and `high` are the fewest and the most bits."""

    low: int
    high: int

    @property
    def lowest(self) -> int:
        return self.low

    @property
    def highest(self) -> int:
        return self.high


def check_total(total: int) -> None:
    if not 1 <= total <= MOST_STEPS:
        raise ScheduleError(f"a run has 1 to {MOST_STEPS:,} steps, not {total}.")


def check_bits(**widths: int) -> None:
    """Each is a whole number of bits that a format may have."""
    for name, bits in widths.items():
        if isinstance(bits, bool) or not isinstance(bits, int):
            raise ScheduleError(f"{name} is a whole number of bits, not {bits!r}.")
        if not LEAST_BITS <= bits <= MOST_BITS:
            raise ScheduleError(f"{name} is {bits}; it must be {LEAST_BITS} to {MOST_BITS}.")


def check_range(low: int, high: int) -> None:
    check_bits(low=low, high=high)
    if low > high:
        raise ScheduleError(f"low is {low} and high is {high}: exchange them.")
