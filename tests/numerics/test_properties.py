"""What holds for any input, whatever the format and scale; and block formats in every rounding, counted out by hand."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import bitplan
from bitplan.numerics.formats import BlockFormat, FloatFormat, IntFormat
from bitplan.numerics.quantizer import make_quantizer
from bitplan.numerics.reference import Rounding, round_value

DETERMINISTIC: tuple[Rounding, ...] = ("nearest", "nearest-away", "toward-zero")
MX = ("mxfp8", "mxfp8e5m2", "mxfp6", "mxfp6e3m2", "mxfp4", "mxint8")

#: Numbers whose products and quotients with any scale stay normal: what a training run holds.
ordinary = st.floats(2.0**-60, 2.0**60, width=32)
signed = st.one_of(ordinary, ordinary.map(lambda value: -value), st.just(0.0))
rows = st.lists(signed, min_size=1, max_size=16)  # within one block of every block format
any_row = st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40)

EXACT: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("int2", "int8", "int16", *MX)),
    *((name, {"scale": "tensor", "power_of_two": True}) for name in ("int4", "int8", "e4m3", "e2m1", "e5m2")),
    ("int3", {"scale": "block", "block": 4, "power_of_two": True}),
]
SCALED: list[tuple[str, dict[str, Any]]] = [
    ("int4", {"scale": "tensor"}),
    ("int8", {"scale": "block", "block": 16}),
    ("uint4", {"scale": "tensor"}),
    ("e4m3", {"scale": "tensor"}),
    ("e2m1", {"scale": "vector", "axis": 0}),
]


@settings(deadline=None)
@given(rows, st.sampled_from(EXACT))
def test_rounding_twice_changes_nothing(values: list[float], kind: tuple[str, dict[str, Any]]) -> None:
    """Integers, scales that are powers of two, and MX, whose scale never leaves the binade of the largest number."""
    name, scale = kind
    once = bitplan.quantize(torch.tensor(values), name, **scale)
    assert torch.equal(bitplan.quantize(once, name, **scale), once)


@settings(deadline=None)
@given(rows, st.sampled_from([*SCALED, ("nvfp4", {})]))
def test_rounding_twice_under_any_other_scale_moves_only_the_last_bits(
    values: list[float], kind: tuple[str, dict[str, Any]]
) -> None:
    name, scale = kind
    once = bitplan.quantize(torch.tensor(values), name, **scale)
    again = bitplan.quantize(once, name, **scale)
    # NVFP4 stores its block scale in E4M3, which the second time can fall one step of 1/16 away.
    slack = 0.25 if name == "nvfp4" else 2.0**-20
    assert float((again - once).abs().max()) <= slack * float(once.abs().max())


@settings(deadline=None)
@given(rows, st.sampled_from([*EXACT, *SCALED, ("nvfp4", {})]), st.sampled_from(DETERMINISTIC))
def test_what_shares_a_scale_keeps_its_order(
    values: list[float], kind: tuple[str, dict[str, Any]], rounding: Rounding
) -> None:
    name, scale = kind
    if scale.get("scale") == "block":
        values = values[: scale["block"]]
    rounded = bitplan.quantize(torch.tensor(sorted(values)), name, rounding, **scale)
    assert bool((rounded[1:] >= rounded[:-1]).all())


@settings(deadline=None)
@given(rows, st.sampled_from([item for item in [*EXACT, *SCALED, ("nvfp4", {})] if item[0] != "uint4"]))
def test_whatever_is_symmetric_is_odd(values: list[float], kind: tuple[str, dict[str, Any]]) -> None:
    name, scale = kind
    x = torch.tensor(values)
    for rounding in DETERMINISTIC:
        mirrored = bitplan.quantize(-x, name, rounding, **scale)
        assert torch.equal(-mirrored, bitplan.quantize(x, name, rounding, **scale))


@settings(deadline=None)
@given(any_row, st.integers(2, 16))
def test_integers_stay_within_half_a_step(values: list[float], bits: int) -> None:
    number_format = IntFormat(bits)
    x = torch.tensor(values).clamp(number_format.min, number_format.max)
    error = (bitplan.quantize(x, number_format).double() - x.double()).abs()
    assert float(error.max()) <= 0.5


@settings(deadline=None)
@given(rows, st.sampled_from(["int3", "int8", "uint3", "uint8"]))
def test_scaled_integers_stay_within_half_a_step_of_their_scale(values: list[float], name: str) -> None:
    x = torch.tensor(values)
    quantizer = make_quantizer(name, scale="tensor")
    step = float(quantizer.encode(x).scales[0])
    error = float((quantizer.quantize(x).double() - x.double()).abs().max())
    assert error <= 0.5 * step * (1 + 2.0**-10) + 2.0**-22 * float(x.abs().max())


# --- blocks by hand ---------------------------------------------------------------------------------------


def mx_by_hand(row: list[float], target: BlockFormat, rounding: Rounding) -> list[float]:
    """OCP MX 1.0, 6.3, in fractions: the scale is 2^(floor(log2 amax) - emax), the rest is the element's rounding."""
    element = target.element
    emax = math.frexp(target.element_max)[1] - 1
    out = []
    for start in range(0, len(row), target.size):
        part = row[start : start + target.size]
        amax = max(map(abs, part))
        exponent = max(math.frexp(amax)[1] - 1 - emax, -127) if amax else -127
        scale = Fraction(2) ** exponent * Fraction(target.unit)
        for value in part:
            ready = Fraction(value) / scale
            rounded = round_value(float(ready), element, rounding, "saturate")
            out.append(math.copysign(float(Fraction(rounded) * scale), value if rounded == 0 else rounded))
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("rounding", DETERMINISTIC)
@pytest.mark.parametrize("name", MX)
def test_mx_blocks_in_every_rounding_and_type(name: str, rounding: Rounding, dtype: torch.dtype) -> None:
    """Ragged ends of 3 and 10 channels among them."""
    target = bitplan.get_format(name)
    assert isinstance(target, BlockFormat)
    generator = torch.Generator().manual_seed(2)
    for columns in (3, 10, 32, 42):
        x = torch.randn(9, columns, generator=generator) * torch.exp2(torch.arange(-4.0, 5.0))[:, None]
        x[0] = 0.0
        x[1, 1:] *= 2.0**-8
        x = x.to(dtype)
        ours = bitplan.quantize(x, name, rounding)
        by_hand = torch.tensor([mx_by_hand(row, target, rounding) for row in x.tolist()], dtype=torch.float64)
        assert torch.equal(ours, by_hand.to(dtype))


def block_neighbours(name: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Elements drawn at random, and the two grid points they may be, all in units of their block's scale."""
    target = bitplan.get_format(name)
    assert isinstance(target, BlockFormat)
    down = make_quantizer(name, "toward-zero").encode(x).elements
    drawn = make_quantizer(name, "stochastic")
    elements = drawn.encode(x, drawn.noise(x, 3, 0, 0)).elements
    grid = torch.tensor([value for value in target.element.values() if value >= 0])
    up = grid[(torch.searchsorted(grid, down.abs()) + 1).clamp(max=len(grid) - 1)].copysign(x.view(down.shape))
    return elements, down, up


@pytest.mark.parametrize("name", [*MX, "nvfp4"])
def test_stochastic_blocks_take_one_of_the_two_neighbours_without_bias(name: str) -> None:
    # All numbers of a block lie below the largest, which is exact, so that nothing saturates.
    x = torch.rand(4000, 32, generator=torch.Generator().manual_seed(0)) - 0.5
    x[:, ::16] = 1.0
    elements, down, up = block_neighbours(name, x)
    assert bool(((elements == down) | (elements == up)).all())
    went_up = (elements != down).double().mean()
    assert 0.2 < float(went_up) < 0.7
    rounded = bitplan.quantize(x, name, "stochastic", seed=3).double()
    nearest = bitplan.quantize(x, name).double()
    # The mean error of so many draws is small beside one draw's, from both sides.
    spread = float((rounded - x).std())
    assert spread > float((nearest - x).std())
    assert abs(float((rounded - x).mean())) < 5 * spread / math.sqrt(x.numel())


def test_elements_are_of_the_kinds_the_standard_names() -> None:
    """The hand-written rule above must not follow a wrong table."""
    result = {}
    for name in (*MX, "nvfp4"):
        target = bitplan.get_format(name)
        assert isinstance(target, BlockFormat)
        element = target.element
        largest = element.max if isinstance(element, FloatFormat) else element.max * target.unit
        result[name] = (element.bits, largest, target.size)
    assert result == {
        "mxfp8": (8, 448.0, 32),
        "mxfp8e5m2": (8, 57344.0, 32),
        "mxfp6": (6, 7.5, 32),
        "mxfp6e3m2": (6, 28.0, 32),
        "mxfp4": (4, 6.0, 32),
        "mxint8": (8, 127 / 64, 32),
        "nvfp4": (4, 6.0, 16),
    }
