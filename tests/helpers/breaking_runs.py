"""A model and a task whose training breaks at a chosen step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from bitplan.lab.tasks.task import Metric, Settings, Task


class Planted(Task):
    """Random data for a model that breaks at step `at`, counted from 1: then the data are `size` times as large."""

    name = "planted"
    summary = "Breaks when told to."

    def __init__(self, make: Callable[[], nn.Module], at: int, size: float = 1e6, **settings: Any) -> None:
        chosen = {"steps": 20, "batch": 4, "evaluate_every": 3, "lr": 0.01, **settings}
        super().__init__(Settings(**chosen))
        self.make, self.at, self.size = make, at, size

    @property
    def metric(self) -> Metric:
        return Metric("error", "lower", 1.0)

    def model(self) -> nn.Module:
        return self.make()

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        own = torch.Generator().manual_seed(step)
        x = torch.randn(self.settings.batch, 6, generator=own)
        return (self.size * x if step == self.at - 1 else x), torch.randn(self.settings.batch, 6, generator=own)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).abs().mean()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), self.settings.lr)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"error": float(self.loss(model(torch.ones(2, 6)), torch.ones(2, 6)))}


class Net(nn.Module):
    """Three layers; `middle` is what comes between the first two."""

    def __init__(self, middle: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.relu(self.second(self.middle(self.first(x)))))
