"""Where tensors are rounded: a :class:`RoundingOp` is what a plan does to one tensor of an operation.

An :class:`OpRounding` holds the roundings of all tensors of an operation, with the state of the run there. Which of
them applies is decided in :mod:`bitplan.runtime.dispatch`.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from bitplan.compiler.tracing import is_traced, is_traced_below_dynamo, needs_shapes_only, transformable
from bitplan.errors import PlanError, QuantizeError
from bitplan.gemm.axes import resolve, rotation_of
from bitplan.numerics import chunks
from bitplan.numerics.chunks import chunked_on_gpu
from bitplan.numerics.dtypes import is_cast_small
from bitplan.numerics.formats import BlockFormat, FloatFormat, Format, IntFormat, registered_format
from bitplan.numerics.mutable_format import MutableFormat
from bitplan.numerics.noise import bits_of_key, key_of
from bitplan.numerics.packing import is_smaller, stored
from bitplan.numerics.quantizer import Between, Encoded, Quantizer, Span, StraightThrough, straight_through
from bitplan.numerics.scaling import amax_of, reduced_dims
from bitplan.numerics.wire_format import OPERAND_OF_SLOT, place_key, text_hash
from bitplan.plans import OPERANDS, SLOTS, Decision
from bitplan.plans.spec import Promotion, QuantizerSpec
from bitplan.runtime.execution import PreparedProduct
from bitplan.runtime.module_state import OperandState, QuantizerModules
from bitplan.runtime.op_context import OpContext
from bitplan.runtime.rounded_mark import lies_on, mark_rounded
from bitplan.runtime.sharding import Ranks, is_distributed, rounded_distributed
from bitplan.runtime.statistics import (
    PROMOTED,
    mean_range,
    observe_amax,
    observe_range,
    observe_rounding,
    observe_signal,
)

# --- Promotion: the signal that is watched at a tensor, and the choice between its two quantizers


class Either:
    """Two roundings of a tensor; the higher one where `flag`, a number on the device, is above 0."""

    def __init__(self, low: Quantizer, high: Callable[[Tensor], Tensor], flag: Tensor) -> None:
        self.low = low
        self.high = high
        self.flag = flag
        #: What the lower one made of the tensor, for the sign that is watched.
        self.low_values: Tensor | None = None

    def round_values(
        self,
        x: Tensor,
        bits: Tensor | None,
        row: Tensor | None = None,
        span: Span | None = None,
        between: Between | None = None,
    ) -> Tensor:
        self.low_values = self.low.round_values(x, bits, row, span, between)
        return torch.where(self.flag > 0, self.high(x), self.low_values)


def promotion_signal(promotion: Promotion, x: Tensor, low: Tensor, threshold: float | Tensor) -> tuple[Tensor, Tensor]:
    """(part, whole) of the watched sign, whose quotient is compared with :func:`promotion_limit`.

    Two numbers rather than their quotient, so that those of several ranks can be added up.

    :param low: `x` as its low format rounds it.
    :param threshold: from which magnitude on values overflow.
    """
    whole = (x.detach(), low.detach())
    # What is compared on the way is as large as `x`; a graph writes none of it down.
    pairs = (whole,) if is_traced() else chunks.paired_chunks(*whole)
    signals = [_signal(promotion, before.float(), after, threshold) for before, after in pairs]
    if len(signals) == 1:
        return signals[0]
    parts, sizes = zip(*signals, strict=True)
    return torch.stack(parts).sum(), torch.stack(sizes).sum()


def _signal(promotion: Promotion, before: Tensor, low: Tensor, threshold: float | Tensor) -> tuple[Tensor, Tensor]:
    if promotion.measure == "error":
        return (low.float() - before).square().sum(), before.square().sum()
    is_overflow = promotion.measure == "overflow"
    bad = before.abs() >= threshold if is_overflow else (low == 0) & (before != 0)
    count = bad.sum().float()
    return count, torch.full_like(count, before.numel())


def promotion_limit(promotion: Promotion) -> float:
    """What the quotient of :func:`promotion_signal` must reach: an error is compared by its square."""
    return promotion.limit**2 if promotion.measure == "error" else promotion.limit


@dataclass(frozen=True)
class Promoted:
    """A tensor that was promoted."""

    #: Such as ``layer1.0.conv1/conv2d.0:activation``.
    site: str
    #: The first step with its new quantizer, counted from 0.
    step: int
    #: overflow, underflow or error.
    measure: str
    #: What was reached.
    share: float
    #: The new quantizer; None where the tensor is left alone.
    target: QuantizerSpec | None

    @property
    def to(self) -> str:
        """The new quantizer in words."""
        return "unrounded" if self.target is None else str(self.target)

    def __str__(self) -> str:
        return f"{self.site}: {self.to} from step {self.step} on ({self.measure} {self.share:.3g})"


#: Columns of a table of promotions.
PROMOTION_COLUMNS: dict[str, Callable[[Promoted], Any]] = {
    "site": lambda promoted: promoted.site,
    "step": lambda promoted: promoted.step,
    "to": lambda promoted: promoted.to,
    "measure": lambda promoted: promoted.measure,
    "share": lambda promoted: promoted.share,
}


@dataclass(frozen=True, eq=False)
class RoundingOp:
    """What a plan does to one tensor of an operation: immutable, and the value that compiled graphs refer to.

    A graph holds its :attr:`key`, a text that is equal for equal roundings in equal blocks, so that these share
    compiled code; :func:`op_of_key` finds the operation as long as a model uses it.
    """

    spec: QuantizerSpec
    #: The tensor, such as ``weight`` or ``fprop.x``. Wire format: random bits depend on it.
    place: str
    #: The operation, such as ``conv2d``.
    op: str
    mutable_format: MutableFormat | None = None
    #: The row of the module's table that holds the format, where it may change.
    row: int = 0
    #: Whether statistics are kept.
    watched: bool = False
    #: In packed execution: rounded tensors are saved in the format's own bits.
    is_packed: bool = False
    #: In native execution: a compiled graph goes by way of the format's codes, so that it can save these.
    keeps_codes: bool = False
    #: In packed execution: the format that `mutable_format` stands for at the moment.
    stored_format: Format | None = None
    #: Whether the module's record has rows for the tensor.
    has_records: bool = True

    # Derived once. Not read from the spec when needed: a compiled graph would then hold only for operations that share
    # their spec.
    is_stochastic: bool = field(init=False)
    uses_mean_range: bool = field(init=False)
    #: Whether the scale comes from past steps.
    is_delayed: bool = field(init=False)
    mutable_kind: str | None = field(init=False)
    promotion: Promotion | None = field(init=False)
    #: What rounds a promoted tensor; None where it is left alone, or where nothing is promoted.
    higher: RoundingOp | None = field(init=False)
    #: What rounds in evaluation at the highest bits of a schedule, whatever the bits of the moment.
    top: RoundingOp | None = field(init=False)
    #: Code of the user's own that rounds, and the rounding that it is handed.
    function: Callable[..., Any] | None = field(init=False)
    inner: RoundingOp | None = field(init=False)
    #: The values that may come out, where these are always the same ones.
    grid: str | None = field(init=False)
    #: Whether random bits are drawn, before a promotion or after it.
    draws: bool = field(init=False)
    #: Whether something is remembered of the tensors that are rounded here.
    observes: bool = field(init=False)
    #: Equal for operations that may share a compiled graph.
    key: str = field(init=False)
    _quantizers: dict[int, Quantizer] = field(init=False, repr=False)
    #: Types of tensors that the quantizer was found to serve.
    _checked_dtypes: set[torch.dtype] = field(init=False, repr=False, default_factory=set)
    #: The operation that graphs with this key are traced with; held, so that it lives as long as this one.
    _representative: RoundingOp = field(init=False, repr=False)

    def __post_init__(self) -> None:
        spec, promotion = self.spec, self.spec.promote
        higher = top = None
        if promotion is not None and promotion.target is not None:
            higher = RoundingOp(promotion.target, self.place, self.op, is_packed=self.is_packed)
        top_spec = spec.at_the_top() if spec.eval == "top" else None
        if top_spec is not None:
            top = RoundingOp(top_spec, self.place, self.op, has_records=False)
        function = None if spec.function is None else spec.function.target
        inner = None if function is None else replace(self, spec=replace(spec, function=None))
        is_stochastic = spec.rounding == "stochastic"
        is_scaled = spec.scale is not None or isinstance(spec.target, BlockFormat)
        is_fixed = self.mutable_format is None and promotion is None
        uses_mean_range, is_delayed = spec.eval == "ema", spec.history is not None
        derived: dict[str, Any] = {
            "is_stochastic": is_stochastic,
            "uses_mean_range": uses_mean_range,
            "is_delayed": is_delayed,
            "mutable_kind": None if self.mutable_format is None else self.mutable_format.kind,
            "promotion": promotion,
            "higher": higher,
            "top": top,
            "function": function,
            "inner": inner,
            "grid": spec.target.name
            if is_fixed and not is_scaled and function is None and spec.rotate is None
            else None,
            "draws": is_stochastic or (higher is not None and higher.is_stochastic),
            "observes": self.watched or uses_mean_range or is_delayed or promotion is not None,
            "_quantizers": {dims: resolve(spec, self.place, self.op, dims, self.mutable_format) for dims in range(7)},
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "key", self._make_key())
        object.__setattr__(self, "_representative", _OPS.setdefault(self.key, self))

    def _make_key(self) -> str:
        """A digest of all that a graph depends on.

        A format that lies in a table is no part of the graph, so plans that differ in their schedules share graphs. In
        packed execution codes have the width of the moment, so another format is another graph.
        """
        is_mutable = self.mutable_format is not None
        top = None if self.top is None else self.top.spec
        spec: Any = (self.spec.without_width, top) if is_mutable and not self.is_packed else self.spec
        width = None if self.stored_format is None else self.stored_format.name
        parts = (spec, self.place, self.op, is_mutable, self.row, self.watched, self.is_packed, self.keeps_codes, width)
        # Names of the user's own say little: compiled code that torch stores on disk depends on what they stand for.
        own = registered_format(self.spec.target.name), None if self.function is None else id(self.function)
        named = (*parts, self.has_records) if own == (None, None) else (*parts, self.has_records, own)
        digest = hashlib.blake2b(repr(named).encode(), digest_size=16).hexdigest()
        return f"{self.op} {self.place} {digest}"

    @cached_property
    def facts(self) -> Hashable:
        """All that tracing reads of it, see :mod:`bitplan.compiler.tracing`."""
        higher = None if self.higher is None else self.higher.key
        finer = tuple(is_finer(self.spec.target, dtype) for dtype in (torch.bfloat16, torch.float16))
        return self.key, self.spec.eval, finer, self.promotion is None, higher

    def after_promotion(self, context: OpContext) -> RoundingOp | None:
        """What rounds the tensor: this, or where packed execution has promoted it, what it was promoted to."""
        if self.promotion is None or not context.is_promoted(self.place):
            return self
        return self.higher

    def round(self, x: Tensor, context: OpContext, weight_key: Tensor | None = None) -> Tensor:
        """`x` rounded; the gradient passes straight through.

        A weight brings the key of its parameter, so that every use of it sees the same bits.
        """
        if is_distributed(x):
            if self.inner is not None:
                raise PlanError(
                    f"{self.op} {self.place}: a quantizer of your own is given whole tensors, and this one is split "
                    f"over processes: keep it out of layers under tensor parallelism."
                )
            return rounded_distributed(
                x,
                lambda shard, ranks: self.round(shard, context.of_shard(ranks), weight_key),
                lambda dims: self._needs_whole(x, dims),
            )
        if self.inner is not None:
            return self._call_function(x, context, weight_key)
        if self.top is not None and not context.training:
            return self.top.round(x, context, weight_key)
        if self.grid is not None and self.changes_nothing_in(x):
            return x
        if self.rotates:
            x = self._rotated(x)
        traced = is_traced()
        if self.is_packed and not traced:
            with chunked_on_gpu():
                return self._round_and_mark(x, context, weight_key)
        if self.promotion is not None or (traced and (self.is_packed or self.keeps_codes)):
            return self._round_and_mark(x, context, weight_key)
        quantizer, bits, row, span, record = self._prepare(x, context, weight_key)
        if x.requires_grad and torch.is_grad_enabled():
            rounded: Tensor = transformable(StraightThrough).apply(x, quantizer, bits, row, span, None)
        else:
            rounded = quantizer.round_values(x if traced else x.detach(), bits, row, span)
        if record is not None and context.observing:
            self._observe(record, quantizer, x, rounded, rounded, row, span)
        return rounded if self.grid is None else mark_rounded(rounded, self.grid)

    @property
    def rotates(self) -> bool:
        """Whether the operand is rotated before it is rounded; its product is that of both operands rotated."""
        return self.spec.rotate is not None

    def _rotated(self, x: Tensor) -> Tensor:
        if is_traced_below_dynamo() and needs_shapes_only(x):
            return x
        rotation = rotation_of(self.spec, self.place, self.op, x.dim())
        return x if rotation is None or not x.numel() else rotation.apply(x)

    @property
    def learns(self) -> bool:
        """Whether a class rounds, whose objects may have parameters: there is one for each tensor."""
        return isinstance(self.function, type)

    def _call_function(self, x: Tensor, context: OpContext, weight_key: Tensor | None) -> Tensor:
        """What the user's own code makes of `x`; autograd follows it."""
        assert self.inner is not None
        assert self.function is not None
        function = context.quantizer_module(self, x) if self.learns else self.function
        rounded = function(x, PlanQuantizer(self.inner, context, weight_key))
        if not isinstance(rounded, Tensor) or rounded.shape != x.shape or rounded.dtype != x.dtype:
            actual = (
                f"{tuple(rounded.shape)} {rounded.dtype}" if isinstance(rounded, Tensor) else type(rounded).__name__
            )
            raise QuantizeError(
                f"{self.spec.function} returned {actual} for a tensor {tuple(x.shape)} {x.dtype}: return one of the "
                f"same shape and dtype."
            )
        return rounded

    def _round_and_mark(self, x: Tensor, context: OpContext, weight_key: Tensor | None) -> Tensor:
        """The same for packed execution, where the values are marked as rounded, and for promotion."""
        quantizer, bits, row, span, record = self._prepare(x, context, weight_key)
        if self.is_packed or (self.keeps_codes and is_traced()):
            rounded = low = self._round_to_codes(quantizer, x, bits, row, span)
        elif self.promotion is None or record is None:
            rounded = low = straight_through(quantizer, x, bits, row, span)
        else:
            either = Either(quantizer, lambda x: self._round_promoted(x, context, weight_key), record[PROMOTED])
            rounded = straight_through(either, x, bits, row, span)
            low = rounded if either.low_values is None else either.low_values
        if record is not None and context.observing:
            self._observe(record, quantizer, x, rounded, low, row, span)
        return mark_rounded(rounded, self.grid)

    def encode(self, x: Tensor, context: OpContext, weight_key: Tensor | None = None) -> tuple[Encoded, Quantizer]:
        """`x` as elements and scales, for low-precision matrix units; without a gradient."""
        if self.top is not None and not context.training:
            return self.top.encode(x, context, weight_key)
        if self.rotates:
            x = self._rotated(x)
        quantizer, bits, row, span, record = self._prepare(x, context, weight_key)
        encoded = quantizer.encode(x.detach(), bits, row, span)
        if record is not None and context.observing:
            rounded = quantizer.decode(encoded, x)
            self._observe(record, quantizer, x, rounded, rounded, row, span)
        return encoded, quantizer

    def rounds_value_by_value(self, context: OpContext) -> bool:
        """Whether rounding a value depends on that value alone, and nothing is counted: it can be done in place."""
        is_fixed = self.stored_format is None and self.mutable_kind is None
        is_scaled = self.spec.scale is not None or (is_fixed and isinstance(self.spec.target, BlockFormat))
        is_counted = self.observes or self.promotion is not None
        is_simple = not (is_scaled or self.is_stochastic or is_counted or self.rotates) and self.function is None
        return is_fixed and is_simple and (self.top is None or context.training)

    def quantizer_of(self, x: Tensor) -> Quantizer:
        """The quantizer for tensors with as many dimensions as `x` has."""
        quantizer = self._quantizers.get(x.dim())
        if quantizer is None:
            quantizer = resolve(self.spec, self.place, self.op, x.dim(), self.mutable_format)
        if x.dtype not in self._checked_dtypes:
            quantizer.check(x)
            self._checked_dtypes.add(x.dtype)
        return quantizer

    def _prepare(
        self, x: Tensor, context: OpContext, weight_key: Tensor | None
    ) -> tuple[Quantizer, Tensor | None, Tensor | None, Span | None, Tensor | None]:
        """The quantizer, its random bits, the row of a format that may change, a range from the past, and the row of
        the record."""
        if context.split_over is not None and not context.knows_split:
            context = self._context_of_plain(x, context)
        quantizer = self.quantizer_of(x)
        bits: Tensor | None = None
        if self.is_stochastic and is_traced_below_dynamo() and needs_shapes_only(x):
            bits = torch.empty_like(x, dtype=torch.int32)
        elif self.is_stochastic:
            assert context.table is not None
            first, second = _salt(place_key(context.salt if weight_key is None else "", self.place))
            key = context.table[0] if weight_key is None else weight_key
            bits = bits_of_key(x, key[0] ^ first, key[1] ^ second)
        row = None if self.mutable_kind is None else self.format_row(context)
        record: Tensor | None = None
        span: Span | None = None
        if self.observes:
            record, span = self.remembered(context)
            if record is not None and self.uses_mean_range and not context.training:
                span = mean_range(record, x)
        if context.split_over is not None and not isinstance(span, tuple):
            span = self._span_over(context.split_over, quantizer, x, span)
        return quantizer, bits, row, span, record

    def _context_of_plain(self, x: Tensor, context: OpContext) -> OpContext:
        """The context for a plain tensor beside tensor parallelism; raise where it must be known whether it is a shard.

        A weight is whole, and so is the axis that a product sums over.
        """
        if self.place in ("weight", "grad_weight") or self.place.endswith(".w"):
            return context.of_shard(None)
        scaling = self.quantizer(x.dim()).scaling
        is_tile = scaling is not None and isinstance(scaling.block, tuple) and scaling.block[0] > 1
        has_summed_axis = self.place in SLOTS and scaling is not None and scaling.granularity in ("vector", "block")
        if self.is_stochastic or ((is_tile or not has_summed_axis) and self._needs_whole(x, tuple(range(x.dim())))):
            raise PlanError(
                f"{self.place} of {context.site} is rounded stochastically or with scales for parts of it, and tensor "
                f"parallelism may have split it, which a plain tensor does not say: parallelize with "
                f"use_local_output=False, or give {self.op} a scale for the tensor and rounding to nearest."
            )
        return context

    def _needs_whole(self, x: Tensor, dims: tuple[int, ...]) -> bool:
        """Whether a tensor that is split along these dimensions must be gathered to be rounded.

        Not if one number, its amax, is all that a shard needs to know of the others.
        """
        if self.higher is not None and self.higher._needs_whole(x, dims):
            return True
        quantizer = self.quantizer(x.dim())
        scaling = quantizer.scaling
        if self.is_stochastic or self.rotates or isinstance(quantizer.format, BlockFormat):
            return True
        if scaling is None or scaling.granularity == "tensor":
            return False
        return scaling.granularity == "block" or not set(dims).isdisjoint(reduced_dims(x, scaling))

    def _span_over(self, ranks: Ranks, quantizer: Quantizer, x: Tensor, span: Tensor | None) -> Span | None:
        """The range of the whole tensor, of which `x` is a shard; `span` is that of past steps, if they decide."""
        if quantizer.scaling is None or quantizer.scaling.granularity != "tensor" or not x.numel():
            return span
        least, largest = torch.aminmax(x.detach())
        extremes = ranks.largest(torch.stack((largest, -least)))
        if quantizer.scaling.range == "minmax":
            return -extremes[1], extremes[0]
        amax = extremes.amax()
        return amax if span is None else torch.where(span > 0, span, amax)

    def quantizer(self, dims: int) -> Quantizer:
        """The quantizer of a tensor with that number of dimensions."""
        quantizer = self._quantizers.get(dims)
        return resolve(self.spec, self.place, self.op, dims, self.mutable_format) if quantizer is None else quantizer

    def format_row(self, context: OpContext) -> Tensor | None:
        """The row of a format that may change."""
        if self.mutable_kind is None:
            return None
        assert context.table is not None
        row = context.table[self.row]
        return row.view(torch.float32) if self.mutable_kind == "int" else row

    def remembered(self, context: OpContext) -> tuple[Tensor | None, Tensor | None]:
        """The row of the record, and where past steps decide the scale, the magnitude for which it makes room."""
        record, history_max = context.record, context.amax_history_max
        at = context.record_row(self)
        if record is None or at is None or at >= len(record):
            return None, None  # or a copy of the model that was made before the site was met
        if not self.is_delayed or history_max is None or at >= len(history_max):
            return record[at], None
        return record[at], history_max[at]

    def _observe(
        self,
        record: Tensor,
        quantizer: Quantizer,
        x: Tensor,
        rounded: Tensor,
        low: Tensor,
        row: Tensor | None,
        span: Span | None,
    ) -> None:
        """Write down what is remembered of a tensor; `low` is what its own format made of it, before a promotion."""
        if self.uses_mean_range:
            observe_range(record, x)
        if self.is_delayed and x.numel():
            observe_amax(record, amax_of(x.detach(), tuple(range(x.dim()))).reshape(()))
        if self.watched:
            largest = (
                quantizer.max_delayed_magnitude(span, row) if isinstance(span, Tensor) else quantizer.max_magnitude(row)
            )
            observe_rounding(record, x, rounded, largest)
        if self.promotion is not None and x.numel():
            observe_signal(record, *promotion_signal(self.promotion, x, low, quantizer.overflow_threshold(row)))

    def _round_promoted(self, x: Tensor, context: OpContext, weight_key: Tensor | None) -> Tensor:
        return x if self.higher is None else self.higher.round(x.detach(), context, weight_key)

    def _round_to_codes(
        self,
        quantizer: Quantizer,
        x: Tensor,
        bits: Tensor | None,
        row: Tensor | None,
        span: Span | None,
    ) -> Tensor:
        """`x` rounded, in a form that can be saved in few bits."""
        target = quantizer.format if self.stored_format is None else self.stored_format
        assert not isinstance(target, MutableFormat)
        if is_traced():
            is_small = is_smaller(target, x.dtype) and not is_cast_small(target, x.device)
            fixed = replace(quantizer, format=target)
            between = (lambda encoded: stored(encoded, fixed, x)) if is_small else None
            return straight_through(quantizer, x, bits, row, span, between)
        scales: list[Tensor] = []

        def copy_scales(encoded: Encoded) -> Encoded:
            scales[:] = encoded.scales
            return encoded

        rounded = straight_through(quantizer, x, bits, row, span, copy_scales)
        if target is not quantizer.format:
            quantizer = replace(quantizer, format=target)
        return mark_rounded(rounded, self.grid, quantizer, scales)

    def changes_nothing_in(self, x: Tensor) -> bool:
        """Whether `x` is known to be rounded already. What is watched is rounded all the same, to be counted."""
        return self.grid is not None and not self.watched and lies_on(x, self.grid)


class PlanQuantizer:
    """The plan's quantizer for one tensor, as functions of the user's own are handed it: ``quantize(x)`` rounds.

    With its scale, random bits and statistics, and with a gradient that passes straight through.
    """

    def __init__(self, op: RoundingOp, context: OpContext, weight_key: Tensor | None) -> None:
        self._op = op
        self._context = context
        self._weight_key = weight_key

    def __call__(self, x: Tensor) -> Tensor:
        return self._op.round(x, self._context, self._weight_key)

    @property
    def format(self) -> Format:
        """The plan's format; where a schedule moves its bits, that of the highest."""
        return self._op.spec.target

    @property
    def quantizer(self) -> QuantizerSpec:
        """The quantizer as the plan has it, without the function."""
        return self._op.spec


#: Key -> the operation that graphs are traced with. Holds none alive: models do.
_OPS: weakref.WeakValueDictionary[str, RoundingOp] = weakref.WeakValueDictionary()


def op_of_key(key: str) -> RoundingOp:
    """The operation that compiled code refers to by this key."""
    return _OPS[key]


@lru_cache(maxsize=4096)
def _salt(site: str) -> tuple[int, int]:
    """Distinguishes one site of a module from another; mixed into the module's key."""
    return key_of(text_hash(site), 0)


class OpRounding:
    """What a plan does around one operation: a rounding for each of its tensors, and the state of the run there."""

    def __init__(
        self,
        decision: Decision,
        op: str,
        places: dict[str, RoundingOp],
        prepared: PreparedProduct | None = None,
        modules: QuantizerModules | None = None,
    ) -> None:
        """`prepared`: what the execution has worked out for the product; None: it is emulated.

        `modules`: the objects of the user's own classes that round, by site; those of the whole run.
        """
        self.op = op
        self.places = places
        self.prepared = prepared
        #: Whether the execution may compute the product.
        self.is_prepared = prepared is not None and prepared.is_for_product
        #: Rows of statistics and promotions: they grow while the run goes on.
        self.states = {place: OperandState() for place in places}
        #: Sites that ran eagerly, see :meth:`RunTables.add_rows`.
        self.met: set[str] = set()
        self.at_consumer = decision.grad_at == "consumer"
        #: Whether constants are rounded like activations.
        self.rounds_constants = decision.constants
        #: Operand -> the place that rounds it once for both of its products.
        self.shared = decision.shared
        self.has_slots = any(place in places for place in SLOTS)
        shared_slots = [slot for operand in self.shared for slot in OPERANDS[operand]]
        self.slots_apart = any(slot in places and slot not in shared_slots for slot in SLOTS)
        #: Whether operands are rotated, which not all products allow.
        self.rotates = any(op.rotates for op in places.values())
        self.rounds_weights = "weight" in places or "grad_weight" in places
        self.promotes = any(op.promotion is not None for op in places.values())
        self.uses_means = any(op.uses_mean_range for op in places.values())
        #: Whether a scale comes from past steps.
        self.delays = any(op.is_delayed for op in places.values())
        self.observes = self.promotes or self.uses_means or self.delays
        #: Whether all results are promoted when the largest is. Ranges belong to one tensor, and so do their records.
        self.promotes_together = self.promotes and not self.uses_means and not self.delays
        self.needs_key = any(op.draws for op in places.values())
        self.modules = QuantizerModules() if modules is None else modules
        #: Whether each of several weights needs a context of its own.
        self.tells_weights_apart = self.promotes or any(op.learns for op in places.values())
        self._check_learning()

    def _check_learning(self) -> None:
        for place, op in self.places.items():
            is_shared = place in SLOTS and not self.slots_apart and OPERAND_OF_SLOT[place].tensor in ("x", "w")
            if op.learns and not is_shared and place not in ("weight", "activation"):
                raise PlanError(
                    f"{op.spec.function} is a class, which learns from the gradient of what it returns, and there is "
                    f"none for {place}: use it for weight, activation, or x and w beside dy, or name a function."
                )

    def state_of(self, place: str) -> OperandState:
        return self.states[place]

    def set_stored_formats(self, format_in_row: Callable[[int], Format]) -> None:
        """Formats in tables were changed by hand: in packed execution other roundings, with graphs of their own."""
        for place, op in self.places.items():
            if op.is_packed and op.mutable_format is not None:
                self.places[place] = replace(op, stored_format=format_in_row(op.row))

    def facts(self) -> Hashable:
        """All that tracing reads of it, see :mod:`bitplan.compiler.tracing`."""
        prepared = None if self.prepared is None else self.prepared.facts()
        places = tuple((place, op.facts, self.states[place].facts()) for place, op in self.places.items())
        return self.at_consumer, self.rounds_constants, tuple(self.shared.items()), prepared, places

    def applies(self, place: str, training: bool) -> bool:
        op = self.places.get(place)
        return op is not None and (training or op.spec.eval != "off")

    def rounds_output(self, training: bool) -> bool:
        return self.applies("activation", training) or "grad_activation" in self.places


def is_finer(target: Format, dtype: torch.dtype) -> bool:
    """Whether a cast to `dtype` would round a tensor of that format once more."""
    if isinstance(target, IntFormat):
        return target.max > 2.0 / torch.finfo(dtype).eps
    return isinstance(target, FloatFormat) and target.epsilon < torch.finfo(dtype).eps


def packs_eagerly(*actions: RoundingOp | None) -> bool:
    """Whether execution is packed, and eager: compiled, the partitioner of the graph decides what is kept."""
    return not is_traced() and any(action is not None and action.is_packed for action in actions)
