"""The chunked loss of a head (:mod:`bitplan.runtime.head_loss`) on low-precision units.

Codes of x and w are made once for all chunks, those of dy chunk by chunk, with one scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bitplan.executions.native.backends import backend_named, supports_shape
from bitplan.executions.native.float8_cast import cast_float8
from bitplan.executions.native.gemm import codes_of, gemm_shape
from bitplan.executions.native.product import NativeSlots, is_plain_cast
from bitplan.numerics.quantizer import Span
from bitplan.numerics.wire_format import OPERAND_OF_SLOT
from bitplan.plans.match import PASSES
from bitplan.runtime.head_loss import HeadLoss, HeadOperands, HeadSlots
from bitplan.runtime.head_loss_ops import chunk_size
from bitplan.runtime.op_context import OpContext
from bitplan.runtime.rounding_op import OpRounding, RoundingOp


def backends_of_chunks(
    backends: dict[str, str], x: Tensor, w: Tensor, loss: HeadLoss, rounding: OpRounding, context: OpContext
) -> tuple[tuple[str, str], ...]:
    """The passes that run on a backend in all chunks: the last one may have fewer tokens than the others."""
    tokens = x.numel() // x.shape[-1]
    size = chunk_size(tokens, len(w), loss.settings.chunk)
    sizes = {min(size, tokens), tokens % size or size}

    def is_native(gemm_pass: str, name: str) -> bool:
        if backend_named(name).takes_blocks:
            return False
        for slot in PASSES[gemm_pass]:
            place = rounding.shared.get(OPERAND_OF_SLOT[slot].tensor, slot)
            if not rounding.applies(place, context.training):
                return False
            # A scale for each row of dy is one for each row of a chunk; other operands are not split.
            is_dy = OPERAND_OF_SLOT[slot].tensor == "dy"
            if is_dy and rounding.places[place].spec.scale not in (None, "tensor"):
                return False
        shapes = (gemm_shape(gemm_pass, rows, w.shape[1], w.shape[0]) for rows in sizes)
        return tokens > 0 and all(supports_shape(name, x.device.type, shape) for shape in shapes)

    return tuple((gemm_pass, name) for gemm_pass, name in backends.items() if is_native(gemm_pass, name))


class NativeHeadSlots(NativeSlots, HeadSlots):
    """The rounding of a head's operands, to codes for the passes that run on a backend."""

    def head_operands(self, x: Tensor, w: Tensor, dtype: torch.dtype, needs_x: bool, needs_w: bool) -> HeadOperands:
        rows = x.reshape(-1, x.shape[-1])
        x_operands = self._operands("fprop.x", "wgrad.x" if needs_w else None, rows, dtype)
        w_operands = self._operands("fprop.w", "dgrad.w" if needs_x else None, w, dtype)
        names = [self.backends[name].name if name in self.backends else "" for name in ("fprop", "dgrad", "wgrad")]
        return HeadOperands(x_operands[0], w_operands[0], w_operands[1], x_operands[1], names)

    def _operands(self, slot: str, backward: str | None, tensor: Tensor, dtype: torch.dtype) -> list[list[Tensor]]:
        """A tensor as an operand of its forward and of its backward GEMM."""
        needed = [slot] if backward is None else [slot, backward]
        native = [name for name in needed if OPERAND_OF_SLOT[name].pass_ in self.backends]
        codes = dict(zip(native, self.codes(native, tensor), strict=True))
        operands = []
        for name in needed:
            if name in codes:
                operands.append(list(codes[name]))
            elif operands and len(operands[0]) == 1 and self._op(slot) is self._op(name):
                operands.append(operands[0])
            else:
                operands.append([self.round(name, tensor).detach().to(dtype)])
        return operands if len(operands) == 2 else operands * 2


def dy_codes(
    dy: Tensor, op: RoundingOp, backend: str, row: Tensor | None, span: Span | None, layouts: Sequence[str]
) -> list[list[Tensor]]:
    """A chunk of dy as codes and scale, stored as rows (for dgrad) or columns (for wgrad).

    :param span: what determines the scale: the amax of all chunks.
    """
    dtype = backend_named(backend).code_dtype(op.spec.target)
    assert dtype is not None
    if is_plain_cast(op, dy, dtype) and not isinstance(span, tuple):
        cast = cast_float8(
            dy,
            dtype,
            scaled=op.spec.scale is not None,
            power_of_two=op.spec.power_of_two,
            history_amax=span,
            as_rows="rows" in layouts,
            as_columns="columns" in layouts,
        )
        return [[cast.rows if layout == "rows" else cast.columns.t(), cast.scale] for layout in layouts]
    return [list(codes_of(op.quantizer(2).encode(dy, None, row, span), dtype))] * len(layouts)
