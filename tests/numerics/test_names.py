from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitplan.errors import FormatError
from bitplan.numerics.formats import NAMED, BlockFormat, FloatFormat, Format, IntFormat, get_format


@st.composite
def float_formats(draw: st.DrawFn) -> FloatFormat:
    exponent_bits = draw(st.integers(1, 8))
    mantissa_bits = draw(st.integers(0, 23))
    bias = draw(st.one_of(st.just(0), st.integers(-256, 256)))
    specials = draw(st.sampled_from(["ieee", "fn", "none"]))
    subnormals = draw(st.booleans())
    try:
        return FloatFormat(exponent_bits, mantissa_bits, bias, specials, subnormals)
    except FormatError:  # a format with no value but zero; with special codes "none" there always is one
        return FloatFormat(exponent_bits, mantissa_bits, bias, "none", subnormals)


INT_FORMATS = [IntFormat(bits, affine) for affine in (False, True) for bits in range(1 if affine else 2, 17)]


@given(float_formats())
def test_every_float_is_printed_as_a_name_that_parses_back_to_it(number_format: FloatFormat) -> None:
    assert get_format(number_format.name) == number_format


@given(float_formats(), float_formats())
def test_two_floats_share_a_name_only_if_they_are_equal(one: FloatFormat, other: FloatFormat) -> None:
    assert (one.name == other.name) == (one == other)


@pytest.mark.parametrize("number_format", INT_FORMATS, ids=str)
def test_every_integer_round_trips(number_format: IntFormat) -> None:
    assert get_format(number_format.name) == number_format


@pytest.mark.parametrize("name", NAMED)
def test_every_well_known_name_is_its_own_canonical_name(name: str) -> None:
    assert get_format(name).name == name
    assert str(get_format(name)) == name


def test_well_known_names_are_distinct_formats() -> None:
    assert len({get_format(name) for name in NAMED}) == len(NAMED)


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ("fp32", FloatFormat(8, 23)),
        ("tf32", FloatFormat(8, 10)),
        ("bf16", FloatFormat(8, 7)),
        ("fp16", FloatFormat(5, 10)),
        ("e8m7", FloatFormat(8, 7)),
        ("e5m2", FloatFormat(5, 2, 0, "ieee")),
        ("e4m3", FloatFormat(4, 3, 0, "fn")),
        ("e4m3ieee", FloatFormat(4, 3, 0, "ieee")),
        ("e3m4", FloatFormat(3, 4, 0, "ieee")),
        ("e2m3", FloatFormat(2, 3, 0, "none")),
        ("e3m2", FloatFormat(3, 2, 0, "none")),
        ("e2m1", FloatFormat(2, 1, 0, "none")),
        ("e4m3b4", FloatFormat(4, 3, 4, "none")),
        ("e5m2b0", FloatFormat(5, 2, 0, "none")),
        ("e5m2none", FloatFormat(5, 2, 0, "none")),
        ("e5m2b-3fn", FloatFormat(5, 2, -3, "fn")),
        ("e4m3ns", FloatFormat(4, 3, 0, "fn", subnormals=False)),
        ("e4m3b4ieeens", FloatFormat(4, 3, 4, "ieee", subnormals=False)),
        ("int8", IntFormat(8)),
        ("uint1", IntFormat(1, affine=True)),
        (" E4M3 ", FloatFormat(4, 3, 0, "fn")),
    ],
)
def test_a_spelling_means_the_format_the_grammar_says(spelling: str, expected: Format) -> None:
    assert get_format(spelling) == expected


@pytest.mark.parametrize(
    ("long", "short"), [("mxfp8e4m3", "mxfp8"), ("mxfp6e2m3", "mxfp6"), ("mxfp4e2m1", "mxfp4"), ("e5m2none", "e5m2b0")]
)
def test_a_longer_spelling_is_printed_in_its_short_form(long: str, short: str) -> None:
    assert get_format(long).name == short


@pytest.mark.parametrize(
    ("name", "element", "size", "scale"),
    [
        ("mxfp8", "e4m3", 32, "e8m0"),
        ("mxfp8e5m2", "e5m2", 32, "e8m0"),
        ("mxfp6", "e2m3", 32, "e8m0"),
        ("mxfp6e3m2", "e3m2", 32, "e8m0"),
        ("mxfp4", "e2m1", 32, "e8m0"),
        ("mxint8", "int8", 32, "e8m0"),
        ("nvfp4", "e2m1", 16, "e4m3"),
    ],
)
def test_block_formats_are_those_of_the_specifications(name: str, element: str, size: int, scale: str) -> None:
    block = get_format(name)
    assert isinstance(block, BlockFormat)
    assert (block.element.name, block.size, block.scale) == (element, size, scale)


def test_a_format_is_returned_as_it_is() -> None:
    number_format = FloatFormat(4, 3, bias=7, specials="none")
    assert get_format(number_format) is number_format


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("e4m3x", "e4m3"), ("mxfp5", "mxfp4"), ("fp23", "fp32"), ("nvfp8", "nvfp4"), ("bfloat16", "bf16")],
)
def test_an_unknown_name_is_answered_with_the_nearest_ones(wrong: str, near: str) -> None:
    with pytest.raises(FormatError, match=f"there is no number format '{wrong}'; did you mean .*{near}"):
        get_format(wrong)


@pytest.mark.parametrize(
    "wrong", ["", "e4", "m3", "e4m", "e-1m3", "e4m3b", "e4m3nsfn", "int", "int-8", "e4m3\n e5m2", "8"]
)
def test_what_is_outside_the_grammar_is_no_format(wrong: str) -> None:
    with pytest.raises(FormatError, match="there is no number format"):
        get_format(wrong)


@pytest.mark.parametrize(
    ("impossible", "advice"),
    [
        ("e0m3", "1 to 8 exponent bits"),
        ("e9m3", "1 to 8 exponent bits"),
        ("e4m24", "0 to 23 mantissa bits"),
        ("e4m3b257", "bias must lie within"),
        ("e1m0", "no value but zero"),
        ("int1", "needs 2 to 16 bits, not 1"),
        ("int17", "needs 2 to 16 bits, not 17"),
        ("uint0", "needs 1 to 16 bits, not 0"),
    ],
)
def test_an_impossible_width_says_what_is_possible(impossible: str, advice: str) -> None:
    with pytest.raises(FormatError, match=advice):
        get_format(impossible)


@pytest.mark.parametrize("wrong", [8, None, 3.5, ["e4m3"], b"e4m3"])
def test_what_is_no_text_is_refused_in_a_sentence(wrong: object) -> None:
    with pytest.raises(FormatError, match="a format is given by its name"):
        get_format(wrong)  # type: ignore[arg-type]
