"""Operands of a layer's three products as matrices of codes with their scales.

=======  ==========================  ==================================  ====================
pass     left (m, k)                 right (k, n)                        summed over
=======  ==========================  ==================================  ====================
fprop    x, tokens by inputs         w transposed, inputs by outputs     inputs
dgrad    dy, tokens by outputs       w, outputs by inputs                outputs
wgrad    dy transposed               x, tokens by inputs                 tokens
=======  ==========================  ==================================  ====================

A scale can be taken out of a sum only if it stays the same along it. The tokens of a convolution are pixels; how its
tensors become such matrices is told by :mod:`bitplan.native.convolution`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bitplan.native.units import UNITS
from bitplan.numbers.formats import BlockFormat, IntFormat
from bitplan.numbers.quantizer import Quantizer
from bitplan.numbers.straight import Encoded
from bitplan.plan.spec import QuantizerSpec

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


def summed_axes(slot: str, dims: int, op: str = "linear", is_pointwise: bool = True) -> set[int]:
    """The axes of an operand that its product sums over.

    :param op: ``linear`` or a convolution, which sums over channels and over what lies under its kernel.
    :param is_pointwise: the kernel covers one pixel.
    """
    if op.startswith("conv"):
        if slot in ("fprop.x", "dgrad.dy"):
            return {1} if is_pointwise else set(range(1, dims))
        kept = 0 if slot == "fprop.w" else 1
        return set(range(dims)) - {kept}
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


def byte_of(spec: QuantizerSpec) -> torch.dtype | None:
    """The type in which elements of that quantizer lie in a byte each, beside one scale; None where they do not."""
    if spec.promote is not None or spec.scale == "block" or spec.range == "minmax":
        return None
    if spec.scale is None and isinstance(spec.target, IntFormat):
        return None  # a NaN would become a number
    return next((dtype for dtype in (unit.dtype_of(spec.target) for unit in UNITS) if dtype is not None), None)


def codes_of(encoded: Encoded, dtype: torch.dtype, features: int = -1) -> Codes:
    """Elements and scales of a quantizer as a matrix of codes, whose second axis is the axis `features`."""
    values = encoded.elements.to(dtype).movedim(features, -1)
    rows = values.reshape(-1, values.shape[-1])
    if not encoded.scales:
        return Codes(rows, torch.ones((), dtype=torch.float32, device=values.device))
    (scale,) = encoded.scales
    if scale.numel() == 1:
        return Codes(rows, scale.reshape(()))
    scale = scale.movedim(features, -1)
    if scale.shape[-1] == 1:
        return Codes(rows, scale.expand(*values.shape[:-1], 1).reshape(-1, 1))
    return Codes(rows, scale.reshape(1, -1))
