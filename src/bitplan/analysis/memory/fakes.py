"""A model and its batch without their data: copies on fake tensors, which have a shape, a type and a device only.

A model that is larger than the memory of this machine can be copied so, and one that was made on the ``meta`` device
becomes one on a real device.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.capture.recording import FakeInputs
from bitplan.capture.scopes import is_planned, uninstall, unwrapped
from bitplan.compiler.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    is_traceable_wrapper_subclass,
    tree_map_only,
)
from bitplan.errors import MemoryEstimateError
from bitplan.numerics import chunks
from bitplan.runtime.module_state import remove_buffers

# --- How many bytes tensors hold, each piece of memory counted once


#: CUDA's caching allocator hands out multiples of this.
_CUDA_GRAIN = 512


def held(count: int, device: torch.device) -> int:
    """The bytes that the device's allocator takes for a request of `count`."""
    return -(-count // _CUDA_GRAIN) * _CUDA_GRAIN if device.type == "cuda" else count


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The tensors with memory of their own that make up `tensor`: itself, a sparse one's values and places, or what a
    subclass such as a quantized optimizer state holds.
    """
    made_of: Any = tensor
    if is_traceable_wrapper_subclass(made_of):
        return [part for name in made_of.__tensor_flatten__()[0] for part in parts_of(getattr(made_of, name))]
    if tensor.layout == torch.strided:
        return [tensor]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of all the memory that lies beneath the tensors."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        for part in parts_of(tensor):
            storage = part.untyped_storage()
            sizes[storage._cdata] = held(storage.nbytes(), part.device)
    return sum(sizes.values())


class Fakes:
    """One world of fake tensors, on one device."""

    def __init__(self, device: torch.device | None = None) -> None:
        """
        :param device: where all tensors are to be; by default where they are, and the CPU for those on ``meta``.
        """
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.device = device
        #: id of a tensor -> the tensor, which keeps its id taken, and its twin: a tensor that is given twice is one.
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}

    def tensor(self, real: Tensor) -> Tensor:
        """A twin without data."""
        if id(real) not in self._twins:
            self._twins[id(real)] = real, self._twin_of(real)
        return self._twins[id(real)][1]

    def _twin_of(self, real: Tensor) -> Tensor:
        device = self.device or (torch.device("cpu") if real.is_meta else real.device)
        if real.layout != torch.strided:
            return self._sparse_twin_of(real)
        with self.mode:
            twin = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=device)
        if isinstance(real, nn.Parameter):
            return nn.Parameter(twin, real.requires_grad)
        return twin.requires_grad_(real.requires_grad)

    def _sparse_twin_of(self, real: Tensor) -> Tensor:
        if not isinstance(real, FakeTensor):
            return self.mode.from_tensor(real.detach())
        with self.mode:  # one of another world, which has forgotten how many values it holds
            places = torch.empty((real.dim(), 0), dtype=torch.int64, device=real.device)
            values = torch.empty(0, dtype=real.dtype, device=real.device)
            return torch.sparse_coo_tensor(places, values, real.shape)

    def all(self, real: Any) -> Any:
        """Twins of the tensors in whatever structure they lie."""
        return tree_map_only(Tensor, self.tensor, real)

    def inputs(self, args: Any, kwargs: dict[str, Any]) -> FakeInputs:
        """The arguments of a model's call, in this world."""
        inputs = FakeInputs(self.all(args), self.all(kwargs))
        inputs.faker.mode = self.mode
        return inputs

    def model(self, real: nn.Module) -> nn.Module:
        """A plain copy on fake tensors."""
        twins = {id(tensor): self.tensor(tensor) for tensor in (*real.parameters(), *real.buffers())}
        return plain_copy(real, twins)  # what deepcopy is told of it does not copy


def plain_copy(model: nn.Module, known: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy without gradients, and without the plan that may be at work on the model."""
    try:
        twin = copy.deepcopy(unwrapped(model), known)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise MemoryEstimateError(
            f"the model cannot be copied ({reason}), and its memory is estimated and measured on a copy: let its "
            f"attributes be such that copy.deepcopy(model) works."
        ) from error
    for module in twin.modules():
        if is_planned(module):
            uninstall([module])
            remove_buffers(module)
    for parameter in twin.parameters():
        parameter.grad = None
    return twin


@contextmanager
def rounding_in_two_parts() -> Iterator[None]:
    """Rounding goes through a large tensor part by part: often hundreds of parts, each with its own small memory.

    Of a fake tensor, which has no values to be rounded, two parts do: all others take and give back the same memory.
    """
    whole = chunks.chunks_of

    def first_parts(x: Tensor) -> tuple[Tensor, ...]:
        size = chunks.chunk_size_of(x)
        if not isinstance(x, FakeTensor) or x.numel() <= size:
            return whole(x)
        return torch.split(chunks.in_memory_order(x).view(-1)[: 2 * size], size)

    chunks.chunks_of = first_parts
    try:
        yield
    finally:
        chunks.chunks_of = whole


@contextmanager
def told_of_missing_values() -> Iterator[None]:
    """What cannot be done without data, in a sentence."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException) as error:
        what = getattr(error, "func", None) or error
        raise MemoryEstimateError(
            f"the step looks into its tensors ({what}), and the estimate runs it on shapes without values: do that "
            f"part before the model is called, or measure instead."
        ) from error
