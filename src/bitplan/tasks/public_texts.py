"""Text classification on public sets, from their files on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from bitplan.errors import TaskError
from bitplan.tasks.labelled_texts import TextData
from bitplan.tasks.sources.tables import read_tables
from bitplan.tasks.text_classification import TextClassification, TextSettings


@dataclass(frozen=True)
class Sst2Settings(TextSettings):
    """Three epochs of 67,349 phrases, as BERT's authors fine-tune; from nothing, a higher lr is wanted."""

    steps: int = 6315
    evaluate_every: int = 500
    lr: float = 2e-5
    warmup: int = 600
    vocabulary: int = 8000
    length: int = 64


class PublicTexts(TextClassification):
    """A set whose shapes are known without its files: sites, plans and costs can be asked before they are there."""

    known_classes: ClassVar[Sequence[str]]
    #: What its files are called.
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
    """SST-2 (Socher et al. 2013, as in GLUE): whether a phrase about a film is kind."""

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
    #: The language of the pairs, where the files have several.
    language: str = "de"


class Xnli(PublicTexts):
    """XNLI (Conneau et al. 2018, arXiv 1809.05053): whether one sentence follows from another."""

    name = "xnli"
    summary = "XNLI: whether a sentence follows from another"
    settings_class = XnliSettings
    settings: XnliSettings
    known_classes = ("entailment", "neutral", "contradiction")
    files = "xnli.train.tsv and xnli.dev.tsv, or .jsonl, with premise, hypothesis and label"
