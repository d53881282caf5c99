"""Rounding tensors onto a grid: plain torch operations that Inductor fuses into one kernel.

:mod:`bitplan.numerics.reference` is the readable definition; everything here equals it bit for bit. There are
three algorithms, all exact, chosen when the code is traced:

* **magic addition**, nearest with a constant narrow format. With ``2^e <= |x| < 2^(e+1)`` and
  ``M = 1.5 * 2^(max(e, emin) + 23 - Y)``, ``x + M`` has exactly the format's spacing as its last bit, so the
  adder's own rounding is the format's, and ``(x + M) - M`` is the result. Where ties go away from zero, the last
  bit of x is set first: a tie, whose last bit is 0, then lies above the tie, and no other number crosses one.
* **prefix addition**, nearest-even with a constant format that has float32's own exponent. A float's
  magnitude grows with its bits, so adding to the bits below the target's mantissa and truncating
  them rounds it, subnormals included.
* **bit addition**, everything else: the same for normal numbers; below the smallest normal, where
  the grid is uniform, ``x / spacing`` is rounded to a whole number instead. Stochastic rounding *lifts*
  such numbers by the power of two whose binade has that spacing, and then treats all alike.

Parameters in a tensor (:class:`FloatRow`) use the last algorithm: one graph for all formats.

On a CPU, eager, ``torch.where`` on mixed data costs 40 arithmetic passes, a comparison 5 and ``trunc`` 20
(measured); so the code selects by bit masks, and compares in place, where torch vectorises it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from bitplan.compiler.tracing import is_traced
from bitplan.errors import FormatError
from bitplan.numerics import chunks
from bitplan.numerics.dtypes import FLOAT32, Carrier, carrier_of, continues_grid, round_by_torch
from bitplan.numerics.formats import FloatFormat, IntFormat, Overflow
from bitplan.numerics.noise import unit_interval
from bitplan.numerics.reference import Rounding


def round_to_whole(t: Tensor, rounding: Rounding, bits: Tensor | None = None) -> Tensor:
    """`t` rounded to whole numbers, keeping the sign of zero and NaN; `bits` are random, for stochastic rounding."""
    nearest = torch.round(t)
    if rounding == "nearest":
        return nearest
    magnitude = t.abs()
    whole = nearest.abs_()
    if rounding == "nearest-away":  # ties that were rounded down to even go up
        whole += magnitude.sub_(whole).ge_(0.5)
        return whole.copysign_(t)
    whole -= whole.gt(magnitude).to(t.dtype) if is_traced() else whole.clone().gt_(magnitude)
    if rounding == "stochastic":
        assert bits is not None
        whole += magnitude.sub_(whole).gt_(unit_interval(bits, t.dtype))
    return whole.copysign_(t)


def round_int(x: Tensor, target: IntFormat, rounding: Rounding, bits: Tensor | None = None) -> Tensor:
    """Whole numbers within the format's range; NaN stays NaN."""
    return round_to_whole(x, rounding, bits).clamp_(target.min, target.max)


def round_float(
    x: Tensor,
    target: FloatFormat,
    rounding: Rounding,
    overflow: Overflow,
    bits: Tensor | None = None,
    is_bounded: bool = False,
) -> Tensor:
    """`x`, in its carrier's dtype, rounded to the grid of `target`.

    :param is_bounded: whether no finite number of `x` rounds to more than the largest value.
    """
    by_torch = round_by_torch(x, target, rounding, overflow)
    if by_torch is not None:
        return by_torch
    carrier = carrier_of(x)
    magic_is_exact = _magic_is_exact if is_traced() else _magic_is_exact_once
    if rounding in ("nearest", "nearest-away") and magic_is_exact(target, carrier):
        return _magic_addition(x, target, carrier, overflow, rounding == "nearest-away", is_bounded)
    if rounding == "nearest" and _is_prefix(target, carrier):
        return _prefix_addition(x, target, carrier, overflow)
    if rounding == "toward-zero" and overflow == "special":  # finite numbers never become infinite or NaN
        stopped = _bit_addition(x, float_row(target, carrier, "saturate"), carrier, rounding, bits)
        special = torch.full_like(x, target.overflow_value).copysign_(x)
        return torch.where(x.isinf(), special, stopped)
    row = float_row(target, carrier, overflow)

    def rounded_whole(x: Tensor, bits: Tensor | None) -> Tensor:
        rounded = _bit_addition(x, row, carrier, rounding, bits)
        return rounded if overflow == "saturate" else _to_special(rounded, target, carrier)

    if is_traced() or bits is not None or chunks.chunk_size_of(x) == x.numel():
        return rounded_whole(x, bits)
    result = torch.empty_like(x)
    for chunk, rounded in chunks.paired_chunks(x, result):
        rounded.copy_(rounded_whole(chunk, None))
    return result


# --- Nearest with a constant format


def _magic_is_exact(target: FloatFormat, carrier: Carrier) -> bool:
    spare = carrier.mantissa_bits - target.mantissa_bits
    # Two spare bits keep x + M inside M's binade for both signs. Without mantissa bits the parity of the exponent
    # breaks ties, which the adder does not see.
    coarsest = target.max_exponent if target.subnormals else target.min_exponent + target.mantissa_bits
    return (
        spare >= 2 and target.mantissa_bits > 0 and max(coarsest, target.max_exponent) + spare < carrier.exponent_bias
    )


def _magic_constants(target: FloatFormat, carrier: Carrier, overflow: Overflow) -> tuple[int, int, float, int, float]:
    """Patterns of the smallest and the largest normal power of two, factor of the magic number, lift of the spacing
    below the smallest normal, and bound of magnitudes."""
    lowest = carrier.bits_of_power(target.min_exponent)
    highest = carrier.bits_of_power(target.max_exponent)
    factor = 1.5 * 2.0 ** (carrier.mantissa_bits - target.mantissa_bits)
    # Without subnormals the spacing below the smallest normal is the smallest normal.
    lift = 0 if target.subnormals else target.mantissa_bits << carrier.mantissa_bits
    bound = target.max if overflow == "saturate" else carrier.max
    return lowest, highest, factor, lift, bound


#: Cached for eager calls on small tensors, which notice every microsecond; torch.compile warns of caches.
_magic_is_exact_once = lru_cache(maxsize=1024)(_magic_is_exact)
_magic_constants_once = lru_cache(maxsize=1024)(_magic_constants)


def _magic_addition(
    x: Tensor, target: FloatFormat, carrier: Carrier, overflow: Overflow, away: bool, is_bounded: bool
) -> Tensor:
    traced = is_traced()
    constants = _magic_constants if traced else _magic_constants_once
    lowest, highest, factor, lift, bound = constants(target, carrier, overflow)
    if traced:  # few operations, none in place: a large model compiles thousands of these
        exponent = x.view(carrier.int_dtype) & carrier.exponent_mask
        power = exponent.clamp_min(lowest) if is_bounded and not away else exponent.clamp(lowest, highest)
        if lift:
            power = power + (((exponent - lowest) >> (carrier.bits - 1)) & lift)
        magic = power.view(carrier.dtype) * factor
        above = _with_last_bit(x, bound, carrier) if away else x
        signed = ((above + magic) - magic).copysign(x)  # x - x is +0
        if overflow == "special":
            return _to_special(signed, target, carrier)
        return signed if away or is_bounded else signed.clamp(-bound, bound)
    result = torch.empty_like(x)
    for part, rounded in chunks.paired_chunks(x, result):
        exponent = part.view(carrier.int_dtype) & carrier.exponent_mask
        lifted = ((exponent - lowest).bitwise_right_shift_(carrier.bits - 1)).bitwise_and_(lift) if lift else None
        exponent.clamp_(lowest, highest)
        power = (exponent if lifted is None else exponent.add_(lifted)).view(carrier.dtype)
        torch.add(_with_last_bit(part, bound, carrier) if away else part, power, alpha=factor, out=rounded)
        rounded.sub_(power, alpha=factor)
        # A negative number that became zero gets its sign back, in a buffer that is no longer needed.
        sign = _masked(part.view(carrier.int_dtype), carrier.sign_bit, spent=power.view(carrier.int_dtype))
        rounded.view(carrier.int_dtype).bitwise_or_(sign)
        if overflow == "saturate" and not away:
            rounded.clamp_(-bound, bound)
    return result if overflow == "saturate" else _to_special(result, target, carrier)


def _with_last_bit(x: Tensor, bound: float, carrier: Carrier) -> Tensor:
    """Numbers with their last bit set, clamped to `bound`: an infinity would become NaN."""
    bounded = x.clamp(-bound, bound).view(carrier.int_dtype)
    return (bounded | 1 if is_traced() else bounded.bitwise_or_(1)).view(carrier.dtype)


def _is_prefix(target: FloatFormat, carrier: Carrier) -> bool:
    return (
        continues_grid(target, carrier)
        and target.specials == "ieee"
        and target.max_exponent == carrier.exponent_bias
        and target.mantissa_bits > 0
    )


def _prefix_addition(x: Tensor, target: FloatFormat, carrier: Carrier, overflow: Overflow) -> Tensor:
    if overflow == "saturate":
        x = x.clamp(-target.max, target.max)
    cut = carrier.mantissa_bits - target.mantissa_bits
    if cut == 0:
        return x if overflow == "saturate" else x.clone()
    source = x.view(carrier.int_dtype)
    rounded = source >> cut
    rounded &= 1
    rounded += source
    rounded += (1 << (cut - 1)) - 1
    rounded &= -(1 << cut)
    # Adding x * 0 changes no finite number, not even the sign of zero, and restores NaN.
    finite = x if overflow == "saturate" else x.clamp(-carrier.max, carrier.max)
    return rounded.view(carrier.dtype).add_(finite, alpha=0.0)


# --- Every rounding, constant or tensor parameters

Number = float | Tensor
Whole = int | Tensor


@dataclass(frozen=True)
class FloatRow:
    """The parameters of bit addition, each a constant or a 0-d tensor."""

    cut: Whole  #: mantissa bits of the carrier that are cut
    kept_bits: Whole  #: mask of the bits that are kept
    half_below: Whole  #: half a unit less one, 0 where nothing is cut
    parity: Whole  #: 1 where ties are broken by the last kept bit
    parity_flip: Whole  #: 1 where no mantissa bit is kept and the exponents' parities of carrier and target differ
    min_normal_bits: Whole  #: pattern of the smallest normal, 0 where the grid has no uniform region
    lift_bits: Whole  #: pattern of the power of two whose binade has the uniform region's spacing
    limit_bits: Whole  #: pattern of the bound of magnitudes: the largest value, or infinity
    up: Number  #: 1 / spacing of the uniform region
    down: Number  #: the spacing
    max: Number  #: the largest value, for scales
    overflow_up: Number  #: factor that takes magnitudes above the largest value to the carrier's infinity
    overflow_down: Number  #: its inverse


_WHOLE_FIELDS = 8
ROW_FIELDS = 13


def float_row(target: FloatFormat, carrier: Carrier, overflow: Overflow) -> FloatRow:
    """The constants of a format. They cannot express overflow to NaN; see :func:`_to_special`."""
    cut = carrier.mantissa_bits - target.mantissa_bits
    uniform = not continues_grid(target, carrier)
    saturates = overflow == "saturate"
    lifts = not saturates and _lifts_to_infinity(target)
    overflow_up = 2.0 ** (carrier.exponent_bias - target.max_exponent) if lifts else 1.0
    lift = target.min_exponent + (0 if target.subnormals else target.mantissa_bits)
    return FloatRow(
        cut=cut,
        kept_bits=-(1 << cut),
        half_below=(1 << cut - 1) - 1 if cut else 0,
        parity=1 if cut else 0,
        parity_flip=(carrier.exponent_bias - target.exponent_bias) % 2 if target.mantissa_bits == 0 else 0,
        min_normal_bits=carrier.bits_of_power(target.min_exponent) if uniform else 0,
        lift_bits=carrier.bits_of_power(lift) if uniform else 0,
        limit_bits=carrier.bits_of(target.max) if saturates else carrier.exponent_mask,
        up=1.0 / target.min_subnormal if uniform else 1.0,
        down=target.min_subnormal if uniform else 1.0,
        max=target.max,
        overflow_up=overflow_up,
        overflow_down=1.0 / overflow_up,
    )


def row_values(target: FloatFormat, overflow: Overflow | None = None, carrier: Carrier = FLOAT32) -> list[int]:
    """`target` as a row of a parameter table: integers, and floats as their bit patterns."""
    overflow = overflow or target.default_overflow
    if overflow == "special" and not _lifts_to_infinity(target):
        raise FormatError(
            f"{target.name} overflows to NaN or has no normal numbers, which parameters in a tensor cannot "
            f"express: use overflow='saturate' with it."
        )
    numbers = list(vars(float_row(target, carrier, overflow)).values())
    patterns = torch.tensor(numbers[_WHOLE_FIELDS:], dtype=carrier.dtype).view(carrier.int_dtype).tolist()
    return [*numbers[:_WHOLE_FIELDS], *patterns]


def row_from_tensor(row: Tensor) -> FloatRow:
    """A table row of :func:`row_values` as named views, without a copy to the host."""
    floats = row.view(torch.float64 if row.dtype == torch.int64 else torch.float32)
    whole = (row[i] for i in range(_WHOLE_FIELDS))
    return FloatRow(*whole, *(floats[i] for i in range(_WHOLE_FIELDS, ROW_FIELDS)))


def round_float_by_row(x: Tensor, row: Tensor, rounding: Rounding, bits: Tensor | None = None) -> Tensor:
    """:func:`round_float` with the format's parameters in a tensor: changing them recompiles nothing."""
    fields = row_from_tensor(row)
    rounded = _bit_addition(x, fields, carrier_of(x), rounding, bits)
    if rounding == "toward-zero":  # finite numbers stop at the largest value; infinities stay where the row allows them
        stopped = rounded.abs().minimum(torch.as_tensor(fields.max)).copysign(x)
        return torch.where(x.isinf(), rounded, stopped)
    return rounded.mul_(fields.overflow_up).mul_(fields.overflow_down)


def _bit_addition(x: Tensor, row: FloatRow, carrier: Carrier, rounding: Rounding, bits: Tensor | None) -> Tensor:
    # In place wherever possible: in eager code the first touch of new memory costs more than the arithmetic.
    sign_shift = carrier.bits - 1
    source = x.view(carrier.int_dtype)
    magnitude = source & ~carrier.sign_bit
    # A mask is the arithmetic shift of a difference's sign: all ones where it is negative, else all zeros.
    in_uniform = magnitude - row.min_normal_bits
    in_uniform >>= sign_shift
    magnitude.clamp_(max=row.limit_bits)
    if rounding == "stochastic":
        in_uniform &= row.lift_bits
        base = in_uniform.view(carrier.dtype)
        magnitude.view(carrier.dtype).add_(base)
        coarse = _noise(row, carrier, bits)
        coarse += magnitude
        coarse &= row.kept_bits
        coarse.view(carrier.dtype).sub_(base)
    else:
        coarse = _increment(magnitude, row, rounding)
        coarse += magnitude
        coarse &= row.kept_bits
        below = round_to_whole(magnitude.view(carrier.dtype).mul_(row.up), rounding).mul_(row.down)
        chosen = below.view(carrier.int_dtype)
        chosen ^= coarse
        chosen &= in_uniform
        coarse ^= chosen
    coarse |= _masked(source, carrier.sign_bit, spent=in_uniform)
    not_above_infinity = _masked(source, ~carrier.sign_bit, spent=magnitude).neg_()
    not_above_infinity += carrier.exponent_mask
    coarse |= not_above_infinity.bitwise_right_shift_(sign_shift)  # negative for NaN alone, and all ones are a NaN
    return coarse.view(carrier.dtype)


def _masked(source: Tensor, mask: int, spent: Tensor) -> Tensor:
    """``source & mask``, in eager code in a buffer that is no longer needed; Dynamo rejects a non-contiguous `out`."""
    return source & mask if is_traced() else torch.bitwise_and(source, mask, out=spent)


def _increment(magnitude: Tensor, row: FloatRow, rounding: Rounding) -> Tensor:
    """The increment after which truncation rounds correctly; always less than one unit."""
    if rounding == "toward-zero":
        return torch.zeros_like(magnitude)
    if rounding == "nearest-away":
        return torch.zeros_like(magnitude) + (row.half_below + row.parity)
    last_kept = magnitude >> row.cut
    if isinstance(row.parity_flip, Tensor) or row.parity_flip:
        last_kept ^= row.parity_flip
    last_kept &= row.parity
    last_kept += row.half_below
    return last_kept


def _noise(row: FloatRow, carrier: Carrier, bits: Tensor | None) -> Tensor:
    """Uniform noise below one unit: the upper bits of the hash, so that float32 and float64 carriers agree.

    Overwrites `bits`.
    """
    assert bits is not None
    if carrier is FLOAT32:
        shift = 32 - row.cut
        bits >>= shift.clamp(max=31) if isinstance(shift, Tensor) else min(shift, 31)
        bits &= ~row.kept_bits
        return bits
    shift = row.cut - 32
    wide = bits.to(torch.int64) & 0xFFFFFFFF
    if isinstance(shift, Tensor):
        return (wide << shift.clamp(min=0)) >> (-shift).clamp(min=0)
    return wide << shift if shift >= 0 else wide >> -shift


def _lifts_to_infinity(target: FloatFormat) -> bool:
    """Whether the next number above the largest value is 2^(emax+1), so that one multiplication detects overflow.

    The multiplication back must not be by a subnormal, hence the bound on the exponent.
    """
    fills_binade = target.max == (2.0 - target.epsilon) * 2.0**target.max_exponent
    return fills_binade and target.specials != "fn" and target.max_exponent > 1


def _to_special(rounded: Tensor, target: FloatFormat, carrier: Carrier) -> Tensor:
    """`rounded` with magnitudes above the largest value replaced by infinity or NaN."""
    if _lifts_to_infinity(target):
        lift = 2.0 ** (carrier.exponent_bias - target.max_exponent)
        return rounded.mul_(lift).mul_(1.0 / lift)
    special = torch.full_like(rounded, target.overflow_value).copysign_(rounded)
    return torch.where(rounded.abs() > target.max, special, rounded)
