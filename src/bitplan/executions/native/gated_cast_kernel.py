"""The kernels of :mod:`bitplan.executions.native.gated_cast`; imported only where Triton is.

They compute what Inductor would write in bfloat16, with the operations that Inductor uses and in the same order:
float32 throughout, ``libdevice.exp``, one rounding to bfloat16 at the end. So codes equal those of a cast of Inductor's
result bit for bit, with one exception: Triton's division has four instructions for divisors above 2^126, which are left
out. For gates below -87.3 the product and the gradients are therefore zero instead of less than 1e-36 times their other
factors.

In machine code for Hopper a product takes 28 to 36 instructions per element (a plain cast 14 to 16), the two gradients
together 48. Nothing is computed twice for the two layouts, and with power-of-two scales no kernel needs more than 128
registers per thread. The gradients have three inputs and two results per element, so their tiles are smaller; each
program casts several, so that it computes the scales once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from bitplan.executions.native.float8_cast import FORMATS, PARTS, TILE, tile_count
from bitplan.executions.native.float8_cast_kernel import (
    CastOutputs,
    _codes_of,
    _divide,
    _magnitude_bits,
    _record_amax,
    _scale_from,
    _scale_of,
    _store_columns,
    _store_rows,
    _store_tile_amax,
    _tile_amax_bits,
)
from bitplan.executions.native.gated_cast import SIDE, STEPS, grads_tile_count

#: Elements that a program of the amax kernels loads at a time.
_BLOCK = 4096
#: PTX that rounds two numbers to bfloat16 and converts them back by shifts.
_TO_BFLOAT16 = tl.constexpr(
    "{.reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000;}"
)
_INVERSE = tl.constexpr("rcp.approx.ftz.f32 $0, $1;")


@triton.jit
def _round_to_bfloat16(value):  # type: ignore[no-untyped-def]
    """Round to bfloat16, as a store to memory would: two values at a time."""
    return tl.inline_asm_elementwise(_TO_BFLOAT16, "=f,=f,f,f", [value], tl.float32, is_pure=True, pack=2)


@triton.jit
def _sigmoid(gate):  # type: ignore[no-untyped-def]
    """1 / (1 + exp(-gate)), as Triton's division computes it for divisors from 1 to 2^126."""
    return tl.inline_asm_elementwise(_INVERSE, "=f,f", [libdevice.exp(-gate) + 1.0], tl.float32, is_pure=True, pack=1)


@triton.jit
def _product(gate, up):  # type: ignore[no-untyped-def]
    return _round_to_bfloat16(gate * _sigmoid(gate) * up)


@triton.jit
def _silu_slope(gate, sigmoid):  # type: ignore[no-untyped-def]
    return gate * (1.0 - sigmoid) + 1.0


@triton.jit
def _round_to_e4m3(value, zero):  # type: ignore[no-untyped-def]
    return _codes_of(value, zero, False).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit(do_not_specialize=["zero"])  # type: ignore[untyped-decorator]
def _gated_amax(  # type: ignore[no-untyped-def]
    gate, up, history_amax, out, count, zero, casts_inputs: tl.constexpr, part_count: tl.constexpr, block: tl.constexpr
):
    part = tl.program_id(0)
    end = tl.where(tl.load(history_amax) > 0, 0, tl.cast(count, tl.int64))
    amax = tl.zeros([block], tl.int32)
    for start in range(part.to(tl.int64) * block, end, part_count * block):
        at = start + tl.arange(0, block)
        gate_value = tl.load(gate + at, mask=at < end, other=0.0).to(tl.float32)
        up_value = tl.load(up + at, mask=at < end, other=0.0).to(tl.float32)
        if casts_inputs:
            gate_value = _round_to_e4m3(gate_value, zero)
            up_value = _round_to_e4m3(up_value, zero)
        amax = tl.maximum(amax, _magnitude_bits(_product(gate_value, up_value)))
    tl.store(out + part, tl.max(amax, 0).to(tl.float32, bitcast=True))


@triton.jit  # type: ignore[untyped-decorator]
def _gated_grads_amax(  # type: ignore[no-untyped-def]
    grad,
    gate,
    up,
    gate_history_amax,
    up_history_amax,
    gate_out,
    up_out,
    count,
    part_count: tl.constexpr,
    block: tl.constexpr,
):
    part = tl.program_id(0)
    both_have_history = (tl.load(gate_history_amax) > 0) & (tl.load(up_history_amax) > 0)
    end = tl.where(both_have_history, 0, tl.cast(count, tl.int64))
    gate_amax = tl.zeros([block], tl.int32)
    up_amax = tl.zeros([block], tl.int32)
    for start in range(part.to(tl.int64) * block, end, part_count * block):
        at = start + tl.arange(0, block)
        incoming = tl.load(grad + at, mask=at < end, other=0.0).to(tl.float32)
        gate_value = tl.load(gate + at, mask=at < end, other=0.0).to(tl.float32)
        up_value = tl.load(up + at, mask=at < end, other=0.0).to(tl.float32)
        sigmoid = _sigmoid(gate_value)
        up_amax = tl.maximum(up_amax, _magnitude_bits(_round_to_bfloat16(incoming * (gate_value * sigmoid))))
        gate_grad = _round_to_bfloat16(incoming * up_value * sigmoid * _silu_slope(gate_value, sigmoid))
        gate_amax = tl.maximum(gate_amax, _magnitude_bits(gate_grad))
    tl.store(gate_out + part, tl.max(gate_amax, 0).to(tl.float32, bitcast=True))
    tl.store(up_out + part, tl.max(up_amax, 0).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["zero", "cell"])  # type: ignore[untyped-decorator]
def _cast_gated_tile(  # type: ignore[no-untyped-def]
    gate,
    up,
    as_rows,
    as_columns,
    scale_out,
    tile_amax,
    gate_codes,
    up_codes,
    partial_amax,
    history_amax,
    after,
    sources,
    record,
    rows,
    features,
    zero,
    cell,
    is_e5m2: tl.constexpr,
    format_max: tl.constexpr,
    writes_rows: tl.constexpr,
    writes_columns: tl.constexpr,
    returns_amax: tl.constexpr,
    records_amax: tl.constexpr,
    is_padded: tl.constexpr,
    casts_inputs: tl.constexpr,
    part_count: tl.constexpr,
    tile: tl.constexpr,
):
    tile_number = tl.program_id(0)
    tiles_per_row = tl.cdiv(features, tile)
    row = (tile_number // tiles_per_row).to(tl.int64) * tile + tl.arange(0, tile)
    column = (tile_number % tiles_per_row).to(tl.int64) * tile + tl.arange(0, tile)
    source, has_source = row, row < rows
    if is_padded:
        source = tl.load(sources + row, mask=row < rows, other=-1).to(tl.int64)
        has_source = source >= 0
    inside = has_source[:, None] & (column < features)[None, :]
    offset = source[:, None] * features + column[None, :]
    history = tl.load(history_amax)
    gate_value = tl.load(gate + offset, mask=inside, other=0.0).to(tl.float32)
    up_value = tl.load(up + offset, mask=inside, other=0.0).to(tl.float32)
    if casts_inputs:
        input_codes = _codes_of(gate_value, zero, False)
        tl.store(gate_codes.to(tl.pointer_type(tl.uint8), bitcast=True) + offset, input_codes, mask=inside)
        gate_value = input_codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        input_codes = _codes_of(up_value, zero, False)
        tl.store(up_codes.to(tl.pointer_type(tl.uint8), bitcast=True) + offset, input_codes, mask=inside)
        up_value = input_codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    value = _product(gate_value, up_value)
    if returns_amax:
        _store_tile_amax(tile_amax, tile_number, value)
    if records_amax:
        _record_amax(record, cell, _tile_amax_bits(value))
    scale = _scale_from(partial_amax, history, format_max, True, True, part_count)
    if tile_number == 0:
        tl.store(scale_out, scale)
    codes = _codes_of(_divide(value, scale, format_max, True, True), zero, is_e5m2)
    if writes_rows:
        _store_rows(codes, source, has_source, column, as_rows, features)
    if writes_columns:
        _store_columns(codes, row, column, as_columns, rows, features)


@triton.jit(do_not_specialize=["zero", "gate_cell", "up_cell"])  # type: ignore[untyped-decorator]
def _cast_grads_tile(  # type: ignore[no-untyped-def]
    grad,
    gate,
    up,
    gate_rows,
    gate_columns,
    gate_scale,
    gate_tile_amax,
    up_rows,
    up_columns,
    up_scale,
    up_tile_amax,
    gate_partial_amax,
    up_partial_amax,
    gate_history_amax,
    up_history_amax,
    after,
    sources,
    gate_record,
    up_record,
    rows,
    features,
    zero,
    gate_cell,
    up_cell,
    is_e5m2: tl.constexpr,
    format_max: tl.constexpr,
    writes_rows: tl.constexpr,
    writes_columns: tl.constexpr,
    returns_amax: tl.constexpr,
    records_amax: tl.constexpr,
    is_padded: tl.constexpr,
    part_count: tl.constexpr,
    side: tl.constexpr,
    steps: tl.constexpr,
):
    tiles_per_row = tl.cdiv(features, side)
    # All loads are issued before the first use; a branch around the partial amaxes would need 28 more registers.
    gate_history = tl.load(gate_history_amax)
    up_history = tl.load(up_history_amax)
    gate_amax_parts = _magnitude_bits(tl.load(gate_partial_amax + tl.arange(0, part_count)))
    up_amax_parts = _magnitude_bits(tl.load(up_partial_amax + tl.arange(0, part_count)))
    gate_amax = tl.max(gate_amax_parts, 0).to(tl.float32, bitcast=True)
    up_amax = tl.max(up_amax_parts, 0).to(tl.float32, bitcast=True)
    gate_scale_value = _scale_of(tl.where(gate_history > 0, gate_history, gate_amax), format_max, True)
    up_scale_value = _scale_of(tl.where(up_history > 0, up_history, up_amax), format_max, True)
    if tl.program_id(0) == 0:
        tl.store(gate_scale, gate_scale_value)
        tl.store(up_scale, up_scale_value)
    column = (tl.program_id(0) % tiles_per_row).to(tl.int64) * side + tl.arange(0, side)
    gate_amax_bits = tl.full([], 0, tl.int32)
    up_amax_bits = tl.full([], 0, tl.int32)
    for step in range(steps):
        down = (tl.program_id(0) // tiles_per_row).to(tl.int64) * steps + step
        row = down * side + tl.arange(0, side)
        source, has_source = row, row < rows
        if is_padded:
            source = tl.load(sources + row, mask=row < rows, other=-1).to(tl.int64)
            has_source = source >= 0
        inside = has_source[:, None] & (column < features)[None, :]
        offset = source[:, None] * features + column[None, :]
        incoming = tl.load(grad + offset, mask=inside, other=0.0).to(tl.float32)
        gate_value = tl.load(gate + offset, mask=inside, other=0.0).to(tl.float32)
        up_value = tl.load(up + offset, mask=inside, other=0.0).to(tl.float32)
        sigmoid = _sigmoid(gate_value)
        up_grad = _round_to_bfloat16(incoming * (gate_value * sigmoid))
        up_codes = _codes_of(_divide(up_grad, up_scale_value, format_max, True, True), zero, is_e5m2)
        gate_grad = _round_to_bfloat16(incoming * up_value * sigmoid * _silu_slope(gate_value, sigmoid))
        gate_codes = _codes_of(_divide(gate_grad, gate_scale_value, format_max, True, True), zero, is_e5m2)
        if returns_amax:
            tile_number = tl.program_id(0) * steps + step
            _store_tile_amax(gate_tile_amax, tile_number, gate_grad)
            _store_tile_amax(up_tile_amax, tile_number, up_grad)
        if records_amax:
            gate_amax_bits = tl.maximum(gate_amax_bits, _tile_amax_bits(gate_grad))
            up_amax_bits = tl.maximum(up_amax_bits, _tile_amax_bits(up_grad))
        if writes_rows:
            _store_rows(gate_codes, source, has_source, column, gate_rows, features)
            _store_rows(up_codes, source, has_source, column, up_rows, features)
        if writes_columns:
            _store_columns(gate_codes, row, column, gate_columns, rows, features)
            _store_columns(up_codes, row, column, up_columns, rows, features)
    if records_amax:
        _record_amax(gate_record, gate_cell, gate_amax_bits)
        _record_amax(up_record, up_cell, up_amax_bits)


def launch_gated_amax(wrap: Any, gate: Tensor, up: Tensor, history_amax: Tensor, codes: bool) -> Tensor:
    out = gate.new_empty(PARTS, dtype=torch.float32)
    wrap(_gated_amax)[(PARTS,)](gate, up, history_amax, out, gate.numel(), 0, codes, PARTS, _BLOCK, num_warps=8)
    return out


def launch_gated_grads_amax(
    wrap: Any, grad: Tensor, gate: Tensor, up: Tensor, gate_history_amax: Tensor, up_history_amax: Tensor
) -> tuple[Tensor, Tensor]:
    gate_out, up_out = (grad.new_empty(PARTS, dtype=torch.float32) for _ in range(2))
    tensors = (grad, gate, up, gate_history_amax, up_history_amax, gate_out, up_out)
    wrap(_gated_grads_amax)[(PARTS,)](*tensors, grad.numel(), PARTS, _BLOCK, num_warps=8)
    return gate_out, up_out


def launch_gated_cast(
    wrap: Any,
    gate: Tensor,
    up: Tensor,
    dtype: torch.dtype,
    partial_amax: Tensor,
    history_amax: Tensor,
    as_rows: bool,
    as_columns: bool,
    returns_amax: bool,
    codes: bool,
    after: Tensor | None = None,
    sources: Tensor | None = None,
    records: Sequence[Tensor] = (),
    cells: Sequence[int] = (),
) -> tuple[Tensor, ...]:
    """As :func:`bitplan.executions.native.gated_cast.gated_cast_reference`; tensors are contiguous and not empty.

    :param records: no tensor, or one of which a cell is raised to the amax.
    :param cells: the flat index of that cell.
    """
    shape = (len(gate) if sources is None else len(sources), gate.shape[1])
    tiles = tile_count(*shape)
    outputs = CastOutputs(gate, dtype, as_rows, as_columns, returns_amax, tiles, sources)
    unused = outputs.scale
    input_codes = [gate.new_empty(gate.shape if codes else (0, 0), dtype=torch.float8_e4m3fn) for _ in range(2)]
    written = (*outputs.arguments, *(input_codes if codes else (unused, unused)))
    optional = (unused if tensor is None else tensor for tensor in (after, sources))
    read = (partial_amax, history_amax, *optional, *(records or (unused,)))
    flags = (as_rows, as_columns, returns_amax, bool(records), sources is not None, codes)
    constants = (dtype == torch.float8_e5m2, FORMATS[dtype].max, *flags, partial_amax.numel(), TILE)
    wrap(_cast_gated_tile)[(tiles,)](gate, up, *written, *read, *shape, 0, *(cells or (0,)), *constants, num_warps=8)
    return (*outputs.results(), *input_codes)


def launch_gated_grads_cast(
    wrap: Any,
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    dtype: torch.dtype,
    gate_partial_amax: Tensor,
    up_partial_amax: Tensor,
    gate_history_amax: Tensor,
    up_history_amax: Tensor,
    as_rows: bool,
    as_columns: bool,
    returns_amax: bool,
    after: Tensor | None = None,
    sources: Tensor | None = None,
    records: Sequence[Tensor] = (),
    cells: Sequence[int] = (),
) -> tuple[Tensor, ...]:
    """As :func:`bitplan.executions.native.gated_cast.gated_grads_cast_reference`; tensors are contiguous, not empty.

    :param records: no tensor, or one for gate and one for up, of each of which a cell is raised to the amax.
    :param cells: the flat indices of these cells.
    """
    shape = (len(grad) if sources is None else len(sources), grad.shape[1])
    tiles = grads_tile_count(*shape)
    layouts = (as_rows, as_columns, returns_amax)
    gate_cast, up_cast = (CastOutputs(grad, dtype, *layouts, tiles, sources) for _ in range(2))
    amaxes = (gate_partial_amax, up_partial_amax, gate_history_amax, up_history_amax)
    tensors = (grad, gate, up, *gate_cast.arguments, *up_cast.arguments, *amaxes)
    given = (gate_cast.scale if tensor is None else tensor for tensor in (after, sources))
    optional = (*given, *(records or (gate_cast.scale, up_cast.scale)))
    flags = (*layouts, bool(records), sources is not None)
    constants = (dtype == torch.float8_e5m2, FORMATS[dtype].max, *flags, gate_partial_amax.numel(), SIDE, STEPS)
    wrap(_cast_grads_tile)[(tiles // STEPS,)](
        *tensors, *optional, *shape, 0, *(cells or (0, 0)), *constants, num_warps=8
    )
    return (*gate_cast.results(), *up_cast.results())
