"""The kernel of :mod:`bitplan.executions.native.float8_block_cast`; imported only where Triton is.

One program per tile of 128 x 128 reads it once. Codes are made as in
:mod:`bitplan.executions.native.float8_cast_kernel`, whose notes on loading a tile in two halves, on division and on the
hidden zero hold here, too. Values beyond the edges of the matrix count as zeros, as in the quantizer.

Compiled by Triton 3.6 for Hopper, no variant for 16-bit inputs needs more than 128 registers per thread, so that a
multiprocessor runs two tiles at once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitplan.executions.native.backends import BLOCK
from bitplan.executions.native.float8_block_cast import block_cast_buffers
from bitplan.executions.native.float8_cast import FORMATS
from bitplan.executions.native.float8_cast_kernel import (
    _codes_of,
    _divide,
    _magnitude_bits,
    _scale_of,
    _store_codes,
    _tile_amax_bits,
)


@triton.jit(do_not_specialize=["zero"])  # type: ignore[untyped-decorator]
def _cast_blocks(  # type: ignore[no-untyped-def]
    x,
    as_rows,
    row_scales,
    as_columns,
    column_scales,
    after,
    rows,
    features,
    zero,
    format_max: tl.constexpr,
    tiles: tl.constexpr,
    power_of_two: tl.constexpr,
    writes_rows: tl.constexpr,
    writes_columns: tl.constexpr,
    tile: tl.constexpr,
):
    tiles_per_row = tl.cdiv(features, tile)
    down = (tl.program_id(0) // tiles_per_row).to(tl.int64)
    across = (tl.program_id(0) % tiles_per_row).to(tl.int64)
    row = down * tile + tl.arange(0, tile)
    column = across * tile + tl.arange(0, tile)
    inside = (row < rows)[:, None] & (column < features)[None, :]
    offset = row[:, None] * features + column[None, :]
    is_left = (tl.arange(0, tile) < tile // 2)[None, :]
    left = tl.load(x + offset, mask=inside & is_left, other=0.0).to(tl.float32)
    right = tl.load(x + offset, mask=inside & (is_left == 0), other=0.0).to(tl.float32)
    value = tl.where(is_left, left, right)
    if tiles:
        scale = _scale_of(_tile_amax_bits(value).to(tl.float32, bitcast=True), format_max, power_of_two)
        codes = _codes_of(_divide(value, scale, format_max, power_of_two, False), zero, False)
        _store_codes(codes, row, column, as_rows, as_columns, rows, features, writes_rows, writes_columns)
        if writes_rows:
            tl.store(row_scales + down * tiles_per_row + across, scale)
        if writes_columns:
            tl.store(column_scales + across * tl.cdiv(rows, tile) + down, scale)
    else:
        magnitude = _magnitude_bits(value)
        if writes_rows:
            scale = _scale_of(tl.max(magnitude, 1).to(tl.float32, bitcast=True), format_max, power_of_two)
            tl.store(row_scales + across * rows + row, scale, mask=row < rows)
            codes = _codes_of(_divide(value, scale[:, None], format_max, power_of_two, False), zero, False)
            _store_codes(codes, row, column, as_rows, as_columns, rows, features, True, False)
        if writes_columns:
            scale = _scale_of(tl.max(magnitude, 0).to(tl.float32, bitcast=True), format_max, power_of_two)
            tl.store(column_scales + down * features + column, scale, mask=column < features)
            codes = _codes_of(_divide(value, scale[None, :], format_max, power_of_two, False), zero, False)
            _store_codes(codes, row, column, as_rows, as_columns, rows, features, False, True)


def launch_float8_block_cast(
    wrap: Any,
    x: Tensor,
    tiles: bool,
    power_of_two: bool,
    as_rows: bool,
    as_columns: bool,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`bitplan.executions.native.float8_block_cast.block_cast_reference`; `x` is not empty."""
    rows, features = x.shape
    outputs = block_cast_buffers(x, tiles, as_rows, as_columns)
    written = next((output for output in outputs if output.numel()), x)
    tensors = [output if output.numel() else written for output in outputs]  # in place of those it does not write
    grid = (triton.cdiv(rows, BLOCK) * triton.cdiv(features, BLOCK),)
    constants = (FORMATS[torch.float8_e4m3fn].max, tiles, power_of_two, as_rows, as_columns, BLOCK)
    wrap(_cast_blocks)[grid](
        x.contiguous(), *tensors, written if after is None else after, rows, features, 0, *constants, num_warps=8
    )
    return outputs
