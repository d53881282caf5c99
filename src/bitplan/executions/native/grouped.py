"""Grouped products of expert layers in native execution: FP8, with scales that are constant along the sum.

Rows of a matrix are sorted by expert, and each group is multiplied with its expert's matrix. Hopper multiplies E4M3 by
E4M3 so, with a scale for each row of the left operand and for each column of each expert's matrix; scales per tensor or
per expert are repeated. The gradient of the weights sums over the rows of a group, and its operands are padded
(:mod:`bitplan.executions.native.group_padding`).

Where a tensor has one scale, one kernel writes its codes for both of its passes; other codes are made by torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitplan.compiler.tracing import is_traced, opaque_in_graph, transformable
from bitplan.errors import PlanError
from bitplan.executions.native.backends import multiplies_groups, multiply_groups, multiply_over_groups
from bitplan.executions.native.fallbacks import reasons_of_groups
from bitplan.executions.native.float8_cast import pad_rows
from bitplan.executions.native.gemm import Codes, codes_of
from bitplan.executions.native.group_padding import GroupPadding, pad_groups
from bitplan.executions.native.paths import NativeTerms, why_groups_not_native
from bitplan.executions.native.product import NativeSlots, applied_ops, is_plain_cast
from bitplan.gemm.products import Product
from bitplan.numerics.quantizer import Encoded
from bitplan.plans import SLOTS, Decision
from bitplan.plans.match import PASSES
from bitplan.runtime.autograd import Buffers, CallConstants, OpRef, call_buffers, call_constants, chosen_ops, op_ref
from bitplan.runtime.op_context import OpContext
from bitplan.runtime.rounding_op import OpRounding
from bitplan.runtime.sharding import is_freed_after_forward

#: The codes that the kernel multiplies.
E4M3 = torch.float8_e4m3fn


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
    recast_in_backward: tuple[str, ...] = (),
) -> Tensor | None:
    """The product with the candidate's passes in FP8; None: it is emulated.

    :param recast_in_backward: w, where the backward pass of compiled code casts it again. Codes of x are saved.
    """
    if not multiplies_groups(x.device) or why_groups_not_native(x, w, terms) is not None:
        return None
    applied = applied_ops(rounding, context)
    # Operands that evaluation leaves unrounded are multiplied as they are.
    passes = tuple(name for name in candidate.passes if all(slot in applied for slot in PASSES[name]))
    assert product.offsets is not None
    is_freed = is_freed_after_forward(w)
    if not torch.compiler.is_compiling():
        recast: tuple[str, ...] = ("w",) if is_freed else ()
        slots = NativeSlots({slot: (op, context) for slot, op in applied.items()}, weight_key, {}, recast)
        return _multiply(x, w, product.offsets, passes, terms.fast_accumulation, slots)
    recast = ("w",) if is_freed else recast_in_backward
    refs = tuple(op_ref(applied.get(slot), context) for slot in SLOTS)
    return _native_grouped_product_in_graph(
        *(x, w, product.offsets, passes, terms.fast_accumulation, recast, refs),
        *(call_constants(context), call_buffers(context), weight_key),
    )


@opaque_in_graph
def _native_grouped_product_in_graph(
    x: Tensor,
    w: Tensor,
    offsets: Tensor,
    passes: tuple[str, ...],
    fast: tuple[str, ...],
    recast: tuple[str, ...],
    refs: tuple[OpRef, ...],
    call: CallConstants,
    buffers: Buffers,
    weight_key: Tensor | None,
) -> Tensor:
    slots = NativeSlots(chosen_ops(refs, call, buffers), weight_key, {}, recast)
    return _multiply(x, w, offsets, passes, fast, slots)


def _multiply(
    x: Tensor, w: Tensor, offsets: Tensor, passes: tuple[str, ...], fast: tuple[str, ...], slots: NativeSlots
) -> Tensor:
    y: Tensor = transformable(NativeGroupedProduct).apply(x, w, offsets, passes, fast, slots)
    return y


class NativeGroupedProduct(torch.autograd.Function):
    """Rows of x times the matrices of their groups. Saves the codes of x and w that the backward products need."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, offsets: Tensor, passes: tuple[str, ...], fast: tuple[str, ...], slots: Any
    ) -> Tensor:
        ctx.passes, ctx.fast, ctx.slots, ctx.dtypes = passes, fast, slots, (x.dtype, w.dtype)
        needs_x, needs_w = ctx.needs_input_grad[:2]
        padding = pad_groups(offsets, x.shape[0]) if needs_w and "wgrad" in passes else None
        x_slots = _slots_of("x", passes, fprop=True, wgrad=needs_w)
        w_slots = _slots_of("w", passes, fprop=True, dgrad=needs_x and "w" not in slots.recast_in_backward)
        x_codes = dict(zip(x_slots, _codes_of_rows(slots, x_slots, x, padding), strict=True))
        w_codes = dict(zip(w_slots, _codes_of_matrices(slots, w_slots, w), strict=True))
        if "fprop" in passes:
            y = multiply_groups(x_codes["fprop.x"], w_codes["fprop.w"], offsets, "fprop" in fast)
        else:
            rounded_w = slots.round("fprop.w", w)
            y = Product("grouped_mm", offsets=offsets).forward(slots.round("fprop.x", x), rounded_w, None)
        operand = slots.saved_operand(x) if needs_w and padding is None else None
        ctx.saved_operand, ctx.form_of_w = operand, (w.shape, w.stride())
        saved_x = x_codes.get("wgrad.x", (x if needs_w else None, None)) if operand is None else operand.release()
        saved_w = w_codes.get("dgrad.w", (w if needs_x else None, None))
        ctx.save_for_backward(*saved_x, *saved_w, offsets, *(padding or (None, None)))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not is_traced():
            raise PlanError(
                "native execution has no second derivative: attach with execution='emulate' for create_graph=True."
            )
        x, x_scale, w, w_scale, offsets, sources, padded_ends = ctx.saved_tensors
        passes, slots, dy, (x_dtype, w_dtype) = ctx.passes, ctx.slots, grads[0], ctx.dtypes
        needs_x, needs_w = ctx.needs_input_grad[:2]
        padding = None if sources is None else GroupPadding(sources, padded_ends)
        product = Product("grouped_mm", offsets=offsets)
        dy_slots = _slots_of("dy", passes, dgrad=needs_x, wgrad=needs_w)
        dy_codes = dict(zip(dy_slots, _codes_of_rows(slots, dy_slots, dy, padding), strict=True))
        grad_x = grad_w = None
        if "dgrad.dy" in dy_codes:
            (right,) = _codes_of_matrices(slots, ["dgrad.w"], w, dy) if w_scale is None else [Codes(w, w_scale)]
            grad_x = multiply_groups(dy_codes["dgrad.dy"], right, offsets, "dgrad" in ctx.fast)
        elif needs_x:
            rounded_w = slots.round("dgrad.w", w).to(dy.dtype)
            grad_x = product.grad_x(slots.round("dgrad.dy", dy), dy, rounded_w).to(x_dtype)
        if "wgrad.dy" in dy_codes:
            grad_w = _grad_of_matrices(Codes(x, x_scale), dy_codes["wgrad.dy"], padded_ends, ctx).to(w_dtype)
        elif needs_w:
            operand = ctx.saved_operand
            rounded_x = slots.round("wgrad.x", x) if operand is None else operand.rounded(x, x_scale)
            like_w = dy.new_empty(ctx.form_of_w[0])
            grad_w = product.grad_w(slots.round("wgrad.dy", dy), rounded_x.to(dy.dtype), like_w).to(w_dtype)
        return grad_x, grad_w, None, None, None, None


def _slots_of(operand: str, passes: tuple[str, ...], **needed: bool) -> list[str]:
    """The slots of an operand in the native passes that are needed."""
    return [f"{name}.{operand}" for name, is_needed in needed.items() if is_needed and name in passes]


def _codes_of_rows(slots: NativeSlots, names: list[str], tensor: Tensor, padding: GroupPadding | None) -> list[Codes]:
    """The codes of x or dy for each of these slots: (rows, features), for wgrad (features, padded rows)."""
    if len(names) == 2 and not slots.are_alike(*names):
        return [codes for name in names for codes in _codes_of_rows(slots, [name], tensor, padding)]
    if not names:
        return []
    op, context = slots.chosen[names[0]]
    sources = None if padding is None else padding.sources
    sums_rows = [name.startswith("wgrad") for name in names]
    if is_plain_cast(op, tensor, E4M3):
        cast = slots.cast_matrix(names[0], tensor, tensor, E4M3, not all(sums_rows), any(sums_rows), sources=sources)
        return [Codes(cast.columns if is_summed else cast.rows, cast.scale) for is_summed in sums_rows]
    codes = codes_of(op.encode(tensor, context)[0], E4M3)
    return [_padded_transpose(codes, sources) if is_summed else codes for is_summed in sums_rows]


def _padded_transpose(codes: Codes, sources: Tensor | None) -> Codes:
    assert sources is not None
    padded = pad_rows(codes.values.view(torch.uint8), sources).t().contiguous()
    return Codes(padded.view(codes.values.dtype), codes.transposed().scale)


def _codes_of_matrices(slots: NativeSlots, names: list[str], w: Tensor, after: Tensor | None = None) -> list[Codes]:
    """The codes of w for each of these slots, (groups, features, summed features), and their scale.

    :param after: in the backward pass: cast again, but not before this tensor is computed.
    """
    if len(names) == 2 and not slots.are_alike(*names):
        return [codes for name in names for codes in _codes_of_matrices(slots, [name], w, after)]
    if not names:
        return []
    op, context = slots.chosen[names[0]]
    is_transposed = has_transposed_memory(w.shape, w.stride())
    if is_plain_cast(op, w, E4M3):
        # One matrix of all groups. Its transpose has those of the groups side by side, which the kernel accepts.
        stored = w.transpose(1, 2) if is_transposed else w
        groups, rows, columns = stored.shape
        by_row = [(name == "fprop.w") == is_transposed for name in names]
        matrix = stored.reshape(-1, columns)
        cast = slots.cast_matrix(names[0], w, matrix, E4M3, any(by_row), not all(by_row), after)
        return [
            Codes(
                cast.rows.view(groups, rows, columns)
                if is_by_row
                else cast.columns.view(columns, groups, rows).transpose(0, 1),
                cast.scale,
            )
            for is_by_row in by_row
        ]
    encoded: Encoded = op.encode(w, context, slots.weight_key)[0]
    values = encoded.elements.to(E4M3)
    scale = encoded.scales[0].float() if encoded.scales else torch.ones((1, 1, 1), device=w.device)
    scale = scale.reshape((1, 1, 1)) if scale.numel() == 1 else scale
    return [
        Codes(values.transpose(1, 2), scale.transpose(1, 2)) if name == "fprop.w" else Codes(values, scale)
        for name in names
    ]


def _grad_of_matrices(x: Codes, dy: Codes, ends: Tensor, ctx: Any) -> Tensor:
    """The gradient of w, in its memory order."""
    fast = "wgrad" in ctx.fast
    if has_transposed_memory(*ctx.form_of_w):
        return multiply_over_groups(dy, x, ends, fast).transpose(1, 2)
    return multiply_over_groups(x, dy, ends, fast)


def has_transposed_memory(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether matrices are views of transposed ones: models store a row for each output."""
    return stride[1] == 1 and stride[2] == shape[1]
