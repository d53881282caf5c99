"""Rounding as autograd sees it: the rounded value forward, the gradient unchanged backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Encoded(NamedTuple):
    """Elements on the grid, in the carrier's dtype and possibly split into blocks, with their scales."""

    elements: Tensor
    #: Nothing, (scale,), (scale, minimum), (E8M0 codes,) or (block scales, tensor scale), by the kind of quantizer.
    scales: tuple[Tensor, ...]


#: The range of a ``tensor`` scale where it is not to be taken from the tensor: (least, largest) value, to which values
#: are bound; or the largest magnitude for which it makes room, beyond which values overflow, and 0 where none is known.
Span = tuple[Tensor, Tensor] | Tensor

#: Looks at what lies between the two halves of rounding, or changes the form that it has there.
Between = Callable[[Encoded], Encoded]


class RoundsValues(Protocol):
    """What :func:`straight_through` can apply."""

    def round_values(
        self,
        x: Tensor,
        bits: Tensor | None,
        row: Tensor | None = None,
        span: Span | None = None,
        between: Between | None = None,
    ) -> Tensor: ...


def straight_through(
    quantizer: RoundsValues,
    x: Tensor,
    bits: Tensor | None,
    row: Tensor | None = None,
    span: Span | None = None,
    between: Between | None = None,
) -> Tensor:
    """The rounded `x`, whose gradient is that of `x` itself."""
    if x.requires_grad and torch.is_grad_enabled():
        straight: Tensor = _StraightThrough.apply(x, quantizer, bits, row, span, between)  # type: ignore[no-untyped-call]
        return straight
    return quantizer.round_values(x.detach(), bits, row, span, between)


class _StraightThrough(torch.autograd.Function):
    """The rounded value forward, the gradient unchanged backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        quantizer: RoundsValues,
        bits: Tensor | None,
        row: Tensor | None,
        span: Span | None,
        between: Between | None,
    ) -> Tensor:
        return quantizer.round_values(x, bits, row, span, between)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        return grads[0], None, None, None, None, None
