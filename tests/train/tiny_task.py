"""A task of milliseconds that has everything a resumed run can get wrong: shuffled data, dropout, batch norm, a rule
that waits for a plateau. It can be told to die like a process that is killed."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from bitplan.lab.tasks.task import Metric, Settings, Task

FEATURES, CLASSES, SAMPLES = 12, 3, 96


@dataclass(frozen=True)
class TinySettings(Settings):
    steps: int = 24
    batch: int = 8
    evaluate_every: int = 6
    optimizer: str = "sgd"


class Tiny(Task):
    name = "tiny"
    summary = "Three clouds of points."
    settings_class = TinySettings

    def __init__(self, settings: TinySettings | None = None, seed: int = 0) -> None:
        super().__init__(settings, seed)
        own = torch.Generator().manual_seed(7)
        self.labels = torch.randint(CLASSES, (SAMPLES,), generator=own)
        centres = torch.randn(CLASSES, FEATURES, generator=own)
        self.points = centres[self.labels] + 0.7 * torch.randn(SAMPLES, FEATURES, generator=own)

    @property
    def metric(self) -> Metric:
        return Metric("accuracy", "higher", 1 / CLASSES)

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, CLASSES)
        )

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        if step == int(os.environ.get("TINY_DIES_AT", -1)):
            os.kill(os.getpid(), signal.Signals[os.environ.get("TINY_DIES_OF", "SIGKILL")])
        epoch, position = divmod(step * self.settings.batch, SAMPLES)
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(1000 * self.seed + epoch))
        chosen = order[position : position + self.settings.batch]
        return self.points[chosen], self.labels[chosen]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target)

    def optimizer(self, model: nn.Module) -> Optimizer:
        if self.settings.optimizer == "adamw":
            return AdamW(model.parameters(), self.settings.lr)
        return SGD(model.parameters(), self.settings.lr, momentum=0.9)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        right = model(self.points).argmax(1) == self.labels
        return {"accuracy": right.float().mean().item()}

    def after_evaluation(self, figures: dict[str, float]) -> None:
        if figures["accuracy"] <= self.memory.get("best", 0.0):
            self.memory["factor"] = 0.5 * self.memory.get("factor", 1.0)
        self.memory["best"] = max(figures["accuracy"], self.memory.get("best", 0.0))

    def learning_rate(self, step: int) -> float:
        return self.memory.get("factor", 1.0)
