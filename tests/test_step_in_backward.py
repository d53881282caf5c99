"""Optimizer steps inside the backward pass: the updates of an ordinary step, with fewer gradients alive."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import bitplan as bp
from bitplan.runtime.step_in_backward import StepInBackward

LAYERS, WIDTH = 6, 32


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.LayerNorm(WIDTH)) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


class Tied(nn.Module):
    """The embedding's weight is the head's, too: its gradient has two parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.body = nn.Embedding(8, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(self.embedding(x.argmax(1) % 8))))


def batch(number: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))


def sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=0.01)


DELAYED = {
    "version": 1,
    "quantizers": {"f8": {"format": "e4m3", "scale": "tensor", "history": 4}},
    "rules": [{"match": "*", "op": "linear", "x": "f8", "w": "f8", "dy": {"format": "e5m2", "rounding": "stochastic"}}],
}
PLANS: dict[str, Any] = {"no plan": None, "fp8-linear": "fp8-linear", "delayed": DELAYED}


def train(
    model: nn.Module, make: Callable[[Any], Optimizer], plan: Any, execution: str, in_backward: bool, steps: int = 3
) -> tuple[list[float], int]:
    """The losses, and the optimizer steps that the run has counted."""
    run = None if plan is None else bp.attach(model, plan, example=batch(0), execution=execution)
    optimizer: Any = make(model.parameters())
    if in_backward:
        optimizer = StepInBackward(model, lambda parameter: make([parameter]), run)
    losses = []
    for number in range(steps):
        loss = model(batch(number)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if run is not None and not in_backward:
            run.step()
        losses.append(loss.item())
    counted = 0 if run is None else run.steps_done
    if run is not None:
        run.detach()
    return losses, counted


@pytest.mark.parametrize("execution", ["emulate", "packed"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("kind", [make_model, Tied])
def test_updates_are_those_of_an_ordinary_step(kind: Any, make: Any, plan: str, execution: str) -> None:
    ordinary, ours = kind(), kind()
    losses, counted = train(ordinary, make, PLANS[plan], execution, in_backward=False)
    our_losses, our_count = train(ours, make, PLANS[plan], execution, in_backward=True)
    assert our_losses == losses
    assert len(set(losses)) == 3
    assert our_count == counted == (0 if plan == "no plan" else 3)
    for value, expected in zip(ours.parameters(), ordinary.parameters(), strict=True):
        assert torch.equal(value, expected)
        assert value.grad is None


def most_bytes_of_gradients(in_backward: bool) -> int:
    model, most = make_model(), 0
    run = bp.attach(model, "fp8-linear", example=batch(0))

    def count(_: Tensor) -> None:
        nonlocal most
        alive = sum(parameter.grad.nbytes for parameter in model.parameters() if parameter.grad is not None)
        most = max(most, alive)

    for parameter in model.parameters():  # before our own hooks
        parameter.register_post_accumulate_grad_hook(count)
    optimizer = StepInBackward(model, lambda parameter: sgd([parameter]), run) if in_backward else None
    model(batch(0)).square().mean().backward()
    assert (optimizer is not None) == in_backward  # it updates as long as somebody holds it
    run.detach()
    return most


def test_gradients_of_one_parameter_are_alive_instead_of_all() -> None:
    model = make_model()
    assert most_bytes_of_gradients(in_backward=False) == sum(parameter.nbytes for parameter in model.parameters())
    assert most_bytes_of_gradients(in_backward=True) == WIDTH * WIDTH * 4


def test_a_state_that_is_loaded_continues_bit_for_bit() -> None:
    def steps(model: nn.Module, optimizer: StepInBackward, numbers: range) -> None:
        for number in numbers:
            model(batch(number)).square().mean().backward()
            optimizer.step()

    def make(model: nn.Module) -> StepInBackward:
        return StepInBackward(model, lambda parameter: adamw([parameter]))

    whole, first, second = make_model(), make_model(), make_model()
    steps(whole, make(whole), range(4))
    saved = make(first)
    steps(first, saved, range(2))
    second.load_state_dict(first.state_dict())
    loaded = make(second)
    loaded.load_state_dict(saved.state_dict())
    steps(second, loaded, range(2, 4))
    assert all(torch.equal(*pair) for pair in zip(whole.parameters(), second.parameters(), strict=True))
    with pytest.raises(bp.BitplanError) as caught:
        make(Tied()).load_state_dict(saved.state_dict())
    assert "other parameters" in str(caught.value)


def test_groups_hold_the_rates_of_all_parameters() -> None:
    model = make_model()
    optimizer = StepInBackward(model, lambda parameter: SGD([parameter], lr=0.1))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    model(batch(0)).square().mean().backward()
    optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))


def backward(model: nn.Module) -> None:
    model(batch(0)).square().mean().backward()


def test_accumulation_and_clipping_are_refused() -> None:
    model = make_model()
    optimizer = StepInBackward(model, lambda parameter: sgd([parameter]))
    with pytest.raises(bp.BitplanError) as caught:
        optimizer.step()
    assert "no gradient" in str(caught.value)
    backward(model)
    with pytest.raises(bp.BitplanError) as caught:
        optimizer.clip_grad_norm_(model.parameters(), 1.0)
    assert "norm" in str(caught.value)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(bp.BitplanError) as caught:
        backward(model)
    assert "accumulated" in str(caught.value)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
    optimizer.step()
    optimizer.remove()
    backward(model)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_what_cannot_be_stepped_in_backward_is_refused() -> None:
    model = make_model()
    with pytest.raises(bp.BitplanError) as caught:
        StepInBackward(model, lambda parameter: sgd(model.parameters()))
    assert "of 24 parameters" in str(caught.value)
    with pytest.raises(bp.BitplanError) as caught:
        StepInBackward(make_model().half(), lambda parameter: sgd([parameter]))
    assert "float16" in str(caught.value)
    with bp.attach(model, "fp8-linear", optimizer=sgd(model.parameters())) as run, pytest.raises(bp.BitplanError) as e:
        StepInBackward(model, lambda parameter: sgd([parameter]), run)
    assert "attach without optimizer=" in str(e.value)


def test_the_plan_s_optimizer_state_is_that_of_an_ordinary_step() -> None:
    """Large weights have moments in E4M3, biases and norms in full precision, in the backward pass as after it."""
    pytest.importorskip("torchao")
    plan = {"version": 1, "optimizer": {"state": "e4m3"}, "rules": [{"match": "*", "op": "linear", "x": "e4m3"}]}

    def weights(in_backward: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, WIDTH))
        with bp.attach(model, plan, example=batch(0)) as run, torch.compiler.set_stance("force_eager"):
            if in_backward:
                optimizer: Any = StepInBackward(model, lambda parameter: adamw([parameter]), run)
            else:
                optimizer = run.optimizer(adamw(model.parameters()))
            for _ in range(3):
                backward(model)
                optimizer.step()
                optimizer.zero_grad()
                if not in_backward:
                    run.step()
            if in_backward:
                moments = {
                    name: each.state_dict()["state"][0]["exp_avg"] for name, each in optimizer.optimizers.items()
                }
                assert {name for name, moment in moments.items() if hasattr(moment, "codes")} == {
                    "0.weight",
                    "2.weight",
                }
        return [parameter.detach() for parameter in model.parameters()]

    assert all(torch.equal(*pair) for pair in zip(weights(True), weights(False), strict=True))


def test_a_plan_whose_optimizer_state_fits_no_parameter_is_refused() -> None:
    pytest.importorskip("torchao")
    plan = {"version": 1, "optimizer": {"state": "e4m3"}}
    model = make_model()
    with bp.attach(model, plan, example=batch(0)) as run, pytest.raises(bp.BitplanError) as caught:
        StepInBackward(model, lambda parameter: adamw([parameter]), run)
    assert "e4m3 has no effect" in str(caught.value)


def test_a_second_one_is_refused_until_the_first_is_removed() -> None:
    model = make_model()
    first = StepInBackward(model, lambda parameter: sgd([parameter]))
    with pytest.raises(bp.BitplanError) as caught:
        StepInBackward(model, lambda parameter: sgd([parameter]))
    assert "remove()" in str(caught.value)
    first.remove()
    StepInBackward(copy.deepcopy(model), lambda parameter: sgd([parameter]))
    StepInBackward(model, lambda parameter: sgd([parameter]))


@pytest.mark.parametrize("plan", [None, "fp8-linear"])
@pytest.mark.filterwarnings("ignore::bitplan.errors.BitplanWarning")
def test_nothing_is_kept_alive_and_a_dropped_one_updates_no_more(plan: str | None) -> None:
    """Python finds no cycles through the hooks of a tensor: these would keep model, plan and optimizers for ever."""
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    run = None if plan is None else bp.attach(model, plan, example=x)
    optimizer = StepInBackward(model, lambda p: torch.optim.SGD([p], lr=0.1), run)
    model(x).sum().backward()
    optimizer.step()
    del optimizer
    gc.collect()
    before = model.weight.detach().clone()
    model(x).sum().backward()
    assert torch.equal(model.weight, before)
    assert model.weight.grad is not None
    model.zero_grad()
    StepInBackward(model, lambda p: torch.optim.SGD([p], lr=0.1), run).remove()  # there is no other one any more
    alive = weakref.ref(model)
    del model, run
    gc.collect()
    assert alive() is None
