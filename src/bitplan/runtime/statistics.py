"""What is seen at a site while it is rounded: the range of its values, and what rounding did to them.

An observation is one row of float32 numbers in a buffer of the module, written on the device in forward and backward
passes, eager or compiled. Writing is idempotent: recomputing a checkpointed region writes the same numbers again and
counts nothing twice. :func:`fold`, once a step, adds them up.

With several micro-batches in a step, shares are those of the last one, and ranges and largest magnitudes those of all.
Where an operation has several weights or several results, the record is that of the largest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bitplan.numerics.scaling import LONGEST_HISTORY

#: Columns of a record: fresh, then five measures of this step; steps and their sums; the range of this step;
#: whether an average range exists, and that; the sign that a promotion watches, as part and whole, and its limit; since
#: which step the tensor is promoted (0: it is not), and what the sign was then.
FRESH, OVERFLOW, UNDERFLOW, AMAX, ERROR, POWER = range(6)
_MEASURES = slice(0, 6)
_SUMS = slice(6, 12)
_LOW, _HIGH = 12, 13
_RANGE = slice(12, 14)
_KNOWN, _MEAN_LOW, _MEAN_SPAN = 14, 15, 16
SIGN = slice(17, 19)
_PART, _WHOLE, LIMIT = 17, 18, 19
PROMOTED, _REACHED = 20, 21
#: For scales that come from past steps: the largest magnitude of this step so far; of how many steps it is remembered,
#: and how many times that magnitude is made room for; those of past steps, the last one first, 0 where there was none.
_NOW, LENGTH, MARGIN = 22, 23, 24
_PAST = slice(25, 25 + LONGEST_HISTORY)
COLUMNS = 25 + LONGEST_HISTORY

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
    """What rounding did to `x`; `largest` is the largest magnitude that had a place in the format."""
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


def observe_sign(row: Tensor, part: Tensor, whole: Tensor) -> None:
    """The sign that a promotion watches; of several micro-batches the worst one's is kept."""
    known = row[SIGN]
    now = torch.stack((part, whole))
    is_worse = ~(now[0] / now[1] <= known[0] / known[1])  # so also where nothing is known, 0 / 0
    known.copy_(torch.where(is_worse, now, known))


def mean_range(row: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """(least, largest) value by the running mean, or of `x` itself where nothing was observed yet."""
    known = row[_KNOWN] > 0
    low = torch.where(known, row[_MEAN_LOW], x.detach().amin().float())
    high = torch.where(known, row[_MEAN_LOW] + row[_MEAN_SPAN], x.detach().amax().float())
    return low, high


@dataclass(frozen=True)
class Watched:
    """What a run writes into its records: only that has to be folded, and each part is a dozen launches on a GPU."""

    #: Measures of what rounding does.
    rounding: bool = False
    #: Ranges, for running means of them.
    ranges: bool = False
    #: Signs of promotions.
    signs: bool = False
    #: Largest magnitudes, for scales of later steps.
    amax: bool = False

    def __or__(self, other: Watched) -> Watched:
        return Watched(
            *(self.rounding or other.rounding, self.ranges or other.ranges),
            *(self.signs or other.signs, self.amax or other.amax),
        )


def fold(record: Tensor, step: int, watched: Watched) -> None:
    """After a step, in place: sums and running means hold it, promotions are decided, and the next one starts fresh.

    What was not finite is left out: a ``GradScaler`` skips such a step, and one would spoil all others.

    :param step: the one that comes next, from which on a promotion holds.
    """
    if watched.rounding:
        _add_measures(record)
    if watched.ranges:
        _blend_ranges(record)
    if watched.signs:
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
    low, known = record.select(1, _LOW), record.select(1, _KNOWN)
    now, mean = record.narrow(1, _LOW, 2), record.narrow(1, _MEAN_LOW, 2)
    span = record.select(1, _HIGH).sub_(low)  # so that `now` holds least value and span, as `mean` does
    seen = (span >= 0).logical_and_(span < torch.inf)  # an end that is not finite gives no such span
    blended = (mean * MOMENTUM).add_(now * (1 - MOMENTUM))
    blended = torch.where((known > 0).unsqueeze(1), blended, now)
    torch.where(seen.unsqueeze(1), blended, mean, out=mean)
    known.masked_fill_(seen, 1.0)
    low.fill_(torch.inf)
    span.fill_(-torch.inf)


def _decide_promotions(record: Tensor, step: int) -> None:
    sign = record[:, _PART] / record[:, _WHOLE]  # 0 / 0, where nothing was watched, reaches no limit
    promotes = (sign >= record[:, LIMIT]) & (record[:, PROMOTED] == 0)
    record[:, PROMOTED].masked_fill_(promotes, float(step))
    record[:, _REACHED] = torch.where(promotes, sign, record[:, _REACHED])
    record[:, SIGN] = 0.0


def _remember_amax(record: Tensor) -> None:
    now, past = record[:, _NOW], record[:, _PAST]
    is_told = (now > 0) & (now < torch.inf)
    record[:, _PAST] = torch.where(is_told[:, None], torch.cat((now[:, None], past[:, :-1]), 1), past)
    record[:, _NOW] = 0.0


def amax_history_max(record: Tensor) -> Tensor:
    """For which magnitude the next step's scales make room, a number a row; 0 where there is no past."""
    past = record[:, _PAST]
    is_remembered = torch.arange(past.shape[1], device=record.device) < record[:, LENGTH, None]
    return torch.where(is_remembered, past, 0.0).amax(1) * record[:, MARGIN]


def share_amax(record: Tensor) -> None:
    """Let all processes of a training know the largest magnitude that any of them met in this step."""
    record[:, _NOW] = largest_over_ranks(record[:, _NOW])


def largest_over_ranks(values: Tensor) -> Tensor:
    """The largest of what all processes of a training hold; `values` itself where there is one process."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        values = values.contiguous()
        dist.all_reduce(values, dist.ReduceOp.MAX)
    return values


def promotion_in(row: list[float]) -> tuple[int, float] | None:
    """(step, sign) of a promotion; None where there was none."""
    return (int(row[PROMOTED]), row[_REACHED]) if row[PROMOTED] else None


@dataclass(frozen=True)
class Statistics:
    """What rounding did at one site, averaged over the steps it was watched."""

    steps: int
    #: Share of values beyond the format's largest.
    overflow: float
    #: Share of nonzero values that became zero.
    underflow: float
    #: The largest magnitude ever met.
    amax: float
    #: Root of (mean squared error / mean square): 0.01 is an error of one per cent.
    error: float


def statistics(row: list[float]) -> Statistics:
    """The sums of a record's row as means."""
    steps, overflow, underflow, amax, error, power = row[_SUMS]
    count = max(steps, 1.0)
    relative = (error / power) ** 0.5 if power > 0 else 0.0
    return Statistics(int(steps), overflow / count, underflow / count, amax, relative)
