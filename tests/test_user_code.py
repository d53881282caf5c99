from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bitplan.errors import TaskError
from bitplan.user_code import in_words, named_file, public_name, run_file


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a.py:B", (Path("a.py"), "B")),
        ("some/a.py", (Path("some/a.py"), "")),
        ("a.py:", (Path("a.py"), "")),
        ("digits", None),
        ("a.pyx:B", None),
        ("py:B", None),
    ],
)
def test_files_are_told_from_names(text: str, found: tuple[Path, str] | None) -> None:
    assert named_file(text) == found


def test_errors_are_of_the_kind_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("x = 1\n\ny = x / 0\n")
    with pytest.raises(TaskError, match=r"own\.py cannot be run: ZeroDivisionError: division by zero \(line 3\)\."):
        run_file(path, TaskError)
    assert "bitplan_target_own" not in sys.modules


def test_only_what_can_be_called_counts(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("number = 3\ndef function(): pass\ndef _hidden(): pass\n")
    module = run_file(path, TaskError)
    assert public_name(module, path, "function", "thing", TaskError) is module.function
    with pytest.raises(TaskError, match=r"own\.py has no thing 'number'; known names are function$"):
        public_name(module, path, "number", "thing", TaskError)


def test_an_error_without_words_has_its_name() -> None:
    assert in_words(KeyboardInterruptLike(), Path("x.py")) == "KeyboardInterruptLike."


class KeyboardInterruptLike(Exception):
    pass
