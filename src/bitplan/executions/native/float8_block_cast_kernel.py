"""The kernel of :mod:`bitplan.executions.native.float8_block_cast`; imported only where Triton is.

One program per tile of 128 x 128 reads it once. Values beyond the edges of the matrix count as zeros, as in the
quantizer. Codes are made as in :mod:`bitplan.executions.native.float8_cast_kernel`; its notes on the hidden zero and,
for tiles, on loading in two halves hold here, too. Three things differ:

* A thread has elements of 20 lines, and computes the scale and its inverse of each. General divisions took more
  instructions than the elements, so both come from a multiplication or an approximate inverse and one correction.
* For 16-bit inputs one correction of the quotient is enough: it differs from the correctly rounded quotient only next
  to the middle between two float32 numbers, and no quotient of an 11-bit number is there and next to a tie of E4M3.
  Checked with exact integers for all such numbers, all ties and the divisors around them.
* The transposed layout is made after the other one, from 16-bit values that are widened again; otherwise the values
  would stay in registers in float32.

Compiled by Triton 3.6 for Hopper, no variant for 16-bit inputs needs more than 128 registers per thread, so that a
multiprocessor runs two tiles at once. Lines in both layouts take 32 instructions per element, tiles 18.
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
    _magnitude_bits,
    _store_codes,
)


@triton.jit  # type: ignore[untyped-decorator]
def _scale_of_blocks(amax_bits, format_max: tl.constexpr, power_of_two: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scales of blocks with these amaxes, as :func:`bitplan.numerics.scaling.step_scale`.

    One correction step makes the product with the inverse of a constant the correctly rounded quotient, unless that is
    below the normal numbers, which scales are not.
    """
    amax = amax_bits.to(tl.float32, bitcast=True)
    inverse: tl.constexpr = 1.0 / format_max
    scale = amax * inverse
    scale = tl.fma(tl.fma(scale, -format_max, amax), inverse, scale)
    scale = tl.where(amax == float("inf"), amax, scale)
    scale = tl.maximum(scale, 1.1754943508222875e-38, propagate_nan=tl.PropagateNan.ALL)
    if power_of_two:
        raised = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = raised.to(tl.float32, bitcast=True) + scale * 0.0
    return scale


@triton.jit  # type: ignore[untyped-decorator]
def _codes_of_blocks(value, scale, zero, power_of_two: tl.constexpr, corrections: tl.constexpr):  # type: ignore[no-untyped-def]
    """The codes of value / scale; scales have the tile's shape, or 1 along the axes of their blocks.

    As in :func:`bitplan.executions.native.float8_cast_kernel._quotient`, both are multiplied by the power of two that
    brings the scale into [1, 2). The inverse of that divisor is computed as by PTX's correctly rounded rcp.rn.f32,
    which does no more for such numbers. Signs are chosen such that nothing is negated and zeros keep their signs.
    """
    bits = scale.to(tl.int32, bitcast=True)
    power = tl.maximum(0x7F000000 - (bits & 0x7F800000), 0)  # zero for an infinite scale
    if power_of_two:
        power = tl.maximum(power.to(tl.float32, bitcast=True), -scale, propagate_nan=tl.PropagateNan.ALL)
        quotient = value * power
    else:
        power = tl.minimum((power | -0x80000000).to(tl.float32, bitcast=True), scale, propagate_nan=tl.PropagateNan.ALL)
        divisor = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
        negative = ((bits & 0x7FFFFF) | -0x40800000).to(tl.float32, bitcast=True)
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [negative], tl.float32, is_pure=True, pack=1
        )
        inverse = tl.fma(tl.fma(inverse, divisor, 1.0), inverse, inverse)
        dividend = value * power
        quotient = dividend * inverse
        for _ in tl.static_range(corrections):
            quotient = tl.fma(tl.fma(quotient, divisor, dividend), inverse, quotient)
    return _codes_of(quotient, zero, False)


@triton.jit
def _hide(value, zero):  # type: ignore[no-untyped-def]
    """The values, combined with the hidden zero: the compiler would keep those that it has widened to float32."""
    if value.dtype.primitive_bitwidth == 16:
        value = (value.to(tl.int16, bitcast=True) ^ tl.cast(zero, tl.int16)).to(value.dtype, bitcast=True)
    return value


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
    corrections: tl.constexpr,
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
    if tiles:
        is_left = (tl.arange(0, tile) < tile // 2)[None, :]
        left = tl.load(x + offset, mask=inside & is_left, other=0.0).to(tl.float32)
        right = tl.load(x + offset, mask=inside & (is_left == 0), other=0.0).to(tl.float32)
        value = tl.where(is_left, left, right)
        amax = tl.max(tl.max(_magnitude_bits(value), 1, keep_dims=True), 0, keep_dims=True)
        scale = _scale_of_blocks(amax, format_max, power_of_two)
        codes = _codes_of_blocks(value, scale, zero, power_of_two, corrections)
        _store_codes(codes, row, column, as_rows, as_columns, rows, features, writes_rows, writes_columns)
        corner = tl.arange(0, 1)[:, None] + tl.arange(0, 1)[None, :]
        if writes_rows:
            tl.store(row_scales + down * tiles_per_row + across + corner, scale)
        if writes_columns:
            tl.store(column_scales + across * tl.cdiv(rows, tile) + down + corner, scale)
    else:
        value = tl.load(x + offset, mask=inside, other=0.0)
        if writes_rows:
            wide = value.to(tl.float32)
            scale = _scale_of_blocks(tl.max(_magnitude_bits(wide), 1), format_max, power_of_two)
            tl.store(row_scales + across * rows + row, scale, mask=row < rows)
            codes = _codes_of_blocks(wide, scale[:, None], zero, power_of_two, corrections)
            _store_codes(codes, row, column, as_rows, as_columns, rows, features, True, False)
        if writes_columns:
            if writes_rows:  # one layout after the other, in the same registers
                tl.debug_barrier()
                value = _hide(value, zero)
            wide = value.to(tl.float32)
            scale = _scale_of_blocks(tl.max(_magnitude_bits(wide), 0), format_max, power_of_two)
            tl.store(column_scales + down * features + column, scale, mask=column < features)
            codes = _codes_of_blocks(wide, scale[None, :], zero, power_of_two, corrections)
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
    corrections = 2 if x.dtype == torch.float32 else 1
    constants = (FORMATS[torch.float8_e4m3fn].max, corrections, tiles, power_of_two, as_rows, as_columns, BLOCK)
    wrap(_cast_blocks)[grid](
        x.contiguous(), *tensors, written if after is None else after, rows, features, 0, *constants, num_warps=8
    )
    return outputs
