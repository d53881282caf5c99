"""Text as numbers: bytes, characters, words, or pieces of words."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from bitplan.tasks.pieces import joined, learn_merges, letters, pieces_of
from bitplan.tasks.sources.texts import Text

#: Stands for every word that the vocabulary lacks.
UNKNOWN = "<unk>"
#: The word at the end of every line, where words are those that a file separates by spaces.
LINE_END = "<eos>"

#: Words, numbers, marks and line ends; snake_case falls apart, so that its words are met again elsewhere.
_WORD = re.compile(r"[^\W\d_]+|\d+|[^\w\s]|_|\n")


class Vocabulary(ABC):
    """What turns a text into numbers below :attr:`size`."""

    size: int

    @abstractmethod
    def encode(self, text: str) -> Tensor:
        """The text's tokens, int64."""


class Bytes(Vocabulary):
    """UTF-8 itself: 256 tokens, whatever the text."""

    size = 256

    def encode(self, text: str) -> Tensor:
        return torch.from_numpy(np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int64))


class Units(Vocabulary):
    """The commonest units of a text, and one token for all the others."""

    def __init__(self, cut: Callable[[str], Iterable[str]], text: str, most: int) -> None:
        self.cut = cut
        counts = Counter(cut(text))
        counts.pop(UNKNOWN, None)
        # Of two equally common ones the first in the alphabet: the order of a file's words must not matter.
        common = sorted(counts, key=lambda unit: (-counts[unit], unit))[: most - 1]
        self.numbers = {unit: number for number, unit in enumerate([UNKNOWN, *common])}
        self.size = len(self.numbers)

    def encode(self, text: str) -> Tensor:
        numbers = self.numbers
        return torch.tensor([numbers.get(unit, 0) for unit in self.cut(text)], dtype=torch.int64)


class Pieces(Vocabulary):
    """Words in pieces that were learnt from the text (byte-pair merges); a rare word is several pieces."""

    def __init__(self, text: str, most: int) -> None:
        counts = Counter(words(text))
        spelt = Counter[str]()
        for word, count in counts.items():
            for letter in letters(word):
                spelt[letter] += count
        alphabet = sorted(spelt, key=lambda letter: (-spelt[letter], letter))[: most - 1]
        self.merges = learn_merges(counts, most - 1 - len(alphabet))
        pieces = [UNKNOWN, *alphabet, *(joined(pair) for pair in self.merges)]
        self.numbers = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
        self.size = len(self.numbers)
        self._split: dict[str, list[str]] = {}

    def encode(self, text: str) -> Tensor:
        numbers: list[int] = []
        for word in words(text):
            if word not in self._split:
                self._split[word] = pieces_of(word, self.merges)
            numbers.extend(self.numbers.get(piece, 0) for piece in self._split[word])
        return torch.tensor(numbers, dtype=torch.int64)


def words(text: str) -> list[str]:
    """
    >>> words("self.max_size = 10")
    ['self', '.', 'max', '_', 'size', '=', '10']
    """
    return _WORD.findall(text)


def words_of_lines(text: str) -> list[str]:
    """What the file separates by spaces, and a word at the end of every line: PTB's and WikiText's way.

    >>> words_of_lines(" no it was n't \\n")
    ['no', 'it', 'was', "n't", '<eos>']
    """
    return [word for line in text.splitlines() for word in (*line.split(), LINE_END)]


#: Name -> what makes the vocabulary of a text, of at most so many tokens.
LEVELS: dict[str, Callable[[str, int], Vocabulary]] = {
    "bytes": lambda text, most: Bytes(),
    "characters": lambda text, most: Units(list, text, most),
    "words": lambda text, most: Units(words, text, most),
    "lines": lambda text, most: Units(words_of_lines, text, most),
    "pieces": Pieces,
}


@lru_cache(maxsize=4)
def tokenised(text: Text, level: str, most: int) -> tuple[int, Tensor, Tensor]:
    """The size of the vocabulary, the training tokens and the held-out ones. The vocabulary is the training text's."""
    with torch.device("cpu"):  # where only shapes are asked for, models are made on another device
        vocabulary = _vocabulary(text.training, level, most)
        return vocabulary.size, vocabulary.encode(text.training), vocabulary.encode(text.held_out)


@lru_cache(maxsize=4)
def tokens_to_test(text: Text, level: str, most: int) -> Tensor:
    """The tokens of the part that is looked at once, at the end."""
    with torch.device("cpu"):
        return _vocabulary(text.training, level, most).encode(text.test)


@lru_cache(maxsize=4)
def _vocabulary(training: str, level: str, most: int) -> Vocabulary:
    return LEVELS[level](training, most)
