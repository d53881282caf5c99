"""Files of JSON lines that only grow, until a resumed run cuts them back to where it goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from bitplan.strict_json import json_line
from bitplan.train.durable import writing


class Journal:
    """One such file, open for more lines; each has a ``"step"``, and steps never go back."""

    def __init__(self, path: Path, after: int) -> None:
        """Keep the lines of up to step `after`; later ones, and a line that a crash tore, are cut off."""
        self.path = path
        with writing(path):
            # Unbuffered: what was written is with the operating system, and a killed process loses none of it.
            self._file: FileIO = open(path, "ab", buffering=0)  # noqa: SIM115 - closed at the run's end
            self._file.truncate(_length_of(path, after))

    def add(self, line: Mapping[str, Any]) -> None:
        """Append a line: all of it or, where the disk is full, a part that the next start cuts off."""
        with writing(self.path):
            data = memoryview(json_line(line).encode())
            while data:
                data = data[self._file.write(data) :]

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        with writing(self.path):
            os.fsync(self._file.fileno())

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a journal that may be growing just now; none where it does not exist."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    lines = [_parsed(line) for line in data.splitlines(keepends=True)]
    return [line for line in lines if line is not None]


def _length_of(path: Path, after: int) -> int:
    """Bytes of the leading lines that are whole and of no later step."""
    length = 0
    for line in path.read_bytes().splitlines(keepends=True):
        content = _parsed(line)
        if content is None or content["step"] > after:
            break
        length += len(line)
    return length


def _parsed(line: bytes) -> dict[str, Any] | None:
    """None where the line is torn."""
    if not line.endswith(b"\n"):
        return None
    try:
        content = json.loads(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) and isinstance(content.get("step"), int) else None
