"""Grouped products of expert layers in FP8 on a CUDA device: the numbers of emulation, up to the order of sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bitplan as bp
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
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(len(ENDS), 128, 256, device="cuda", dtype=torch.bfloat16))
        self.register_buffer("offsets", torch.tensor(ENDS, dtype=torch.int32, device="cuda"))

    def forward(self, x: Tensor) -> Tensor:
        return F.grouped_mm(x, self.weight.transpose(-2, -1), offs=self.offsets)


ROW: dict[str, Any] = {"format": "e4m3", "scale": "vector", "power_of_two": True}
SLOTS = ("fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x")
PLAN = {"version": 1, "rules": [{"match": "*", **dict.fromkeys(SLOTS, ROW)}]}


def step(execution: Any, is_compiled: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    model = Experts()
    x = torch.randn(ENDS[-1], 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with bp.attach(model, PLAN, example=x, execution=execution) as run:
        y = (run.compile() if is_compiled else model)(x)
        y.backward(torch.randn_like(y))
        if isinstance(execution, bp.Native):
            assert [row.gemm_pass for row in run.fallbacks()] == ["wgrad"]
    assert x.grad is not None
    assert model.weight.grad is not None
    return [y.detach(), x.grad, model.weight.grad]


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.filterwarnings("ignore::bitplan.errors.BitplanWarning")
def test_native_differs_from_emulate_by_the_order_of_sums_only(is_compiled: bool) -> None:
    native, emulated = step(bp.Native(min_macs=0), is_compiled), step("emulate")
    for ours, expected in zip(native, emulated, strict=True):
        gap = float((ours - expected).float().norm() / expected.float().norm())
        assert gap < 5e-3
