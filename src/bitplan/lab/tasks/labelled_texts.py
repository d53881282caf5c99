"""Texts with classes, for text classification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bitplan.errors import TaskError

#: A text, and a second one if pairs are classified ("" if not).
Sample = tuple[str, str]


@dataclass(frozen=True)
class LabelledTexts:
    """Samples and their classes."""

    samples: tuple[Sample, ...]
    labels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.samples)


@dataclass(frozen=True)
class TextData:
    """A data set: training texts, held-out texts, and the names of the classes."""

    training: LabelledTexts
    held_out: LabelledTexts
    classes: Sequence[str]

    def __post_init__(self) -> None:
        for part, what in ((self.training, "to learn from"), (self.held_out, "held out")):
            if not len(part):
                raise TaskError(f"there are no texts {what}: name files that have some.")
            if not 0 <= min(part.labels) <= max(part.labels) < len(self.classes):
                raise TaskError(
                    f"a text {what} is of class {max(part.labels)}, and there are {len(self.classes)} classes: this is "
                    f"another set."
                )
