"""A layer whose products run on low-precision units, pass by pass; what cannot, is emulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from bitplan.compiler.tracing import is_traced
from bitplan.errors import PlanError
from bitplan.executions.native.backends import UNITS, Unit
from bitplan.gemm.products import Product
from bitplan.numerics.formats import BlockFormat, IntFormat
from bitplan.numerics.quantizer import Encoded, Quantizer
from bitplan.plans.spec import QuantizerSpec

# --- Operands of a layer's three products as matrices of codes with their scales


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


#: The attribute by which the readers of a tensor, in a graph in the making, know of each other.
_FIRST_DY = "_bitplan_first_dy"


class Form:
    """How a layer's tensors become matrices, and its matrices tensors: a linear layer's are what they are.

    `x` and `w` are the sizes of input and weight. Codes come as (everything else, features), the features being those
    of the axis `features`.
    """

    product = Product("linear")
    features = -1
    #: Whether no matrix has more elements than its tensor.
    is_pointwise = True

    def sizes(self, one: str, x: Sequence[int], w: Sequence[int]) -> tuple[int, int, int]:
        """(m, k, n) of a pass."""
        tokens = 1
        for size in x[:-1]:
            tokens *= size
        return sizes_of(one, tokens, w[1], w[0])

    def seen(self, codes: Codes, x: Sequence[int]) -> Codes:
        """What the rows of the result see of the input: the left operand of fprop and the right one of wgrad."""
        return codes

    def seen_backward(self, codes: Codes, x: Sequence[int]) -> Codes:
        """What the rows of the input see of the result's gradient: the left operand of dgrad."""
        return codes

    def weight(self, codes: Codes, w: Sequence[int]) -> Codes:
        """(outputs, what a row sees)."""
        return codes

    def weight_backward(self, codes: Codes, w: Sequence[int]) -> Codes:
        """(what a row sees, inputs)."""
        return codes

    def result(self, rows: Tensor, x: Sequence[int]) -> Tensor:
        return rows.reshape(*x[:-1], -1)

    def grad_x(self, rows: Tensor, x: Sequence[int]) -> Tensor:
        return rows.reshape(*x)

    def grad_w(self, matrix: Tensor, w: Sequence[int]) -> Tensor:
        return matrix

    def like_x(self, dy: Tensor, x: Sequence[int]) -> Tensor:
        """A tensor with the sizes and the layout of the input, and nothing in it."""
        return dy.new_empty(x)


class Kept:
    """An operand as elements of a byte and their scale, from which its rounded values can be had again."""

    def __init__(self, encoded: Encoded, quantizer: Quantizer, like: Tensor, dtype: torch.dtype) -> None:
        self.wide: Tensor | None = encoded.elements
        self.elements: Tensor | None = encoded.elements.to(dtype)
        self.scale = encoded.scales[0] if encoded.scales else None
        self.quantizer, self.dtype = quantizer, like.dtype

    def given_away(self) -> tuple[Tensor, Tensor | None]:
        """Elements and scale, for autograd to keep."""
        elements, scale = self.elements, self.scale
        assert elements is not None
        self.wide = self.elements = self.scale = None
        return elements, scale

    def rounded(self, elements: Tensor, scale: Tensor | None) -> Tensor:
        """To the bit what rounding gives."""
        wide = elements.to(torch.float32 if scale is None else scale.dtype)
        like = torch.empty_like(elements, dtype=self.dtype)
        return self.quantizer.decode(Encoded(wide, () if scale is None else (scale,)), like)


class NativeSlots(Protocol):
    """What the product asks of a plan."""

    #: Pass -> what multiplies there; a pass that is missing is emulated.
    units: dict[str, Unit]
    #: Operands, of x and w, that the backward pass casts again from what they were, rather than keep their codes.
    casts_again: tuple[str, ...]

    def round(self, slot: str, tensor: Tensor) -> Tensor: ...

    def codes(self, slots: list[str], tensor: Tensor, after: Tensor | None = None) -> list[Codes]:
        """The codes of a tensor for each of these slots; `after`: once more, and not before that tensor is there."""
        ...

    def kept(self, x: Tensor) -> Kept | None:
        """The input as an emulated wgrad wants it, in a byte an element; None where that is not to be had."""
        ...

    def shares(self, operand: str) -> bool:
        """Whether an operand is rounded once for both of its products."""
        ...


class NativeProduct(torch.autograd.Function):
    """y = x w forward, dx = dy w and dw = dy x backward. Of x and w, the codes that backward products want are kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, form: Form, slots: NativeSlots) -> Tensor:
        ctx.slots, ctx.form, ctx.shapes, ctx.dtypes = slots, form, (x.shape, w.shape), (x.dtype, w.dtype)
        #: Begins with the first gradient that comes to any reader of x: they cast x again after that, once for all.
        ctx.first_dy = x.__dict__.setdefault(_FIRST_DY, []) if "x" in slots.casts_again and is_traced() else []
        keeps_x = ctx.needs_input_grad[1] and "x" not in slots.casts_again
        wanted_x = _slots_of("x", slots, fprop=True, wgrad=keeps_x)
        wanted_w = _slots_of("w", slots, fprop=True, dgrad=ctx.needs_input_grad[0] and "w" not in slots.casts_again)
        of_x = dict(zip(wanted_x, slots.codes(wanted_x, x), strict=True))
        of_w = dict(zip(wanted_w, slots.codes(wanted_w, w), strict=True))
        kept = slots.kept(x) if keeps_x and "wgrad" not in slots.units else None
        if "fprop" in slots.units:
            left, right = form.seen(of_x["fprop.x"], x.shape), form.weight(of_w["fprop.w"], w.shape).transposed()
            y = form.result(slots.units["fprop"].multiply(*_operands(left, right), _result_dtype(x)), x.shape)
            y = y if bias is None else y + _along(bias, form.features, y)
        else:
            if kept is not None and kept.wide is not None and slots.shares("x"):
                rounded_x = kept.rounded(kept.wide, kept.scale)
            else:
                rounded_x = slots.round("fprop.x", x)
            y = form.product.forward(rounded_x, slots.round("fprop.w", w), bias)
        x_kept: tuple[Tensor, Tensor | None]
        if kept is None:
            ctx.kept, x_kept = None, of_x.get("wgrad.x", (x, None))
            if "wgrad.x" in of_x and form.is_pointwise:  # no more than was there
                x_kept = form.seen(of_x["wgrad.x"], x.shape)
        else:
            ctx.kept, x_kept = kept, kept.given_away()
        ctx.save_for_backward(*x_kept, *of_w.get("dgrad.w", (w, None)), bias)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not is_traced():
            raise PlanError(
                "native execution has no second derivative: attach with execution='emulate' for create_graph=True."
            )
        x, x_scale, w, w_scale, bias = ctx.saved_tensors
        slots, form, dy, units = ctx.slots, ctx.form, grads[0], ctx.slots.units
        (x_shape, w_shape), (x_dtype, w_dtype) = ctx.shapes, ctx.dtypes
        grad_x = grad_w = grad_bias = None
        wanted = _slots_of("dy", slots, dgrad=ctx.needs_input_grad[0], wgrad=ctx.needs_input_grad[1])
        of_dy = dict(zip(wanted, slots.codes(wanted, dy), strict=True))
        rounded_dy = _Once(lambda slot: slots.round(slot, dy), slots.shares("dy"))
        if "dgrad.dy" in of_dy:
            (right,) = slots.codes(["dgrad.w"], w, after=dy) if w_scale is None else [Codes(w, w_scale)]
            left, right = form.seen_backward(of_dy["dgrad.dy"], x_shape), form.weight_backward(right, w_shape)
            grad_x = form.grad_x(units["dgrad"].multiply(*_operands(left, right), x_dtype), x_shape)
        elif ctx.needs_input_grad[0]:
            like, rounded_w = form.like_x(dy, x_shape), slots.round("dgrad.w", w).to(dy.dtype)
            grad_x = form.product.grad_x(rounded_dy("dgrad.dy"), like, rounded_w).to(x_dtype)
        if "wgrad.dy" in of_dy:
            if x_scale is None:
                ctx.first_dy.append(dy)
                (right,) = slots.codes(["wgrad.x"], x, after=ctx.first_dy[0])
            else:
                right = Codes(x, x_scale)
            right = right if form.is_pointwise and x_scale is not None else form.seen(right, x_shape)
            product = units["wgrad"].multiply(*_operands(of_dy["wgrad.dy"].transposed(), right), w_dtype)
            grad_w = form.grad_w(product, w_shape)
        elif ctx.needs_input_grad[1]:
            rounded = (slots.round("wgrad.x", x) if ctx.kept is None else ctx.kept.rounded(x, x_scale)).to(dy.dtype)
            like = dy.new_empty(w_shape)
            grad_w = form.product.grad_w(rounded_dy("wgrad.dy"), rounded, like).to(w_dtype)
        if bias is not None and ctx.needs_input_grad[2]:
            arrived = dy
            if slots.shares("dy"):  # a gradient that is rounded once, where it arrives, is so for the bias, too
                known = next(iter(of_dy.values()), None)
                arrived = rounded_dy("dgrad.dy") if known is None else _restored(known.decoded().to(dy.dtype), dy, form)
            grad_bias = form.product.grad_bias(arrived, bias).to(bias.dtype)
        return grad_x, grad_w, grad_bias, None, None


class _Once:
    """Rounds a tensor once for all its slots, where they share one rounding."""

    def __init__(self, rounds: Callable[[str], Tensor], is_shared: bool) -> None:
        self.rounds, self.is_shared = rounds, is_shared
        self.known: Tensor | None = None

    def __call__(self, slot: str) -> Tensor:
        if self.known is None or not self.is_shared:
            self.known = self.rounds(slot)
        return self.known


def _along(bias: Tensor, axis: int, y: Tensor) -> Tensor:
    """A bias in the shape in which it is added."""
    bias = bias.to(y.dtype)
    return bias if axis == -1 else bias.reshape(-1, *(1,) * (y.dim() - axis - 1))


def _restored(rows: Tensor, like: Tensor, form: Form) -> Tensor:
    """A tensor's matrix in its own shape."""
    return rows.reshape(like.movedim(form.features, -1).shape).movedim(-1, form.features)


def _slots_of(operand: str, slots: NativeSlots, **wanted: bool) -> list[str]:
    """The slots of an operand in the passes that are wanted and run on a unit."""
    return [f"{one}.{operand}" for one, is_wanted in wanted.items() if is_wanted and one in slots.units]


def _operands(left: Codes, right: Codes) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    return left.values, right.values, (left.scale, right.scale)


def _result_dtype(x: Tensor) -> torch.dtype:
    """As a linear layer's own: autocast decides, where there is one."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def native_product(x: Tensor, w: Tensor, bias: Tensor | None, form: Form, slots: NativeSlots) -> Tensor:
    """y = x w + bias, its products on the units that `slots` names."""
    y: Tensor = NativeProduct.apply(x, w, bias, form, slots)  # type: ignore[no-untyped-call]
    return y
