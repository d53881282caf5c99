"""Products of matrices: linear layers, ``matmul`` and its kin, and what an ``einsum`` of two tensors says."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from bitplan.errors import MetricError
from bitplan.gemm.sampling import Draw, Sampling
from bitplan.numerics.wire_format import OPERAND_OF_SLOT
from bitplan.plans.match import PASSES

# --- Products as sums over pairs of vectors: which rows of x, w and dy each of the three passes multiplies


#: A whole operand, or a rounded copy of it, to its sampled rows: (matrices, rows, terms).
Gather = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class SampledOperand:
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

    def light(self) -> SampledOperand:
        """The same without the whole tensor, which may be let go: what rounding rows alone needs."""
        return replace(self, whole=self.values, gather=lambda tensor: tensor)


class Layout(Protocol):
    """How one kind of product lays its operands out."""

    def operands(
        self, pass_: str, tensors: dict[str, Tensor], sampling: Sampling, draw: Draw
    ) -> tuple[SampledOperand, SampledOperand]: ...


def largest(x: Tensor, *dims: int) -> Tensor:
    """The largest magnitude, along some dimensions (which stay) or of all."""
    if not x.numel():
        return x.new_zeros(())
    if dims:
        return torch.maximum(x.amax(dims, keepdim=True), -x.amin(dims, keepdim=True))
    low, high = torch.aminmax(x)
    return torch.maximum(high, -low)


View = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Matrices:
    """y = x w as (batch, M, K) times (batch, K, N)."""

    x: View
    w: View
    #: dy, in the shape (batch, M, N).
    dy: View

    def operands(
        self, pass_: str, tensors: dict[str, Tensor], sampling: Sampling, draw: Draw
    ) -> tuple[SampledOperand, SampledOperand]:
        def turned(view: View) -> View:
            return lambda tensor: view(tensor).transpose(1, 2)

        views = {
            "fprop": (self.x, turned(self.w)),
            "dgrad": (self.dy, self.w),
            "wgrad": (turned(self.dy), turned(self.x)),
        }
        left, right = views[pass_]
        slots = PASSES[pass_]
        wholes = [tensors[OPERAND_OF_SLOT[slot].tensor] for slot in slots]
        shapes = [view(whole).shape for view, whole in zip((left, right), wholes, strict=True)]
        (matrices, rows, length), columns = shapes[0], shapes[1][1]
        if shapes[1] != (matrices, columns, length):
            raise MetricError(f"its operands have shapes that do not fit together: {list(map(tuple, shapes))}")
        counts = sampling.sizes(matrices, rows, columns)
        which = draw.some(counts[0], matrices)
        terms = None if length <= sampling.terms else draw.some(sampling.terms, length)
        found = []
        for view, slot, whole, (count, of) in zip(
            (left, right), slots, wholes, ((counts[1], rows), (counts[2], columns)), strict=True
        ):
            chosen = draw.some(count, of)
            found.append(_matrix_operand(slot, whole, view, which, chosen, terms, length))
        return found[0], found[1]


def _matrix_operand(
    slot: str, whole: Tensor, view: View, which: Tensor, rows: Tensor, terms: Tensor | None, length: int
) -> SampledOperand:
    def whole_rows(tensor: Tensor) -> Tensor:
        return view(tensor)[which[:, None], rows[None, :]]

    def gather(tensor: Tensor) -> Tensor:
        found = whole_rows(tensor)
        return found if terms is None else found[..., terms]

    return SampledOperand(slot, whole, gather, largest(whole_rows(whole), -1), largest(whole), length, whole.numel())


def linear_layout() -> Matrices:
    return Matrices(_flat, lambda w: w.t()[None], _flat)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(1, -1, tensor.shape[-1])


def matmul_layout(x: Tensor, w: Tensor) -> Matrices:
    def rows(tensor: Tensor) -> Tensor:  # a vector on the left is one row
        return tensor[None] if x.dim() == 1 else tensor

    if w.dim() <= 2:

        def of_y(dy: Tensor) -> Tensor:
            return dy.reshape(1, -1, w.shape[-1] if w.dim() == 2 else 1)

        return Matrices(lambda x: _flat(rows(x)), lambda w: (w if w.dim() == 2 else w[:, None])[None], of_y)
    batch = torch.broadcast_shapes(x.shape[:-2], w.shape[:-2])  # type: ignore[no-untyped-call]

    def together(tensor: Tensor) -> Tensor:
        return tensor.expand(*batch, *tensor.shape[-2:]).reshape(-1, *tensor.shape[-2:])

    def of_wide_y(dy: Tensor) -> Tensor:
        return together(dy.unsqueeze(-2) if x.dim() == 1 else dy)

    return Matrices(lambda x: together(rows(x)), together, of_wide_y)


def einsum_layout(equation: Any, x: Tensor, w: Tensor) -> Matrices:
    """An einsum of two as a product of matrices: each index is of a batch, of rows, of columns, or summed over."""
    if not isinstance(equation, str) or "." in equation:
        raise MetricError("its equation is not a text of single letters")
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    left, right = inputs.split(",")
    if not arrow:
        out = "".join(letter for letter in sorted(left + right) if (left + right).count(letter) == 1)
    sizes = {**dict(zip(left, x.shape, strict=True)), **dict(zip(right, w.shape, strict=True))}
    shared = [letter for letter in left if letter in right]
    batch = [letter for letter in shared if letter in out]
    summed = [letter for letter in shared if letter not in out]
    rows = [letter for letter in left if letter not in right]
    columns = [letter for letter in right if letter not in left]
    repeated = any(len(set(term)) != len(term) for term in (left, right))
    if repeated or any(letter not in out for letter in (*rows, *columns)):
        raise MetricError("it takes a diagonal, or sums one operand alone")

    def view(term: str, *groups: list[str]) -> View:
        order = [term.index(letter) for group in groups for letter in group]
        shape = [math.prod(sizes[letter] for letter in group) for group in groups]
        return lambda tensor: tensor.permute(order).reshape(shape)

    return Matrices(
        view(left, batch, rows, summed), view(right, batch, summed, columns), view(out, batch, rows, columns)
    )
