"""Applying actions: what autograd does with a rounded tensor, eager and in a compiled graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitplan.compiler.tracing import is_traced, opaque_in_graph
from bitplan.executions.native.backends import backend_named, supports_shape
from bitplan.executions.native.convolution import ConvGemmLayout, is_channels_last
from bitplan.executions.native.float8_cast import cast_float8
from bitplan.executions.native.gemm import BY_ROW, PASSES, Codes, GemmLayout, SavedOperand, byte_of, codes_of
from bitplan.executions.native.gemm import native_product as multiplied
from bitplan.executions.packed.recompute import Passes, bit_relu
from bitplan.executions.packed.saved_tensors import copy_mark
from bitplan.gemm.products import Product, slot_product
from bitplan.plans import OPERANDS, SLOTS
from bitplan.plans.spec import QuantizerSpec
from bitplan.runtime.op_context import OpContext
from bitplan.runtime.rounding_op import OpRounding, RoundingOp, mark, op_of_key, packs_eagerly
from bitplan.runtime.statistics import observe_amax

# --- The six slots of a product: what each operand is rounded to in each of its two passes, or cast to


#: The attribute by which a tensor of a graph in the making tells what :func:`_first_amax` needs.
_HISTORY_MAX = "_bitplan_history_max"


class Slots:
    """The rounding of the six slots of one product, as :class:`SlotProduct` asks for it."""

    def __init__(self, chosen: dict[str, tuple[RoundingOp, OpContext]], weight_key: Tensor | None) -> None:
        self.chosen = chosen
        self.weight_key = weight_key
        #: Whether x is kept as the weight's gradient wants it, rounded and packed, rather than as it came.
        self.keeps_rounded_x = "wgrad.x" in chosen and packs_eagerly(chosen["wgrad.x"][0])

    def round(self, slot: str, tensor: Tensor) -> Tensor:
        if slot not in self.chosen:
            return tensor
        action, context = self.chosen[slot]
        if packs_eagerly(action) and action.changes_nothing_in(tensor):
            return tensor  # not rounded again, so that the one packed copy serves this product, too
        return action.round(tensor.detach(), context, self.weight_key if slot.endswith(".w") else None)


class NativeSlots(Slots):
    """The same for GEMMs on low-precision backends, which take elements and scales instead of rounded values."""

    def __init__(
        self,
        chosen: dict[str, tuple[RoundingOp, OpContext]],
        weight_key: Tensor | None,
        backends: dict[str, str],
        recast_in_backward: tuple[str, ...] = (),
        features: int = -1,
    ) -> None:
        """`features`: the axis of input and weight that the products see as features."""
        super().__init__(chosen, weight_key)
        self.backends = {one: backend_named(name) for one, name in backends.items()}
        self.recast_in_backward = recast_in_backward
        self.features = features

    def shares(self, operand: str) -> bool:
        chosen = [self.chosen[slot][0] for slot in OPERANDS[operand] if slot in self.chosen]
        return len(chosen) == 2 and chosen[0] is chosen[1]

    def saved_operand(self, x: Tensor) -> SavedOperand | None:
        if "wgrad.x" not in self.chosen or not x.numel():
            return None
        action, context = self.chosen["wgrad.x"]
        dtype = byte_of(action.spec)
        if dtype is None or (action.live_kind is not None and action.spec.bits is None):  # a format that may be set
            return None
        encoded, quantizer = action.encode(x, context)
        return SavedOperand(encoded, quantizer, x, dtype)

    def codes(self, slots: list[str], tensor: Tensor, after: Tensor | None = None) -> list[Codes]:
        if len(slots) == 2 and not self._are_alike(*slots):
            return [*self.codes(slots[:1], tensor, after), *self.codes(slots[1:], tensor, after)]
        if not slots:
            return []
        action, context = self.chosen[slots[0]]
        dtype = self.backends[slots[0].partition(".")[0]].code_dtype(action.spec.target)
        assert dtype is not None
        if action.is_plain_cast(tensor, dtype):
            return self._cast(slots, tensor, dtype, after)
        encoded, _ = action.encode(tensor, context, self.weight_key if slots[0].endswith(".w") else None)
        return [codes_of(encoded, dtype, self.features)] * len(slots)

    def _are_alike(self, one: str, other: str) -> bool:
        """Whether the two slots of a tensor get the same codes, with one scale."""
        action, another = self.chosen[one][0], self.chosen[other][0]
        if action is another:
            return True
        is_certain = not action.is_stochastic and not action.observes and action.live_kind is None
        return is_certain and action.spec == another.spec and action.spec.scale in (None, "tensor")

    def _cast(self, slots: list[str], tensor: Tensor, dtype: torch.dtype, after: Tensor | None) -> list[Codes]:
        """One reading of the tensor gives the layouts of all its slots."""
        action, context = self.chosen[slots[0]]
        spec = action.spec
        record, history_max = action.remembered(context)
        if history_max is not None and is_traced():
            history_max = _first_amax(tensor, spec, history_max)
        returns_amax = action.is_delayed and record is not None and context.observing and after is None
        by_row = [slot in BY_ROW for slot in slots]
        cast = cast_float8(
            tensor.movedim(self.features, -1).reshape(-1, tensor.shape[self.features]),
            dtype,
            scaled=spec.scale is not None,
            power_of_two=spec.power_of_two,
            history_amax=history_max,
            as_rows=any(by_row),
            as_columns=not all(by_row),
            returns_amax=returns_amax,
            after=after,
        )
        if returns_amax and record is not None:
            observe_amax(record, cast.tile_amax.amax())
        return [Codes(cast.rows if is_by_row else cast.columns.t(), cast.scale) for is_by_row in by_row]


def _first_amax(tensor: Tensor, spec: QuantizerSpec, history_max: Tensor) -> Tensor:
    """While a graph is made: the history_max that the first reader of a tensor with such a quantizer has.

    Readers of one tensor have met the same magnitudes, so theirs is the same number; as one and the same node of the
    graph it lets torch.compile see that their casts are one.
    """
    known: dict[QuantizerSpec, Tensor] = tensor.__dict__.setdefault(_HISTORY_MAX, {})
    return known.setdefault(spec, history_max)


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
        return forward.round(x.detach(), context, weight_key)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.action.round(grads[0], ctx.context), None, None, None, None, None


class GridRelu(torch.autograd.Function):
    """ReLU of a tensor that lies on the grid already: so does its positive part, and so does a rounded gradient's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backward: RoundingOp, back: OpContext) -> Tensor:
        ctx.action, ctx.context = backward, back
        y = torch.relu(x)
        if packs_eagerly(backward):
            ctx.passes = Passes(y)
            copy_mark(y, x)
            ctx.passes.wait_for_copy(y)
        else:
            ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rounded = ctx.action.round(grads[0], ctx.context)
        kept = ctx.saved_tensors  # asked for once: checkpointing gives them out once
        passed = torch.ops.aten.threshold_backward(rounded, kept[0], 0) if kept else ctx.passes.apply(rounded)
        return mark(passed, ctx.action.grid), None, None


# --- compiled -----------------------------------------------------------------------------------------------
#
# torch.compile would follow every Python step of rounding, for every tensor of a model: minutes for a ResNet-50. So it
# is given single functions of tensors and plain constants, which run as they are when the graph below is made.

#: What stands for a rounding in a graph: its key, and the row of its record (-1 where there is none).
OpRef = tuple[str, int]

_NO_OP: OpRef = ("", -1)


def _ref(op: RoundingOp | None, context: OpContext) -> OpRef:
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


def _buffers(context: OpContext) -> Buffers:
    return context.table, context.record, context.amax_history_max


def _constants(context: OpContext) -> CallConstants:
    return context.site, context.salt, context.training, context.observing


@opaque_in_graph
def _both_ways_in_graph(
    x: Tensor,
    forward: OpRef,
    backward: OpRef,
    call: CallConstants,
    buffers: Buffers,
    weight_key: Tensor | None,
) -> Tensor:
    context, back = (OpContext.in_graph(call, ref[1], buffers) for ref in (forward, backward))
    return _both_ways(x, _op(forward), _op(backward), context, back, weight_key)


@opaque_in_graph
def _relu_in_graph(x: Tensor, forward: OpRef, backward: OpRef, call: CallConstants, buffers: Buffers) -> Tensor:
    context, back = (OpContext.in_graph(call, ref[1], buffers) for ref in (forward, backward))
    return _relu(x, _op(forward), _op(backward), context, back)


def _chosen(refs: tuple[OpRef, ...], call: CallConstants, buffers: Buffers) -> dict[str, tuple[RoundingOp, OpContext]]:
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
) -> Tensor:
    chosen = _chosen(refs, call, buffers)
    return slot_product(x, w, bias, Product(op, settings), Slots(chosen, weight_key))


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
    chosen = _chosen(refs, call, buffers)
    form = _form(Product(op, settings), x, w)
    return multiplied(
        x, w, bias, form, NativeSlots(chosen, weight_key, dict(backends), recast_in_backward, form.features)
    )


def _form(product: Product, x: Tensor, w: Tensor) -> GemmLayout:
    if product.op == "linear":
        return GemmLayout()
    return ConvGemmLayout(product, w.shape[2:], is_channels_last(x))


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
    return _both_ways_in_graph(
        *(x, _ref(forward, context), _ref(backward, context), _constants(context)),
        *(_buffers(context), weight_key),
    )


def rounded_relu(x: Tensor, forward: RoundingOp | None, backward: RoundingOp | None, context: OpContext) -> Tensor:
    """The positive part of `x`, rounded both ways; nothing is rounded that lies on the grid already."""
    forward, backward = _after_promotion(forward, context), _after_promotion(backward, context)
    if not torch.compiler.is_compiling():
        return _relu(x, forward, backward, context, context)
    return _relu_in_graph(x, _ref(forward, context), _ref(backward, context), _constants(context), _buffers(context))


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
    asked = {
        slot: _after_promotion(action.places[slot], context) for slot in SLOTS if action.applies(slot, context.training)
    }
    applied = {slot: place for slot, place in asked.items() if place is not None}
    if not torch.compiler.is_compiling():
        slots = Slots({slot: (place, context) for slot, place in applied.items()}, weight_key)
        return slot_product(x, w, bias, product, slots)
    refs = tuple(_ref(applied.get(slot), context) for slot in SLOTS)
    return _slot_product_in_graph(
        *(x, w, bias, product.op, product.settings, refs, _constants(context)),
        *(_buffers(context), weight_key),
    )


def native_product(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    product: Product,
    backends: dict[str, str],
    action: OpRounding,
    context: OpContext,
    weight_key: Tensor | None,
    recast_in_backward: tuple[str, ...] = (),
) -> Tensor:
    """y = x w of a layer, the passes in `backends` on those, the others emulated.

    :param recast_in_backward: of compiled code: operands, of x and w, that the backward pass casts again.
    """
    applied: dict[str, RoundingOp] = {}
    for slot in SLOTS:
        place = action.shared.get(slot.split(".")[1], slot)
        if action.applies(place, context.training):
            applied[slot] = action.places[place]
    # What evaluation leaves unrounded is multiplied as it is.
    backends = {one: name for one, name in backends.items() if all(slot in applied for slot in PASSES[one])}
    form = _form(product, x, w)
    backends = {
        one: name
        for one, name in backends.items()
        if supports_shape(name, x.device.type, form.gemm_shape(one, x.shape, w.shape))
    }
    if not torch.compiler.is_compiling():
        chosen = {slot: (place, context) for slot, place in applied.items()}
        return multiplied(x, w, bias, form, NativeSlots(chosen, weight_key, backends, features=form.features))
    refs = tuple(_ref(applied.get(slot), context) for slot in SLOTS)
    return _native_product_in_graph(
        x,
        w,
        bias,
        product.op,
        product.settings,
        tuple(backends.items()),
        recast_in_backward,
        refs,
        _constants(context),
        _buffers(context),
        weight_key,
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
        passed: Tensor = RoundedGradient.apply(x, backward, back)  # type: ignore[no-untyped-call]
    else:
        passed = RoundedBothWays.apply(x, forward, backward, context, back, weight_key)  # type: ignore[no-untyped-call]
    return passed if forward is None else mark(passed, forward.grid)


def _relu(
    x: Tensor, forward: RoundingOp | None, backward: RoundingOp | None, context: OpContext, back: OpContext
) -> Tensor:
    relu = bit_relu if packs_eagerly(forward, backward) else torch.relu
    if forward is None or not forward.changes_nothing_in(x):
        return _both_ways(relu(x), forward, backward, context, back, None)
    if backward is None:
        y = relu(x)
        if packs_eagerly(forward):
            copy_mark(y, x)
        return mark(y, forward.grid)
    passed: Tensor = GridRelu.apply(x, backward, back)  # type: ignore[no-untyped-call]
    return mark(passed, forward.grid)
