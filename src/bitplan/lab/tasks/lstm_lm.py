"""Language modelling with LSTMs: the recipe of Zaremba et al. 2014 as arXiv 2101.09868 and 2403.02243 used it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from bitplan.errors import TaskError
from bitplan.lab.models.language_models import LSTMModel, next_token_loss
from bitplan.lab.sources.texts import Text, fetched_wikitext
from bitplan.lab.tasks.language import LanguageSettings, LanguageTask, perplexity_figures
from bitplan.lab.tasks.task import fused_for
from bitplan.lab.tasks.tokens import tokens_to_test


@torch.library.custom_op("bitplan::kept_copy", mutates_args=())
def _kept_copy(x: Tensor) -> Tensor:
    return x.clone()


@_kept_copy.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _copy(state: Tensor) -> Tensor:
    """A copy that compiled code does not alias or recompute.

    A plain copy may be recomputed in the backward pass, after the forward pass has overwritten the state: gradients
    were a third off. torch does not recompute operations that it does not know.
    """
    copied: Tensor = _kept_copy(state) if torch.compiler.is_compiling() else state.clone()
    return copied


class CarriedLSTM(LSTMModel):
    """An LSTM that continues with the state of the previous batch.

    The state is in buffers, so that checkpoints hold it. Their size depends on the batch size.
    """

    def __init__(self, vocabulary_size: int, features: int, layers: int, dropout: float, texts: int) -> None:
        super().__init__(vocabulary_size, features, layers, dropout)
        self.hidden: Tensor
        self.cell: Tensor
        self.register_buffer("hidden", torch.zeros(layers, texts, features))
        self.register_buffer("cell", torch.zeros(layers, texts, features))

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.dropout(self.embedding(tokens), self.dropout, self.training)
        # Copies: the backward pass needs what is overwritten below.
        x, (hidden, cell) = self.lstm(x, (_copy(self.hidden), _copy(self.cell)))
        with torch.no_grad():
            self.hidden.copy_(hidden.detach())
            self.cell.copy_(cell.detach())
        logits: Tensor = self.decoder(F.dropout(x, self.dropout, self.training))
        return logits


@dataclass(frozen=True)
class LSTMSettings(LanguageSettings):
    """Plain SGD with a high learning rate, divided when an evaluation brings no improvement."""

    batch: int = 20
    length: int = 35
    evaluation: int = 30
    lr: float = 20.0
    clip: float = 0.25
    layers: int = 1
    features: int = 128
    dropout: float = 0.2
    #: Divide the learning rate by this if the perplexity did not fall.
    divide: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("layers", "features"):
            if getattr(self, name) < 1:
                raise TaskError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if not 0 <= self.dropout < 1:
            raise TaskError(f"dropout is {self.dropout}; it must be at least 0 and below 1.")
        if not self.divide >= 1:
            raise TaskError(f"divide is {self.divide}; it must be at least 1 (which never changes the rate).")


class LSTMLanguageModelling(LanguageTask):
    """Next-word prediction. The text is split into `batch` columns, which are read in order, repeatedly.

    The state is carried from batch to batch, also where the text starts again: it then comes from the end of the
    previous column, which precedes the next one in the text.
    """

    name = "lstm-lm"
    summary = "the next word of a text"
    settings_class: ClassVar[type[LSTMSettings]] = LSTMSettings
    settings: LSTMSettings

    def model(self) -> nn.Module:
        recipe = self.settings
        return CarriedLSTM(self.tokens, recipe.features, recipe.layers, recipe.dropout, recipe.batch)

    def least_tokens(self) -> int:
        return self.settings.batch * (self.settings.length + 1)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return self._rows(self.training, step)

    def _columns(self, tokens: Tensor) -> Tensor:
        count = len(tokens) // self.settings.batch
        return tokens[: count * self.settings.batch].view(self.settings.batch, count).t()

    def _chunks(self, tokens: Tensor) -> int:
        return (len(tokens) // self.settings.batch - 1) // self.settings.length

    def _rows(self, tokens: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """The words of chunk `number`, (length, batch), and the words after each."""
        columns = self._columns(tokens)
        first = number % self._chunks(tokens) * self.settings.length
        after = first + self.settings.length
        return columns[first:after].contiguous(), columns[first + 1 : after + 1].contiguous()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return next_token_loss(output, target)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), self.settings.lr, fused=fused_for(model.parameters()))

    def learning_rate(self, step: int) -> float:
        return float(self.memory.get("learning rate", 1.0))

    def after_evaluation(self, figures: dict[str, float]) -> None:
        """Divide the learning rate if the perplexity is not better than the best so far."""
        perplexity = figures["perplexity"]
        if perplexity < self.memory.get("best perplexity", math.inf):
            self.memory["best perplexity"] = perplexity
        else:
            self.memory["learning rate"] = self.memory.get("learning rate", 1.0) / self.settings.divide

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Evaluate the held-out text from its start, with an empty state; training then continues with its own."""
        return perplexity_figures(self._mean_loss(model, self.held_out))

    def _mean_loss(self, model: nn.Module, tokens: Tensor) -> float:
        device = next(model.parameters()).device
        # By name, and not among its own buffers: a compiled model only forwards them.
        state: list[Tensor] = [getattr(model, name) for name in ("hidden", "cell")]
        kept = [buffer.clone() for buffer in state]
        chunks = self._chunks(tokens)
        count = min(chunks, self.settings.evaluation or chunks)
        total = 0.0
        try:
            for buffer in state:
                buffer.zero_()
            for number in range(count):
                inputs, following = (part.to(device) for part in self._rows(tokens, number))
                total += float(next_token_loss(model(inputs).float(), following))
        finally:
            for buffer, content in zip(state, kept, strict=True):
                buffer.copy_(content)
        return total / count


@dataclass(frozen=True)
class PennTreebankSettings(LSTMSettings):
    """40 epochs of the published recipe: one layer of 800."""

    steps: int = 53_080
    evaluate_every: int = 1327
    level: str = "lines"
    vocabulary: int = 10_000
    evaluation: int = 0
    features: int = 800
    dropout: float = 0.5


class PennTreebank(LSTMLanguageModelling):
    """Penn Treebank, whose files you provide: they are not free to redistribute."""

    name = "ptb"
    summary = "the next word of Penn Treebank"
    settings_class = PennTreebankSettings
    evaluates_compiled = True  # thousands of small steps
    advice: ClassVar[str] = "set data= to a folder with ptb.train.txt and ptb.valid.txt (.gz is fine)"

    def load(self) -> Text:
        if not self.settings.data:
            raise TaskError(f"the task {self.name} has no text of its own: {self.advice}.")
        return super().load()

    @property
    def tokens(self) -> int:
        """The size of the set's vocabulary, known without the files."""
        return self.settings.vocabulary

    def final_figures(self, model: nn.Module) -> dict[str, float]:
        """The perplexity on the test text, if the folder has one."""
        text = self._text
        if not text.test:
            return {}
        tokens = tokens_to_test(text, self.settings.level, self.settings.vocabulary)
        loss = self._mean_loss(model, self._enough(tokens, "to test on"))
        return {"test_perplexity": perplexity_figures(loss)["perplexity"]}

    def example(self) -> tuple[Tensor, Tensor]:
        tokens = torch.zeros(self.settings.length, self.settings.batch, dtype=torch.long)
        return tokens, tokens


@dataclass(frozen=True)
class WikiTextSettings(PennTreebankSettings):
    """40 epochs on WikiText-2, two layers of 650."""

    steps: int = 119_360
    evaluate_every: int = 2984
    vocabulary: int = 33_278
    layers: int = 2
    features: int = 650
    #: Download the text with the package datasets.
    download: bool = False


class WikiText(PennTreebank):
    """WikiText-2 (Merity et al. 2016, arXiv 1609.07843)."""

    name = "wikitext2"
    summary = "the next word of WikiText-2"
    settings_class = WikiTextSettings
    settings: WikiTextSettings
    advice = "set data= to a folder with wiki.train.tokens and wiki.valid.tokens, or set download=true"

    def load(self) -> Text:
        return fetched_wikitext() if self.settings.download and not self.settings.data else super().load()
