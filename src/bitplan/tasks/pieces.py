"""Pieces of words, learnt from a text by byte-pair merges (Sennrich et al. 2016, arXiv 1508.07909).

Pieces that go on within a word are written with ``##`` in front, as WordPiece does. Merging starts from letters and
joins the commonest pair of neighbours again and again; among equally common pairs the first in the alphabet is taken,
so that the same text always gives the same pieces.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import pairwise

Pair = tuple[str, str]

#: A pair that occurs less often teaches nothing.
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
            continue  # an old entry: the pair's count has changed since
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
    """The word in pieces: the merge that was learnt first is made first.

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
