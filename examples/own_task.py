"""A task in one file: predict how a sine wave continues.

    bitplan train examples/own_task.py:MyTask
    bitplan train examples/own_task.py:MyTask --plan int8-all --set features=64
    bitplan compare examples/own_task.py:MyTask --plans fp32 int8-all int4-all --seeds 2

With a model, data, a loss, an optimizer and a metric behind this interface, every command works on it, and an
interrupted run resumes bit-identically.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bitplan.lab.tasks import Metric, Settings, Task
from bitplan.lab.tasks.task import generator


@dataclass(frozen=True)
class MySettings(Settings):
    """The recipe. Every field is a key of --set; steps, batch, lr, evaluate_every and clip are inherited."""

    steps: int = 300
    lr: float = 0.01
    #: Number of input values, and of values to predict.
    length: int = 16
    #: Width of the hidden layers.
    features: int = 48


class MyTask(Task):
    name = "waves"
    summary = "continue a sine wave of unknown frequency and phase"
    settings_class = MySettings
    # The mean square of a wave is 1/2: the error of always predicting 0.
    metric = Metric("error", "lower", trivial=0.5)

    def model(self) -> nn.Module:
        length, features = self.settings.length, self.settings.features
        return nn.Sequential(
            nn.Linear(length, features),
            nn.GELU(),
            nn.Linear(features, features),
            nn.GELU(),
            nn.Linear(features, length),
        )

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        # A function of seed and step alone, so that a resumed run sees the same data.
        return self._waves(self.settings.batch, generator("training waves", self.seed, step))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), self.settings.lr)

    def learning_rate(self, step: int) -> float:
        return 1 - step / self.settings.steps

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        inputs, targets = self._waves(1000, generator("held-out waves"))
        device = next(model.parameters()).device
        return {"error": float(self.loss(model(inputs.to(device)).cpu(), targets))}

    def _waves(self, count: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
        frequency = 0.2 + 0.3 * torch.rand(count, 1, generator=draws)
        phase = 2 * math.pi * torch.rand(count, 1, generator=draws)
        wave = (frequency * torch.arange(2 * self.settings.length) + phase).sin()
        return wave[:, : self.settings.length], wave[:, self.settings.length :]
