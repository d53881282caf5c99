"""Grouped products of expert layers in FP8 on a CUDA device: the numbers of emulation, up to the order of sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F

import bitplan as bp
from bitplan.compiler import gated_fusion
from bitplan.executions.native.backends import multiplies_groups

pytestmark = pytest.mark.gpu

#: Sizes that are no multiples of anything; one group is empty.
ENDS = (37, 37, 130, 301)


@pytest.fixture(autouse=True)
def _has_kernel() -> None:
    if not multiplies_groups(torch.device("cuda")):
        pytest.skip("only Hopper multiplies groups in FP8")
    torch._dynamo.reset()


class Experts(nn.Module):
    """Experts with a row for each output, or for each input."""

    def __init__(self, is_transposed: bool) -> None:
        super().__init__()
        shape = (128, 256) if is_transposed else (256, 128)
        self.weight = nn.Parameter(torch.randn(len(ENDS), *shape, device="cuda", dtype=torch.bfloat16))
        self.register_buffer("offsets", torch.tensor(ENDS, dtype=torch.int32, device="cuda"))
        self.is_transposed = is_transposed

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.transpose(-2, -1) if self.is_transposed else self.weight
        return F.grouped_mm(x, weight, offs=self.offsets)


ROW: dict[str, Any] = {"format": "e4m3", "scale": "vector", "power_of_two": True}
TENSOR: dict[str, Any] = {"format": "e4m3", "scale": "tensor", "power_of_two": True}
SLOTS = ("fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x")
OPERANDS = {
    "rows": dict.fromkeys(SLOTS, ROW),
    "tensor": dict.fromkeys(("x", "w", "dy"), TENSOR),
    "past steps": {operand: {**TENSOR, "history": 2} for operand in ("x", "w", "dy")},
}


def step(scales: str, is_transposed: bool, execution: Any, is_compiled: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    model = Experts(is_transposed)
    x = torch.randn(ENDS[-1], 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    plan = {"version": 1, "rules": [{"match": "*", **OPERANDS[scales]}]}
    with bp.attach(model, plan, example=x, execution=execution) as run:
        called = run.compile() if is_compiled else model
        dy = torch.randn(ENDS[-1], 128, device="cuda", dtype=torch.bfloat16)
        for _ in range(2):  # the second step has scales of the first
            x.grad = model.weight.grad = None
            y = called(x)
            y.backward(dy)
            run.step()
        if isinstance(execution, bp.Native):
            assert list(run.fallbacks()) == []
    assert x.grad is not None
    assert model.weight.grad is not None
    return [y.detach(), x.grad, model.weight.grad]


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("is_transposed", [True, False])
@pytest.mark.parametrize("scales", OPERANDS)
def test_native_differs_from_emulate_by_the_order_of_sums_only(
    scales: str, is_transposed: bool, is_compiled: bool
) -> None:
    native = step(scales, is_transposed, bp.Native(min_macs=0), is_compiled)
    emulated = step(scales, is_transposed, "emulate")
    assert not native[2][1].any()  # the expert without tokens
    for ours, expected in zip(native, emulated, strict=True):
        gap = float((ours - expected).float().norm() / expected.float().norm())
        assert gap < 5e-3


class GatedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shapes = {"gate": (512, 256), "up": (512, 256), "down": (256, 512)}
        for name, shape in shapes.items():
            weight = torch.randn(len(ENDS), *shape, device="cuda", dtype=torch.bfloat16) / shape[1] ** 0.5
            setattr(self, name, nn.Parameter(weight))
        self.register_buffer("offsets", torch.tensor(ENDS, dtype=torch.int32, device="cuda"))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (weight.transpose(-2, -1) for weight in (self.gate, self.up, self.down))
        hidden = F.silu(F.grouped_mm(x, gate, offs=self.offsets)) * F.grouped_mm(x, up, offs=self.offsets)
        return F.grouped_mm(hidden, down, offs=self.offsets)


def gated_steps(recompute: Any) -> tuple[list[Tensor], list[str]]:
    """Results and gradients of the last of three steps, and the code that Inductor made."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GatedExperts()
    x, dy = (torch.randn(ENDS[-1], 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    plan = {"version": 1, "rules": [{"match": "*", **OPERANDS["past steps"]}]}
    with bp.attach(model, plan, example=x, execution=bp.Native(min_macs=0, recompute=recompute)) as run:
        called = run.compile()

        def step() -> Tensor:
            x.grad = None
            model.zero_grad(set_to_none=True)
            y: Tensor = called(x)
            y.backward(dy)
            run.step()
            return y.detach()

        with torch._inductor.config.patch(force_disable_caches=True):
            _, codes = run_and_get_code(step)
        step()
        y = step()
    assert x.grad is not None
    return [y, x.grad, *(weight.grad for weight in model.parameters() if weight.grad is not None)], codes


@pytest.mark.parametrize("recompute", [(), "weights"])
def test_gates_of_experts_have_the_bits_of_two_kernels(monkeypatch: pytest.MonkeyPatch, recompute: Any) -> None:
    results = []
    for fuses in (True, False):
        monkeypatch.setattr(gated_fusion, "FUSES", fuses)
        result, codes = gated_steps(recompute)
        assert len(codes) == 2
        assert ("_cast_gated_tile" in codes[0]) == ("_cast_grads_tile" in codes[1]) == fuses
        results.append(result)
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
