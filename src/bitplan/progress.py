"""What takes long says so on stderr: a sentence with an estimate, and on a terminal a bar."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

#: Work that is expected to take fewer seconds is not announced.
LEAST_SECONDS = 5.0
_WIDTH = 30

_said: set[str] = set()


class Advance(Protocol):
    def __call__(self, steps: int = 1) -> None: ...


def say(sentence: str) -> None:
    """Print a sentence on stderr; of several processes that train one model, the first does."""
    if os.environ.get("RANK", "0") == "0":
        print(f"bitplan: {sentence}", file=sys.stderr, flush=True)


def say_once(sentence: str) -> None:
    """Print a sentence on stderr, once per process."""
    if sentence not in _said:
        _said.add(sentence)
        say(sentence)


def leave_unsaid(sentence: str) -> None:
    """Let :func:`say_once` drop the sentence, because another process says it."""
    _said.add(sentence)


def duration_text(seconds: float) -> str:
    """A rough duration.

    >>> duration_text(8), duration_text(45), duration_text(130)
    ('some 10 seconds', 'some 45 seconds', 'some 2 minutes')
    """
    if seconds < 90:
        return f"some {max(5, round(seconds / 5) * 5)} seconds"
    return f"some {round(seconds / 60)} minutes"


@contextmanager
def announced(sentence: str, total: int) -> Iterator[Advance]:
    """Print the sentence, and on a terminal a bar of `total` steps, which the yielded function advances."""
    say(sentence)
    done = 0

    def draw() -> None:
        if sys.stderr.isatty():
            filled = _WIDTH * done // max(total, 1)
            print(f"\r  [{'#' * filled}{'.' * (_WIDTH - filled)}] {done}/{total}", end="", file=sys.stderr, flush=True)

    def advance(steps: int = 1) -> None:
        nonlocal done
        done = min(total, done + steps)
        draw()

    draw()
    try:
        yield advance
    finally:
        if sys.stderr.isatty():
            print("\r" + " " * (_WIDTH + 20) + "\r", end="", file=sys.stderr, flush=True)
