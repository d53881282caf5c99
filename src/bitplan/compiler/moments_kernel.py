"""Float8 codes of a tensor and the moments of its channels in one pass, for GPUs; imported only where Triton is.

Left to itself, Inductor makes the codes in one kernel and reads them again for batch norm's statistics in another,
which Welford's recurrence keeps busy at a third of the memory's speed: on an H200, 4.7 ms of a ResNet-50's step. Here
each program takes a stretch of rows and adds up deviations from the first of them; a second kernel puts the stretches
together (Chan, Golub & LeVeque 1979).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Elements that a program reads at a time, and programs wanted: some for every multiprocessor of a large GPU.
_TILE, _PROGRAMS = 4096, 1056
_CHANNELS, _COMBINED = 128, 16


@triton.jit  # type: ignore[untyped-decorator]
def _coded_and_summed(  # type: ignore[no-untyped-def]
    y,
    code,
    means,
    squares,
    rows,
    channels,
    stretch,
    tall: tl.constexpr,
    wide: tl.constexpr,
    is_whole: tl.constexpr,
):
    kind = code.dtype.element_ty
    part = tl.program_id(0)
    first = part * stretch
    count = tl.minimum(stretch, rows - first)
    column = tl.program_id(1) * wide + tl.arange(0, wide)
    is_column = column < channels
    # Within a stretch 32 bits are enough to count elements; where it begins, they may not be.
    begin = first.to(tl.int64) * channels
    row = tl.arange(0, tall)
    place = row[:, None] * channels + column[None, :]
    start = tl.load(y + begin + column, mask=is_column, other=0.0)
    # An infinite or missing first value would spoil the sums of all others, which have their own.
    pivot = start.to(tl.float32).to(kind).to(tl.float32)
    pivot = tl.where(tl.abs(pivot) < 65536.0, pivot, 0.0)
    sums = tl.zeros([tall, wide], tl.float32)
    sums_of_squares = tl.zeros([tall, wide], tl.float32)
    for at in range(0, count, tall):
        here = begin + at * channels
        if is_whole:  # tiles fit, and nothing has to be masked
            small = tl.load(y + here + place).to(tl.float32).to(kind)
            tl.store(code + here + place, small)
            away = small.to(tl.float32) - pivot[None, :]
        else:
            inside = (at + row < count)[:, None] & is_column[None, :]
            small = tl.load(y + here + place, mask=inside, other=0.0).to(tl.float32).to(kind)
            tl.store(code + here + place, small, mask=inside)
            away = tl.where(inside, small.to(tl.float32) - pivot[None, :], 0.0)
        sums += away
        sums_of_squares += away * away
    total = tl.sum(sums, 0)
    number = count.to(tl.float32)
    tl.store(means + part * channels + column, pivot + total / number, mask=is_column)
    tl.store(squares + part * channels + column, tl.sum(sums_of_squares, 0) - total * total / number, mask=is_column)


@triton.jit  # type: ignore[untyped-decorator]
def _put_together(  # type: ignore[no-untyped-def]
    means, squares, var, mean, rows, channels, stretch, parts, tall: tl.constexpr, wide: tl.constexpr
):
    column = tl.program_id(0) * wide + tl.arange(0, wide)
    part = tl.arange(0, tall)
    inside = (part < parts)[:, None] & (column < channels)[None, :]
    place = part[:, None] * channels + column[None, :]
    count = tl.where(part < parts, tl.minimum(stretch, rows - part * stretch), 0).to(tl.float32)[:, None]
    own = tl.load(means + place, mask=inside, other=0.0)
    whole = tl.sum(own * count, 0) / rows
    away = own - whole[None, :]
    square = tl.sum(tl.load(squares + place, mask=inside, other=0.0) + away * away * count, 0)
    tl.store(mean + column, whole, mask=column < channels)
    tl.store(var + column, square / rows, mask=column < channels)


def coded_moments_by_kernel(wrap: Any, y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`bitplan.compiler.moments.coded_moments`; the channels of `y` lie side by side, as in channels_last."""
    channels = y.shape[1]
    rows = y.numel() // channels
    wide = min(_CHANNELS, triton.next_power_of_2(channels))
    tall = _TILE // wide
    columns = triton.cdiv(channels, wide)
    stretch = triton.cdiv(triton.cdiv(rows, max(1, _PROGRAMS // columns)), tall) * tall
    parts = triton.cdiv(rows, stretch)
    code = torch.empty_strided(y.shape, y.stride(), dtype=dtype, device=y.device)
    means, squares = (y.new_empty((parts, channels), dtype=torch.float32) for _ in range(2))
    # Of this shape and not flat: as the first of their readers Inductor has a copy onto themselves, and puts what batch
    # norm makes of them and its running statistics into one kernel with that, instead of into three.
    var, mean = (y.new_empty((1, channels, 1, 1), dtype=torch.float32) for _ in range(2))
    wrap(_coded_and_summed)[(parts, columns)](
        *(y, code, means, squares, rows, channels, stretch),
        *(tall, wide, rows % tall == 0 and channels % wide == 0),
        num_warps=8,
    )
    wrap(_put_together)[(triton.cdiv(channels, _COMBINED),)](
        *(means, squares, var, mean, rows, channels, stretch, parts),
        *(triton.next_power_of_2(parts), _COMBINED),
        num_warps=8,
    )
    return code, var, mean
