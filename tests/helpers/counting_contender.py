"""A contender for tests of processes; without torch, so that a process starts quickly."""

from __future__ import annotations

import os
import signal


class Counter:
    """A contender that counts, and fails where it is told to."""

    def __init__(self, start: int) -> None:
        if start < 0:
            raise ValueError("starts below zero\nand says more")
        self.count = start

    def add(self, amount: int) -> tuple[int, int]:
        self.count += amount
        return self.count, os.getpid()

    def end_process(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
