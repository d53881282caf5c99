"""Output of commands: text and tables for people, JSON for programs.

Without ``--json`` a command prints text on stdout; tables fit the width of the terminal. With it, stdout carries
exactly one JSON document, written last and only when the command succeeded; everything else goes to stderr, even what
a library or a child process prints. The JSON is strict, see :mod:`bitplan.files`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import IO, Annotated, Any, Literal, NamedTuple, NoReturn

import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bitplan.cli import CLOSED_OUTPUT
from bitplan.errors import BitplanError
from bitplan.files import json_text, printable, write_whole

__all__ = [
    "FittedTable",
    "JsonOption",
    "Kind",
    "Output",
    "OutputClosed",
    "command_output",
    "json_text",
    "make_folder",
    "write_file",
]

#: The ``--json`` option, the same in every command.
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, all else on stderr.")]

#: Piped output has no terminal to fit: wide enough that no table is folded.
_PIPED_WIDTH = 200


class OutputClosed(SystemExit):
    """Nobody reads the output any longer, as in ``bitplan runs | head -1``."""

    def __init__(self) -> None:
        super().__init__(CLOSED_OUTPUT)


class SafeConsole(Console):
    """A console that prints no control characters: text may come from a run folder that somebody else made."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(safe(content) for content in objects), **options)

    def on_broken_pipe(self) -> None:
        """Discard further output, and end the command as shells expect it; rich would exit with 1."""
        self.quiet = True
        _close(self.file)


def _close(stream: IO[str]) -> NoReturn:
    """Discard what is written to `stream` from now on, and say so."""
    discard = os.open(os.devnull, os.O_WRONLY)
    os.dup2(discard, stream.fileno())
    os.close(discard)
    raise OutputClosed


def safe(content: Any) -> Any:
    """A text without control characters; anything else as it is."""
    if isinstance(content, str):
        return printable(content)
    if isinstance(content, Text) and not content.plain.isprintable():
        return Text(printable(content.plain), style=content.style)
    return content


class Output:
    """The output of one command: :attr:`console` for people, :meth:`document` for programs."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.documents: list[Any] = []

    @property
    def console(self) -> Console:
        """For people: stdout, or stderr under ``--json``. Plain text where it is not a terminal."""
        return _console(stderr=self.as_json)

    def note(self, sentence: str) -> None:
        """Print a remark on stderr, with and without ``--json``."""
        _console(stderr=True).print(f"bitplan: {sentence}", soft_wrap=True)

    def document(self, content: Any) -> None:
        """The JSON document; ignored without ``--json``."""
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
    try:
        typer.echo(text)
    except BrokenPipeError:
        _close(sys.stdout)


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
    console = SafeConsole(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPED_WIDTH
        console.soft_wrap = True  # a sentence stays on one line
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
    saved = os.dup(stdout)
    os.dup2(stderr, stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        stream.flush()  # text in the buffer of the old stream must not appear after the descriptor is restored
        os.dup2(saved, stdout)
        os.close(saved)


# --- Tables

Cell = str | Text
#: How a column gives way where the terminal is narrow. ``name``: one line, shortened at its front. ``text``: wraps.
#: ``word`` and ``number``: one line, never shortened.
Kind = Literal["name", "text", "word", "number"]

#: Spaces between two columns, and the least width of a column that has to give way.
_GAP = 2
_LEAST = {"text": 16, "name": 14}


class _Column(NamedTuple):
    heading: str
    kind: Kind
    style: str
    is_optional: bool


class FittedTable:
    """A table that is no wider than the console: text wraps, names shorten, and then optional columns follow below."""

    def __init__(self, title: str | None = None) -> None:
        self.title = title
        self._columns: list[_Column] = []
        self._rows: list[tuple[Cell, ...]] = []
        self._section_ends: set[int] = set()

    def add_column(self, heading: str, kind: Kind = "word", *, style: str = "", is_optional: bool = False) -> None:
        """Add a column; of the optional ones, the last is moved below first."""
        self._columns.append(_Column(printable(heading), kind, style, is_optional))

    def add_row(self, *cells: Cell) -> None:
        self._rows.append(tuple(map(safe, cells)))

    def add_section(self) -> None:
        """Draw a line below the last row."""
        self._section_ends.add(len(self._rows) - 1)

    def print(self, console: Console) -> None:
        shown = list(range(len(self._columns)))
        headings, widths = self._fit(shown, console.width)
        while _total(widths) > console.width and any(self._columns[index].is_optional for index in shown):
            shown.remove(max(index for index in shown if self._columns[index].is_optional))
            headings, widths = self._fit(shown, console.width)
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
        for index, heading, width in zip(shown, headings, widths, strict=True):
            column = self._columns[index]
            table.add_column(
                heading,
                justify="right" if column.kind == "number" else "left",
                style=column.style,
                no_wrap=column.kind != "text",
                width=width,
                overflow="fold",
            )
        for number, row in enumerate(self._rows):
            cells = [
                _shortened(row[index], width) if self._columns[index].kind == "name" else row[index]
                for index, width in zip(shown, widths, strict=True)
            ]
            table.add_row(*cells, end_section=number in self._section_ends)
        if self.title:
            console.print(self.title, style="italic")
        console.print(table, soft_wrap=False)
        moved = [index for index in range(len(self._columns)) if index not in shown]
        if moved:
            console.print()
            self._continued(moved).print(console)

    def _continued(self, moved: Sequence[int]) -> FittedTable:
        """A table of the columns that had no room, behind those that name the rows."""
        table = FittedTable()
        first_optional = min(index for index, column in enumerate(self._columns) if column.is_optional)
        keys = [index for index in range(first_optional) if self._columns[index].kind in ("name", "word")] or [0]
        for index in (*keys, *moved):
            # The first of them stays, so that every table has fewer columns left than the one before.
            is_optional = index in moved[1:]
            table._columns.append(self._columns[index]._replace(is_optional=is_optional))
        table._rows = [tuple(row[index] for index in (*keys, *moved)) for row in self._rows]
        table._section_ends = self._section_ends
        return table

    def _fit(self, shown: Sequence[int], available: int) -> tuple[list[str], list[int]]:
        """Headings and widths of the columns: as they are, if that fits; else broken headings and smaller columns."""
        columns = [self._columns[index] for index in shown]
        headings = [column.heading for column in columns]
        longest = [max((cell_len(str(row[index])) for row in self._rows), default=0) for index in shown]
        widths = [max(_lines_width(heading), length) for heading, length in zip(headings, longest, strict=True)]
        if _total(widths) > available:
            for number, heading in enumerate(headings):
                if _lines_width(heading) > longest[number]:
                    headings[number] = heading.replace(" ", "\n")
            widths = [max(_lines_width(heading), length) for heading, length in zip(headings, longest, strict=True)]
        for kind, least in _LEAST.items():
            for number, column in enumerate(columns):
                excess = _total(widths) - available
                if column.kind == kind and excess > 0:
                    widths[number] = max(min(widths[number], least), widths[number] - excess)
        return headings, widths


def _lines_width(text: str) -> int:
    return max(map(cell_len, text.split("\n")))


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _shortened(cell: Cell, width: int) -> Cell:
    """The end of a name, which is what tells module paths apart.

    >>> _shortened("layer4.1.conv2.weight", 16)
    '….1.conv2.weight'
    """
    text = str(cell)
    return cell if cell_len(text) <= width else f"…{text[-(width - 1) :]}"
