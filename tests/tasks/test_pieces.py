from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from bitplan.lab.tasks.tokens import joined, learn_merges, letters, pieces_of

COUNTS = {"low": 5, "lower": 2, "newest": 6, "widest": 3}


def naive_merges(counts: dict[str, int], most: int) -> list[tuple[str, str]]:
    """The textbook's loop, which counts everything anew for each merge."""
    spelt = {word: letters(word) for word in counts}
    merges: list[tuple[str, str]] = []
    while len(merges) < most:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, pieces in spelt.items():
            for pair in pairwise(pieces):
                pairs[pair] += counts[word]
        best = min(pairs, key=lambda pair: (-pairs[pair], pair), default=None)
        if best is None or pairs[best] < 2:
            break
        merges.append(best)
        for word, pieces in spelt.items():
            new: list[str] = []
            for piece in pieces:
                # Joining from the left, as a reader would.
                if new and (new[-1], piece) == best:
                    new[-1] = joined(best)
                else:
                    new.append(piece)
            spelt[word] = new
    return merges


def test_the_known_example_of_the_paper() -> None:
    merges = list(learn_merges(COUNTS, 3))
    assert merges == [("##e", "##s"), ("##es", "##t"), ("##o", "##w")]


@given(
    st.dictionaries(st.text("abc", min_size=1, max_size=8), st.integers(1, 9), min_size=1, max_size=12),
    st.integers(0, 30),
)
def test_merges_are_those_of_the_textbook(counts: dict[str, int], most: int) -> None:
    assert list(learn_merges(counts, most)) == naive_merges(counts, most)


@given(st.text("abcd", min_size=1, max_size=12))
def test_pieces_spell_the_word(word: str) -> None:
    merges = learn_merges({"abab": 3, "abcabc": 2, "dada": 4, "abcd": 2}, 30)
    pieces = pieces_of(word, merges)
    assert pieces[0] + "".join(piece.removeprefix("##") for piece in pieces[1:]) == word
    assert all(piece.startswith("##") for piece in pieces[1:])


def test_common_words_become_one_piece() -> None:
    merges = learn_merges({"return": 50, "returned": 3, "turn": 9}, 100)
    assert pieces_of("return", merges) == ["return"]
    assert pieces_of("returns", merges) == ["return", "##s"]


def test_pairs_that_come_once_teach_nothing() -> None:
    assert learn_merges({"ab": 1, "cd": 2}, 9) == {("c", "##d"): 0}
