from __future__ import annotations

import pytest

from bitplan.errors import BitplanError, BitplanWarning, FormatError, QuantizeError, nearest_names


@pytest.mark.parametrize("error", [FormatError, QuantizeError])
def test_errors_are_caught_as_bitplan_errors_and_as_value_errors(error: type[Exception]) -> None:
    assert issubclass(error, BitplanError)
    assert issubclass(error, ValueError)


def test_warnings_can_be_filtered_as_user_warnings() -> None:
    assert issubclass(BitplanWarning, UserWarning)
    assert not issubclass(BitplanWarning, BitplanError)


def test_the_nearest_name_comes_first_in_the_list_of_suggestions() -> None:
    assert nearest_names("e4m4", ["int8", "e4m3", "fp32"]).startswith("did you mean e4m3")


def test_one_suggestion_reads_as_a_question_without_a_list() -> None:
    assert nearest_names("nvfp", ["nvfp4", "zzz"]) == "did you mean nvfp4?"


def test_several_suggestions_are_joined_by_or() -> None:
    assert nearest_names("int", ["int2", "int3"], most=2) in (
        "did you mean int2 or int3?",
        "did you mean int3 or int2?",
    )


def test_no_more_suggestions_than_asked_for() -> None:
    assert nearest_names("int", [f"int{bits}" for bits in range(2, 10)], most=2).count("int") == 2


def test_a_name_close_to_nothing_gets_the_whole_list() -> None:
    assert nearest_names("@@@", ["fp32", "int8"]) == "known names are fp32, int8"
