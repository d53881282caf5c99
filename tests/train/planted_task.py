"""A task into which an outlier is planted: once, an element of a gradient, an activation or a weight is 1000-fold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from bitplan.lab.tasks.task import Metric, Settings, Task

FEATURES, CLASSES, SAMPLES = 12, 3, 96
TIMES = 1000.0


class Bump(torch.autograd.Function):
    """The tensor itself; backward, its gradient with an outlier."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, times: Tensor) -> Tensor:
        ctx.save_for_backward(times)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * factor(grads[0], *ctx.saved_tensors), None


def factor(like: Tensor, times: Tensor) -> Tensor:
    """Ones, but for the largest element."""
    is_it = torch.arange(like.numel()) == like.abs().argmax()
    return torch.where(is_it.view(like.shape), times, 1.0)


class Plant(nn.Module):
    """Changes nothing, but for one training step: then one element is a thousand times as large."""

    def __init__(self, what: str, at: int, layer: nn.Linear) -> None:
        super().__init__()
        self.what, self.at, self.layer = what, at, [layer]
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.what == "nothing":
            return x
        times = torch.where(self.calls == self.at, TIMES, 1.0)
        self.calls += 1
        if self.what == "weight":
            with torch.no_grad():
                weight = self.layer[0].weight
                weight.mul_(factor(weight, times))
            return x
        if self.what == "gradient":
            y: Tensor = Bump.apply(x, times)  # type: ignore[no-untyped-call]
            return y
        return x * factor(x.detach(), times)


@dataclass(frozen=True)
class PlantedSettings(Settings):
    steps: int = 24
    batch: int = 16
    evaluate_every: int = 24
    lr: float = 0.02
    what: str = "nothing"
    at: int = 9


class Planted(Task):
    name = "planted"
    summary = "Three clouds of points, and an outlier."
    settings_class = PlantedSettings

    def __init__(self, settings: PlantedSettings | None = None, seed: int = 0) -> None:
        super().__init__(settings, seed)
        own = torch.Generator().manual_seed(7)
        self.labels = torch.randint(CLASSES, (SAMPLES,), generator=own)
        centres = torch.randn(CLASSES, FEATURES, generator=own)
        self.points = centres[self.labels] + 0.7 * torch.randn(SAMPLES, FEATURES, generator=own)

    @property
    def metric(self) -> Metric:
        return Metric("accuracy", "higher", 1 / CLASSES)

    def model(self) -> nn.Module:
        first, last = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)
        plant = Plant(self.settings.what, self.settings.at, last)
        return nn.Sequential(first, nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 16), nn.Tanh(), plant, last)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(SAMPLES, (self.settings.batch,), generator=torch.Generator().manual_seed(step))
        return self.points[chosen], self.labels[chosen]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), self.settings.lr, momentum=0.9)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        right = model(self.points).argmax(1) == self.labels
        return {"accuracy": right.float().mean().item()}
