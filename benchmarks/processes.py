"""Contenders of a benchmark, each in a process of its own.

In one process, what one contender compiles changes the next: torch compiles with symbolic sizes once the same code has
met several, and the allocator serves all of them. So each contender is an object in a process of its own, whose
methods the benchmark calls. Objects that only hold weights wait while another is measured.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from bitplan.errors import BitplanError


class ContenderError(BitplanError):
    """What went wrong in the process of a contender, in one line."""

    @classmethod
    def of(cls, error: Exception) -> ContenderError:
        return cls(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")


class LocalContender:
    """A contender in this process, for tests and debuggers."""

    def __init__(self, make: Callable[..., Any], arguments: Sequence[Any]) -> None:
        self._make, self._arguments = make, arguments
        self._made: Any = None

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the contender, which is made at the first call."""
        try:
            if self._made is None:
                self._made = self._make(*self._arguments)
            return getattr(self._made, method)(*arguments)
        except Exception as error:
            raise ContenderError.of(error) from error

    def close(self) -> None:
        self._made = None


class ProcessContender:
    """A contender in a process of its own, which is started at once."""

    def __init__(self, make: Callable[..., Any], arguments: Sequence[Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, tuple(arguments)), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the contender, which its process makes at the first call."""
        try:
            self._connection.send((method, arguments))
            is_error, answer = self._connection.recv()
        except (EOFError, OSError) as error:
            self._process.join(timeout=5)
            raise ContenderError(f"its process ended with exit code {self._process.exitcode}") from error
        if is_error:
            raise ContenderError(answer)
        return answer

    def close(self) -> None:
        self._process.terminate()
        self._process.join()
        self._connection.close()


ContenderHandle = LocalContender | ProcessContender
Name = TypeVar("Name")


@contextmanager
def contenders(
    make: Callable[..., Any], arguments: Mapping[str, Sequence[Any]], in_processes: bool = True
) -> Iterator[dict[str, ContenderHandle]]:
    """One contender a name, made by `make(*arguments)`; their processes end with the block.

    :param make: a function of a module, and arguments that can be pickled.
    """
    kind = ProcessContender if in_processes else LocalContender
    started: dict[str, ContenderHandle] = {}
    try:
        for name, own in arguments.items():
            started[name] = kind(make, own)
        yield started
    finally:
        for contender in started.values():
            contender.close()


def call_all(
    contenders: Mapping[Name, ContenderHandle], method: str, *arguments: Any, jobs: int = 1
) -> Iterator[tuple[Name, Any]]:
    """Call a method of all contenders, `jobs` at a time; yields names with results or :class:`ContenderError`."""

    def call(contender: ContenderHandle) -> Any:
        try:
            return contender.call(method, *arguments)
        except ContenderError as error:
            return error

    with ThreadPoolExecutor(jobs) as pool:
        yield from zip(contenders, pool.map(call, contenders.values()), strict=True)


def require_all(answers: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The results of :func:`call_all`; raises the first error."""
    results = dict(answers)
    for name, result in results.items():
        if isinstance(result, ContenderError):
            raise ContenderError(f"{name}: {result}")
    return results


def _serve(connection: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Answer calls until the other end is closed. Ctrl-C reaches the whole process group: the parent handles it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    contender = LocalContender(make, arguments)
    while True:
        try:
            method, own = connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer = (False, contender.call(method, *own))
        except ContenderError as error:
            answer = (True, str(error))
        connection.send(answer)
