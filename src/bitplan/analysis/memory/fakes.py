"""Copies of a model and its batch on fake tensors, which have a shape, a dtype and a device but no data.

The model may be larger than the memory. A model on the ``meta`` device gets a real device.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.capture.planned_classes import uninstall, unwrapped
from bitplan.capture.recording import FakeInputs
from bitplan.capture.scopes import is_planned
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

# --- Bytes of tensors, each storage counted once


#: CUDA's caching allocator rounds sizes up to a multiple of this.
_CUDA_ALIGNMENT = 512


def allocated_bytes(count: int, device: torch.device) -> int:
    """The bytes that the device's allocator uses for a request of `count`."""
    return -(-count // _CUDA_ALIGNMENT) * _CUDA_ALIGNMENT if device.type == "cuda" else count


def components(tensor: Tensor) -> list[Tensor]:
    """The tensors with storages that make up `tensor`: itself, the values and indices of a sparse tensor, or the inner
    tensors of a subclass such as a quantized optimizer state.
    """
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        inner = (getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0])
        # A DTensor's mesh may be among them.
        return [part for value in inner if isinstance(value, Tensor) for part in components(value)]
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
    """Bytes of the storages of the tensors."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        for part in components(tensor):
            storage = part.untyped_storage()
            sizes[storage._cdata] = allocated_bytes(storage.nbytes(), part.device)
    return sum(sizes.values())


class Fakes:
    """Makes fake copies of tensors and models, in one fake mode and on one device."""

    def __init__(self, device: torch.device | None = None) -> None:
        """
        :param device: the device of all copies; by default that of the original, and the CPU for ``meta``.
        """
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.device = device
        #: id of a tensor -> the tensor, which keeps its id in use, and its only copy.
        self._fakes: dict[int, tuple[Tensor, Tensor]] = {}

    def tensor(self, real: Tensor) -> Tensor:
        """The fake copy of a tensor."""
        if id(real) not in self._fakes:
            self._fakes[id(real)] = real, self._make_fake(real)
        return self._fakes[id(real)][1]

    def _make_fake(self, real: Tensor) -> Tensor:
        device = self.device or (torch.device("cpu") if real.is_meta else real.device)
        if real.layout != torch.strided:
            return self._make_sparse_fake(real)
        with self.mode:
            replica = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=device)
        if isinstance(real, nn.Parameter):
            return nn.Parameter(replica, real.requires_grad)
        return replica.requires_grad_(real.requires_grad)

    def _make_sparse_fake(self, real: Tensor) -> Tensor:
        if not isinstance(real, FakeTensor):
            return self.mode.from_tensor(real.detach())
        with self.mode:  # from another fake mode, so the number of its values is unknown
            indices = torch.empty((real.dim(), 0), dtype=torch.int64, device=real.device)
            values = torch.empty(0, dtype=real.dtype, device=real.device)
            return torch.sparse_coo_tensor(indices, values, real.shape)

    def all(self, real: Any) -> Any:
        """Fake copies of the tensors in a nested structure."""
        return tree_map_only(Tensor, self.tensor, real)

    def inputs(self, args: Any, kwargs: dict[str, Any]) -> FakeInputs:
        """Fake copies of the arguments of a model's call."""
        inputs = FakeInputs(self.all(args), self.all(kwargs))
        inputs.faker.mode = self.mode
        return inputs

    def model(self, real: nn.Module) -> nn.Module:
        """A copy of a model, without its plan, on fake tensors."""
        fakes = {id(tensor): self.tensor(tensor) for tensor in (*real.parameters(), *real.buffers())}
        return copy_without_plan(real, fakes)  # deepcopy does not copy what is in its memo


def copy_without_plan(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy without gradients and without an attached plan."""
    try:
        replica = copy.deepcopy(unwrapped(model), memo)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise MemoryEstimateError(
            f"the model cannot be copied ({reason}), and its memory is estimated and measured on a copy: make "
            f"copy.deepcopy(model) work."
        ) from error
    for module in replica.modules():
        if is_planned(module):
            uninstall([module])
            remove_buffers(module)
    for parameter in replica.parameters():
        parameter.grad = None
    return replica


@contextmanager
def round_two_chunks() -> Iterator[None]:
    """Round only the first two chunks of large fake tensors, which have no values.

    Large tensors have hundreds of chunks, all of which allocate and release the same memory.
    """
    chunks_of = chunks.chunks_of

    def first_chunks(x: Tensor) -> tuple[Tensor, ...]:
        size = chunks.chunk_size_of(x)
        if not isinstance(x, FakeTensor) or x.numel() <= size:
            return chunks_of(x)
        return torch.split(chunks.in_memory_order(x).view(-1)[: 2 * size], size)

    chunks.chunks_of = first_chunks
    try:
        yield
    finally:
        chunks.chunks_of = chunks_of


@contextmanager
def report_data_dependence() -> Iterator[None]:
    """Report operations that need data as one sentence."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException) as error:
        operation = getattr(error, "func", None) or error
        raise MemoryEstimateError(
            f"the step depends on the values of its tensors ({operation}), and the estimate has only shapes: move that "
            f"part out of the model, or measure instead."
        ) from error
