"""Texts of any length as rows of tokens that are equally long."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from bitplan.tasks.labelled_texts import LabelledTexts, Sample
from bitplan.tasks.tokens import LEVELS

#: What a learnt vocabulary has in front of its tokens: filling, the first token of all, and what ends a text.
PAD, START, END = 0, 1, 2
SPECIAL = 3


class TextEncoder(ABC):
    """Turns samples into rows: a token at the start, the text, one at its end, a second text and its end, filling."""

    #: The numbers of these tokens.
    pad: int
    start: int
    end: int

    @abstractmethod
    def tokens(self, text: str) -> list[int]:
        """The text's own tokens."""

    def rows(self, samples: Sequence[Sample], length: int) -> tuple[Tensor, Tensor]:
        """Tokens (samples, length), and 1 where a token is of the second text; what is too long is cut at its end."""
        tokens = torch.full((len(samples), length), self.pad, dtype=torch.int32)
        kinds = torch.zeros(len(samples), length, dtype=torch.int8)
        for number, (first, second) in enumerate(samples):
            one, other = self.tokens(first), self.tokens(second) if second else []
            _cut(one, other, length - (3 if second else 2))
            row = [self.start, *one, self.end]
            if second:
                kinds[number, len(row) : len(row) + len(other) + 1] = 1
                row += [*other, self.end]
            tokens[number, : len(row)] = torch.tensor(row, dtype=torch.int32)
        return tokens, kinds


def _cut(one: list[int], other: list[int], room: int) -> None:
    """Take from the end of the longer one until both fit."""
    while len(one) + len(other) > room:
        (one if len(one) >= len(other) else other).pop()


class LearntEncoder(TextEncoder):
    """A vocabulary that is learnt from the training texts."""

    pad, start, end = PAD, START, END

    def __init__(self, texts: LabelledTexts, level: str, most: int) -> None:
        whole = "\n".join(text for sample in texts.samples for text in sample if text)
        self.vocabulary = LEVELS[level](whole, most)

    def tokens(self, text: str) -> list[int]:
        return [SPECIAL + number for number in self.vocabulary.encode(text).tolist()]
