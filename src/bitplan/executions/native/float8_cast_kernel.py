"""The kernels of :mod:`bitplan.executions.native.float8_cast`; imported only where Triton is.

Magnitudes are compared as the bits of float32 numbers without their signs: these grow with the magnitude, and NaN lies
above all of them. Nothing is added up, and where programs write to one place, the largest magnitude stays: results are
the same at every call.

Three things are written otherwise than one would first think, after a look at the machine code for Hopper, where 39
instructions an element became 23, which is about what memory can keep up with:

* A correctly rounded division takes about 11 instructions and a branch. All elements have one divisor, so its inverse
  is found once, and six multiplications and additions give the same quotient (:func:`_quotient`); by a power of two,
  one multiplication does.
* A tile is read in two halves. Triton would otherwise exchange the numbers between the threads *before* they are
  widened, and compute every code twice, once for each layout; it does not where two loads are widened.
* Codes are made by PTX, four at a time, and combined with a zero that the compiler does not know. The assembler that
  Triton brings for Hopper (CUDA 12.8, 12.9) otherwise packs codes that go to two places together with registers that
  hold something else: of eight features three came out wrong by column. Triton's issue 11111 is about it.

With tiles of 16-bit numbers no kernel takes more than 128 registers a thread, so that a multiprocessor of Hopper works
on two tiles at once: one is read while the other is cast.

Inductor puts these kernels into its own code (:mod:`bitplan.compiler.launching`), for which they keep to what it can
write down: their constants are numbers, booleans and text, and they say no more of how they are launched than the
number of warps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitplan.executions.native.float8_cast import FORMATS, JOINED, NOTED, PARTS, TILE, tiles_of

#: Elements that a program of :func:`_amax_of_parts` reads at once.
_BLOCK = 8192
#: PTX for four numbers.
_CAST = (
    "{{.reg .b16 a, b; cvt.rn.satfinite.{0}x2.f32 a, $2, $1; cvt.rn.satfinite.{0}x2.f32 b, $4, $3; "
    "mov.b32 $0, {{a, b}}; xor.b32 $0, $0, $5;}}"
)
_TO_E4M3, _TO_E5M2 = tl.constexpr(_CAST.format("e4m3")), tl.constexpr(_CAST.format("e5m2"))


@triton.jit
def _magnitude_bits(value):  # type: ignore[no-untyped-def]
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit  # type: ignore[untyped-decorator]
def _tops_of_part(  # type: ignore[no-untyped-def]
    x, reach, tops, count, has_reach: tl.constexpr, parts: tl.constexpr, block: tl.constexpr, times: tl.constexpr
):
    """The largest magnitude of a part, written so many times."""
    part = tl.program_id(0)
    end = tl.cast(count, tl.int64)  # Triton makes a constant of a count of one
    if has_reach:
        end = tl.where(tl.load(reach) > 0, 0, end)  # the past decides: there is nothing to look for
    top = tl.zeros([block], tl.int32)
    for start in range(part.to(tl.int64) * block, end, parts * block):
        at = start + tl.arange(0, block)
        top = tl.maximum(top, _magnitude_bits(tl.load(x + at, mask=at < end, other=0.0).to(tl.float32)))
    top = tl.max(top, 0).to(tl.float32, bitcast=True)
    if times == 1:
        tl.store(tops + part, top)
    else:
        tl.store(tops + part * times + tl.arange(0, times), top)


@triton.jit  # type: ignore[untyped-decorator]
def _amax_of_parts(x, reach, tops, count, has_reach: tl.constexpr, parts: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    _tops_of_part(x, reach, tops, count, has_reach, parts, block, 1)


@triton.jit  # type: ignore[untyped-decorator]
def _amax_of_several(  # type: ignore[no-untyped-def]
    x_0,
    reach_0,
    tops_0,
    count_0,
    x_1,
    reach_1,
    tops_1,
    count_1,
    x_2,
    reach_2,
    tops_2,
    count_2,
    x_3,
    reach_3,
    tops_3,
    count_3,
    x_4,
    reach_4,
    tops_4,
    count_4,
    x_5,
    reach_5,
    tops_5,
    count_5,
    x_6,
    reach_6,
    tops_6,
    count_6,
    x_7,
    reach_7,
    tops_7,
    count_7,
    several: tl.constexpr,
    parts: tl.constexpr,
    block: tl.constexpr,
    times: tl.constexpr,
):
    which = tl.program_id(1)
    if which == 0:
        _tops_of_part(x_0, reach_0, tops_0, count_0, True, parts, block, times)
    if which == 1:
        _tops_of_part(x_1, reach_1, tops_1, count_1, True, parts, block, times)
    if several > 2:  # noqa: SIM102 - Triton leaves out what is not there
        if which == 2:
            _tops_of_part(x_2, reach_2, tops_2, count_2, True, parts, block, times)
    if several > 3:  # noqa: SIM102 - Triton leaves out what is not there
        if which == 3:
            _tops_of_part(x_3, reach_3, tops_3, count_3, True, parts, block, times)
    if several > 4:  # noqa: SIM102 - Triton leaves out what is not there
        if which == 4:
            _tops_of_part(x_4, reach_4, tops_4, count_4, True, parts, block, times)
    if several > 5:  # noqa: SIM102 - Triton leaves out what is not there
        if which == 5:
            _tops_of_part(x_5, reach_5, tops_5, count_5, True, parts, block, times)
    if several > 6:  # noqa: SIM102 - Triton leaves out what is not there
        if which == 6:
            _tops_of_part(x_6, reach_6, tops_6, count_6, True, parts, block, times)
    if several > 7:  # noqa: SIM102 - Triton leaves out what is not there
        if which == 7:
            _tops_of_part(x_7, reach_7, tops_7, count_7, True, parts, block, times)


@triton.jit  # type: ignore[untyped-decorator]
def _scale_of(span, largest: tl.constexpr, power_of_two: tl.constexpr):  # type: ignore[no-untyped-def]
    """As :func:`bitplan.numerics.scaling.step_scale`: every comparison with NaN is false, so that NaN stays."""
    scale = tl.div_rn(span, tl.full([], largest, tl.float32))
    smallest = tl.full([], 1.1754943508222875e-38, tl.float32)
    scale = tl.where(scale < smallest, smallest, scale)
    if power_of_two:
        raised = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = raised.to(tl.float32, bitcast=True) + scale * 0.0
    return scale


@triton.jit
def _inverse_power(scale):  # type: ignore[no-untyped-def]
    """1 / 2^e, e being the scale's exponent: exact. Of infinity it is zero, of NaN NaN."""
    bits = scale.to(tl.int32, bitcast=True)
    power = (0x7F000000 - (bits & 0x7F800000)).to(tl.float32, bitcast=True)
    return tl.where((bits & 0x7F800000) != 0x7F800000, power, tl.where(scale == scale, 0.0, scale))


@triton.jit  # type: ignore[untyped-decorator]
def _quotient(value, scale, largest: tl.constexpr, may_exceed: tl.constexpr):  # type: ignore[no-untyped-def]
    """value / scale, correctly rounded where that is at least 2^-18; what is less becomes zero in any float8.

    Both are multiplied by the power of two that brings the scale to between 1 and 2, which is exact. With the correctly
    rounded inverse and a quotient that is off by less than one unit in the last place, a correction gives the correctly
    rounded one (Markstein 1990); an earlier correction brings it there. Corrections lose the sign of a zero.
    """
    bits = scale.to(tl.int32, bitcast=True)
    is_finite = (bits & 0x7F800000) != 0x7F800000
    divisor = tl.where(is_finite, (bits & 0x7FFFFF) | 0x3F800000, 0x3F800000).to(tl.float32, bitcast=True)
    dividend = value * _inverse_power(scale)
    if may_exceed:  # what lies far beyond saturates anyway
        edge = divisor * (2 * largest)
        dividend = tl.clamp(dividend, -edge, edge, propagate_nan=tl.PropagateNan.ALL)
    inverse = tl.div_rn(tl.full([], 1.0, tl.float32), divisor)
    quotient = dividend * inverse
    quotient = tl.fma(tl.fma(quotient, -divisor, dividend), inverse, quotient)
    quotient = tl.fma(tl.fma(quotient, -divisor, dividend), inverse, quotient)
    sign = value.to(tl.int32, bitcast=True) & -0x80000000
    return (_magnitude_bits(quotient) | sign).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _codes_of(value, zero, is_e5m2: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers as float8, saturated, as bytes: four at a time, and each four of them combined with zero."""
    cast: tl.constexpr = _TO_E5M2 if is_e5m2 else _TO_E4M3
    return tl.inline_asm_elementwise(cast, "=r,f,f,f,f,r,r,r,r", [value, zero], tl.uint8, is_pure=True, pack=4)


@triton.jit  # type: ignore[untyped-decorator]
def _span_of(parts, part_count: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.max(_magnitude_bits(tl.load(parts + tl.arange(0, part_count))), 0).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _scale_from(  # type: ignore[no-untyped-def]
    parts, known, largest: tl.constexpr, power_of_two: tl.constexpr, has_reach: tl.constexpr, part_count: tl.constexpr
):
    """The matrix's scale: room for what is known from the past or, where nothing is, for the largest of the parts.

    Parts are not read where they do not decide: behind the tile's largest magnitude, which all threads wait for, that
    would be another wait for memory and three for each other.
    """
    if has_reach:
        span = known
        if (known > 0) == 0:
            span = _span_of(parts, part_count)
    else:
        span = _span_of(parts, part_count)
    return _scale_of(span, largest, power_of_two)


@triton.jit  # type: ignore[untyped-decorator]
def _divided(value, scale, largest: tl.constexpr, power_of_two: tl.constexpr, may_exceed: tl.constexpr):  # type: ignore[no-untyped-def]
    if power_of_two:  # noqa: SIM108 - Triton leaves out the branch that is not taken
        value = value * _inverse_power(scale)
    else:
        value = _quotient(value, scale, largest, may_exceed)
    return value


@triton.jit
def _top_bits(value):  # type: ignore[no-untyped-def]
    """The largest magnitude of a tile."""
    return tl.max(tl.max(_magnitude_bits(value), 1), 0)


@triton.jit
def _gather(tops, number, value):  # type: ignore[no-untyped-def]
    """Tell the largest magnitude of a tile."""
    tl.store(tops + number, _top_bits(value).to(tl.float32, bitcast=True))


@triton.jit
def _note(record, cell, top):  # type: ignore[no-untyped-def]
    """Raise a number of a record to a magnitude. As bits numbers that have no sign are in order, NaN above all."""
    tl.atomic_max(record.to(tl.pointer_type(tl.int32), bitcast=True) + cell, top, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def _store_codes(  # type: ignore[no-untyped-def]
    codes, row, column, as_rows, as_columns, rows, features, writes_rows: tl.constexpr, writes_columns: tl.constexpr
):
    if writes_rows:
        inside = (row < rows)[:, None] & (column < features)[None, :]
        place = row[:, None] * features + column[None, :]
        tl.store(as_rows.to(tl.pointer_type(tl.uint8), bitcast=True) + place, codes, mask=inside)
    if writes_columns:
        outside = (column < features)[:, None] & (row < rows)[None, :]
        turned = column[:, None] * rows + row[None, :]
        tl.store(as_columns.to(tl.pointer_type(tl.uint8), bitcast=True) + turned, tl.trans(codes), mask=outside)


@triton.jit(do_not_specialize=["zero", "first_cell", "second_cell", "third_cell"])  # type: ignore[untyped-decorator]
def _cast_tile(  # type: ignore[no-untyped-def]
    x,
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
    is_e5m2: tl.constexpr,
    largest: tl.constexpr,
    power_of_two: tl.constexpr,
    has_parts: tl.constexpr,
    has_reach: tl.constexpr,
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
    is_left = (tl.arange(0, tile) < tile // 2)[None, :]
    known = tl.load(reach) if has_reach else 0.0
    left = tl.load(x + place, mask=inside & is_left, other=0.0).to(tl.float32)
    right = tl.load(x + place, mask=inside & (is_left == 0), other=0.0).to(tl.float32)
    value = tl.where(is_left, left, right)
    if gathers:
        _gather(tops, number, value)
    if notes > 0:
        top = _top_bits(value)
        _note(first, first_cell, top)
        if notes > 1:
            _note(second, second_cell, top)
        if notes > 2:
            _note(third, third_cell, top)
    if has_parts:
        scale = _scale_from(parts, known, largest, power_of_two, has_reach, part_count)
        value = _divided(value, scale, largest, power_of_two, has_reach)
    else:
        scale = tl.full([], 1.0, tl.float32)
    if number == 0:
        tl.store(scale_out, scale)
    codes = _codes_of(value, zero, is_e5m2)
    _store_codes(codes, row, column, as_rows, as_columns, rows, features, writes_rows, writes_columns)


def amax_by_kernel(wrap: Any, x: Tensor, reach: Tensor | None) -> Tensor:
    """Largest magnitudes of :data:`PARTS` parts of `x`, which is contiguous."""
    tops = x.new_empty(PARTS, dtype=torch.float32)
    given = (x, tops if reach is None else reach, tops, x.numel(), reach is not None, PARTS, _BLOCK)
    wrap(_amax_of_parts)[(PARTS,)](*given, num_warps=8)
    return tops


def joined_by_kernel(wrap: Any, xs: Sequence[Tensor], reaches: Sequence[Tensor]) -> list[Tensor]:
    """The same for up to :data:`JOINED` of them, all of which have a past, by one kernel.

    It has as many programs as if there were one: these start at once, and where nothing is to be done end at once.
    """
    tops = [x.new_empty(PARTS, dtype=torch.float32) for x in xs]
    each = [(x, reach, top, x.numel()) for x, reach, top in zip(xs, reaches, tops, strict=True)]
    each += [(tops[0], tops[0], tops[0], 0)] * (JOINED - len(each))  # not looked at
    given = (part for one in each for part in one)
    wrap(_amax_of_several)[(PARTS // JOINED, len(xs))](*given, len(xs), PARTS // JOINED, _BLOCK, JOINED, num_warps=8)
    return tops


def cast_by_kernel(
    wrap: Any,
    x: Tensor,
    dtype: torch.dtype,
    parts: Tensor | None,
    reach: Tensor | None,
    power_of_two: bool,
    as_rows: bool,
    as_columns: bool,
    gathers: bool,
    after: Tensor | None = None,
    records: Sequence[Tensor] = (),
    cells: Sequence[int] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`bitplan.executions.native.float8_cast.cast_reference`; `x` is contiguous and not empty.

    There may be any power of two of `parts`: one, where the largest magnitude is known from elsewhere.

    :param records: float32 tensors, dense, in which the largest magnitude is noted, up to three of them.
    :param cells: at which of each one's numbers.
    """
    rows, features = x.shape
    tiles = tiles_of(rows, features)
    by_row = x.new_empty((rows, features) if as_rows else (0, 0), dtype=dtype)
    by_column = x.new_empty((features, rows) if as_columns else (0, 0), dtype=dtype)
    scale = x.new_empty(1, dtype=torch.float32)  # Inductor would write a zero into a number
    tops = x.new_empty(tiles if gathers else 0, dtype=torch.float32)
    # Where there is nothing to read or to write, the scale stands in.
    written = (by_row if as_rows else scale, by_column if as_columns else scale, scale, tops if gathers else scale)
    read = (scale if given is None else given for given in (parts, reach, after))
    unused = NOTED - len(records)
    wrap(_cast_tile)[(tiles,)](
        *(x, *written, *read, *records, *[scale] * unused, rows, features, 0, *cells, *[0] * unused),
        *(dtype == torch.float8_e5m2, FORMATS[dtype].max, power_of_two, parts is not None, reach is not None),
        *(as_rows, as_columns, gathers, len(records), 1 if parts is None else parts.numel(), TILE),
        num_warps=8,
    )
    return by_row, by_column, scale.view(()), tops
