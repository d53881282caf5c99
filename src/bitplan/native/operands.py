"""Operands of a linear layer's three products as matrices of codes with their scales.

=======  ==========================  ==================================  ====================
pass     left (m, k)                 right (k, n)                        summed over
=======  ==========================  ==================================  ====================
fprop    x, tokens by inputs         w transposed, inputs by outputs     inputs
dgrad    dy, tokens by outputs       w, outputs by inputs                outputs
wgrad    dy transposed               x, tokens by inputs                 tokens
=======  ==========================  ==================================  ====================

A scale can be taken out of a sum only if it stays the same along it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bitplan.formats import BlockFormat
from bitplan.quantizer import Quantizer
from bitplan.straight import Encoded

#: Pass -> its slots, left and right.
PASSES = {"fprop": ("fprop.x", "fprop.w"), "dgrad": ("dgrad.dy", "dgrad.w"), "wgrad": ("wgrad.dy", "wgrad.x")}


#: Slots whose products read a row of features at a time; the others read one feature of all rows.
BY_ROW = ("fprop.x", "fprop.w", "dgrad.dy")


class Codes(NamedTuple):
    """A matrix of codes, (rows, features), and its scale: a number, (rows, 1) or (1, features).

    In memory either the features of a row lie side by side or, where a product wants it so, the rows of a feature.
    """

    values: Tensor
    scale: Tensor

    def decoded(self) -> Tensor:
        """The numbers that the codes stand for, in float32."""
        return self.values.float() * self.scale

    def transposed(self) -> Codes:
        return Codes(self.values.t(), self.scale.t() if self.scale.dim() == 2 else self.scale)


def sizes_of(one: str, tokens: int, inputs: int, outputs: int) -> tuple[int, int, int]:
    """(m, k, n) of a pass.

    >>> sizes_of("wgrad", 6, 32, 16)
    (16, 6, 32)
    """
    if one == "fprop":
        return tokens, inputs, outputs
    return (tokens, outputs, inputs) if one == "dgrad" else (outputs, tokens, inputs)


def summed_axes(slot: str, dims: int) -> set[int]:
    """The axes of a linear layer's operand that its product sums over."""
    if slot in ("fprop.x", "dgrad.dy"):
        return {dims - 1}
    if slot.endswith(".w"):
        return {1} if slot == "fprop.w" else {0}
    return set(range(dims - 1))


def varying_axes(quantizer: Quantizer, dims: int) -> set[int] | None:
    """The axes along which the scale changes; None where it changes within one."""
    if isinstance(quantizer.format, BlockFormat):
        return None
    scaling = quantizer.scaling
    if scaling is None or scaling.granularity == "tensor":
        return set()
    if scaling.granularity == "block":
        return None
    assert scaling.axis is not None
    axis = scaling.axis % dims
    return {axis} if scaling.granularity == "channel" else set(range(dims)) - {axis}


def codes_of(encoded: Encoded, dtype: torch.dtype) -> Codes:
    """Elements and scales of a quantizer as a matrix of codes."""
    values = encoded.elements.to(dtype)
    rows = values.reshape(-1, values.shape[-1])
    if not encoded.scales:
        return Codes(rows, torch.ones((), dtype=torch.float32, device=values.device))
    (scale,) = encoded.scales
    if scale.numel() == 1:
        return Codes(rows, scale.reshape(()))
    if scale.shape[-1] == 1:
        return Codes(rows, scale.expand(*values.shape[:-1], 1).reshape(-1, 1))
    return Codes(rows, scale.reshape(1, -1))
