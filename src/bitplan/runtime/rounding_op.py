"""What a plan does in one place: the actions that :mod:`bitplan.runtime.autograd` applies.

A :class:`PlaceAction` is one quantizer in one place of one operation; an :class:`Action` is all that a plan decided for
an operation, ready to be applied.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bitplan.compiler.tracing import is_traced
from bitplan.errors import QuantizeError
from bitplan.executions.native.float8_cast import FORMATS, READ
from bitplan.executions.native.paths import Passes, Terms
from bitplan.executions.packed.saved_tensors import is_smaller, note_rounded
from bitplan.gemm.axes import resolve
from bitplan.numerics import chunks as tensor_parts
from bitplan.numerics.chunks import sparing_memory
from bitplan.numerics.dtypes import is_cast_small
from bitplan.numerics.formats import BlockFormat, FloatFormat, Format, IntFormat
from bitplan.numerics.mutable_format import LiveFormat
from bitplan.numerics.noise import bits_of_key, key_of
from bitplan.numerics.packing import stored
from bitplan.numerics.quantizer import Between, Encoded, Quantizer, Span, straight_through
from bitplan.numerics.scaling import amax_of
from bitplan.numerics.wire_format import place_key, text_hash
from bitplan.plans import OPERANDS, SLOTS, Decision
from bitplan.plans.spec import Promotion, QuantizerSpec
from bitplan.runtime.op_context import Here
from bitplan.runtime.statistics import PROMOTED, mean_range, observe_amax, observe_range, observe_rounding, observe_sign

# --- Tensors that are known to lie on a format's grid, so that rounding them onto it again would change no bit


_GRID_TAG = "_bitplan_grid"


def mark(tensor: Tensor, grid: str | None) -> Tensor:
    """Note that every value of `tensor` lies on `grid` (None: nothing is known)."""
    if grid is not None and not tensor.is_inference():
        setattr(tensor, _GRID_TAG, (grid, tensor._version, id(tensor)))  # a deep copy has another id
    return tensor


def lies_on(tensor: Tensor, grid: str | None) -> bool:
    """Whether rounding `tensor` onto `grid` is known to change nothing."""
    known = getattr(tensor, _GRID_TAG, None)
    return known is not None and grid is not None and bool(known == (grid, tensor._version, id(tensor)))


def mark_copy(copy: Tensor, original: Tensor) -> None:
    """Note of a tensor that has just received all the values of `original` what is known of that one."""
    known = getattr(original, _GRID_TAG, None)
    if known is not None and copy.dtype == original.dtype and lies_on(original, known[0]):
        mark(copy, known[0])


# --- Promotion at work: the sign that is watched at a tensor, and the choice between its two quantizers


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


def sign_of(promotion: Promotion, x: Tensor, low: Tensor, threshold: float | Tensor) -> tuple[Tensor, Tensor]:
    """(part, whole) of the watched sign, whose quotient is compared with :func:`limit_of`.

    Two numbers rather than their quotient, so that those of several ranks can be added up.

    :param low: `x` as its low format rounds it.
    :param threshold: from which magnitude on values overflow.
    """
    whole = (x.detach(), low.detach())
    # What is compared on the way is as large as `x`; a graph writes none of it down.
    pairs = (whole,) if is_traced() else tensor_parts.parts_of_both(*whole)
    signs = [_sign(promotion, before.float(), after, threshold) for before, after in pairs]
    if len(signs) == 1:
        return signs[0]
    parts, sizes = zip(*signs, strict=True)
    return torch.stack(parts).sum(), torch.stack(sizes).sum()


def _sign(promotion: Promotion, before: Tensor, low: Tensor, threshold: float | Tensor) -> tuple[Tensor, Tensor]:
    if promotion.measure == "error":
        return (low.float() - before).square().sum(), before.square().sum()
    is_overflow = promotion.measure == "overflow"
    bad = before.abs() >= threshold if is_overflow else (low == 0) & (before != 0)
    count = bad.sum().float()
    return count, torch.full_like(count, before.numel())


def limit_of(promotion: Promotion) -> float:
    """What the quotient of :func:`sign_of` must reach: an error is compared by its square."""
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


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum of what all processes of a training hold; `values` itself where there is one process."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        values = values.contiguous()
        dist.all_reduce(values)
    return values


class PlaceAction:
    """One quantizer in one place of one operation."""

    def __init__(self, spec: QuantizerSpec, place: str, op: str, live: LiveFormat | None = None) -> None:
        self.spec = spec
        self.place = place
        self.op = op
        # Not asked of the spec at work: a compiled graph would be one for places that share their spec, only.
        self.is_stochastic = spec.rounding == "stochastic"
        self.uses_mean_range = spec.eval == "ema"
        #: Whether the scale comes from past steps.
        self.is_delayed = spec.history is not None
        self.live = live
        self.live_kind = None if live is None else live.kind
        #: The row of the module's table that holds the format, where it may change.
        self.row = 0
        #: Site -> row of the module's record, for what is observed.
        self.records: dict[str, int] = {}
        self.watched = False
        #: Set in packed execution: what was rounded here is stored in its format's own bits.
        self.is_packed = False
        #: Set in native execution: a compiled graph goes by way of the format's codes, so that it can keep these.
        self.keeps_codes = False
        #: The format that `live` stands for at the moment.
        self.format_now: Callable[[], Format] | None = None
        #: Among all that were ever made; equal ones in equal blocks share one, and with it compiled code.
        self.number = -1
        self.promotion = spec.promote
        #: What a promoted tensor gets; None where it is left alone, or where nothing is promoted.
        self.higher: PlaceAction | None = None
        if spec.promote is not None and spec.promote.target is not None:
            self.higher = PlaceAction(spec.promote.target, place, op)
            self.higher.records = self.records
        #: In packed execution, the tensors that are promoted: site and part.
        self.promoted: dict[str, bool] = {}
        scaled = spec.scale is not None or isinstance(spec.target, BlockFormat)
        #: The values that may come out, where these are always the same ones.
        self.grid = None if scaled or live is not None or self.promotion is not None else spec.target.name
        top = spec.at_the_top() if spec.eval == "top" else None
        #: What evaluates at the highest bits of a schedule, whatever the bits of the moment.
        self.top = None if top is None else PlaceAction(top, place, op)
        self._resolved: dict[int, Quantizer] = {dims: resolve(spec, place, op, dims, live) for dims in range(7)}

    def settle(self) -> None:
        """Nothing will change any more but the records: take a number.

        In packed execution codes have the width of the moment, so another format is another number, and with it a
        graph of its own.
        """
        if self.higher is not None:
            self.higher.is_packed = self.is_packed
            self.higher.settle()
        width = self.format_now().name if self.is_packed and self.format_now is not None else None
        # A format that lies in a table is no part of the graph, so plans that differ in their schedules share graphs.
        top = None if self.top is None else self.top.spec
        spec = self.spec if self.live is None or self.is_packed else (self.spec.without_width, top)
        kept = (self.is_packed, self.keeps_codes, width)
        key = (spec, self.place, self.op, self.live is not None, self.row, self.watched, kept)
        if key not in _numbers:
            _numbers[key] = len(_settled)
            _settled.append(self._as_of_now())
        self.number = _numbers[key]

    def _as_of_now(self) -> PlaceAction:
        """What a graph is made with: the same, with the format that it has now."""
        if not self.is_packed or self.format_now is None:
            return self
        now = self.format_now()
        fixed = copy.copy(self)
        fixed.format_now = lambda: now
        return fixed

    def facts(self) -> Hashable:
        """All that tracing reads of it, see :mod:`bitplan.compiler.tracing`."""
        higher = None if self.higher is None else self.higher.number
        finer = tuple(is_finer(self.spec.target, dtype) for dtype in (torch.bfloat16, torch.float16))
        fixed = (self.number, self.spec.eval, finer, self.promotion is None, higher)
        return (*fixed, tuple(self.records.items()), tuple(self.promoted))

    @property
    def draws(self) -> bool:
        """Whether random bits are drawn, before a promotion or after it."""
        return self.is_stochastic or (self.higher is not None and self.higher.is_stochastic)

    @property
    def observes(self) -> bool:
        """Whether something is remembered of the tensors that are rounded here."""
        return self.watched or self.uses_mean_range or self.is_delayed or self.promotion is not None

    def now(self, here: Here) -> PlaceAction | None:
        """What rounds that tensor: this, or where it was promoted in packed execution, what it was promoted to."""
        if self.promotion is None or here.tensor not in self.promoted:
            return self
        return self.higher

    def round(self, x: Tensor, here: Here, weight_key: Tensor | None = None) -> Tensor:
        """`x` rounded; the gradient passes straight through.

        A weight brings the key of its parameter, so that every use of it sees the same bits.
        """
        if self.top is not None and not here.training:
            return self.top.round(x, here, weight_key)
        if self.changes_nothing_in(x):
            return x
        if not self.is_packed or is_traced():
            return self._rounded(x, here, weight_key)
        with sparing_memory():
            return self._rounded(x, here, weight_key)

    def _rounded(self, x: Tensor, here: Here, weight_key: Tensor | None) -> Tensor:
        quantizer, bits, row, span, record = self._prepared(x, here, weight_key)
        if self.is_packed or (self.keeps_codes and is_traced()):
            rounded = low = self._packed(quantizer, x, bits, row, span)
        elif self.promotion is None or record is None:
            rounded = low = straight_through(quantizer, x, bits, row, span)
        else:
            either = Either(quantizer, lambda x: self._promoted(x, here, weight_key), record[PROMOTED])
            rounded = straight_through(either, x, bits, row, span)
            low = rounded if either.low_values is None else either.low_values
        if record is not None and here.observing:
            self._observe(record, quantizer, x, rounded, low, row, span)
        return mark(rounded, self.grid)

    def encode(self, x: Tensor, here: Here, weight_key: Tensor | None = None) -> tuple[Encoded, Quantizer]:
        """`x` as elements and scales, for units that multiply these; without a gradient."""
        if self.top is not None and not here.training:
            return self.top.encode(x, here, weight_key)
        quantizer, bits, row, span, record = self._prepared(x, here, weight_key)
        encoded = quantizer.encode(x.detach(), bits, row, span)
        if record is not None and here.observing:
            rounded = quantizer.decode(encoded, x)
            self._observe(record, quantizer, x, rounded, rounded, row, span)
        return encoded, quantizer

    def is_plain_cast(self, x: Tensor, dtype: torch.dtype) -> bool:
        """Whether nothing but a scale of the whole tensor and rounding to nearest makes codes of that type of `x`."""
        if dtype not in FORMATS or x.dtype not in READ or self.is_stochastic or self.live_kind is not None:
            return False
        spec = self.spec
        is_rounding = spec.rounding == "nearest" and spec.overflow in (None, "saturate")
        is_watched = self.watched or self.uses_mean_range or self.promotion is not None
        return is_rounding and spec.scale in (None, "tensor") and not is_watched

    def _prepared(
        self, x: Tensor, here: Here, weight_key: Tensor | None
    ) -> tuple[Quantizer, Tensor | None, Tensor | None, Span | None, Tensor | None]:
        """The quantizer, its random bits, the row of a format that may change, a range from the past, and the row of
        the record."""
        dims = x.dim()
        known = self._resolved
        quantizer = known[dims] if dims in known else resolve(self.spec, self.place, self.op, dims, self.live)
        quantizer.check(x)
        bits = None
        if self.is_stochastic:
            assert here.table is not None
            first, second = _salt(place_key(here.salt if weight_key is None else "", self.place))
            key = here.table[0] if weight_key is None else weight_key
            bits = bits_of_key(x, key[0] ^ first, key[1] ^ second)
        row: Tensor | None = None
        if self.live_kind is not None:
            assert here.table is not None
            row = here.table[self.row]
            if self.live_kind == "int":
                row = row.view(torch.float32)
        record, reach = self.remembered(here)
        span: Span | None = reach
        if record is not None and self.uses_mean_range and not here.training:
            span = mean_range(record, x)
        return quantizer, bits, row, span, record

    def remembered(self, here: Here) -> tuple[Tensor | None, Tensor | None]:
        """The row of the record, and where past steps decide the scale, the magnitude for which it makes room."""
        record, reach = here.record, here.reach
        seen = here.seen if here.module is None else self.seen_at(here)
        if record is None or seen is None or seen >= len(record):
            return None, None  # or a copy of the model that was made before the site was met
        is_known = self.is_delayed and reach is not None and seen < len(reach)
        return record[seen], reach[seen] if is_known and reach is not None else None

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
            largest = quantizer.reach_of_scale(span, row) if isinstance(span, Tensor) else quantizer.reach(row)
            observe_rounding(record, x, rounded, largest)
        if self.promotion is not None and x.numel():
            observe_sign(record, *sign_of(self.promotion, x, low, quantizer.overflow_threshold(row)))

    def _promoted(self, x: Tensor, here: Here, weight_key: Tensor | None) -> Tensor:
        return x if self.higher is None else self.higher.round(x.detach(), here, weight_key)

    def _packed(
        self,
        quantizer: Quantizer,
        x: Tensor,
        bits: Tensor | None,
        row: Tensor | None,
        span: Span | None,
    ) -> Tensor:
        """`x` rounded, in a form that can be kept small."""
        target = quantizer.format if self.format_now is None else self.format_now()
        assert not isinstance(target, LiveFormat)
        if is_traced():
            is_small = is_smaller(target, x.dtype) and not is_cast_small(target, x.device)
            fixed = replace(quantizer, format=target)
            between = (lambda encoded: stored(encoded, fixed, x)) if is_small else None
            return straight_through(quantizer, x, bits, row, span, between)
        scales: list[Tensor] = []

        def look(encoded: Encoded) -> Encoded:
            scales[:] = encoded.scales
            return encoded

        rounded = straight_through(quantizer, x, bits, row, span, look)
        note_rounded(rounded, replace(quantizer, format=target), scales)
        return rounded

    def changes_nothing_in(self, x: Tensor) -> bool:
        """Whether `x` is known to be rounded already. What is watched is rounded all the same, to be counted."""
        return not self.watched and lies_on(x, self.grid)

    def seen_at(self, here: Here) -> int | None:
        """The row of the record for what is observed there."""
        seen = self.records.get(here.tensor) if here.record is not None else None
        if seen is None and here.observing and self.observes and torch.compiler.is_compiling():
            raise QuantizeError(
                f"compiled code cannot make room for what is observed at {here.site}: give attach() an example= batch."
            )
        return seen


_numbers: dict[Any, int] = {}

_settled: list[PlaceAction] = []


def _salt(site: str) -> tuple[int, int]:
    """What tells one site of a module from another, mixed into the module's key."""
    return key_of(text_hash(site), 0)


class Action:
    """What happens around one operation."""

    def __init__(self, decision: Decision, op: str, lives: Callable[[str], LiveFormat | None] = lambda _: None) -> None:
        """`lives` gives, for a place, the format that may change there."""
        self.op = op
        self.places = {
            place: PlaceAction(choice.quantizer, place, op, lives(place))
            for place, choice in decision.choices.items()
            if choice.quantizer is not None
        }
        self.at_consumer = decision.grad_at == "consumer"
        #: Operand -> the place that rounds it once for both of its products.
        self.shared = decision.shared
        #: In native execution: which pass runs on which unit.
        self.native: Passes = {}
        #: From where on that pays.
        self.terms = Terms()
        #: In native execution: whether codes of x are kept for a backward pass that is emulated.
        self.keeps_codes = False
        self.has_slots = any(place in self.places for place in SLOTS)
        shared_slots = [slot for operand in self.shared for slot in OPERANDS[operand]]
        self.slots_apart = any(slot in self.places and slot not in shared_slots for slot in SLOTS)
        self.promotes = any(action.promotion is not None for action in self.places.values())
        self.uses_means = any(action.uses_mean_range for action in self.places.values())
        #: Whether a scale comes from past steps.
        self.delays = any(action.is_delayed for action in self.places.values())
        self.observes = self.promotes or self.uses_means or self.delays
        #: Whether all results are promoted when the largest is. Ranges belong to one tensor, and so do their records.
        self.promotes_together = self.promotes and not self.uses_means and not self.delays
        #: Sites that were met, eagerly.
        self.met: set[str] = set()
        self.needs_key = any(action.draws for action in self.places.values())

    def facts(self) -> Hashable:
        """All that tracing reads of it, see :mod:`bitplan.compiler.tracing`."""
        native = tuple((key, tuple(units.items())) for key, units in self.native.items())
        places = tuple((place, action.facts()) for place, action in self.places.items())
        return self.at_consumer, tuple(self.shared.items()), native, self.terms, self.keeps_codes, places

    def applies(self, place: str, training: bool) -> bool:
        action = self.places.get(place)
        return action is not None and (training or action.spec.eval != "off")

    def rounds_output(self, training: bool) -> bool:
        return self.applies("activation", training) or "grad_activation" in self.places


def is_finer(target: Format, dtype: torch.dtype) -> bool:
    """Whether a cast to `dtype` would round a tensor of that format once more."""
    if isinstance(target, IntFormat):
        return target.max > 2.0 / torch.finfo(dtype).eps
    return isinstance(target, FloatFormat) and target.epsilon < torch.finfo(dtype).eps


def keeps_little(*actions: PlaceAction | None) -> bool:
    """Whether execution is packed, and eager: compiled, the partitioner of the graph decides what is kept."""
    return not is_traced() and any(action is not None and action.is_packed for action in actions)


def numbered(number: int) -> PlaceAction:
    """The action that took this number."""
    return _settled[number]
