"""Activation checkpointing: a region that is recomputed in the backward pass is rounded as it was the first time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from bitplan import quantize
from bitplan.plans import SLOTS, Plan
from bitplan.runtime.attach import attach

NOISY = {"format": "e2m3", "rounding": "stochastic"}
RULES: dict[str, dict[str, Any]] = {
    "roles": {"match": "*", "weight": NOISY, "activation": NOISY, "grad_activation": NOISY, "grad_weight": NOISY},
    "slots": {"match": "*", **dict.fromkeys(SLOTS, NOISY)},
    "consumer": {"match": "*", "grad_activation": NOISY, "grad_at": "consumer"},
}

Region = Callable[..., Tensor]
Checkpoint = Callable[..., Tensor]


def plainly(function: Region, *inputs: Tensor) -> Tensor:
    return function(*inputs)


def reentrant(function: Region, *inputs: Tensor) -> Tensor:
    result: Tensor = checkpoint(function, *inputs, use_reentrant=True)
    return result


def hooked(function: Region, *inputs: Tensor) -> Tensor:
    result: Tensor = checkpoint(function, *inputs, use_reentrant=False)
    return result


def of_modules(net: Net, x: Tensor, run: Checkpoint) -> Tensor:
    for layer in net.layers:
        x = torch.relu(run(layer, x)) + x
    return x


def of_functions(net: Net, x: Tensor, run: Checkpoint) -> Tensor:
    for layer in net.layers:
        x = F.relu(run(lambda y, layer=layer: torch.tanh(layer(F.relu(y) * 1.1)), x)) * 0.9
    return x


def of_functions_with_a_weight(net: Net, x: Tensor, run: Checkpoint) -> Tensor:
    y = run(lambda x, w: torch.tanh(F.linear(x, w)), x, net.weight)
    return run(lambda y, w: torch.tanh(y @ w), y, net.weight.t())


def of_nested_functions(net: Net, x: Tensor, run: Checkpoint) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return torch.tanh(F.relu(x) * 1.3)

    return run(lambda x: net.layers[0](run(inner, x)) * 0.7, x) * 0.9


def with_a_fan_out(net: Net, x: Tensor, run: Checkpoint) -> Tensor:
    y = net.layers[0](x)
    return run(lambda y: torch.tanh(y) + torch.sigmoid(y), y) * 0.9


KINDS = [of_modules, of_functions, of_functions_with_a_weight, of_nested_functions, with_a_fan_out]


class Net(nn.Module):
    """A model whose forward is given."""

    def __init__(self, kind: Callable[..., Tensor], run: Checkpoint) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.kind, self.run = kind, run

    def forward(self, x: Tensor) -> Tensor:
        return self.kind(self, x, self.run)


def trained(
    kind: Callable[..., Tensor], run: Checkpoint, rule: dict[str, Any] | None, compiled: bool = False
) -> list[Tensor]:
    """The result and all gradients of a step, which is the second, so that the first one's bits are not reused."""
    model = Net(kind, run)
    x = torch.randn(5, 6, requires_grad=True)
    plan = Plan.from_dict({"version": 1, "rules": [] if rule is None else [rule]})
    with attach(model, plan, example=x if compiled else None) as attachment:
        attachment.step()
        called = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        y = called(x)
        y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]  # type: ignore[list-item]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpointed_region_equals_the_plain_one(kind: Callable[..., Tensor], rule: str) -> None:
    plain = trained(kind, plainly, RULES[rule])
    assert not same(plain, trained(kind, plainly, None))
    assert same(trained(kind, hooked, RULES[rule]), plain)
    assert same(trained(kind, reentrant, RULES[rule]), plain)


def of_both(net: Net, x: Tensor, run: Checkpoint) -> Tensor:
    x = F.relu(run(net.layers[0], x)) * 1.1
    return run(lambda y: torch.tanh(F.relu(net.layers[1](y) * 1.1)), x) * 0.9


@pytest.mark.parametrize("run", [hooked, reentrant])
def test_a_compiled_checkpointed_region_equals_the_plain_one(run: Checkpoint) -> None:
    torch._dynamo.reset()
    rule = {"match": "*", "weight": NOISY, "activation": NOISY, "grad_activation": "e3m2"}
    plain = trained(of_both, plainly, rule)
    assert not same(plain, trained(of_both, plainly, None))
    assert same(trained(of_both, run, rule, compiled=True), plain)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_sequence_equals_the_plain_one(use_reentrant: bool) -> None:
    x = torch.randn(4, 6)
    seen = []
    for segments in (0, 2):
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.ReLU()) for _ in range(4)))
        with attach(model, Plan.from_dict({"version": 1, "rules": [RULES["roles"]]})):
            x = x.detach().requires_grad_()
            torch.manual_seed(2)
            y = checkpoint_sequential(model, segments, x, use_reentrant=use_reentrant) if segments else model(x)
            y.sum().backward()
        seen.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    assert same(*seen)


def test_checkpointing_of_models_without_a_plan_goes_on_as_ever() -> None:
    other, x = nn.Linear(6, 6), torch.randn(3, 6, requires_grad=True)
    with attach(Net(of_functions, hooked), Plan.from_dict({"version": 1, "rules": [RULES["roles"]]})):
        for use_reentrant in (True, False):
            other.zero_grad()
            y = checkpoint(lambda x: other(x) * 2, x, use_reentrant=use_reentrant)
            y.sum().backward()
            assert torch.equal(y, other(x) * 2)
            assert torch.equal(other.bias.grad, torch.full((6,), 6.0))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_region_has_gradients_when_it_is_recorded(use_reentrant: bool) -> None:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.layer, x, use_reentrant=use_reentrant)  # type: ignore[no-any-return]

    model, x = Region(), torch.randn(2, 4, requires_grad=True)
    original = torch.utils.checkpoint.CheckpointFunction
    with attach(model, Plan.from_dict({"version": 1, "rules": [{"match": "*", "dy": "e2m1"}]}), example=x):
        dy = torch.randn(2, 4)
        model(x).backward(dy)
    assert torch.utils.checkpoint.CheckpointFunction is original
    assert torch.equal(model.layer.bias.grad, quantize(dy, "e2m1").sum(0))
