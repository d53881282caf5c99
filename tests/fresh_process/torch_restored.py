"""Once no plan is attached to any model, torch is as it was, whether plans were detached or models just dropped.

Run by tests/test_fresh_process.py.
"""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.optim.optimizer as optimizers
import torch.utils.checkpoint as checkpointing
from torch import nn
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import get_overridable_functions
from torch._higher_order_ops import triton_kernel_wrap
from torch.nn import functional as F

import bitplan
from bitplan import Attachment, Plan
from bitplan.compiler import torch_patches
from bitplan.compiler.launching import KernelInliningPass

X = torch.randn(4, 8)
ROUNDED = {"match": "*", "weight": "e4m3", "activation": "e4m3", "grad_activation": "e5m2"}
OPERANDS = {"match": "*", "x": "e4m3", "dy": "e5m2"}
DELAYED = {"match": "*", "op": "linear", "x": {"format": "e4m3", "scale": "tensor", "history": 2}}


class Recurrent(nn.Module):
    """An LSTM, which torch.compile takes only with a setting of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.hardswish(self.head(self.lstm(x)[0]))


def state_of_torch() -> dict[str, Any]:
    """Everything in torch that bitplan changes while a plan is attached."""
    return {
        "checkpointing": dict(vars(checkpointing)),
        "hooks": list(optimizers._global_optimizer_pre_hooks.values()),
        "config": torch._dynamo.config.get_config_copy(),
        "functions": frozenset(get_overridable_functions()),
        "kernels": dict(vars(triton_kernel_wrap)),
        "attributes": TensorVariable.var_getattr,
    }


@pytest.fixture
def before() -> Iterator[dict[str, Any]]:
    for name in ("last_exc", "last_value", "last_traceback"):  # an earlier test that failed holds its models
        vars(sys).pop(name, None)
    torch._dynamo.reset()
    gc.collect()  # models that earlier tests dropped
    assert not torch_patches._holds, "an earlier test in this process leaked a model under a plan"
    yield state_of_torch()
    gc.collect()


def train(model: nn.Module, run: Attachment) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(X).square().sum().backward()
        optimizer.step()
        run.step()


def attached(model: nn.Module, rule: dict[str, Any], **options: Any) -> Attachment:
    return bitplan.attach(model, Plan.from_dict({"version": 1, "rules": [rule]}), **options)


def dropped(make: Callable[[], nn.Module], rule: dict[str, Any], trained: bool = True, **options: Any) -> Any:
    """A weak reference to a model that had a plan, and that nobody has any more."""
    model = make()
    run = attached(model, rule, **options)
    if trained:
        train(model, run)
    return weakref.ref(model)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="emulate"),
        pytest.param({"example": X}, id="example"),
        pytest.param({"execution": "packed"}, id="packed"),
        pytest.param({"execution": bitplan.Native(min_macs=0), "example": X}, id="native"),
        pytest.param({"stats": True}, id="stats"),
        pytest.param({"trained": False}, id="untrained"),
    ],
)
@pytest.mark.parametrize("rule", [ROUNDED, OPERANDS, DELAYED], ids=["rounded", "operands", "delayed"])
@pytest.mark.filterwarnings("ignore::bitplan.errors.BitplanWarning")
def test_dropping_a_model_without_detaching_restores_torch(
    before: dict[str, Any], rule: dict[str, Any], options: dict[str, Any]
) -> None:
    model = dropped(Recurrent, rule, **options)
    gc.collect()
    assert model() is None
    assert state_of_torch() == before


@pytest.mark.filterwarnings("ignore::bitplan.errors.BitplanWarning")
@pytest.mark.parametrize("execution", ["emulate", "packed", "native"])
def test_detaching_restores_torch_while_the_model_lives(before: dict[str, Any], execution: str) -> None:
    model = Recurrent()
    with attached(model, ROUNDED, execution=execution, example=X) as run:
        assert state_of_torch() != before
        train(model, run)
    assert state_of_torch() == before


def test_a_checked_plan_goes_with_its_model_at_once(before: dict[str, Any]) -> None:
    """Without a garbage collection: nothing that waits for the first batch refers to the model any more."""
    gc.disable()
    try:
        model = dropped(lambda: nn.Linear(8, 8), ROUNDED, example=X)
        assert model() is None
        assert state_of_torch() == before
    finally:
        gc.enable()


def test_a_compiled_model_that_is_dropped_restores_torch(before: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Hardswish())
    run = attached(model, ROUNDED, example=X)
    torch.compile(model, backend="aot_eager")(X).sum().backward()
    run.step()
    dead = weakref.ref(model)
    del model, run
    torch._dynamo.reset()
    gc.collect()
    assert dead() is None
    assert state_of_torch() == before


def test_torch_stays_changed_while_any_planned_model_lives(before: dict[str, Any]) -> None:
    first, second = Recurrent(), Recurrent()
    dead = weakref.ref(attached(first, OPERANDS, example=X))  # its attachment is dropped; the model goes on rounding
    run = attached(second, OPERANDS, example=X)
    twin = copy.deepcopy(second)
    gc.collect()
    assert dead() is None
    names = ("checkpointing", "config", "functions", "attributes")
    changed = {name: state_of_torch()[name] for name in names}
    assert all(changed[name] != before[name] for name in names)
    del second, run
    gc.collect()
    assert {name: state_of_torch()[name] for name in names} == changed
    del first
    gc.collect()
    assert {name: state_of_torch()[name] for name in names} == changed  # the copy follows the plan, too
    del twin
    gc.collect()
    assert state_of_torch() == before


def test_a_change_that_somebody_else_made_meanwhile_is_left_alone(
    before: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Theirs(torch.autograd.Function):
        pass

    with attached(nn.Linear(8, 8), ROUNDED):
        monkeypatch.setattr(checkpointing, "CheckpointFunction", Theirs)
    assert checkpointing.CheckpointFunction is Theirs
    checkpointing.CheckpointFunction = before["checkpointing"]["CheckpointFunction"]  # type: ignore[misc]


def test_a_model_that_is_collected_during_an_optimizer_step_does_not_disturb_it(before: dict[str, Any]) -> None:
    """torch goes through the hooks of all optimizers, and one of them is removed meanwhile."""
    dead = dropped(Recurrent, ROUNDED, trained=False)
    model = nn.Linear(8, 8)
    run = attached(model, ROUNDED)
    last = attached(nn.Linear(8, 8), ROUNDED)
    checked = run._check_coverage
    run._check_coverage = lambda: (gc.collect(), checked())[1]  # type: ignore[method-assign]
    train(model, run)
    assert dead() is None
    del run._check_coverage
    run.detach()
    last.detach()
    assert state_of_torch() == before


def test_what_torch_remembers_of_kernels_goes_with_the_last_plan(before: dict[str, Any]) -> None:
    with attached(nn.Linear(8, 8), ROUNDED):
        KernelInliningPass()(torch.fx.Graph())  # as Inductor calls it, on a graph without kernels
        assert state_of_torch()["kernels"] != before["kernels"]
    assert state_of_torch() == before
    KernelInliningPass()(torch.fx.Graph())
    assert state_of_torch() == before
