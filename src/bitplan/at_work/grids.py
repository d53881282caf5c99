"""Tensors that are known to lie on a format's grid, so that rounding them onto it again would change no bit.

A rounded tensor that nobody has written to, its positive part, and a gradient that was rounded one operation earlier
are such tensors. What is known is tied to torch's count of writes (``Tensor._version``): after any write it no longer
holds. The count is kept while torch.compile makes a graph, too. What is not known is rounded, which is always right.
"""

from __future__ import annotations

from torch import Tensor

_GRID_TAG = "_bitplan_grid"


def mark(tensor: Tensor, grid: str | None) -> Tensor:
    """Note that every value of `tensor` lies on `grid` (None: nothing is known)."""
    if grid is not None and not tensor.is_inference():
        setattr(tensor, _GRID_TAG, (grid, tensor._version, id(tensor)))  # a deep copy has another id
    return tensor


def lies_on(tensor: Tensor, grid: str | None) -> bool:
    """Whether rounding `tensor` onto `grid` is known to change nothing."""
    known = getattr(tensor, _GRID_TAG, None)
    return known is not None and grid is not None and bool(known == (grid, tensor._version, id(tensor)))


def mark_copy(copy: Tensor, original: Tensor) -> None:
    """Note of a tensor that has just received all the values of `original` what is known of that one."""
    known = getattr(original, _GRID_TAG, None)
    if known is not None and copy.dtype == original.dtype and lies_on(original, known[0]):
        mark(copy, known[0])
