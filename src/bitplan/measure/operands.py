"""Products as sums over pairs of vectors: which rows of x, w and dy each of the three passes multiplies.

=======  =====================  =======================  ============
pass     left (one scale per)   right (one scale per)    summed over
=======  =====================  =======================  ============
fprop    x (token, sample)      w (output channel)       inputs
dgrad    dy (token, sample)     w (input channel)        outputs
wgrad    dy (output channel)    x (input channel)        tokens
=======  =====================  =======================  ============

A scale is constant along the sum, or it could not be taken out of it; so x, w and dy each appear with two different
ones. A linear layer, ``matmul`` and ``einsum`` are products of matrices; a convolution is one of its unfolded input, of
which only the sampled rows are ever made (:mod:`bitplan.measure.convolutions`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from bitplan.measure.sampling import Draw, Sampling

#: A whole operand, or a rounded copy of it, to its sampled rows: (matrices, rows, terms).
Gather = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Operand:
    """Sampled rows of one operand, and what its scales follow from."""

    slot: str
    #: The whole tensor, as the product was given it.
    whole: Tensor
    gather: Gather
    #: The largest magnitude of each sampled row's scale group: (matrices, rows, 1).
    vector_amax: Tensor
    #: The largest magnitude of the whole tensor.
    tensor_amax: Tensor
    #: Terms of the sum before it was cut.
    length: int

    #: Values of the whole tensor.
    elements: int

    @cached_property
    def values(self) -> Tensor:
        return self.gather(self.whole)

    def light(self) -> Operand:
        """The same without the whole tensor, which may be let go: what rounding rows alone needs."""
        return replace(self, whole=self.values, gather=lambda tensor: tensor)


class Layout(Protocol):
    """How one kind of product lays its operands out."""

    def operands(
        self, pass_: str, tensors: dict[str, Tensor], sampling: Sampling, draw: Draw
    ) -> tuple[Operand, Operand]: ...


def largest(x: Tensor, *dims: int) -> Tensor:
    """The largest magnitude, along some dimensions (which stay) or of all."""
    if not x.numel():
        return x.new_zeros(())
    if dims:
        return torch.maximum(x.amax(dims, keepdim=True), -x.amin(dims, keepdim=True))
    low, high = torch.aminmax(x)
    return torch.maximum(high, -low)
