"""Stopping a run from outside: the first signal asks politely, the second does what it always did."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether a signal has come; ``train(stop=...)`` asks it after every step."""

    def __init__(self) -> None:
        #: The number of the signal; None as long as none has come.
        self.signal: int | None = None

    def __call__(self) -> bool:
        return self.signal is not None


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Inside, Ctrl-C and SIGTERM only raise a flag, once each."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():  # which alone may handle signals
        yield request
        return
    before: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        request.signal = number
        signal.signal(number, before[number])

    for number in _SIGNALS:
        before[number] = signal.getsignal(number)
        signal.signal(number, note)
    try:
        yield request
    finally:
        for number in _SIGNALS:
            signal.signal(number, before[number])
