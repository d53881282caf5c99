from __future__ import annotations

import hashlib
import importlib.util
import py_compile
import sys
from pathlib import Path

import pytest

from bitplan.analysis.targets import (
    describe_error,
    file_sha256,
    find_callable,
    import_file,
    module_sha256,
    parse_file_name,
)
from bitplan.errors import TaskError


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("a.py:B", (Path("a.py"), "B")),
        ("some/a.py", (Path("some/a.py"), "")),
        ("a.py:", (Path("a.py"), "")),
        ("digits", None),
        ("a.pyx:B", None),
        ("py:B", None),
    ],
)
def test_files_are_told_from_names(text: str, result: tuple[Path, str] | None) -> None:
    assert parse_file_name(text) == result


def test_errors_are_of_the_kind_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("x = 1\n\ny = x / 0\n")
    with pytest.raises(TaskError, match=r"own\.py cannot be run: ZeroDivisionError: division by zero \(line 3\)\."):
        import_file(path, TaskError)
    assert "bitplan_target_own" not in sys.modules


def test_only_what_can_be_called_counts(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("number = 3\ndef function(): pass\ndef _hidden(): pass\n")
    module = import_file(path, TaskError)
    assert find_callable(module, path, "function", "thing", TaskError) is module.function
    with pytest.raises(TaskError, match=r"own\.py has no thing 'number'; known names are function$"):
        find_callable(module, path, "number", "thing", TaskError)


def test_what_runs_is_the_file_and_not_bytecode_that_claims_to_be_it(tmp_path: Path) -> None:
    path, other = tmp_path / "own.py", tmp_path / "other.py"
    path.write_text("here = 'source'\n")
    other.write_text("here = 'bytecode'\n")
    cached = importlib.util.cache_from_source(str(path))
    py_compile.compile(str(other), cached, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    module = import_file(path, TaskError)
    assert module.here == "source"
    assert module_sha256(module) == hashlib.sha256(path.read_bytes()).hexdigest() == file_sha256(path)


def test_an_error_without_words_has_its_name() -> None:
    assert describe_error(KeyboardInterruptLike(), Path("x.py")) == "KeyboardInterruptLike."


class KeyboardInterruptLike(Exception):
    pass
