"""The execution ``native``: GEMMs on the hardware's low-precision units where these have a path, the rest emulated."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.capture.decompositions import has_slots
from bitplan.capture.recording import Operation
from bitplan.errors import BitplanWarning, PlanError
from bitplan.executions.emulate import EmulateExecution
from bitplan.executions.native.attention_path import (
    AttentionCandidate,
    native_attention,
    prepare_attention,
    runs_in_float8,
)
from bitplan.executions.native.backends import (
    GemmBackend,
    backends_with_blocks,
    multiplies_attention,
    multiplies_groups,
)
from bitplan.executions.native.crossover import load_crossover
from bitplan.executions.native.fallbacks import FALLBACK_COLUMNS, Fallback, fallbacks_of, keeps_codes, passes_of
from bitplan.executions.native.frozen import native_frozen_product
from bitplan.executions.native.grouped import GroupedCandidate, native_grouped_product, prepare_grouped
from bitplan.executions.native.head_loss import backends_of_chunks
from bitplan.executions.native.paths import NativeTerms, Passes, backends_for_passes
from bitplan.executions.native.product import native_product
from bitplan.gemm.products import Product, has_settings, product_of
from bitplan.plans import Decision
from bitplan.plans.execution import Native
from bitplan.runtime.execution import AttentionCall, AttentionProducts, CompilerSettings, Decide
from bitplan.runtime.frozen import FrozenOperand
from bitplan.runtime.head_loss import HeadLoss
from bitplan.runtime.op_context import OpContext
from bitplan.runtime.rounding_op import OpRounding, RoundingOp
from bitplan.runtime.sharding import is_distributed, is_freed_after_forward
from bitplan.tables import Table

#: Inputs of linear layers have fewer dimensions than this.
_MAX_DIMS = 6


@dataclass(frozen=True)
class NativeCandidate:
    """A product that may run on low-precision backends."""

    passes: Passes
    #: Whether an emulated wgrad saves the codes of its input, one byte per element.
    keeps_codes: bool
    is_for_product = True

    def facts(self) -> Hashable:
        return tuple((key, tuple(backends.items())) for key, backends in self.passes.items()), self.keeps_codes


@dataclass(frozen=True)
class NativeWithCrossover(Native):
    """Native execution with a crossover that was measured before, as a resumed run needs it."""

    crossover: NativeTerms | None = None

    @classmethod
    def of(cls, options: Native, crossover: NativeTerms) -> NativeWithCrossover:
        """`options` with that crossover instead of this machine's."""
        return cls(options.min_macs, options.strict, options.fast_accumulation, options.recompute, crossover)


def native_terms(options: Native, model: nn.Module) -> NativeTerms:
    """From which size on GEMMs of `model` run natively: as the options say, or as measured on this machine."""
    if options.min_macs is not None:
        return NativeTerms(options.min_macs)
    if isinstance(options, NativeWithCrossover) and options.crossover is not None:
        return options.crossover
    parameter = next(model.parameters(), torch.empty(0))
    return load_crossover(parameter.device, parameter.dtype)


class NativeExecution(EmulateExecution):
    """Runs products on low-precision backends, pass by pass."""

    saves_activation_codes = True
    stores_frozen_weights = True
    has_attention = True

    def __init__(self, options: Native, model: nn.Module) -> None:
        super().__init__(options)
        self.native = options
        self.terms = native_terms(options, model)._replace(fast_accumulation=options.fast_passes)
        #: Operands (x, w) that compiled code casts again in its backward pass instead of saving their codes.
        self.recast_in_backward: tuple[str, ...] = ()

    def facts(self) -> Hashable:
        return self.options.kind, self.terms, self.recast_in_backward

    def prepare(self, decision: Decision, op: str) -> NativeCandidate | GroupedCandidate | AttentionCandidate | None:
        if op == "matmul":
            return prepare_attention(decision)
        if op == "grouped_mm":
            return prepare_grouped(decision) if has_slots(decision) else None
        if not (op == "linear" or op.startswith("conv")) or not has_slots(decision):
            return None
        passes = _native_passes(decision, op)
        return NativeCandidate(passes, keeps_codes(decision)) if passes else None

    def product(
        self,
        op: str,
        args: Any,
        kwargs: dict[str, Any],
        x: Tensor,
        w: Tensor,
        rounding: OpRounding,
        context: OpContext,
        weight_key: Tensor | None,
    ) -> Tensor | None:
        candidate = rounding.prepared
        if not has_settings(op, args, kwargs) or is_distributed(w):
            return None
        product, bias = product_of(op, args, kwargs)
        if isinstance(candidate, GroupedCandidate):
            return native_grouped_product(
                x, w, product, candidate, self.terms, rounding, context, weight_key, self.recast_in_backward
            )
        assert isinstance(candidate, NativeCandidate)
        backends = backends_for_passes(candidate.passes, op, product.settings, x, w, self.terms)
        saves_codes = candidate.keeps_codes and op != "linear" and x.dim() == w.dim() and x.numel() > 0
        if not backends and not saves_codes:
            return None
        recast = ("w",) if is_freed_after_forward(w) else self.recast_in_backward
        return native_product(x, w, bias, product, backends, rounding, context, weight_key, recast)

    def runs_attention(self, call: AttentionCall, products: AttentionProducts, training: bool) -> bool:
        if self.is_watched or not multiplies_attention(call.query.device):
            return False
        return runs_in_float8(call, products, self.terms, training)

    def attention(
        self, call: AttentionCall, products: AttentionProducts, contexts: tuple[OpContext, OpContext]
    ) -> Tensor:
        return native_attention(call, products, contexts)

    def frozen_product(
        self,
        product: Product,
        x: Tensor,
        bias: Tensor | None,
        decoded: Tensor,
        operand: FrozenOperand,
        rounding: OpRounding,
        context: OpContext,
        weight_key: Tensor | None,
    ) -> Tensor | None:
        candidate = rounding.prepared
        if product.op != "linear" or not isinstance(candidate, NativeCandidate):
            return None
        backends = backends_for_passes(candidate.passes, product.op, product.settings, x, decoded, self.terms)
        return native_frozen_product(x, bias, decoded, operand, backends, rounding, context, weight_key)

    def head_loss(
        self,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        loss: HeadLoss,
        rounding: OpRounding,
        context: OpContext,
        weight_key: Tensor | None,
    ) -> Tensor:
        backends: dict[str, str] = {}
        if isinstance(rounding.prepared, NativeCandidate):
            backends = backends_for_passes(rounding.prepared.passes, "linear", (), x, w, self.terms)
        chunks = backends_of_chunks(backends, x, w, loss, rounding, context)
        return loss.rounded(x, w, bias, rounding, context, weight_key, chunks)

    def fallbacks(
        self,
        operations: Sequence[Operation],
        decide: Decide,
        device: torch.device,
        split_modules: Collection[str] = (),
    ) -> Table[Fallback]:
        kernels = backends_with_blocks(device), self.terms, device.type
        attention = multiplies_attention(device), self.is_watched
        rows = fallbacks_of(operations, decide, *kernels, split_modules, multiplies_groups(device), *attention)
        return Table(rows, FALLBACK_COLUMNS, empty="no fallbacks: every product of the plan runs natively")

    def check(
        self,
        operations: Sequence[Operation],
        decide: Decide,
        device: torch.device,
        split_modules: Collection[str] = (),
    ) -> None:
        """Warn once, or raise where execution is strict, of products that the plan rounds and that are emulated."""
        fallbacks = list(self.fallbacks(operations, decide, device, split_modules))
        if not fallbacks:
            return
        if self.native.strict:
            first, others = fallbacks[0], len(fallbacks) - 1
            more = f", nor {'does' if others == 1 else 'do'} {others} more of the plan" if others else ""
            raise PlanError(
                f"{first.site} does not run natively ({first.gemm_pass}: {first.reason}){more}: "
                f"drop strict=True to emulate what cannot."
            )
        reasons = Counter(fallback.reason for fallback in fallbacks)
        listed = "; ".join(f"{reason} ({count}x)" if count > 1 else reason for reason, count in reasons.most_common(3))
        subject = "1 product is" if len(fallbacks) == 1 else f"{len(fallbacks)} products are"
        message = f"{subject} emulated: {listed}. run.fallbacks() lists them."
        warnings.warn(message, BitplanWarning, stacklevel=4)

    def compiler_settings(self, ops: Iterable[RoundingOp], options: dict[str, Any]) -> CompilerSettings:
        from bitplan.compiler.backends import compile_native_plainly, native_backend
        from bitplan.compiler.partitioning import RecomputePartitioner, RecomputePolicy

        recomputed = self.native.recomputed
        self.recast_in_backward = self.native.recast_operands
        codes = any(op.keeps_codes for op in ops)
        policy = RecomputePolicy("activations" in recomputed, "products" in recomputed, codes)
        if policy.is_plain:
            return CompilerSettings(compile_native_plainly, options=options)
        return CompilerSettings(native_backend(policy), RecomputePartitioner(policy), options)


def _native_passes(decision: Decision, op: str) -> Passes:
    """Which passes of a product run on which backend, on the devices of this machine."""
    devices = [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]
    found: Passes = {}
    for device in devices:
        backends = backends_with_blocks(device)
        for dims in range(1, _MAX_DIMS) if backends else ():
            for is_plain_gemm in (True,) if op == "linear" else (True, False):
                chosen = passes_of(decision, dims, backends, op, is_plain_gemm)
                names = {
                    gemm_pass: backend.name for gemm_pass, backend in chosen.items() if isinstance(backend, GemmBackend)
                }
                found[device.type, dims, is_plain_gemm] = names
    return found if op != "linear" or any(found.values()) else {}
