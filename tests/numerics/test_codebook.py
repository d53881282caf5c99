"""Code books: NF4's published values, and rounding, packing and compiled code against a search of all values."""

import math
from fractions import Fraction
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import Tensor

import bitplan as bp
from bitplan.errors import FormatError
from bitplan.numerics.formats import CodebookFormat, get_format
from bitplan.numerics.noise import random_bits, unit_interval
from bitplan.numerics.quantizer import Quantizer
from bitplan.numerics.reference import ROUNDINGS, Rounding, round_value
from bitplan.numerics.scaling import Scaling

#: Ties that float32 represents, numbers next to them, and a zero that is no value of the book.
UNEVEN = CodebookFormat("uneven", (-3.0, -1.0, -0.25, 0.5, 0.75, 1.0, 2.5))
NF4 = get_format("nf4")
BOOKS = [NF4, UNEVEN, CodebookFormat("pair", (-1.0, 1.0)), CodebookFormat("wide", tuple(map(float, range(-100, 101))))]


def inputs(target: CodebookFormat, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values, midpoints, their neighbours, random numbers and special ones."""
    book = torch.tensor(target.book, dtype=torch.float64)
    middles = (book[1:] + book[:-1]) / 2
    exact = torch.cat([book, middles, book * 1.5]).to(dtype)
    around = [torch.nextafter(exact, torch.full_like(exact, limit)) for limit in (-math.inf, math.inf)]
    drawn = torch.randn(2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * target.max
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e30, -1e30, 1e-30], dtype=dtype)
    return torch.cat([exact, *around, drawn.to(dtype), special])


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


def test_nf4_has_the_published_values() -> None:
    assert isinstance(NF4, CodebookFormat)
    assert (NF4.bits, NF4.max, NF4.min, NF4.bits_per_value) == (4, 1.0, -1.0, 4.0)
    # Appendix E of the paper: quantiles of the normal distribution, 8 of them positive, 7 negative, and zero.
    offset = 0.9677083
    quantile = NormalDist().inv_cdf
    positive = np.array([quantile(share) for share in np.linspace(offset, 0.5, 9)[:-1]])
    negative = -np.array([quantile(share) for share in np.linspace(offset, 0.5, 8)[:-1]])
    expected = np.sort(np.concatenate([positive, [0.0], negative]))
    assert np.allclose(NF4.values(), expected / np.abs(expected).max(), atol=2e-7)
    assert NF4.values()[7] == 0.0


@pytest.mark.parametrize("target", BOOKS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nearest_is_the_nearest_of_all_values(target: CodebookFormat, dtype: torch.dtype) -> None:
    x = inputs(target, dtype)
    rounded = Quantizer(target).quantize(x)
    for value, result in zip(x.tolist(), rounded.tolist(), strict=True):
        if math.isnan(value):
            assert math.isnan(result)
            continue
        if math.isinf(value):
            assert result == (target.book[-1] if value > 0 else target.book[0])
            continue
        distances = [abs(Fraction(value) - Fraction(number)) for number in target.book]
        least = min(distances)
        nearest = [code for code, distance in enumerate(distances) if distance == least]
        assert result == target.book[next((code for code in nearest if code % 2 == 0), nearest[0])]


@pytest.mark.parametrize("target", BOOKS, ids=str)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_eager_compiled_and_reference_agree(target: CodebookFormat, rounding: Rounding) -> None:
    x = inputs(target)[-700:] if len(target.book) > 100 else inputs(target)
    quantizer = Quantizer(target, rounding)
    rounded = quantizer.quantize(x, seed=3)
    uniforms = unit_interval(random_bits(x, 3, 0, 0), torch.float64).tolist()
    pairs = zip(x.tolist(), uniforms, strict=True)
    expected = [round_value(value, target, rounding, uniform=uniform) for value, uniform in pairs]
    assert same(rounded, torch.tensor(expected))
    if len(target.book) <= 16:
        torch.compiler.reset()
        compiled = torch.compile(lambda t: quantizer.quantize(t, seed=3), backend="aot_eager", fullgraph=True)
        assert same(compiled(x), rounded)


def test_inductor_gives_the_same_bits_with_block_scales() -> None:
    quantizer = Quantizer(NF4, scaling=Scaling("block", block=64))
    x = torch.randn(8, 200, generator=torch.Generator().manual_seed(1))
    rounded = quantizer.quantize(x)
    assert torch.equal(torch.compile(quantizer.quantize)(x), rounded)
    assert len(rounded[0, :64].unique()) <= 16
    packed = bp.pack(x, "nf4", scale="block", block=64)
    assert torch.equal(packed.unpack(), rounded)
    assert packed.nbytes == 8 * 200 // 2 + 8 * 4 * 4


def test_stochastic_rounding_has_the_right_mean() -> None:
    x = torch.full((200_000,), 0.6)
    mean = Quantizer(NF4, "stochastic").quantize(x, seed=0).mean().item()
    assert abs(mean - 0.6) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", ["tensor", "block"])
def test_packed_values_are_the_rounded_ones(dtype: torch.dtype, scale: str) -> None:
    x = torch.randn(5, 77, generator=torch.Generator().manual_seed(2)).to(dtype)
    options = {"block": 32} if scale == "block" else {}
    packed = bp.pack(x, "nf4", scale=scale, **options)
    assert torch.equal(packed.unpack(), bp.quantize(x, "nf4", scale=scale, **options))
    largest = x.abs().max()
    assert bp.quantize(x, "nf4", scale="tensor").abs().max() == largest  # the amax is a value of the grid


def test_nan_makes_its_block_nan_packed_or_not() -> None:
    x = torch.randn(2, 64)
    x[1, 3] = math.nan
    packed = bp.pack(x, "nf4", scale="block", block=64).unpack()
    assert packed[1].isnan().all()
    assert packed[0].isfinite().all()
    with pytest.raises(bp.BitplanError, match="NaN"):
        bp.pack(x, "nf4")


@pytest.mark.parametrize(
    ("book", "token"),
    [
        ((1.0,), "values"),
        ((0.0, math.inf), "finite"),
        ((1.0, 0.0), "ascending"),
        ((0.0, 0.0), "ascending"),
        ((0.0, 1e300), "float32"),
        (("a", "b"), "float32"),
        (tuple(map(float, range(257))), "256"),
    ],
)
def test_a_book_is_checked_when_it_is_made(book: tuple[float, ...], token: str) -> None:
    with pytest.raises(FormatError, match=token):
        CodebookFormat("mine", book)


def test_values_that_a_dtype_cannot_hold_are_refused() -> None:
    with pytest.raises(FormatError, match="nf4"):
        bp.quantize(torch.randn(4, dtype=torch.bfloat16), "nf4")
    with pytest.raises(bp.BitplanError, match="nf4"):
        bp.quantize(torch.randn(4), "nf4", overflow="special")
