"""Loss scaling: the loss times a power of two, so that small gradients reach formats without a scale of their own.

As Lee, Sharma & Aiken 2023 train (arXiv 2301.13464), by torch's own ``GradScaler``: a step whose gradients are not all
finite is skipped and the scale halved; after an epoch of clean steps it is doubled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

#: What the paper's runs begin with.
PAPER_START = 65536.0
#: A scale that was halved down to this has found no finite gradient for dozens of steps.
_LOST = 2.0**-40


class LossScale:
    """The scale of a run, at some step. Without one, everything passes as it is."""

    def __init__(self, device: torch.device, start: float, window: int) -> None:
        """
        :param start: the first scale; 0: none.
        :param window: clean steps in a row after which it is doubled.
        """
        self._scaler = GradScaler(
            device.type, init_scale=start or 1.0, growth_interval=max(window, 1), enabled=start > 0
        )

    @property
    def is_used(self) -> bool:
        return self._scaler.is_enabled()

    @property
    def value(self) -> float:
        """The scale now; the device is waited for."""
        return float(self._scaler.get_scale())

    @property
    def is_lost(self) -> bool:
        """Whether step after step was skipped, so that nothing is learnt any more."""
        return self.is_used and self.value <= _LOST

    def of(self, loss: Tensor) -> Tensor:
        """The loss whose gradients are to be computed."""
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def undone(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale: from here on they are what the loss itself gives."""
        if self.is_used:
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """The optimizer's step, unless a gradient is not finite; then the scale for the next one."""
        self._scaler.step(optimizer)
        self._scaler.update()

    def state(self) -> dict[str, Any]:
        """Plain values."""
        return dict(self._scaler.state_dict())

    def load(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state` was taken."""
        if self.is_used:
            self._scaler.load_state_dict(state)
