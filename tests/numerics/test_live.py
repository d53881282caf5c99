"""A format whose parameters lie in a tensor: one compiled graph for all of a kind, and the constant format's bits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import bitplan
from bitplan.errors import FormatError, QuantizeError
from bitplan.numerics.formats import Overflow
from bitplan.numerics.mutable_format import MutableFormat
from bitplan.numerics.reference import ROUNDINGS, Rounding

PATTERN = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16}

FLOATS = (
    *("fp32", "tf32", "bf16", "fp16", "e5m2", "e4m3", "e3m4", "e3m2", "e2m3", "e2m1"),
    *("e6m9b0", "e5m2b0", "e4m3b4", "e4m3ns", "e8m0", "e3m0none", "e1m3none", "e2m5b3"),
)
#: Fewer than 12 bits decide whether a stochastic rounding goes up where float32 carries them.
COARSE = ("e4m13", "e5m20")
#: They overflow to NaN, or a multiplication cannot find what exceeds their largest value.
NO_TENSOR_OVERFLOW = ("e4m3", "e4m3ns", "e1m3none", "e2m5b3")


def any_floats(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random patterns: every exponent, subnormals, infinities and NaNs."""
    generator = torch.Generator().manual_seed(6)
    high, low = (torch.randint(-(1 << 31), 1 << 31, (count,), generator=generator) for _ in range(2))
    pattern = {torch.float64: (high << 32) ^ low, torch.float32: high.to(torch.int32)}.get(dtype, high.to(torch.int16))
    return pattern.view(dtype)


def differing(ours: Tensor, expected: Tensor) -> int:
    pattern = PATTERN[ours.dtype]
    return int(((ours.view(pattern) != expected.view(pattern)) & ~(ours.isnan() & expected.isnan())).sum())


def in_every_rounding(x: Tensor, target: Any, **scale: Any) -> list[Tensor]:
    return [bitplan.quantize(x, target, rounding, seed=2, step=3, site=4, **scale) for rounding in ROUNDINGS]


def assert_one_graph_serves(names: tuple[str, ...], live: MutableFormat, x: Tensor, **scale: Any) -> None:
    """Compiled once, the graph gives each format's own bits; the formats differ, so none of them can be stuck."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(lambda x: in_every_rounding(x, live, **scale), fullgraph=True, backend=counter)
    seen = []
    for name in (*names, names[0]):
        live.set_(name)
        ours = compiled(x)
        for rounding, first, constant in zip(ROUNDINGS, ours, in_every_rounding(x, name, **scale), strict=True):
            assert differing(first, constant) == 0, (name, rounding)
        seen.append(ours[0].nan_to_num())
    assert counter.frame_count == 1
    assert all(not torch.equal(first, second) for first, second in itertools.pairwise(seen))
    assert torch.equal(seen[0], seen[-1])


def test_one_graph_serves_every_float() -> None:
    assert_one_graph_serves(FLOATS, MutableFormat("e4m3"), any_floats(3000))


def test_one_graph_serves_every_symmetric_integer() -> None:
    names = tuple(f"int{bits}" for bits in range(2, 17))
    x = torch.cat([torch.arange(-200, 200) / 2.0, any_floats(600)])
    assert_one_graph_serves(names, MutableFormat("int8"), x)


def test_one_graph_serves_every_affine_integer_under_a_scale() -> None:
    names = tuple(f"uint{bits}" for bits in range(1, 17))
    x = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    assert_one_graph_serves(names, MutableFormat("uint8"), x, scale="channel", axis=0)


@pytest.mark.parametrize(
    "scale",
    [
        {"scale": "tensor"},
        {"scale": "vector", "axis": 1, "power_of_two": True},
        {"scale": "block", "block": 7},
    ],
    ids=str,
)
def test_scaled_live_formats_equal_constant_ones(scale: dict[str, Any]) -> None:
    x = torch.randn(6, 50, generator=torch.Generator().manual_seed(1)) * 5
    for names in (("e4m3", "e5m2", "e2m1", "e4m3b4"), ("int8", "int3"), ("uint8", "uint3")):
        live = MutableFormat(names[0])
        for name in names:
            live.set_(name)
            for ours, constant in zip(
                in_every_rounding(x, live, **scale), in_every_rounding(x, name, **scale), strict=True
            ):
                assert differing(ours, constant) == 0, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("overflow", [None, "saturate", "special"])
def test_every_rounding_and_overflow_is_the_constant_formats(dtype: torch.dtype, overflow: Overflow | None) -> None:
    x = any_floats(4000, dtype)
    for name in (*FLOATS, *(COARSE if dtype == torch.float64 else ())):
        if overflow == "special" and name in NO_TENSOR_OVERFLOW:
            with pytest.raises(FormatError, match="use overflow='saturate' with it"):
                MutableFormat(name, dtype=dtype, overflow=overflow)
            continue
        live = MutableFormat(name, dtype=dtype, overflow=overflow)
        for rounding in ROUNDINGS:
            ours = bitplan.quantize(x, live, rounding, seed=1)
            constant = bitplan.quantize(x, name, rounding, seed=1, overflow=overflow)
            assert differing(ours, constant) == 0, (name, rounding)


def test_bfloat16_inputs_use_the_float32_row() -> None:
    x = any_floats(4000, torch.bfloat16)
    live = MutableFormat("e4m3")
    for name in ("e4m3", "e2m1", "e5m2"):
        live.set_(name)
        ours = bitplan.quantize(x, live)
        assert ours.dtype == torch.bfloat16
        assert differing(ours, bitplan.quantize(x, name)) == 0


def test_a_row_of_a_table_is_written_in_place() -> None:
    """A table of sites keeps its storage, and only its own row changes."""
    alone = MutableFormat("e4m3")
    table = torch.full((3, len(alone.row)), -1, dtype=alone.row.dtype)
    where = table.data_ptr()
    live = MutableFormat("e4m3", row=table[1])
    assert torch.equal(table[1], alone.row)
    live.set_("e2m1")
    assert live.row.data_ptr() == table[1].data_ptr()
    assert table.data_ptr() == where
    assert torch.equal(table[1], MutableFormat("e2m1").row)
    assert bool((table[[0, 2]] == -1).all())
    x = torch.randn(50)
    assert torch.equal(bitplan.quantize(x, live), bitplan.quantize(x, "e2m1"))


@pytest.mark.parametrize("name", ["e4m3", "e2m1", "int8", "uint4", "bf16"])
def test_the_largest_value_is_on_the_device(name: str) -> None:
    live = MutableFormat(name)
    assert live.max.shape == ()
    assert float(live.max) == bitplan.get_format(name).max


def test_the_gradient_passes_straight_through() -> None:
    x = torch.randn(20, requires_grad=True)
    upstream = torch.randn(20)
    (grad,) = torch.autograd.grad(bitplan.quantize(x, MutableFormat("e4m3")), x, upstream)
    assert torch.equal(grad, upstream)


# --- mistakes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "sentence"),
    [
        ("e4m3", "int8", "int8 cannot replace a live float format: one graph serves one kind."),
        ("int8", "e4m3", "e4m3 cannot replace a live symmetric integer format: one graph serves one kind."),
        ("int8", "uint8", "uint8 cannot replace a live symmetric integer format: one graph serves one kind."),
        ("uint8", "int8", "int8 cannot replace a live unsigned integer format: one graph serves one kind."),
        ("e4m3", "mxfp8", "mxfp8 cannot replace a live float format: one graph serves one kind."),
        ("e4m3", "e8m3b4", "e8m3b4 cannot be live in float32 arithmetic: use it as a constant format."),
        ("e4m3", "e4m13", "e4m13 cannot be live in float32 arithmetic: use it as a constant format."),
    ],
)
def test_what_cannot_replace_a_format_says_so_and_leaves_the_row(first: str, second: str, sentence: str) -> None:
    live = MutableFormat(first)
    before = live.row.clone()
    with pytest.raises(FormatError) as caught:
        live.set_(second)
    assert str(caught.value) == sentence
    assert torch.equal(live.row, before)


def test_a_block_format_cannot_be_live() -> None:
    with pytest.raises(FormatError, match="mxfp4 cannot be live, only floats and integers can"):
        MutableFormat("mxfp4")


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda x, live: bitplan.quantize(x, live, overflow="saturate"), "give it to MutableFormat instead"),
        (lambda x, live: bitplan.quantize(x.double(), live), "make it with dtype=torch.float64"),
        (
            lambda x, live: bitplan.quantize(x, live, scale="tensor", range="minmax"),
            "not a live float: use range='amax'",
        ),
        (
            lambda x, live: bitplan.quantize(x, MutableFormat("int8"), scale="tensor", range="minmax"),
            "not a live int: make a uint live instead",
        ),
        (lambda x, live: bitplan.quantize(x, MutableFormat("uint8")), "give it scale='tensor'"),
        (lambda x, live: bitplan.pack(x, live), "a live format has no fixed width"),
        (lambda x, live: bitplan.quantize(x.int(), live), "not torch.int32"),
    ],
)
def test_a_mistake_is_one_sentence(call: Any, sentence: str) -> None:
    with pytest.raises(QuantizeError, match=sentence):
        call(torch.ones(3), MutableFormat("e4m3"))


def test_a_float64_format_refuses_float32_inputs() -> None:
    with pytest.raises(QuantizeError, match=r"make it with dtype=torch\.float32"):
        bitplan.quantize(torch.ones(3), MutableFormat("e4m3", dtype=torch.float64))


def test_rounding_is_checked_as_everywhere() -> None:
    wrong: Rounding = "up"  # type: ignore[assignment]
    with pytest.raises(QuantizeError, match="there is no rounding 'up'"):
        bitplan.quantize(torch.ones(3), MutableFormat("e4m3"), wrong)
