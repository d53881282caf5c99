from __future__ import annotations

import pytest

from bitplan.lab.sources.texts import Text
from bitplan.lab.tasks.tokens import LEVELS, UNKNOWN, Pieces, Units, joined, tokenised, words

TEXT = "def low(self):\n    return self.lowest_value  # the low one\n" * 5


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_gives_numbers_below_its_size(level: str) -> None:
    size, training, held_out = tokenised(Text(TEXT, "def lower(other): é\n"), level, 40)
    assert 0 <= training.min() <= training.max() < size
    assert held_out.max() < size
    assert size == 256 or size <= 40


def test_bytes_are_the_text_itself() -> None:
    assert bytes(LEVELS["bytes"]("", 2).encode("grün\n").tolist()).decode() == "grün\n"


def test_the_commonest_words_have_numbers_and_the_others_share_one() -> None:
    vocabulary = LEVELS["words"]("b b b a a c c d", 4)
    assert isinstance(vocabulary, Units)
    assert vocabulary.numbers == {UNKNOWN: 0, "b": 1, "a": 2, "c": 3}  # of equals, the first in the alphabet
    assert vocabulary.encode("a d b x").tolist() == [2, 0, 1, 0]


def test_words_are_cut_alike_in_code_and_in_prose() -> None:
    assert words("x_1 += 'Don't'\n") == ["x", "_", "1", "+", "=", "'", "Don", "'", "t", "'", "\n"]


def test_lines_end_with_a_word_and_unknown_words_of_the_file_stay_unknown() -> None:
    vocabulary = LEVELS["lines"](" the <unk> the \n a \n", 10)
    assert isinstance(vocabulary, Units)
    assert vocabulary.numbers == {"<unk>": 0, "<eos>": 1, "the": 2, "a": 3}
    assert vocabulary.encode("a <unk> b\n").tolist() == [3, 0, 0, 1]


def test_characters_are_in_the_order_of_their_number() -> None:
    assert LEVELS["characters"]("aabbbc", 10).encode("abcd").tolist() == [2, 1, 3, 0]


def test_pieces_spell_words_that_are_new() -> None:
    vocabulary = Pieces(TEXT, 80)
    names = {number: piece for piece, number in vocabulary.numbers.items()}
    spelt = [names[number] for number in vocabulary.encode("lows tset").tolist()]
    assert spelt[0] == "low"
    assert "".join(piece.removeprefix("##") for piece in spelt) == "lowstset"
    assert vocabulary.encode("é").tolist() == [0]


def test_pieces_that_only_lead_to_others_have_numbers_too() -> None:
    vocabulary = Pieces(TEXT, 80)
    assert all(joined(pair) in vocabulary.numbers for pair in vocabulary.merges)
    assert Pieces(TEXT, 30).size == 30  # letters first, then as many merges as there is room for
    assert Pieces(TEXT, 5).size == 5


def test_the_vocabulary_is_the_training_text_s() -> None:
    _, _, held_out = tokenised(Text("a b", "c a"), "words", 10)
    assert held_out.tolist()[0] == 0
    assert held_out.tolist()[1] > 0


def test_the_same_text_is_cut_once() -> None:
    assert tokenised(Text(TEXT, TEXT), "words", 9)[1] is tokenised(Text(TEXT, TEXT), "words", 9)[1]
