"""Gradients of gradients under a plan, as in gradient penalties: rounding passes them straight through."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bitplan as bp

FINE = {"format": "int16", "scale": "tensor"}
ROTATED = {"format": "int16", "scale": "tensor", "rotate": "hadamard", "rotate_size": 8}


def penalty_gradients(rules: dict[str, Any] | None) -> list[Tensor]:
    """The gradients of a penalty on the gradient by the input, for each weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    x = torch.randn(8, 16, requires_grad=True)
    if rules is not None:
        plan = {"version": 1, "rules": [{"match": "*", **rules}]}
        bp.attach(model, plan, example=x.detach(), execution="emulate")
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (slope.square().sum(1) - 1).square().mean().backward()
    grads = [model[0].weight.grad, model[0].bias.grad, model[2].weight.grad]
    assert all(grad is not None for grad in grads)
    return [grad for grad in grads if grad is not None]


@pytest.mark.parametrize(
    "rules",
    [
        {"op": "linear", "dgrad.dy": FINE},
        {"op": "linear", "dgrad": FINE},
        {"op": "linear", "dgrad": {**FINE, "rounding": "stochastic"}},
        {"op": "linear", "dgrad": {"format": "int16", "scale": "tensor", "promote": {"to": "bf16", "underflow": 0.9}}},
        {"op": "linear", "fprop": FINE, "dgrad": FINE, "wgrad": FINE},
        {"op": "linear", "x": FINE, "w": FINE, "dy": FINE},
        {"op": "linear", "wgrad": ROTATED, "dgrad": FINE},
        {"weight": FINE, "activation": FINE, "grad_activation": FINE},
    ],
    ids=str,
)
def test_a_gradient_penalty_is_that_without_a_plan_up_to_rounding(rules: dict[str, Any]) -> None:
    for planned, plain in zip(penalty_gradients(rules), penalty_gradients(None), strict=True):
        error = ((planned - plain).norm() / plain.norm()).item()
        assert 0 < error < 2e-3


def test_coarse_formats_change_it_more() -> None:
    plain = penalty_gradients(None)[0]
    errors = [
        ((penalty_gradients({"op": "linear", "dgrad": {"format": name, "scale": "tensor"}})[0] - plain).norm()).item()
        for name in ("int16", "int8", "int4")
    ]
    assert 20 * errors[0] < errors[1] < errors[2] / 3
