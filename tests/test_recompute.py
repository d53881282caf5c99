"""Packed execution with ``recompute: aggressive``: less is saved for the backward pass; numbers stay the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import bitplan as bp
from bitplan.analysis.memory import measure_memory
from bitplan.errors import PlanError

PLAN = {"version": 1, "execution": {"kind": "packed", "recompute": "aggressive"}, "rules": []}


class Block(nn.Module):
    """Two products with operations between them that are expensive enough for torch to save their results."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.silu(self.first(x))
        return self.second(torch.tanh(y).sin() * y)


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("plan", [PLAN, {**PLAN, "rules": [{"match": "first", "activation": "e4m3"}]}])
def test_less_is_saved_and_gradients_are_the_same(plan: dict[str, object]) -> None:
    torch.manual_seed(0)
    model, x = Block(), torch.randn(512, 64)
    planned = bp.Plan.from_dict(plan)
    plain = bp.Plan.from_dict({**plan, "execution": "packed"})
    saved = {}
    for name, variant in (("plain", plain), ("aggressive", planned)):
        saved[name] = measure_memory(model, x, optimizer=None, plan=variant, compile=True, steps=2).activations
    assert saved["aggressive"] <= saved["plain"]
    gradients = []
    for variant in (plain, planned):
        with bp.attach(model, variant, example=x) as run:
            run.compile()(x).square().mean().backward()
        gradients.append(model.first.weight.grad)
        model.zero_grad()
    assert gradients[0] is not None
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-7)
    without_rules = measure_memory(model, x, optimizer=None, compile=True, steps=2).activations
    assert saved["aggressive"] < without_rules


def test_a_plan_keeps_it_through_yaml() -> None:
    plan = bp.Plan.from_dict(PLAN)
    assert bp.Plan.from_yaml(plan.to_yaml()).declared_execution == bp.Packed("aggressive")
    assert bp.Packed() == bp.Packed(None) != bp.Packed("aggressive")


@pytest.mark.parametrize("recompute", ["inputs", ["aggressive", "weights"], 3])
def test_other_values_are_refused(recompute: object) -> None:
    with pytest.raises(PlanError, match="aggressive"):
        bp.Plan.from_dict({**PLAN, "execution": {"kind": "packed", "recompute": recompute}})


def test_native_execution_has_its_own_choices() -> None:
    with pytest.raises(PlanError, match="aggressive"):
        bp.Native(recompute="aggressive")
    with pytest.raises(PlanError, match="recompute"):
        bp.Plan.from_dict({**PLAN, "execution": {"kind": "native", "recompute": "aggressive"}})
