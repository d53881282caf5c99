"""Rounding that is known to change nothing is left out: no bit differs, and after any write it happens again."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bitplan
from bitplan.lab.models.resnet import cifar_resnet
from bitplan.numerics.quantizer import Quantizer
from bitplan.plans import Plan
from bitplan.runtime import rounding_op as actions
from bitplan.runtime.rounded_mark import lies_on, mark_rounded

PLAN = Plan.from_dict(
    {"version": 1, "rules": [{"match": "*", "weight": "e4m3", "activation": "e3m2", "grad_activation": "e5m2"}]}
)
BACKENDS = ("eager", "aot_eager")


class Net(nn.Module):
    """A layer, what is under test, and a layer behind it."""

    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.after, self.middle = nn.Linear(16, 16), nn.Linear(16, 4), middle

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.middle(self.before(x)))


def relu_of_a_written_tensor(x: Tensor) -> Tensor:
    with torch.no_grad():
        x[:, ::2] += 0.01
    return F.relu(x)


def relu_of_a_written_view(x: Tensor) -> Tensor:
    x.view(-1)[::3].add_(0.01)
    return torch.relu(x)


MIDDLES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "in place": lambda x: x.relu_(),
    "twice": lambda x: F.relu(F.relu(x)),
    "with a second consumer": lambda x: F.relu(x) + x.tanh(),
    "residual": lambda x: F.relu(x + F.relu(x)),
    "after a write": relu_of_a_written_tensor,
    "after a write to a view": relu_of_a_written_view,
}


def gradients(model: nn.Module, x: Tensor, backend: str) -> list[Tensor]:
    torch.compiler.reset()
    forward = model if backend == "eager" else torch.compile(model, fullgraph=True, backend=backend)
    x = x.clone().requires_grad_()
    y = forward(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("middle", MIDDLES)
def test_no_bit_differs_from_rounding_every_time(middle: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Net(MIDDLES[middle]), torch.randn(8, 16)
    twin = copy.deepcopy(model)
    with bitplan.attach(model, PLAN, example=x):
        skipping = gradients(model, x, backend)
    monkeypatch.setattr(actions, "lies_on", lambda tensor, grid: False)
    with bitplan.attach(twin, PLAN, example=x):
        every_time = gradients(twin, x, backend)
    assert all(torch.equal(a, b) for a, b in zip(skipping, every_time, strict=True))


def count_roundings(model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> int:
    count = 0
    plain = Quantizer.round_values

    def counted(self: Quantizer, *arguments: object) -> Tensor:
        nonlocal count
        count += 1
        return plain(self, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(Quantizer, "round_values", counted)
        gradients(model, x, "eager")
    return count


def test_a_resnet_is_rounded_less_often_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = cifar_resnet(8), torch.randn(2, 3, 16, 16)
    twin = copy.deepcopy(model)
    with bitplan.attach(model, PLAN):
        few = count_roundings(model, x, monkeypatch)
    with monkeypatch.context() as patched, bitplan.attach(twin, PLAN):
        patched.setattr(actions, "lies_on", lambda tensor, grid: False)
        many = count_roundings(twin, x, monkeypatch)
    relus = 7
    assert many - few >= 2 * relus  # each relu's own rounding, and that of the gradient it sends on
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_statistics_still_see_every_rounding() -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU()), torch.randn(8, 16)
    with bitplan.attach(model, PLAN, stats=True) as run:
        model(x).sum().backward()
        run.step()
        assert {"0/linear.0:activation", "1/relu.0:activation"} <= set(run.stats())


@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.mul_(3),
        lambda t: t.view(-1).mul_(3),
        lambda t: torch.add(t, 1, out=t),
        lambda t: t.__setitem__(0, 0.3),
        lambda t: torch._foreach_mul_([t], 3),
    ],
)
def test_a_write_ends_what_is_known(write: Callable[[Tensor], object]) -> None:
    tensor = mark_rounded(torch.randn(3), "e4m3")
    assert lies_on(tensor, "e4m3")
    assert not lies_on(tensor, "e5m2")
    assert not lies_on(copy.deepcopy(tensor), "e4m3")
    write(tensor)
    assert not lies_on(tensor, "e4m3")


def test_a_scaled_or_changing_format_has_no_fixed_grid() -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU()), torch.randn(8, 16)
    scaled = {"match": "*", "activation": {"format": "e3m2", "scale": "tensor"}}
    with bitplan.attach(model, Plan.from_dict({"version": 1, "rules": [scaled]})):
        assert not hasattr(model(x), "_bitplan_grid")
    with bitplan.attach(model, PLAN, mutable_formats=True):
        assert not hasattr(model(x), "_bitplan_grid")
