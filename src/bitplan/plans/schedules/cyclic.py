"""Cyclic schedules: the ten of Wolfe & Kyrillidis 2024 (arXiv 2403.02243), and every other combination of their parts.

A schedule is a profile, a number of cycles n, and a shape. With T steps, step t lies in cycle k = (t n) // T at
z = ((t n) mod T) / T, both from whole numbers, so that no cycle is a step too long and none wraps into one too many.

* *repeated*: every cycle grows from the lowest bits;
* *triangular*: even cycles fall and odd ones grow, so that n = 8 are four triangles. A fall is the growth turned upside
  down (``V``, vertical) or run backwards (``H``, horizontal); for the profiles C and L that is the same.

A schedule whose last cycle grows ends at the highest bits: z stays below 1, so the very last step is lifted there.

The authors' code has periods P of a whole number of steps, k = t // P and z = (t mod P) / P, and lifts nothing:
``published``, P = int(T / n) + 1, ends before its last cycle does, on short runs below the highest bits; ``truncated``,
P = int(T / n) (their ImageNet code), wraps into a new cycle and ends at the lowest bits unless n divides T.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from bitplan.errors import ScheduleError, nearest_names
from bitplan.plans.schedules.base import LowToHigh, Whole, check_range

Share = NDArray[np.float64]
Profile = Literal["C", "L", "E", "R"]
Shape = Literal["repeated", "triangular"]
Reflection = Literal["V", "H"]
Period = Literal["exact", "published", "truncated"]

#: The cycles of Wolfe & Kyrillidis; 2 serve a fine-tune of two epochs, and the first paper (Fu et al. 2021) had 32.
DEFAULT_CYCLES = 8
MOST_CYCLES = 10**6


def _cosine(z: Share) -> Share:
    return (1 - np.cos(np.pi * z)) / 2


def _linear(z: Share) -> Share:
    return z


def _exponential(z: Share) -> Share:
    return 1 - np.exp(-4 * z)


def _reverse_exponential(z: Share) -> Share:
    left = 1 - z
    return 1 - left / (0.1 + 0.9 * left)


#: Letter -> how far a cycle has grown, 0 to about 1, at a share z of it.
PROFILES: dict[Profile, Callable[[Share], Share]] = {
    "C": _cosine,
    "L": _linear,
    "E": _exponential,
    "R": _reverse_exponential,
}
#: Letter -> its name, and what it does.
PROFILE_WORDS: dict[Profile, str] = {
    "C": "cosine",
    "L": "linear",
    "E": "exponential: rises at once and sits high",
    "R": "reverse exponential: sits low and jumps at the end",
}


@dataclass(frozen=True)
class Cyclic(LowToHigh):
    """Bits that go up, or down and up, in n cycles.

    >>> str(Cyclic("C", 3, 8)), Cyclic("E", 3, 8, shape="triangular", reflection="H").name
    ('CR 3-8 x8', 'ETH')
    """

    profile: Profile
    low: int
    high: int
    cycles: int = DEFAULT_CYCLES
    shape: Shape = "repeated"
    #: How a fall mirrors the growth; only triangular schedules have one.
    reflection: Reflection | None = None
    #: The length of a cycle: T / n, or that of the authors' code.
    period: Period = "exact"

    def __post_init__(self) -> None:
        check_range(self.low, self.high)
        for what, value, choices in (
            ("profile", self.profile, tuple(PROFILES)),
            ("shape", self.shape, get_args(Shape)),
            ("period", self.period, get_args(Period)),
        ):
            if value not in choices:
                raise ScheduleError(f"there is no {what} {value!r}; {nearest_names(str(value), choices)}")
        if isinstance(self.cycles, bool) or not isinstance(self.cycles, int) or not 1 <= self.cycles <= MOST_CYCLES:
            raise ScheduleError(f"cycles is {self.cycles!r}; it must be a whole number of 1 to {MOST_CYCLES:,}.")
        if self.shape == "repeated" and self.reflection is not None:
            raise ScheduleError("a repeated schedule never falls: drop reflection, or use the shape triangular.")
        if self.shape == "triangular":
            if self.reflection not in (None, *get_args(Reflection)):
                raise ScheduleError(f"reflection is V (upside down) or H (backwards), not {self.reflection!r}.")
            if self.profile in ("C", "L"):
                object.__setattr__(self, "reflection", None)  # both are the same
            elif self.reflection is None:
                object.__setattr__(self, "reflection", "V")

    @property
    def name(self) -> str:
        return f"{self.profile}{'R' if self.shape == 'repeated' else 'T'}{self.reflection or ''}"

    @property
    def ends_growing(self) -> bool:
        return self.shape == "repeated" or self.cycles % 2 == 0

    def at(self, steps: Whole, total: int) -> Whole:
        if self.period == "exact":
            scaled = steps * self.cycles
            cycle, within = scaled // total, (scaled % total) / total
        else:
            length = total // self.cycles + 1 if self.period == "published" else max(total // self.cycles, 1)
            cycle, within = steps // length, (steps % length) / length
        growth = PROFILES[self.profile]
        grown = growth(within)
        if self.shape == "triangular":
            fallen = growth(1 - within) if self.reflection == "H" else 1 - grown
            grown = np.where(cycle % 2 == 0, fallen, grown)
        bits = np.rint(self.low + (self.high - self.low) * grown).astype(np.int64)  # rint: half to even
        is_lifted = self.ends_growing and self.period == "exact"
        return np.where(steps == total - 1, self.high, bits) if is_lifted else bits

    def to_data(self) -> dict[str, Any]:
        data: dict[str, Any] = {"name": self.name, "low": self.low, "high": self.high, "cycles": self.cycles}
        return data if self.period == "exact" else {**data, "period": self.period}

    def __str__(self) -> str:
        period = "" if self.period == "exact" else f", {self.period} periods"
        return f"{super().__str__()} x{self.cycles}{period}"


@dataclass(frozen=True)
class Ramp(LowToHigh):
    """One growth, or one fall, over the whole run; its last step is where it leads to.

    >>> Ramp("L", 4, 8, falls=True).table(5).tolist()
    [8, 7, 6, 6, 4]
    """

    profile: Profile
    low: int
    high: int
    falls: bool = False
    reflection: Reflection | None = None

    def __post_init__(self) -> None:
        if not self.falls and self.reflection is not None:
            raise ScheduleError("a growth is not reflected: drop reflection, or use decay.")
        object.__setattr__(self, "reflection", self._cycle.reflection)

    @property
    def _cycle(self) -> Cyclic:
        shape: Shape = "triangular" if self.falls else "repeated"
        return Cyclic(self.profile, self.low, self.high, 1, shape, self.reflection)

    @property
    def name(self) -> str:
        return "decay" if self.falls else "growth"

    def at(self, steps: Whole, total: int) -> Whole:
        return np.where(steps == total - 1, self.low if self.falls else self.high, self._cycle.at(steps, total))

    def to_data(self) -> dict[str, Any]:
        data: dict[str, Any] = {"name": self.name, "profile": self.profile, "low": self.low, "high": self.high}
        return data if self.reflection is None else {**data, "reflection": self.reflection}

    def __str__(self) -> str:
        return f"{super().__str__()} {self.profile}{self.reflection or ''}"


#: The ten, by the papers' names: (profile, shape, reflection).
TEN: dict[str, tuple[Profile, Shape, Reflection | None]] = {
    "CR": ("C", "repeated", None),
    "LR": ("L", "repeated", None),
    "ER": ("E", "repeated", None),
    "RR": ("R", "repeated", None),
    "CT": ("C", "triangular", None),
    "LT": ("L", "triangular", None),
    "ETV": ("E", "triangular", "V"),
    "ETH": ("E", "triangular", "H"),
    "RTV": ("R", "triangular", "V"),
    "RTH": ("R", "triangular", "H"),
}
