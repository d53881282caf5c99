"""Every place where the paper rounds, against a step written by hand in float64 that knows nothing of bitplan."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bitplan
from bitplan.planners.assign import AssignRequest, choose_formats, make_assignment


class Net(nn.Module):
    """A residual, a concat, a pool, a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv3, self.conv4 = nn.Conv2d(6, 4, 1), nn.Conv2d(6, 4, 3, padding=1)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(y + self.bn2(self.conv2(y)))
        y = F.relu(torch.cat([self.conv3(y), self.conv4(y)], 1))
        logits: Tensor = self.fc(F.avg_pool2d(y, 6).flatten(1))
        return logits


# --- the paper's numbers, by their definition ---


def fp(x: Tensor, e: int, m: int, b: int, saturates: bool) -> Tensor:
    """FP(e, m, b): value 2^(E - (2^(e-1) - 1)) 1.f 2^-b, subnormals, no special codes; ties go away from zero."""
    bias = 2 ** (e - 1) - 1
    least, top = 1 - bias - b, 2**e - 1 - bias - b
    largest = 2.0**top * (2 - 2.0**-m)
    exponent = torch.frexp(x)[1].double() - 1
    spacing = torch.exp2(exponent.clamp(least, top) - m)
    steps = x.abs() / spacing
    whole = steps.floor() + (steps - steps.floor() >= 0.5)
    rounded = (whole * spacing).copysign(x)
    over = rounded.abs() > largest
    limit = torch.full_like(x, largest if saturates else math.inf).copysign(x)
    return torch.where(over, limit, rounded)


HIGH = (6, 9, 0)
LOW = {"v": (4, 3, 4), "theta": (4, 3, 4), "dv": (5, 2, 0), "dtheta": HIGH}


class Rounding(torch.autograd.Function):
    """Forward and backward each by a function of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grads[0]), None, None


def unchanged(x: Tensor) -> Tensor:
    return x


class LogSoftmax(torch.autograd.Function):
    """The gradient follows from the rounded output, as in the authors' code."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, form: tuple[int, int, int]) -> Tensor:
        y = F.log_softmax(x, 1)
        ctx.save_for_backward(fp(y, *form, saturates=True))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return grads[0] - y.exp() * grads[0].sum(1, keepdim=True), None


class Hand:
    """The step by hand: modules in order, v rounded at each output, dv where it leaves each consumer."""

    def __init__(self, low: set[int]) -> None:
        self.low = low
        #: id of an output -> the group of the module that made it.
        self.group: dict[int, int] = {}
        self.alive: list[Tensor] = []

    def format(self, group: int, kind: str) -> tuple[int, int, int]:
        return LOW[kind] if group in self.low else HIGH

    def output(self, value: Tensor, group: int) -> Tensor:
        """v: straight through."""
        v = Rounding.apply(value, lambda t: fp(t, *self.format(group, "v"), saturates=True), unchanged)
        self.group[id(v)] = group
        self.alive.append(v)
        return v

    def read(self, v: Tensor) -> Tensor:
        """A consumer's view of v; the gradient that it returns is rounded in the producer's dv format."""
        group = self.group[id(v)]
        return Rounding.apply(v, unchanged, lambda t: fp(t, *self.format(group, "dv"), saturates=False))

    def parameter(self, theta: Tensor, producer: Tensor) -> Tensor:
        """theta and dtheta follow the group of what made the module's first input."""
        group = self.group[id(producer)]
        return Rounding.apply(
            theta,
            lambda t: fp(t, *self.format(group, "theta"), saturates=True),
            lambda t: fp(t, *self.format(group, "dtheta"), saturates=False),
        )

    def loss(self, p: dict[str, Tensor], data: Tensor, target: Tensor) -> Tensor:
        x = self.output(data, 0)
        conv1 = self.output(F.conv2d(self.read(x), self.parameter(p["conv1.weight"], x), padding=1), 1)
        bn1 = self.output(self.norm(p, "bn1", conv1), 1)
        relu1 = self.output(F.relu(self.read(bn1)), 1)
        conv2 = self.output(F.conv2d(self.read(relu1), self.parameter(p["conv2.weight"], relu1), padding=1), 2)
        bn2 = self.output(self.norm(p, "bn2", conv2), 2)
        added = self.output(self.read(relu1) + self.read(bn2), 2)
        relu2 = self.output(F.relu(self.read(added)), 2)
        weight3, bias3 = (self.parameter(p[f"conv3.{name}"], relu2) for name in ("weight", "bias"))
        conv3 = self.output(F.conv2d(self.read(relu2), weight3, bias3), 3)
        weight4, bias4 = (self.parameter(p[f"conv4.{name}"], relu2) for name in ("weight", "bias"))
        conv4 = self.output(F.conv2d(self.read(relu2), weight4, bias4, padding=1), 4)
        both = self.output(torch.cat([self.read(conv3), self.read(conv4)], 1), 4)
        relu3 = self.output(F.relu(self.read(both)), 4)
        pooled = self.output(F.avg_pool2d(self.read(relu3), 6), 4)
        weight, bias = (self.parameter(p[f"fc.{name}"], pooled) for name in ("weight", "bias"))
        logits = self.output(F.linear(self.read(pooled).flatten(1), weight, bias), 5)
        logs = self.output(LogSoftmax.apply(self.read(logits), self.format(5, "v")), 5)
        return self.output(F.nll_loss(self.read(logs), target), 5)

    def norm(self, p: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
        gamma, beta = (self.parameter(p[f"{name}.{part}"], x) for part in ("weight", "bias"))
        return F.batch_norm(self.read(x), None, None, gamma, beta, training=True)


@pytest.mark.parametrize(
    ("ratio", "data_scale", "loss_scale"),
    [(0.0, 1.0, 1.0), (0.3, 1.0, 2.0**10), (0.6, 8.0, 2.0**16), (1.0, 1.0, 1.0), (1.0, 30.0, 2.0**22)],
)
def test_a_step_under_an_assignment_equals_the_one_by_hand(ratio: float, data_scale: float, loss_scale: float) -> None:
    torch.manual_seed(0)
    net = Net().double()
    with torch.no_grad():
        net.bn1.weight.mul_(data_scale)
        net.conv4.weight.mul_(data_scale)
    data, target = torch.randn(4, 3, 6, 6).double() * data_scale, torch.randint(5, (4,))
    requests = AssignRequest(ratio=ratio)
    actual = make_assignment(net, (data, target), F.cross_entropy, requests, choose_formats(requests))
    assert [group.start.split("/")[0] for group in actual.step_tensors.groups] == [
        *("input", "conv1", "conv2", "conv3", "conv4", "fc")
    ]
    low = {number for number, level in enumerate(actual.group_levels or ()) if level}

    by_hand = {name: tensor.detach().clone().requires_grad_() for name, tensor in net.named_parameters()}
    expected = Hand(low).loss(by_hand, data, target)
    (expected * loss_scale).backward()

    with bitplan.attach(net, actual.plan, example=data) as run:
        value = run.loss(F.cross_entropy)(net(data), target)
        (value * loss_scale).backward()

    is_overflown = any(not bool(parameter.grad.isfinite().all()) for parameter in by_hand.values())  # type: ignore[union-attr]
    assert is_overflown == (loss_scale == 2.0**22)
    assert torch.equal(value, expected)
    for name, parameter in net.named_parameters():
        grad, wanted = parameter.grad, by_hand[name].grad
        assert grad is not None
        assert wanted is not None
        assert torch.equal(grad.nan_to_num(nan=7e77), wanted.nan_to_num(nan=7e77)), name


def test_what_overflows_backward_becomes_infinity_and_forward_it_saturates() -> None:
    huge = torch.tensor([1e6, -1e6, 31.0, 30.9])
    forward = bitplan.quantize(huge.double(), "e4m3b4", rounding="nearest-away", overflow="saturate")
    assert torch.equal(forward, torch.tensor([30.0, -30.0, 30.0, 30.0]).double())
    assert torch.equal(forward, fp(huge.double(), 4, 3, 4, saturates=True))
    backward = bitplan.quantize(huge.double(), "e5m2b0", rounding="nearest-away", overflow="special")
    assert torch.equal(backward[:2], torch.tensor([math.inf, -math.inf]).double())
    assert torch.equal(backward, fp(huge.double(), 5, 2, 0, saturates=False))
