"""Schedules that hold still and then change (static, steps, a late switch, a deficit, pieces), bounds and functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from bitplan.errors import PlanError, ScheduleError
from bitplan.extensions import SCHEDULES
from bitplan.plans.code import CodeReference, not_allowed
from bitplan.plans.schedules.base import LowToHigh, RunPoint, Schedule, Whole, check_bits, check_range


@dataclass(frozen=True)
class Static(Schedule):
    """The same bits throughout."""

    width: int

    def __post_init__(self) -> None:
        check_bits(bits=self.width)

    @property
    def name(self) -> str:
        return "static"

    @property
    def lowest(self) -> int:
        return self.width

    @property
    def highest(self) -> int:
        return self.width

    def at(self, steps: Whole, total: int) -> Whole:
        return np.full_like(steps, self.width)

    def to_data(self) -> dict[str, Any]:
        return {"name": self.name, "bits": self.width}


@dataclass(frozen=True)
class StepList(Schedule):
    """One width after another, changing at given moments.

    >>> StepList((4, 6, 8), (RunPoint.of("50%"), RunPoint.of("75%"))).table(8).tolist()
    [4, 4, 4, 4, 6, 6, 8, 8]
    """

    widths: tuple[int, ...]
    #: When each width but the first begins.
    changes: tuple[RunPoint, ...]

    def __post_init__(self) -> None:
        _check_changes(len(self.widths), "widths", self.changes)
        for width in self.widths:
            check_bits(bits=width)

    @property
    def name(self) -> str:
        return "steps"

    @property
    def lowest(self) -> int:
        return min(self.widths)

    @property
    def highest(self) -> int:
        return max(self.widths)

    def run_points(self) -> Iterator[RunPoint]:
        yield from self.changes

    def at(self, steps: Whole, total: int) -> Whole:
        begins = np.array([change.first_step(total) for change in self.changes], dtype=np.int64)
        chosen: Whole = np.array(self.widths, dtype=np.int64)[(steps[:, None] >= begins).sum(1)]
        return chosen

    def to_data(self) -> dict[str, Any]:
        at = [change.to_data() for change in self.changes]
        return {"name": self.name, "bits": list(self.widths), "at": at}

    def __str__(self) -> str:
        return f"steps {'-'.join(map(str, self.widths))}"


@dataclass(frozen=True)
class LateSwitch(LowToHigh):
    """Low, and then high for the last share of the run (or the last so many steps).

    Whether only the forward pass or the backward pass, too, switches is said by the quantizers that follow it.
    """

    low: int
    high: int
    #: How long the high part is.
    last: RunPoint = field(default_factory=lambda: RunPoint.of("10%"))

    def __post_init__(self) -> None:
        check_range(self.low, self.high)

    @property
    def name(self) -> str:
        return "late"

    def run_points(self) -> Iterator[RunPoint]:
        yield self.last

    def at(self, steps: Whole, total: int) -> Whole:
        if self.last.share is not None:
            begins = RunPoint(share=1 - self.last.share).first_step(total)
        else:
            begins = total - self.last.first_step(total)
        return np.where(steps >= begins, self.high, self.low)

    def to_data(self) -> dict[str, Any]:
        return {"name": self.name, "low": self.low, "high": self.high, "last": self.last.to_data()}

    def __str__(self) -> str:
        last = self.last if self.last.share is not None else f"{self.last.step} steps"
        return f"late {self.low}, last {last} {self.high}"


@dataclass(frozen=True)
class Deficit(LowToHigh):
    """High, but low inside a window: how critical learning periods are looked for.

    >>> Deficit(3, 8, RunPoint.of("25%"), RunPoint.of("50%")).table(8).tolist()
    [8, 8, 3, 3, 8, 8, 8, 8]
    """

    low: int
    high: int
    start: RunPoint
    end: RunPoint

    def __post_init__(self) -> None:
        check_range(self.low, self.high)
        _check_order((self.start, self.end))

    @property
    def name(self) -> str:
        return "deficit"

    def run_points(self) -> Iterator[RunPoint]:
        yield from (self.start, self.end)

    def at(self, steps: Whole, total: int) -> Whole:
        inside = (steps >= self.start.first_step(total)) & (steps < self.end.first_step(total))
        return np.where(inside, self.low, self.high)

    def to_data(self) -> dict[str, Any]:
        window = {"start": self.start.to_data(), "end": self.end.to_data()}
        return {"name": self.name, "low": self.low, "high": self.high, **window}

    def __str__(self) -> str:
        return f"deficit {self.low} from {self.start} to {self.end}, else {self.high}"


@dataclass(frozen=True)
class Piecewise(Schedule):
    """One schedule after another; each takes its piece of the run for the whole.

    >>> half = RunPoint.of("50%")
    >>> Piecewise((Static(4), StepList((6, 8), (half,))), (half,)).table(8).tolist()
    [4, 4, 4, 4, 6, 6, 8, 8]
    """

    pieces: tuple[Schedule, ...]
    #: When each piece but the first begins.
    changes: tuple[RunPoint, ...]

    def __post_init__(self) -> None:
        _check_changes(len(self.pieces), "pieces", self.changes)

    @property
    def name(self) -> str:
        return "pieces"

    @property
    def lowest(self) -> int:
        return min(piece.lowest for piece in self.pieces)

    @property
    def highest(self) -> int:
        return max(piece.highest for piece in self.pieces)

    def run_points(self) -> Iterator[RunPoint]:
        yield from self.changes
        for piece in self.pieces:
            yield from piece.run_points()

    def code(self) -> Iterator[CodeReference]:
        for piece in self.pieces:
            yield from piece.code()

    def with_code(self) -> Piecewise:
        return replace(self, pieces=tuple(piece.with_code() for piece in self.pieces))

    def at(self, steps: Whole, total: int) -> Whole:
        inner = [min(change.first_step(total), total) for change in self.changes]
        bits = np.zeros_like(steps)
        for piece, (begin, end) in zip(self.pieces, pairwise([0, *inner, total]), strict=True):
            inside = (steps >= begin) & (steps < end)
            if inside.any():
                bits[inside] = piece.at(steps[inside] - begin, end - begin)
        return bits

    def to_data(self) -> dict[str, Any]:
        at = [change.to_data() for change in self.changes]
        return {"name": self.name, "pieces": [piece.to_data() for piece in self.pieces], "at": at}

    def __str__(self) -> str:
        return f"{self.pieces[0]}" + "".join(
            f", from {at} {piece}" for at, piece in zip(self.changes, self.pieces[1:], strict=True)
        )


@dataclass(frozen=True)
class AtLeast(Schedule):
    """Another schedule, but never below so many bits.

    >>> AtLeast(5, Deficit(3, 8, RunPoint.of("25%"), RunPoint.of("50%"))).table(8).tolist()
    [8, 8, 5, 5, 8, 8, 8, 8]
    """

    least: int
    schedule: Schedule

    def __post_init__(self) -> None:
        check_bits(least=self.least)
        if not isinstance(self.schedule, Schedule):
            raise ScheduleError(f"at-least raises the bits of another schedule, not of {self.schedule!r}.")

    @property
    def name(self) -> str:
        return "at-least"

    @property
    def lowest(self) -> int:
        return max(self.least, self.schedule.lowest)

    @property
    def highest(self) -> int:
        return max(self.least, self.schedule.highest)

    def run_points(self) -> Iterator[RunPoint]:
        yield from self.schedule.run_points()

    def code(self) -> Iterator[CodeReference]:
        yield from self.schedule.code()

    def with_code(self) -> AtLeast:
        return replace(self, schedule=self.schedule.with_code())

    def at(self, steps: Whole, total: int) -> Whole:
        return np.maximum(self.schedule.at(steps, total), self.least)

    def to_data(self) -> dict[str, Any]:
        return {"name": self.name, "least": self.least, "schedule": self.schedule.to_data()}

    def __str__(self) -> str:
        return f"{self.schedule}, at least {self.least}"


@dataclass(frozen=True)
class Function(LowToHigh):
    """A function of the user's own, (step, total) -> bits; a plan file names it as ``module:name``."""

    function: CodeReference | Callable[[int, int], int] | str
    low: int
    high: int

    def __post_init__(self) -> None:
        check_range(self.low, self.high)
        if not isinstance(self.function, (str, CodeReference)) and not callable(self.function):
            raise ScheduleError(f"a schedule's function is called with step and total: {self.function!r} cannot be.")
        try:
            object.__setattr__(self, "function", CodeReference.of(self.function))
        except PlanError as error:
            raise ScheduleError(str(error)) from None

    @property
    def name(self) -> str:
        return "function"

    @property
    def reference(self) -> CodeReference:
        assert isinstance(self.function, CodeReference)
        return self.function

    def code(self) -> Iterator[CodeReference]:
        yield self.reference

    def with_code(self) -> Function:
        return replace(self, function=self.reference.imported(SCHEDULES))

    def at(self, steps: Whole, total: int) -> Whole:
        return np.array([self._checked(int(step), total) for step in steps], dtype=np.int64)

    def _checked(self, step: int, total: int) -> int:
        if self.reference.target is None:
            raise not_allowed(self.reference.name)
        bits = self.reference.target(step, total)
        if isinstance(bits, bool) or bits != int(bits) or not self.low <= bits <= self.high:
            raise ScheduleError(
                f"the schedule's function gave {bits!r} at step {step} of {total}: let it return a whole number of "
                f"{self.low} to {self.high}."
            )
        return int(bits)

    def to_data(self) -> dict[str, Any]:
        return {"name": self.name, "function": self.reference.name, "low": self.low, "high": self.high}


def _check_changes(count: int, parts: str, changes: tuple[RunPoint, ...]) -> None:
    """There is a moment, in order, between each part and the next."""
    if not count or count != len(changes) + 1:
        raise ScheduleError(
            f"{count} {parts} change {max(count - 1, 0)} times, but at has {len(changes)} moments: give one moment "
            f"fewer than {parts}."
        )
    _check_order(changes)


def _check_order(moments: tuple[RunPoint, ...]) -> None:
    """Moments of one kind come in order; between a step and a share only a run's length decides."""
    for earlier, later in pairwise(moments):
        if earlier.share is not None and later.share is not None:
            is_ordered = earlier.share < later.share
        elif earlier.step is not None and later.step is not None:
            is_ordered = earlier.step < later.step
        else:
            continue
        if not is_ordered:
            raise ScheduleError(f"{later} does not come after {earlier}: put the moments in order, each only once.")
