"""Products with six operand slots: y = x w forward, dx = dy w and dw = x dy backward, each operand rounded separately.

If the plan rounds an operand once for both of its products, autograd on the rounded operands is correct and
:class:`SlotProduct` is not needed. It is for plans that give the slots of a tensor different quantizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bitplan.capture.decompositions import grouped_mm
from bitplan.compiler.tracing import is_traced, transformable
from bitplan.errors import QuantizeError


@dataclass(frozen=True)
class Product:
    """An operation with its settings: the forward product and the two backward products, in plain torch."""

    op: str
    settings: tuple[Any, ...] = field(default=())
    #: Of a grouped product: the row at which each group of x ends. Not a setting, because a graph has it as a tensor.
    offsets: Tensor | None = field(default=None, compare=False)

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        if self.op == "linear":
            return torch.nn.functional.linear(x, w, bias)
        if self.op.startswith("conv"):
            stride, padding, dilation, is_transposed, output_padding, groups = self.settings
            extra = (output_padding, groups, dilation) if is_transposed else (dilation, groups)
            y: Tensor = getattr(torch, self.op)(x, w, bias, stride, padding, *extra)  # the name that autocast handles
            return y
        if self.op == "einsum":
            left, right, out = self.settings
            return torch.einsum(f"{left},{right}->{out}", x, w)
        if self.op == "grouped_mm":
            return _grouped_rows(x, w, self.offsets)
        if bias is None:
            return torch.matmul(x, w)
        add = torch.addmm if x.dim() == 2 else torch.baddbmm  # one rounding of product and sum, as in the model
        return add(bias, x, w)

    def grad_x(self, dy: Tensor, x: Tensor, w: Tensor) -> Tensor:
        if self.op == "linear":
            return torch.matmul(dy, w)
        if self.op.startswith("conv"):
            return self._convolution_backward(dy, x, w, (True, False))[0]
        if self.op == "einsum":
            left, right, out = self.settings
            return _einsum_gradient(f"{out},{right}", left, dy, w, x)
        if self.op == "grouped_mm":
            return _grouped_rows(dy, w.transpose(-2, -1), self.offsets)
        if w.dim() == 1:
            return (dy.unsqueeze(-1) * w).sum_to_size(x.shape)
        grad = torch.matmul(_add_row_axis(dy, x), w.transpose(-1, -2))
        return _sum_to(grad if x.dim() > 1 else grad.squeeze(-2), x)

    def grad_w(self, dy: Tensor, x: Tensor, w: Tensor) -> Tensor:
        if self.op == "linear":
            return torch.matmul(dy.reshape(-1, dy.shape[-1]).t(), x.reshape(-1, x.shape[-1]))
        if self.op.startswith("conv"):
            return self._convolution_backward(dy, x, w, (False, True))[1]
        if self.op == "einsum":
            left, right, out = self.settings
            return _einsum_gradient(f"{left},{out}", right, x, dy, w)
        if self.op == "grouped_mm":
            return _grouped_columns(x, dy, self.offsets)
        if w.dim() == 1:
            columns = torch.matmul(_add_row_axis(x, x).transpose(-1, -2), dy.unsqueeze(-1))
            return columns.squeeze(-1).sum_to_size(w.shape)
        return _sum_to(torch.matmul(_add_row_axis(x, x).transpose(-1, -2), _add_row_axis(dy, x)), w)

    def grad_bias(self, dy: Tensor, bias: Tensor) -> Tensor:
        if self.op.startswith("conv"):
            return dy.sum([axis for axis in range(dy.dim()) if axis != 1])
        return dy.sum_to_size(bias.shape)

    def _convolution_backward(self, dy: Tensor, x: Tensor, w: Tensor, output_mask: tuple[bool, bool]) -> list[Tensor]:
        stride, padding, dilation, transposed, output_padding, groups = self.settings
        gradients: list[Tensor] = torch.ops.aten.convolution_backward(
            dy, x, w, None, stride, padding, dilation, transposed, output_padding, groups, [*output_mask, False]
        )
        return gradients

    def output_padding_of(self, x: Sequence[int], w: Sequence[int]) -> list[int] | None:
        """The output padding of the transposed convolution that maps dy to the size of x; None where there is none."""
        stride, padding, dilation, is_transposed, _, _ = self.settings
        if is_transposed:
            return None
        spans = [d * (size - 1) + 1 for d, size in zip(dilation, w[2:], strict=True)]
        left = [(size + 2 * p - span) % s for size, p, span, s in zip(x[2:], padding, spans, stride, strict=True)]
        is_possible = all(size + 2 * p >= span for size, p, span in zip(x[2:], padding, spans, strict=True))
        return left if is_possible else None

    def grad_x_by_transposition(self, dy: Tensor, x: Sequence[int], w: Tensor) -> Tensor:
        """The gradient of a convolution's input, for which the input itself is not needed."""
        stride, padding, dilation, _, _, groups = self.settings
        output_padding = self.output_padding_of(x, w.shape)
        assert output_padding is not None
        settings = (stride, padding, dilation, True, output_padding, groups)
        gradient: Tensor = torch.ops.aten.convolution(dy, w, None, *settings)
        return gradient


def _grouped_rows(x: Tensor, w: Tensor, offsets: Tensor | None) -> Tensor:
    """Each group of rows of x times its own matrix of w; zeros for rows that are in no group.

    torch leaves such rows as they were in memory, and the scale of the next product may be that of all rows.
    """
    assert offsets is not None
    if _needs_loop(x):
        return grouped_mm(x, w, offsets)
    y = torch.nn.functional.grouped_mm(x, w, offs=offsets)
    is_in_no_group = torch.arange(x.shape[0], device=x.device) >= offsets[-1]
    return y.masked_fill(is_in_no_group.unsqueeze(1), 0)


def _grouped_columns(x: Tensor, dy: Tensor, offsets: Tensor | None) -> Tensor:
    """For each group of rows, x transposed times dy: the gradient of the group's matrix."""
    assert offsets is not None
    if _needs_loop(x):
        return torch.ops.bitplan.grouped_mm_of_rows(x, dy, offsets)  # type: ignore[no-any-return]
    return torch.nn.functional.grouped_mm(x.transpose(-2, -1), dy, offs=offsets)


def _needs_loop(x: Tensor) -> bool:
    """In graphs, torch multiplies groups in bfloat16 only."""
    return is_traced() and x.dtype != torch.bfloat16


def _add_row_axis(tensor: Tensor, x: Tensor) -> Tensor:
    """`tensor` with the row axis that it lacks if x is a vector."""
    return tensor if x.dim() > 1 else tensor.unsqueeze(-2)


def _sum_to(grad: Tensor, like: Tensor) -> Tensor:
    """Sum over the axes along which `like` was broadcast."""
    return grad.sum_to_size(like.shape) if grad.shape != like.shape else grad


def _einsum_terms(equation: Any) -> tuple[str, str, str]:
    if not isinstance(equation, str):
        raise QuantizeError("slots of an einsum need its equation as a text: write it as 'ij,jk->ik'.")
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    left, right = inputs.split(",")
    letters = (left + right).replace("...", "")
    if not arrow:  # the implicit output of torch.einsum: letters that occur once, sorted
        out = "..." * ("..." in inputs) + "".join(letter for letter in sorted(letters) if letters.count(letter) == 1)
    for term in (left, right):
        repeated = [letter for letter in term.replace("...", "") if term.count(letter) > 1]
        if repeated:
            raise QuantizeError(f"slots of an einsum that takes a diagonal ({term}) are not supported: take it first.")
    return left, right, out


def _einsum_gradient(inputs: str, output: str, first: Tensor, second: Tensor, like: Tensor) -> Tensor:
    """The gradient in the shape of `like`, constant along the letters that occur in its term only."""
    missing = [axis for axis, letter in enumerate(output) if letter != "." and letter not in inputs]
    present = "".join(letter for letter in output if letter == "." or letter in inputs)
    grad = torch.einsum(f"{inputs}->{present}", first, second)
    if not missing:
        return _sum_to(grad, like)
    if "..." in output:
        raise QuantizeError("slots of an einsum that sums one operand beside an ellipsis are not supported.")
    for axis in missing:
        grad = grad.unsqueeze(axis)
    return grad.expand(like.shape)


def no_view(y: Tensor) -> Tensor:
    """The result of an autograd function as a tensor that the model may change in place.

    torch refuses that for a view that was made inside the function: ``F.linear`` of three dimensions returns one.
    """
    return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y


class SlotProduct(torch.autograd.Function):
    """The three products, each of which rounds its two operands separately."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, product: Product, slots: Any) -> Tensor:
        # A frozen weight needs no input and a fixed input no weight: of these only the form is kept.
        needs_x, needs_w = getattr(ctx, "needs_input_grad", (True, True))[:2]  # transforms of torch.func do not say
        saved_x, saved_w = (x if needs_w else None), (w if needs_x else None)
        if saved_x is not None and slots.keeps_rounded_x:
            saved_x = slots.round("wgrad.x", x)
        ctx.save_for_backward(saved_x, saved_w, bias)
        ctx.forms = (x.shape, x.stride(), x.dtype), (w.shape, w.stride(), w.dtype)
        ctx.product, ctx.slots = product, slots
        return no_view(product.forward(slots.round("fprop.x", x), slots.round("fprop.w", w), bias))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, w, bias = ctx.saved_tensors
        (x_shape, x_stride, x_dtype), (w_shape, w_stride, w_dtype) = ctx.forms
        product, slots, dy = ctx.product, ctx.slots, grads[0]
        grad_x = grad_w = grad_bias = None
        shares_dy = slots.shares("dy")
        if shares_dy:  # a gradient that is rounded once is rounded for the bias, too
            dy = slots.round("dgrad.dy", dy)
        if ctx.needs_input_grad[0]:
            rounded_w = slots.round("dgrad.w", w).to(dy.dtype)
            dgrad_dy = dy if shares_dy else slots.round("dgrad.dy", dy)
            like_x = dy.new_empty_strided(x_shape, x_stride) if x is None else x.to(dy.dtype)
            grad_x = product.grad_x(dgrad_dy, like_x, rounded_w).to(x_dtype)
        if ctx.needs_input_grad[1]:
            rounded_x = (x if slots.keeps_rounded_x else slots.round("wgrad.x", x)).to(dy.dtype)
            wgrad_dy = dy if shares_dy else slots.round("wgrad.dy", dy)
            like_w = dy.new_empty_strided(w_shape, w_stride) if w is None else w.to(dy.dtype)
            grad_w = product.grad_w(wgrad_dy, rounded_x, like_w).to(w_dtype)
        if bias is not None and ctx.needs_input_grad[2]:
            grad_bias = product.grad_bias(dy, bias).to(bias.dtype)
        return grad_x, grad_w, grad_bias, None, None


def slot_product(x: Tensor, w: Tensor, bias: Tensor | None, product: Product, slots: Any) -> Tensor:
    """y = x w with the six slots rounded by `slots`."""
    is_unbatched = product.op.startswith("conv") and x.dim() == w.dim() - 1
    y: Tensor = transformable(SlotProduct).apply(x.unsqueeze(0) if is_unbatched else x, w, bias, product, slots)
    return y.squeeze(0) if is_unbatched else y


def product_of(op: str, args: Any, kwargs: dict[str, Any]) -> tuple[Product, Tensor | None]:
    """The product of a call, with its settings, and the bias."""
    if op == "linear":
        return Product(op), _argument(args, kwargs, 2, "bias", None)
    if op == "einsum":
        return Product(op, _einsum_terms(args[0])), None
    if op == "grouped_mm":
        if not has_settings(op, args, kwargs):
            raise QuantizeError(
                "the passes of a grouped product are rounded separately only where rows of a matrix are multiplied "
                "with a matrix for each group, without a bias: give x, w and dy in place of fprop, dgrad and wgrad, "
                "or keep: true for op: grouped_mm."
            )
        return Product(op, offsets=_offsets(args, kwargs)), None
    if op in ("addmm", "baddbmm"):
        if _argument(args, kwargs, 3, "beta", 1) != 1 or _argument(args, kwargs, 4, "alpha", 1) != 1:
            raise QuantizeError(f"slots of {op} with alpha or beta other than 1 are not supported: use matmul and add.")
        return Product("matmul"), _argument(args, kwargs, 0, "input", None)
    if not op.startswith("conv"):
        return Product("matmul"), None
    dims = int(op[-2])
    transposed = op.startswith("conv_transpose")
    order = ("stride", "padding", "output_padding", "groups", "dilation")
    if not transposed:
        order = ("stride", "padding", "dilation", "groups")  # type: ignore[assignment]
    options: dict[str, Any] = {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}
    for position, name in enumerate(order, start=3):
        options[name] = _argument(args, kwargs, position, name, options[name])
    if isinstance(options["padding"], str):
        weight = _argument(args, kwargs, 1, "weight", None)
        options["padding"] = _numeric_padding(options["padding"], weight, options["dilation"], dims)
    stride, padding, dilation, output_padding = (
        _per_axis(options[name], dims) for name in ("stride", "padding", "dilation", "output_padding")
    )
    settings = (stride, padding, dilation, transposed, output_padding, options["groups"])
    return Product(op, settings), _argument(args, kwargs, 2, "bias", None)


def _per_axis(value: Any, dims: int) -> list[int]:
    return [value] * dims if isinstance(value, int) else list(value)


def has_settings(op: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether :func:`product_of` supports a call: not with asymmetric padding, or a grouped sum."""
    if op == "grouped_mm":
        x, w = (_argument(args, kwargs, position, name, None) for position, name in enumerate(("self", "mat2")))
        extra = _argument(args, kwargs, 3, "bias", None), _argument(args, kwargs, 4, "out_dtype", None)
        is_plain = x is not None and w is not None and x.dim() == 2 and w.dim() == 3 and extra == (None, None)
        return is_plain and _offsets(args, kwargs) is not None
    if not op.startswith("conv") or _argument(args, kwargs, 4, "padding", 0) != "same":
        return True
    return all(size % 2 for size in _argument(args, kwargs, 1, "weight", None).shape[2:])


def _offsets(args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    offsets: Tensor | None = _argument(args, kwargs, 2, "offs", None)
    return offsets


def _numeric_padding(padding: str, weight: Tensor, dilation: Any, dims: int) -> list[int]:
    if padding == "valid":
        return [0] * dims
    sizes = zip(_per_axis(dilation, dims), weight.shape[2:], strict=True)
    totals = [axis_dilation * (size - 1) for axis_dilation, size in sizes]
    if any(total % 2 for total in totals):
        raise QuantizeError(
            "padding='same' with an even kernel has no symmetric form: pad explicitly to use slots here."
        )
    return [total // 2 for total in totals]


def _argument(args: Any, kwargs: dict[str, Any], position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)
