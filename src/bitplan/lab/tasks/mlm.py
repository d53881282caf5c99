"""Masked language modelling with BERT (Devlin et al. 2018, arXiv 1810.04805), built from transformers' own classes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitplan.errors import TaskError, nearest_names
from bitplan.lab.tasks.language import TransformerSettings, TransformerTask
from bitplan.lab.tasks.task import generator
from bitplan.numerics.wire_format import HELD_OUT_MASKS, WINDOWS_AND_MASKS

#: Layers and features by size, with a head per 64 features (Turc et al. 2019, arXiv 1908.08962).
SIZES = {"tiny": (2, 128), "mini": (4, 256), "small": (4, 512), "medium": (8, 512), "base": (12, 768)}

#: Shares of the masked tokens that show the mask and another token; the rest show themselves.
SHOW_MASK, SHOW_OTHER = 0.8, 0.1

#: The target of tokens that are not masked, which torch's cross-entropy ignores.
NOT_ASKED = -100


@dataclass(frozen=True)
class MaskedSettings(TransformerSettings):
    """A small BERT on pieces of words."""

    batch: int = 32
    lr: float = 1e-3
    weight_decay: float = 0.01
    level: str = "pieces"
    vocabulary: int = 1000
    length: int = 32
    evaluation: int = 24
    #: tiny, mini, small, medium or base.
    size: str = "tiny"
    dropout: float = 0.0
    #: Masking probability.
    masked: float = 0.15

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size not in SIZES:
            raise TaskError(f"there is no size {self.size!r}; {nearest_names(self.size, SIZES)}")
        if not 0 <= self.dropout < 1:
            raise TaskError(f"dropout is {self.dropout}; it must be at least 0 and below 1.")
        if not 0 < self.masked < 1:
            raise TaskError(f"masked is {self.masked}; it must be above 0 and below 1.")


class MaskedBert(nn.Module):
    """transformers' BERT with its masked-language head: tokens (batch, length) to logits."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = transformers().BertForMaskedLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens).logits
        return logits


def transformers() -> Any:
    """The package; raises an error if it is not installed."""
    # Nothing is downloaded here, so the library need not contact its hub.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        import transformers as package
    except ModuleNotFoundError as error:
        raise TaskError("BERT needs transformers, which is not installed: run 'pip install transformers'.") from error
    return package


class MaskedLanguageModelling(TransformerTask):
    """Prediction of masked tokens from both sides."""

    name = "mlm"
    summary = "masked pieces of words"
    settings_class: ClassVar[type[MaskedSettings]] = MaskedSettings
    settings: MaskedSettings

    @property
    def mask(self) -> int:
        """The mask token: the one after the vocabulary."""
        return self.tokens

    def model(self) -> nn.Module:
        recipe = self.settings
        layers, features = SIZES[recipe.size]
        config = transformers().BertConfig(
            vocab_size=self.tokens + 1,
            hidden_size=features,
            num_hidden_layers=layers,
            num_attention_heads=features // 64,
            intermediate_size=4 * features,
            max_position_embeddings=recipe.length,
            hidden_dropout_prob=recipe.dropout,
            attention_probs_dropout_prob=recipe.dropout,
            pad_token_id=None,  # every sample is full
        )
        return MaskedBert(config)

    def least_tokens(self) -> int:
        return self.settings.length

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        draws = generator(WINDOWS_AND_MASKS, self.seed, step)
        starts = len(self.training) - self.settings.length + 1
        firsts = torch.randint(starts, (self.settings.batch,), generator=draws)
        return self._masked(self.training, firsts, draws)

    def _masked(self, tokens: Tensor, firsts: Tensor, draws: torch.Generator) -> tuple[Tensor, Tensor]:
        """Windows with tokens masked, the same number in each, and the original tokens."""
        recipe = self.settings
        windows = tokens[firsts[:, None] + torch.arange(recipe.length)]
        masked_count = max(1, round(recipe.masked * recipe.length))
        order = torch.rand(windows.shape, generator=draws).argsort(1)
        places = torch.zeros(windows.shape, dtype=torch.bool).scatter_(1, order[:, :masked_count], True)
        chance = torch.rand(windows.shape, generator=draws)
        others = torch.randint(self.tokens, windows.shape, generator=draws)
        shown = torch.where(
            chance < SHOW_MASK, self.mask, torch.where(chance < SHOW_MASK + SHOW_OTHER, others, windows)
        )
        return torch.where(places, shown, windows), torch.where(places, windows, NOT_ASKED)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=NOT_ASKED)

    def held_out_windows(self) -> int:
        return len(self.held_out) // self.settings.length

    def held_out_batch(self, number: int, firsts: Tensor) -> tuple[Tensor, Tensor]:
        return self._masked(self.held_out, firsts, generator(HELD_OUT_MASKS, number))


@dataclass(frozen=True)
class BertMiniSettings(MaskedSettings):
    """The same on four layers of 256."""

    steps: int = 2000
    evaluate_every: int = 200
    vocabulary: int = 4000
    length: int = 64
    warmup: int = 100
    size: str = "mini"


class BertMini(MaskedLanguageModelling):
    """BERT-mini, a size on which precision is often studied."""

    name = "bert-mini"
    summary = "the same, four layers of 256"
    settings_class = BertMiniSettings
