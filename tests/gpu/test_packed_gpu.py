"""Packed execution on a CUDA device: the numbers of emulate, in fewer bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bitplan
from bitplan.lab.models.resnet import cifar_resnet
from bitplan.numerics.chunks import chunked_on_gpu
from bitplan.numerics.packing import pack_rounded
from bitplan.numerics.quantizer import make_quantizer
from bitplan.plans import Plan

pytestmark = pytest.mark.gpu

PLANS = {
    "float8": {"activation": "e4m3", "grad_activation": "e5m2"},
    "int8": {"activation": {"format": "int8", "scale": "tensor"}, "grad_activation": "e5m2"},
    "int4": {"activation": {"format": "int4", "scale": "channel", "range": "minmax"}},
}


def plan_of(places: dict[str, Any]) -> Plan:
    return Plan.from_dict({"version": 1, "rules": [{"match": "*", **places}]})


def trained(model: nn.Module, plan: Plan, x: Tensor, execution: str, compiled: bool) -> tuple[list[Tensor], int]:
    """Output and gradients of one step, and the bytes that lived on the device between forward and backward."""
    torch.compiler.reset()
    twin = copy.deepcopy(model)
    with bitplan.attach(twin, plan, example=x, execution=execution) as run:
        forward = run.compile() if compiled else twin
        if compiled:
            forward(x)  # compiles
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = forward(x)
        kept = torch.cuda.memory_allocated() - before
        y.square().mean().backward()
    return [y.detach(), *(p.grad for p in twin.parameters())], kept


@pytest.fixture
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("name", PLANS)
def test_eager_packed_equals_emulate_in_fewer_bytes(name: str) -> None:
    torch.manual_seed(0)
    model, x = cifar_resnet(8).cuda(), torch.randn(64, 3, 32, 32, device="cuda")
    emulated, much = trained(model, plan_of(PLANS[name]), x, "emulate", compiled=False)
    packed, little = trained(model, plan_of(PLANS[name]), x, "packed", compiled=False)
    assert all(torch.equal(a, b) for a, b in zip(emulated, packed, strict=True))
    assert little < much / 3


@pytest.mark.usefixtures("_deterministic")
def test_compiled_packed_equals_emulate_in_fewer_bytes() -> None:
    torch.manual_seed(0)
    model, x = cifar_resnet(8).cuda(), torch.randn(64, 3, 32, 32, device="cuda")
    emulated, much = trained(model, plan_of(PLANS["float8"]), x, "emulate", compiled=True)
    packed, little = trained(model, plan_of(PLANS["float8"]), x, "packed", compiled=True)
    assert all(torch.equal(a, b) for a, b in zip(emulated, packed, strict=True))
    assert little < much / 2


def bytes_on_the_way(work: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """A result, and the most that was taken for it and beside it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = work()
    return result, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", ["e4m3b4", "e6m9b0", "e3m2"])
def test_sparing_memory_large_tensors_are_rounded_and_packed_in_parts(name: str, layout: torch.memory_format) -> None:
    x = (torch.randn(64, 64, 64, 64, device="cuda") * 9).to(memory_format=layout)
    size = x.numel() * x.element_size()
    quantizer = make_quantizer(name, "toward-zero", overflow="saturate")
    whole, much = bytes_on_the_way(lambda: quantizer.round_values(x, None))
    with chunked_on_gpu():
        y, little = bytes_on_the_way(lambda: quantizer.round_values(x, None))
        packed = pack_rounded(quantizer, y, ())
        back, beside = bytes_on_the_way(packed.unpack)
    assert torch.equal(y, whole)
    assert torch.equal(back, y)
    assert back.stride() == x.stride()
    assert little < 3 * size < 4 * size < much
    assert beside < 3 * size
