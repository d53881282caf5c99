"""Compiled rounding equals eager rounding bit for bit. Few graphs with many outputs: each costs seconds to compile."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bitplan
from bitplan.numerics.formats import FloatFormat, Overflow
from bitplan.numerics.reference import ROUNDINGS, Rounding, round_value

Case = tuple[str, Rounding, dict[str, Any]]
PATTERN = {
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.uint8: torch.uint8,
}


def differing(ours: Tensor, expected: Tensor) -> int:
    """How many elements differ in any bit; all NaNs are one."""
    assert (ours.dtype, ours.shape, ours.stride()) == (expected.dtype, expected.shape, expected.stride())
    pattern = PATTERN[ours.dtype]
    other = ours.contiguous().view(pattern) != expected.contiguous().view(pattern)
    return int((other & ~(ours.isnan() & expected.isnan())).sum())


def rounded(x: Tensor, cases: list[Case]) -> list[Tensor]:
    return [bitplan.quantize(x, name, rounding, seed=5, step=2, site=1, **more) for name, rounding, more in cases]


def assert_compiled_equals_eager(x: Tensor, cases: list[Case]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: rounded(x, cases), fullgraph=True)(x)
    for case, ours, eager in zip(cases, compiled, rounded(x, cases), strict=True):
        assert differing(ours, eager) == 0, case
        assert differing(ours, x) > 0 or case[0] == "fp32", case


def any_floats(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random patterns: every exponent, subnormals, infinities and NaNs; then both zeros."""
    generator = torch.Generator().manual_seed(3)
    high, low = (torch.randint(-(1 << 31), 1 << 31, (count,), generator=generator) for _ in range(2))
    pattern = {torch.float64: (high << 32) ^ low, torch.float32: high.to(torch.int32)}.get(dtype, high.to(torch.int16))
    x = pattern.view(dtype)
    x[:2] = torch.tensor([0.0, -0.0], dtype=dtype)
    return x


def spread(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(*shape, generator=generator) * torch.exp2(
        torch.randint(-6, 7, shape, generator=generator).float()
    )


UNSCALED: list[Case] = [
    # Each way through the code: magic addition, prefix addition, bit addition, carried by float64 (e8m3b1).
    *((name, "nearest", {}) for name in ("fp32", "tf32", "bf16", "fp16", "e5m2", "e4m3", "e3m4", "e2m1")),
    *((name, "nearest", {}) for name in ("e4m3b4", "e6m9b0", "e8m0", "e4m3ns", "e8m3b1", "int8")),
    # The other roundings differ from "nearest" in how they add bits: each of them on each of these ways at least once.
    *((name, rounding, {}) for rounding in ROUNDINGS[1:] for name in ("e4m3", "e8m3b1")),
    ("bf16", "stochastic", {}),
    ("e8m0", "nearest-away", {}),
    ("int8", "toward-zero", {}),
    *((name, "nearest", {"overflow": "special"}) for name in ("e4m3", "e4m3b4", "e5m2", "e2m1")),
    *((name, "nearest", {"overflow": "saturate"}) for name in ("bf16", "fp16")),
    *((name, "nearest-away", {"overflow": "special"}) for name in ("e4m3", "e5m2b0", "e6m9b0", "e4m3ns")),
    *((name, "nearest-away", {"overflow": "saturate"}) for name in ("e4m3b4", "e6m9b0", "e4m3ns")),
    ("e4m3", "toward-zero", {"overflow": "special"}),
    ("fp16", "stochastic", {"overflow": "special"}),
]
NARROW: list[Case] = [
    *((name, "nearest", {}) for name in ("e4m3", "e5m2", "e2m1")),
    ("e4m3", "stochastic", {}),
    ("int4", "nearest", {"scale": "tensor"}),
    ("mxfp8", "nearest", {}),
]


def test_unscaled_roundings_of_all_floats() -> None:
    assert_compiled_equals_eager(any_floats(5001), UNSCALED)


def ties_and_neighbours(target: FloatFormat) -> Tensor:
    codes = range(min(200, 2 ** (target.bits - 1)))
    values = torch.tensor([value for code in codes if math.isfinite(value := target.decode(code))], dtype=torch.float64)
    grid = torch.cat([values, target.max * (1 - torch.arange(40, dtype=torch.float64) * target.epsilon / 2)]).unique()
    ties = torch.cat(
        [(grid[1:] + grid[:-1]) / 2, torch.tensor([target.overflow_threshold, math.inf, math.nan])]
    ).float()
    beside = [torch.nextafter(ties, torch.tensor(end)) for end in (0.0, math.inf)]
    return torch.cat([sign * item for sign in (1, -1) for item in (ties, *beside, grid.float())])


def test_ties_away_from_zero_and_their_neighbours() -> None:
    """Random floats hardly ever are ties; here is every one near both ends of the range, and what lies beside it."""
    overflows: tuple[Overflow, ...] = ("saturate", "special")
    names = ("e4m3b4", "e5m2b0", "e6m9b0", "e3m2", "e4m3ns")
    targets = {name: bitplan.get_format(name) for name in names}
    inputs = {name: ties_and_neighbours(target) for name, target in targets.items() if isinstance(target, FloatFormat)}
    assert len(inputs) == len(names)
    # One graph, and inputs of one length, which Inductor puts into one loop.
    length = max(map(len, inputs.values()))
    padded = {name: nn.functional.pad(x, (0, length - len(x))) for name, x in inputs.items()}
    cases = [(name, overflow) for name in names for overflow in overflows]

    def away(inputs: dict[str, Tensor]) -> list[Tensor]:
        return [bitplan.quantize(inputs[name], name, "nearest-away", overflow=overflow) for name, overflow in cases]

    torch._dynamo.reset()
    for (name, overflow), compiled in zip(cases, torch.compile(away, fullgraph=True)(padded), strict=True):
        x, target = inputs[name], targets[name]
        expected = [round_value(value, target, "nearest-away", overflow) for value in x.tolist()]
        assert differing(compiled[: len(x)], torch.tensor(expected)) == 0, (name, overflow)
        to_even = bitplan.quantize(x, name, overflow=overflow)
        assert differing(compiled[: len(x)], to_even) > 10, (name, overflow)  # ties to even are others


def operations(rounding: Rounding) -> int:
    """Of the graph of one rounding."""
    counts = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        counts.append(sum(node.op in ("call_function", "call_method") for node in graph.graph.nodes))
        return graph.forward

    torch._dynamo.reset()
    torch.compile(lambda x: bitplan.quantize(x, "e4m3b4", rounding), backend=count, fullgraph=True)(torch.randn(9))
    return sum(counts)


def test_ties_away_from_zero_take_few_operations() -> None:
    """A model has hundreds of roundings, and minutes went by until all of them were compiled."""
    assert operations("nearest") < operations("nearest-away") <= operations("nearest") + 4
    assert 2 * operations("nearest-away") < operations("stochastic")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_other_input_types(dtype: torch.dtype) -> None:
    assert_compiled_equals_eager(any_floats(2000, dtype), NARROW[:4])
    assert_compiled_equals_eager(spread(40, 50).to(dtype), NARROW[4:])


SCALED: list[Case] = [
    ("int4", "nearest", {"scale": "tensor"}),
    ("e4m3", "nearest", {"scale": "tensor"}),
    ("uint8", "stochastic", {"scale": "channel", "axis": 0}),
    ("int8", "nearest-away", {"scale": "channel", "axis": 1}),
    ("e5m2", "toward-zero", {"scale": "vector", "axis": 1, "power_of_two": True}),
    ("uint3", "nearest", {"scale": "block", "block": 4}),
    ("e2m1", "stochastic", {"scale": "block", "block": 12, "power_of_two": True}),
]
#: 50 and 5 are multiples of no block here: the last one is ragged.
BLOCKS: list[Case] = [
    ("mxfp4", "stochastic", {}),
    ("mxint8", "nearest-away", {}),
    ("nvfp4", "nearest", {"axis": 0}),
    ("uint4", "nearest", {"scale": "block", "block": 20}),
    ("uint4", "nearest", {"scale": "block", "block": (3, 20)}),
    ("nvfp4", "stochastic", {"block": (16, 16)}),
]


def test_scaled_roundings() -> None:
    assert_compiled_equals_eager(spread(12, 50), SCALED)


def test_blocks_with_ragged_ends_in_two_layouts() -> None:
    """Inductor's C++ loops once left such an end unwritten."""
    assert_compiled_equals_eager(spread(12, 50), BLOCKS)
    x = spread(3, 40, 5, 6).to(memory_format=torch.channels_last)
    assert_compiled_equals_eager(x, [("mxfp4", "stochastic", {"axis": 1})])


def test_a_cut_through_the_blocks_reads_what_was_rounded() -> None:
    """The user's own cut falls inside a block, where the same fault of Inductor's would strike."""

    def cut(x: Tensor) -> Tensor:
        return bitplan.quantize(x, "mxfp4")[:, :50] * 2

    torch._dynamo.reset()
    x = spread(12, 64)
    assert differing(torch.compile(cut, fullgraph=True)(x), cut(x)) == 0


def test_packing_and_unpacking() -> None:
    cases: list[Case] = [
        ("int3", "stochastic", {}),  # 300 codes fill no whole bytes: scalar loops, where the hash once came out wrong
        ("fp16", "nearest", {}),
        ("mxfp4", "nearest", {}),
        ("uint5", "nearest", {"scale": "block", "block": (3, 20)}),
    ]

    def packed(x: Tensor) -> list[Tensor]:
        result = []
        for name, rounding, more in cases:
            p = bitplan.pack(x, name, rounding, seed=5, **more)
            result += [p.payload, *p.scales, p.unpack()]
        return result

    torch._dynamo.reset()
    x = spread(6, 50)
    for ours, eager in zip(torch.compile(packed, fullgraph=True)(x), packed(x), strict=True):
        assert differing(ours, eager) == 0


def test_the_gradient_is_straight_through() -> None:
    def loss(x: Tensor, weight: Tensor) -> Tensor:
        rounded = bitplan.quantize(x, "e4m3", "stochastic", seed=5) + bitplan.quantize(x, "mxfp4")
        return (rounded * weight).sum()

    torch._dynamo.reset()
    x, weight = spread(6, 50).requires_grad_(), spread(6, 50)
    (ours,) = torch.autograd.grad(torch.compile(loss, fullgraph=True)(x, weight), x)
    assert torch.equal(ours, 2 * weight)


def test_gradients_are_rounded_per_consumer_of_the_parts_of_a_tensor() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            one, two = self.first(x).chunk(2, -1)
            return one * two.tanh()

    torch.manual_seed(0)
    model, x = Split(), torch.randn(4, 8)
    rule = {"match": "*", "activation": "e4m3b4", "grad_activation": "e5m2b0", "grad_at": "consumer"}
    gradients = []
    with bitplan.attach(model, bitplan.Plan.from_dict({"version": 1, "rules": [rule]}), example=x):
        for called in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
            model.zero_grad()
            called(x).square().sum().backward()
            assert model.first.weight.grad is not None
            gradients.append(model.first.weight.grad.clone())
    assert torch.equal(*gradients)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_scales_at_the_extremes_of_a_dtype(dtype: torch.dtype) -> None:
    """Rows: next to the largest value, a range wider than it, an infinity and a NaN."""
    top = torch.finfo(dtype).max
    rows = [
        [top, 1.0, 0.3 * top],
        [top, -top, 0.1 * top],
        [0.99 * top, 0.9 * top, 0.0],
        [math.inf, 1, 2],
        [math.nan, 1, 2],
    ]
    scales: list[dict[str, Any]] = [{"scale": "vector", "axis": 1, "power_of_two": value} for value in (False, True)]
    cases: list[Case] = [(name, "nearest", more) for name in ("int8", "uint8", "e4m3") for more in scales]
    assert_compiled_equals_eager(torch.tensor(rows, dtype=dtype), [*cases, ("nvfp4", "nearest", {})])
