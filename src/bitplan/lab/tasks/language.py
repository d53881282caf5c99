"""The parts that all language models share: a text, its tokens, and perplexity."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from bitplan.errors import TaskError, nearest_names
from bitplan.lab.models.language_models import GPT, next_token_loss
from bitplan.lab.sources.texts import Text, library_text, read_texts
from bitplan.lab.tasks.task import DECAYS, DecayedRate, Metric, Settings, Task, fused_for, generator
from bitplan.lab.tasks.tokens import LEVELS, tokenised
from bitplan.numerics.wire_format import WINDOWS

#: The largest loss whose perplexity is computed; above it is infinite.
_LARGEST_LOSS = 100.0


@dataclass(frozen=True)
class LanguageSettings(Settings):
    """Settings of the text and its tokens."""

    #: A text file, or a folder with a train and a valid file; without one the Python standard library's text is read.
    data: str = ""
    #: Tokens are bytes, characters, words, pieces (of words) or lines (words as the file separates them).
    level: str = "words"
    #: The largest vocabulary; bytes always have 256 tokens.
    vocabulary: int = 4000
    #: Tokens per sample.
    length: int = 64
    #: Batches of held-out text per evaluation; 0 for all of it.
    evaluation: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.level not in LEVELS:
            raise TaskError(f"there is no level {self.level!r}; {nearest_names(self.level, LEVELS)}")
        for name, least in (("vocabulary", 2), ("length", 2), ("evaluation", 0)):
            if getattr(self, name) < least:
                raise TaskError(f"{name} is {getattr(self, name)}; it must be at least {least}.")


class LanguageTask(Task):
    """A task on a text, with perplexity on held-out text as its metric."""

    settings_class: ClassVar[type[LanguageSettings]] = LanguageSettings
    settings: LanguageSettings

    def load(self) -> Text:
        """The text."""
        return read_texts(self.settings.data) if self.settings.data else library_text()

    @cached_property
    def _text(self) -> Text:
        return self.load()

    @cached_property
    def _tokenised(self) -> tuple[int, Tensor, Tensor]:
        return tokenised(self._text, self.settings.level, self.settings.vocabulary)

    @property
    def tokens(self) -> int:
        """The size of the vocabulary."""
        return self._tokenised[0]

    @property
    def training(self) -> Tensor:
        """The training tokens."""
        return self._enough(self._tokenised[1], "to learn from")

    @property
    def held_out(self) -> Tensor:
        """The held-out tokens."""
        return self._enough(self._tokenised[2], "held out")

    def _enough(self, tokens: Tensor, what: str) -> Tensor:
        needed = self.least_tokens()
        if len(tokens) < needed:
            raise TaskError(
                f"{len(tokens)} tokens {what} are fewer than the {needed} that a batch takes: name a longer text, "
                f"or set a smaller batch= or length=."
            )
        return tokens

    def least_tokens(self) -> int:
        """The least number of tokens of a split."""
        return self.settings.length + 1

    @cached_property
    def metric(self) -> Metric:
        """Perplexity; the trivial predictor knows the frequency of each token and nothing of its context."""
        return Metric("perplexity", "lower", unigram_perplexity(self.tokens, self.training, self.held_out))


def unigram_perplexity(tokens: int, training: Tensor, held_out: Tensor) -> float:
    """The perplexity of the held-out tokens under their training frequencies (plus one).

    >>> unigram_perplexity(2, torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1]))
    2.0
    """
    counts = torch.bincount(training, minlength=tokens).double() + 1
    chances = (counts / counts.sum()).log()
    return math.exp(-float(chances[held_out].mean()))


def perplexity_figures(loss: float) -> dict[str, float]:
    """The metrics of an evaluation with this mean loss."""
    return {"perplexity": math.exp(min(loss, _LARGEST_LOSS)), "validation_loss": loss}


@dataclass(frozen=True)
class TransformerSettings(LanguageSettings):
    """The recipe of a transformer: AdamW with a warm-up and a cosine."""

    weight_decay: float = 0.1
    decay: str = "cosine"
    warmup: int = 20
    clip: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decay not in DECAYS:
            raise TaskError(f"there is no decay {self.decay!r}; {nearest_names(self.decay, DECAYS)}")
        for name in ("weight_decay", "warmup"):
            if not getattr(self, name) >= 0:
                raise TaskError(f"{name} is {getattr(self, name)}; it must be at least 0.")


def transformer_optimizer(
    model: nn.Module, settings: TransformerSettings, betas: tuple[float, float] = (0.9, 0.95)
) -> Optimizer:
    """AdamW; matrices have weight decay, biases and norms do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return AdamW(groups, lr=settings.lr, betas=betas, fused=fused_for(model.parameters()))


# --- Language modelling with a GPT-like decoder


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


class TransformerTask(DecayedRate, LanguageTask):
    """A language model that is trained on windows of the text; a subclass makes the batches."""

    settings: Any

    def optimizer(self, model: nn.Module) -> Optimizer:
        return transformer_optimizer(model, self.settings)

    @abstractmethod
    def held_out_windows(self) -> int:
        """The number of windows in the held-out text."""

    @abstractmethod
    def held_out_batch(self, number: int, firsts: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs and the target of a batch of the evaluation, whose windows begin at these tokens."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Consecutive windows from the start of the held-out text, the same in every run."""
        device = next(model.parameters()).device
        recipe, windows = self.settings, self.held_out_windows()
        batches = max(1, windows // recipe.batch)
        count = min(batches, recipe.evaluation or batches)
        total = 0.0
        for number in range(count):
            # If the text is shorter than a batch, its windows are repeated: every batch has one shape.
            places = (number * recipe.batch + torch.arange(recipe.batch)) % windows
            inputs, target = (part.to(device) for part in self.held_out_batch(number, places * recipe.length))
            total += float(self.loss(model(inputs).float(), target))
        return perplexity_figures(total / count)


class DecoderLanguageModelling(TransformerTask):
    """Next-token prediction by a causal transformer on random windows of the text."""

    name = "lm"
    summary = "the next byte of a text"
    settings_class: ClassVar[type[DecoderSettings]] = DecoderSettings
    settings: DecoderSettings

    def model(self) -> nn.Module:
        recipe = self.settings
        return GPT(self.tokens, recipe.length, recipe.layers, recipe.heads, recipe.features)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        starts = len(self.training) - self.settings.length
        draws = generator(WINDOWS, self.seed, step)
        return self._windows(self.training, torch.randint(starts, (self.settings.batch,), generator=draws))

    def _windows(self, tokens: Tensor, firsts: Tensor) -> tuple[Tensor, Tensor]:
        windows = tokens[firsts[:, None] + torch.arange(self.settings.length + 1)]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return next_token_loss(output, target)

    def held_out_windows(self) -> int:
        return (len(self.held_out) - 1) // self.settings.length

    def held_out_batch(self, number: int, firsts: Tensor) -> tuple[Tensor, Tensor]:
        return self._windows(self.held_out, firsts)
