"""Under the formats of Lee, Sharma & Aiken, the backward pass of log-softmax reads the rounded output."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bitplan
from bitplan.plans import Plan

LOW, GRADIENT = "e4m3b4", "e5m2b0"


def rounded(x: Tensor, name: str) -> Tensor:
    overflow = "special" if name == GRADIENT else "saturate"
    return bitplan.quantize(x, name, rounding="nearest-away", overflow=overflow)


class Head(nn.Module):
    """A linear layer that keeps its logits, for their gradient."""

    def __init__(self, writes_loss: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.writes_loss = writes_loss

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layer(x)
        if logits.requires_grad:
            logits.register_hook(self.keep)
        self.logits = logits.detach()
        return F.log_softmax(logits, -1) if self.writes_loss else logits

    def keep(self, gradient: Tensor) -> None:
        self.gradient = gradient


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return 3 * torch.randn(4, 6, generator=generator), torch.tensor([0, 3, 1, 1])


def by_hand(logits: Tensor, target: Tensor, is_output_rounded: bool = True) -> Tensor:
    """The gradient of the logits: gy - exp(y) sum(gy), rounded where it leaves the log-softmax."""
    y = F.log_softmax(logits, -1)
    y = rounded(y, LOW) if is_output_rounded else y
    gy = rounded(-F.one_hot(target, 5) / len(target), GRADIENT)
    return rounded(gy - y.exp() * gy.sum(-1, keepdim=True), GRADIENT)


@pytest.mark.parametrize("execution", ["emulate", "packed"])
@pytest.mark.parametrize("writes_loss", [False, True])
def test_the_gradient_follows_from_the_rounded_output(writes_loss: bool, execution: str) -> None:
    torch.manual_seed(0)
    model, (x, target) = Head(writes_loss), batch()
    loss = F.nll_loss if writes_loss else F.cross_entropy
    plan = bitplan.assign(model, (x, target), loss, baseline="uniform-low")
    with bitplan.attach(model, plan, example=x, execution=execution) as run:
        run.loss(loss)(model(x), target).backward()
    assert torch.equal(rounded(model.logits, LOW), model.logits)
    assert torch.equal(model.gradient, by_hand(model.logits, target))
    difference = model.gradient - by_hand(model.logits, target, is_output_rounded=False)
    assert difference.abs().max() > 0.02 * model.gradient.abs().max()


def test_compiled_code_computes_the_same() -> None:
    torch.manual_seed(0)
    model, (x, target) = Head(True), batch()
    plan = bitplan.assign(model, (x, target), F.nll_loss, baseline="uniform-low")
    with bitplan.attach(model, plan, example=x) as run:
        loss = run.loss(F.nll_loss)
        grads = []
        for call in (model, torch.compile(model, backend="aot_eager")):
            model.zero_grad()
            loss(call(x), target).backward()
            assert model.layer.weight.grad is not None
            grads.append(model.layer.weight.grad.clone())
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


def test_other_plans_differentiate_the_unrounded_output() -> None:
    torch.manual_seed(0)
    model, (x, target) = Head(True), batch()
    plan = Plan.from_dict({"version": 1, "rules": [{"match": "*", "op": "log_softmax", "activation": LOW}]})
    with bitplan.attach(model, plan, example=x):
        F.nll_loss(model(x), target).backward()
    plain = F.log_softmax(model.logits.requires_grad_(), -1)
    (expected,) = torch.autograd.grad(F.nll_loss(plain, target), model.logits)
    torch.testing.assert_close(model.gradient, expected)
