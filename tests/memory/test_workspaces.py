"""What kernels take for themselves on a CPU: our formulas beside the allocator's own events, operation by operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitplan.analysis.memory import estimate_memory, measure_memory
from bitplan.analysis.memory.measure import HostAllocator
from bitplan.analysis.memory.workspaces import TEMPORARY_BYTES

aten = torch.ops.aten
pytestmark = pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX512"),
    reason="what oneDNN takes was looked at where a register holds 16 floats",
)
#: Of input and result together: scratch pads of some KB are not counted.
NEAR = 0.03


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    weight: tuple[int, ...]
    stride: int = 1
    padding: int = 1
    dilation: int = 1
    groups: int = 1
    transposed: bool = False
    dtype: torch.dtype = torch.float32
    is_last: bool = False

    def arguments(self) -> tuple[Any, ...]:
        x, weight = torch.randn(self.shape).to(self.dtype), torch.randn(self.weight).to(self.dtype)
        if self.is_last:
            x, weight = (item.to(memory_format=torch.channels_last) for item in (x, weight))
        axes = len(self.shape) - 2
        places = [[value] * axes for value in (self.stride, self.padding, self.dilation)]
        return x, weight, None, *places, self.transposed, [0] * axes, self.groups


CASES = {
    "3x3": Case((64, 16, 32, 32), (16, 16, 3, 3)),
    "a few channels": Case((64, 3, 32, 32), (8, 3, 3, 3)),
    "odd channels": Case((64, 5, 32, 32), (7, 5, 3, 3)),
    "strided": Case((64, 16, 32, 32), (32, 16, 3, 3), stride=2),
    "1x1": Case((64, 16, 32, 32), (4, 16, 1, 1), padding=0),
    "1x1 of a few channels": Case((64, 8, 32, 32), (4, 8, 1, 1), padding=0),
    "by channel": Case((64, 16, 32, 32), (16, 1, 3, 3), groups=16),
    "in groups": Case((64, 16, 32, 32), (16, 4, 3, 3), groups=4),
    "dilated": Case((64, 16, 32, 32), (16, 16, 3, 3), padding=2, dilation=2),
    "transposed": Case((64, 16, 32, 32), (16, 16, 2, 2), stride=2, padding=0, transposed=True),
    "transposed to a few channels": Case((64, 16, 32, 32), (16, 8, 4, 4), stride=2, transposed=True),
    "sequences": Case((64, 16, 256), (16, 16, 5), padding=2),
    "sequences of a few channels": Case((64, 4, 256), (16, 4, 5), padding=2),
    "volumes": Case((16, 2, 12, 12, 12), (8, 2, 3, 3, 3)),
    "bfloat16": Case((64, 16, 32, 32), (16, 16, 3, 3), dtype=torch.bfloat16),
    "float64": Case((16, 16, 32, 32), (16, 16, 3, 3), dtype=torch.float64),
    "channels last": Case((64, 16, 32, 32), (16, 16, 3, 3), is_last=True),
}


def size(*tensors: Tensor | None) -> int:
    return sum(0 if tensor is None else tensor.numel() * tensor.element_size() for tensor in tensors)


def taken(operation: Any, *arguments: Any) -> tuple[Any, int]:
    """The result, and the most bytes that lived beside it."""
    operation(*arguments)  # what is made once is there already
    with HostAllocator() as allocator:
        result = operation(*arguments)
    return result, allocator.peak - size(*(result if isinstance(result, tuple) else (result,)))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_convolutions_forth(case: Case) -> None:
    arguments = case.arguments()
    result, measured = taken(aten.convolution.default, *arguments)
    reported = TEMPORARY_BYTES[aten.convolution.default](result, *arguments)
    assert abs(reported - measured) < NEAR * size(arguments[0], result)


@pytest.mark.parametrize("requests", [(True, True), (False, True), (True, False)], ids=["both", "weight", "input"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_convolutions_back(case: Case, requests: tuple[bool, bool]) -> None:
    x, weight, bias, *how = case.arguments()
    result = aten.convolution.default(x, weight, bias, *how)
    arguments = (torch.randn_like(result), x, weight, None, *how, [*requests, False])
    results, measured = taken(aten.convolution_backward.default, *arguments)
    reported = TEMPORARY_BYTES[aten.convolution_backward.default](results, *arguments)
    assert abs(reported - measured) < NEAR * size(x, result)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_empty_batch_is_foreseen(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8).eval(), nn.AdaptiveAvgPool2d(1)).to(dtype)
    empty = torch.zeros(0, 3, 8, 8, dtype=dtype)
    assert estimate_memory(model, empty, torch.sum, "none").activations == empty.element_size()  # the loss alone


class UNet(nn.Module):
    """Batch norms, a concatenation whose gradient comes in parts, and both ways to make images larger."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = self.block(3, 8), self.block(8, 16)
        self.up, self.wide = nn.ConvTranspose2d(16, 16, 2, stride=2), nn.Upsample(scale_factor=2, mode="bilinear")
        self.mixed, self.last = self.block(32, 8), nn.Conv2d(8, 4, 1)

    @staticmethod
    def block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        fine = self.deep(self.down(x))
        coarse = F.max_pool2d(fine, 2)
        return self.last(self.mixed(torch.cat([self.up(coarse), self.wide(coarse)], 1)))


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.LSTM(32, 64, 2, batch_first=True), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[0][:, -1])


def frozen() -> nn.Module:
    """What is fine-tuned: only its last convolution and its head."""
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.AdaptiveAvgPool2d(1)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 5))
    model[0].requires_grad_(False)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "unet": (UNet, (16, 3, 32, 32), (32, 32)),
    "lstm": (Sequences, (32, 20, 32), ()),
    "frozen": (frozen, (32, 3, 32, 32), ()),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_peak_is_foreseen_within_two_per_cent(name: str) -> None:
    torch.manual_seed(0)
    make, shape, places = MODELS[name]
    step = (make(), (torch.randn(shape), torch.zeros(shape[0], *places, dtype=torch.int64)), F.cross_entropy, "sgd")
    assert estimate_memory(*step).peak == pytest.approx(measure_memory(*step, steps=2).peak, rel=0.02)
