"""Copies of batches, on their way to a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class Copies:
    """``copies(batch)`` is the batch with every tensor copied.

    What was in the last batch already, such as a whole graph every step, is not copied again.
    """

    def __init__(self, copy: Callable[[Tensor], Tensor]) -> None:
        self._copy = copy
        #: The last batch: id of each tensor -> the tensor, its version, and its copy.
        self._last: dict[int, tuple[Tensor, int, Tensor]] = {}

    def __call__(self, batch: Any) -> Any:
        before, self._last = self._last, {}

        def copied(tensor: Tensor) -> Tensor:
            kept = before.get(id(tensor))
            if kept is None or kept[0] is not tensor or kept[1] != tensor._version:
                kept = tensor, tensor._version, self._copy(tensor)
            self._last[id(tensor)] = kept
            return kept[2]

        return tree_map_only(Tensor, copied, batch)


def pinned(tensor: Tensor) -> Tensor:
    """In memory that a GPU reads by itself: a copy from elsewhere waits until the GPU has done all that came before."""
    is_plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
    return tensor.pin_memory() if is_plain and not tensor.is_pinned() else tensor
