"""Applying actions: what autograd does with a rounded tensor, eager and in a compiled graph."""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from bitplan.compiler.tracing import constant_when_traced, is_traced, opaque_in_graph, transformable
from bitplan.gemm.products import Product, slot_product
from bitplan.numerics.wire_format import OPERAND_OF_SLOT
from bitplan.plans import OPERANDS, SLOTS
from bitplan.runtime.op_context import OpContext
from bitplan.runtime.rounded_mark import copy_mark, mark_rounded
from bitplan.runtime.rounding_op import OpRounding, RoundingOp, op_of_key, packs_eagerly

# --- The six slots of a product: what each operand is rounded to in each of its two passes, or cast to


class Slots:
    """The rounding of the six slots of one product, as :class:`SlotProduct` asks for it."""

    def __init__(self, chosen: dict[str, tuple[RoundingOp, OpContext]], weight_key: Tensor | None) -> None:
        self.chosen = chosen
        self.weight_key = weight_key
        #: Whether x is kept as the weight's gradient wants it, rounded and packed, rather than as it came.
        self.keeps_rounded_x = "wgrad.x" in chosen and packs_eagerly(chosen["wgrad.x"][0])

    def shares(self, operand: str) -> bool:
        """Whether an operand is rounded once for both of its GEMMs."""
        ops = [self.chosen[slot][0] for slot in OPERANDS[operand] if slot in self.chosen]
        return len(ops) == 2 and ops[0] is ops[1]

    def round(self, slot: str, tensor: Tensor) -> Tensor:
        if slot not in self.chosen:
            return tensor
        action, context = self.chosen[slot]
        if packs_eagerly(action) and action.changes_nothing_in(tensor):
            return tensor  # not rounded again, so that the one packed copy serves this product, too
        # Gradients are on here in a backward pass with create_graph=True only, whose gradient goes straight through.
        operand = tensor if torch.is_grad_enabled() else tensor.detach()
        return action.round(operand, context, self.weight_key if OPERAND_OF_SLOT[slot].tensor == "w" else None)


class RoundedGradient(torch.autograd.Function):
    """The tensor itself forward; backward its gradient, rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, action: RoundingOp, context: OpContext) -> Tensor:
        ctx.action, ctx.context = action, context
        # Eager, the same memory. Not a view as autograd has them: the caller may go on to change it in place, and then
        # `x` is changed as well, as it would be without a plan. A graph's copy costs nothing.
        return x.clone() if is_traced() else x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.action.round(grads[0], ctx.context), None, None


class RoundedBothWays(torch.autograd.Function):
    """The rounded tensor forward, its rounded gradient backward: one copy less than one after the other."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        forward: RoundingOp,
        backward: RoundingOp,
        context: OpContext,
        back: OpContext,
        weight_key: Tensor | None,
    ) -> Tensor:
        ctx.action, ctx.context = backward, back
        return forward.round(x if is_traced() else x.detach(), context, weight_key)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.action.round(grads[0], ctx.context), None, None, None, None, None


class GridRelu(torch.autograd.Function):
    """ReLU of a tensor that lies on the grid, as its result does; the gradient is rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backward: RoundingOp, context: OpContext) -> Tensor:
        ctx.backward_op, ctx.context = backward, context
        y = torch.relu(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rounded = ctx.backward_op.round(grads[0], ctx.context)
        (y,) = ctx.saved_tensors  # read once: checkpointing recomputes them for the first reader
        grad: Tensor = torch.ops.aten.threshold_backward(rounded, y, 0)
        return mark_rounded(grad, ctx.backward_op.grid), None, None


class LogSoftmaxOfResult(torch.autograd.Function):
    """A log-softmax whose result is known forward; backward the gradient as computed from that result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, dim: int) -> Tensor:
        ctx.dim, ctx.dtype = dim, x.dtype
        ctx.save_for_backward(y)
        return y.clone() if is_traced() else y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        return (grads[0] - y.exp() * grads[0].sum(ctx.dim, keepdim=True)).to(ctx.dtype), None, None


# --- compiled -----------------------------------------------------------------------------------------------
#
# torch.compile would follow every Python step of rounding, for every tensor of a model: minutes for a ResNet-50. So it
# is given single functions of tensors and plain constants, which run as they are when the graph below is made.

#: What stands for a rounding in a graph: its key, and the row of its record (-1 where there is none).
OpRef = tuple[str, int]

_NO_OP: OpRef = ("", -1)


def op_ref(op: RoundingOp | None, context: OpContext) -> OpRef:
    if op is None:
        return _NO_OP
    row = context.record_row(op)
    return op.key, -1 if row is None else row


def _op(ref: OpRef) -> RoundingOp | None:
    return op_of_key(ref[0]) if ref[0] else None


#: Buffers beside a module's weights, as a graph is given them: table, record and amax_history_max.
Buffers = tuple[Tensor | None, Tensor | None, Tensor | None]

#: Of a context: site, salt, training and observing.
CallConstants = tuple[str, str, bool, bool]


def call_buffers(context: OpContext) -> Buffers:
    return context.table, context.record, context.amax_history_max


def call_constants(context: OpContext) -> CallConstants:
    return context.site, context.salt, context.training, context.observing


@constant_when_traced
def call_text(forward: OpRef, backward: OpRef, call: CallConstants) -> str:
    """The constants of a rounding as one text: an argument of a graph's node that Dynamo handles quickly."""
    return repr((forward, backward, call))


@lru_cache(maxsize=4096)
def _constants_of(text: str) -> tuple[OpRef, OpRef, CallConstants]:
    constants: tuple[OpRef, OpRef, CallConstants] = ast.literal_eval(text)
    return constants


@opaque_in_graph
def rounded_in_graph(
    x: Tensor,
    text: str,
    table: Tensor | None,
    record: Tensor | None,
    amax_history_max: Tensor | None,
    weight_key: Tensor | None,
) -> Tensor:
    """:func:`rounded_both_ways` for a graph."""
    forward, backward, call = _constants_of(text)
    buffers = table, record, amax_history_max
    context, back = (OpContext.in_graph(call, ref[1], buffers) for ref in (forward, backward))
    return _both_ways(x, _op(forward), _op(backward), context, back, weight_key)


@opaque_in_graph
def relu_in_graph(
    x: Tensor, text: str, table: Tensor | None, record: Tensor | None, amax_history_max: Tensor | None
) -> Tensor:
    """:func:`rounded_relu` for a graph."""
    forward, backward, call = _constants_of(text)
    buffers = table, record, amax_history_max
    context, back = (OpContext.in_graph(call, ref[1], buffers) for ref in (forward, backward))
    return _relu(x, _op(forward), _op(backward), context, back)


@opaque_in_graph
def log_softmax_in_graph(x: Tensor, y: Tensor, dim: int) -> Tensor:
    """:func:`log_softmax_of_result` for a graph."""
    result: Tensor = LogSoftmaxOfResult.apply(x, y, dim)  # type: ignore[no-untyped-call]
    return result


def chosen_ops(
    refs: tuple[OpRef, ...], call: CallConstants, buffers: Buffers
) -> dict[str, tuple[RoundingOp, OpContext]]:
    """Slot -> what rounds it and where, for the slots that are rounded."""
    ops = {slot: (_op(ref), ref) for slot, ref in zip(SLOTS, refs, strict=True)}
    return {slot: (op, OpContext.in_graph(call, ref[1], buffers)) for slot, (op, ref) in ops.items() if op is not None}


@opaque_in_graph
def _slot_product_in_graph(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    op: str,
    settings: tuple[Any, ...],
    refs: tuple[OpRef, ...],
    call: CallConstants,
    buffers: Buffers,
    weight_key: Tensor | None,
    offsets: Tensor | None,
) -> Tensor:
    chosen = chosen_ops(refs, call, buffers)
    return slot_product(x, w, bias, Product(op, settings, offsets), Slots(chosen, weight_key))


# --- what the rounder asks for --------------------------------------------------------------------------------


def rounded(x: Tensor, action: RoundingOp, context: OpContext, weight_key: Tensor | None = None) -> Tensor:
    """`x` rounded; the gradient passes straight through."""
    return rounded_both_ways(x, action, None, context, weight_key)


def rounded_gradient(x: Tensor, action: RoundingOp, context: OpContext) -> Tensor:
    """`x`, whose gradient is rounded on its way back."""
    return rounded_both_ways(x, None, action, context)


def rounded_both_ways(
    x: Tensor,
    forward: RoundingOp | None,
    backward: RoundingOp | None,
    context: OpContext,
    weight_key: Tensor | None = None,
) -> Tensor:
    """`x` rounded, its gradient rounded, or both."""
    forward, backward = _after_promotion(forward, context), _after_promotion(backward, context)
    if forward is None and backward is None:
        return x
    if not torch.compiler.is_compiling():
        return _both_ways(x, forward, backward, context, context, weight_key)
    text = call_text(op_ref(forward, context), op_ref(backward, context), call_constants(context))
    return rounded_in_graph(x, text, context.table, context.record, context.amax_history_max, weight_key)


def rounded_relu(x: Tensor, forward: RoundingOp | None, backward: RoundingOp | None, context: OpContext) -> Tensor:
    """The positive part of `x`, rounded both ways; nothing is rounded that lies on the grid already."""
    forward, backward = _after_promotion(forward, context), _after_promotion(backward, context)
    if not torch.compiler.is_compiling():
        return _relu(x, forward, backward, context, context)
    text = call_text(op_ref(forward, context), op_ref(backward, context), call_constants(context))
    return relu_in_graph(x, text, context.table, context.record, context.amax_history_max)


def log_softmax_of_result(x: Tensor, y: Tensor, dim: int) -> Tensor:
    """`y`, the rounded log-softmax of `x`, with the gradient that follows from `y` instead of the unrounded result."""
    if torch.compiler.is_compiling():
        return log_softmax_in_graph(x, y, dim)
    result: Tensor = transformable(LogSoftmaxOfResult).apply(x, y, dim)
    copy_mark(result, y)
    return result


def rounded_product(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    product: Product,
    action: OpRounding,
    context: OpContext,
    weight_key: Tensor | None,
) -> Tensor:
    """y = x w with the six slots rounded as the action says."""
    applied: dict[str, RoundingOp] = {}
    for slot in SLOTS:
        place = action.shared.get(OPERAND_OF_SLOT[slot].tensor, slot)
        if action.applies(place, context.training):
            op = _after_promotion(action.places[place], context)
            if op is not None:
                applied[slot] = op
    if not torch.compiler.is_compiling():
        slots = Slots({slot: (place, context) for slot, place in applied.items()}, weight_key)
        return slot_product(x, w, bias, product, slots)
    refs = tuple(op_ref(applied.get(slot), context) for slot in SLOTS)
    return _slot_product_in_graph(
        *(x, w, bias, product.op, product.settings, refs, call_constants(context)),
        *(call_buffers(context), weight_key, product.offsets),
    )


def _after_promotion(action: RoundingOp | None, context: OpContext) -> RoundingOp | None:
    return None if action is None else action.after_promotion(context)


def _both_ways(
    x: Tensor,
    forward: RoundingOp | None,
    backward: RoundingOp | None,
    context: OpContext,
    back: OpContext,
    weight_key: Tensor | None,
) -> Tensor:
    if backward is None:
        return x if forward is None else forward.round(x, context, weight_key)
    if forward is None or forward.changes_nothing_in(x):
        passed: Tensor = transformable(RoundedGradient).apply(x, backward, back)
    elif forward.function is not None:  # autograd follows it
        passed = transformable(RoundedGradient).apply(forward.round(x, context, weight_key), backward, back)
    else:
        passed = transformable(RoundedBothWays).apply(x, forward, backward, context, back, weight_key)
    return passed if forward is None else mark_rounded(passed, forward.grid)


def _relu(
    x: Tensor, forward: RoundingOp | None, backward: RoundingOp | None, context: OpContext, back: OpContext
) -> Tensor:
    if forward is None or not forward.changes_nothing_in(x):
        return _both_ways(torch.relu(x), forward, backward, context, back, None)
    if backward is None:
        return mark_rounded(torch.relu(x), forward.grid)
    y: Tensor = transformable(GridRelu).apply(x, backward, back)
    return mark_rounded(y, forward.grid)
