"""Texts with classes, from tables with named columns, tab-separated (.tsv) or JSON lines (.jsonl), also as .gz.

Columns are recognised by name: the text is ``sentence`` or ``text``; a pair is ``premise`` and ``hypothesis`` (or
``sentence1`` and ``sentence2``); the class is ``label`` or ``gold_label``, a number or a word. Lines without a class
(``-``) are ignored, and so are those of other languages if one is chosen.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bitplan.errors import TaskError
from bitplan.files import parse_json
from bitplan.lab.sources.files import read_text
from bitplan.lab.tasks.labelled_texts import LabelledTexts, Sample, TextData

# --- The docstrings of Python's standard library, each with its package


#: Packages with many docstrings that every supported Python has, in every distribution.
PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml")

#: One of this many docstrings is held out.
HOLD_OUT_EVERY = 5


@cache
def library_docstrings() -> TextData:
    """Docstrings by package. A hash of the text decides which of them are held out, so that the split is the same
    everywhere; duplicates are removed, so that none is on both sides.
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
            summary = " ".join(text.split())
            number = int.from_bytes(hashlib.blake2b(summary.encode(), digest_size=8).digest(), "little")
            parts[number % HOLD_OUT_EVERY == 0].setdefault(summary, label)
    training, held_out = map(_labelled, parts)
    return TextData(training, held_out, PACKAGES)


def _labelled(labels: dict[str, int]) -> LabelledTexts:
    return LabelledTexts(tuple((text, "") for text in labels), tuple(labels.values()))


def docstrings_in(folder: Path) -> Iterator[str]:
    """The docstrings of all modules, classes and functions in the folder's Python files, which are not executed."""
    for path in sorted(folder.rglob("*.py")):
        if "test" in path.relative_to(folder).parts or "tests" in path.relative_to(folder).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text and text.strip():
                    yield text


# --- Training texts: the Python standard library's, a file, or a folder with splits


#: Modules whose sources are read, in this order: programs with long explanations, and a file in the library of every
#: supported Python.
TRAINING_MODULES = (
    *("argparse", "ast", "base64", "bdb", "cmd", "configparser", "contextlib", "dataclasses", "difflib", "doctest"),
    *("enum", "ftplib", "functools", "gettext", "gzip", "imaplib", "inspect", "ipaddress", "mailbox", "optparse"),
    *("pickletools", "plistlib", "pprint", "random", "selectors", "shutil", "smtplib", "socket", "statistics"),
    *("subprocess", "threading"),
)

HELD_OUT_MODULES = ("calendar", "csv", "fractions", "heapq", "shlex", "string", "textwrap", "timeit")

#: Characters of each split, however much this Python has.
MOST_CHARACTERS = 1_500_000

#: The held-out share of a text in one piece: its end.
HELD_OUT = 0.1

#: Names of held-out files; training files are called "train".
_HELD_OUT = ("valid", "val", "dev")

_TEST = "test"

_ENDINGS = (".txt", ".txt.gz", ".tokens", ".tokens.gz")


@dataclass(frozen=True)
class Text:
    """Training text and held-out text."""

    training: str
    held_out: str
    #: The test text, evaluated once, at the end; empty if there is none.
    test: str = ""

    def __post_init__(self) -> None:
        for part, purpose in ((self.training, "to learn from"), (self.held_out, "to hold out")):
            if not part.strip():
                raise TaskError(f"the text leaves nothing {purpose}: name a longer one.")


def split(whole: str) -> Text:
    """The splits of a text in one piece: its end is held out."""
    first_held_out = round(len(whole) * (1 - HELD_OUT))
    return Text(whole[:first_held_out], whole[first_held_out:])


@cache
def library_text() -> Text:
    """The sources of the running Python's standard library, which differ a little between versions."""
    return Text(*(_sources(modules) for modules in (TRAINING_MODULES, HELD_OUT_MODULES)))


def _sources(modules: Sequence[str]) -> str:
    folder = Path(sysconfig.get_path("stdlib"))
    files = [path for path in (folder / f"{module}.py" for module in modules) if path.is_file()]
    if not files:
        raise TaskError(
            f"this Python has no sources of its standard library in {folder}: set data= to a text file of yours."
        )
    return "\n".join(path.read_text(encoding="utf-8") for path in files)[:MOST_CHARACTERS]


def read_texts(data: str) -> Text:
    """From a file, or from a folder with a training file and a held-out one, such as PTB's or WikiText's.

    :param data: ``text.txt``, or a folder with names like ``ptb.train.txt`` and ``ptb.valid.txt``; ``.gz`` is unpacked.
    """
    path = Path(data).expanduser()
    if path.is_file():
        return split(read_text(path))
    if not path.is_dir():
        raise TaskError(f"there is no file or folder {data}: set data= to a text file, or to a folder of its parts.")
    training, held_out = _parts(path)
    test = path / _sibling(training, _TEST)
    return Text(read_text(training), read_text(held_out), read_text(test) if test.is_file() else "")


def _sibling(training: Path, name: str) -> str:
    parts = training.name.split(".")
    parts[parts.index("train")] = name
    return ".".join(parts)


def _parts(folder: Path) -> tuple[Path, Path]:
    """The training file and the held-out one beside it, whose names differ in one word."""
    pairs = []
    for path in sorted(folder.iterdir()):
        if "train" not in path.name.split(".") or not path.name.endswith(_ENDINGS):
            continue
        siblings = [folder / _sibling(path, name) for name in _HELD_OUT]
        pairs += [(path, sibling) for sibling in siblings if sibling.is_file()][:1]
    if len(pairs) != 1:
        names = " or ".join(path.name for path, _ in pairs)
        have = f"has more than one ({names})" if pairs else "has none"
        raise TaskError(
            f"a folder of text has one pair of files such as ptb.train.txt and ptb.valid.txt, and {folder} {have}: "
            f"name such a folder, or a single file."
        )
    return pairs[0]


def fetched_wikitext() -> Text:
    """WikiText-2, downloaded by Hugging Face's datasets."""
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise TaskError(
            "download=true needs the package datasets, which is not installed: run 'pip install datasets', "
            "or set data= to a folder with wiki.train.tokens and wiki.valid.tokens."
        ) from error
    try:
        parts: Any = load_dataset("Salesforce/wikitext", "wikitext-2-v1")
        texts = ["".join(parts[name]["text"]) for name in ("train", "validation", "test") if name in parts]
    except Exception as error:  # no network, a full disk, a changed address: the message says why
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise TaskError(
            f"WikiText-2 could not be fetched ({first.removesuffix('.')}): "
            f"set data= to a folder with wiki.train.tokens and wiki.valid.tokens."
        ) from error
    return Text(*texts)


#: Names of files of held-out texts; training files are called "train".
HELD_OUT_ROWS = ("dev", "valid", "validation", "val")

ENDINGS = (".tsv", ".jsonl")

_FIRST = ("sentence", "text", "premise", "sentence1")

_SECOND = ("hypothesis", "sentence2")

_LABEL = ("label", "gold_label")

_LANGUAGE = ("language", "lang")

_UNDECIDED = ("-", "-1", "")


def read_tables(data: str, classes: Sequence[str] | None = None, language: str = "") -> TextData:
    """From a folder with one pair of files such as ``sst2.train.tsv`` and ``sst2.dev.tsv``.

    :param classes: the names of the classes, by number; None: those of the training texts.
    :param language: use only the lines of this language, if the table has such a column.
    """
    folder = Path(data).expanduser()
    if not folder.is_dir():
        raise TaskError(f"there is no folder {data}: set data= to one with files such as train.tsv and dev.tsv.")
    tables = [_table(path, language) for path in _table_parts(folder, language)]
    class_names = _classes(tables[0]) if classes is None else classes
    training, held_out = (_labelled_rows(table, class_names, folder) for table in tables)
    return TextData(training, held_out, class_names)


def _table_parts(folder: Path, language: str) -> tuple[Path, Path]:
    """The training file and the held-out one beside it, whose names differ in one word."""
    pairs = []
    for path in sorted(folder.iterdir()):
        parts = path.name.split(".")
        if not any(path.name.endswith(f"{ending}{packed}") for ending in ENDINGS for packed in ("", ".gz")):
            continue
        for place, word in enumerate(parts):
            if word != "train":
                continue
            siblings = [folder / ".".join([*parts[:place], name, *parts[place + 1 :]]) for name in HELD_OUT_ROWS]
            pairs += [(path, sibling) for sibling in siblings if sibling.is_file()][:1]
    named = [pair for pair in pairs if language and language in pair[0].name.split(".")]
    pairs = named or pairs
    if len(pairs) != 1:
        names = " or ".join(path.name for path, _ in pairs)
        have = f"has more than one ({names})" if pairs else "has none"
        raise TaskError(
            f"a folder of labelled texts has one pair of files such as train.tsv and dev.tsv, and {folder} {have}: "
            f"name such a folder."
        )
    return pairs[0]


def _table(path: Path, language: str) -> list[tuple[Sample, str]]:
    """Every sample with the name of its class."""
    rows = list(_json_rows(path) if ".jsonl" in path.name else _tab_rows(path))
    if not rows:
        raise TaskError(f"{path} has no lines: name a table with texts and labels.")
    names = rows[0][1]
    first, label = _column(names, _FIRST), _column(names, _LABEL)
    second, spoken = _column(names, _SECOND), _column(names, _LANGUAGE)
    if first is None or label is None:
        expected = " or ".join(_FIRST if first is None else _LABEL)
        raise TaskError(
            f"{path} has no column {expected}; it has {', '.join(names)}: name its columns in the first line."
        )
    samples = []
    for number, row in rows:
        if language and spoken is not None and str(row.get(spoken, "")) != language:
            continue
        try:
            word, text, other = str(row[label]).strip(), str(row[first]), str(row[second]) if second else ""
        except KeyError as error:
            raise TaskError(f"{path}:{number} has no {error.args[0]}: every line has all columns.") from error
        if word not in _UNDECIDED:
            samples.append(((text.strip(), other.strip()), word))
    if not samples:
        raise TaskError(f"{path} has no text in the language {language!r}: set language= to one that it has.")
    return samples


def _column(names: Mapping[str, Any], candidates: Sequence[str]) -> str | None:
    return next((name for name in candidates if name in names), None)


def _tab_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    # Quotes are part of the text, and only a line feed ends a line: that is how the sets were written.
    head, *lines = [line.removesuffix("\r") for line in read_text(path).split("\n")]
    names = [name.strip() for name in head.split("\t")]
    for number, line in enumerate(lines, 2):
        if not line.strip():
            continue
        values = line.split("\t")
        if len(values) != len(names):
            raise TaskError(f"{path}:{number} has {len(values)} columns, and the first line has {len(names)}: mend it.")
        yield number, dict(zip(names, values, strict=True))


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise TaskError(f"{path}:{number} is not JSON ({error}): mend it.") from error
        if not isinstance(row, dict):
            raise TaskError(f"{path}:{number} is not a JSON object: every line is one.")
        yield number, row


def _classes(table: Sequence[tuple[Sample, str]]) -> list[str]:
    """Classes in order: numbers by value, words alphabetically."""
    labels = {word for _, word in table}
    if all(word.isdigit() for word in labels):
        return [str(number) for number in range(max(map(int, labels)) + 1)]
    return sorted(labels)


def _labelled_rows(table: Sequence[tuple[Sample, str]], classes: Sequence[str], folder: Path) -> LabelledTexts:
    numbers = {name: number for number, name in enumerate(classes)}
    labels = []
    for _, word in table:
        number = numbers.get(word, int(word) if word.isdigit() else -1)
        if not 0 <= number < len(classes):
            raise TaskError(f"{folder} has the label {word!r}, and the classes are {', '.join(classes)}.")
        labels.append(number)
    return LabelledTexts(tuple(sample for sample, _ in table), tuple(labels))
