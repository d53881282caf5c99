"""Text classification with BERT (Devlin et al. 2018, arXiv 1810.04805), fine-tuned if weights are given."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from bitplan.errors import TaskError, nearest_names
from bitplan.lab.sources.pretrained import PretrainedFolder, no_weights
from bitplan.lab.sources.texts import PACKAGES, library_docstrings, read_tables
from bitplan.lab.tasks.labelled_texts import LabelledTexts, TextData
from bitplan.lab.tasks.language import TransformerSettings, transformer_optimizer
from bitplan.lab.tasks.mlm import SIZES, transformers
from bitplan.lab.tasks.task import DecayedRate, LoadingTask, Metric, shuffled
from bitplan.lab.tasks.tokens import PAD, SPECIAL, LearntEncoder, TextEncoder

#: A token for examples before texts are loaded: any but padding.
_SOME_TOKEN = SPECIAL


@dataclass(frozen=True)
class TextSettings(TransformerSettings):
    """The recipe of a fine-tune: AdamW with warm-up and linear decay."""

    batch: int = 32
    level: str = "pieces"
    weight_decay: float = 0.01
    decay: str = "linear"
    #: tiny, mini, small, medium or base; a pretrained model has its own.
    size: str = "tiny"
    dropout: float = 0.1
    #: A transformers folder with config.json, model.safetensors and a vocabulary; "" trains from scratch.
    pretrained: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size not in SIZES:
            raise TaskError(f"there is no size {self.size!r}; {nearest_names(self.size, SIZES)}")
        if not 0 <= self.dropout < 1:
            raise TaskError(f"dropout is {self.dropout}; it must be at least 0 and below 1.")
        if self.length < 8:
            raise TaskError(f"length is {self.length}; it must be at least 8 for a text and what frames it.")


class ClassifyingBert(nn.Module):
    """transformers' BERT with a classification head: tokens (batch, length) and token types to logits."""

    def __init__(self, config: Any, pad: int) -> None:
        super().__init__()
        self.model = transformers().BertForSequenceClassification(config)
        self.pad = pad

    def forward(self, tokens: Tensor, kinds: Tensor) -> Tensor:
        mask = (tokens != self.pad).long()
        logits: Tensor = self.model(input_ids=tokens, token_type_ids=kinds, attention_mask=mask).logits
        return logits


class TextClassification(DecayedRate, LoadingTask[TextData]):
    """Text classification; a data set derives from this and loads its data."""

    settings_class: ClassVar[type[TextSettings]] = TextSettings
    settings: TextSettings

    @property
    @abstractmethod
    def classes(self) -> int:
        """The number of classes."""

    @cached_property
    def metric(self) -> Metric:
        """Accuracy on held-out texts; the trivial predictor always answers the most common class in training."""
        labels = self.data.training.labels
        commonest = max(range(self.classes), key=labels.count)
        return Metric("accuracy", "higher", self.data.held_out.labels.count(commonest) / len(self.data.held_out))

    # --- Model

    @cached_property
    def _folder(self) -> PretrainedFolder | None:
        return PretrainedFolder(self.settings.pretrained) if self.settings.pretrained else None

    def model(self) -> nn.Module:
        config, folder = self._config(), self._folder
        model = ClassifyingBert(config, PAD if folder is None else config.pad_token_id)
        if folder is not None and not no_weights(model):
            folder.load_into(model.model)
        return model

    def _config(self) -> Any:
        recipe, folder = self.settings, self._folder
        own: dict[str, Any] = {
            "num_labels": self.classes,
            "hidden_dropout_prob": recipe.dropout,
            "attention_probs_dropout_prob": recipe.dropout,
        }
        if folder is not None:
            folder.require(recipe.length)
            settings = {key: value for key, value in folder.config.items() if key not in ("id2label", "label2id")}
            return transformers().BertConfig(**{**settings, **own, "pad_token_id": self.encoder.pad})
        layers, features = SIZES[recipe.size]
        return transformers().BertConfig(
            # The largest vocabulary, so that the model's shapes are known without its texts.
            vocab_size=SPECIAL + recipe.vocabulary,
            hidden_size=features,
            num_hidden_layers=layers,
            num_attention_heads=features // 64,
            intermediate_size=4 * features,
            max_position_embeddings=recipe.length,
            pad_token_id=PAD,
            **own,
        )

    # --- Data

    @cached_property
    def encoder(self) -> TextEncoder:
        """The tokenizer: the pretrained model's own, or one that is learned from the training texts."""
        with torch.device("cpu"):
            if self._folder is not None:
                return self._folder.encoder()
            return LearntEncoder(self.data.training, self.settings.level, self.settings.vocabulary)

    @cached_property
    def training(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, token types, and classes."""
        return self._encoded(self.data.training)

    @cached_property
    def held_out(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._encoded(self.data.held_out)

    def _encoded(self, texts: LabelledTexts) -> tuple[Tensor, Tensor, Tensor]:
        with torch.device("cpu"):
            return *self.encoder.rows(texts.samples, self.settings.length), torch.tensor(texts.labels)

    def batch(self, step: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        chosen = shuffled(step, self.settings.batch, len(self.training[2]), self.seed)
        return _taken(self.training, chosen)

    def example(self) -> tuple[tuple[Tensor, Tensor], Tensor]:
        shape = (self.settings.batch, self.settings.length)
        inputs = torch.full(shape, _SOME_TOKEN), torch.zeros(shape, dtype=torch.long)
        return inputs, torch.zeros(shape[0], dtype=torch.long)

    # --- Recipe

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return transformer_optimizer(model, self.settings, betas=(0.9, 0.999))

    def epoch(self) -> int:
        """Batches per epoch."""
        return -(-len(self.data.training) // self.settings.batch)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        size, whole = self.settings.batch, len(self.held_out[2])
        count = min(whole, self.settings.evaluation * size or whole)
        # Spread over all of them: files may be sorted by class.
        places = torch.arange(count) * whole // count
        hits = losses = 0.0
        for first in range(0, count, size):
            here = min(size, count - first)
            # A short last batch is filled up with its own texts: one shape for compiled models.
            inputs, labels = _taken(self.held_out, places[first + torch.arange(size) % here])
            logits = model(*(part.to(device) for part in inputs))[:here].float()
            labels = labels[:here].to(device)
            hits += float((logits.argmax(1) == labels).sum())
            losses += float(F.cross_entropy(logits, labels, reduction="sum"))
        return {"accuracy": hits / count, "validation_loss": losses / count}


def _taken(part: tuple[Tensor, Tensor, Tensor], chosen: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    tokens, kinds, labels = part
    return (tokens[chosen].long(), kinds[chosen].long()), labels[chosen]


@dataclass(frozen=True)
class DocstringSettings(TextSettings):
    """A quick recipe from scratch; a minute on one CPU core."""

    steps: int = 400
    evaluate_every: int = 50
    lr: float = 1e-3
    vocabulary: int = 2000
    length: int = 48


class Docstrings(TextClassification):
    """Which package of Python's standard library a docstring comes from; or your own texts and classes."""

    name = "text-classification"
    summary = "packages of docstrings, or texts of yours"
    settings_class = DocstringSettings
    settings: DocstringSettings

    @property
    def classes(self) -> int:
        return len(self.data.classes) if self.settings.data else len(PACKAGES)

    def load(self) -> TextData:
        return read_tables(self.settings.data) if self.settings.data else library_docstrings()


# --- Public sets, from local files


@dataclass(frozen=True)
class Sst2Settings(TextSettings):
    """Three epochs of 67,349 phrases, as BERT's authors fine-tune; training from scratch needs a higher lr."""

    steps: int = 6315
    evaluate_every: int = 500
    lr: float = 2e-5
    warmup: int = 600
    vocabulary: int = 8000
    length: int = 64


class PublicTexts(TextClassification):
    """A set whose shapes are known without its files, so that sites, plans and costs need no download."""

    known_classes: ClassVar[Sequence[str]]
    #: The names of its files.
    files: ClassVar[str]
    language: ClassVar[str] = ""

    @property
    def classes(self) -> int:
        return len(self.known_classes)

    def load(self) -> TextData:
        if not self.settings.data:
            raise TaskError(f"{self.name} is not here: set data= to a folder with {self.files} (.gz is fine, too).")
        return read_tables(self.settings.data, self.known_classes, getattr(self.settings, "language", ""))


class Sst2(PublicTexts):
    """SST-2 (Socher et al. 2013, as in GLUE): whether a phrase about a film is positive."""

    name = "sst2"
    summary = "SST-2: whether a phrase about a film is kind"
    settings_class = Sst2Settings
    known_classes = ("negative", "positive")
    files = "sst2.train.tsv and sst2.dev.tsv, or train.tsv and dev.tsv"


@dataclass(frozen=True)
class XnliSettings(TextSettings):
    """The recipe of Wolfe & Kyrillidis: two epochs of 392,702 pairs in batches of 64, at 1e-5."""

    steps: int = 12_272
    evaluate_every: int = 1000
    batch: int = 64
    lr: float = 1e-5
    warmup: int = 600
    vocabulary: int = 16_000
    length: int = 128
    #: The language of the pairs, if the files have several.
    language: str = "de"


class Xnli(PublicTexts):
    """XNLI (Conneau et al. 2018, arXiv 1809.05053): whether one sentence follows from another."""

    name = "xnli"
    summary = "XNLI: whether a sentence follows from another"
    settings_class = XnliSettings
    settings: XnliSettings
    known_classes = ("entailment", "neutral", "contradiction")
    files = "xnli.train.tsv and xnli.dev.tsv, or .jsonl, with premise, hypothesis and label"
