"""Products of native execution with a frozen weight that is stored in few bits.

Where the stored codes are those of a GEMM backend (FP8 or INT8 with one scale, or one for each output), they are
multiplied as they are: the weight is cast once, when the plan is attached. A weight in other codes is decoded and cast
in the forward pass and again in the backward pass. There is no gradient of the weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitplan.compiler.tracing import constant_when_traced, is_traced, opaque_in_graph, transformable
from bitplan.errors import PlanError
from bitplan.executions.native.backends import GemmBackend, supports_shape
from bitplan.executions.native.gemm import Codes, GemmLayout, result_dtype
from bitplan.executions.native.product import NativeSlots
from bitplan.gemm.products import no_view
from bitplan.numerics.frozen_codec import depending_on
from bitplan.plans import SLOTS
from bitplan.plans.match import PASSES
from bitplan.runtime.autograd import Buffers, CallConstants, OpRef, call_buffers, call_constants, chosen_ops, op_ref
from bitplan.runtime.frozen import FrozenOperand, codec_and_dtype
from bitplan.runtime.frozen_product import applied_slots
from bitplan.runtime.op_context import OpContext
from bitplan.runtime.rounding_op import OpRounding

#: Passes of a product whose weight has no gradient.
_PASSES = ("fprop", "dgrad")


@constant_when_traced
def is_one_factor(text: str) -> bool:
    """Whether a weight with that text is a matrix of codes times one factor, or one for each row."""
    return codec_and_dtype(text)[0].is_one_factor


def native_frozen_product(
    x: Tensor,
    bias: Tensor | None,
    decoded: Tensor,
    operand: FrozenOperand,
    backends: dict[str, str],
    rounding: OpRounding,
    context: OpContext,
    weight_key: Tensor | None,
) -> Tensor | None:
    """y = x w + bias of a linear layer; the passes in `backends` run there. None where no pass does."""
    applied = applied_slots(rounding, context)
    layout, has_one_factor = GemmLayout(), is_one_factor(operand.text)
    used: dict[str, str] = {}
    for gemm_pass in _PASSES:
        name = backends.get(gemm_pass)
        moving, weight = PASSES[gemm_pass]
        if name is None or moving not in applied or (weight not in applied and not has_one_factor):
            continue
        if supports_shape(name, x.device.type, layout.gemm_shape(gemm_pass, x.shape, decoded.shape)):
            used[gemm_pass] = name
    if not used:
        return None
    if not torch.compiler.is_compiling():
        slots = NativeSlots({slot: (op, context) for slot, op in applied.items()}, weight_key, used)
        return _multiply(x, bias, slots, operand)
    refs = tuple(op_ref(applied.get(slot), context) for slot in SLOTS)
    return _native_frozen_product_in_graph(
        x,
        bias,
        tuple(used.items()),
        refs,
        call_constants(context),
        call_buffers(context),
        weight_key,
        operand.text,
        *operand.tensors,
    )


@opaque_in_graph
def _native_frozen_product_in_graph(
    x: Tensor,
    bias: Tensor | None,
    backends: tuple[tuple[str, str], ...],
    refs: tuple[OpRef, ...],
    call: CallConstants,
    buffers: Buffers,
    weight_key: Tensor | None,
    text: str,
    *tensors: Tensor,
) -> Tensor:
    slots = NativeSlots(chosen_ops(refs, call, buffers), weight_key, dict(backends))
    return _multiply(x, bias, slots, FrozenOperand(text, tensors))


def _multiply(x: Tensor, bias: Tensor | None, slots: NativeSlots, operand: FrozenOperand) -> Tensor:
    y: Tensor = transformable(NativeFrozenProduct).apply(x, bias, slots, operand.text, *operand.tensors)
    return y


def _weight_codes(slot: str, slots: NativeSlots, operand: FrozenOperand, after: Tensor | None) -> Codes:
    """The weight for a backend: its stored codes, or the decoded weight cast as the plan says."""
    if _multiplies_stored_codes(slot, slots, operand):
        codes = operand.codes
        payload = codes.payload
        if after is not None and payload.is_cuda:
            # FP8 units need the summed axis innermost, and here outputs are summed: the backward pass makes a copy that
            # is transposed, of bytes, because Inductor would compute with float8.
            rows = payload.view(torch.uint8)
            columns = (depending_on(rows, after) if is_traced() else rows).t().contiguous()
            payload = columns.t().view(payload.dtype)
        return Codes(payload, codes.scales[0])
    (cast,) = slots.codes([slot], operand.decode(after))
    return cast


def _multiplies_stored_codes(slot: str, slots: NativeSlots, operand: FrozenOperand) -> bool:
    codec = operand.codec
    backend: GemmBackend = slots.backends[slot.split(".")[0]]
    if not codec.is_one_factor or backend.code_dtype(codec.element) != codec.code_dtype:
        return False
    if slot == "dgrad.w" and codec.granularity != "tensor":
        return False  # a scale for each output changes along the sum
    if slot not in slots.chosen:
        return True
    spec = slots.chosen[slot][0].spec
    is_same = spec.target == codec.format and spec.scale == codec.granularity
    return is_same and spec.rounding == "nearest" and not spec.power_of_two


class NativeFrozenProduct(torch.autograd.Function):
    """y = x w forward, dx = dy w backward. Saves the stored codes of w only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, slots: NativeSlots, text: str, *tensors: Tensor) -> Tensor:
        operand, layout = FrozenOperand(text, tensors), GemmLayout()
        ctx.slots, ctx.layout, ctx.text, ctx.form = slots, layout, text, (x.shape, x.stride(), x.dtype)
        ctx.save_for_backward(bias, *tensors)
        if "fprop" not in slots.backends:
            rounded_x, w = slots.round("fprop.x", x), operand.decode()
            return no_view(layout.product.forward(rounded_x, slots.round("fprop.w", w), bias))
        (left,) = slots.codes(["fprop.x"], x)
        right = _weight_codes("fprop.w", slots, operand, None).transposed()
        rows = slots.backends["fprop"].multiply(left.values, right.values, (left.scale, right.scale), result_dtype(x))
        y = layout.output(rows, x.shape)
        return no_view(y if bias is None else y + bias.to(y.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not is_traced():
            raise PlanError(
                "native execution has no second derivative: attach with execution='emulate' for create_graph=True."
            )
        bias, *tensors = ctx.saved_tensors
        slots, layout, dy = ctx.slots, ctx.layout, grads[0]
        operand, (shape, stride, dtype) = FrozenOperand(ctx.text, tuple(tensors)), ctx.form
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            if "dgrad" in slots.backends:
                (left,) = slots.codes(["dgrad.dy"], dy)
                right = _weight_codes("dgrad.w", slots, operand, dy)
                rows = slots.backends["dgrad"].multiply(left.values, right.values, (left.scale, right.scale), dtype)
                grad_x = layout.grad_x(rows, shape)
            else:
                w = slots.round("dgrad.w", operand.decode(after=dy)).to(dy.dtype)
                like = dy.new_empty_strided(shape, stride)
                grad_x = layout.product.grad_x(slots.round("dgrad.dy", dy), like, w).to(dtype)
        if bias is not None and ctx.needs_input_grad[1]:
            rounded = slots.round("dgrad.dy", dy) if slots.shares("dy") else dy
            grad_bias = layout.product.grad_bias(rounded, bias).to(bias.dtype)
        return grad_x, grad_bias, None, None, *([None] * len(tensors))
