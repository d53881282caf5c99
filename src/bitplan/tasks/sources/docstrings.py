"""The docstrings of Python's standard library, each with the package that it comes from."""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from bitplan.errors import TaskError
from bitplan.tasks.labelled_texts import LabelledTexts, TextData

#: Packages with many docstrings, which every Python that bitplan supports has, and every system's way to package it.
PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml")

#: One docstring in so many is held out.
HOLD_OUT_EVERY = 5


@cache
def library_docstrings() -> TextData:
    """Docstrings by package. Which of them are held out follows from their words, so that it is the same everywhere;
    one that comes twice comes once here, and so never on both sides.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    missing = [package for package in PACKAGES if not (folder / package).is_dir()]
    if missing:
        raise TaskError(
            f"this Python has no sources of its package {missing[0]} in {folder}: set data= to a folder with files "
            f"such as train.tsv and dev.tsv."
        )
    parts: tuple[dict[str, int], dict[str, int]] = {}, {}
    for label, package in enumerate(PACKAGES):
        for text in docstrings_in(folder / package):
            words = " ".join(text.split())
            number = int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little")
            parts[number % HOLD_OUT_EVERY == 0].setdefault(words, label)
    training, held_out = map(_labelled, parts)
    return TextData(training, held_out, PACKAGES)


def _labelled(labels: dict[str, int]) -> LabelledTexts:
    return LabelledTexts(tuple((text, "") for text in labels), tuple(labels.values()))


def docstrings_in(folder: Path) -> Iterator[str]:
    """Of all modules, classes and functions in the folder's files of Python, which are read and not run."""
    for path in sorted(folder.rglob("*.py")):
        if "test" in path.relative_to(folder).parts or "tests" in path.relative_to(folder).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text and text.strip():
                    yield text
