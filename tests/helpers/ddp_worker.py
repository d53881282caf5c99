"""What each of two processes does that train a model with a plan together; the processes import this module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import bitplan

NOISY = {"format": "e3m2", "rounding": "stochastic"}
RULE: dict[str, Any] = {"match": "*", "weight": NOISY, "activation": "e4m3", "grad_activation": NOISY}
STEPS = 2


def make() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(2, STEPS, 5, 6)


def train(model: nn.Module, run: bitplan.Attachment, batches: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        run.step()


def work(rank: int, before: bool) -> list[Tensor]:
    """The trained weights.

    :param before: whether the plan is attached before the model is wrapped.
    """
    plan = bitplan.Plan.from_dict({"version": 1, "rules": [RULE]})
    model, batches = make()
    if before:
        run = bitplan.attach(model, plan)
        wrapped = DistributedDataParallel(model)
    else:
        wrapped = DistributedDataParallel(model)
        run = bitplan.attach(wrapped, plan)
    train(wrapped, run, batches[rank])
    return [parameter.detach() for parameter in model.parameters()]


#: Of 1,000 values how many overflow, by rank: together 1 % of those of the first model, and less of the second's.
OVERFLOWS = ((15, 5), (15, 4))


def watch(rank: int) -> list[list[tuple[str, int, float]]]:
    """Train two models that see different values on the two ranks: what was promoted in each."""
    low = {"format": "e4m3b4none", "promote": {"to": "bf16"}}
    plan = bitplan.Plan.from_dict({"version": 1, "rules": [{"match": "*", "activation": low}]})
    result = []
    for counts in OVERFLOWS:
        model = nn.Sequential(nn.Identity(), nn.Tanh(), nn.Linear(1000, 1))
        model[0] = Doubled()
        run = bitplan.attach(model, plan)
        x = torch.full((1, 1000), 1.0)
        x[:, : counts[rank]] = 20.0
        model(x).sum().backward()
        run.step()
        result.append([(promotion.site, promotion.step, round(promotion.share, 6)) for promotion in run.promotions()])
    return result


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Inside(nn.Module):
    """A model inside the module that is wrapped; batch norm has buffers that are broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.BatchNorm1d(6, affine=False), nn.Linear(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.model[1](x) + self.model[0](x).sum()
        return result


def observe(rank: int) -> list[float]:
    """Two micro-batches a step, the larger one on rank 1: the largest magnitude in the history."""
    delayed = {"format": "int8", "scale": "tensor", "history": 4}
    plan = bitplan.Plan.from_dict({"version": 1, "rules": [{"match": "*", "op": "linear", "x": delayed}]})
    result = []
    for attaches in ("before", "after", "inside"):
        module = Inside()
        if attaches == "after":
            wrapped = DistributedDataParallel(module)
            run = bitplan.attach(wrapped, plan)
        else:
            run = bitplan.attach(module if attaches == "before" else module.model, plan)
            wrapped = DistributedDataParallel(module)
        for value in (1000.0 if rank else 4.0, 2.0):
            wrapped(torch.tensor([[value] * 6, [1.0] * 6])).sum().backward()
        run.step()
        history = module.model[1]._buffers["_bitplan_reach"]
        assert history is not None
        result.append(history.max().item())
    return result
