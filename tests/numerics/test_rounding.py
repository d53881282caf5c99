"""The fast rounding, through :func:`bitplan.quantize`: bit for bit that of foreign oracles and of the reference."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import GFLOAT_MODES, ML_DTYPES, by_gfloat, ml_dtype
from torch import Tensor

import bitplan
from bitplan.errors import FormatError
from bitplan.numerics.dtypes import FLOAT32, FLOAT64, TORCH_FLOAT8, Carrier, carrier_for, round_by_torch
from bitplan.numerics.formats import NAMED, FloatFormat, IntFormat, Overflow
from bitplan.numerics.noise import random_bits, unit_interval
from bitplan.numerics.reference import ROUNDINGS, Rounding, round_value
from bitplan.numerics.rounding import round_float_by_row, row_values

INTS = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16, torch.float16: torch.int16}
OVERFLOWS: tuple[Overflow, ...] = ("saturate", "special")


def floats(*names: str) -> list[FloatFormat]:
    result = [bitplan.get_format(name) for name in names]
    return [item for item in result if isinstance(item, FloatFormat)]


#: Every way through the fast code: magic, prefix and bit addition, torch's casts, no mantissa, no special codes.
CHOSEN = floats(*NAMED, "e4m3b4", "e5m2b0", "e6m9b0", "e4m3ieee", "e8m0", "e8m3b1", "e3m0b0", "e8m2b1fn", "e5m21fn")


def mismatches(x: Tensor, ours: Tensor, theirs: Tensor | np.ndarray[Any, Any]) -> list[tuple[float, float, float]]:
    """The first few (input, ours, theirs) that differ in any bit, but for the payloads of NaNs."""
    expected = torch.as_tensor(theirs).to(ours.dtype)
    assert ours.dtype == x.dtype
    differs = ours.view(INTS[ours.dtype]) != expected.view(INTS[ours.dtype])
    differs &= ~(ours.isnan() & expected.isnan())
    return [(float(x[i]), float(ours[i]), float(expected[i])) for i in differs.nonzero().flatten()[:5].tolist()]


@cache
def every_bf16() -> Tensor:
    """All 65,536 patterns: both zeros and infinities, every subnormal and every NaN payload."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@cache
def million_floats() -> Tensor:
    """2^20 random float32 patterns: all exponents alike, so also subnormals, NaNs and what overflows everywhere."""
    drawn = torch.randint(-(1 << 31), 1 << 31, (1 << 20,), generator=torch.Generator().manual_seed(7))
    return drawn.to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("rounding", GFLOAT_MODES)
@pytest.mark.parametrize("target", CHOSEN, ids=str)
def test_a_million_floats_of_all_exponents_round_as_in_gfloat(target: FloatFormat, rounding: Rounding) -> None:
    x = million_floats()
    overflow = target.default_overflow
    ours = bitplan.quantize(x, target, rounding, overflow=overflow)
    assert mismatches(x, ours, by_gfloat(x.double().numpy(), target, rounding, overflow)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", floats("e4m3", "e5m2"), ids=str)
def test_small_tensors_are_rounded_by_torchs_casts_to_the_same_bits(target: FloatFormat, dtype: torch.dtype) -> None:
    """Large tensors on a CPU are rounded by arithmetic on bits, which other tests compare with foreign oracles."""
    codes = torch.arange(256, dtype=torch.uint8).view(TORCH_FLOAT8[target]).float()
    grid = codes[codes.isfinite()].sort().values
    ties = (grid[1:] + grid[:-1]) / 2
    near_ties = [ties, *(torch.nextafter(ties, torch.full_like(ties, sign * math.inf)) for sign in (-1, 1))]
    x = torch.cat([*near_ties, every_bf16().float(), million_floats()[: 1 << 18]]).to(dtype)
    small = [bitplan.quantize(chunk, target, overflow="saturate") for chunk in x.split(1 << 14)]
    assert all(round_by_torch(chunk, target, "nearest", "saturate") is not None for chunk in x.split(1 << 14))
    assert round_by_torch(x, target, "nearest", "saturate") is None
    assert mismatches(x, torch.cat(small), bitplan.quantize(x, target, overflow="saturate")) == []


@pytest.mark.parametrize("target", CHOSEN, ids=str)
def test_every_bfloat16_rounds_as_in_gfloat(target: FloatFormat) -> None:
    """As float32 and, where the format's values fit, as bfloat16; both overflows, three roundings."""
    narrow, wide = every_bf16(), every_bf16().float()
    fits = target.mantissa_bits <= 7 and target.min_subnormal >= 2.0**-133
    for rounding in GFLOAT_MODES:
        for overflow in OVERFLOWS:
            theirs = by_gfloat(wide.double().numpy(), target, rounding, overflow)
            assert mismatches(wide, bitplan.quantize(wide, target, rounding, overflow=overflow), theirs) == []
            if fits:
                assert mismatches(narrow, bitplan.quantize(narrow, target, rounding, overflow=overflow), theirs) == []
    if not fits:
        with pytest.raises(FormatError, match="cannot hold"):
            bitplan.quantize(narrow, target)


def small_floats() -> Iterator[FloatFormat]:
    """Every float of up to 8 bits that gfloat knows: all splits, special codes and two biases."""
    for exponent_bits in range(1, 8):
        for mantissa_bits in range(8 - exponent_bits):
            for specials in ("ieee", "fn", "none"):
                # gfloat's largest value of an all-subnormal IEEE format is none of its codes; the sweep below has those
                if exponent_bits > 1 or specials == "none" or (specials == "fn" and mantissa_bits):
                    yield from (
                        FloatFormat(exponent_bits, mantissa_bits, bias, specials) for bias in (0, mantissa_bits - 4)
                    )


def around_every_code(target: FloatFormat, dtype: torch.dtype) -> Tensor:
    """Every value, the points halfway between neighbours and past the largest; each with both float neighbours."""
    grid = torch.tensor([value for value in target.values() if value >= 0], dtype=dtype)
    past = target.max + 2.0 ** (target.max_exponent - target.mantissa_bits) * torch.tensor([0.5, 1.0, 1.5], dtype=dtype)
    ends = torch.tensor([math.inf, math.nan, torch.finfo(dtype).tiny, torch.finfo(dtype).max], dtype=dtype)
    points = torch.cat([grid, (grid[1:] + grid[:-1]) / 2, past.to(dtype), ends])
    both = [torch.nextafter(points, torch.full_like(points, to)) for to in (0.0, math.inf)]
    points = torch.cat([points, *both])
    return torch.cat([points, -points])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("target", list(small_floats()), ids=str)
def test_every_code_and_halfway_point_of_every_small_float(target: FloatFormat, dtype: torch.dtype) -> None:
    x = around_every_code(target, dtype)
    grid = torch.tensor(target.values(), dtype=dtype)
    for rounding in ROUNDINGS:
        assert mismatches(grid, bitplan.quantize(grid, target, rounding, seed=1), grid) == [], rounding
    for rounding in GFLOAT_MODES:
        for overflow in OVERFLOWS:
            ours = bitplan.quantize(x, target, rounding, overflow=overflow)
            assert mismatches(x, ours, by_gfloat(x.double().numpy(), target, rounding, overflow)) == [], (
                rounding,
                overflow,
            )


@pytest.mark.parametrize("name", [name for name in ML_DTYPES if name != "fp32"])
def test_nearest_is_the_cast_of_ml_dtypes(name: str) -> None:
    """Theirs overflow to the special code; where there is none they saturate, and NaN is undefined."""
    (target,) = floats(name)
    x = torch.cat([million_floats(), every_bf16().float()])
    overflow: Overflow = "saturate" if target.specials == "none" else "special"
    if not target.has_nan_code:
        x = x[~x.isnan()]
    with np.errstate(over="ignore", invalid="ignore"):
        theirs = x.numpy().astype(ml_dtype(ML_DTYPES[name])).astype(np.float32)
    assert mismatches(x, bitplan.quantize(x, target, overflow=overflow), theirs) == []


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("e5m2", torch.float8_e5m2),
        ("e4m3", torch.float8_e4m3fn),
    ],
)
def test_nearest_is_torchs_cast_inside_the_range(name: str, dtype: torch.dtype) -> None:
    (target,) = floats(name)
    x = torch.cat([million_floats(), every_bf16().float()])
    x = x[x.abs() <= target.max]
    assert mismatches(x, bitplan.quantize(x, name), x.to(dtype).float()) == []
    y = x.double() * (1 + 2.0**-40)  # bits that float32 does not have
    y = y[y.abs() <= target.max]
    if name == "fp32":
        assert mismatches(y, bitplan.quantize(y, name), y.to(dtype).double()) == []


@pytest.mark.parametrize(("name", "threshold"), [("e4m3b4", 31.0), ("e5m2b0", 122880.0), ("e6m9b0", None)])
def test_ties_away_floats_follow_qpytorchs_rule(name: str, threshold: float | None) -> None:
    """Lee et al. 2023 with QPyTorch: Q(x * 2^b) / 2^b, nearest, ties away also among subnormals, forward saturating."""
    (target,) = floats(name)
    x = torch.cat([million_floats(), around_every_code(floats("e4m3b4")[0], torch.float32)])
    x = x[~x.isnan()]  # which QPyTorch does not keep
    wide = x.double().numpy()
    standard_bias = 2 ** (target.exponent_bits - 1) - 1
    shifted = np.abs(wide) * 2.0**target.bias
    exponent = np.maximum(np.frexp(shifted)[1] - 1, 1 - standard_bias)
    with np.errstate(invalid="ignore"):
        step = np.ldexp(1.0, np.where(np.isfinite(wide), exponent, 0) - target.mantissa_bits)
        rounded = np.floor(shifted / step + 0.5) * step / 2.0**target.bias
    saturated = np.copysign(np.minimum(rounded, target.max), wide)
    assert mismatches(x, bitplan.quantize(x, name, "nearest-away"), saturated) == []
    to_infinity = np.copysign(np.where(rounded > target.max, np.inf, rounded), wide)
    assert mismatches(x, bitplan.quantize(x, name, "nearest-away", overflow="special"), to_infinity) == []
    top = threshold or 2.0**32 * (2 - 2.0**-10)
    edge = torch.tensor([top, np.nextafter(np.float32(top), np.float32(0))])
    backward = bitplan.quantize(edge, name, "nearest-away", overflow="special")
    assert backward.tolist() == [math.inf, target.max]
    assert bitplan.quantize(edge, name, "nearest-away").tolist() == [target.max, target.max]


@pytest.mark.parametrize("name", ["int2", "int3", "int8", "int16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_integers_round_and_clamp(name: str, dtype: torch.dtype) -> None:
    number_format = bitplan.get_format(name)
    assert isinstance(number_format, IntFormat)
    halves = torch.arange(-300, 300).to(dtype) / 2
    near = [torch.nextafter(halves, torch.full_like(halves, to)) for to in (-math.inf, math.inf)]
    x = torch.cat(
        [
            halves,
            *near,
            million_floats().to(dtype),
            torch.tensor([number_format.max, number_format.max + 0.5], dtype=dtype),
        ]
    )
    away = x.abs().floor() + ((x.abs() - x.abs().floor()) >= 0.5)
    expected = {"nearest": x.round(), "nearest-away": away.copysign(x), "toward-zero": x.trunc()}
    down = x.abs().floor()
    uniform = unit_interval(random_bits(x, 5), dtype)
    expected["stochastic"] = (down + ((x.abs() - down) > uniform)).copysign(x)
    for rounding in ROUNDINGS:
        clamped = (
            expected[rounding].clamp(number_format.min, number_format.max) + 0.0
        )  # no negative zero among integers
        assert mismatches(x, bitplan.quantize(x, number_format, rounding, seed=5), clamped) == [], rounding


# --- a sweep over odd formats, against the readable reference -----------------------------------------------


def odd_formats() -> Iterator[FloatFormat]:
    """Every eXmY, with specials, bias and subnormals varying along; then the corners of each."""
    rng = random.Random(3)
    for exponent_bits in range(1, 9):
        for mantissa_bits in range(24):
            specials = ("ieee", "fn", "none")[(exponent_bits + mantissa_bits) % 3]
            bias = rng.choice([0, 0, 0, 3, -2, 40, -60])
            for subnormals in (True, False):
                try:
                    yield FloatFormat(exponent_bits, mantissa_bits, bias, specials, subnormals)
                except FormatError:  # nothing but zero in it
                    continue
    yield from floats("e1m0none", "e8m3ns", "e8m23b0", "e8m10b-2", "e8m3b4", "e4m3ns", "e8m0ns", "e7m23", "e5m2b256")


def hard_inputs(target: FloatFormat, dtype: torch.dtype) -> Tensor:
    rng = random.Random(target.name)
    values = [math.ldexp(rng.uniform(1, 2), exponent) for exponent in range(-151, 129, 9)]
    for _ in range(12):
        exponent = rng.randint(target.min_exponent - 2, target.max_exponent + 1)
        whole = rng.randint(0, 2 << target.mantissa_bits)
        values += [math.ldexp(whole + half, exponent - target.mantissa_bits) for half in (0, 0.5)]
    past = target.max + 2.0 ** (target.max_exponent - target.mantissa_bits - 1)
    values += [target.max, past, target.min_normal, target.min_subnormal, target.min_subnormal / 2]
    values = [value for value in values if value <= torch.finfo(dtype).max]
    x = torch.tensor([*values, 0.0, math.inf, math.nan], dtype=torch.float64).to(dtype)
    x = torch.cat([x, *(torch.nextafter(x, torch.full_like(x, to)) for to in (0.0, math.inf))])
    return x.copysign(torch.tensor([1.0, -1.0], dtype=dtype).repeat(len(x))[: len(x)])


def stochastic_inputs(x: Tensor, bits: Tensor, target: FloatFormat, carrier: Carrier) -> tuple[Tensor, list[float]]:
    """What the definition must be given to make the same stochastic decisions: the number as it is seen below the
    smallest normal, where it is lifted into the binade that has the grid's spacing, and the uniform number drawn."""
    cut = carrier.mantissa_bits - target.mantissa_bits
    drawn = [pattern & 0xFFFFFFFF for pattern in bits.tolist()]
    kept = [pattern >> (32 - cut) if cut <= 32 else pattern << (cut - 32) for pattern in drawn]
    uniform = [1.0 - (k + 0.5) / 2**cut if cut else 0.5 for k in kept]
    if target.subnormals and target.min_exponent == carrier.min_exponent:
        return x, uniform
    lift = torch.tensor(target.min_subnormal * 2.0**target.mantissa_bits, dtype=carrier.dtype)
    lifted = ((x.abs() + lift) - lift).copysign(x)
    return torch.where(x.abs() < target.min_normal, lifted, x), uniform


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("exponent_bits", range(1, 9))
def test_odd_formats_equal_the_reference_in_every_rounding(exponent_bits: int, dtype: torch.dtype) -> None:
    """Constant parameters and, where they can express the format, parameters in a tensor."""
    checked = 0
    for target in odd_formats():
        if target.exponent_bits != exponent_bits:
            continue
        x = hard_inputs(target, dtype)
        for rounding in ROUNDINGS:
            carrier = carrier_for(dtype, target, rounding)
            work, bits = x.to(carrier.dtype), random_bits(x, 3, 1, 2)
            seen, uniform = work, [0.5] * len(x)
            if rounding == "stochastic":
                seen, uniform = stochastic_inputs(work, bits, target, carrier)
            for overflow in OVERFLOWS:
                number_format = [
                    round_value(v, target, rounding, overflow, u) for v, u in zip(seen.tolist(), uniform, strict=True)
                ]
                expected = torch.tensor(number_format, dtype=torch.float64)
                actual = []
                if _holds(dtype, target):
                    ours = bitplan.quantize(x, target, rounding, seed=3, step=1, site=2, overflow=overflow)
                    actual.append(ours)
                    checked += 1
                if carrier_for(dtype, target, "stochastic") is carrier and carrier.dtype == dtype:
                    try:
                        row = torch.tensor(row_values(target, overflow, carrier), dtype=carrier.int_dtype)
                    except FormatError:
                        assert overflow == "special"
                    else:
                        actual.append(round_float_by_row(work.clone(), row, rounding, bits.clone()))
                for ours in actual:
                    assert mismatches(x, ours, expected) == [], (target.name, rounding, overflow)
    assert checked > 100


def _holds(dtype: torch.dtype, target: FloatFormat) -> bool:
    try:
        bitplan.Quantizer(target).check(torch.zeros(1, dtype=dtype))
    except FormatError:
        return False
    return True


# --- properties -------------------------------------------------------------------------------------------

numbers = st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40)
targets = st.sampled_from([*CHOSEN, *floats("e4m3ns", "e1m0none", "e8m3ns", "e2m5b3")])
deterministic = st.sampled_from(list(GFLOAT_MODES))


@settings(deadline=None)
@given(numbers, targets, st.sampled_from(ROUNDINGS), st.sampled_from(OVERFLOWS))
def test_rounding_twice_changes_nothing(
    values: list[float], target: FloatFormat, rounding: Rounding, overflow: Overflow
) -> None:
    once = bitplan.quantize(torch.tensor(values), target, rounding, seed=9, overflow=overflow)
    again = bitplan.quantize(once, target, rounding, seed=10, overflow=overflow)
    assert mismatches(once, again, once) == []


@settings(deadline=None)
@given(numbers, targets, deterministic)
def test_rounding_keeps_the_order_and_the_sign(values: list[float], target: FloatFormat, rounding: Rounding) -> None:
    x = torch.tensor(sorted(values))
    rounded = bitplan.quantize(x, target, rounding, overflow="saturate")
    assert bool((rounded[1:] >= rounded[:-1]).all())
    mirrored = bitplan.quantize(-x, target, rounding, overflow="saturate")
    assert mismatches(x, -mirrored, rounded) == []


@settings(deadline=None)
@given(numbers, targets)
def test_nearest_stays_within_half_a_unit_in_the_last_place(values: list[float], target: FloatFormat) -> None:
    x = torch.tensor(values).clamp(-target.max, target.max)
    error = (bitplan.quantize(x, target).double() - x.double()).abs()
    exponent = (torch.frexp(x.double()).exponent - 1).clamp(min=target.min_exponent)
    unit = torch.ldexp(torch.ones_like(error), exponent - target.mantissa_bits)
    if not target.subnormals:
        unit = torch.where(x.abs() < target.min_normal, target.min_normal, unit)
    assert bool((error <= unit / 2).all())


def test_both_carriers_are_swept() -> None:
    """The sweep means little if every format took the same way through the code."""
    carriers = [carrier_for(torch.float32, target, "stochastic") for target in odd_formats()]
    assert carriers.count(FLOAT32) > 100
    assert carriers.count(FLOAT64) > 50
