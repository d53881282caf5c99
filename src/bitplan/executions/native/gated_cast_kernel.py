"""The kernels of :mod:`bitplan.executions.native.gated_cast`; imported only where Triton is.

What Inductor would write in bfloat16 is computed where it is cast, by the operations that Inductor uses and in their
order: float32 throughout, ``libdevice.exp``, one rounding to bfloat16 at the end. So codes are the same to the bit as
where Inductor computes and :mod:`bitplan.executions.native.float8_cast_kernel` reads it, but for one thing: Triton's
division has
four instructions that tell whether a divisor is above 2^126. Here they are left out, and where the gate is below -87.3
the product and the gradients are zero instead of less than 1e-36 times their other factors.

In machine code for Hopper a product takes 28 to 36 instructions an element (a plain cast 14 to 16), the two gradients
together 48. Nothing is computed twice for the two layouts, and by powers of two no kernel takes more than 128 registers
a thread. The gradients, of which each element has three inputs and two results, go by smaller squares, several in turn
so that the scales are made once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from bitplan.executions.native.float8_cast import FORMATS, PARTS, TILE, tiles_of
from bitplan.executions.native.float8_cast_kernel import (
    _codes_of,
    _divided,
    _gather,
    _magnitude_bits,
    _note,
    _scale_from,
    _scale_of,
    _store_codes,
    _top_bits,
)
from bitplan.executions.native.gated_cast import SIDE, STEPS, squares_of

#: Elements that a program of the kernels for the largest magnitude reads at once.
_BLOCK = 4096
#: PTX for two numbers: to bfloat16 and, by shifts, back.
_TO_BFLOAT16 = tl.constexpr(
    "{.reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000;}"
)
_INVERSE = tl.constexpr("rcp.approx.ftz.f32 $0, $1;")


@triton.jit
def _as_kept(value):  # type: ignore[no-untyped-def]
    """The numbers as they would lie in memory, rounded to bfloat16: two at a time."""
    return tl.inline_asm_elementwise(_TO_BFLOAT16, "=f,=f,f,f", [value], tl.float32, is_pure=True, pack=2)


@triton.jit
def _sigmoid(gate):  # type: ignore[no-untyped-def]
    """1 / (1 + exp(-gate)): what Triton's division gives of numbers from 1 to 2^126, without its care for others."""
    return tl.inline_asm_elementwise(_INVERSE, "=f,f", [libdevice.exp(-gate) + 1.0], tl.float32, is_pure=True, pack=1)


@triton.jit
def _product(gate, up):  # type: ignore[no-untyped-def]
    return _as_kept(gate * _sigmoid(gate) * up)


@triton.jit
def _slope(gate, sigmoid):  # type: ignore[no-untyped-def]
    return gate * (1.0 - sigmoid) + 1.0


@triton.jit
def _through_codes(value, zero):  # type: ignore[no-untyped-def]
    return _codes_of(value, zero, False).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit(do_not_specialize=["zero"])  # type: ignore[untyped-decorator]
def _amax_of_gated(  # type: ignore[no-untyped-def]
    gate, up, reach, tops, count, zero, codes: tl.constexpr, parts: tl.constexpr, block: tl.constexpr
):
    part = tl.program_id(0)
    end = tl.where(tl.load(reach) > 0, 0, tl.cast(count, tl.int64))  # the past decides: there is nothing to look for
    top = tl.zeros([block], tl.int32)
    for start in range(part.to(tl.int64) * block, end, parts * block):
        at = start + tl.arange(0, block)
        one = tl.load(gate + at, mask=at < end, other=0.0).to(tl.float32)
        other = tl.load(up + at, mask=at < end, other=0.0).to(tl.float32)
        if codes:
            one = _through_codes(one, zero)
            other = _through_codes(other, zero)
        top = tl.maximum(top, _magnitude_bits(_product(one, other)))
    tl.store(tops + part, tl.max(top, 0).to(tl.float32, bitcast=True))


@triton.jit  # type: ignore[untyped-decorator]
def _amax_of_grads(  # type: ignore[no-untyped-def]
    grad, gate, up, gate_reach, up_reach, gate_tops, up_tops, count, parts: tl.constexpr, block: tl.constexpr
):
    part = tl.program_id(0)
    both_known = (tl.load(gate_reach) > 0) & (tl.load(up_reach) > 0)
    end = tl.where(both_known, 0, tl.cast(count, tl.int64))
    gate_top = tl.zeros([block], tl.int32)
    up_top = tl.zeros([block], tl.int32)
    for start in range(part.to(tl.int64) * block, end, parts * block):
        at = start + tl.arange(0, block)
        incoming = tl.load(grad + at, mask=at < end, other=0.0).to(tl.float32)
        one = tl.load(gate + at, mask=at < end, other=0.0).to(tl.float32)
        other = tl.load(up + at, mask=at < end, other=0.0).to(tl.float32)
        sigmoid = _sigmoid(one)
        up_top = tl.maximum(up_top, _magnitude_bits(_as_kept(incoming * (one * sigmoid))))
        gate_top = tl.maximum(gate_top, _magnitude_bits(_as_kept(incoming * other * sigmoid * _slope(one, sigmoid))))
    tl.store(gate_tops + part, tl.max(gate_top, 0).to(tl.float32, bitcast=True))
    tl.store(up_tops + part, tl.max(up_top, 0).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["zero", "cell"])  # type: ignore[untyped-decorator]
def _cast_gated_tile(  # type: ignore[no-untyped-def]
    gate,
    up,
    as_rows,
    as_columns,
    scale_out,
    tops,
    gate_codes,
    up_codes,
    parts,
    reach,
    after,
    record,
    rows,
    features,
    zero,
    cell,
    is_e5m2: tl.constexpr,
    largest: tl.constexpr,
    writes_rows: tl.constexpr,
    writes_columns: tl.constexpr,
    gathers: tl.constexpr,
    notes: tl.constexpr,
    codes: tl.constexpr,
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
    one = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    if codes:
        small = _codes_of(one, zero, False)
        tl.store(gate_codes.to(tl.pointer_type(tl.uint8), bitcast=True) + place, small, mask=inside)
        one = small.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        small = _codes_of(other, zero, False)
        tl.store(up_codes.to(tl.pointer_type(tl.uint8), bitcast=True) + place, small, mask=inside)
        other = small.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    value = _product(one, other)
    if gathers:
        _gather(tops, number, value)
    if notes:
        _note(record, cell, _top_bits(value))
    scale = _scale_from(parts, known, largest, True, True, part_count)
    if number == 0:
        tl.store(scale_out, scale)
    cast = _codes_of(_divided(value, scale, largest, True, True), zero, is_e5m2)
    _store_codes(cast, row, column, as_rows, as_columns, rows, features, writes_rows, writes_columns)


@triton.jit(do_not_specialize=["zero", "gate_cell", "up_cell"])  # type: ignore[untyped-decorator]
def _cast_grads_tile(  # type: ignore[no-untyped-def]
    grad,
    gate,
    up,
    gate_rows,
    gate_columns,
    gate_scale,
    gate_tops,
    up_rows,
    up_columns,
    up_scale,
    up_tops,
    gate_parts,
    up_parts,
    gate_reach,
    up_reach,
    after,
    gate_record,
    up_record,
    rows,
    features,
    zero,
    gate_cell,
    up_cell,
    is_e5m2: tl.constexpr,
    largest: tl.constexpr,
    writes_rows: tl.constexpr,
    writes_columns: tl.constexpr,
    gathers: tl.constexpr,
    notes: tl.constexpr,
    part_count: tl.constexpr,
    side: tl.constexpr,
    steps: tl.constexpr,
):
    across = tl.cdiv(features, side)
    # All is asked for before anything is waited for; a branch around the parts would take 28 registers more.
    gate_known = tl.load(gate_reach)
    up_known = tl.load(up_reach)
    gate_spans = _magnitude_bits(tl.load(gate_parts + tl.arange(0, part_count)))
    up_spans = _magnitude_bits(tl.load(up_parts + tl.arange(0, part_count)))
    gate_span = tl.max(gate_spans, 0).to(tl.float32, bitcast=True)
    up_span = tl.max(up_spans, 0).to(tl.float32, bitcast=True)
    of_gate = _scale_of(tl.where(gate_known > 0, gate_known, gate_span), largest, True)
    of_up = _scale_of(tl.where(up_known > 0, up_known, up_span), largest, True)
    if tl.program_id(0) == 0:
        tl.store(gate_scale, of_gate)
        tl.store(up_scale, of_up)
    column = (tl.program_id(0) % across).to(tl.int64) * side + tl.arange(0, side)
    gate_top = tl.full([], 0, tl.int32)
    up_top = tl.full([], 0, tl.int32)
    for step in range(steps):
        down = (tl.program_id(0) // across).to(tl.int64) * steps + step
        row = down * side + tl.arange(0, side)
        inside = (row < rows)[:, None] & (column < features)[None, :]
        place = row[:, None] * features + column[None, :]
        incoming = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        one = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
        other = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
        sigmoid = _sigmoid(one)
        to_up = _as_kept(incoming * (one * sigmoid))
        up_codes = _codes_of(_divided(to_up, of_up, largest, True, True), zero, is_e5m2)
        to_gate = _as_kept(incoming * other * sigmoid * _slope(one, sigmoid))
        gate_codes = _codes_of(_divided(to_gate, of_gate, largest, True, True), zero, is_e5m2)
        if gathers:
            number = tl.program_id(0) * steps + step
            _gather(gate_tops, number, to_gate)
            _gather(up_tops, number, to_up)
        if notes:
            gate_top = tl.maximum(gate_top, _top_bits(to_gate))
            up_top = tl.maximum(up_top, _top_bits(to_up))
        _store_codes(gate_codes, row, column, gate_rows, gate_columns, rows, features, writes_rows, writes_columns)
        _store_codes(up_codes, row, column, up_rows, up_columns, rows, features, writes_rows, writes_columns)
    if notes:
        _note(gate_record, gate_cell, gate_top)
        _note(up_record, up_cell, up_top)


def gated_amax_by_kernel(wrap: Any, gate: Tensor, up: Tensor, reach: Tensor, codes: bool) -> Tensor:
    tops = gate.new_empty(PARTS, dtype=torch.float32)
    wrap(_amax_of_gated)[(PARTS,)](gate, up, reach, tops, gate.numel(), 0, codes, PARTS, _BLOCK, num_warps=8)
    return tops


def grads_amax_by_kernel(
    wrap: Any, grad: Tensor, gate: Tensor, up: Tensor, gate_reach: Tensor, up_reach: Tensor
) -> tuple[Tensor, Tensor]:
    gate_tops, up_tops = (grad.new_empty(PARTS, dtype=torch.float32) for _ in range(2))
    given = (grad, gate, up, gate_reach, up_reach, gate_tops, up_tops, grad.numel(), PARTS, _BLOCK)
    wrap(_amax_of_grads)[(PARTS,)](*given, num_warps=8)
    return gate_tops, up_tops


class _Room:
    """Where a cast is written to; where a layout is not asked for, its scale stands in."""

    def __init__(
        self, x: Tensor, dtype: torch.dtype, as_rows: bool, as_columns: bool, gathers: bool, tiles: int
    ) -> None:
        rows, features = x.shape
        by_row = x.new_empty((rows, features) if as_rows else (0, 0), dtype=dtype)
        by_column = x.new_empty((features, rows) if as_columns else (0, 0), dtype=dtype)
        scale = x.new_empty(1, dtype=torch.float32)  # Inductor would write a zero into a number
        tops = x.new_empty(tiles if gathers else 0, dtype=torch.float32)
        layouts = (by_row if as_rows else scale, by_column if as_columns else scale)
        self.scale = scale
        self.written = (*layouts, scale, tops if gathers else scale)
        self._results = (by_row, by_column, scale, tops)

    def results(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        by_row, by_column, scale, tops = self._results
        return by_row, by_column, scale.view(()), tops


def gated_cast_by_kernel(
    wrap: Any,
    gate: Tensor,
    up: Tensor,
    dtype: torch.dtype,
    parts: Tensor,
    reach: Tensor,
    as_rows: bool,
    as_columns: bool,
    gathers: bool,
    codes: bool,
    after: Tensor | None = None,
    records: Sequence[Tensor] = (),
    cells: Sequence[int] = (),
) -> tuple[Tensor, ...]:
    """As :func:`bitplan.executions.native.gated_cast.gated_cast_reference`; all are contiguous and not empty.

    Where there is a record, the largest magnitude is noted at that one of its numbers.
    """
    tiles = tiles_of(*gate.shape)
    room = _Room(gate, dtype, as_rows, as_columns, gathers, tiles)
    small = [gate.new_empty(gate.shape if codes else (0, 0), dtype=torch.float8_e4m3fn) for _ in range(2)]
    wrap(_cast_gated_tile)[(tiles,)](
        *(gate, up, *room.written, *(small if codes else (room.scale, room.scale))),
        *(parts, reach, room.scale if after is None else after, *(records or (room.scale,))),
        *(*gate.shape, 0, *(cells or (0,)), dtype == torch.float8_e5m2, FORMATS[dtype].max, as_rows, as_columns),
        *(gathers, bool(records), codes, parts.numel(), TILE),
        num_warps=8,
    )
    return (*room.results(), *small)


def grads_cast_by_kernel(
    wrap: Any,
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    dtype: torch.dtype,
    gate_parts: Tensor,
    up_parts: Tensor,
    gate_reach: Tensor,
    up_reach: Tensor,
    as_rows: bool,
    as_columns: bool,
    gathers: bool,
    after: Tensor | None = None,
    records: Sequence[Tensor] = (),
    cells: Sequence[int] = (),
) -> tuple[Tensor, ...]:
    """As :func:`bitplan.executions.native.gated_cast.gated_grads_cast_reference`; all are contiguous and not empty.

    Where there are records, the gate's and the other's, the largest magnitudes are noted at these of their numbers.
    """
    squares = squares_of(*grad.shape)
    of_gate, of_up = (_Room(grad, dtype, as_rows, as_columns, gathers, squares) for _ in range(2))
    wrap(_cast_grads_tile)[(squares // STEPS,)](
        *(grad, gate, up, *of_gate.written, *of_up.written, gate_parts, up_parts, gate_reach, up_reach),
        *(of_gate.scale if after is None else after, *(records or (of_gate.scale, of_up.scale)), *grad.shape, 0),
        *(*(cells or (0, 0)), dtype == torch.float8_e5m2, FORMATS[dtype].max, as_rows, as_columns),
        *(gathers, bool(records)),
        *(gate_parts.numel(), SIDE, STEPS),
        num_warps=8,
    )
    return (*of_gate.results(), *of_up.results())
