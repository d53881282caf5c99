"""Tokenization of text: bytes, characters, words, or pieces of words."""

from __future__ import annotations

import heapq
import re
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from bitplan.lab.sources.texts import Text
from bitplan.lab.tasks.labelled_texts import LabelledTexts, Sample

# --- Pieces of words, learned from a text by byte-pair merges (Sennrich et al. 2016, arXiv 1508.07909)


Pair = tuple[str, str]

#: The least frequency of a pair that is merged.
LEAST = 2


def joined(pair: Pair) -> str:
    """
    >>> joined(("re", "##turn"))
    'return'
    """
    return pair[0] + pair[1].removeprefix("##")


def letters(word: str) -> list[str]:
    """
    >>> letters("def")
    ['d', '##e', '##f']
    """
    return [word[0], *(f"##{letter}" for letter in word[1:])]


def learn_merges(counts: Mapping[str, int], most: int) -> dict[Pair, int]:
    """The first `most` merges of the words in `counts`, each with its rank."""
    spelt = {word: letters(word) for word in counts}
    pairs: Counter[Pair] = Counter()
    where: defaultdict[Pair, set[str]] = defaultdict(set)
    for word, pieces in spelt.items():
        for pair in pairwise(pieces):
            pairs[pair] += counts[word]
            where[pair].add(word)
    queue = [(-count, pair) for pair, count in pairs.items()]
    heapq.heapify(queue)
    merges: dict[Pair, int] = {}
    while queue and len(merges) < most:
        count, best = heapq.heappop(queue)
        if -count != pairs[best]:
            continue  # an outdated entry: the pair's count has changed since
        if -count < LEAST:
            break
        merges[best] = len(merges)
        changed: set[Pair] = set()
        for word in sorted(where.pop(best)):
            old = spelt[word]
            new = _merged(old, best)
            for pair in pairwise(old):
                pairs[pair] -= counts[word]
                changed.add(pair)
            for pair in pairwise(new):
                pairs[pair] += counts[word]
                where[pair].add(word)
                changed.add(pair)
            spelt[word] = new
        for pair in changed:
            if pairs[pair] > 0:
                heapq.heappush(queue, (-pairs[pair], pair))
    return merges


def pieces_of(word: str, merges: Mapping[Pair, int]) -> list[str]:
    """The word in pieces; merges are applied in the order in which they were learned.

    >>> pieces_of("def", {("d", "##e"): 0, ("de", "##f"): 1})
    ['def']
    """
    pieces = letters(word)
    while len(pieces) > 1:
        best = min(pairwise(pieces), key=lambda pair: merges.get(pair, len(merges)))
        if best not in merges:
            break
        pieces = _merged(pieces, best)
    return pieces


def _merged(pieces: list[str], pair: Pair) -> list[str]:
    result: list[str] = []
    place = 0
    while place < len(pieces):
        if tuple(pieces[place : place + 2]) == pair:
            result.append(joined(pair))
            place += 2
        else:
            result.append(pieces[place])
            place += 1
    return result


#: The token of every word outside the vocabulary.
UNKNOWN = "<unk>"
#: The token at the end of every line, if words are those that a file separates by spaces.
LINE_END = "<eos>"

#: Words, numbers, marks and line ends; snake_case is split, so that its words match those elsewhere.
_WORD = re.compile(r"[^\W\d_]+|\d+|[^\w\s]|_|\n")


class Vocabulary(ABC):
    """Converts a text into numbers below :attr:`size`."""

    size: int

    @abstractmethod
    def encode(self, text: str) -> Tensor:
        """The text's tokens, int64."""


class Bytes(Vocabulary):
    """UTF-8: 256 tokens, whatever the text."""

    size = 256

    def encode(self, text: str) -> Tensor:
        return torch.from_numpy(np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int64))


class Units(Vocabulary):
    """The most common units of a text, and one token for all others."""

    def __init__(self, cut: Callable[[str], Iterable[str]], text: str, most: int) -> None:
        self.cut = cut
        counts = Counter(cut(text))
        counts.pop(UNKNOWN, None)
        # Ties go to the first in the alphabet: the order of a file's words must not matter.
        common = sorted(counts, key=lambda unit: (-counts[unit], unit))[: most - 1]
        self.numbers = {unit: number for number, unit in enumerate([UNKNOWN, *common])}
        self.size = len(self.numbers)

    def encode(self, text: str) -> Tensor:
        numbers = self.numbers
        return torch.tensor([numbers.get(unit, 0) for unit in self.cut(text)], dtype=torch.int64)


class Pieces(Vocabulary):
    """Words in pieces that were learned from the text (byte-pair merges); a rare word is several pieces."""

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
    """Words that the file separates by spaces, and a token at the end of every line, as in PTB and WikiText.

    >>> words_of_lines(" no it was n't \\n")
    ['no', 'it', 'was', "n't", '<eos>']
    """
    return [word for line in text.splitlines() for word in (*line.split(), LINE_END)]


#: Name -> the class of vocabulary, made from a text and a largest size.
LEVELS: dict[str, Callable[[str, int], Vocabulary]] = {
    "bytes": lambda text, most: Bytes(),
    "characters": lambda text, most: Units(list, text, most),
    "words": lambda text, most: Units(words, text, most),
    "lines": lambda text, most: Units(words_of_lines, text, most),
    "pieces": Pieces,
}


@lru_cache(maxsize=4)
def tokenised(text: Text, level: str, most: int) -> tuple[int, Tensor, Tensor]:
    """The size of the vocabulary, the training tokens and the held-out ones; the vocabulary is the training text's."""
    with torch.device("cpu"):  # under a fake device, models are created on another device
        vocabulary = _vocabulary(text.training, level, most)
        return vocabulary.size, vocabulary.encode(text.training), vocabulary.encode(text.held_out)


@lru_cache(maxsize=4)
def tokens_to_test(text: Text, level: str, most: int) -> Tensor:
    """The tokens of the test text, which is evaluated once, at the end."""
    with torch.device("cpu"):
        return _vocabulary(text.training, level, most).encode(text.test)


@lru_cache(maxsize=4)
def _vocabulary(training: str, level: str, most: int) -> Vocabulary:
    return LEVELS[level](training, most)


# --- Texts of any length as rows of equal length


#: The first tokens of a learned vocabulary: padding, start of a row, and end of a text.
PAD, START, END = 0, 1, 2

SPECIAL = 3


class TextEncoder(ABC):
    """Converts samples to rows: a start token, the text, an end token, a second text and its end, padding."""

    #: The numbers of these tokens.
    pad: int
    start: int
    end: int

    @abstractmethod
    def tokens(self, text: str) -> list[int]:
        """The text's own tokens."""

    def rows(self, samples: Sequence[Sample], length: int) -> tuple[Tensor, Tensor]:
        """Tokens (samples, length), and 1 where a token is of the second text; longer texts are truncated."""
        tokens = torch.full((len(samples), length), self.pad, dtype=torch.int32)
        kinds = torch.zeros(len(samples), length, dtype=torch.int8)
        for number, (first, second) in enumerate(samples):
            first_tokens, second_tokens = self.tokens(first), self.tokens(second) if second else []
            _cut(first_tokens, second_tokens, length - (3 if second else 2))
            row = [self.start, *first_tokens, self.end]
            if second:
                kinds[number, len(row) : len(row) + len(second_tokens) + 1] = 1
                row += [*second_tokens, self.end]
            tokens[number, : len(row)] = torch.tensor(row, dtype=torch.int32)
        return tokens, kinds


def _cut(first: list[int], second: list[int], room: int) -> None:
    """Truncate the longer one until both fit."""
    while len(first) + len(second) > room:
        (first if len(first) >= len(second) else second).pop()


class LearntEncoder(TextEncoder):
    """A vocabulary that is learned from the training texts."""

    pad, start, end = PAD, START, END

    def __init__(self, texts: LabelledTexts, level: str, most: int) -> None:
        whole = "\n".join(text for sample in texts.samples for text in sample if text)
        self.vocabulary = LEVELS[level](whole, most)

    def tokens(self, text: str) -> list[int]:
        return [SPECIAL + number for number in self.vocabulary.encode(text).tolist()]
