"""A large tensor in parts that are gone through one after the other.

On a CPU, eager, the memory that intermediate results are written to costs more than the arithmetic: what is computed
for each element alone is computed in parts that a core's cache holds. On a GPU more calls cost more than that would
gain, so it goes through a tensor at once; but intermediate results are several times the tensor, and where memory is
what counts (:func:`sparing_memory`) it takes parts as well, larger ones.

Callers look :func:`parts_of` up here each time, because a forecast of memory on fake tensors exchanges it
(:mod:`bitplan.analysis.memory.fakes`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

#: As powers of two: the largest part of a tensor that is gone through at once, which a CPU core's cache holds together
#: with what is made of it on the way, and the smallest, below which calls cost more than arithmetic.
_CPU = (18, 15)
#: The same for a GPU, whose calls cost as much as some millions of elements.
_GPU = (22, 21)
#: What is made on the way takes several times a part: of a quarter of the tensor, about the tensor itself.
_QUARTER = 2


class _Here(threading.local):
    """What holds in this thread; autograd has threads of its own."""

    spares = False
    whole = False


_here = _Here()


@contextmanager
def _inside(name: str) -> Iterator[None]:
    before = getattr(_here, name)
    setattr(_here, name, True)
    try:
        yield
    finally:
        setattr(_here, name, before)


def sparing_memory() -> AbstractContextManager[None]:
    """Inside, a GPU goes through large tensors in parts, too."""
    return _inside("spares")


def at_once() -> AbstractContextManager[None]:
    """Inside, every tensor is one part: what is a part already is not cut again."""
    return _inside("whole")


def part_size(elements: int, limits: tuple[int, int] = _CPU) -> int:
    """How many elements of a tensor are gone through at once: a power of two.

    >>> part_size(10), part_size(1 << 19), part_size(1 << 25)
    (32768, 131072, 262144)
    """
    largest, smallest = limits
    return 1 << min(max(elements.bit_length() - 1 - _QUARTER, smallest), largest)


def memory_order(stride: Sequence[int]) -> tuple[int, ...]:
    """The dimensions of a tensor with these strides, from the one whose neighbours lie farthest apart to the nearest.

    >>> memory_order((48, 1, 12, 3))  # channels last
    (0, 2, 3, 1)
    """
    return tuple(sorted(range(len(stride)), key=lambda dim: -stride[dim]))


def in_memory_order(x: Tensor) -> Tensor:
    """`x` with its dimensions as they lie in memory, so that a tensor without gaps is contiguous."""
    return x if x.is_contiguous() else x.permute(memory_order(x.stride()))


def part_size_of(x: Tensor) -> int:
    """How many elements of `x` are gone through at once: all of them where nothing is gained by less."""
    if _here.whole or (x.is_cuda and not _here.spares):
        return x.numel()
    size = part_size(x.numel(), _GPU if x.is_cuda else _CPU)
    return size if size < x.numel() and in_memory_order(x).is_contiguous() else x.numel()


def parts_of(x: Tensor) -> tuple[Tensor, ...]:
    """`x` in parts, one after the other in memory and of one dimension; or as it is where it is one."""
    size = part_size_of(x)
    return (x,) if size == x.numel() else torch.split(in_memory_order(x).view(-1), size)


def parts_of_both(x: Tensor, y: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """The parts of two tensors of one shape that belong to each other; both whole where they do not lie alike."""
    return zip(parts_of(x), parts_of(y), strict=True) if x.stride() == y.stride() else ((x, y),)
