"""How a figure is spread over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Mean and spread of one figure over several runs."""

    mean: float
    #: The sample standard deviation; 0 for a single run, of which nothing is known.
    deviation: float
    low: float
    high: float
    count: int

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.mean)


def spread(values: Iterable[float | None]) -> Spread | None:
    """The spread of those values that exist; None where none does.

    >>> spread([0.25, 0.75, None])
    Spread(mean=0.5, deviation=0.3535533905932738, low=0.25, high=0.75, count=2)
    >>> spread([None]) is None
    True
    """
    known = [value for value in values if value is not None]
    if not known:
        return None
    if not all(map(math.isfinite, known)):
        return Spread(math.nan, math.nan, math.nan, math.nan, len(known))
    deviation = statistics.stdev(known) if len(known) > 1 else 0.0
    return Spread(statistics.fmean(known), deviation, min(known), max(known), len(known))
