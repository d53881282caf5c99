"""Formats that change while a plan is attached: no recompilation, and the numbers of a plan that had them at once."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import bitplan
from bitplan.plans import Plan
from bitplan.runtime.attach import Attachment, attach

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def plan_of(*rules: dict[str, Any], **named: Any) -> Plan:
    return Plan.from_dict({"version": 1, "quantizers": named, "rules": list(rules)})


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


def step_of(model: nn.Module, called: Any = None) -> list[Tensor]:
    model.zero_grad()
    y = (model if called is None else called)(X)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters())]  # type: ignore[union-attr]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


#: A rule for floats and one for integers, scaled, stochastic, with a range of their own, and slots.
RULES = [
    {"match": "*", "weight": "mine", "activation": "mine", "grad_activation": "mine"},
    {"match": "2", "x": "counts", "dgrad.dy": "counts", "grad_weight": "steps"},
]
KINDS = {
    "mine": {"rounding": "stochastic"},
    "counts": {"scale": "tensor"},
    "steps": {"scale": "tensor", "range": "minmax"},
}
FIRST = {"mine": "e4m3", "counts": "int8", "steps": "int8"}
LATER = [
    {"mine": "e2m3"},
    {"counts": "int3", "steps": "int5"},
    {"mine": "bf16", "counts": "int12"},
    {"mine": "e5m2", "steps": "int2"},
    {"mine": "e4m3", "counts": "int8", "steps": "int8"},
]


def live(formats: dict[str, str]) -> Plan:
    return plan_of(*RULES, **{name: {"format": formats[name], **kind} for name, kind in KINDS.items()})


def constant(formats: dict[str, str]) -> list[Tensor]:
    """The step of a plan whose formats are fixed from the start."""
    model = small()
    with attach(model, live(formats)):
        return step_of(model)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_changed_format_equals_one_that_was_there_from_the_start(is_compiled: bool) -> None:
    torch._dynamo.reset()
    model, formats, seen = small(), dict(FIRST), []
    with attach(model, live(formats), mutable_formats=True, example=X) as run:
        called = torch.compile(model, backend="aot_eager", fullgraph=True) if is_compiled else model
        assert same(step_of(model, called), constant(formats))
        counters.clear()
        for change in LATER:
            formats |= change
            for name, target in change.items():
                run.set_format(name, target)
            seen.append(step_of(model, called))
            assert same(seen[-1], constant(formats))
        assert not counters["stats"]  # nothing was compiled
    assert not any(same(first, second) for first, second in pairwise(seen))


def test_formats_whose_bits_the_plan_leaves_open_can_change_without_being_asked_for() -> None:
    model = nn.Tanh()
    with attach(model, plan_of({"match": "*", "activation": "mine"}, mine={"format": "float", "bits": 16})) as run:
        assert torch.equal(model(X), bitplan.quantize(torch.tanh(X), "bf16"))
        run.set_format("mine", "e8m2")
        assert torch.equal(model(X), bitplan.quantize(torch.tanh(X), "e8m2"))


def test_a_gradient_that_is_rounded_at_its_consumers_changes_its_format_too() -> None:
    model = small()
    rule = {"match": "0", "grad_activation": "mine", "grad_at": "consumer"}
    with attach(model, plan_of(rule, mine="e5m2"), mutable_formats=True) as run:
        first = step_of(model)
        run.set_format("mine", "e2m1")
        second = step_of(model)
    with attach(model, plan_of(rule, mine="e2m1")):
        assert same(step_of(model), second)
    assert not same(first, second)


def test_the_state_remembers_the_format_and_the_cost_both() -> None:
    plan = plan_of({"match": "*", "x": "mine", "w": "mine"}, mine={"format": "int8", "scale": "tensor"})

    def run_of() -> tuple[nn.Sequential, Attachment]:
        model = small()
        return model, attach(model, plan, mutable_formats=True, example=X)

    model, run = run_of()
    run.step()
    eight = run.cost().bit_operations
    run.set_format("mine", "int4")
    run.step()
    changed, state = step_of(model), run.state_dict()
    # Three products, of which two have both operands in the format and one (of dy) has one.
    assert eight < run.cost().bit_operations < 2 * eight
    run.detach()
    model, run = run_of()
    assert not same(step_of(model), changed)
    run.load_state_dict(state)
    assert same(step_of(model), changed)
    run.detach()


def test_what_cannot_change_says_so() -> None:
    model = small()
    plan = plan_of({"match": "*", "activation": "mine", "weight": "e4m3"}, mine="e4m3")
    with attach(model, plan) as run, pytest.raises(bitplan.errors.PlanError, match="attach with mutable_formats=True"):
        run.set_format("mine", "e5m2")
    with attach(model, plan, mutable_formats=True) as run:
        with pytest.raises(bitplan.errors.PlanError, match=r"'yours' names no format.* these can: mine"):
            run.set_format("yours", "e5m2")
        for target in ("int8", "mxfp8"):
            with pytest.raises(bitplan.errors.FormatError, match="one graph serves one kind"):
                run.set_format("mine", target)
        seen = step_of(model)
        with pytest.raises(bitplan.errors.FormatError, match="there is no number format"):
            run.set_format("mine", "e4m33x")
        assert same(step_of(model), seen)
