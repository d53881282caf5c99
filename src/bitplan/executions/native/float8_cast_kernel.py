"""The kernels of :mod:`bitplan.executions.native.float8_cast`; imported only where Triton is.

Magnitudes are compared as the bits of float32 numbers without the sign: these grow with the magnitude, and NaN is the
largest. Nothing is summed, and concurrent writes to a record keep the maximum, so results are deterministic.

Kernels load the list of rows of a padded matrix in their own bodies: torch assumes of what a function returns that it
points to all that the function was given, and would take a store there for one to that list.

Three choices follow from the machine code for Hopper, where they reduced 39 instructions per element to 23, about the
memory bandwidth:

* A correctly rounded division takes about 11 instructions and a branch. All elements have the same divisor, so its
  inverse is computed once, and six multiplications and additions give the same quotient (:func:`_quotient`). For a
  power of two one multiplication is enough.
* A tile is loaded in two halves. Otherwise Triton exchanges values between threads *before* they are converted to
  float32 and computes every code twice, once per layout. It does not where two loads are converted.
* Codes are made by PTX, four at a time, and combined with a zero that the compiler cannot see. Otherwise the assembler
  that Triton ships for Hopper (CUDA 12.8, 12.9) packs codes that are stored twice together with unrelated registers: in
  the transposed layout three of eight features were wrong (Triton issue 11111).

For 16-bit inputs no kernel needs more than 128 registers per thread, so a Hopper multiprocessor runs two tiles at once:
one is loaded while the other is cast.

Inductor copies these kernels into its generated code (:mod:`bitplan.compiler.launching`), which restricts them:
constants are numbers, booleans and strings, and the only launch option is the number of warps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitplan.executions.native.float8_cast import FORMATS, MAX_BATCH, MAX_RECORDS, PARTS, TILE, tile_count

#: Elements that a program of :func:`_partial_amax` loads at a time.
_BLOCK = 8192
#: PTX that converts four numbers.
_CAST = (
    "{{.reg .b16 a, b; cvt.rn.satfinite.{0}x2.f32 a, $2, $1; cvt.rn.satfinite.{0}x2.f32 b, $4, $3; "
    "mov.b32 $0, {{a, b}}; xor.b32 $0, $0, $5;}}"
)
_TO_E4M3, _TO_E5M2 = tl.constexpr(_CAST.format("e4m3")), tl.constexpr(_CAST.format("e5m2"))


@triton.jit
def _magnitude_bits(value):  # type: ignore[no-untyped-def]
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit  # type: ignore[untyped-decorator]
def _store_partial_amax(  # type: ignore[no-untyped-def]
    x,
    history_amax,
    out,
    count,
    has_history: tl.constexpr,
    part_count: tl.constexpr,
    block: tl.constexpr,
    copies: tl.constexpr,
):
    """Store the amax of one part of a matrix, `copies` times: zero where the history amax determines the scale."""
    part = tl.program_id(0)
    end = tl.cast(count, tl.int64)  # Triton specialises a count of one to a constant
    if has_history:
        end = tl.where(tl.load(history_amax) > 0, 0, end)
    amax = tl.zeros([block], tl.int32)
    for start in range(part.to(tl.int64) * block, end, part_count * block):
        at = start + tl.arange(0, block)
        amax = tl.maximum(amax, _magnitude_bits(tl.load(x + at, mask=at < end, other=0.0).to(tl.float32)))
    amax = tl.max(amax, 0).to(tl.float32, bitcast=True)
    if copies == 1:
        tl.store(out + part, amax)
    else:
        tl.store(out + part * copies + tl.arange(0, copies), amax)


@triton.jit  # type: ignore[untyped-decorator]
def _partial_amax(  # type: ignore[no-untyped-def]
    x, history_amax, out, count, has_history: tl.constexpr, part_count: tl.constexpr, block: tl.constexpr
):
    _store_partial_amax(x, history_amax, out, count, has_history, part_count, block, 1)


@triton.jit  # type: ignore[untyped-decorator]
def _partial_amax_batch(  # type: ignore[no-untyped-def]
    x_0,
    history_amax_0,
    out_0,
    count_0,
    x_1,
    history_amax_1,
    out_1,
    count_1,
    x_2,
    history_amax_2,
    out_2,
    count_2,
    x_3,
    history_amax_3,
    out_3,
    count_3,
    x_4,
    history_amax_4,
    out_4,
    count_4,
    x_5,
    history_amax_5,
    out_5,
    count_5,
    x_6,
    history_amax_6,
    out_6,
    count_6,
    x_7,
    history_amax_7,
    out_7,
    count_7,
    matrices: tl.constexpr,
    part_count: tl.constexpr,
    block: tl.constexpr,
    copies: tl.constexpr,
):
    matrix = tl.program_id(1)
    if matrix == 0:
        _store_partial_amax(x_0, history_amax_0, out_0, count_0, True, part_count, block, copies)
    if matrix == 1:
        _store_partial_amax(x_1, history_amax_1, out_1, count_1, True, part_count, block, copies)
    if matrices > 2:  # noqa: SIM102 - a branch on a constexpr is removed
        if matrix == 2:
            _store_partial_amax(x_2, history_amax_2, out_2, count_2, True, part_count, block, copies)
    if matrices > 3:  # noqa: SIM102 - a branch on a constexpr is removed
        if matrix == 3:
            _store_partial_amax(x_3, history_amax_3, out_3, count_3, True, part_count, block, copies)
    if matrices > 4:  # noqa: SIM102 - a branch on a constexpr is removed
        if matrix == 4:
            _store_partial_amax(x_4, history_amax_4, out_4, count_4, True, part_count, block, copies)
    if matrices > 5:  # noqa: SIM102 - a branch on a constexpr is removed
        if matrix == 5:
            _store_partial_amax(x_5, history_amax_5, out_5, count_5, True, part_count, block, copies)
    if matrices > 6:  # noqa: SIM102 - a branch on a constexpr is removed
        if matrix == 6:
            _store_partial_amax(x_6, history_amax_6, out_6, count_6, True, part_count, block, copies)
    if matrices > 7:  # noqa: SIM102 - a branch on a constexpr is removed
        if matrix == 7:
            _store_partial_amax(x_7, history_amax_7, out_7, count_7, True, part_count, block, copies)


@triton.jit  # type: ignore[untyped-decorator]
def _scale_of(amax, format_max: tl.constexpr, power_of_two: tl.constexpr):  # type: ignore[no-untyped-def]
    """As :func:`bitplan.numerics.scaling.step_scale`. Every comparison with NaN is false, so NaN is propagated."""
    scale = tl.div_rn(amax, tl.full([], format_max, tl.float32))
    smallest = tl.full([], 1.1754943508222875e-38, tl.float32)
    scale = tl.where(scale < smallest, smallest, scale)
    if power_of_two:
        raised = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = raised.to(tl.float32, bitcast=True) + scale * 0.0
    return scale


@triton.jit
def _inverse_power(scale):  # type: ignore[no-untyped-def]
    """1 / 2^e, where e is the scale's exponent: exact. Zero for infinity, NaN for NaN."""
    bits = scale.to(tl.int32, bitcast=True)
    power = (0x7F000000 - (bits & 0x7F800000)).to(tl.float32, bitcast=True)
    return tl.where((bits & 0x7F800000) != 0x7F800000, power, tl.where(scale == scale, 0.0, scale))


@triton.jit  # type: ignore[untyped-decorator]
def _quotient(value, scale, format_max: tl.constexpr, may_exceed: tl.constexpr):  # type: ignore[no-untyped-def]
    """value / scale, correctly rounded if it is at least 2^-18; smaller quotients are zero in every float8 format.

    Both are multiplied by the power of two that brings the scale into [1, 2), which is exact. Given the correctly
    rounded inverse and a quotient within one ulp, one correction step gives the correctly rounded quotient (Markstein
    1990); a first correction step gets within one ulp. Corrections lose the sign of zero.
    """
    bits = scale.to(tl.int32, bitcast=True)
    is_finite = (bits & 0x7F800000) != 0x7F800000
    divisor = tl.where(is_finite, (bits & 0x7FFFFF) | 0x3F800000, 0x3F800000).to(tl.float32, bitcast=True)
    dividend = value * _inverse_power(scale)
    if may_exceed:  # values beyond the bound saturate in any case
        bound = divisor * (2 * format_max)
        dividend = tl.clamp(dividend, -bound, bound, propagate_nan=tl.PropagateNan.ALL)
    inverse = tl.div_rn(tl.full([], 1.0, tl.float32), divisor)
    quotient = dividend * inverse
    quotient = tl.fma(tl.fma(quotient, -divisor, dividend), inverse, quotient)
    quotient = tl.fma(tl.fma(quotient, -divisor, dividend), inverse, quotient)
    sign = value.to(tl.int32, bitcast=True) & -0x80000000
    return (_magnitude_bits(quotient) | sign).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _codes_of(value, zero, is_e5m2: tl.constexpr):  # type: ignore[no-untyped-def]
    """The values as float8 bytes, saturating: four at a time, combined with the hidden zero (see above)."""
    cast: tl.constexpr = _TO_E5M2 if is_e5m2 else _TO_E4M3
    return tl.inline_asm_elementwise(cast, "=r,f,f,f,f,r,r,r,r", [value, zero], tl.uint8, is_pure=True, pack=4)


@triton.jit  # type: ignore[untyped-decorator]
def _amax_of_parts(partial_amax, part_count: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.max(_magnitude_bits(tl.load(partial_amax + tl.arange(0, part_count))), 0).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _scale_from(  # type: ignore[no-untyped-def]
    partial_amax,
    history,
    format_max: tl.constexpr,
    power_of_two: tl.constexpr,
    has_history: tl.constexpr,
    part_count: tl.constexpr,
):
    """The matrix's scale, from the history amax if there is one, otherwise from the partial amaxes.

    The partial amaxes are loaded only in the second case: a load and three synchronisations would follow the reduction
    of the tile's amax, which already synchronises all threads.
    """
    if has_history:
        amax = history
        if (history > 0) == 0:
            amax = _amax_of_parts(partial_amax, part_count)
    else:
        amax = _amax_of_parts(partial_amax, part_count)
    return _scale_of(amax, format_max, power_of_two)


@triton.jit  # type: ignore[untyped-decorator]
def _divide(value, scale, format_max: tl.constexpr, power_of_two: tl.constexpr, may_exceed: tl.constexpr):  # type: ignore[no-untyped-def]
    if power_of_two:  # noqa: SIM108 - a branch on a constexpr is removed
        value = value * _inverse_power(scale)
    else:
        value = _quotient(value, scale, format_max, may_exceed)
    return value


@triton.jit
def _tile_amax_bits(value):  # type: ignore[no-untyped-def]
    """The amax of a tile, as bits."""
    return tl.max(tl.max(_magnitude_bits(value), 1), 0)


@triton.jit
def _store_tile_amax(tile_amax, tile_number, value):  # type: ignore[no-untyped-def]
    """Store the amax of a tile."""
    tl.store(tile_amax + tile_number, _tile_amax_bits(value).to(tl.float32, bitcast=True))


@triton.jit
def _record_amax(record, cell, amax_bits):  # type: ignore[no-untyped-def]
    """Raise a cell of a record to an amax; both are compared as bits."""
    tl.atomic_max(record.to(tl.pointer_type(tl.int32), bitcast=True) + cell, amax_bits, sem="relaxed")


@triton.jit
def _store_rows(codes, row, has_row, column, out, features):  # type: ignore[no-untyped-def]
    inside = has_row[:, None] & (column < features)[None, :]
    offset = row[:, None] * features + column[None, :]
    tl.store(out.to(tl.pointer_type(tl.uint8), bitcast=True) + offset, codes, mask=inside)


@triton.jit
def _store_columns(codes, row, column, out, rows, features):  # type: ignore[no-untyped-def]
    inside = (column < features)[:, None] & (row < rows)[None, :]
    offset = column[:, None] * rows + row[None, :]
    tl.store(out.to(tl.pointer_type(tl.uint8), bitcast=True) + offset, tl.trans(codes), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _store_codes(  # type: ignore[no-untyped-def]
    codes, row, column, as_rows, as_columns, rows, features, writes_rows: tl.constexpr, writes_columns: tl.constexpr
):
    if writes_rows:
        _store_rows(codes, row, row < rows, column, as_rows, features)
    if writes_columns:
        _store_columns(codes, row, column, as_columns, rows, features)


@triton.jit(do_not_specialize=["zero", "cell_0", "cell_1", "cell_2"])  # type: ignore[untyped-decorator]
def _cast_tile(  # type: ignore[no-untyped-def]
    x,
    as_rows,
    as_columns,
    scale_out,
    tile_amax,
    partial_amax,
    history_amax,
    after,
    sources,
    record_0,
    record_1,
    record_2,
    rows,
    features,
    zero,
    cell_0,
    cell_1,
    cell_2,
    is_e5m2: tl.constexpr,
    format_max: tl.constexpr,
    power_of_two: tl.constexpr,
    is_scaled: tl.constexpr,
    has_history: tl.constexpr,
    writes_rows: tl.constexpr,
    writes_columns: tl.constexpr,
    returns_amax: tl.constexpr,
    is_padded: tl.constexpr,
    record_count: tl.constexpr,
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
    is_left = (tl.arange(0, tile) < tile // 2)[None, :]
    history = tl.load(history_amax) if has_history else 0.0
    left = tl.load(x + offset, mask=inside & is_left, other=0.0).to(tl.float32)
    right = tl.load(x + offset, mask=inside & (is_left == 0), other=0.0).to(tl.float32)
    value = tl.where(is_left, left, right)
    if returns_amax:
        _store_tile_amax(tile_amax, tile_number, value)
    if record_count > 0:
        amax_bits = _tile_amax_bits(value)
        _record_amax(record_0, cell_0, amax_bits)
        if record_count > 1:
            _record_amax(record_1, cell_1, amax_bits)
        if record_count > 2:
            _record_amax(record_2, cell_2, amax_bits)
    if is_scaled:
        scale = _scale_from(partial_amax, history, format_max, power_of_two, has_history, part_count)
        value = _divide(value, scale, format_max, power_of_two, has_history)
    else:
        scale = tl.full([], 1.0, tl.float32)
    if tile_number == 0:
        tl.store(scale_out, scale)
    codes = _codes_of(value, zero, is_e5m2)
    if writes_rows:
        _store_rows(codes, source, has_source, column, as_rows, features)
    if writes_columns:
        _store_columns(codes, row, column, as_columns, rows, features)


def launch_float8_amax(wrap: Any, x: Tensor, history_amax: Tensor | None) -> Tensor:
    """The amax of `x` in :data:`PARTS` partial results."""
    out = x.new_empty(PARTS, dtype=torch.float32)
    history = out if history_amax is None else history_amax
    wrap(_partial_amax)[(PARTS,)](
        x.contiguous(), history, out, x.numel(), history_amax is not None, PARTS, _BLOCK, num_warps=8
    )
    return out


def launch_float8_amax_batch(wrap: Any, xs: Sequence[Tensor], history_amaxes: Sequence[Tensor]) -> list[Tensor]:
    """The partial amaxes of up to :data:`MAX_BATCH` matrices with a history, by one kernel.

    It has as many programs as the kernel for one matrix, so that all of them start at once; with delayed scaling they
    return at once, too.
    """
    outs = [x.new_empty(PARTS, dtype=torch.float32) for x in xs]
    arguments = [
        argument
        for x, history_amax, out in zip(xs, history_amaxes, outs, strict=True)
        for argument in (x.contiguous(), history_amax, out, x.numel())
    ]
    unused = [outs[0], outs[0], outs[0], 0] * (MAX_BATCH - len(xs))
    parts = PARTS // MAX_BATCH
    wrap(_partial_amax_batch)[(parts, len(xs))](*arguments, *unused, len(xs), parts, _BLOCK, MAX_BATCH, num_warps=8)
    return outs


class CastOutputs:
    """The tensors that a cast kernel writes."""

    def __init__(
        self,
        x: Tensor,
        dtype: torch.dtype,
        as_rows: bool,
        as_columns: bool,
        returns_amax: bool,
        tiles: int,
        sources: Tensor | None = None,
    ) -> None:
        rows, features = x.shape
        width = rows if sources is None else sources.shape[0]
        self.rows = x.new_empty((rows, features) if as_rows else (0, 0), dtype=dtype)
        self.columns = x.new_empty((features, width) if as_columns else (0, 0), dtype=dtype)
        self.scale = x.new_empty(1, dtype=torch.float32)  # Inductor would initialise a scalar with zero
        self.tile_amax = x.new_empty(tiles if returns_amax else 0, dtype=torch.float32)

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """The kernel's arguments; the scale stands in for empty tensors, which the kernel does not write."""
        outputs = (self.rows, self.columns, self.scale, self.tile_amax)
        return tuple(output if output.numel() else self.scale for output in outputs)

    def results(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.rows, self.columns, self.scale.view(()), self.tile_amax


def launch_float8_cast(
    wrap: Any,
    x: Tensor,
    dtype: torch.dtype,
    partial_amax: Tensor | None,
    history_amax: Tensor | None,
    power_of_two: bool,
    as_rows: bool,
    as_columns: bool,
    returns_amax: bool,
    after: Tensor | None = None,
    records: Sequence[Tensor] = (),
    cells: Sequence[int] = (),
    sources: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`bitplan.executions.native.float8_cast.cast_reference`; `x` is not empty.

    The number of partial amaxes is a power of two.

    :param records: up to :data:`MAX_RECORDS` dense float32 tensors; one cell of each is raised to the amax.
    :param cells: the flat index of each record's cell.
    :param sources: pads the columns, as in :func:`bitplan.executions.native.float8_cast.cast_float8`.
    """
    rows, features = x.shape
    rows = rows if sources is None else sources.shape[0]
    tiles = tile_count(rows, features)
    outputs = CastOutputs(x, dtype, as_rows, as_columns, returns_amax, tiles, sources)
    optional = [outputs.scale if tensor is None else tensor for tensor in (partial_amax, history_amax, after, sources)]
    unused = MAX_RECORDS - len(records)
    record_slots, cell_slots = [*records, *[outputs.scale] * unused], [*cells, *[0] * unused]
    scaling = (FORMATS[dtype].max, power_of_two, partial_amax is not None, history_amax is not None)
    layouts = (as_rows, as_columns, returns_amax, sources is not None, len(records))
    part_count = 1 if partial_amax is None else partial_amax.numel()
    tensors = (x.contiguous(), *outputs.arguments, *optional, *record_slots)
    constants = (dtype == torch.float8_e5m2, *scaling, *layouts, part_count, TILE)
    wrap(_cast_tile)[(tiles,)](*tensors, rows, features, 0, *cell_slots, *constants, num_warps=8)
    return outputs.results()


def launch_float8_padded_cast(
    wrap: Any,
    x: Tensor,
    sources: Tensor,
    dtype: torch.dtype,
    partial_amax: Tensor | None,
    history_amax: Tensor | None,
    power_of_two: bool,
    as_rows: bool,
    returns_amax: bool,
    after: Tensor | None = None,
    records: Sequence[Tensor] = (),
    cells: Sequence[int] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`bitplan.executions.native.float8_cast.padded_cast_reference`; `x` is not empty."""
    scaling = dtype, partial_amax, history_amax, power_of_two
    return launch_float8_cast(wrap, x, *scaling, as_rows, True, returns_amax, after, records, cells, sources)
