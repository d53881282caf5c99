"""Large tensors in chunks that are processed one after the other.

In eager code on a CPU, writing intermediate results to memory costs more than the arithmetic, so elementwise work is
done in chunks that fit into a core's cache. On a GPU more launches cost more than that would gain, so tensors are
processed whole; but intermediate results are several times the tensor, and where memory matters
(:func:`chunked_on_gpu`) a GPU uses chunks, too, larger ones.

Callers look up :func:`chunks_of` in this module at every call, because the memory estimate replaces it
(:mod:`bitplan.analysis.memory.fakes`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

#: Log2 of the largest and the smallest chunk on a CPU: the largest fits into a core's cache together with intermediate
#: results; below the smallest, calls cost more than arithmetic.
_CPU = (18, 15)
#: The same on a GPU, whose launches cost as much as some millions of elements.
_GPU = (22, 21)
#: Log2 of the number of chunks: the intermediate results of a quarter of a tensor take about as much as the tensor.
_QUARTER = 2


class _ThreadState(threading.local):
    """The options of this thread; autograd has threads of its own."""

    chunks_on_gpu = False
    is_unchunked = False


_state = _ThreadState()


@contextmanager
def _enabled(option: str) -> Iterator[None]:
    before = getattr(_state, option)
    setattr(_state, option, True)
    try:
        yield
    finally:
        setattr(_state, option, before)


def chunked_on_gpu() -> AbstractContextManager[None]:
    """A context in which a GPU processes large tensors in chunks, too."""
    return _enabled("chunks_on_gpu")


def unchunked() -> AbstractContextManager[None]:
    """A context in which every tensor is one chunk, so that chunks are not split again."""
    return _enabled("is_unchunked")


def chunk_size(elements: int, limits: tuple[int, int] = _CPU) -> int:
    """The number of elements per chunk: a power of two.

    >>> chunk_size(10), chunk_size(1 << 19), chunk_size(1 << 25)
    (32768, 131072, 262144)
    """
    largest, smallest = limits
    return 1 << min(max(elements.bit_length() - 1 - _QUARTER, smallest), largest)


def memory_order(stride: Sequence[int]) -> tuple[int, ...]:
    """The dimensions of a tensor with these strides, largest stride first.

    >>> memory_order((48, 1, 12, 3))  # channels last
    (0, 2, 3, 1)
    """
    return tuple(sorted(range(len(stride)), key=lambda dim: -stride[dim]))


def in_memory_order(x: Tensor) -> Tensor:
    """`x` with its dimensions permuted to memory order, so that a dense tensor is contiguous."""
    return x if x.is_contiguous() else x.permute(memory_order(x.stride()))


def chunk_size_of(x: Tensor) -> int:
    """The number of elements per chunk of `x`; all of them where chunks gain nothing."""
    if _state.is_unchunked or (x.is_cuda and not _state.chunks_on_gpu):
        return x.numel()
    size = chunk_size(x.numel(), _GPU if x.is_cuda else _CPU)
    return size if size < x.numel() and in_memory_order(x).is_contiguous() else x.numel()


def chunks_of(x: Tensor) -> tuple[Tensor, ...]:
    """`x` in flat chunks, in memory order; or `x` as it is where it is one chunk."""
    size = chunk_size_of(x)
    return (x,) if size == x.numel() else torch.split(in_memory_order(x).view(-1), size)


def paired_chunks(x: Tensor, y: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """The corresponding chunks of two tensors of the same shape; both whole if their strides differ."""
    return zip(chunks_of(x), chunks_of(y), strict=True) if x.stride() == y.stride() else ((x, y),)
