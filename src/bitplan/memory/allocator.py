"""What torch's own allocators say: how much lives at each phase of a step, and the most that ever lived.

On a CPU every allocation and every release is an event of ``torch.profiler``; workspaces that kernels take from torch's
allocator are among them, unlike anything that is counted tensor by tensor. On a GPU the caching allocator keeps the
figures itself.
"""

from __future__ import annotations

import gc
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from bitplan.errors import AccountError
from bitplan.memory.step import Phase

_MARK = "bitplan:"


class Allocator(ABC):
    """A device's allocator, watched for a while. All figures are bytes beyond what lived at the start of the watch."""

    #: (phase, what lived when the note was taken), in the order of the notes.
    notes: list[tuple[Phase, int]]
    #: The most that lived at any moment.
    peak: int

    def __enter__(self) -> Allocator:
        gc.collect()  # what only waits to be released must not be, in the middle of the watch
        self.notes, self.peak = [], 0
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @abstractmethod
    def _begin(self) -> None: ...

    @abstractmethod
    def _end(self) -> None: ...

    @abstractmethod
    def note(self, phase: Phase) -> None:
        """Note how much lives now."""

    def last(self, phase: Phase) -> int:
        """What lived when `phase` was noted last."""
        return next(live for noted, live in reversed(self.notes) if noted == phase)


class HostAllocator(Allocator):
    """The CPU's, by its events."""

    def _begin(self) -> None:
        if torch._C._autograd._profiler_enabled():
            raise AccountError(
                "torch's profiler is at work already, and it is what measures memory on a CPU: measure outside of it."
            )
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with _quiet_profiler():
            self._profile.__enter__()  # type: ignore[no-untyped-call]

    def note(self, phase: Phase) -> None:
        with record_function(_MARK + phase):
            pass

    def _end(self) -> None:
        with _quiet_profiler():
            self._profile.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        results = self._profile.profiler
        assert results is not None
        assert results.kineto_results is not None
        live = 0
        for _, size, phase in sorted(_events(results.kineto_results.experimental_event_tree()), key=lambda e: e[0]):
            live += size
            self.peak = max(self.peak, live)
            if phase is not None:
                self.notes.append((phase, live))


def _events(tree: list[Any]) -> Iterator[tuple[int, int, Phase | None]]:
    """(time, bytes allocated or, negative, released, the phase that a mark notes)."""
    for event in tree:
        if event.tag == _EventType.Allocation:
            if event.extra_fields.device.type == "cpu":
                yield event.start_time_ns, event.extra_fields.alloc_size, None
        elif event.name.startswith(_MARK):
            yield event.start_time_ns, 0, event.name.removeprefix(_MARK)
        yield from _events(event.children)


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """The profiler's library tells of each start and stop on stderr, unless this variable is set at its first use.

    Python's part of it warns that its own events are not kept from one watch to the next. To keep them (``acc_events``)
    it would digest all of them, which takes as long as the step; what is read here are the allocator's.
    """
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = before or "99"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*clears events")
            yield
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]


class CudaAllocator(Allocator):
    """A GPU's, by its own books."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def _begin(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self._before = torch.cuda.memory_allocated(self.device)

    def note(self, phase: Phase) -> None:
        self.notes.append((phase, torch.cuda.memory_allocated(self.device) - self._before))

    def _end(self) -> None:
        torch.cuda.synchronize(self.device)
        self.peak = torch.cuda.max_memory_allocated(self.device) - self._before


def allocator_of(device: torch.device) -> Allocator:
    """The allocator of a device, to be watched."""
    if device.type == "cpu":
        return HostAllocator()
    if device.type == "cuda":
        return CudaAllocator(device)
    raise AccountError(f"memory is measured on cpu and cuda, not on {device.type}: move the model there.")
