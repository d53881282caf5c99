"""Statistics of rounded tensors: the range of their values, their amax, and the effect of rounding.

A record is a row of float32 numbers in a buffer of the module, written on the device in forward and backward passes,
eager or compiled. Writing is idempotent: recomputing a checkpointed region writes the same numbers and counts nothing
twice. :func:`fold` accumulates records after every step.

With several micro-batches in a step, fractions are those of the last one, ranges and amax those of all of them. If an
operation has several weights or results, the record describes the largest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bitplan.numerics.scaling import LONGEST_HISTORY

#: Columns of a record: whether this step has written it, then five measures of this step; the number of steps and the
#: sums of the measures; the range of this step; whether a mean range exists, and that range; the signal of a promotion
#: as numerator and denominator, and its limit; the step from which on the tensor is promoted (0: it is not), and the
#: signal at that time.
FRESH, OVERFLOW, UNDERFLOW, AMAX, ERROR, POWER = range(6)
_MEASURES = slice(0, 6)
_SUMS = slice(6, 12)
_LOW, _HIGH = 12, 13
_RANGE = slice(12, 14)
_HAS_MEAN, _MEAN_LOW, _MEAN_SPAN = 14, 15, 16
SIGNAL = slice(17, 19)
_NUMERATOR, _DENOMINATOR, LIMIT = 17, 18, 19
PROMOTED, _REACHED = 20, 21
#: For delayed scaling: the amax of this step so far; the length of the amax history; the margin as a factor; the
#: history, latest step first, 0 where there was none.
_NOW, LENGTH, MARGIN = 22, 23, 24
_PAST = slice(25, 25 + LONGEST_HISTORY)
COLUMNS = 25 + LONGEST_HISTORY

#: Reduces a tensor over the processes of a training.
Reduce = Callable[[Tensor], Tensor]

#: Weight of the past in a running mean of ranges, as in Fu et al. 2021 and Wolfe & Kyrillidis 2024.
MOMENTUM = 0.9


def blank_record(rows: int, device: torch.device) -> Tensor:
    record = torch.zeros(rows, COLUMNS, dtype=torch.float32, device=device)
    record[:, _LOW], record[:, _HIGH] = torch.inf, -torch.inf
    record[:, LIMIT] = torch.inf
    return record


def observe_range(row: Tensor, x: Tensor) -> None:
    """Widen this step's range by the values of `x`."""
    if x.numel():
        low = torch.minimum(row[_LOW], x.detach().amin().float())
        high = torch.maximum(row[_HIGH], x.detach().amax().float())
        row[_RANGE].copy_(torch.stack((low, high)))  # one write: each is a kernel of its own in a compiled step


def observe_amax(row: Tensor, amax: Tensor) -> None:
    """Raise this step's largest magnitude."""
    row[_NOW].copy_(torch.maximum(row[_NOW], amax.float()))


def observe_rounding(row: Tensor, x: Tensor, rounded: Tensor, largest: float | Tensor) -> None:
    """Record the effect of rounding on `x`; `largest` is the largest magnitude that the format can hold."""
    if not x.numel():
        return
    before, after = x.detach().float(), rounded.detach().float()
    magnitude = before.abs()
    measures = torch.stack(
        (
            torch.ones((), device=x.device),
            (magnitude > largest).float().mean(),
            ((after == 0) & (before != 0)).float().mean(),
            magnitude.amax(),
            (after - before).square().mean(),
            before.square().mean(),
        )
    )
    row[_MEASURES].copy_(measures)


def observe_signal(row: Tensor, numerator: Tensor, denominator: Tensor) -> None:
    """Record the signal of a promotion; of several micro-batches the worst counts."""
    previous = row[SIGNAL]
    present = torch.stack((numerator, denominator))
    is_worse = ~(present[0] / present[1] <= previous[0] / previous[1])  # also if there is none yet: 0 / 0
    previous.copy_(torch.where(is_worse, present, previous))


def mean_range(row: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The running mean of the range, (least, largest); the range of `x` if there is no mean yet."""
    has_mean = row[_HAS_MEAN] > 0
    low = torch.where(has_mean, row[_MEAN_LOW], x.detach().amin().float())
    high = torch.where(has_mean, row[_MEAN_LOW] + row[_MEAN_SPAN], x.detach().amax().float())
    return low, high


@dataclass(frozen=True)
class Observed:
    """What a run writes into its records; only that is folded, because each takes a dozen kernel launches."""

    #: The effect of rounding.
    rounding: bool = False
    #: Ranges, for running means of them.
    ranges: bool = False
    #: Signals of promotions.
    signals: bool = False
    #: The amax, for scales of later steps.
    amax: bool = False

    def __or__(self, other: Observed) -> Observed:
        return Observed(
            *(self.rounding or other.rounding, self.ranges or other.ranges),
            *(self.signals or other.signals, self.amax or other.amax),
        )

    @property
    def decides(self) -> bool:
        """Whether later steps are rounded by the records, so that a state without them is not whole."""
        return self.ranges or self.signals or self.amax


def fold(record: Tensor, step: int, watched: Observed) -> None:
    """Fold a step into sums, running means and histories, decide on promotions, and clear the record for the next one.

    Values that are not finite are left out: a ``GradScaler`` skips such a step.

    :param step: the next step, the first with the promotions that are decided now.
    """
    if watched.rounding:
        _add_measures(record)
    if watched.ranges:
        _blend_ranges(record)
    if watched.signals:
        _decide_promotions(record, step)
    if watched.amax:
        _remember_amax(record)


def _add_measures(record: Tensor) -> None:
    measures, sums = record[:, _MEASURES], record[:, _SUMS]
    counts = (record[:, FRESH] > 0) & measures.isfinite().all(1)
    measures = torch.where(counts[:, None], measures, 0.0)
    peak = torch.maximum(sums[:, AMAX], measures[:, AMAX])
    sums += measures
    sums[:, AMAX] = peak
    record[:, FRESH] = 0.0


def _blend_ranges(record: Tensor) -> None:
    low, has_mean = record.select(1, _LOW), record.select(1, _HAS_MEAN)
    now, mean = record.narrow(1, _LOW, 2), record.narrow(1, _MEAN_LOW, 2)
    span = record.select(1, _HIGH).sub_(low)  # now `now` holds least value and span, as `mean` does
    seen = (span >= 0).logical_and_(span < torch.inf)  # an end that is not finite gives no such span
    blended = (mean * MOMENTUM).add_(now * (1 - MOMENTUM))
    blended = torch.where((has_mean > 0).unsqueeze(1), blended, now)
    torch.where(seen.unsqueeze(1), blended, mean, out=mean)
    has_mean.masked_fill_(seen, 1.0)
    low.fill_(torch.inf)
    span.fill_(-torch.inf)


def _decide_promotions(record: Tensor, step: int) -> None:
    signal = record[:, _NUMERATOR] / record[:, _DENOMINATOR]  # 0 / 0, where nothing was recorded, reaches no limit
    promotes = (signal >= record[:, LIMIT]) & (record[:, PROMOTED] == 0)
    record[:, PROMOTED].masked_fill_(promotes, float(step))
    record[:, _REACHED] = torch.where(promotes, signal, record[:, _REACHED])
    record[:, SIGNAL] = 0.0


def _remember_amax(record: Tensor) -> None:
    now, past = record[:, _NOW], record[:, _PAST]
    is_valid = (now > 0) & (now < torch.inf)
    record[:, _PAST] = torch.where(is_valid[:, None], torch.cat((now[:, None], past[:, :-1]), 1), past)
    record[:, _NOW] = 0.0


def amax_history_max(record: Tensor) -> Tensor:
    """The magnitude that the next step's scales map to the format's maximum, one per row; 0 without history."""
    past = record[:, _PAST]
    is_remembered = torch.arange(past.shape[1], device=record.device) < record[:, LENGTH, None]
    return torch.where(is_remembered, past, 0.0).amax(1) * record[:, MARGIN]


def latest_amax(row: list[float]) -> float:
    """The amax of the last step of a tensor with delayed scales; 0 where there is none."""
    return row[_PAST.start] if row[LENGTH] else 0.0


def combine_ranks(record: Tensor, watched: Observed, largest: Reduce, total: Reduce) -> None:
    """Combine what the processes of a training have recorded in this step, as if one of them had seen all tensors.

    Each of them has rounded its own share of a batch: amax and ranges are the extremes, fractions and errors the means.

    :param largest: the largest of all processes, element by element; `total`: the sum.
    """
    is_fresh = record[:, FRESH] > 0
    if watched.amax or watched.ranges or watched.rounding:
        peak = torch.where(is_fresh, record[:, AMAX], 0.0)
        extremes = largest(torch.cat((record[:, _NOW], -record[:, _LOW], record[:, _HIGH], peak)))
        record[:, _NOW], low, record[:, _HIGH], peak = extremes.view(4, -1)
        record[:, _LOW] = -low
    if watched.signals:
        record[:, SIGNAL] = total(record[:, SIGNAL])
    if watched.rounding:
        sums = total(torch.where(is_fresh[:, None], record[:, _MEASURES], 0.0))
        record[:, _MEASURES] = torch.where(sums[:, :1] > 0, sums / sums[:, :1], 0.0)
        record[:, AMAX] = peak


def promotion_in(row: list[float]) -> tuple[int, float] | None:
    """(step, signal) of a promotion; None if there was none."""
    return (int(row[PROMOTED]), row[_REACHED]) if row[PROMOTED] else None


@dataclass(frozen=True)
class Statistics:
    """The effect of rounding at one site, averaged over steps."""

    steps: int
    #: Fraction of values beyond the format's largest.
    overflow: float
    #: Fraction of nonzero values that became zero.
    underflow: float
    #: The largest magnitude so far.
    amax: float
    #: Root of (mean squared error / mean square): 0.01 is an error of one per cent.
    error: float
    #: Mean square of the values before rounding.
    power: float = 0.0

    def since(self, earlier: Statistics | None) -> Statistics:
        """Of the steps after those of `earlier`; the amax stays the largest so far."""
        if earlier is None or not 0 < earlier.steps < self.steps:
            return self
        steps = self.steps - earlier.steps

        def mean(now: float, before: float) -> float:
            return max((now * self.steps - before * earlier.steps) / steps, 0.0)

        power = mean(self.power, earlier.power)
        squared_error = mean(self.error**2 * self.power, earlier.error**2 * earlier.power)
        return Statistics(
            steps,
            mean(self.overflow, earlier.overflow),
            mean(self.underflow, earlier.underflow),
            self.amax,
            (squared_error / power) ** 0.5 if power else 0.0,
            power,
        )


def statistics(row: list[float]) -> Statistics:
    """The sums of a record's row as means."""
    steps, overflow, underflow, amax, error, power = row[_SUMS]
    count = max(steps, 1.0)
    relative = (error / power) ** 0.5 if power > 0 else 0.0
    return Statistics(int(steps), overflow / count, underflow / count, amax, relative, power / count)
