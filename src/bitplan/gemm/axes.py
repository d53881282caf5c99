"""The axis of ``channel``, ``vector`` and ``block`` scales for which a plan names none.

A scale must be constant along the summed axes of a product, or it cannot be factored out of the sum. So ``vector`` has
a scale for each index of the other axes, which differ between slots (x, w and dy each need two scaled copies):

===========  =========================  ===================================  ==========================
operation    fprop (x | w)              dgrad (dy | w)                       wgrad (dy | x)
===========  =========================  ===================================  ==========================
linear       token | output             token | input                        output | input
conv         sample | output channel    sample | input channel               output | input channel
matmul       row of x | column of w     row of dy | row of w                 column of dy | column of x
===========  =========================  ===================================  ==========================

A block of rows and columns covers the operand seen as a matrix: its columns lie along the summed axis, its rows along
the other axis of the product (the output axis of a weight in fprop, its input axis in dgrad). A square block of a
weight is the same in both, so that one rounded weight serves both products.

``channel`` has a scale for each index of the feature axis: the output axis of a weight, dimension 1 of images, and the
last dimension of other tensors.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from bitplan.numerics.mutable_format import MutableFormat
from bitplan.numerics.quantizer import Quantizer
from bitplan.numerics.rotation import Rotation
from bitplan.numerics.wire_format import OPERAND_OF_SLOT, WGRAD
from bitplan.plans.spec import QuantizerSpec

#: Roles and slots of weights.
_WEIGHT_SITES = ("weight", "grad_weight", "fprop.w", "dgrad.w")
#: Products whose operands have the summed axis in common, so that both can be rotated along it.
ROTATABLE = ("linear", "matmul", "bmm", "addmm", "baddbmm")
#: Operations whose results have the features in the last dimension, however many dimensions there are.
_FEATURES_LAST = ("linear", "matmul", "scaled_dot_product_attention", "layer_norm", "rms_norm", "softmax")


@lru_cache(maxsize=4096)  # the same few for thousands of layers
def resolve(spec: QuantizerSpec, place: str, op: str, dims: int, live: MutableFormat | None = None) -> Quantizer:
    """The quantizer for a tensor of `dims` dimensions in a role or slot of an operation."""
    if dims == 0:
        return replace(spec, scale="tensor" if spec.scale else None, axis=None, block=None).resolve(live=live)
    meaning = spec.axis_meaning
    if meaning is None:
        return spec.resolve(live=live)
    if meaning == "kept":
        return spec.resolve(axis_default=_feature_axis(place, op, dims) % dims, live=live)
    if isinstance(spec.block, tuple):
        if dims > 1:
            return spec.resolve(axis_default=matrix_axes(place, op, dims), live=live)
        spec = replace(spec, block=spec.block[1] if spec.scale else None)  # a vector is one row
        return spec.resolve(axis_default=0, live=live)
    summed = summed_axes(place, op, dims) or [0]
    unsummed = [axis for axis in range(dims) if axis not in summed]
    if spec.scale == "vector" and len(summed) > 1 and len(unsummed) == 1:
        return replace(spec, scale="channel", axis=unsummed[0]).resolve(live=live)
    return spec.resolve(axis_default=summed[-1], live=live)


def matrix_axes(place: str, op: str, dims: int) -> tuple[int, int]:
    """The axes of rows and columns of a tensor with `dims` >= 2 dimensions seen as a matrix, columns summed over.

    Of a linear layer's tokens and of batched matrices each matrix has its own blocks. A convolution sums over input
    channels, one position of the kernel and one pixel after the other; for its weight's gradient, over the last axis.

    >>> matrix_axes("fprop.w", "linear", 2), matrix_axes("dgrad.w", "linear", 2), matrix_axes("wgrad.x", "linear", 3)
    ((0, 1), (1, 0), (2, 1))
    >>> matrix_axes("fprop.w", "conv2d", 4), matrix_axes("fprop.x", "conv2d", 4)
    ((0, 1), (3, 1))
    """
    if op.startswith("conv") and dims > 2:
        if place in _WEIGHT_SITES:
            output = 1 if op.startswith("conv_transpose") else 0
            return (1 - output, output) if place == "dgrad.w" else (output, 1 - output)
        operand = OPERAND_OF_SLOT.get(place)
        return (1, dims - 1) if operand is not None and operand.pass_ == WGRAD else (dims - 1, 1)
    summed = (summed_axes(place, op, dims) or [dims - 2])[-1]
    return (dims - 2 if summed == dims - 1 else dims - 1), summed


def rotation_of(spec: QuantizerSpec, slot: str, op: str, dims: int) -> Rotation | None:
    """How an operand with `dims` dimensions is rotated; None where nothing is, or the product has no sum."""
    summed = summed_axes(slot, op, dims) if spec.rotate else []
    return Rotation(summed[-1], spec.rotate_size) if summed else None


def _feature_axis(place: str, op: str, dims: int) -> int:
    if place in _WEIGHT_SITES:
        if op in ("matmul", "bmm", "addmm", "baddbmm", "grouped_mm"):
            return -1
        return 1 if op.startswith("conv_transpose") and dims > 1 else 0
    is_image = op.startswith("conv") or (dims >= 4 and op not in _FEATURES_LAST)
    return 1 if is_image else -1


def summed_axes(place: str, op: str, dims: int, is_pointwise: bool = False) -> list[int]:
    """The axes that a product sums over, of a tensor with `dims` dimensions in a role or slot.

    :param is_pointwise: the kernel of the convolution covers one pixel, so it does not sum over pixels.

    >>> summed_axes("fprop.x", "conv2d", 4), summed_axes("fprop.x", "conv2d", 4, is_pointwise=True)
    ([1, 2, 3], [1])
    >>> summed_axes("wgrad.x", "linear", 3), summed_axes("wgrad.x", "linear", 1)
    ([0, 1], [])
    """
    operand = OPERAND_OF_SLOT.get(place)
    is_weight = place in _WEIGHT_SITES
    if op.startswith("conv") and dims > 2:
        if is_weight:
            output_axis = 1 if op.startswith("conv_transpose") else 0
            unsummed = 1 - output_axis if place == "dgrad.w" else output_axis
        elif operand is not None and operand.pass_ == WGRAD:
            unsummed = 1
        else:
            unsummed = 0
            if is_pointwise:
                return [1]
        return [axis for axis in range(dims) if axis != unsummed]
    if op == "linear":
        if place == "dgrad.w":
            return [0]
        return list(range(dims - 1)) if operand is not None and operand.pass_ == WGRAD else [dims - 1]
    if place in ("fprop.w", "wgrad.dy", "wgrad.x") and dims > 1:
        return [dims - 2]
    return [dims - 1]
