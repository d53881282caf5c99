"""Writing what must still be there after a crash, and sentences where that cannot be done."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bitplan.errors import RunError

_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskError(RunError):
    """A file of a run that cannot be written."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """While `path` is written: what goes wrong is told in a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskError(f"the disk is full and {path} could not be written: make room there.") from error
        reason = error.strerror or type(error).__name__
        raise DiskError(f"cannot write {path} ({reason}): name a folder you may write to.") from error


def as_os_error(error: Exception) -> OSError:
    """A library's own error as the operating system's: safetensors tells the number in its text."""
    number = re.search(r"os error (\d+)", str(error))
    code = int(number[1]) if number else errno.EIO
    return OSError(code, os.strerror(code))


def write_durably(path: Path, text: str) -> None:
    """All of `text` or nothing, and on the disk when this returns."""
    with writing(path), fresh_file(path) as fresh:
        fresh.write_text(text, encoding="utf-8", newline="\n")


@contextmanager
def fresh_file(path: Path) -> Iterator[Path]:
    """A name to write under; at the end the file is made durable and takes the place of `path`."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield fresh
        sync(fresh)
        fresh.replace(path)
        sync(path.parent)
    finally:
        fresh.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until the file's contents, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make sure that the folder exists."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DiskError(f"cannot make the folder {path} ({reason}): name another one.") from error
