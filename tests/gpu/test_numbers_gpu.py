"""Rounding on a CUDA device: the bits of the CPU, eager and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import bitplan
from bitplan.numerics.mutable_format import MutableFormat
from bitplan.numerics.noise import random_bits
from bitplan.numerics.reference import ROUNDINGS, Rounding

pytestmark = pytest.mark.gpu

Case = tuple[str, Rounding, dict[str, Any]]
PATTERN = {
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.uint8: torch.uint8,
}
FLOATS = (
    *("fp32", "tf32", "bf16", "fp16", "e5m2", "e4m3", "e3m4", "e3m2", "e2m3", "e2m1"),
    *("e6m9b0", "e5m2b0", "e4m3b4", "e4m3ns", "e8m0", "e8m3b1", "e1m0none"),
)
UNSCALED: list[Case] = [
    *((name, rounding, {}) for name in (*FLOATS, "int8") for rounding in ROUNDINGS),
    *((name, "nearest", {"overflow": "special"}) for name in ("e5m2", "e4m3", "e2m1", "e4m3b4", "fp16")),
    *((name, "nearest", {"overflow": "saturate"}) for name in ("bf16", "fp16")),
]
SCALED: list[Case] = [
    (name, rounding, scale)
    for rounding in ("nearest", "stochastic")
    for name, scale in (
        ("int4", {"scale": "tensor"}),
        ("e4m3", {"scale": "tensor"}),
        ("int8", {"scale": "channel", "axis": 0}),
        ("uint8", {"scale": "channel", "axis": 1}),
        ("e5m2", {"scale": "vector", "axis": 1, "power_of_two": True}),
        ("uint3", {"scale": "block", "block": 12}),
        ("e2m1", {"scale": "block", "block": 4, "axis": 0}),
        ("mxfp8", {}),
        ("mxfp6", {"axis": 0}),
        ("mxfp4", {}),
        ("mxint8", {}),
        ("nvfp4", {}),
    )
]


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
    size = torch.exp2(torch.randint(-6, 7, shape, generator=generator).float())
    return torch.randn(*shape, generator=generator) * size


def differing(ours: Tensor, expected: Tensor) -> int:
    """How many elements differ in any bit; all NaNs are one."""
    assert ours.is_cuda
    ours = ours.cpu()
    assert (ours.dtype, ours.shape, ours.stride()) == (expected.dtype, expected.shape, expected.stride())
    pattern = PATTERN[ours.dtype]
    other = ours.contiguous().view(pattern) != expected.contiguous().view(pattern)
    return int((other & ~(ours.isnan() & expected.isnan())).sum())


def rounded(x: Tensor, cases: list[Case]) -> list[Tensor]:
    return [bitplan.quantize(x, name, rounding, seed=5, step=2, site=1, **more) for name, rounding, more in cases]


def wrong_cases(ours: list[Tensor], expected: list[Tensor], cases: list[Case]) -> list[tuple[Case, int]]:
    counted = [(case, differing(*pair)) for case, *pair in zip(cases, ours, expected, strict=True)]
    return [item for item in counted if item[1]]


def assert_cuda_equals_cpu(x: Tensor, cases: list[Case]) -> None:
    expected = rounded(x, cases)
    on_device = x.cuda()
    assert wrong_cases(rounded(on_device, cases), expected, cases) == []
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: rounded(x, cases), fullgraph=True)
    assert wrong_cases(compiled(on_device), expected, cases) == []


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_unscaled_roundings_of_all_floats(rounding: Rounding) -> None:
    assert_cuda_equals_cpu(any_floats(1 << 18), [case for case in UNSCALED if case[1] == rounding])


def test_scaled_roundings_and_blocks_with_ragged_ends() -> None:
    assert_cuda_equals_cpu(spread(33, 50), SCALED)


def test_channels_last() -> None:
    x = spread(3, 40, 5, 6).to(memory_format=torch.channels_last)
    cases: list[Case] = [
        ("e4m3", "stochastic", {}),
        ("int8", "nearest", {"scale": "channel", "axis": 1}),
        ("mxfp4", "stochastic", {"axis": 1}),
    ]
    assert_cuda_equals_cpu(x, cases)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_other_input_types(dtype: torch.dtype) -> None:
    cases: list[Case] = [(name, rounding, {}) for name in ("e4m3", "e5m2", "e2m1", "int8") for rounding in ROUNDINGS]
    assert_cuda_equals_cpu(any_floats(1 << 16, dtype), cases)
    assert_cuda_equals_cpu(spread(20, 50).to(dtype), SCALED[:4])


def test_random_bits_are_the_cpus() -> None:
    cpu = random_bits(torch.empty(1000, 33), 7, 1 << 40, 3)
    assert torch.equal(random_bits(torch.empty(1000, 33, device="cuda"), 7, 1 << 40, 3).cpu(), cpu)
    counters = [torch.tensor(value, device="cuda") for value in (7, 1 << 40, 3)]
    assert torch.equal(random_bits(torch.empty(1000, 33, device="cuda"), *counters).cpu(), cpu)


def test_one_graph_serves_every_float() -> None:
    x = any_floats(1 << 16)
    live = MutableFormat("e4m3", device="cuda")
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")

    def by_row(x: Tensor) -> list[Tensor]:
        return [bitplan.quantize(x, live, rounding, seed=2) for rounding in ROUNDINGS]

    compiled = torch.compile(by_row, fullgraph=True, backend=counter)
    for name in ("e4m3", "e5m2", "bf16", "fp16", "e2m1", "e4m3b4", "e8m0", "e4m3ns"):
        live.set_(name)
        expected = [bitplan.quantize(x, name, rounding, seed=2) for rounding in ROUNDINGS]
        for ours, eager, cpu in zip(compiled(x.cuda()), by_row(x.cuda()), expected, strict=True):
            assert differing(ours, cpu) == 0, name
            assert differing(eager, cpu) == 0, name
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("e2m3", {}),
        ("int3", {}),
        ("fp16", {}),
        ("int5", {"scale": "channel", "axis": 0}),
        ("uint4", {"scale": "block", "block": 12}),
        ("mxfp4", {}),
        ("mxint8", {}),
        ("nvfp4", {}),
    ],
)
def test_packed_bytes_are_the_cpus_and_move_between_devices(name: str, scale: dict[str, Any]) -> None:
    x = spread(6, 50)
    on_cpu = bitplan.pack(x, name, "stochastic", seed=1, **scale)

    def packed(x: Tensor) -> tuple[Tensor, ...]:
        p = bitplan.pack(x, name, "stochastic", seed=1, **scale)
        return p.payload, *p.scales, p.unpack()

    torch._dynamo.reset()
    expected = (on_cpu.payload, *on_cpu.scales, on_cpu.unpack())
    for way in (packed, torch.compile(packed, fullgraph=True)):
        for ours, theirs in zip(way(x.cuda()), expected, strict=True):
            assert differing(ours, theirs) == 0
    moved = on_cpu.to("cuda")
    assert moved.device.type == "cuda"
    assert moved.nbytes == on_cpu.nbytes
    assert differing(moved.unpack(), on_cpu.unpack()) == 0


def test_the_gradient_passes_straight_through_on_the_device() -> None:
    x = spread(6, 50).cuda().requires_grad_()
    upstream = spread(6, 50).cuda()
    for call in (bitplan.quantize, torch.compile(bitplan.quantize, fullgraph=True)):
        result = call(x, "mxfp8")
        assert result.device == x.device
        (grad,) = torch.autograd.grad(result, x, upstream)
        assert torch.equal(grad, upstream)


def test_rounding_waits_for_nothing() -> None:
    """No value is read back to the host, so a step's kernels queue up and CUDA graphs can be captured."""
    x = spread(64, 96).cuda()
    live = MutableFormat("e4m3", device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            x.sum().item()  # the mode does notice
        for name, rounding, more in (*UNSCALED, *SCALED):
            bitplan.quantize(x, name, rounding, seed=1, **more)
        bitplan.quantize(x, live, "stochastic", seed=1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
