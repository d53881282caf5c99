"""In-place operations: the numbers of their out-of-place twins, and an error where a saved tensor was overwritten."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bitplan
from bitplan import Plan

PLAN = Plan.from_dict({"version": 1, "rules": [{"match": "*", "activation": "e4m3", "grad_activation": "e5m2"}]})


class Around(nn.Module):
    """A function of a layer's output, which another layer reads."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.gain = nn.Linear(8, 8), nn.Linear(8, 4), nn.Parameter(torch.ones(8) * 1.25)
        self.function = function

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.last(self.function(self.first(x) * scale))


ACTIVATIONS: list[Callable[..., nn.Module]] = [
    nn.ReLU,
    nn.ReLU6,
    nn.SiLU,
    nn.Hardswish,
    nn.Mish,
    nn.LeakyReLU,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.Hardtanh,
    nn.Hardsigmoid,
    lambda inplace: nn.Threshold(0.1, 0.5, inplace=inplace),
]

FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "square": (lambda x: x.square_(), lambda x: x.square()),
    "clamp": (lambda x: x.clamp_(-0.5, 0.5), lambda x: x.clamp(-0.5, 0.5)),
    "exp": (lambda x: x.exp_(), lambda x: x.exp()),
    "times itself": (lambda x: x.mul_(x), lambda x: x.mul(x)),
    "divided": (lambda x: x.div_(x.sum() + 100), lambda x: x.div(x.sum() + 100)),
}


def gradients(model: nn.Module, execution: str, x: Tensor) -> list[Tensor]:
    is_compiled = execution == "compiled"
    with bitplan.attach(model, PLAN, execution="emulate" if is_compiled else execution, example=x):
        if is_compiled:
            torch.compiler.reset()
        y = torch.compile(model, backend="aot_eager", fullgraph=True)(x) if is_compiled else model(x)
        y.square().sum().backward()
    return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_same_numbers(
    in_place: Callable[[Tensor], Tensor], out_of_place: Callable[[Tensor], Tensor], execution: str
) -> None:
    torch.manual_seed(0)
    model, x = Around(out_of_place), torch.randn(16, 8)
    twin = copy.deepcopy(model)
    twin.function = in_place
    expected, actual = gradients(model, execution, x), gradients(twin, execution, x)
    assert len(expected) == len(actual) > 2
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


@pytest.mark.parametrize("execution", ["emulate", "packed", "compiled"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_in_place_has_the_numbers_of_its_twin(
    activation: Callable[..., nn.Module], execution: str
) -> None:
    if execution == "compiled" and isinstance(activation(inplace=True), nn.Threshold):
        pytest.skip("torch.compile raises an internal error for its in-place form inside a mode")
    assert_same_numbers(activation(inplace=True), activation(inplace=False), execution)


@pytest.mark.parametrize("execution", ["emulate", "packed", "compiled"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_method_in_place_has_the_numbers_of_its_twin(name: str, execution: str) -> None:
    assert_same_numbers(*FUNCTIONS[name], execution)


def test_the_input_of_a_gate_may_be_overwritten_when_packed() -> None:
    def gate_half_of_a_copy(x: Tensor) -> Tensor:
        copied = x.clone()
        copied[:, :4] *= torch.sigmoid(copied[:, 4:])  # torch's sigmoid saves its result only
        return copied

    model, x = Around(gate_half_of_a_copy), torch.randn(16, 8)
    expected, actual = gradients(model, "emulate", x), gradients(copy.deepcopy(model), "packed", x)
    assert len(expected) == len(actual) > 2
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


@pytest.mark.parametrize("execution", ["emulate", "packed", "native"])
def test_a_weight_that_changed_since_the_forward_pass_raises(execution: str) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan.from_dict({"version": 1, "rules": [{"match": "*", "activation": "e4m3"}]})
    bitplan.attach(model, plan, example=x, execution=execution)
    first, second = model(x).square().sum(), model(x).sum()
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(second, model[0].weight)


def test_a_tensor_that_is_overwritten_after_it_was_saved_raises_when_packed() -> None:
    def overwrite(x: Tensor) -> Tensor:
        y = F.pad(x, (0, 0))  # a tensor that the plan leaves alone, because the next operation overwrites it
        z = torch.sin(y)
        with torch.no_grad():
            y.view(-1)[0] = 7.0
        return z

    model = Around(overwrite)
    plan = Plan.from_dict({"version": 1, "rules": [{"match": "first", "activation": "e4m3"}]})
    with bitplan.attach(model, plan, execution="packed"), pytest.raises(RuntimeError, match="inplace operation"):
        model(torch.randn(4, 8)).sum().backward()


def test_a_planned_forward_keeps_its_signature() -> None:
    model = Around(torch.relu)
    before = inspect.signature(model.forward)
    with bitplan.attach(model, PLAN):
        assert inspect.signature(model.forward) == before
        assert list(before.parameters) == ["x", "scale"]
    assert inspect.signature(model.forward) == before


class Swish(torch.autograd.Function):
    """As Bloom's GELU: a function whose backward pass is written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return grads[0] * (gate * (1 + x * (1 - gate)))


def test_the_backward_pass_of_a_custom_function_is_the_same_eager_and_compiled() -> None:
    torch.manual_seed(0)
    model, x = Around(lambda x: Swish.apply(x)), torch.randn(16, 8)
    twin = copy.deepcopy(model)
    for eager, compiled in zip(gradients(model, "emulate", x), gradients(twin, "compiled", x), strict=True):
        assert torch.equal(eager, compiled)


@pytest.mark.parametrize("execution", ["emulate", "packed"])
@pytest.mark.parametrize(
    "overwrite",
    [
        lambda x: x.relu_(),
        lambda x: F.relu(x, inplace=True),
        lambda x: F.dropout(x, 0.5, True, True),
        lambda x: F.dropout(x, 0.5, inplace=True),
        lambda x: F.dropout(x.view(-1)[:64], 0.5, inplace=True),
        lambda x: x[:, ::2].relu_(),
    ],
)
def test_an_operation_that_is_not_rounded_still_writes_into_its_input(
    overwrite: Callable[[Tensor], Tensor], execution: str
) -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        torch.manual_seed(0)
        overwrite(y)  # its result is not used
        return y

    torch.manual_seed(1)
    model, x = Around(function), torch.randn(16, 8)
    expected = model(x)
    expected.square().sum().backward()
    gradient = model.first.weight.grad
    model.zero_grad()
    with bitplan.attach(model, {"version": 1, "rules": [{"match": "*", "w": "fp16"}]}, execution=execution):
        actual = model(x)
        actual.square().sum().backward()
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(model.first.weight.grad, gradient, rtol=1e-2, atol=1e-1)
    assert not torch.equal(actual, expected)


@pytest.mark.parametrize("execution", ["emulate", "packed", bitplan.Native(min_macs=0)])
@pytest.mark.parametrize("op", ["linear", "einsum"])
def test_the_result_of_a_product_may_be_overwritten(op: str, execution: Any) -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x) if op == "linear" else torch.einsum("btd,ed->bte", x, self.layer.weight)
            return y.relu_()

    int8 = {"format": "int8", "scale": "tensor"}
    plan = {"version": 1, "rules": [{"match": "*", "op": op, "fprop.x": int8, "fprop.w": int8, "wgrad.x": "e4m3"}]}
    model, x = Product(), torch.randn(2, 3, 8)
    with bitplan.attach(model, plan, execution=execution):
        y = model(x)
        y.sum().backward()
    assert 0 < (y - F.relu(model(x))).abs().max() < 0.1
    assert model.layer.weight.grad is not None


@pytest.mark.parametrize("trained", [True, False])
def test_the_input_of_a_frozen_layer_is_not_saved(trained: bool) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(trained)), torch.randn(4, 8)
    saved: list[Tensor] = []
    with bitplan.attach(model, {"version": 1, "rules": [{"match": "1", "wgrad.x": "e4m3", "dgrad.w": "e4m3"}]}):
        hidden = model[0](x)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda t: t):
            y = model[1](hidden)
        y.sum().backward()
    assert any(tensor.data_ptr() == hidden.data_ptr() for tensor in saved) is trained
    rounded = bitplan.quantize(model[1].weight.detach(), "e4m3")
    assert torch.allclose(model[0].weight.grad, (torch.ones(4, 8) @ rounded).T @ x, atol=1e-5)
