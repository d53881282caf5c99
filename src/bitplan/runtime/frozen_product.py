"""The product of an input with a frozen weight that is stored in few bits: decoded in the forward pass, and again in
the backward pass. Nothing is saved but the codes, which are in memory anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitplan.compiler.tracing import opaque_in_graph, transformable
from bitplan.gemm.products import Product, no_view
from bitplan.numerics.wire_format import OPERAND_OF_SLOT
from bitplan.plans import SLOTS
from bitplan.runtime.autograd import (
    Buffers,
    CallConstants,
    OpRef,
    Slots,
    call_buffers,
    call_constants,
    chosen_ops,
    op_ref,
)
from bitplan.runtime.frozen import FrozenOperand
from bitplan.runtime.op_context import OpContext
from bitplan.runtime.rounding_op import OpRounding, RoundingOp


class FrozenProduct(torch.autograd.Function):
    """y = x w forward and dx = dy w backward; operands are rounded as their slots say."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        decoded: Tensor | None,
        product: Product,
        slots: Slots,
        text: str,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(bias, *tensors)
        ctx.form, ctx.text, ctx.product, ctx.slots = (x.shape, x.stride(), x.dtype), text, product, slots
        w = FrozenOperand(text, tensors).decode() if decoded is None else decoded
        return no_view(product.forward(slots.round("fprop.x", x), slots.round("fprop.w", w), bias))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        bias, *tensors = ctx.saved_tensors
        shape, stride, dtype = ctx.form
        product, slots, dy = ctx.product, ctx.slots, grads[0]
        grad_x = grad_bias = None
        shares_dy = slots.shares("dy")
        if shares_dy:  # a gradient that is rounded once is rounded for the bias, too
            dy = slots.round("dgrad.dy", dy)
        if ctx.needs_input_grad[0]:
            w = FrozenOperand(ctx.text, tuple(tensors)).decode(after=grads[0])
            rounded_w = slots.round("dgrad.w", w).to(dy.dtype)
            rounded_dy = dy if shares_dy else slots.round("dgrad.dy", dy)
            like = dy.new_empty_strided(shape, stride)
            grad_x = product.grad_x(rounded_dy, like, rounded_w).to(dtype)
        if bias is not None and ctx.needs_input_grad[1]:
            grad_bias = product.grad_bias(dy, bias).to(bias.dtype)
        return grad_x, grad_bias, None, None, None, None, *([None] * len(tensors))


def frozen_product(
    x: Tensor,
    bias: Tensor | None,
    decoded: Tensor,
    operand: FrozenOperand,
    product: Product,
    action: OpRounding | None,
    context: OpContext,
    weight_key: Tensor | None,
) -> Tensor:
    """y = x w with a stored weight; `decoded` are its values, which eager code has at hand."""
    applied = applied_slots(action, context)
    if not torch.compiler.is_compiling():
        slots = Slots({slot: (op, context) for slot, op in applied.items()}, weight_key)
        y: Tensor = transformable(FrozenProduct).apply(
            x, bias, decoded.detach(), product, slots, operand.text, *operand.tensors
        )
        return y
    refs = tuple(op_ref(applied.get(slot), context) for slot in SLOTS)
    return _frozen_product_in_graph(
        x,
        bias,
        product.op,
        product.settings,
        refs,
        call_constants(context),
        call_buffers(context),
        weight_key,
        operand.text,
        *operand.tensors,
    )


def applied_slots(action: OpRounding | None, context: OpContext) -> dict[str, RoundingOp]:
    """Slot -> what rounds it now."""
    applied: dict[str, RoundingOp] = {}
    if action is None:
        return applied
    for slot in SLOTS:
        place = action.shared.get(OPERAND_OF_SLOT[slot].tensor, slot)
        if action.applies(place, context.training):
            op = action.places[place].after_promotion(context)
            if op is not None:
                applied[slot] = op
    return applied


@opaque_in_graph
def _frozen_product_in_graph(
    x: Tensor,
    bias: Tensor | None,
    op: str,
    settings: tuple[Any, ...],
    refs: tuple[OpRef, ...],
    call: CallConstants,
    buffers: Buffers,
    weight_key: Tensor | None,
    text: str,
    *tensors: Tensor,
) -> Tensor:
    slots = Slots(chosen_ops(refs, call, buffers), weight_key)
    y: Tensor = transformable(FrozenProduct).apply(x, bias, None, Product(op, settings), slots, text, *tensors)
    return y
