"""Grouped products of expert layers in native execution: forward and input gradient in FP8, one scale per row.

Rows of a matrix are sorted by expert, and each group is multiplied with its expert's matrix. Hopper multiplies E4M3 by
E4M3 so, with a scale for each row of the left operand and for each column of each expert's matrix; scales per tensor or
per expert are repeated. The gradient of the weights sums over the rows of a group. The kernel wants groups whose sizes
are multiples of 16 there, which routers do not make, so that pass is computed on rounded values in the model's dtype;
its input is saved as codes.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitplan.compiler.tracing import is_traced, opaque_in_graph, transformable
from bitplan.errors import PlanError
from bitplan.executions.native.backends import multiplies_groups, multiply_groups
from bitplan.executions.native.fallbacks import reasons_of_groups
from bitplan.executions.native.paths import NativeTerms, why_groups_not_native
from bitplan.executions.native.product import NativeSlots, applied_ops
from bitplan.gemm.products import Product
from bitplan.numerics.quantizer import Encoded
from bitplan.numerics.wire_format import OPERAND_OF_SLOT
from bitplan.plans import SLOTS, Decision
from bitplan.plans.match import PASSES
from bitplan.runtime.autograd import Buffers, CallConstants, OpRef, call_buffers, call_constants, chosen_ops, op_ref
from bitplan.runtime.op_context import OpContext
from bitplan.runtime.rounding_op import OpRounding


@dataclass(frozen=True)
class GroupedCandidate:
    """A grouped product with passes that may run natively."""

    passes: tuple[str, ...]
    is_for_product = True

    def facts(self) -> Hashable:
        return self.passes


def prepare_grouped(decision: Decision) -> GroupedCandidate | None:
    """The passes that the plan allows; None where there are none."""
    passes = tuple(gemm_pass for gemm_pass, reason in reasons_of_groups(decision).items() if reason is None)
    return GroupedCandidate(passes) if passes else None


def native_grouped_product(
    x: Tensor,
    w: Tensor,
    product: Product,
    candidate: GroupedCandidate,
    terms: NativeTerms,
    rounding: OpRounding,
    context: OpContext,
    weight_key: Tensor | None,
) -> Tensor | None:
    """The product with the candidate's passes in FP8; None: it is emulated."""
    if not multiplies_groups(x.device) or why_groups_not_native(x, w, terms) is not None:
        return None
    applied = applied_ops(rounding, context)
    # Operands that evaluation leaves unrounded are multiplied as they are.
    passes = tuple(name for name in candidate.passes if all(slot in applied for slot in PASSES[name]))
    assert product.offsets is not None
    if not torch.compiler.is_compiling():
        slots = NativeSlots({slot: (op, context) for slot, op in applied.items()}, weight_key, {})
        return _multiply(x, w, product.offsets, passes, terms.fast_accumulation, slots)
    refs = tuple(op_ref(applied.get(slot), context) for slot in SLOTS)
    return _native_grouped_product_in_graph(
        *(x, w, product.offsets, passes, terms.fast_accumulation, refs),
        *(call_constants(context), call_buffers(context), weight_key),
    )


@opaque_in_graph
def _native_grouped_product_in_graph(
    x: Tensor,
    w: Tensor,
    offsets: Tensor,
    passes: tuple[str, ...],
    fast: tuple[str, ...],
    refs: tuple[OpRef, ...],
    call: CallConstants,
    buffers: Buffers,
    weight_key: Tensor | None,
) -> Tensor:
    return _multiply(x, w, offsets, passes, fast, NativeSlots(chosen_ops(refs, call, buffers), weight_key, {}))


def _multiply(
    x: Tensor, w: Tensor, offsets: Tensor, passes: tuple[str, ...], fast: tuple[str, ...], slots: NativeSlots
) -> Tensor:
    y: Tensor = transformable(NativeGroupedProduct).apply(x, w, offsets, passes, fast, slots)
    return y


class NativeGroupedProduct(torch.autograd.Function):
    """Rows of x times the matrices of their groups."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, offsets: Tensor, passes: tuple[str, ...], fast: tuple[str, ...], slots: Any
    ) -> Tensor:
        ctx.passes, ctx.fast, ctx.slots, ctx.dtypes = passes, fast, slots, (x.dtype, w.dtype)
        if "fprop" in passes:
            left = _codes("fprop.x", x, slots)
            y = multiply_groups(left, _codes("fprop.w", w, slots), offsets, "fprop" in fast)
        else:
            rounded_w = slots.round("fprop.w", w)
            y = Product("grouped_mm", offsets=offsets).forward(slots.round("fprop.x", x), rounded_w, None)
        operand = slots.saved_operand(x) if ctx.needs_input_grad[1] else None
        ctx.saved_operand = operand
        saved_x = (x, None) if operand is None else operand.release()
        ctx.save_for_backward(*saved_x, w, offsets)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not is_traced():
            raise PlanError(
                "native execution has no second derivative: attach with execution='emulate' for create_graph=True."
            )
        x, x_scale, w, offsets = ctx.saved_tensors
        slots, dy, (x_dtype, w_dtype) = ctx.slots, grads[0], ctx.dtypes
        product = Product("grouped_mm", offsets=offsets)
        grad_x = grad_w = None
        if ctx.needs_input_grad[0] and "dgrad" in ctx.passes:
            right = _codes("dgrad.w", w, slots)
            transposed = right[0].transpose(1, 2), right[1].transpose(1, 2)
            grad_x = multiply_groups(_codes("dgrad.dy", dy, slots), transposed, offsets, "dgrad" in ctx.fast)
        elif ctx.needs_input_grad[0]:
            rounded_w = slots.round("dgrad.w", w).to(dy.dtype)
            grad_x = product.grad_x(slots.round("dgrad.dy", dy), dy, rounded_w).to(x_dtype)
        if ctx.needs_input_grad[1]:
            operand = ctx.saved_operand
            rounded_x = slots.round("wgrad.x", x) if operand is None else operand.rounded(x, x_scale)
            grad_w = product.grad_w(slots.round("wgrad.dy", dy), rounded_x.to(dy.dtype), w).to(w_dtype)
        return grad_x, grad_w, None, None, None, None


def _codes(slot: str, tensor: Tensor, slots: NativeSlots) -> tuple[Tensor, Tensor]:
    """Codes of an operand and their scale, which can be expanded to the operand's shape."""
    op, context = slots.chosen[slot]
    key = slots.weight_key if OPERAND_OF_SLOT[slot].tensor == "w" else None
    encoded: Encoded = op.encode(tensor, context, key)[0]
    codes = encoded.elements.to(torch.float8_e4m3fn)
    scale = encoded.scales[0] if encoded.scales else torch.ones((1,) * tensor.dim(), device=tensor.device)
    return codes, scale.float()
