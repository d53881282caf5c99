"""Which passes of a plan's GEMMs are emulated in native execution, and why: the list of fallbacks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from bitplan.capture.decompositions import ATTENTION, decision_for, has_slots
from bitplan.capture.ops import PRODUCTS
from bitplan.capture.recording import FusedCall, Operation
from bitplan.compiler.torch_private import tree_leaves
from bitplan.executions.native.backends import GemmBackend, supports_shape
from bitplan.executions.native.blocks import block_backend_or_reason, block_of, cuts_blocks
from bitplan.executions.native.convolution import ConvGemmLayout
from bitplan.executions.native.gemm import GemmLayout, byte_of, varying_axes
from bitplan.executions.native.paths import (
    TOO_NARROW,
    TOO_SMALL,
    NativeTerms,
    is_plain_gemm,
    why_attention_not_native,
    why_groups_not_native,
    why_not_native,
    why_pass_not_native,
)
from bitplan.gemm.axes import resolve, summed_axes
from bitplan.gemm.macs import Multiplication
from bitplan.gemm.operand_quantizers import Decide, OperandQuantizers, decisions_for, operand_quantizers
from bitplan.gemm.products import has_settings, product_of
from bitplan.numerics.formats import FloatFormat, IntFormat
from bitplan.numerics.mutable_format import MutableFormat
from bitplan.numerics.quantizer import Quantizer
from bitplan.numerics.wire_format import OPERAND_OF_SLOT, op_site
from bitplan.plans import Decision
from bitplan.plans.match import PASSES
from bitplan.plans.spec import QuantizerSpec
from bitplan.runtime.coverage import counted_products, rounded_slots
from bitplan.runtime.execution import AttentionCall

_IS_SPLIT = "tensor parallelism splits its weight; products of shards are emulated"
_NO_GROUPS = "this device has no grouped product in FP8, which Hopper has"
_IS_WATCHED = "statistics are gathered, or formats may change, which takes the values of attention one by one"
_E4M3 = FloatFormat(4, 3, specials="fn")
_NO_ATTENTION = "this device has no attention in FP8, which Hopper has with Triton; this one is emulated"
#: Its tensors are (batch, heads, tokens, features).
_ATTENTION_DIMS, _HEADS_AXIS = 4, 1
_ONLY_LAYERS = "only linear layers, convolutions, grouped products and attention have a native path; this is emulated"


@dataclass(frozen=True)
class Fallback:
    """A pass of a GEMM that is emulated."""

    #: Such as ``fc/linear.0``.
    site: str
    #: fprop, dgrad, wgrad or "all passes".
    gemm_pass: str
    reason: str

    def __str__(self) -> str:
        return f"{self.site}, {self.gemm_pass}: {self.reason}"


#: Columns of a table of fallbacks.
FALLBACK_COLUMNS: dict[str, Callable[[Fallback], Any]] = {
    "gemm": lambda fallback: fallback.site,
    "pass": lambda fallback: fallback.gemm_pass,
    "reason": lambda fallback: fallback.reason,
}


@dataclass(frozen=True)
class PlannedOperand:
    """A plan's decision on one operand of a pass."""

    slot: str
    #: The slot whose quantizer applies: that of the operand's other pass, where both share one rounded tensor.
    place: str
    spec: QuantizerSpec | None
    dims: int
    #: ``linear`` or a convolution.
    op: str
    #: No im2col: a row of the output depends on one row of the input.
    is_plain_gemm: bool

    def quantizer(self) -> Quantizer | None:
        return None if self.spec is None else resolve(self.spec, self.place, self.op, self.dims)

    def summed_axes(self) -> set[int]:
        return set(summed_axes(self.slot, self.op, self.dims, self.is_plain_gemm))


def passes_of(
    decision: Decision, dims: int, backends: Sequence[GemmBackend], op: str = "linear", is_plain_gemm: bool = True
) -> dict[str, GemmBackend | str]:
    """For each pass of a layer whose input has `dims` dimensions: the backend, or why it is emulated."""

    def operand(slot: str) -> PlannedOperand:
        tensor = OPERAND_OF_SLOT[slot].tensor
        place = decision.shared.get(tensor, slot)
        operand_dims = 2 if tensor == "w" and op == "linear" else dims
        return PlannedOperand(slot, place, decision[place].quantizer, operand_dims, op, is_plain_gemm)

    return {
        gemm_pass: backend_or_reason(operand(left), operand(right), backends)
        for gemm_pass, (left, right) in PASSES.items()
    }


def fallbacks_of(
    operations: Sequence[Operation],
    decide: Decide,
    backends: Sequence[GemmBackend],
    terms: NativeTerms,
    device_type: str = "cpu",
    split_modules: Collection[str] = (),
    has_grouped_kernel: bool = False,
    has_attention_kernel: bool = False,
    is_watched: bool = False,
) -> list[Fallback]:
    """Every pass of every product that the plan rounds and that is emulated.

    :param split_modules: paths of modules whose parameters tensor parallelism splits.
    :param has_grouped_kernel: whether the device multiplies groups of FP8 rows.
    :param has_attention_kernel: whether it has attention in FP8.
    :param is_watched: whether statistics are gathered, or formats may change.
    """
    fallbacks = []
    decisions = decisions_for(operations, decide)
    why_no_attention = None if has_attention_kernel else _NO_ATTENTION
    if split_modules:
        why_no_attention = why_no_attention or _IS_SPLIT
    if is_watched:
        why_no_attention = why_no_attention or _IS_WATCHED
    attention_reasons = _reasons_of_attention(operations, decide, terms, why_no_attention)
    for operation, operands in operand_quantizers(operations, decisions):
        if operation.fused_call in attention_reasons and operation.op == "matmul":
            reason = attention_reasons[operation.fused_call]
            if reason is not None and (has_slots(operands.decision) or _is_rounded(operands)):
                fallbacks.append(Fallback(operation.label, "all passes", reason))
        elif operation.module in split_modules and (has_slots(operands.decision) or _is_rounded(operands)):
            fallbacks.append(Fallback(operation.label, "all passes", _IS_SPLIT))
        elif operation.op == "grouped_mm" and operation.operands is not None and has_slots(operands.decision):
            fallbacks += _fallbacks_of_groups(operation, operands.decision, terms, has_grouped_kernel)
        elif operation.op in PRODUCTS and operation.operands is not None and has_slots(operands.decision):
            fallbacks += _fallbacks_of_operation(operation, operands.decision, backends, terms, device_type)
        elif _is_rounded(operands):
            fallbacks.append(Fallback(operation.label, "all passes", _why_no_native_path(operation.op)))
    return fallbacks


def _is_rounded(operands: OperandQuantizers) -> bool:
    """Whether a product of the operation has an operand that the plan rounds."""
    products = counted_products(operands.operation)
    if products is None:  # how it multiplies is unknown: each of its tensors may be an operand
        tensors = [leaf for leaf in tree_leaves(operands.operation.details) if isinstance(leaf, Tensor)]
        products = [Multiplication(0, tensor, tensor) for tensor in tensors if tensor.is_floating_point()]
    return any(rounded_slots(operands, product) for product in products)


def _why_no_native_path(op: str) -> str:
    if op == "linear" or op.startswith("conv"):
        return "rounded as weight, activation or gradient only; a native product needs operands (x, w, dy)"
    return _ONLY_LAYERS


def _fallbacks_of_operation(
    operation: Operation, decision: Decision, backends: Sequence[GemmBackend], terms: NativeTerms, device_type: str
) -> list[Fallback]:
    assert operation.operands is not None
    op, (x, w) = operation.op, operation.operands
    if op != "linear" and not op.startswith("conv"):
        return [Fallback(operation.label, "all passes", _ONLY_LAYERS)]
    note = ""
    if op != "linear" and backends and keeps_codes(decision) and x.dim() == w.dim():
        note = "; emulated, its input is saved as codes"
    args, kwargs = operation.details["args"], operation.details["kwargs"]
    if not has_settings(op, args, kwargs):
        reason = "padding='same' with an even kernel has no native path"
        return [Fallback(operation.label, "all passes", reason)]
    product, _ = product_of(op, args, kwargs)
    layout = GemmLayout() if op == "linear" else ConvGemmLayout(product, w.shape[2:])
    layer_reason = why_not_native(op, product.settings, x, w, terms)
    if layer_reason is not None:
        if layer_reason == TOO_SMALL:
            layer_reason = f"{_shape_text(layout.gemm_shape('fprop', x.shape, w.shape))} {layer_reason}"
        return [Fallback(operation.label, "all passes", f"{layer_reason}{note}")]
    fallbacks = []
    is_plain = is_plain_gemm(op, product.settings, w)
    for gemm_pass, backend in passes_of(decision, x.dim(), backends, op, is_plain).items():
        shape = layout.gemm_shape(gemm_pass, x.shape, w.shape)
        if isinstance(backend, str):
            pass_reason: str | None = backend
        else:
            pass_reason = why_pass_not_native(gemm_pass, backend.name, op, product.settings, x, w, terms)
            if pass_reason == TOO_NARROW:
                pass_reason = f"a convolution from {w.shape[1]} to {w.shape[0]} channels {pass_reason}"
            elif pass_reason == TOO_SMALL:
                pass_reason = f"{_shape_text(layout.gemm_shape('fprop', x.shape, w.shape))} {pass_reason}"
            elif pass_reason is None and not supports_shape(backend.name, device_type, shape):
                pass_reason = f"the {backend.name} backend does not support the shape {_shape_text(shape)}"
            elif pass_reason is None and cuts_blocks(backend.name, gemm_pass, x.shape):
                pass_reason = f"sequences of {x.shape[-2]} tokens cut blocks of 128"
        if pass_reason is not None:
            fallbacks.append(Fallback(operation.label, gemm_pass, pass_reason))
    if len(fallbacks) == len(PASSES) and len({fallback.reason for fallback in fallbacks}) == 1:
        return [Fallback(operation.label, "all passes", fallbacks[0].reason + note)]
    return [
        replace(fallback, reason=fallback.reason + note) if fallback.gemm_pass == "wgrad" else fallback
        for fallback in fallbacks
    ]


def reasons_of_groups(decision: Decision) -> dict[str, str | None]:
    """For each pass of a grouped product: why it is emulated whatever its shape; None: it may run natively."""
    reasons: dict[str, str | None] = dict.fromkeys(PASSES)
    for gemm_pass, slots in PASSES.items():
        for slot in slots:
            tensor = OPERAND_OF_SLOT[slot].tensor
            place = decision.shared.get(tensor, slot)
            dims = 3 if tensor == "w" else 2
            operand = PlannedOperand(slot, place, decision[place].quantizer, dims, "grouped_mm", is_plain_gemm=True)
            reason = _why_no_codes(operand) or _why_scale_varies(operand)
            if reason is None and operand.spec is not None and operand.spec.target != _E4M3:
                reason = f"grouped products in FP8 are e4m3 by e4m3, and {slot} is {operand.spec.target.name}"
            reasons[gemm_pass] = reasons[gemm_pass] or reason
    return reasons


def _fallbacks_of_groups(
    operation: Operation, decision: Decision, terms: NativeTerms, has_kernel: bool
) -> list[Fallback]:
    assert operation.operands is not None
    reason = why_groups_not_native(*operation.operands, terms) if has_kernel else _NO_GROUPS
    if reason is None and not has_settings(operation.op, operation.details["args"], operation.details["kwargs"]):
        reason = "a grouped product with a bias or another dtype has no native path"
    reasons = reasons_of_groups(decision) if reason is None else {"all passes": reason}
    return [Fallback(operation.label, name, reason) for name, reason in reasons.items() if reason is not None]


def why_operands_not_native(decision: Decision, is_second: bool) -> str | None:
    """Why a product of attention does not run in FP8 under a plan's decision on its operands, whatever their shapes.

    :param is_second: whether it is the product of probabilities and values.
    """
    operands = ("fprop.x", "fprop.w")
    for slot in operands:
        if decision[slot].quantizer is None:
            return f"{slot} has no format"
    if not {"x", "w"} <= decision.shared.keys():
        return "attention in FP8 rounds operands once for all passes"
    others = set(decision.choices) - {*operands, "dgrad.w", "wgrad.x"}
    if any(decision[place].quantizer is not None for place in others):
        return "attention in FP8 rounds x and w of its products, and no gradients or results"
    for slot in operands:
        operand = PlannedOperand(slot, slot, decision[slot].quantizer, _ATTENTION_DIMS, "matmul", is_plain_gemm=True)
        spec, quantizer = operand.spec, operand.quantizer()
        reason = _why_no_codes(operand)
        if reason is not None or spec is None or quantizer is None:
            return reason
        if spec.target != _E4M3 or spec.bits is not None:
            return f"attention in FP8 is e4m3 by e4m3, and {slot} is {spec.target.name}"
        if spec.rounding != "nearest" or spec.overflow not in (None, "saturate"):
            return f"attention in FP8 rounds to the nearest value and saturates, and {slot} does not"
        if spec.eval not in ("same", "off"):
            return f"{slot} is rounded otherwise in evaluation (eval: {spec.eval})"
        varying = varying_axes(quantizer, _ATTENTION_DIMS)
        if varying is None or not varying <= {_HEADS_AXIS}:
            return f"the scale of {slot} changes within a head"
        if is_second and slot == "fprop.x" and spec.scale is None:
            return "probabilities have no scale, and attention in FP8 has one for them"
    return None


def _reasons_of_attention(
    operations: Sequence[Operation], decide: Decide, terms: NativeTerms, why_none: str | None
) -> dict[FusedCall | None, str | None]:
    """For each attention that the plan writes out: why it is emulated; None: it runs in FP8.

    :param why_none: why no attention runs in FP8; None where some may.
    """
    inside: dict[FusedCall, list[Operation]] = {}
    for operation in operations:
        if operation.inside == ATTENTION and operation.fused_call is not None:
            inside.setdefault(operation.fused_call, []).append(operation)
    reasons: dict[FusedCall | None, str | None] = {}
    for fused_call, parts in inside.items():
        reason = why_none or why_attention_not_native(AttentionCall(*fused_call.args, **fused_call.kwargs), terms)
        is_second = False
        for part in parts:
            site = op_site(part.op, part.index)
            if part.op == "matmul":
                decision = decision_for(decide, part.module, site, part.inside)
                reason = reason or why_operands_not_native(decision, is_second)
                is_second = True
            elif not decide(part.module, site).changes_nothing:
                reason = reason or f"the plan rounds its {part.op}, too, which attention in FP8 does not"
        reasons[fused_call] = reason
    return reasons


def _shape_text(shape: tuple[int, int, int]) -> str:
    return " x ".join(map(str, shape))


def keeps_codes(decision: Decision) -> bool:
    """Whether an emulated layer saves its input as codes, a byte per element, for the weight's gradient."""
    spec = decision[decision.shared.get("x", "wgrad.x")].quantizer
    return spec is not None and byte_of(spec) is not None


def backend_or_reason(
    left: PlannedOperand, right: PlannedOperand, backends: Sequence[GemmBackend]
) -> GemmBackend | str:
    """The backend that multiplies the two operands, or why none does."""
    quantizers: list[Quantizer] = []
    blocks = []
    for operand in (left, right):
        quantizer, reason = operand.quantizer(), _why_no_codes(operand)
        if quantizer is None or reason is not None:
            return reason or f"{operand.slot} has no format"
        quantizers.append(quantizer)
        if quantizer.scaling is not None and quantizer.scaling.granularity == "block":
            blocks.append(block_of(operand.slot, quantizer, operand.dims, operand.summed_axes()))
        elif (reason := _why_scale_varies(operand)) is not None:
            return reason
    if blocks:
        return block_backend_or_reason(left.slot, right.slot, left.op, blocks, quantizers, backends)
    targets = [quantizer.format for quantizer in quantizers if not isinstance(quantizer.format, MutableFormat)]
    plain = [backend for backend in backends if not backend.takes_blocks]
    for backend in plain:
        if backend.supports_formats(targets[0], targets[1]):
            return backend
    formats = " by ".join(target.name for target in targets)
    available = ", ".join(backend.name for backend in plain)
    return f"no backend here multiplies {formats}" + (f" (available: {available})" if available else "")


def _why_no_codes(operand: PlannedOperand) -> str | None:
    """Why an operand cannot be multiplied as codes, whatever its scales."""
    quantizer = operand.quantizer()
    if quantizer is None or operand.spec is None:
        return f"{operand.slot} has no format"
    if operand.spec.function is not None:
        return f"{operand.slot} is rounded by {operand.spec.function}"
    if operand.spec.rotate is not None:
        return f"{operand.slot} is rotated ({operand.spec.rotate}), which is emulated"
    if operand.spec.promote is not None:
        return f"{operand.slot} may be promoted"
    if quantizer.scaling is not None and quantizer.scaling.range == "minmax":
        return f"{operand.slot} has a zero point (range: minmax), which no backend supports"
    if quantizer.scaling is None and isinstance(quantizer.format, IntFormat):
        return f"{operand.slot} has no scale, and a NaN in it would become a number"
    return None


def _why_scale_varies(operand: PlannedOperand) -> str | None:
    """Whether the scale of an operand varies along the sum, as a reason."""
    quantizer = operand.quantizer()
    varying = None if quantizer is None else varying_axes(quantizer, operand.dims)
    if varying is None or varying & operand.summed_axes():
        return f"the scale of {operand.slot} changes along the sum"
    return None
