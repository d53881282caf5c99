"""Texts with classes in tables: a text a line, columns by name, tabs between them (.tsv) or JSON (.jsonl); .gz is fine.

Columns are found by their names: the text is ``sentence`` or ``text``; a pair is ``premise`` and ``hypothesis`` (or
``sentence1`` and ``sentence2``); the class is ``label`` or ``gold_label``, a number or a word. Lines without a class
(``-``) are passed over, and so are those of other languages where one is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bitplan.errors import TaskError
from bitplan.tasks.labelled_texts import LabelledTexts, Sample, TextData
from bitplan.tasks.sources.places import read_text

#: How files of held-out texts are called; training files are called "train".
HELD_OUT = ("dev", "valid", "validation", "val")
ENDINGS = (".tsv", ".jsonl")

_FIRST = ("sentence", "text", "premise", "sentence1")
_SECOND = ("hypothesis", "sentence2")
_LABEL = ("label", "gold_label")
_LANGUAGE = ("language", "lang")
_UNDECIDED = ("-", "-1", "")


def read_tables(data: str, classes: Sequence[str] | None = None, language: str = "") -> TextData:
    """From a folder with one pair of files such as ``sst2.train.tsv`` and ``sst2.dev.tsv``.

    :param classes: the names of the classes, by number; None: those that the training texts have.
    :param language: only the lines of this one, where the table has such a column.
    """
    folder = Path(data).expanduser()
    if not folder.is_dir():
        raise TaskError(f"there is no folder {data}: set data= to one with files such as train.tsv and dev.tsv.")
    tables = [_table(path, language) for path in _parts(folder, language)]
    known = _classes(tables[0]) if classes is None else classes
    training, held_out = (_labelled(table, known, folder) for table in tables)
    return TextData(training, held_out, known)


def _parts(folder: Path, language: str) -> tuple[Path, Path]:
    """The training file and the held-out one beside it, which differ in one word of their names."""
    pairs = []
    for path in sorted(folder.iterdir()):
        words = path.name.split(".")
        if not any(path.name.endswith(f"{ending}{packed}") for ending in ENDINGS for packed in ("", ".gz")):
            continue
        for place, word in enumerate(words):
            if word != "train":
                continue
            siblings = [folder / ".".join([*words[:place], name, *words[place + 1 :]]) for name in HELD_OUT]
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
    """Every sample with the word for its class."""
    rows = list(_json_rows(path) if ".jsonl" in path.name else _tab_rows(path))
    if not rows:
        raise TaskError(f"{path} has no lines: name a table with texts and labels.")
    names = rows[0][1]
    first, label = _column(names, _FIRST), _column(names, _LABEL)
    second, spoken = _column(names, _SECOND), _column(names, _LANGUAGE)
    if first is None or label is None:
        wanted = " or ".join(_FIRST if first is None else _LABEL)
        raise TaskError(
            f"{path} has no column {wanted}; it has {', '.join(names)}: name its columns in the first line."
        )
    found = []
    for number, row in rows:
        if language and spoken is not None and str(row.get(spoken, "")) != language:
            continue
        try:
            word, text, other = str(row[label]).strip(), str(row[first]), str(row[second]) if second else ""
        except KeyError as error:
            raise TaskError(f"{path}:{number} has no {error.args[0]}: every line has all columns.") from error
        if word not in _UNDECIDED:
            found.append(((text.strip(), other.strip()), word))
    if not found:
        raise TaskError(f"{path} has no text in the language {language!r}: set language= to one that it has.")
    return found


def _column(names: Mapping[str, Any], wanted: Sequence[str]) -> str | None:
    return next((name for name in wanted if name in names), None)


def _tab_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    # Quotes are part of the text, and a line is ended by a line feed alone: so the sets were written.
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
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise TaskError(f"{path}:{number} is not JSON ({error.msg}): mend it.") from error
        if not isinstance(row, dict):
            raise TaskError(f"{path}:{number} is not a JSON object: every line is one.")
        yield number, row


def _classes(table: Sequence[tuple[Sample, str]]) -> list[str]:
    """Numbers in their order, words in the alphabet's."""
    words = {word for _, word in table}
    if all(word.isdigit() for word in words):
        return [str(number) for number in range(max(map(int, words)) + 1)]
    return sorted(words)


def _labelled(table: Sequence[tuple[Sample, str]], classes: Sequence[str], folder: Path) -> LabelledTexts:
    numbers = {name: number for number, name in enumerate(classes)}
    labels = []
    for _, word in table:
        number = numbers.get(word, int(word) if word.isdigit() else -1)
        if not 0 <= number < len(classes):
            raise TaskError(f"{folder} has the label {word!r}, and the classes are {', '.join(classes)}.")
        labels.append(number)
    return LabelledTexts(tuple(sample for sample, _ in table), tuple(labels))
