"""Batches made ahead: while a GPU computes a step, another thread makes the batch of the next.

A batch is a pure function of the step (:meth:`bitplan.tasks.Task.batch`), so it does not matter when it is made, and
one that is not wanted after all is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Ahead:
    """``ahead(step)`` is ``batch(step)``, and begins with the batch of the step after it, if that is before `end`."""

    def __init__(self, batch: Callable[[int], Any], end: int) -> None:
        self._batch = batch
        self._end = end
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._next: tuple[int, Future[Any]] | None = None

    def __call__(self, step: int) -> Any:
        coming, self._next = self._next, None
        if coming is not None and coming[0] == step:
            batch = coming[1].result()
        else:
            if coming is not None:
                coming[1].cancel()
            batch = self._thread.submit(self._batch, step).result()  # never two at once: tasks may cache
        if step + 1 < self._end:
            self._next = step + 1, self._thread.submit(self._batch, step + 1)
        return batch

    def close(self) -> None:
        """No more batches are made; one that is being made is waited for."""
        self._thread.shutdown(cancel_futures=True)
