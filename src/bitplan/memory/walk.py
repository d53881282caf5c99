"""A training step on fake tensors, with every piece of memory that it would take followed from birth to death."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bitplan.memory.step import Phase
from bitplan.memory.storages import held, parts_of
from bitplan.memory.workspaces import KEPT, PASSING


class Walk:
    """Sees every tensor that an operation returns, and when its memory is released.

    What kernels take for themselves is not seen, but for what :mod:`bitplan.memory.workspaces` knows.
    """

    def __init__(self) -> None:
        #: Bytes that live now, and the most that ever did.
        self.live = self.peak = 0
        self.notes: dict[Phase, int] = {}
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._is_watching = False
        self._looks_away = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See all operations inside."""
        self._is_watching = True
        self._mode = _Mode(self)
        try:
            with self._mode:
                yield
        finally:
            self._is_watching = False

    def note(self, phase: Phase) -> None:
        """Note how much lives now; the last note of a phase counts."""
        self.notes[phase] = self.live

    def hold(self, size: int) -> None:
        """Count so many bytes that live all the time."""
        self.live += size
        self.peak = max(self.peak, self.live)

    def allow(self, extra: int) -> None:
        """Count so many bytes that live for a moment beside what lives now."""
        if self._is_watching and not self._looks_away:
            self.peak = max(self.peak, self.live + extra)

    def see(self, values: Iterable[object]) -> None:
        """Count the memory beneath the tensors among these values as alive, until it is released."""
        if not self._is_watching or self._looks_away:
            return
        for value in values:
            # What a fake sparse tensor holds is not known: that of a batch is held from the start.
            if isinstance(value, Tensor) and value.layout == torch.strided:
                for part in parts_of(value):
                    self._see(part.untyped_storage(), part.device)

    def _see(self, storage: torch.UntypedStorage, device: torch.device) -> None:
        key = storage._cdata
        if key in self._storages:
            return
        size = held(storage.nbytes(), device)
        self._storages[key] = weakref.ref(storage, self._end_of(key, size))
        self.hold(size)

    def _end_of(self, key: int, size: int) -> Callable[[Any], None]:
        def end(_: Any) -> None:
            del self._storages[key]
            self.live -= size

        return end

    @contextmanager
    def looking_away(self, extra: int) -> Iterator[None]:
        """While something is at work whose own memory is known: `extra` bytes at most beyond what lives."""
        self.allow(extra)
        self._looks_away = True
        try:
            yield
        finally:
            self._looks_away = False

    @contextmanager
    def without_mode(self) -> Iterator[None]:
        """While compiled code is called: torch.compile gives up, for good, on code that a dispatch mode watches."""
        if not self._is_watching:
            yield
            return
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self._mode.__enter__()  # type: ignore[no-untyped-call]


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What shows a walk the operations."""

    def __init__(self, walk: Walk) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.walk = walk

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in KEPT:
            result = KEPT[func](result, *args, **(kwargs or {}))
        self.walk.see(tree_leaves(result))
        if func in PASSING:
            self.walk.allow(PASSING[func](result, *args, **(kwargs or {})))
        return result
