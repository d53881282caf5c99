"""The kernels of :mod:`bitplan.executions.native.norm_cast`; imported only where Triton is.

They use the operations that Inductor uses and in the same order: float32 throughout, ``libdevice.rsqrt``, one rounding
to bfloat16 at the end. So codes equal those of a cast of Inductor's norm bit for bit. With *rounds_twice* they round
the normalised value, too, as eager code does; Inductor leaves that rounding out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from bitplan.executions.native.float8_cast import FORMATS, MAX_RECORDS, PARTS, TILE, tile_count
from bitplan.executions.native.float8_cast_kernel import (
    CastOutputs,
    _codes_of,
    _divide,
    _magnitude_bits,
    _record_amax,
    _scale_from,
    _store_codes,
    _store_tile_amax,
    _tile_amax_bits,
)
from bitplan.executions.native.gated_cast_kernel import _round_to_bfloat16

#: Features of a row that a program of the amax kernel loads at a time.
_BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _inverse(row_stats, eps: tl.constexpr, is_inverse: tl.constexpr):  # type: ignore[no-untyped-def]
    """The factor of a row: the inverse of its root mean square."""
    if is_inverse:  # noqa: SIM108 - a branch on a constexpr is removed
        inverse = row_stats
    else:
        inverse = libdevice.rsqrt(row_stats + eps)
    return inverse


@triton.jit  # type: ignore[untyped-decorator]
def _normed(value, inverse, factor, rounds_twice: tl.constexpr):  # type: ignore[no-untyped-def]
    """The norm's result, rounded to bfloat16, in float32."""
    normalised = value * inverse
    if rounds_twice:
        normalised = _round_to_bfloat16(normalised)
    return _round_to_bfloat16(normalised * factor)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_amax(  # type: ignore[no-untyped-def]
    x,
    row_stats,
    weight,
    history_amax,
    out,
    rows,
    features,
    eps: tl.constexpr,
    is_inverse: tl.constexpr,
    rounds_twice: tl.constexpr,
    part_count: tl.constexpr,
    block: tl.constexpr,
):
    part = tl.program_id(0)
    end = tl.where(tl.load(history_amax) > 0, 0, tl.cast(rows, tl.int64))
    width = tl.cast(features, tl.int64)
    amax = tl.zeros([block], tl.int32)
    for row in range(part.to(tl.int64), end, part_count):
        inverse = _inverse(tl.load(row_stats + row), eps, is_inverse)
        for start in range(0, width, block):
            column = start + tl.arange(0, block)
            value = tl.load(x + row * width + column, mask=column < width, other=0.0).to(tl.float32)
            factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
            amax = tl.maximum(amax, _magnitude_bits(_normed(value, inverse, factor, rounds_twice)))
    tl.store(out + part, tl.max(amax, 0).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["zero", "cell_0", "cell_1", "cell_2"])  # type: ignore[untyped-decorator]
def _cast_norm_tile(  # type: ignore[no-untyped-def]
    x,
    row_stats,
    weight,
    as_rows,
    as_columns,
    scale_out,
    tile_amax,
    partial_amax,
    history_amax,
    after,
    record_0,
    record_1,
    record_2,
    rows,
    features,
    zero,
    cell_0,
    cell_1,
    cell_2,
    eps: tl.constexpr,
    is_inverse: tl.constexpr,
    rounds_twice: tl.constexpr,
    is_e5m2: tl.constexpr,
    format_max: tl.constexpr,
    writes_rows: tl.constexpr,
    writes_columns: tl.constexpr,
    returns_amax: tl.constexpr,
    record_count: tl.constexpr,
    part_count: tl.constexpr,
    tile: tl.constexpr,
):
    tile_number = tl.program_id(0)
    tiles_per_row = tl.cdiv(features, tile)
    row = (tile_number // tiles_per_row).to(tl.int64) * tile + tl.arange(0, tile)
    column = (tile_number % tiles_per_row).to(tl.int64) * tile + tl.arange(0, tile)
    inside = (row < rows)[:, None] & (column < features)[None, :]
    offset = row[:, None] * features + column[None, :]
    history = tl.load(history_amax)
    if writes_rows and writes_columns:  # in halves, as in a plain cast: otherwise each layout recomputes all
        is_left = (tl.arange(0, tile) < tile // 2)[None, :]
        left = tl.load(x + offset, mask=inside & is_left, other=0.0).to(tl.float32)
        right = tl.load(x + offset, mask=inside & (is_left == 0), other=0.0).to(tl.float32)
        wide = tl.where(is_left, left, right)
    else:
        wide = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    # Outside the matrix, zeros times a finite number.
    inverse = _inverse(tl.load(row_stats + row, mask=row < rows, other=1.0), eps, is_inverse)
    factor = tl.load(weight + column, mask=column < features, other=0.0).to(tl.float32)
    value = _normed(wide, inverse[:, None], factor[None, :], rounds_twice)
    if returns_amax:
        _store_tile_amax(tile_amax, tile_number, value)
    if record_count > 0:
        amax_bits = _tile_amax_bits(value)
        _record_amax(record_0, cell_0, amax_bits)
        if record_count > 1:
            _record_amax(record_1, cell_1, amax_bits)
        if record_count > 2:
            _record_amax(record_2, cell_2, amax_bits)
    scale = _scale_from(partial_amax, history, format_max, True, True, part_count)
    if tile_number == 0:
        tl.store(scale_out, scale)
    codes = _codes_of(_divide(value, scale, format_max, True, True), zero, is_e5m2)
    _store_codes(codes, row, column, as_rows, as_columns, rows, features, writes_rows, writes_columns)


def launch_norm_amax(
    wrap: Any,
    x: Tensor,
    row_stats: Tensor,
    weight: Tensor,
    eps: float | None,
    history_amax: Tensor,
    rounds_twice: bool = False,
) -> Tensor:
    out = x.new_empty(PARTS, dtype=torch.float32)
    tensors = (x, row_stats, weight, history_amax, out)
    constants = (eps or 0.0, eps is None, rounds_twice, PARTS, _BLOCK)
    wrap(_norm_amax)[(PARTS,)](*tensors, *x.shape, *constants, num_warps=8)
    return out


def launch_norm_cast(
    wrap: Any,
    x: Tensor,
    row_stats: Tensor,
    weight: Tensor,
    eps: float | None,
    dtype: torch.dtype,
    partial_amax: Tensor,
    history_amax: Tensor,
    as_rows: bool,
    as_columns: bool,
    returns_amax: bool,
    after: Tensor | None = None,
    rounds_twice: bool = False,
    records: Sequence[Tensor] = (),
    cells: Sequence[int] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`bitplan.executions.native.norm_cast.norm_cast_reference`; tensors are contiguous and not empty.

    :param records: up to :data:`MAX_RECORDS` tensors; one cell of each is raised to the amax.
    :param cells: the flat index of each record's cell.
    """
    tiles = tile_count(*x.shape)
    outputs = CastOutputs(x, dtype, as_rows, as_columns, returns_amax, tiles)
    unused = MAX_RECORDS - len(records)
    record_slots, cell_slots = [*records, *[outputs.scale] * unused], [*cells, *[0] * unused]
    waited = outputs.scale if after is None else after
    tensors = (x, row_stats, weight, *outputs.arguments, partial_amax, history_amax, waited, *record_slots)
    flags = (as_rows, as_columns, returns_amax, len(records), partial_amax.numel(), TILE)
    constants = (eps or 0.0, eps is None, rounds_twice, dtype == torch.float8_e5m2, FORMATS[dtype].max, *flags)
    wrap(_cast_norm_tile)[(tiles,)](*tensors, *x.shape, 0, *cell_slots, *constants, num_warps=8)
    return outputs.results()
