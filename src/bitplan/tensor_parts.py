"""A large tensor in parts that a CPU core's cache holds.

On a CPU, eager, the memory that intermediate results are written to costs more than the arithmetic: what is computed
for each element alone is computed part by part. Callers look :func:`parts_of` up here each time, because a forecast of
memory on fake tensors exchanges it (:mod:`bitplan.memory.fakes`).
"""

from __future__ import annotations

import torch
from torch import Tensor

#: As powers of two: the largest part of a tensor that is gone through at once, which a CPU core's cache holds together
#: with what is made of it on the way, and the smallest, below which calls cost more than arithmetic.
_LARGEST_PART, _SMALLEST_PART = 18, 15
#: What is made on the way takes several times a part: of a quarter of the tensor, about the tensor itself.
_QUARTER = 2


def part_size(elements: int) -> int:
    """How many elements of a tensor are gone through at once: a power of two.

    >>> part_size(10), part_size(1 << 19), part_size(1 << 25)
    (32768, 131072, 262144)
    """
    return 1 << min(max(elements.bit_length() - 1 - _QUARTER, _SMALLEST_PART), _LARGEST_PART)


def parts_of(x: Tensor) -> tuple[Tensor, ...]:
    """`x` in parts for a CPU, where the memory of intermediate results costs more than the arithmetic."""
    size = part_size(x.numel())
    if x.is_cuda or x.numel() <= size or not x.is_contiguous():
        return (x,)
    return torch.split(x.view(-1), size)
