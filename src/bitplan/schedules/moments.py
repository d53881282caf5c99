"""Points of a training run: after so many steps, or after a share of all steps."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from bitplan.errors import ScheduleError

_PERCENT = re.compile(r"\s*([0-9]{1,3}(?:\.[0-9]{1,9})?)\s*%\s*")


@dataclass(frozen=True)
class Moment:
    """A point between two steps. Shares are exact fractions, so that no step falls on the wrong side of one.

    >>> Moment.of("90%").first_step(1000), Moment.of(250).first_step(1000)
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
    def of(cls, value: Moment | int | float | str) -> Moment:
        """A whole number is a step, ``"90%"`` a share, and so is a number such as 0.9 between 0 and 1."""
        if isinstance(value, Moment):
            return value
        if isinstance(value, str) and (found := _PERCENT.fullmatch(value)):
            return cls(share=Fraction(found[1]) / 100)
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
