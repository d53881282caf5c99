"""Files and texts: whole writes, strict JSON, text that is safe to print, and sizes in bytes."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from bitplan.errors import BitplanError

#: Seconds between looks at a lock file.
_LOCK_POLL = 0.1

# --- Writing files so that nothing a user had is lost


def write_whole(path: Path, text: str) -> None:
    """Write all of `text` or nothing: a process that is killed on the way leaves the old file as it was."""
    if path.exists() and not path.is_file():  # a pipe or a terminal has nothing to lose
        path.write_text(text, encoding="utf-8", newline="\n")
        return
    target = path.resolve()
    fresh = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        fresh.write_text(text, encoding="utf-8", newline="\n")
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)


@contextmanager
def fresh_file(path: Path) -> Iterator[Path]:
    """A temporary file that replaces `path` at the end, once it is on disk."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield fresh
        sync(fresh)
        fresh.replace(path)
        sync(path.parent)
    finally:
        fresh.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file's contents, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, most_seconds: float | None = None) -> Iterator[None]:
    """Hold a lock file while other processes that want it wait; without POSIX locks nobody waits.

    :param most_seconds: go on without the lock after so long; by default, wait as long as it takes.
    """
    if sys.platform == "win32":
        yield
        return
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        if most_seconds is None:
            fcntl.flock(file, fcntl.LOCK_EX)
        else:
            _wait_for_lock(file, most_seconds)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a process forked meanwhile has the file open, too


def _wait_for_lock(file: IO[str], most_seconds: float) -> None:
    import fcntl

    until = time.monotonic() + most_seconds
    while time.monotonic() < until:
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_LOCK_POLL)


# --- JSON as RFC 8259 has it, which knows no NaN and no infinities: they are written as strings such as ``"NaN"``


def json_text(content: Any) -> str:
    """`content` as one strict JSON document."""
    return json.dumps(strict(content), indent=2, allow_nan=False)


def json_line(content: Any) -> str:
    """`content` as one line of a file of JSON lines.

    >>> json_line({"step": 3, "loss": float("nan")})
    '{"step": 3, "loss": "NaN"}\\n'
    """
    return json.dumps(strict(content), allow_nan=False) + "\n"


def strict(content: Any) -> Any:
    """`content` in values that strict JSON has."""
    if isinstance(content, float) and not math.isfinite(content):
        return "NaN" if math.isnan(content) else "Infinity" if content > 0 else "-Infinity"
    if isinstance(content, Mapping):
        return {str(key): strict(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [strict(value) for value in content]
    return str(content) if isinstance(content, Path) else content


#: Longer whole numbers are larger than any float.
_MOST_DIGITS = 300


def parse_json(text: str | bytes) -> Any:
    """The content of a JSON document that somebody else may have written; raises ValueError where it is none.

    Nesting too deep to be read is a ValueError too, and so is a whole number that no float holds.

    >>> parse_json('{"step": 3}')
    {'step': 3}
    """
    try:
        return json.loads(text, parse_int=_whole_number)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def _whole_number(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits is too large")
    return int(digits)


# --- Text from files that somebody else wrote


def printable(text: str) -> str:
    r"""`text` with control characters escaped, so that it cannot change a terminal's colours, title or lines.

    >>> print(printable("a\x1b[31m b"))
    a\x1b[31m b
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in _LAYOUT else character.encode("unicode_escape").decode()
        for character in text
    )


#: Line breaks, tabs and spaces that are no ASCII: not "printable" for Python, but harmless.
_LAYOUT = "\n\t\u00a0\u2009\u202f"

# --- Sizes

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
#: What may stand behind a number -> bytes; the decimal units are what vendors print on a card.
_FACTORS = {unit.lower(): 1024**power for power, unit in enumerate(_UNITS)} | {
    unit: 1000**power for power, unit in enumerate(("", "kb", "mb", "gb", "tb"))
}


def byte_text(count: float) -> str:
    """A size for people.

    >>> byte_text(999), byte_text(1536), byte_text(3 * 2**30)
    ('999 B', '1.5 KiB', '3.0 GiB')
    """
    for unit in _UNITS[:-1]:
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_UNITS[-1]}"


def read_bytes(text: str) -> int:
    """The bytes that a text such as ``6GiB``, ``500 MB`` or ``1000000`` means.

    >>> read_bytes("6GiB"), read_bytes("1.5 kb")
    (6442450944, 1500)
    """
    parts = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*", text)
    if parts is None or parts[2].lower() not in _FACTORS:
        raise BitplanError(f"{text!r} is no number of bytes: write it as 6GiB, 500MB or 1000000.")
    count: int = round(float(parts[1]) * _FACTORS[parts[2].lower()])
    if count < 1:
        raise BitplanError(f"{text!r} is less than a byte: write it as 6GiB, 500MB or 1000000.")
    return count
