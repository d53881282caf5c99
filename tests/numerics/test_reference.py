"""The readable rounding of one number against foreign oracles: gfloat, ml_dtypes, numpy and a search by hand.

Everything fast in bitplan is tested against :func:`bitplan.numerics.reference.round_value`, so this file asks whether
*it* is right, and asks people who never saw it.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import GFLOAT_MODES, ML_DTYPES, by_gfloat, in_gfloat, ml_dtype

from bitplan.errors import FormatError
from bitplan.numerics.formats import FloatFormat, IntFormat, Overflow, get_format
from bitplan.numerics.reference import ROUNDINGS, Rounding, round_value

OVERFLOWS: tuple[Overflow, ...] = ("saturate", "special")

#: Formats too wide to try every code of: every rounding way of the fast code, extremes of every field.
WIDE = (
    *("fp32", "tf32", "bf16", "fp16", "e6m9b0", "e8m0", "e8m1fn", "e1m23none", "e5m23", "e7m16fn", "e8m3b4"),
    *("e4m12b-7", "e2m20ieee", "e3m0b100", "e8m23b0", "e8m7none", "e6m9b-40fn"),
)


def float_named(name: str) -> FloatFormat:
    number_format = get_format(name)
    assert isinstance(number_format, FloatFormat)
    return number_format


def same(ours: float, theirs: float) -> bool:
    """Equal bit for bit, where all NaNs are one and the sign of zero counts."""
    if math.isnan(ours) or math.isnan(theirs):
        return math.isnan(ours) and math.isnan(theirs)
    return ours == theirs and math.copysign(1.0, ours) == math.copysign(1.0, theirs)


def small_floats(*, subnormals: bool = True) -> list[FloatFormat]:
    """Every split of up to 8 bits, every kind of special codes; the additional bias varies along."""
    result = []
    for exponent_bits in range(1, 8):
        for mantissa_bits in range(8 - exponent_bits):
            for index, specials in enumerate(("ieee", "fn", "none")):
                bias = (exponent_bits + mantissa_bits + index) % 3 * 2 - 2
                try:
                    result.append(FloatFormat(exponent_bits, mantissa_bits, bias, specials, subnormals))
                except FormatError:  # nothing but zero in it
                    continue
    return result


def hard_values(target: FloatFormat, seed: int = 0) -> list[float]:
    """Grid points, halfway points, the overflow threshold, all with their neighbours; tiny, huge and special."""
    rng = random.Random(seed)
    largest_step = 2.0 ** (target.max_exponent - target.mantissa_bits)
    corners = [target.max, target.max + largest_step / 2, target.max + largest_step, 2.0 ** (target.max_exponent + 1)]
    corners += [target.min_normal, target.min_subnormal, target.min_subnormal / 2, target.min_subnormal * 1.5]
    if target.bits <= 8:
        grid = [value for value in target.values() if value >= 0]
        corners += [*grid, *((low + high) / 2 for low, high in itertools.pairwise(grid))]
    else:
        for _ in range(150):
            exponent = rng.randint(target.min_exponent - 2, target.max_exponent + 1)
            step = 2.0 ** (max(exponent, target.min_exponent) - target.mantissa_bits)
            whole = rng.randint(0, 2 << target.mantissa_bits)
            corners += [whole * step, (whole + 0.5) * step]
    corners += [math.ldexp(rng.uniform(1, 2), rng.randint(-300, 300)) for _ in range(60)]
    near = [math.nextafter(value, toward) for value in corners for toward in (0.0, math.inf)]
    rest = [0.0, math.inf, 5e-324, 1e308]
    return [sign * value for value in (*corners, *near, *rest) for sign in (1.0, -1.0)]


#: Without IEEE floats of one exponent bit, all subnormal: gfloat's largest value of those is none of its own codes.
KNOWN_TO_GFLOAT = [
    small_float for small_float in small_floats() if small_float.exponent_bits > 1 or small_float.specials != "ieee"
]


@pytest.mark.parametrize("rounding", GFLOAT_MODES)
@pytest.mark.parametrize("target", [*KNOWN_TO_GFLOAT, *map(float_named, WIDE)], ids=str)
def test_every_float_rounds_as_in_gfloat(target: FloatFormat, rounding: Rounding) -> None:
    values = hard_values(target)
    for overflow in OVERFLOWS:
        theirs = by_gfloat(np.array(values), target, rounding, overflow).tolist()
        ours = [round_value(value, target, rounding, overflow) for value in values]
        wrong = [item for item in zip(values, ours, theirs, strict=True) if not same(item[1], item[2])]
        assert wrong == [], overflow


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1", "e4m3b4", "e8m0", "bf16", "fp16", "e3m0none"])
def test_stochastic_decisions_are_those_of_gfloat_for_the_same_random_number(name: str) -> None:
    """gfloat goes up where position + (k + 1/2) / 2^n >= 1; so do we with uniform 1 - (k + 1/2) / 2^n."""
    target, rng, digits = float_named(name), random.Random(1), 30
    gfloat, theirs = pytest.importorskip("gfloat"), in_gfloat(target)
    went_up = 0
    for value in hard_values(target):
        drawn = rng.getrandbits(digits)
        uniform = 1.0 - (drawn + 0.5) * 2.0**-digits
        saturates = target.specials == "none"
        ours = round_value(value, target, "stochastic", "saturate" if saturates else "special", uniform)
        expected = gfloat.round_float(theirs, value, gfloat.RoundMode.StochasticFast, saturates, drawn, digits)
        assert same(ours, float(expected)), (value.hex(), drawn)
        went_up += abs(ours) > abs(value)
    assert went_up > 20


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("target", [*small_floats(), *small_floats(subnormals=False)], ids=str)
def test_rounding_is_a_search_in_the_list_of_values(target: FloatFormat, rounding: Rounding) -> None:
    """No peer rounds formats without subnormals, but a list of all values and a ruler suffice."""
    codes = [code for code in range(1 << (target.bits - 1)) if math.isfinite(target.decode(code))]
    code_of = {target.decode(code): code for code in reversed(codes)}  # many codes may mean zero: keep the first
    grid = sorted(code_of)
    for value in hard_values(target):
        magnitude = abs(value)
        if magnitude >= target.max:
            continue
        upper = bisect.bisect_right(grid, magnitude)
        low, high = grid[upper - 1], grid[upper]
        position = (magnitude - low) / (high - low)  # exact: less than one binade over a power of two
        goes_up = {
            "nearest": position > 0.5 or (position == 0.5 and code_of[low] % 2 == 1),
            "nearest-away": position >= 0.5,
            "toward-zero": False,
            "stochastic": position > 0.25,
        }[rounding]
        expected = math.copysign(high if goes_up else low, value)
        assert same(round_value(value, target, rounding, uniform=0.25), expected), value.hex()


@pytest.mark.parametrize("name", ML_DTYPES)
def test_nearest_is_the_cast_of_ml_dtypes_and_numpy(name: str) -> None:
    """Their casts overflow to the special code where there is one; the three OCP formats without one saturate."""
    target = float_named(name)
    wide = np.float64 if name == "fp32" else np.float32
    with np.errstate(over="ignore"):
        values = np.array(hard_values(target), dtype=wide)
        theirs = values.astype(ml_dtype(ML_DTYPES[name])).astype(np.float64)
    overflow: Overflow = "saturate" if target.specials == "none" else "special"
    ours = [round_value(float(value), target, "nearest", overflow) for value in values]
    wrong = [pair for pair in zip(values, ours, theirs, strict=True) if not same(pair[1], float(pair[2]))]
    assert wrong == []


@pytest.mark.parametrize(
    ("name", "rounding", "overflow", "value", "expected"),
    [
        # OFP8 1.0 and ml_dtypes: 464 is halfway between 448 and the absent 480, and 448 has the even code
        ("e4m3", "nearest", "special", 464.0, 448.0),
        ("e4m3", "nearest", "special", math.nextafter(464.0, 1e9), math.nan),
        ("e4m3", "nearest", "saturate", 1e30, 448.0),
        ("e4m3", "nearest", "saturate", -math.inf, -448.0),
        ("e4m3", "nearest", "special", -math.inf, math.nan),
        ("e5m2", "nearest", "special", 61440.0, math.inf),
        ("e5m2", "nearest", "special", math.nextafter(61440.0, 0), 57344.0),
        ("fp16", "nearest", "special", 65520.0, math.inf),
        ("fp16", "nearest", "special", math.nextafter(65520.0, 0), 65504.0),
        # Lee et al.: the overflow thresholds of FP(4,3,4), FP(5,2,0) and FP(6,9,0); ties go away
        ("e4m3b4", "nearest-away", "saturate", 31.0, 30.0),
        ("e4m3b4", "nearest-away", "special", 31.0, math.inf),
        ("e4m3b4", "nearest-away", "special", math.nextafter(31.0, 0), 30.0),
        ("e5m2b0", "nearest-away", "special", 122880.0, math.inf),
        ("e5m2b0", "nearest-away", "special", math.nextafter(122880.0, 0), 114688.0),
        ("e6m9b0", "nearest-away", "special", 2.0**32 * (2 - 2.0**-10), math.inf),
        ("e6m9b0", "nearest-away", "special", math.nextafter(2.0**32 * (2 - 2.0**-10), 0), 2.0**32 * (2 - 2.0**-9)),
        ("e4m3b4", "nearest-away", None, -(2.0**-14), -(2.0**-13)),
        ("e4m3b4", "nearest", None, -(2.0**-14), -0.0),
        # IEEE 754, 4.3.2: toward zero, a finite number never becomes infinite
        ("fp16", "toward-zero", "special", 1e30, 65504.0),
        ("fp16", "toward-zero", "special", math.inf, math.inf),
        # without mantissa bits a tie goes to the even exponent field (e8m0: 2^-126 has field 1, 2^-125 has 2)
        ("e8m0", "nearest", None, 1.5 * 2.0**-126, 2.0**-125),
        ("e8m0", "nearest", None, 1.5 * 2.0**-125, 2.0**-125),
        ("e4m3", "nearest", None, -0.0, -0.0),
        ("e4m3", "nearest", None, math.nan, math.nan),
        ("int8", "nearest", None, 2.5, 2.0),
        ("int8", "nearest-away", None, -2.5, -3.0),
        ("int8", "nearest", None, -1e9, -127.0),
        ("uint8", "nearest", None, -3.0, 0.0),
    ],
)
def test_published_thresholds(
    name: str, rounding: Rounding, overflow: Overflow | None, value: float, expected: float
) -> None:
    target = get_format(name)
    assert isinstance(target, (FloatFormat, IntFormat))
    assert same(round_value(value, target, rounding, overflow), expected)


@pytest.mark.parametrize("target", [IntFormat(2), IntFormat(5), IntFormat(16), IntFormat(1, True), IntFormat(8, True)])
def test_integers_round_as_in_numpy(target: IntFormat) -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(0, target.max, 300), np.arange(-20, 20) / 2, [np.inf, -np.inf, -0.2, -0.0]])
    away = np.copysign(np.floor(np.abs(x) + 0.5), x)  # exact here: few bits
    for rounding, whole in (("nearest", np.rint(x)), ("nearest-away", away), ("toward-zero", np.trunc(x))):
        expected = np.clip(whole, target.min, target.max) + 0.0
        ours = [round_value(float(value), target, rounding) for value in x]
        assert all(map(same, ours, expected.tolist())), rounding


@given(st.floats(allow_nan=False), st.sampled_from([*small_floats()[::5], *map(float_named, WIDE)]))
def test_the_choice_is_the_nearest_of_what_the_two_directions_offer(value: float, target: FloatFormat) -> None:
    """Between 'toward zero' and 'always up' (uniform 0) nothing else lies, and nearest takes the nearer."""
    down = round_value(value, target, "toward-zero", "saturate")
    up = round_value(value, target, "stochastic", "saturate", uniform=0.0)
    nearest = round_value(value, target, "nearest", "saturate")
    assert abs(down) <= abs(value)
    assert nearest in (down, up)
    assert round_value(down, target, "nearest", "saturate") == down
    if abs(value) <= target.max:
        assert abs(up) >= abs(value)
        assert abs(value - nearest) == min(abs(value - down), abs(up - value))
