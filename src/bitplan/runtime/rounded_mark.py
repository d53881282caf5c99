"""The mark of a rounded tensor: how its values were rounded, valid until somebody writes into its memory.

Rounding has two uses for it: a tensor that lies on a format's grid already is not rounded onto it again, which would
change no bit; and packed execution saves a marked tensor in the format's own bits.

A mark is an attribute of the tensor's storage. torch has one Python object for a storage as long as it lives; views and
detached aliases share it, and so does the tensor that autograd passes to hooks on saved tensors. As in autograd's own
check, writes are counted by torch's version counter, which does not see those through ``.data`` or numpy. While a
graph is traced, tensors have no storage of their own, and the mark is an attribute of the tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bitplan.compiler.tracing import is_traced
from bitplan.numerics.mutable_format import MutableFormat
from bitplan.numerics.packing import is_smaller
from bitplan.numerics.quantizer import Quantizer
from bitplan.runtime.sharding import is_distributed, local_part

_MARK = "_bitplan_rounded"
_RECOMPUTABLE = "_bitplan_recomputable"


@dataclass(eq=False)
class Packable:
    """What packing a rounded tensor needs to know."""

    quantizer: Quantizer
    scales: tuple[Tensor, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    #: The packed copy, as long as something refers to it.
    copy: weakref.ref[Any] | None = None
    #: Called with the packed copy, once there is one.
    on_packed: list[Callable[[Any], None]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class RoundedMark:
    """How the values of a storage were rounded."""

    #: The format whose grid all values lie on, where that is independent of scales; None: not known.
    grid: str | None
    dtype: torch.dtype
    #: torch's count of writes when the mark was made: after another write the mark is void.
    version: int
    #: In packed execution: how to save the tensor in few bits.
    packable: Packable | None = None


def rounded_mark(tensor: Tensor) -> RoundedMark | None:
    """The mark of the memory that `tensor` refers to; None where it has none, or no longer."""
    tensor = local_part(tensor)
    holder = _holder(tensor)
    mark: RoundedMark | None = None if holder is None else getattr(holder, _MARK, None)
    if mark is None or mark.dtype != tensor.dtype or tensor.is_inference() or mark.version != tensor._version:
        return None
    return mark


def packable(tensor: Tensor) -> Packable | None:
    """How to save `tensor` in few bits; None where that is not known."""
    mark = rounded_mark(tensor)
    return None if mark is None else mark.packable


def lies_on(tensor: Tensor, grid: str | None) -> bool:
    """Whether rounding `tensor` onto `grid` is known to change nothing."""
    if grid is None:
        return False
    mark = rounded_mark(tensor)
    return mark is not None and mark.grid == grid


def mark_rounded(
    tensor: Tensor, grid: str | None, quantizer: Quantizer | None = None, scales: Sequence[Tensor] = ()
) -> Tensor:
    """Mark `tensor`: all its values lie on `grid`, and `quantizer` has rounded them with these scales."""
    if (grid is None and quantizer is None) or tensor.is_inference():
        return tensor
    if is_distributed(tensor):
        mark_rounded(local_part(tensor), grid, quantizer, scales)
        return tensor
    holder = _holder(tensor)
    if holder is None or not _covers_storage(tensor, holder):
        return tensor
    details = None
    if quantizer is not None and tensor.numel():
        assert not isinstance(quantizer.format, MutableFormat)
        if is_smaller(quantizer.format, tensor.dtype):
            offset = int(tensor.storage_offset())
            details = Packable(quantizer, tuple(scales), tensor.shape, tensor.stride(), offset)
    if details is None and quantizer is None:  # what is known for packing stays known
        known = rounded_mark(tensor)
        details = None if known is None else known.packable
    if grid is not None or details is not None:
        setattr(holder, _MARK, RoundedMark(grid, tensor.dtype, tensor._version, details))
    return tensor


def copy_mark(copy: Tensor, original: Tensor) -> None:
    """Mark a tensor that has just received all the values of `original`, perhaps cast to another dtype."""
    mark = rounded_mark(original)
    if mark is None or copy.shape != original.shape:
        return
    grid = mark.grid if copy.dtype == original.dtype else None
    details = mark.packable
    if details is not None and _has_scales_of(original, details):
        mark_rounded(copy, grid, details.quantizer, details.scales)
    else:
        mark_rounded(copy, grid)


def _has_scales_of(view: Tensor, details: Packable) -> bool:
    """Whether the scales of a tensor fit a view of its memory: a transposed square has its shape, not its axes."""
    is_same_view = view.stride() == details.stride or all(scale.numel() == 1 for scale in details.scales)
    return view.shape == details.shape and is_same_view


@dataclass(frozen=True)
class Recomputable:
    """How a tensor is made again, so that it need not be saved for the backward pass."""

    make: Callable[[], Tensor]
    version: int


def mark_recomputable(tensor: Tensor, source: Tensor, make: Callable[[], Tensor]) -> None:
    """Mark `tensor`, which was made of `source`: `make` returns the same values again, in memory laid out alike."""
    tensor = local_part(tensor)
    holder = _holder(tensor)
    if not is_traced() and holder is not None and holder is not _holder(local_part(source)):
        setattr(holder, _RECOMPUTABLE, Recomputable(make, tensor._version))


def recomputable(tensor: Tensor) -> Recomputable | None:
    """How the memory that `tensor` refers to is made again; None where that is not known, or no longer."""
    tensor = local_part(tensor)
    found: Recomputable | None = getattr(_holder(tensor), _RECOMPUTABLE, None)
    return None if found is None or found.version != tensor._version else found


def _holder(tensor: Tensor) -> Any:
    if is_traced():
        return tensor
    if tensor.layout != torch.strided:
        return None  # a sparse tensor has no storage
    try:
        return tensor.untyped_storage()
    except RuntimeError:  # neither have the tensors that torch.func transforms wrap
        return None


def _covers_storage(tensor: Tensor, holder: Any) -> bool:
    """Whether every byte of the storage belongs to the tensor once: not a part of it, nor an expanded tensor."""
    return holder is tensor or bool(holder.nbytes() == tensor.numel() * tensor.element_size())
