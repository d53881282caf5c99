"""The kernels of :mod:`bitplan.executions.native.norm_cast`; imported only where Triton is.

They compute by the operations that Inductor uses and in their order: float32 throughout, ``libdevice.rsqrt``, one
rounding to bfloat16 at the end. So codes are the same to the bit as where Inductor computes the norm's result and
:mod:`bitplan.executions.native.float8_cast_kernel` reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from bitplan.executions.native.float8_cast import FORMATS, NOTED, PARTS, TILE, tiles_of
from bitplan.executions.native.float8_cast_kernel import (
    _codes_of,
    _divided,
    _gather,
    _magnitude_bits,
    _note,
    _scale_from,
    _store_codes,
    _top_bits,
)
from bitplan.executions.native.gated_cast_kernel import _as_kept, _Room

#: Features of a row that a program of the kernel for the largest magnitude reads at once.
_BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _inverse(spread, eps: tl.constexpr, is_inverse: tl.constexpr):  # type: ignore[no-untyped-def]
    """What the numbers of a row are multiplied by."""
    if is_inverse:  # noqa: SIM108 - Triton leaves out the branch that is not taken
        found = spread
    else:
        found = libdevice.rsqrt(spread + eps)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def _amax_of_norm(  # type: ignore[no-untyped-def]
    x,
    spread,
    weight,
    reach,
    tops,
    rows,
    features,
    eps: tl.constexpr,
    is_inverse: tl.constexpr,
    parts: tl.constexpr,
    block: tl.constexpr,
):
    part = tl.program_id(0)
    end = tl.where(tl.load(reach) > 0, 0, tl.cast(rows, tl.int64))  # the past decides: there is nothing to look for
    width = tl.cast(features, tl.int64)
    top = tl.zeros([block], tl.int32)
    for row in range(part.to(tl.int64), end, parts):
        inverse = _inverse(tl.load(spread + row), eps, is_inverse)
        for start in range(0, width, block):
            column = start + tl.arange(0, block)
            value = tl.load(x + row * width + column, mask=column < width, other=0.0).to(tl.float32)
            factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
            top = tl.maximum(top, _magnitude_bits(_as_kept(value * inverse * factor)))
    tl.store(tops + part, tl.max(top, 0).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["zero", "first_cell", "second_cell", "third_cell"])  # type: ignore[untyped-decorator]
def _cast_norm_tile(  # type: ignore[no-untyped-def]
    x,
    spread,
    weight,
    as_rows,
    as_columns,
    scale_out,
    tops,
    parts,
    reach,
    after,
    first,
    second,
    third,
    rows,
    features,
    zero,
    first_cell,
    second_cell,
    third_cell,
    eps: tl.constexpr,
    is_inverse: tl.constexpr,
    is_e5m2: tl.constexpr,
    largest: tl.constexpr,
    writes_rows: tl.constexpr,
    writes_columns: tl.constexpr,
    gathers: tl.constexpr,
    notes: tl.constexpr,
    part_count: tl.constexpr,
    tile: tl.constexpr,
):
    number = tl.program_id(0)
    across = tl.cdiv(features, tile)
    row = (number // across).to(tl.int64) * tile + tl.arange(0, tile)
    column = (number % across).to(tl.int64) * tile + tl.arange(0, tile)
    inside = (row < rows)[:, None] & (column < features)[None, :]
    place = row[:, None] * features + column[None, :]
    known = tl.load(reach)
    if writes_rows and writes_columns:  # in halves, as in a plain cast: else all would be computed for each layout
        is_left = (tl.arange(0, tile) < tile // 2)[None, :]
        left = tl.load(x + place, mask=inside & is_left, other=0.0).to(tl.float32)
        right = tl.load(x + place, mask=inside & (is_left == 0), other=0.0).to(tl.float32)
        wide = tl.where(is_left, left, right)
    else:
        wide = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    # Outside the matrix zeros times a finite number.
    inverse = _inverse(tl.load(spread + row, mask=row < rows, other=1.0), eps, is_inverse)
    factor = tl.load(weight + column, mask=column < features, other=0.0).to(tl.float32)
    value = _as_kept(wide * inverse[:, None] * factor[None, :])
    if gathers:
        _gather(tops, number, value)
    if notes > 0:
        top = _top_bits(value)
        _note(first, first_cell, top)
        if notes > 1:
            _note(second, second_cell, top)
        if notes > 2:
            _note(third, third_cell, top)
    scale = _scale_from(parts, known, largest, True, True, part_count)
    if number == 0:
        tl.store(scale_out, scale)
    codes = _codes_of(_divided(value, scale, largest, True, True), zero, is_e5m2)
    _store_codes(codes, row, column, as_rows, as_columns, rows, features, writes_rows, writes_columns)


def norm_amax_by_kernel(
    wrap: Any, x: Tensor, spread: Tensor, weight: Tensor, eps: float | None, reach: Tensor
) -> Tensor:
    tops = x.new_empty(PARTS, dtype=torch.float32)
    given = (x, spread, weight, reach, tops, *x.shape, eps or 0.0, eps is None, PARTS, _BLOCK)
    wrap(_amax_of_norm)[(PARTS,)](*given, num_warps=8)
    return tops


def norm_cast_by_kernel(
    wrap: Any,
    x: Tensor,
    spread: Tensor,
    weight: Tensor,
    eps: float | None,
    dtype: torch.dtype,
    parts: Tensor,
    reach: Tensor,
    as_rows: bool,
    as_columns: bool,
    gathers: bool,
    after: Tensor | None = None,
    records: Sequence[Tensor] = (),
    cells: Sequence[int] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`bitplan.executions.native.norm_cast.norm_cast_reference`; all are contiguous and not empty.

    Where there are records, up to three, the largest magnitude is noted at these of their numbers.
    """
    tiles = tiles_of(*x.shape)
    room = _Room(x, dtype, as_rows, as_columns, gathers, tiles)
    unused = NOTED - len(records)
    wrap(_cast_norm_tile)[(tiles,)](
        *(x, spread, weight, *room.written, parts, reach, room.scale if after is None else after),
        *(*records, *[room.scale] * unused, *x.shape, 0, *cells, *[0] * unused),
        *(eps or 0.0, eps is None, dtype == torch.float8_e5m2, FORMATS[dtype].max, as_rows, as_columns, gathers),
        *(len(records), parts.numel(), TILE),
        num_warps=8,
    )
    return room.results()
