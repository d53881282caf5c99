"""Texts to learn from: the Python standard library's own, a file, or a folder with its parts."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bitplan.errors import TaskError
from bitplan.tasks.sources.places import read_text

#: Modules whose sources are read, in this order. They are chosen for their words: programs with long explanations. Each
#: is a file in the library of every Python that bitplan supports.
TRAINING_MODULES = (
    *("argparse", "ast", "base64", "bdb", "cmd", "configparser", "contextlib", "dataclasses", "difflib", "doctest"),
    *("enum", "ftplib", "functools", "gettext", "gzip", "imaplib", "inspect", "ipaddress", "mailbox", "optparse"),
    *("pickletools", "plistlib", "pprint", "random", "selectors", "shutil", "smtplib", "socket", "statistics"),
    *("subprocess", "threading"),
)
HELD_OUT_MODULES = ("calendar", "csv", "fractions", "heapq", "shlex", "string", "textwrap", "timeit")

#: So many characters of each part, whatever more this Python has.
MOST_CHARACTERS = 1_500_000

#: The end of a text in one piece is held out: this share of it.
HELD_OUT = 0.1

#: How held-out files are called; training files are called "train".
_HELD_OUT = ("valid", "val", "dev")
_TEST = "test"
_ENDINGS = (".txt", ".txt.gz", ".tokens", ".tokens.gz")


@dataclass(frozen=True)
class Text:
    """What is learnt from, and what is held out."""

    training: str
    held_out: str
    #: Held out as well, and looked at once, at the end; empty where there is none.
    test: str = ""

    def __post_init__(self) -> None:
        for part, words in ((self.training, "to learn from"), (self.held_out, "to hold out")):
            if not part.strip():
                raise TaskError(f"the text leaves nothing {words}: name a longer one.")


def split(whole: str) -> Text:
    """A text in one piece: its end is held out."""
    first_held_out = round(len(whole) * (1 - HELD_OUT))
    return Text(whole[:first_held_out], whole[first_held_out:])


@cache
def library_text() -> Text:
    """The sources of the running Python's standard library. They differ a little from version to version."""
    return Text(*(_sources(modules) for modules in (TRAINING_MODULES, HELD_OUT_MODULES)))


def _sources(modules: Sequence[str]) -> str:
    folder = Path(sysconfig.get_path("stdlib"))
    found = [path for path in (folder / f"{module}.py" for module in modules) if path.is_file()]
    if not found:
        raise TaskError(
            f"this Python has no sources of its standard library in {folder}: set data= to a text file of yours."
        )
    return "\n".join(path.read_text(encoding="utf-8") for path in found)[:MOST_CHARACTERS]


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
    words = training.name.split(".")
    words[words.index("train")] = name
    return ".".join(words)


def _parts(folder: Path) -> tuple[Path, Path]:
    """The training file and the held-out one beside it, which differ in one word of their names."""
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
    """WikiText-2 by Hugging Face's downloader."""
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
    except Exception as error:  # no network, no room, a changed address: the reason is in the words
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise TaskError(
            f"WikiText-2 could not be fetched ({first.removesuffix('.')}): "
            f"set data= to a folder with wiki.train.tokens and wiki.valid.tokens."
        ) from error
    return Text(*texts)
