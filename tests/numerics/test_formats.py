"""The formats against what others say about them: the papers' tables, torch, ml_dtypes and gfloat."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from bitplan.errors import FormatError
from bitplan.numerics.formats import NAMED, BlockFormat, FloatFormat, IntFormat, get_format

gfloat = pytest.importorskip("gfloat", reason="needs gfloat, which the dev extra installs")
ml_dtypes = pytest.importorskip("ml_dtypes", reason="needs ml_dtypes, which the dev extra installs")


def float_named(name: str) -> FloatFormat:
    number_format = get_format(name)
    assert isinstance(number_format, FloatFormat)
    return number_format


def every_small_float() -> list[FloatFormat]:
    """All floats of at most 8 bits, with subnormals: every split of the bits, every kind of special codes."""
    result = []
    for exponent_bits in range(1, 8):
        for mantissa_bits in range(8 - exponent_bits):
            for specials in ("ieee", "fn", "none"):
                for bias in (0, 4, -3):
                    try:
                        result.append(FloatFormat(exponent_bits, mantissa_bits, bias, specials))
                    except FormatError:
                        assert (exponent_bits, mantissa_bits) == (1, 0)
    return result


def same(ours: float, theirs: float) -> bool:
    """Equal bit for bit, where all NaNs are one and the sign of zero counts."""
    if math.isnan(ours) or math.isnan(theirs):
        return math.isnan(ours) and math.isnan(theirs)
    return ours == theirs and math.copysign(1.0, ours) == math.copysign(1.0, theirs)


ML_DTYPES = {
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e4m3ieee": ml_dtypes.float8_e4m3,
    "e3m4": ml_dtypes.float8_e3m4,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
}

TORCH_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e5m2": torch.float8_e5m2,
    "e4m3": torch.float8_e4m3fn,
}


@pytest.mark.parametrize(
    ("name", "bits", "largest", "min_normal", "min_subnormal"),
    [
        # Lee, Sharma & Aiken 2023: FP(4,3,4), FP(5,2,0), FP(6,9,0)
        ("e4m3b4", 8, 30.0, 2.0**-10, 2.0**-13),
        ("e5m2b0", 8, 114688.0, 2.0**-14, 2.0**-16),
        ("e6m9b0", 16, 2.0**32 * (2 - 2.0**-9), 2.0**-30, 2.0**-39),
        # OCP OFP8 1.0 and MX 1.0
        ("e5m2", 8, 57344.0, 2.0**-14, 2.0**-16),
        ("e4m3", 8, 448.0, 2.0**-6, 2.0**-9),
        ("e3m2", 6, 28.0, 2.0**-2, 2.0**-4),
        ("e2m3", 6, 7.5, 1.0, 2.0**-3),
        ("e2m1", 4, 6.0, 1.0, 2.0**-1),
        # IEEE-like
        ("e3m4", 8, 15.5, 2.0**-2, 2.0**-6),
        ("e4m3ieee", 8, 240.0, 2.0**-6, 2.0**-9),
        ("e4m3none", 8, 480.0, 2.0**-6, 2.0**-9),
        ("tf32", 19, 2.0**127 * (2 - 2.0**-10), 2.0**-126, 2.0**-136),
        # without subnormals
        ("e4m3ns", 8, 448.0, 2.0**-6, 2.0**-6),
    ],
)
def test_range_of_floats_is_the_published_one(
    name: str, bits: int, largest: float, min_normal: float, min_subnormal: float
) -> None:
    number_format = float_named(name)
    assert (number_format.bits, number_format.max, number_format.min_normal, number_format.min_subnormal) == (
        bits,
        largest,
        min_normal,
        min_subnormal,
    )


def test_the_high_format_of_lee_et_al_tops_at_8_58e9() -> None:
    assert f"{float_named('e6m9b0').max:.3g}" == "8.58e+09"


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_range_agrees_with_torch(name: str) -> None:
    number_format, info = float_named(name), torch.finfo(TORCH_DTYPES[name])
    ours = (
        number_format.bits,
        number_format.max,
        number_format.min_normal,
        number_format.min_subnormal,
        number_format.epsilon,
    )
    assert ours == (info.bits, info.max, info.smallest_normal, info.smallest_normal * info.eps, info.eps)


@pytest.mark.parametrize("name", ML_DTYPES)
def test_range_agrees_with_ml_dtypes(name: str) -> None:
    number_format, info = float_named(name), ml_dtypes.finfo(ML_DTYPES[name])
    ours = (
        number_format.bits,
        number_format.max,
        number_format.min_normal,
        number_format.min_subnormal,
        number_format.epsilon,
    )
    theirs = (info.bits, *map(float, (info.max, info.smallest_normal, info.smallest_subnormal, info.eps)))
    assert ours == theirs
    assert (number_format.exponent_bits, number_format.mantissa_bits) == (info.nexp, info.nmant)


@pytest.mark.parametrize("name", ML_DTYPES)
def test_every_code_decodes_as_in_ml_dtypes(name: str) -> None:
    number_format, dtype = float_named(name), np.dtype(ML_DTYPES[name])
    codes = np.arange(1 << number_format.bits, dtype=np.uint16 if number_format.bits > 8 else np.uint8)
    with np.errstate(invalid="ignore"):  # signalling NaNs among the codes
        theirs = codes.view(dtype).astype(np.float64)
    wrong = [
        code for code in range(1 << number_format.bits) if not same(number_format.decode(code), float(theirs[code]))
    ]
    assert wrong == []


def in_gfloat(number_format: FloatFormat) -> Any:
    top_mantissa = (1 << number_format.mantissa_bits) - 1
    return gfloat.FormatInfo(
        number_format.name,
        k=number_format.bits,
        precision=number_format.mantissa_bits + 1,
        bias=(1 << (number_format.exponent_bits - 1)) - 1 + number_format.bias,
        is_signed=True,
        domain=gfloat.Domain.Extended if number_format.specials == "ieee" else gfloat.Domain.Finite,
        has_nz=True,
        num_high_nans={"ieee": top_mantissa, "fn": 1, "none": 0}[number_format.specials],
        has_subnormals=True,
        is_twos_complement=False,
    )


@pytest.mark.parametrize("number_format", every_small_float(), ids=str)
def test_every_code_decodes_as_in_gfloat(number_format: FloatFormat) -> None:
    theirs = in_gfloat(number_format)
    codes = range(1 << number_format.bits)
    wrong = [
        code for code in codes if not same(number_format.decode(code), float(gfloat.decode_float(theirs, code).fval))
    ]
    assert wrong == []


@pytest.mark.parametrize("number_format", every_small_float(), ids=str)
def test_properties_follow_from_the_codes(number_format: FloatFormat) -> None:
    decoded = [number_format.decode(code) for code in range(1 << number_format.bits)]
    finite = sorted({value for value in decoded if math.isfinite(value)})
    assert number_format.values() == tuple(finite)
    assert number_format.max == finite[-1]
    assert number_format.min_subnormal == min(value for value in finite if value > 0)
    assert number_format.has_nan_code == any(map(math.isnan, decoded))
    if number_format.exponent_bits > 1 and number_format.max >= 2 * number_format.min_normal:
        above = min(value for value in finite if value > number_format.min_normal)
        assert above - number_format.min_normal == number_format.epsilon * number_format.min_normal


@pytest.mark.parametrize("number_format", every_small_float(), ids=str)
def test_without_subnormals_small_codes_mean_zero_and_the_others_stay(number_format: FloatFormat) -> None:
    try:
        flushed = dataclasses.replace(number_format, subnormals=False)
    except FormatError:
        assert number_format.max < number_format.min_normal  # nothing but subnormals was there
        return
    for code in range(1 << number_format.bits):
        value = number_format.decode(code)
        expected = math.copysign(0.0, value) if abs(value) < number_format.min_normal else value
        assert same(flushed.decode(code), expected)
    assert flushed.min_subnormal == flushed.min_normal


def test_an_additional_bias_divides_every_value() -> None:
    plain, shifted = float_named("e4m3b0"), float_named("e4m3b4")
    assert shifted.values() == tuple(value / 16 for value in plain.values())


@pytest.mark.parametrize("name", NAMED)
def test_max_exponent_is_the_exponent_of_the_largest_value(name: str) -> None:
    number_format = get_format(name)
    if isinstance(number_format, FloatFormat):
        assert 2.0**number_format.max_exponent <= number_format.max < 2.0 ** (number_format.max_exponent + 1)


@pytest.mark.parametrize("bits", range(2, 17))
def test_symmetric_integers_reach_as_far_down_as_up(bits: int) -> None:
    number_format = IntFormat(bits)
    assert (number_format.min, number_format.max, number_format.bits) == (
        -(2.0 ** (bits - 1) - 1),
        2.0 ** (bits - 1) - 1,
        bits,
    )
    assert number_format.epsilon == number_format.min_normal == number_format.min_subnormal == 1.0


@pytest.mark.parametrize("bits", range(1, 17))
def test_affine_integers_have_one_step_fewer_than_codes(bits: int) -> None:
    number_format = IntFormat(bits, affine=True)
    assert (number_format.min, number_format.max) == (0.0, 2.0**bits - 1)


@pytest.mark.parametrize(
    ("name", "values"),
    [("int2", (-1, 0, 1)), ("int3", (-3, -2, -1, 0, 1, 2, 3)), ("uint2", (0, 1, 2, 3)), ("uint1", (0, 1))],
)
def test_integers_list_their_values(name: str, values: tuple[int, ...]) -> None:
    assert get_format(name).values() == values


def test_e2m1_lists_the_fifteen_values_of_the_specification() -> None:
    positive = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    assert float_named("e2m1").values() == (*(-value for value in reversed(positive)), 0.0, *positive)


def test_zero_is_listed_once_and_is_positive() -> None:
    zeros = [value for value in float_named("e4m3").values() if value == 0]
    assert [math.copysign(1.0, zero) for zero in zeros] == [1.0]


@pytest.mark.parametrize(("name", "count"), [("int10", 1023), ("uint10", 1024), ("e5m4", 2 * 31 * 16 - 1)])
def test_ten_bits_can_still_be_listed(name: str, count: int) -> None:
    assert len(get_format(name).values()) == count


@pytest.mark.parametrize("name", ["int11", "e5m5", "fp16", "fp32"])
def test_more_than_ten_bits_are_refused_with_what_serves_instead(name: str) -> None:
    with pytest.raises(FormatError, match=r"too many values to list.*up to 10 bits"):
        get_format(name).values()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, "special") for name in ("fp32", "tf32", "bf16", "fp16", "e5m3")),
        *(
            (name, "saturate")
            for name in ("e5m2", "e4m3", "e3m4", "e2m1", "e6m9b0", "int8", "uint16", "mxfp8", "nvfp4")
        ),
    ],
)
def test_overflow_defaults_are_the_documented_ones(name: str, expected: str) -> None:
    assert get_format(name).default_overflow == expected


def test_special_overflow_is_nan_only_where_there_is_no_infinity() -> None:
    assert float_named("e5m2").overflow_value == math.inf
    assert math.isnan(float_named("e4m3").overflow_value)
    assert float_named("e4m3b4").overflow_value == math.inf


@pytest.mark.parametrize(
    ("name", "bits_per_value", "element_max", "step"),
    [
        ("mxfp8", 8.25, 448.0, 2.0**-9),
        ("mxfp8e5m2", 8.25, 57344.0, 2.0**-16),
        ("mxfp6", 6.25, 7.5, 2.0**-3),
        ("mxfp6e3m2", 6.25, 28.0, 2.0**-4),
        ("mxfp4", 4.25, 6.0, 0.5),
        ("mxint8", 8.25, 127 / 64, 2.0**-6),
        ("nvfp4", 4.5, 6.0, 0.5),
    ],
)
def test_blocks_count_their_share_of_the_scale(
    name: str, bits_per_value: float, element_max: float, step: float
) -> None:
    block = get_format(name)
    assert isinstance(block, BlockFormat)
    assert (block.bits_per_value, block.element_max, block.min_subnormal) == (bits_per_value, element_max, step)
    assert block.values()[-1] == element_max


def test_the_largest_block_value_is_the_largest_element_under_the_largest_scale() -> None:
    assert get_format("mxfp4").max == 6 * 2.0**127
    assert get_format("nvfp4").max == 6 * 448.0


def test_formats_are_frozen_and_hashable() -> None:
    number_format = float_named("e4m3")
    with pytest.raises(dataclasses.FrozenInstanceError):
        number_format.mantissa_bits = 2  # type: ignore[misc]
    assert len({number_format, FloatFormat(4, 3, specials="fn"), get_format("e5m2")}) == 2


def test_unknown_special_codes_are_refused() -> None:
    with pytest.raises(FormatError, match="'ieee', 'fn' or 'none'"):
        FloatFormat(4, 3, specials="fnuz")  # type: ignore[arg-type]
