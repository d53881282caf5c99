"""Native execution and promotion on a CUDA device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bitplan
from bitplan import Plan
from bitplan.native.units import units_of

pytestmark = pytest.mark.gpu

TENSOR: dict[str, Any] = {"scale": "tensor"}
VECTOR: dict[str, Any] = {"scale": "vector"}
PLANS: dict[str, dict[str, Any]] = {
    "fp8 tensor": {
        "x": {"format": "e4m3", **TENSOR},
        "w": {"format": "e4m3", **TENSOR},
        "dy": {"format": "e5m2", **TENSOR},
    },
    "fp8 vector": {one: {"format": "e4m3", **VECTOR} for one in ("fprop", "dgrad", "wgrad")},
    "int8 tensor": {operand: {"format": "int8", **TENSOR} for operand in ("x", "w", "dy")},
    "int8 vector": {one: {"format": "int8", **VECTOR} for one in ("fprop", "dgrad", "wgrad")},
}


def plan_of(rule: dict[str, Any]) -> Plan:
    return Plan.from_dict({"version": 1, "rules": [{"match": "*", "op": "linear", **rule}]})


def gradients(execution: str, plan: Plan, compiled: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 128)).cuda().bfloat16()
    x = torch.randn(8, 64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    options: dict[str, Any] = {"native_from": 0} if execution == "native" else {}
    with bitplan.attach(model, plan, example=x, execution=execution, **options) as run:
        if execution == "native":
            assert run.fallbacks() == []
        y = (run.compile() if compiled else model)(x)
        (y * torch.linspace(-1, 1, y.numel(), device="cuda").view_as(y)).sum().backward()
    return [y.detach().float(), *(p.grad.float() for p in (x, *model.parameters()) if p.grad is not None)]


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("compiled", [False, True])
def test_native_agrees_with_emulate(name: str, compiled: bool) -> None:
    if name.split()[0] not in {unit.name for unit in units_of(torch.device("cuda"))}:
        pytest.skip(f"this GPU has no {name.split()[0]} unit")
    torch._dynamo.reset()
    plan = plan_of(PLANS[name])
    for native, emulated in zip(gradients("native", plan, compiled), gradients("emulate", plan, False), strict=True):
        # Emulation rounds scaled operands to bfloat16 before it multiplies them; what lies between may round elsewhere.
        assert (native - emulated).norm() <= 2e-2 * emulated.norm()


def test_promotion_waits_for_nothing() -> None:
    low = {"format": "e4m3b4none", "promote": {"to": "bf16"}}
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()
    x = 1000 * torch.randn(32, 64, device="cuda")
    plan = Plan.from_dict({"version": 1, "rules": [{"match": "*", "activation": low, "weight": low}]})
    with bitplan.attach(model, plan, example=x) as run:
        model(x).sum().backward()
        run.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(x).sum().backward()
            run.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert {each.site for each in run.promotions()} >= {"0/linear.0:activation"}
