"""The steps that optimizers make, as a run notices them: each of them is to be told to the run before the next.

torch calls a hook before every step of every optimizer there is. Whether one trains this model is found out by going
through the parameters of both, which takes a while: those that do are remembered.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bitplan.errors import BitplanWarning


class OptimizerSteps:
    """Which optimizers train a model, and which of them have made a step that nobody has told of."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._untold: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        #: Those that have parameters of the model, which none of them loses again.
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._warned = False

    def is_of_model(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer has any of the model's parameters."""
        if optimizer not in self._known:
            mine = {id(parameter) for parameter in self.model.parameters()}
            if not any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
                return False
            self._known.add(optimizer)
        return True

    def begin(self, optimizer: Optimizer) -> None:
        """An optimizer is about to make a step; warns once where its last one was not told of."""
        if optimizer in self._untold and not self._warned:
            self._warned = True
            warnings.warn(
                "two optimizer steps passed without run.step(): call it after optimizer.step(), or the plan's "
                "schedules and random bits stand still.",
                BitplanWarning,
                stacklevel=5,
            )
        self._untold.add(optimizer)

    def tell(self) -> None:
        """What was made so far is told."""
        self._untold.clear()


#: How many hooks of ours are running, and the handles of hooks to be removed when none is: torch raises where a hook is
#: removed while it goes through them, and a garbage collection may happen at any time.
_running = 0
_unneeded: list[Any] = []


def before_every_step(method: Callable[[Optimizer], None]) -> Callable[[], object]:
    """Call a bound method before each step of any optimizer, until its object is gone or the result is called."""
    watcher = weakref.WeakMethod(method)
    watching_object: object = method.__self__  # type: ignore[attr-defined]

    def hook(optimizer: Optimizer, *_: Any) -> None:
        global _running
        watching = watcher()
        if watching is None:
            return
        _running += 1
        try:
            watching(optimizer)
        finally:
            _running -= 1

    remove = weakref.finalize(watching_object, _remove, register_optimizer_step_pre_hook(hook))
    remove.atexit = False
    return remove


def _remove(handle: Any) -> None:
    _unneeded.append(handle)
    while _unneeded and not _running:
        _unneeded.pop().remove()
