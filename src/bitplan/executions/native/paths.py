"""Which passes of a layer go to a GEMM backend, given its tensors and settings; the plan's formats are checked before.

Called at every forward pass, also while a graph is traced, and by the list of fallbacks, so that both agree. The
reasons hold no sizes: a traced graph would depend on them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitplan.executions.native.backends import CROSSOVER_OF, FAST_VARIANTS
from bitplan.executions.native.convolution import (
    is_pointwise,
    output_sizes,
    why_convolution_not_native,
    why_dgrad_not_native,
)
from bitplan.runtime.execution import AttentionCall


class NativeTerms(NamedTuple):
    """From which size on GEMMs go to a backend, and how exactly these accumulate."""

    #: Multiply-accumulates of a GEMM, on any backend.
    min_macs: int = 0
    #: Backend -> multiply-accumulates of a GEMM.
    min_macs_by_backend: tuple[tuple[str, int], ...] = ()
    #: Backend -> input and output channels of a convolution that needs im2col.
    min_channels_by_backend: tuple[tuple[str, int], ...] = ()
    #: Passes with fast accumulation, on backends that have it.
    fast_accumulation: tuple[str, ...] = ()

    def crossover_record(self) -> dict[str, dict[str, int]]:
        """The measured sizes, as JSON: a run that is resumed must send the same GEMMs to the same backends."""
        return {"min_macs": dict(self.min_macs_by_backend), "min_channels": dict(self.min_channels_by_backend)}

    @classmethod
    def from_crossover_record(cls, record: Mapping[str, Any]) -> NativeTerms:
        """The inverse of :meth:`crossover_record`; raises ValueError where `record` is none.

        >>> NativeTerms.from_crossover_record({"min_macs": {"int8": 512}, "min_channels": {}}).min_macs_by_backend
        (('int8', 512),)
        """
        parts = []
        for name in ("min_macs", "min_channels"):
            sizes = record.get(name)
            if not isinstance(sizes, Mapping) or any(type(size) is not int or size < 0 for size in sizes.values()):
                raise ValueError(f"{name} of a crossover gives a size of at least 0 for each backend, not {sizes!r}")
            parts.append(tuple((str(backend), size) for backend, size in sizes.items()))
        return cls(min_macs_by_backend=parts[0], min_channels_by_backend=parts[1])


#: (device type, dimensions of x, whether it is a plain GEMM) -> pass -> backend.
Passes = dict[tuple[str, int, bool], dict[str, str]]

#: Features of the heads that the attention kernel takes.
HEAD_SIZES = (64, 128)

TOO_SMALL = "is too small to gain by it"
TOO_NARROW = "has too few channels to gain by im2col"


def macs_of(op: str, settings: tuple[Any, ...], x: Tensor, w: Tensor) -> int:
    """Multiply-accumulates of one pass."""
    if op == "linear":
        return x.numel() * w.shape[0]
    macs: int = x.shape[0] * math.prod(output_sizes(x.shape[2:], w.shape[2:], settings)) * w.numel()
    return macs


def why_not_native(op: str, settings: tuple[Any, ...], x: Tensor, w: Tensor, terms: NativeTerms) -> str | None:
    """Why no pass of this layer goes to a backend, whatever its formats; None where some may."""
    if op == "linear":
        if w.dim() != 2:
            return "a weight that is no matrix has no native path"
    else:
        reason = why_convolution_not_native(settings, x, w)
        if reason is not None:
            return reason
    if macs_of(op, settings, x, w) < max(terms.min_macs, 1):  # an empty batch has no amax to take a scale from
        return TOO_SMALL
    return None


def why_groups_not_native(x: Tensor, w: Tensor, terms: NativeTerms) -> str | None:
    """Why no pass of a grouped product goes to the FP8 kernel, whatever its formats; None where some may."""
    if x.dim() != 2 or w.dim() != 3:
        return "only rows of a matrix times a matrix for each group have a native path"
    if x.dtype != torch.bfloat16:
        return "grouped products in FP8 have results in bfloat16 only, and this one computes in another dtype"
    if w.shape[1] % 16 or w.shape[2] % 16:
        return "grouped products in FP8 need matrices whose sides are multiples of 16"
    if x.numel() * w.shape[2] < max(terms.min_macs, 1, dict(terms.min_macs_by_backend).get("fp8", 0)):
        return TOO_SMALL
    return None


def why_attention_not_native(call: AttentionCall, terms: NativeTerms) -> str | None:
    """Why this attention does not go to the FP8 kernel, whatever its formats; None where it may."""
    query, key, value = call[:3]
    if call.attn_mask is not None:
        return "attention with a mask has no native path, other than is_causal=True"
    if call.dropout_p > 0.0:
        return "attention with dropout has no native path"
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        return "attention in FP8 is for tensors (batch, heads, tokens, features)"
    if not query.dtype == key.dtype == value.dtype == torch.bfloat16:
        return "attention in FP8 has results in bfloat16 only, and this one computes in another dtype"
    if query.shape[3] not in HEAD_SIZES or not query.shape[3] == key.shape[3] == value.shape[3]:
        return f"attention in FP8 is for heads of {' or '.join(map(str, HEAD_SIZES))} features"
    if key.shape != value.shape or query.shape[0] != key.shape[0]:
        return "attention in FP8 does not broadcast its operands"
    if query.shape[1] != key.shape[1] and (not call.enable_gqa or query.shape[1] % key.shape[1]):
        return "attention in FP8 does not broadcast its operands"
    if call.is_causal and query.shape[2] != key.shape[2]:
        return "causal attention in FP8 is for as many queries as keys"
    if call.scale is not None and call.scale <= 0:
        return "attention in FP8 is for positive scales of the softmax"
    if query.numel() * key.shape[2] < max(terms.min_macs, 1, dict(terms.min_macs_by_backend).get("fp8", 0)):
        return TOO_SMALL
    return None


def why_pass_not_native(
    gemm_pass: str, backend: str, op: str, settings: tuple[Any, ...], x: Tensor, w: Tensor, terms: NativeTerms
) -> str | None:
    """Why that pass does not go to that backend."""
    if macs_of(op, settings, x, w) < dict(terms.min_macs_by_backend).get(CROSSOVER_OF.get(backend, backend), 0):
        return TOO_SMALL
    if is_plain_gemm(op, settings, w):
        return None
    for name, channels in terms.min_channels_by_backend:
        if name == backend and min(w.shape[0], w.shape[1]) < channels:
            return TOO_NARROW
    return why_dgrad_not_native(settings, w) if gemm_pass == "dgrad" else None


def is_plain_gemm(op: str, settings: tuple[Any, ...], w: Tensor) -> bool:
    """Whether a row of the output depends on one row of the input: linear layers and 1x1 convolutions."""
    return op == "linear" or is_pointwise(settings, w)


def backends_for_passes(
    passes: Passes, op: str, settings: tuple[Any, ...], x: Tensor, w: Tensor, terms: NativeTerms
) -> dict[str, str]:
    """Pass -> backend, for the passes that go to one."""
    candidates = passes.get((x.device.type, x.dim(), is_plain_gemm(op, settings, w)), {})
    if not candidates or why_not_native(op, settings, x, w, terms) is not None:
        return {}
    return {
        gemm_pass: FAST_VARIANTS.get(backend, backend) if gemm_pass in terms.fast_accumulation else backend
        for gemm_pass, backend in candidates.items()
        if why_pass_not_native(gemm_pass, backend, op, settings, x, w, terms) is None
    }
