"""How many bytes tensors hold, each piece of memory counted once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

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
