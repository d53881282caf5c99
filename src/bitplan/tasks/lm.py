"""Language modelling with a GPT-like decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bitplan.errors import TaskError
from bitplan.models.gpt import GPT, next_token_loss
from bitplan.tasks.decay import decayed
from bitplan.tasks.draws import generator
from bitplan.tasks.language import LanguageTask, TransformerSettings, perplexity_figures, transformer_optimizer


@dataclass(frozen=True)
class DecoderSettings(TransformerSettings):
    """A small decoder on bytes; GPT-2's smallest is layers=12 heads=12 features=768 length=1024."""

    batch: int = 16
    lr: float = 2e-3
    level: str = "bytes"
    vocabulary: int = 256
    evaluation: int = 32
    layers: int = 2
    heads: int = 4
    features: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("layers", "heads", "features"):
            if getattr(self, name) < 1:
                raise TaskError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.features % self.heads:
            raise TaskError(f"features={self.features} do not fall into heads={self.heads} equal parts.")


class DecoderLanguageModelling(LanguageTask):
    """Tell the next token: random windows of the text, by a causal transformer."""

    name = "lm"
    summary = "the next byte of a text"
    settings_class: ClassVar[type[DecoderSettings]] = DecoderSettings
    settings: DecoderSettings

    def model(self) -> nn.Module:
        recipe = self.settings
        return GPT(self.tokens, recipe.length, recipe.layers, recipe.heads, recipe.features)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        starts = len(self.training) - self.settings.length
        draws = generator("windows", self.seed, step)
        return self._windows(self.training, torch.randint(starts, (self.settings.batch,), generator=draws))

    def _windows(self, tokens: Tensor, firsts: Tensor) -> tuple[Tensor, Tensor]:
        windows = tokens[firsts[:, None] + torch.arange(self.settings.length + 1)]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return next_token_loss(output, target)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return transformer_optimizer(model, self.settings)

    def learning_rate(self, step: int) -> float:
        recipe = self.settings
        return decayed(recipe.decay, step, recipe.steps, recipe.warmup)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Windows side by side from the start of the held-out text."""
        device = next(model.parameters()).device
        recipe = self.settings
        windows = (len(self.held_out) - 1) // recipe.length
        batches = max(1, windows // recipe.batch)
        count = min(batches, recipe.evaluation or batches)
        total = 0.0
        for number in range(count):
            # Where the text is shorter than a batch, its windows come more than once: every batch has one shape.
            places = (number * recipe.batch + torch.arange(recipe.batch)) % windows
            inputs, following = (part.to(device) for part in self._windows(self.held_out, places * recipe.length))
            total += float(next_token_loss(model(inputs).float(), following))
        return perplexity_figures(total / count)
