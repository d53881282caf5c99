"""Attention in native execution: which calls run in FP8, and how a plan's operands become the kernel's.

The kernel and its backward pass are in :mod:`bitplan.executions.native.attention`. Queries, keys and values are saved
for the backward pass as codes, one byte per element, and multiplied with their scales there. The format of the
probabilities must be E4M3; their scale is the kernel's own.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitplan.compiler.tracing import is_traced, opaque_in_graph, transformable
from bitplan.errors import PlanError
from bitplan.executions.native.attention import PEAK
from bitplan.executions.native.fallbacks import why_operands_not_native
from bitplan.executions.native.paths import NativeTerms, why_attention_not_native
from bitplan.executions.native.product import applied_ops
from bitplan.numerics.scaling import step_scale
from bitplan.plans import SLOTS, Decision
from bitplan.runtime.autograd import Buffers, CallConstants, OpRef, call_buffers, call_constants, chosen_ops, op_ref
from bitplan.runtime.execution import AttentionCall, AttentionProducts
from bitplan.runtime.op_context import OpContext
from bitplan.runtime.rounding_op import RoundingOp
from bitplan.runtime.statistics import observe_amax

#: Operand of a product -> what rounds it, and where.
Chosen = dict[str, tuple[RoundingOp, OpContext]]


@dataclass(frozen=True)
class AttentionCandidate:
    """A product of two tensors that may be one of an attention in FP8."""

    #: Whether it may be that of queries and keys, and that of probabilities and values.
    may_be_first: bool
    may_be_second: bool
    is_for_product = False

    def facts(self) -> Hashable:
        return self.may_be_first, self.may_be_second


def prepare_attention(decision: Decision) -> AttentionCandidate | None:
    """What the plan allows; None where it is neither."""
    is_first, is_second = (why_operands_not_native(decision, second) is None for second in (False, True))
    return AttentionCandidate(is_first, is_second) if is_first or is_second else None


def runs_in_float8(call: AttentionCall, products: AttentionProducts, terms: NativeTerms, training: bool) -> bool:
    """Whether the kernel computes this call."""
    first, second = (rounding.prepared for rounding in products)
    if not isinstance(first, AttentionCandidate) or not isinstance(second, AttentionCandidate):
        return False
    if not (first.may_be_first and second.may_be_second) or why_attention_not_native(call, terms) is not None:
        return False
    # Operands that evaluation leaves unrounded are multiplied as they are.
    return all(rounding.applies(slot, training) for rounding in products for slot in ("fprop.x", "fprop.w"))


def native_attention(call: AttentionCall, products: AttentionProducts, contexts: tuple[OpContext, OpContext]) -> Tensor:
    """The result of a call that runs in FP8."""
    query, key, value = call[:3]
    softmax_scale = 1.0 / math.sqrt(query.shape[3]) if call.scale is None else call.scale
    settings = softmax_scale, call.is_causal
    pairs = [(applied_ops(rounding, context), context) for rounding, context in zip(products, contexts, strict=True)]
    if not torch.compiler.is_compiling():
        chosen = [{slot: (op, context) for slot, op in ops.items()} for ops, context in pairs]
        return _attend(query, key, value, *settings, chosen[0], chosen[1])
    refs = [tuple(op_ref(ops.get(slot), context) for slot in SLOTS) for ops, context in pairs]
    return _attend_in_graph(
        *(query, key, value, *settings, refs[0], refs[1]),
        *(call_constants(contexts[0]), call_constants(contexts[1]), call_buffers(contexts[0])),
    )


@opaque_in_graph
def _attend_in_graph(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    softmax_scale: float,
    is_causal: bool,
    first_refs: tuple[OpRef, ...],
    second_refs: tuple[OpRef, ...],
    first_call: CallConstants,
    second_call: CallConstants,
    buffers: Buffers,
) -> Tensor:
    first, second = chosen_ops(first_refs, first_call, buffers), chosen_ops(second_refs, second_call, buffers)
    return _attend(query, key, value, softmax_scale, is_causal, first, second)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, softmax_scale: float, is_causal: bool, first: Chosen, second: Chosen
) -> Tensor:
    out: Tensor = transformable(NativeAttention).apply(query, key, value, softmax_scale, is_causal, first, second)
    return out


class NativeAttention(torch.autograd.Function):
    """Attention with both products in FP8; its backward pass on dequantised operands."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        softmax_scale: float,
        is_causal: bool,
        first: Chosen,
        second: Chosen,
    ) -> Tensor:
        q, q_scale = _codes_by_head(query, *first["fprop.x"])
        k, k_scale = _codes_by_head(key, *first["fprop.w"])
        v, v_scale = _codes_by_head(value, *second["fprop.w"], transposed=True)
        operands = (q, k, v, q_scale, k_scale, v_scale)
        out, logsumexp = torch.ops.bitplan.attention_forward(*operands, softmax_scale, is_causal)
        ctx.settings = softmax_scale, is_causal
        ctx.save_for_backward(*operands, out, logsumexp)
        return out.transpose(1, 2)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not is_traced():
            raise PlanError(
                "native execution has no second derivative: attach with execution='emulate' for create_graph=True."
            )
        q, k, v, q_scale, k_scale, v_scale, out, logsumexp = ctx.saved_tensors
        codes = (q, q_scale, q.shape[1], False), (k, k_scale, k.shape[1], False), (v, v_scale, k.shape[1], True)
        full = (torch.ops.bitplan.attention_restore(*operand) for operand in codes)
        operand_grads = torch.ops.bitplan.attention_backward(
            grads[0].transpose(1, 2), *full, out, logsumexp, *ctx.settings
        )
        return *(grad.transpose(1, 2) for grad in operand_grads), None, None, None, None


def _codes_by_head(x: Tensor, op: RoundingOp, context: OpContext, transposed: bool = False) -> tuple[Tensor, Tensor]:
    """Codes of `x`, (batch, heads, tokens, features), in the kernel's layout, and a scale for each head."""
    spec = op.spec
    if spec.scale is None:
        scale = torch.ones(x.shape[1], device=x.device)
    else:
        amax = torch.ops.bitplan.attention_amax(x.detach())
        if spec.scale == "tensor":
            amax = amax.amax().expand(x.shape[1])
        record, history_amax = op.remembered(context) if op.is_delayed else (None, None)
        if record is not None and context.observing:
            observe_amax(record, amax.amax())
        if history_amax is not None:
            amax = torch.where(history_amax > 0, history_amax, amax)
        scale = step_scale(amax, PEAK, spec.power_of_two).contiguous()
    return torch.ops.bitplan.attention_cast(x, scale, transposed), scale
