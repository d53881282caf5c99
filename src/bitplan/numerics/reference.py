"""Rounding one number, written to be read: the definition the fast code is tested against.

Exact rational arithmetic. :mod:`bitplan.numerics.rounding` is the fast implementation.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal

from bitplan.numerics.formats import CodebookFormat, FloatFormat, IntFormat, Overflow

#: How a value between two neighbours chooses: to the nearer (ties to the even code, or away from
#: zero), to the one nearer zero, or at random with the odds of its position between them.
Rounding = Literal["nearest", "nearest-away", "toward-zero", "stochastic"]
ROUNDINGS: tuple[Rounding, ...] = ("nearest", "nearest-away", "toward-zero", "stochastic")


def round_value(
    value: float,
    target: FloatFormat | IntFormat | CodebookFormat,
    rounding: Rounding = "nearest",
    overflow: Overflow | None = None,
    uniform: float = 0.5,
) -> float:
    """The number of `target` that `value` becomes; `uniform` in (0, 1) decides stochastic rounding.

    1. NaN stays NaN; the sign is set aside.
    2. The spacing of the grid is 2^(e - Y), e the value's own exponent, but not less than the
       format's smallest; without subnormals, it is the smallest normal below that one.
    3. The quotient by the spacing is rounded down or up to a whole number, as `rounding` says.
    4. What then exceeds the largest value overflows. Integers have no negative zero.

    In a code book the neighbours are looked up instead.
    """
    if math.isnan(value):
        return value
    if isinstance(target, CodebookFormat):
        return _round_in_book(value, target.book, rounding, uniform)
    overflow = overflow or target.default_overflow
    magnitude = abs(value)
    if math.isinf(magnitude):
        rounded = math.inf
    else:
        spacing = _spacing(magnitude, target)
        below = math.floor(Fraction(magnitude) / spacing)
        above_by = Fraction(magnitude) / spacing - below
        up = _goes_up(above_by, _is_odd(below, magnitude, target), rounding, uniform)
        exact = (below + up) * spacing
        rounded = float(exact) if exact <= target.max else math.inf
    if rounded > target.max:
        special = target.overflow_value if isinstance(target, FloatFormat) else math.inf
        # IEEE 754, 7.4: rounding toward zero carries a finite value to the largest one, never past it.
        stays = overflow == "saturate" or (rounding == "toward-zero" and math.isfinite(value))
        rounded = target.max if stays else special
    signed = math.copysign(rounded, value)
    if isinstance(target, IntFormat):  # has a least value of its own, and no negative zero
        return max(signed, target.min) + 0.0
    return signed


def _spacing(magnitude: float, target: FloatFormat | IntFormat) -> Fraction:
    if isinstance(target, IntFormat):
        return Fraction(1)
    exponent = math.frexp(magnitude)[1] - 1 if magnitude else target.min_exponent
    if exponent < target.min_exponent:
        return Fraction(target.min_subnormal)
    return Fraction(2) ** (exponent - target.mantissa_bits)


def _is_odd(below: int, magnitude: float, target: FloatFormat | IntFormat) -> bool:
    """Whether the lower neighbour's *code* is odd; ties go to the even one."""
    if isinstance(target, FloatFormat) and target.mantissa_bits == 0 and magnitude >= target.min_normal:
        # Without mantissa bits the code's last bit is the exponent's.
        return (math.frexp(magnitude)[1] - 1 + target.exponent_bias) % 2 == 1
    return below % 2 == 1


def _goes_up(above_by: Fraction, lower_is_odd: bool, rounding: Rounding, uniform: float) -> bool:
    if rounding == "toward-zero":
        return False
    if rounding == "stochastic":
        return above_by > Fraction(uniform)
    if above_by == Fraction(1, 2):
        return rounding == "nearest-away" or lower_is_odd
    return above_by > Fraction(1, 2)


def _round_in_book(value: float, book: tuple[float, ...], rounding: Rounding, uniform: float) -> float:
    """One of the two values around `value`; at a tie the one whose position is even."""
    if value <= book[0] or value >= book[-1]:
        return book[0] if value <= book[0] else book[-1]
    below = max(code for code, low in enumerate(book) if low <= value)
    low, high = Fraction(book[below]), Fraction(book[below + 1])
    above_by = (Fraction(value) - low) / (high - low)
    if rounding in ("toward-zero", "nearest-away") and abs(low) != abs(high):
        is_high_farther = abs(high) > abs(low)
        if rounding == "toward-zero":
            up = not is_high_farther and above_by > 0
        else:
            up = above_by > Fraction(1, 2) or (above_by == Fraction(1, 2) and is_high_farther)
    else:
        up = _goes_up(above_by, below % 2 == 1, "stochastic" if rounding == "stochastic" else "nearest", uniform)
    return book[below + up]
