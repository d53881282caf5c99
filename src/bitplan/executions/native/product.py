"""One product in native execution: how the plan rounds its operands to codes, and the call, eager or in a graph.

The GEMMs themselves are in :mod:`bitplan.executions.native.gemm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitplan.compiler.tracing import is_traced, opaque_in_graph, transformable
from bitplan.executions.native.backends import BLOCK, backend_named, supports_shape
from bitplan.executions.native.blocks import cuts_blocks
from bitplan.executions.native.convolution import ConvGemmLayout, is_channels_last
from bitplan.executions.native.float8_block_cast import block_codes, cast_float8_blocks
from bitplan.executions.native.float8_cast import FORMATS, INPUT_DTYPES, Cast, cast_float8
from bitplan.executions.native.gemm import (
    BY_ROW,
    Codes,
    GemmLayout,
    NativeProduct,
    SavedOperand,
    block_codes_of,
    byte_of,
    codes_of,
)
from bitplan.gemm.products import Product
from bitplan.numerics.scaling import Tiles
from bitplan.numerics.wire_format import OPERAND_OF_SLOT
from bitplan.plans import SLOTS
from bitplan.plans.match import PASSES
from bitplan.plans.spec import QuantizerSpec
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
from bitplan.runtime.op_context import OpContext
from bitplan.runtime.rounding_op import OpRounding, RoundingOp
from bitplan.runtime.sharding import is_freed_after_forward
from bitplan.runtime.statistics import observe_amax

#: Attribute of a traced tensor: quantizer -> the amax history that its first reader with that quantizer has.
_HISTORY_MAX = "_bitplan_history_max"


class NativeSlots(Slots):
    """The rounding of a product's operands for low-precision backends, which take codes and scales."""

    def __init__(
        self,
        chosen: dict[str, tuple[RoundingOp, OpContext]],
        weight_key: Tensor | None,
        backends: dict[str, str],
        recast_in_backward: tuple[str, ...] = (),
        features: int = -1,
    ) -> None:
        """
        :param backends: pass -> name of its backend; a missing pass is emulated.
        :param recast_in_backward: operands (x, w) that the backward pass casts again, instead of saving their codes.
        :param features: the axis of input and weight that is the feature axis of the GEMMs.
        """
        super().__init__(chosen, weight_key)
        self.backends = {gemm_pass: backend_named(name) for gemm_pass, name in backends.items()}
        self.recast_in_backward = recast_in_backward
        self.features = features

    def saved_operand(self, x: Tensor) -> SavedOperand | None:
        """The input for an emulated wgrad, one byte per element; None where its format does not fit a byte."""
        if "wgrad.x" not in self.chosen or not x.numel():
            return None
        op, context = self.chosen["wgrad.x"]
        dtype = byte_of(op.spec)
        if dtype is None or (op.mutable_kind is not None and op.spec.bits is None):  # a format that may be set
            return None
        encoded, quantizer = op.encode(x, context)
        return SavedOperand(encoded, quantizer, x, dtype)

    def codes(self, slots: list[str], tensor: Tensor, after: Tensor | None = None) -> list[Codes]:
        """The codes of a tensor for each of these slots.

        :param after: in the backward pass: cast again, but not before this tensor is computed.
        """
        layouts = [self._block_layout(slot, tensor) for slot in slots]
        in_blocks = [layout for layout in layouts if layout is not None]
        if len(in_blocks) == len(slots) and len({layout.settings for layout in in_blocks}) == 1:
            return _cast_blocks(in_blocks, tensor, after)
        if len(slots) == 2 and not self.are_alike(*slots):
            return [*self.codes(slots[:1], tensor, after), *self.codes(slots[1:], tensor, after)]
        if not slots:
            return []
        op, context = self.chosen[slots[0]]
        operand = OPERAND_OF_SLOT[slots[0]]
        dtype = self.backends[operand.pass_].code_dtype(op.spec.target)
        assert dtype is not None
        if self.backends[operand.pass_].takes_blocks:
            blocked, quantizer = op.encode(tensor, context, self.weight_key if operand.tensor == "w" else None)
            return [block_codes_of(blocked, quantizer, tensor, dtype)] * len(slots)
        if is_plain_cast(op, tensor, dtype):
            return self._cast(slots, tensor, dtype, after)
        encoded, _ = op.encode(tensor, context, self.weight_key if operand.tensor == "w" else None)
        return [codes_of(encoded, dtype, self.features)] * len(slots)

    def _block_layout(self, slot: str, tensor: Tensor) -> BlockLayout | None:
        """The blocks of an operand that the block cast makes; None where only the quantizer does."""
        op, context = self.chosen[slot]
        backend = self.backends[OPERAND_OF_SLOT[slot].pass_]
        dtype = backend.code_dtype(op.spec.target)
        is_plain = dtype is not None and rounds_plainly(op, tensor, dtype) and not (op.rotates or op.function or op.top)
        if not backend.takes_blocks or not is_plain or tensor.dim() < 2 or context.split_over is not None:
            return None
        blocks, last = op.quantizer_of(tensor).blocks(tensor), tensor.dim() - 1
        if isinstance(blocks, Tiles):
            is_square = tensor.dim() == 2 and blocks.sizes == (BLOCK, BLOCK)
            return BlockLayout(True, op.spec.power_of_two, slot in BY_ROW) if is_square else None
        if blocks is None or blocks.size != BLOCK or blocks.axis < last - 1 or tensor.shape[blocks.axis] % BLOCK:
            return None
        return BlockLayout(False, op.spec.power_of_two, blocks.axis == last)

    def are_alike(self, slot: str, other_slot: str) -> bool:
        """Whether the two slots of a tensor get the same codes, with one scale."""
        op, other = self.chosen[slot][0], self.chosen[other_slot][0]
        if op is other:
            return True
        is_deterministic = not op.is_stochastic and not op.observes and op.mutable_kind is None
        return is_deterministic and op.spec == other.spec and op.spec.scale in (None, "tensor")

    def _cast(self, slots: list[str], tensor: Tensor, dtype: torch.dtype, after: Tensor | None) -> list[Codes]:
        """One kernel reads the tensor and writes the layouts of all its slots."""
        matrix = tensor.movedim(self.features, -1).reshape(-1, tensor.shape[self.features])
        by_row = [slot in BY_ROW for slot in slots]
        cast = self.cast_matrix(slots[0], tensor, matrix, dtype, any(by_row), not all(by_row), after)
        return [Codes(cast.rows if is_by_row else cast.columns.t(), cast.scale) for is_by_row in by_row]

    def cast_matrix(
        self,
        slot: str,
        tensor: Tensor,
        matrix: Tensor,
        dtype: torch.dtype,
        as_rows: bool,
        as_columns: bool,
        after: Tensor | None = None,
        sources: Tensor | None = None,
    ) -> Cast:
        """The codes that a slot's plain cast makes of a tensor, given as a matrix, in one or both layouts.

        :param sources: pads the columns, as in :func:`bitplan.executions.native.float8_cast.cast_float8`.
        """
        op, context = self.chosen[slot]
        spec = op.spec
        record, history_max = op.remembered(context)
        if history_max is not None and is_traced():
            history_max = _first_amax(tensor, spec, history_max)
        returns_amax = op.is_delayed and record is not None and context.observing and after is None
        cast = cast_float8(
            matrix,
            dtype,
            scaled=spec.scale is not None,
            power_of_two=spec.power_of_two,
            history_amax=history_max,
            as_rows=as_rows,
            as_columns=as_columns,
            returns_amax=returns_amax,
            after=after,
            sources=sources,
        )
        if returns_amax and record is not None:
            observe_amax(record, cast.tile_amax.amax())
        return cast


class BlockLayout(NamedTuple):
    """How an operand is cast in blocks."""

    #: Whether blocks are tiles; otherwise they are lines.
    tiles: bool
    power_of_two: bool
    #: Whether codes are row-major, and lines along features; otherwise column-major, and lines along rows.
    by_row: bool

    @property
    def settings(self) -> tuple[bool, bool]:
        """Layouts that are equal in these come from one cast."""
        return self.tiles, self.power_of_two


def _cast_blocks(layouts: Sequence[BlockLayout], tensor: Tensor, after: Tensor | None) -> list[Codes]:
    """One kernel reads the tensor and writes all layouts."""
    tiles, power_of_two, _ = layouts[0]
    by_row = [layout.by_row for layout in layouts]
    cast = cast_float8_blocks(
        tensor.reshape(-1, tensor.shape[-1]),
        tiles=tiles,
        power_of_two=power_of_two,
        as_rows=any(by_row),
        as_columns=not all(by_row),
        after=after,
    )
    return [block_codes(cast, tiles, is_by_row) for is_by_row in by_row]


def is_plain_cast(op: RoundingOp, x: Tensor, dtype: torch.dtype) -> bool:
    """Whether codes of that dtype are made by one scale for the whole tensor and rounding to nearest."""
    return rounds_plainly(op, x, dtype) and op.spec.scale in (None, "tensor")


def rounds_plainly(op: RoundingOp, x: Tensor, dtype: torch.dtype) -> bool:
    """Whether codes of that dtype are rounded to nearest, saturate, and are not observed."""
    if dtype not in FORMATS or x.dtype not in INPUT_DTYPES or op.is_stochastic or op.mutable_kind is not None:
        return False
    spec = op.spec
    is_nearest = spec.rounding == "nearest" and spec.overflow in (None, "saturate")
    is_observed = op.watched or op.uses_mean_range or op.promotion is not None
    return is_nearest and not is_observed


def _first_amax(tensor: Tensor, spec: QuantizerSpec, history_max: Tensor) -> Tensor:
    """While a graph is traced: the amax history of the first reader of a tensor with such a quantizer.

    All readers of one tensor have seen the same magnitudes, so their histories are equal; as one node of the graph it
    lets torch.compile see that their casts are equal, too.
    """
    by_spec: dict[QuantizerSpec, Tensor] = tensor.__dict__.setdefault(_HISTORY_MAX, {})
    return by_spec.setdefault(spec, history_max)


def gemm_layout(product: Product, x: Tensor, w: Tensor) -> GemmLayout:
    if product.op == "linear":
        return GemmLayout()
    return ConvGemmLayout(product, w.shape[2:], is_channels_last(x))


def applied_ops(rounding: OpRounding, context: OpContext) -> dict[str, RoundingOp]:
    """Slot -> what rounds it; evaluation leaves some operands unrounded."""
    applied: dict[str, RoundingOp] = {}
    for slot in SLOTS:
        place = rounding.shared.get(OPERAND_OF_SLOT[slot].tensor, slot)
        if rounding.applies(place, context.training):
            applied[slot] = rounding.places[place]
    return applied


def native_product(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    product: Product,
    backends: dict[str, str],
    rounding: OpRounding,
    context: OpContext,
    weight_key: Tensor | None,
    recast_in_backward: tuple[str, ...] = (),
) -> Tensor:
    """y = x w + bias of a layer: the passes in `backends` run there, the others are emulated.

    :param recast_in_backward: operands, of x and w, that the backward pass casts again: in compiled code, and weights
        that FSDP2 frees after the forward pass.
    """
    applied = applied_ops(rounding, context)
    layout = gemm_layout(product, x, w)
    # Operands that evaluation leaves unrounded are multiplied as they are.
    backends = {
        gemm_pass: name
        for gemm_pass, name in backends.items()
        if all(slot in applied for slot in PASSES[gemm_pass])
        and supports_shape(name, x.device.type, layout.gemm_shape(gemm_pass, x.shape, w.shape))
        and not cuts_blocks(name, gemm_pass, x.shape)
    }
    if not torch.compiler.is_compiling():
        chosen = {slot: (op, context) for slot, op in applied.items()}
        recast = tuple(operand for operand in recast_in_backward if operand == "w" and is_freed_after_forward(w))
        return _multiply(x, w, bias, layout, NativeSlots(chosen, weight_key, backends, recast, layout.features))
    refs = tuple(op_ref(applied.get(slot), context) for slot in SLOTS)
    return _native_product_in_graph(
        x,
        w,
        bias,
        product.op,
        product.settings,
        tuple(backends.items()),
        recast_in_backward,
        refs,
        call_constants(context),
        call_buffers(context),
        weight_key,
    )


@opaque_in_graph
def _native_product_in_graph(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    op: str,
    settings: tuple[Any, ...],
    backends: tuple[tuple[str, str], ...],
    recast_in_backward: tuple[str, ...],
    refs: tuple[OpRef, ...],
    call: CallConstants,
    buffers: Buffers,
    weight_key: Tensor | None,
) -> Tensor:
    chosen = chosen_ops(refs, call, buffers)
    layout = gemm_layout(Product(op, settings), x, w)
    slots = NativeSlots(chosen, weight_key, dict(backends), recast_in_backward, layout.features)
    return _multiply(x, w, bias, layout, slots)


def _multiply(x: Tensor, w: Tensor, bias: Tensor | None, layout: GemmLayout, slots: NativeSlots) -> Tensor:
    y: Tensor = transformable(NativeProduct).apply(x, w, bias, layout, slots)
    return y
