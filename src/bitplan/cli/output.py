"""Where a command's words go.

Without ``--json`` a command prints for people, on stdout. With it, stdout carries exactly one JSON
document, written last and only when the command succeeded; everything else goes to stderr, even
what a library or a child process prints on its own.

The JSON is strict, see :mod:`bitplan.files`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from bitplan.errors import BitplanError
from bitplan.files import json_text, write_whole

__all__ = ["JsonOption", "Output", "command_output", "json_text", "make_folder", "write_file"]

#: The ``--json`` option, the same in every command.
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, all else on stderr.")]

#: Piped output has no terminal to fit: wide enough that no table is folded.
_PIPED_WIDTH = 200


class Output:
    """One command's way to speak: :attr:`console` for people, :meth:`document` for programs."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.documents: list[Any] = []

    @property
    def console(self) -> Console:
        """For people: stdout, or stderr under ``--json``. Plain text where it is not a terminal."""
        return _console(stderr=self.as_json)

    def note(self, sentence: str) -> None:
        """A remark about the work, on stderr whatever was asked for."""
        _console(stderr=True).print(f"bitplan: {sentence}", soft_wrap=True)

    def document(self, content: Any) -> None:
        """What ``--json`` prints; ignored without it."""
        self.documents.append(content)


@contextmanager
def command_output(as_json: bool) -> Iterator[Output]:
    """The output of one command; under `as_json` it must call :meth:`Output.document` exactly once."""
    output = Output(as_json)
    if not as_json:
        yield output
        return
    with _stdout_moved_to_stderr():
        yield output
        (content,) = output.documents
        text = json_text(content)
    typer.echo(text)


def write_file(path: Path, text: str) -> None:
    """Write `text`, or say in a sentence why it cannot be written."""
    try:
        write_whole(path, text)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise BitplanError(f"cannot write {path} ({reason}): name a file in a folder you may write to.") from error


def make_folder(path: Path) -> None:
    """Make sure the folder exists, or say in a sentence why it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise BitplanError(f"cannot make the folder {path} ({reason}): name another one.") from error


def _console(stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    return console


@contextmanager
def _stdout_moved_to_stderr() -> Iterator[None]:
    """Python's own prints, and the file descriptor beneath them for compilers and other children."""
    try:
        stdout, stderr = sys.stdout.fileno(), sys.stderr.fileno()
    except (OSError, ValueError):  # a test's stream that has no descriptor
        with redirect_stdout(sys.stderr):
            yield
        return
    stream = sys.stdout
    stream.flush()
    kept = os.dup(stdout)
    os.dup2(stderr, stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        stream.flush()  # what someone holding the old stream wrote must not surface after the descriptor is back
        os.dup2(kept, stdout)
        os.close(kept)
