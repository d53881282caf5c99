"""A layer whose GEMMs run on low-precision backends, pass by pass; passes without a backend are emulated.

Operands become matrices of codes with their scales (:class:`Codes`), laid out by :class:`GemmLayout`; the autograd
function :class:`NativeProduct` multiplies them and saves codes for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from bitplan.compiler.tracing import is_traced
from bitplan.errors import PlanError
from bitplan.executions.native.backends import BACKENDS
from bitplan.gemm.products import Product, no_view
from bitplan.numerics.formats import BlockFormat, IntFormat
from bitplan.numerics.quantizer import Encoded, Quantizer
from bitplan.numerics.scaling import Tiles
from bitplan.plans.spec import QuantizerSpec

if TYPE_CHECKING:
    from bitplan.executions.native.product import NativeSlots

#: Slots whose GEMMs sum over features; the others sum over rows.
BY_ROW = ("fprop.x", "fprop.w", "dgrad.dy")


class Codes(NamedTuple):
    """A matrix of codes, (rows, features), and its scale: a number, (rows, 1) or (1, features).

    With blocks the scales are a matrix, too: (rows, blocks), (blocks, features) or (blocks, blocks).

    Row-major or, where a GEMM needs it so, column-major in memory.
    """

    values: Tensor
    scale: Tensor

    def decoded(self) -> Tensor:
        """The values that the codes stand for, in float32."""
        scale = self.scale
        if scale.dim() == 2:
            for axis, size in enumerate(self.values.shape):
                if 1 < scale.shape[axis] < size:
                    scale = scale.repeat_interleave(-(-size // scale.shape[axis]), axis).narrow(axis, 0, size)
        return self.values.float() * scale

    def transposed(self) -> Codes:
        return Codes(self.values.t(), self.scale.t() if self.scale.dim() == 2 else self.scale)


def gemm_shape(gemm_pass: str, tokens: int, inputs: int, outputs: int) -> tuple[int, int, int]:
    """(m, k, n) of a pass.

    >>> gemm_shape("wgrad", 6, 32, 16)
    (16, 6, 32)
    """
    if gemm_pass == "fprop":
        return tokens, inputs, outputs
    return (tokens, outputs, inputs) if gemm_pass == "dgrad" else (outputs, tokens, inputs)


def varying_axes(quantizer: Quantizer, dims: int) -> set[int] | None:
    """The axes along which the scale changes; None where it changes within an axis."""
    if isinstance(quantizer.format, BlockFormat):
        return None
    scaling = quantizer.scaling
    if scaling is None or scaling.granularity == "tensor":
        return set()
    if scaling.granularity == "block":
        return None
    assert isinstance(scaling.axis, int)
    axis = scaling.axis % dims
    return {axis} if scaling.granularity == "channel" else set(range(dims)) - {axis}


def byte_of(spec: QuantizerSpec) -> torch.dtype | None:
    """The dtype that stores elements of that quantizer in one byte each, with separate scales; None where none does."""
    if spec.promote is not None or spec.function is not None or spec.scale == "block" or spec.range == "minmax":
        return None
    if spec.scale is None and isinstance(spec.target, IntFormat):
        return None  # a NaN would become a number
    return next(
        (dtype for dtype in (backend.code_dtype(spec.target) for backend in BACKENDS) if dtype is not None), None
    )


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


def block_codes_of(encoded: Encoded, quantizer: Quantizer, like: Tensor, dtype: torch.dtype) -> Codes:
    """Elements and scales in blocks of an operand of a linear layer as a matrix of codes and one of scales."""
    blocks = quantizer.blocks(like)
    assert blocks is not None
    (scale,) = encoded.scales
    grid = scale.squeeze(-1)  # the axes of the blocks are the last
    grid = grid.movedim((-2, -1), blocks.axes) if isinstance(blocks, Tiles) else grid.movedim(-1, blocks.axis)
    values = blocks.join(encoded.elements, like.shape).to(dtype)
    return Codes(values.reshape(-1, values.shape[-1]), grid.reshape(-1, grid.shape[-1]))


#: Attribute of a traced tensor: the list of output gradients of the layers that read it, the first to arrive first.
_FIRST_DY = "_bitplan_first_dy"


class GemmLayout:
    """Converts between a layer's tensors and the matrices of its GEMMs; for a linear layer these are the same.

    `x` and `w` are the shapes of input and weight. Codes come as (everything else, features); `features` is the
    tensor's feature axis.
    """

    product = Product("linear")
    features = -1
    #: Whether no matrix has more elements than its tensor.
    is_pointwise = True

    def gemm_shape(self, gemm_pass: str, x: Sequence[int], w: Sequence[int]) -> tuple[int, int, int]:
        """(m, k, n) of a pass."""
        tokens = 1
        for size in x[:-1]:
            tokens *= size
        return gemm_shape(gemm_pass, tokens, w[1], w[0])

    def x_matrix(self, codes: Codes, x: Sequence[int]) -> Codes:
        """The input as the left operand of fprop and the right one of wgrad."""
        return codes

    def dy_matrix(self, codes: Codes, x: Sequence[int]) -> Codes:
        """The output gradient as the left operand of dgrad."""
        return codes

    def w_matrix(self, codes: Codes, w: Sequence[int]) -> Codes:
        """The weight as (outputs, summed elements), for fprop."""
        return codes

    def w_matrix_backward(self, codes: Codes, w: Sequence[int]) -> Codes:
        """The weight as (summed elements, inputs), for dgrad."""
        return codes

    def output(self, rows: Tensor, x: Sequence[int]) -> Tensor:
        return rows.reshape(*x[:-1], -1)

    def grad_x(self, rows: Tensor, x: Sequence[int]) -> Tensor:
        return rows.reshape(*x)

    def grad_w(self, matrix: Tensor, w: Sequence[int]) -> Tensor:
        return matrix

    def empty_like_x(self, dy: Tensor, x: Sequence[int]) -> Tensor:
        """An uninitialised tensor with the shape and memory format of the input."""
        return dy.new_empty(x)


class SavedOperand:
    """An operand saved as one-byte elements and their scale, from which its rounded values are restored."""

    def __init__(self, encoded: Encoded, quantizer: Quantizer, like: Tensor, dtype: torch.dtype) -> None:
        self.wide: Tensor | None = encoded.elements
        self.elements: Tensor | None = encoded.elements.to(dtype)
        self.scale = encoded.scales[0] if encoded.scales else None
        self.quantizer, self.dtype = quantizer, like.dtype

    def release(self) -> tuple[Tensor, Tensor | None]:
        """Elements and scale, for autograd to save."""
        elements, scale = self.elements, self.scale
        assert elements is not None
        self.wide = self.elements = self.scale = None
        return elements, scale

    def rounded(self, elements: Tensor, scale: Tensor | None) -> Tensor:
        """The rounded values, bit for bit."""
        wide = elements.to(torch.float32 if scale is None else scale.dtype)
        like = torch.empty_like(elements, dtype=self.dtype)
        return self.quantizer.decode(Encoded(wide, () if scale is None else (scale,)), like)


class NativeProduct(torch.autograd.Function):
    """y = x w forward, dx = dy w and dw = dy x backward. Saves the codes of x and w that the backward GEMMs need."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, layout: GemmLayout, slots: NativeSlots) -> Tensor:
        ctx.slots, ctx.layout, ctx.shapes, ctx.dtypes = slots, layout, (x.shape, w.shape), (x.dtype, w.dtype)
        #: The first output gradient of any layer that reads x: these layers cast x again after that, once for all.
        ctx.first_dy = x.__dict__.setdefault(_FIRST_DY, []) if "x" in slots.recast_in_backward and is_traced() else []
        saves_x = ctx.needs_input_grad[1] and "x" not in slots.recast_in_backward
        x_slots = _slots_of("x", slots, fprop=True, wgrad=saves_x)
        w_slots = _slots_of(
            "w", slots, fprop=True, dgrad=ctx.needs_input_grad[0] and "w" not in slots.recast_in_backward
        )
        x_codes = dict(zip(x_slots, slots.codes(x_slots, x), strict=True))
        w_codes = dict(zip(w_slots, slots.codes(w_slots, w), strict=True))
        saved_operand = slots.saved_operand(x) if saves_x and "wgrad" not in slots.backends else None
        if "fprop" in slots.backends:
            left = layout.x_matrix(x_codes["fprop.x"], x.shape)
            right = layout.w_matrix(w_codes["fprop.w"], w.shape).transposed()
            y = layout.output(slots.backends["fprop"].multiply(*_operands(left, right), result_dtype(x)), x.shape)
            y = y if bias is None else y + _broadcast_bias(bias, layout.features, y)
        else:
            if saved_operand is not None and saved_operand.wide is not None and slots.shares("x"):
                rounded_x = saved_operand.rounded(saved_operand.wide, saved_operand.scale)
            else:
                rounded_x = slots.round("fprop.x", x)
            y = layout.product.forward(rounded_x, slots.round("fprop.w", w), bias)
        saved_x: tuple[Tensor, Tensor | None]
        if saved_operand is None:
            ctx.saved_operand, saved_x = None, x_codes.get("wgrad.x", (x, None))
            if "wgrad.x" in x_codes and layout.is_pointwise:  # im2col would save more than the input has
                saved_x = layout.x_matrix(x_codes["wgrad.x"], x.shape)
        else:
            ctx.saved_operand, saved_x = saved_operand, saved_operand.release()
        ctx.save_for_backward(*saved_x, *w_codes.get("dgrad.w", (w, None)), bias)
        return no_view(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not is_traced():
            raise PlanError(
                "native execution has no second derivative: attach with execution='emulate' for create_graph=True."
            )
        x, x_scale, w, w_scale, bias = ctx.saved_tensors
        slots, layout, dy, backends = ctx.slots, ctx.layout, grads[0], ctx.slots.backends
        (x_shape, w_shape), (x_dtype, w_dtype) = ctx.shapes, ctx.dtypes
        grad_x = grad_w = grad_bias = None
        dy_slots = _slots_of("dy", slots, dgrad=ctx.needs_input_grad[0], wgrad=ctx.needs_input_grad[1])
        dy_codes = dict(zip(dy_slots, slots.codes(dy_slots, dy), strict=True))
        rounded_dy = _RoundedOnce(lambda slot: slots.round(slot, dy), slots.shares("dy"))
        if "dgrad.dy" in dy_codes:
            (right,) = slots.codes(["dgrad.w"], w, after=dy) if w_scale is None else [Codes(w, w_scale)]
            left, right = layout.dy_matrix(dy_codes["dgrad.dy"], x_shape), layout.w_matrix_backward(right, w_shape)
            grad_x = layout.grad_x(backends["dgrad"].multiply(*_operands(left, right), x_dtype), x_shape)
        elif ctx.needs_input_grad[0]:
            like, rounded_w = layout.empty_like_x(dy, x_shape), slots.round("dgrad.w", w).to(dy.dtype)
            grad_x = layout.product.grad_x(rounded_dy("dgrad.dy"), like, rounded_w).to(x_dtype)
        if "wgrad.dy" in dy_codes:
            if x_scale is None:
                ctx.first_dy.append(dy)
                (right,) = slots.codes(["wgrad.x"], x, after=ctx.first_dy[0])
            else:
                right = Codes(x, x_scale)
            right = right if layout.is_pointwise and x_scale is not None else layout.x_matrix(right, x_shape)
            product = backends["wgrad"].multiply(*_operands(dy_codes["wgrad.dy"].transposed(), right), w_dtype)
            grad_w = layout.grad_w(product, w_shape)
        elif ctx.needs_input_grad[1]:
            rounded = (
                slots.round("wgrad.x", x) if ctx.saved_operand is None else ctx.saved_operand.rounded(x, x_scale)
            ).to(dy.dtype)
            like = dy.new_empty(w_shape)
            grad_w = layout.product.grad_w(rounded_dy("wgrad.dy"), rounded, like).to(w_dtype)
        if bias is not None and ctx.needs_input_grad[2]:
            bias_dy = dy
            if slots.shares("dy"):  # a gradient that is rounded once is rounded for the bias, too
                codes = next(iter(dy_codes.values()), None)
                bias_dy = (
                    rounded_dy("dgrad.dy") if codes is None else _restored(codes.decoded().to(dy.dtype), dy, layout)
                )
            grad_bias = layout.product.grad_bias(bias_dy, bias).to(bias.dtype)
        return grad_x, grad_w, grad_bias, None, None


class _RoundedOnce:
    """Rounds a tensor once for all its slots, where they share one rounding."""

    def __init__(self, round_slot: Callable[[str], Tensor], is_shared: bool) -> None:
        self.round_slot, self.is_shared = round_slot, is_shared
        self.rounded: Tensor | None = None

    def __call__(self, slot: str) -> Tensor:
        if self.rounded is None or not self.is_shared:
            self.rounded = self.round_slot(slot)
        return self.rounded


def _broadcast_bias(bias: Tensor, axis: int, y: Tensor) -> Tensor:
    """A bias in the shape in which it is added."""
    bias = bias.to(y.dtype)
    return bias if axis == -1 else bias.reshape(-1, *(1,) * (y.dim() - axis - 1))


def _restored(rows: Tensor, like: Tensor, layout: GemmLayout) -> Tensor:
    """A tensor's matrix in its own shape."""
    return rows.reshape(like.movedim(layout.features, -1).shape).movedim(-1, layout.features)


def _slots_of(operand: str, slots: NativeSlots, **needed: bool) -> list[str]:
    """The slots of an operand in the passes that are needed and run on a backend."""
    passes = (gemm_pass for gemm_pass, is_needed in needed.items() if is_needed and gemm_pass in slots.backends)
    return [f"{gemm_pass}.{operand}" for gemm_pass in passes]


def _operands(left: Codes, right: Codes) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    return left.values, right.values, (left.scale, right.scale)


def result_dtype(x: Tensor) -> torch.dtype:
    """That of the layer itself: autocast's, where it is enabled."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
