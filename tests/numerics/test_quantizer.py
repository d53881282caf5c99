"""What :func:`bitplan.quantize` promises about any tensor: type, layout and gradient, and one sentence otherwise."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import bitplan
from bitplan.errors import BitplanError, FormatError
from bitplan.numerics import chunks
from bitplan.numerics.formats import NAMED, FloatFormat, IntFormat
from bitplan.numerics.mutable_format import MutableFormat
from bitplan.numerics.quantizer import Encoded, Quantizer, Span, make_quantizer
from bitplan.numerics.reference import ROUNDINGS, Rounding
from bitplan.numerics.scaling import Scaling

PATTERN = {
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
DTYPES = list(PATTERN)

#: One quantizer of every kind: (format, scale and what describes it).
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("e4m3", {}),
    ("e5m2", {}),
    ("e3m4", {}),
    ("e2m1", {"scale": "tensor"}),
    ("e4m3b4", {"scale": "vector", "axis": 0}),
    ("int4", {}),
    ("int8", {"scale": "channel", "axis": 0}),
    ("uint4", {"scale": "tensor"}),
    ("int4", {"scale": "block", "block": 3, "range": "minmax"}),
    ("e2m3", {"scale": "block", "block": 4, "power_of_two": True}),
    ("mxfp8", {}),
    ("mxfp4", {}),
    ("mxint8", {}),
    ("nvfp4", {}),
]
every_kind = pytest.mark.parametrize(("name", "scale"), KINDS, ids=lambda part: str(part) if part else "unscaled")


def sample(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def differing(ours: Tensor, expected: Tensor) -> int:
    """How many elements differ in any bit; all NaNs are one."""
    assert ours.dtype == expected.dtype
    pattern = PATTERN[ours.dtype]
    other = ours.contiguous().view(pattern) != expected.contiguous().view(pattern)
    return int((other & ~(ours.isnan() & expected.isnan())).sum())


# --- type, shape, layout ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_kind
def test_the_result_has_the_inputs_type_and_is_really_rounded(
    name: str, scale: dict[str, Any], dtype: torch.dtype
) -> None:
    x = sample(6, 40).to(dtype)
    for rounding in ROUNDINGS:
        ours = bitplan.quantize(x, name, rounding, seed=1, **scale)
        assert (ours.dtype, ours.shape, ours.device) == (x.dtype, x.shape, x.device)
        # An error of a small format's size: neither none nor all.
        error = float((ours.double() - x.double()).norm() / x.double().norm())
        assert 2.0**-10 < error < 0.5, (rounding, error)
        if not scale and bitplan.get_format(name).kind != "block":
            assert set(ours.flatten().tolist()) <= set(bitplan.get_format(name).values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_kind
def test_narrow_inputs_round_as_their_float32_copies(name: str, scale: dict[str, Any], dtype: torch.dtype) -> None:
    x = sample(6, 40).to(dtype)
    for rounding in ROUNDINGS:
        ours = bitplan.quantize(x, name, rounding, seed=1, **scale)
        wide = bitplan.quantize(x.float(), name, rounding, seed=1, **scale)
        assert differing(ours, wide.to(dtype)) == 0, rounding


def layouts() -> dict[str, Tensor]:
    plain = sample(4, 6, 5, 7)
    return {
        "contiguous": plain,
        "channels last": plain.to(memory_format=torch.channels_last),
        "channels last 3d": sample(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
        "transposed": sample(9, 4).T,
        "permuted": plain.permute(2, 0, 3, 1),
        "every other": plain[:, :, ::2],
        "narrowed": plain[1:3, 2:5],
        "expanded": sample(4, 1).expand(4, 9),
        "with axes of one": plain[:1, :1, :1],
        "reversed by stride order": sample(7, 5, 6, 4).permute(3, 2, 1, 0),
    }


@pytest.mark.parametrize("layout", layouts())
@every_kind
def test_strides_survive_and_the_numbers_do_not_depend_on_them(name: str, scale: dict[str, Any], layout: str) -> None:
    x = layouts()[layout]
    plain = torch.empty(x.shape).copy_(x)
    for rounding in ("nearest", "stochastic"):
        ours = bitplan.quantize(x, name, rounding, seed=1, **scale)
        assert torch.equal(ours, bitplan.quantize(plain, name, rounding, seed=1, **scale))
        assert ours.stride() == torch.empty_like(x).stride()
        if layout in ("channels last", "channels last 3d", "transposed", "permuted"):
            assert ours.stride() == x.stride()
            assert not ours.is_contiguous()


@pytest.mark.parametrize("layout", ["contiguous", "channels last", "with gaps"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "quantizer",
    [
        make_quantizer("int8", scale="tensor"),
        make_quantizer("int5", scale="tensor", range="minmax"),
        make_quantizer("e4m3", "nearest-away", scale="tensor", power_of_two=True),
        make_quantizer("e4m3b4", "toward-zero"),
        make_quantizer(MutableFormat("int6"), scale="tensor"),
        make_quantizer(MutableFormat("e4m3"), scale="tensor"),
    ],
    ids=lambda quantizer: f"{quantizer._name} {quantizer.scaling and quantizer.scaling.range}",
)
def test_a_large_tensor_is_rounded_part_by_part_and_the_same(
    quantizer: Quantizer, dtype: torch.dtype, layout: str
) -> None:
    x = (torch.randn(8, 66, 64, 63) * 9).to(dtype)  # no whole number of parts
    x = x.to(memory_format=torch.channels_last) if layout == "channels last" else x
    x = torch.cat((x, x))[::2] if layout == "with gaps" else x
    is_scaled, is_affine = quantizer.scaling is not None, quantizer._is_affine
    spans: list[Span | None] = [None]
    spans += [torch.tensor(30.0)] if is_scaled and not is_affine else []
    spans += [(torch.tensor(-4.0), torch.tensor(20.0))] if is_scaled else []
    for span in spans:
        parts, once = Seen(), Seen()
        in_parts = quantizer.round_values(x, None, None, span, parts)
        with chunks.unchunked():
            whole = quantizer.round_values(x, None, None, span, once)
        assert torch.equal(in_parts, whole)
        assert in_parts.stride() == whole.stride()
        # Unscaled values of their carrier's type are gone through further down.
        assert (len(parts.scales) > 1) == (layout != "with gaps" and (is_scaled or dtype != torch.float32))
        for scales in parts.scales:
            assert len(scales) == len(once.scales[0])
            assert all(map(torch.equal, scales, once.scales[0]))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["int8", "e4m3"])
def test_what_is_not_finite_is_the_same_in_a_large_tensor(name: str, value: float) -> None:
    x = torch.randn(1 << 21)
    x[12345] = value
    quantizer = make_quantizer(name, scale="tensor")
    seen = Seen()
    in_parts = quantizer.round_values(x, None, between=seen)
    assert len(seen.scales) > 1
    with chunks.unchunked():
        torch.testing.assert_close(quantizer.round_values(x, None), in_parts, rtol=0.0, atol=0.0, equal_nan=True)
    assert not in_parts.isfinite().all()


class Seen:
    """Looks at what lies between the two halves of rounding."""

    def __init__(self) -> None:
        self.scales: list[tuple[Tensor, ...]] = []

    def __call__(self, encoded: Encoded) -> Encoded:
        self.scales.append(encoded.scales)
        return encoded


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_input_is_neither_changed_nor_returned(dtype: torch.dtype) -> None:
    x = sample(6, 40).to(dtype)
    kept = x.clone()
    wide = [("fp32", {}), ("tf32", {}), ("bf16", {})] if dtype in (torch.float32, torch.float64) else []
    for name, scale in [*KINDS, *wide]:
        for rounding in ROUNDINGS:
            ours = bitplan.quantize(x, name, rounding, seed=1, **scale)
            assert ours.untyped_storage().data_ptr() != x.untyped_storage().data_ptr(), (name, rounding)
            assert torch.equal(x, kept), (name, rounding)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0, 2)])
@every_kind
def test_empty_tensors_just_work(name: str, scale: dict[str, Any], shape: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        x = torch.empty(shape, dtype=dtype, requires_grad=True)
        ours = bitplan.quantize(x, name, "stochastic", **scale)
        assert (ours.shape, ours.dtype) == (x.shape, dtype)
        ours.sum().backward()
        assert x.grad is not None


@pytest.mark.parametrize(("name", "scale"), [(name, scale) for name, scale in KINDS if "axis" not in scale])
def test_a_single_number_is_a_tensor_of_one(name: str, scale: dict[str, Any]) -> None:
    for rounding in ROUNDINGS:
        one = bitplan.quantize(torch.tensor(1.23), name, rounding, seed=1, **scale)
        assert one.shape == ()
        assert float(one) == float(bitplan.quantize(torch.tensor([1.23]), name, rounding, seed=1, **scale))


# --- gradient ---------------------------------------------------------------------------------------------


@every_kind
def test_the_gradient_passes_straight_through(name: str, scale: dict[str, Any]) -> None:
    """Also where the value saturated, and without a graph where none is wanted."""
    x = sample(6, 40) * 100
    upstream = sample(6, 40, seed=1)
    leaf = x.clone().requires_grad_()
    ours = bitplan.quantize(leaf, name, "stochastic", seed=1, **scale)
    assert torch.equal(ours, bitplan.quantize(x, name, "stochastic", seed=1, **scale))
    (grad,) = torch.autograd.grad(ours, leaf, upstream)
    assert torch.equal(grad, upstream)
    with torch.no_grad():
        assert not bitplan.quantize(leaf, name, **scale).requires_grad
    assert not bitplan.quantize(x, name, **scale).requires_grad


# --- special values and overflow --------------------------------------------------------------------------

FLOATS = [name for name in NAMED if isinstance(bitplan.get_format(name), FloatFormat)]
README_DEFAULTS = {name: "special" if name in ("fp32", "tf32", "bf16", "fp16") else "saturate" for name in FLOATS}


@pytest.mark.parametrize("name", [*FLOATS, "e4m3b4", "e8m0", "e4m3ns"])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_nan_infinity_and_the_sign_of_zero(name: str, rounding: Rounding) -> None:
    number_format = bitplan.get_format(name)
    assert isinstance(number_format, FloatFormat)
    assert number_format.default_overflow == README_DEFAULTS.get(name, number_format.default_overflow)
    x = torch.tensor([math.nan, 0.0, -0.0, math.inf, -math.inf, -number_format.max])
    if rounding != "stochastic":  # which would carry some of these up to the smallest value
        x = torch.cat([x, torch.tensor([-number_format.min_subnormal / 4])])
    for overflow in (None, "saturate", "special"):
        ours = bitplan.quantize(x, name, rounding, seed=1, overflow=overflow)
        top = (
            number_format.max
            if (overflow or number_format.default_overflow) == "saturate"
            else number_format.overflow_value
        )
        expected = torch.tensor([math.nan, 0.0, -0.0, top, -top, -number_format.max, -0.0][: len(x)])
        assert differing(ours, expected) == 0, overflow


@pytest.mark.parametrize("name", ["e5m2", "e4m3", "fp16", "e2m1", "e4m3b4"])
def test_a_finite_number_beyond_the_largest_overflows_as_chosen(name: str) -> None:
    number_format = bitplan.get_format(name)
    assert isinstance(number_format, FloatFormat)
    step = 2.0 ** (number_format.max_exponent - number_format.mantissa_bits)
    x = torch.tensor(
        [number_format.max, number_format.max + 0.49 * step, number_format.max + 0.51 * step, -2 * number_format.max]
    )
    top = number_format.overflow_value
    expected = {
        "saturate": [number_format.max] * 3 + [-number_format.max],
        "special": [number_format.max, number_format.max, top, -top],
    }
    for overflow in ("saturate", "special"):
        ours = bitplan.quantize(x, name, overflow=overflow)
        assert differing(ours, torch.tensor(expected[overflow])) == 0
    assert differing(bitplan.quantize(x, name), torch.tensor(expected[number_format.default_overflow])) == 0


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_integers_saturate_keep_nan_and_have_one_zero(rounding: Rounding) -> None:
    x = torch.tensor([math.nan, -0.0, math.inf, -math.inf, 1e9, -1e9])
    ours = bitplan.quantize(x, "int4", rounding, seed=1)
    assert differing(ours, torch.tensor([math.nan, 0.0, 7.0, -7.0, 7.0, -7.0])) == 0


@pytest.mark.parametrize("bits", range(1, 17))
def test_every_integer_of_every_width_is_its_own_rounding(bits: int) -> None:
    steps = torch.arange(2**bits).float()
    for rounding in ROUNDINGS:
        assert torch.equal(bitplan.quantize(steps, f"uint{bits}", rounding, scale="tensor", seed=1), steps)
        if bits > 1:
            number_format = IntFormat(bits)
            whole = torch.arange(number_format.min, number_format.max + 1)
            assert torch.equal(bitplan.quantize(whole, number_format, rounding, seed=1), whole)
            assert torch.equal(bitplan.quantize(whole, number_format, rounding, scale="tensor", seed=1), whole)


# --- one vocabulary ---------------------------------------------------------------------------------------


def test_a_scaling_a_quantizer_and_keywords_say_the_same() -> None:
    x = sample(8, 30)
    by_keywords = bitplan.quantize(x, "int5", scale="block", axis=0, block=3, range="minmax", power_of_two=True)
    scaling = Scaling("block", axis=0, block=3, range="minmax", power_of_two=True)
    assert torch.equal(bitplan.quantize(x, "int5", scale=scaling), by_keywords)
    quantizer = bitplan.Quantizer(bitplan.get_format("int5"), scaling=scaling)
    assert torch.equal(quantizer.quantize(x), by_keywords)
    assert quantizer == bitplan.Quantizer(bitplan.get_format("uint5"), scaling=scaling)
    assert torch.equal(quantizer.decode(quantizer.encode(x), x), by_keywords)
    assert torch.equal(bitplan.quantize(x, bitplan.get_format("uint5"), scale=scaling), by_keywords)


# --- mistakes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "wider"),
    [
        ("fp32", torch.bfloat16, torch.float32),
        ("tf32", torch.bfloat16, torch.float32),
        ("fp16", torch.bfloat16, torch.float32),
        ("bf16", torch.float16, torch.float32),
        ("fp32", torch.float16, torch.float32),
        ("e5m2b0", torch.float16, torch.bfloat16),
        ("e6m1", torch.float16, torch.bfloat16),
        ("e4m3b16", torch.float16, torch.bfloat16),
        ("e8m23b1", torch.float32, torch.float64),
        ("e8m3b-2", torch.float32, torch.float64),
        ("int10", torch.bfloat16, torch.float16),
        ("int13", torch.float16, torch.float32),
        ("int16", torch.bfloat16, torch.float32),
    ],
)
def test_a_format_whose_values_the_type_cannot_hold_raises(name: str, dtype: torch.dtype, wider: torch.dtype) -> None:
    x = sample(10)
    with pytest.raises(FormatError) as caught:
        bitplan.quantize(x.to(dtype), name)
    sentence = f"{dtype} cannot hold the values of {name}: convert the tensor to a wider type first."
    assert str(caught.value) == sentence
    with pytest.raises(FormatError, match="cannot hold"):
        bitplan.pack(x.to(dtype), name)
    assert bitplan.quantize(x.to(wider), name).dtype == wider


X = torch.ones(4, 6)
MISTAKES: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    ((torch.arange(5), "e4m3"), {}, "only float32, bfloat16, float16 and float64 tensors .* not torch.int64"),
    ((torch.ones(2, dtype=torch.bool), "int8"), {}, "not torch.bool"),
    ((torch.ones(2, dtype=torch.complex64), "e4m3"), {}, "not torch.complex64"),
    ((torch.ones(2).to(torch.float8_e5m2), "e4m3"), {}, "not torch.float8_e5m2"),
    (([1.0, 2.0], "e4m3"), {}, "not list"),
    ((X, "e4m4x"), {}, "there is no number format 'e4m4x'; did you mean .*e4m3"),
    ((X, "mxfp5"), {}, "did you mean .*mxfp[468]"),
    ((X, "int1"), {}, "needs 2 to 16 bits, not 1"),
    ((X, "int17"), {}, "needs 2 to 16 bits, not 17"),
    ((X, "e9m3"), {}, "1 to 8 exponent bits and 0 to 23 mantissa bits, not 9 and 3"),
    ((X, "e4m24"), {}, "1 to 8 exponent bits and 0 to 23 mantissa bits, not 4 and 24"),
    ((X, 8), {}, "given by its name, such as 'e4m3' or 'int8', not by 8"),
    ((X, "e4m3", "nearst"), {}, "no rounding 'nearst'; did you mean nearest"),
    ((X, "e4m3"), {"scale": "chanel"}, "no scale 'chanel'; did you mean channel"),
    ((X, "e4m3"), {"scale": "row"}, "no scale 'row'"),
    ((X, "e4m3"), {"scale": "channel"}, "scale='channel' needs axis="),
    ((X, "e4m3"), {"scale": "vector"}, "scale='vector' needs axis="),
    ((X, "e4m3"), {"scale": "tensor", "axis": 0}, "drop axis=, or use 'channel' or 'vector'"),
    ((X, "e4m3"), {"scale": "channel", "axis": 2}, r"axis 2 does not exist in a tensor of shape \(4, 6\)"),
    ((X, "e4m3"), {"scale": "block", "axis": -3, "block": 2}, "axis -3 does not exist"),
    ((X, "mxfp8"), {"axis": 5}, "axis 5 does not exist"),
    ((torch.tensor(1.0), "int8"), {"scale": "channel", "axis": 0}, "axis 0 does not exist"),
    ((X, "e4m3"), {"axis": 0}, "axis= goes with a scale"),
    ((X, "e4m3"), {"scale": "block"}, "scale='block' needs block="),
    ((X, "e4m3"), {"scale": "block", "block": 0}, "scale='block' needs block="),
    ((X, "e4m3"), {"scale": "channel", "axis": 0, "block": 4}, "block= belongs to scale='block'"),
    ((X, "e4m3"), {"scale": "vector", "block": (2, 2)}, "block= belongs to scale='block'"),
    ((X, "e4m3"), {"scale": "block", "block": (2, 2, 2)}, "scale='block' needs block="),
    ((X, "e4m3"), {"scale": "block", "block": (2, 0)}, "scale='block' needs block="),
    ((X, "e4m3"), {"scale": "block", "block": (2, 2), "axis": 1}, "lies along two axes"),
    ((X, "e4m3"), {"scale": "block", "block": 2, "axis": (0, 1)}, "lies along two axes"),
    ((X, "e4m3"), {"scale": "block", "block": (2, 2), "axis": (0, -2)}, "names one axis"),
    ((X, "mxfp4"), {"block": 16}, "mxfp4 has blocks of 32: drop block="),
    ((X, "mxfp4"), {"block": (2, 2), "range": "amax"}, "mxfp4 brings its own block scales: drop range="),
    ((X, "e4m3"), {"block": 4}, "give scale= too"),
    ((X, "e4m3"), {"power_of_two": True}, "give scale= too"),
    ((X, "int8"), {"range": "minmax"}, "give scale= too"),
    ((X, "int8"), {"scale": "tensor", "range": "max"}, "range is 'amax' or 'minmax', not 'max'"),
    ((X, "e4m3"), {"scale": "tensor", "range": "minmax"}, "serves integer formats, not e4m3: use range='amax'"),
    ((X, "uint8"), {}, "uint8 counts steps above a minimum: give it scale='tensor'"),
    ((X, "mxfp4"), {"scale": "tensor"}, "mxfp4 brings its own block scales: drop scale="),
    ((X, "int8"), {"scale": Scaling("tensor"), "power_of_two": True}, "a Scaling says all about the scale"),
    ((X, "e4m3"), {"overflow": "wrap"}, "overflow is 'saturate' or 'special', not 'wrap'"),
    ((X, "int8"), {"overflow": "special"}, "int8 has no special codes .* use overflow='saturate'"),
    ((X, "mxfp8"), {"overflow": "special"}, "mxfp8 has no special codes"),
]


@pytest.mark.parametrize(("arguments", "keywords", "sentence"), MISTAKES, ids=[case[2] for case in MISTAKES])
def test_a_mistake_is_one_sentence_that_says_what_to_do(
    arguments: tuple[Any, ...], keywords: dict[str, Any], sentence: str
) -> None:
    for function in (bitplan.quantize, bitplan.pack):
        with pytest.raises(BitplanError, match=sentence) as caught:
            function(*arguments, **keywords)
        text = str(caught.value)
        assert "\n" not in text
        assert ". " not in text
        assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("name", ["int8", "uint8", "e4m3"])
@pytest.mark.parametrize("shape", [(5, 3), (3,), (), (2, 1)])
def test_a_block_longer_than_its_axis_is_as_long_as_the_axis(name: str, shape: tuple[int, ...]) -> None:
    """A block of 2^31 - 1 used to be padded to its length."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    whole = bitplan.quantize(x, name, scale="block", block=max([*shape, 1]))
    longest = (1 << 31) - 1
    assert torch.equal(bitplan.quantize(x, name, scale="block", block=longest), whole)
    assert torch.equal(bitplan.pack(x, name, scale="block", block=longest).unpack(), whole)
    tile = bitplan.quantize(x, name, scale="block", block=[longest, longest])
    assert torch.equal(tile, bitplan.quantize(x, name, scale="tensor"))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (lambda: torch.eye(3).to_sparse(), "sparse_coo"),
        (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested"),
        (lambda: torch.eye(3).to_mkldnn(), "mkldnn"),
    ],
)
def test_tensors_that_are_not_dense_are_refused_in_a_sentence(make: Any, layout: str) -> None:
    for name, options in KINDS:
        for function in (bitplan.quantize, bitplan.pack):
            with pytest.raises(BitplanError, match=layout):
                function(make(), name, **options)


def test_a_view_with_the_negative_bit_is_rounded_as_its_values() -> None:
    negative = torch.randn(4, 6, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    for name, options in KINDS:
        assert torch.equal(
            bitplan.quantize(negative, name, **options), bitplan.quantize(negative.clone(), name, **options)
        )
        packed = bitplan.pack(negative, name, **options).unpack()
        assert torch.equal(packed, bitplan.pack(negative.clone(), name, **options).unpack())


def test_the_result_of_a_view_with_gaps_is_dense() -> None:
    """As :func:`bitplan.quantize` says."""
    x = torch.randn(8, 9)
    assert bitplan.quantize(x.t(), "e4m3").stride() == (1, 9)
    assert bitplan.quantize(x[::2, 1::3], "e4m3").stride() == (3, 1)


@pytest.mark.parametrize(("name", "options"), [("mxfp8", {}), ("nvfp4", {}), ("int8", {"scale": "block", "block": 16})])
def test_the_result_of_blocks_can_be_written_into(name: str, options: dict[str, Any]) -> None:
    """As the output of any operation of a model, which an in-place operation may follow."""
    for columns in (16, 32, 5, 40):
        rounded = bitplan.quantize(torch.randn(4, columns, requires_grad=True), name, **options)
        rounded.mul_(2.0).sum().backward()
