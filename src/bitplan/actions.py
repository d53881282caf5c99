"""What autograd does with a rounded tensor: the two functions that round gradients, and the actions they carry.

A :class:`PlaceAction` is one quantizer in one place of one operation; an :class:`Action` is all that a plan decided for
an operation, ready to be applied.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.axes import resolve
from bitplan.errors import QuantizeError
from bitplan.formats import BlockFormat, Format
from bitplan.grids import lies_on, mark
from bitplan.keeping import is_smaller, note_copy, note_rounded
from bitplan.live import LiveFormat
from bitplan.noise import bits_of_key, key_of
from bitplan.observe import mean_range, observe_range, observe_rounding
from bitplan.packing import stored
from bitplan.plan import OPERANDS, SLOTS, Decision
from bitplan.plan.spec import QuantizerSpec
from bitplan.products import Product, slot_product
from bitplan.quantizer import Encoded, Quantizer, straight_through
from bitplan.sparing import Passes, sparing_relu
from bitplan.tables import RECORD, TABLE
from bitplan.torch_casts import is_cast_small
from bitplan.tracing import is_traced, taken_whole


class Here:
    """Where and when something is rounded: one operation in one call of a module."""

    #: The row of the record, where tracing has looked it up already.
    seen: int | None = None
    is_recorded = True

    def __init__(self, site: str, module: nn.Module) -> None:
        #: The operation and its number in the module: ``conv2d.0``.
        self.site = site
        #: What tells its random bits from those of others in the module.
        self.salt = site
        self.module: nn.Module | None = module
        self.training = module.training
        self.table = module._buffers.get(TABLE)
        self._record = module._buffers.get(RECORD)
        # Evaluation, and forwards that nothing will learn from, leave no trace in what was observed.
        self.observing = module.training and torch.is_grad_enabled()

    @property
    def record(self) -> Tensor | None:
        """Looked up late: eagerly it may have grown between the forward pass and the backward pass."""
        if not self.is_recorded:
            return None
        return self._record if self.module is None or is_traced() else self.module._buffers.get(RECORD)

    def unrecorded(self) -> Here:
        """This place for one more tensor in it, beside the one whose record is kept."""
        assert self.module is not None
        other = Here(self.site, self.module)
        other.is_recorded = other.observing = False
        return other

    def towards(self, consumer: Here) -> Here:
        """This place for what comes back from one of its consumers, with random bits of its own."""
        assert self.module is not None
        back = Here(self.site, self.module)
        back.salt = f"{self.site}>{consumer.site}"
        return back


class PlaceAction:
    """One quantizer in one place of one operation."""

    def __init__(self, spec: QuantizerSpec, place: str, op: str, live: LiveFormat | None = None) -> None:
        self.spec = spec
        self.place = place
        self.op = op
        self.is_stochastic = spec.rounding == "stochastic"
        self.live = live
        self.live_kind = None if live is None else live.kind
        #: The row of the module's table that holds the format, where it may change.
        self.row = 0
        #: Site -> row of the module's record, for what is observed.
        self.records: dict[str, int] = {}
        self.watched = False
        #: Set in packed execution: what was rounded here is stored in its format's own bits.
        self.is_packed = False
        #: The format that `live` stands for at the moment.
        self.format_now: Callable[[], Format] | None = None
        #: Among all that were ever made; equal ones in equal blocks share one, and with it compiled code.
        self.number = -1
        scaled = spec.scale is not None or isinstance(spec.target, BlockFormat)
        #: The values that may come out, where these are always the same ones.
        self.grid = None if scaled or live is not None else spec.target.name
        self._resolved: dict[int, Quantizer] = {dims: resolve(spec, place, op, dims, live) for dims in range(7)}

    def settle(self) -> None:
        """Nothing will change any more but the records: take a number."""
        key = (self.spec, self.place, self.op, self.live is not None, self.row, self.watched, self.is_packed)
        if key not in _numbers:
            _numbers[key] = len(_settled)
            _settled.append(self)
        self.number = _numbers[key]

    @property
    def uses_mean_range(self) -> bool:
        return self.spec.eval == "ema"

    def round(self, x: Tensor, here: Here, weight_key: Tensor | None = None) -> Tensor:
        """`x` rounded; the gradient passes straight through.

        A weight brings the key of its parameter, so that every use of it sees the same bits.
        """
        if self.changes_nothing_in(x):
            return x
        dims = x.dim()
        known = self._resolved
        quantizer = known[dims] if dims in known else resolve(self.spec, self.place, self.op, dims, self.live)
        quantizer.check(x)
        bits = None
        if self.is_stochastic:
            assert here.table is not None
            first, second = _salt(f"{here.salt if weight_key is None else ''}:{self.place}")
            key = here.table[0] if weight_key is None else weight_key
            bits = bits_of_key(x, key[0] ^ first, key[1] ^ second)
        row = span = None
        if self.live_kind is not None:
            assert here.table is not None
            row = here.table[self.row]
            if self.live_kind == "int":
                row = row.view(torch.float32)
        record = here.record
        seen = here.seen if here.module is None else self.seen_at(here)
        if record is None or (seen is not None and seen >= len(record)):
            seen = None  # a copy of the model that was made before the site was met
        if seen is not None and record is not None and self.uses_mean_range and not here.training:
            span = mean_range(record[seen], x)
        if not self.is_packed:
            rounded = straight_through(quantizer, x, bits, row, span)
        else:
            rounded = self._packed(quantizer, x, bits, row, span)
        if seen is not None and record is not None and here.observing:
            if self.uses_mean_range:
                observe_range(record[seen], x)
            if self.watched:
                observe_rounding(record[seen], x, rounded, quantizer.reach(row))
        return mark(rounded, self.grid)

    def _packed(
        self,
        quantizer: Quantizer,
        x: Tensor,
        bits: Tensor | None,
        row: Tensor | None,
        span: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """`x` rounded, in a form that can be kept small."""
        target = quantizer.format if self.format_now is None else self.format_now()
        assert not isinstance(target, LiveFormat)
        if is_traced():
            is_small = is_smaller(target, x.dtype) and not is_cast_small(target, x.device)
            between = (lambda encoded: stored(encoded, target)) if is_small else None
            return straight_through(quantizer, x, bits, row, span, between)
        scales: list[Tensor] = []

        def look(encoded: Encoded) -> Encoded:
            scales.extend(encoded.scales)
            return encoded

        rounded = straight_through(quantizer, x, bits, row, span, look)
        note_rounded(rounded, replace(quantizer, format=target), scales)
        return rounded

    def changes_nothing_in(self, x: Tensor) -> bool:
        """Whether `x` is known to be rounded already. What is watched is rounded all the same, to be counted."""
        return not self.watched and lies_on(x, self.grid)

    def seen_at(self, here: Here) -> int | None:
        """The row of the record for what is observed there."""
        seen = self.records.get(here.site) if here.record is not None else None
        if seen is None and here.observing and (self.watched or self.uses_mean_range) and torch.compiler.is_compiling():
            raise QuantizeError(
                f"compiled code cannot make room for what is observed at {here.site}: give attach() an example= batch."
            )
        return seen


_numbers: dict[Any, int] = {}
_settled: list[PlaceAction] = []


def _salt(site: str) -> tuple[int, int]:
    """What tells one site of a module from another, mixed into the module's key."""
    return key_of(zlib.crc32(site.encode()), 0)


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
        shares = {place: choice.share for place, choice in decision.choices.items()}
        #: Operand -> the place that rounds it once for both of its products.
        self.shared = {
            operand: pair[0]
            for operand, pair in OPERANDS.items()
            if shares[pair[0]] is not None and shares[pair[0]] == shares[pair[1]]
        }
        self.has_slots = any(place in self.places for place in SLOTS)
        shared_slots = [slot for operand in self.shared for slot in OPERANDS[operand]]
        self.slots_apart = any(slot in self.places and slot not in shared_slots for slot in SLOTS)
        self.observes = any(action.uses_mean_range for action in self.places.values())
        #: Sites that were met, eagerly.
        self.met: set[str] = set()
        self.needs_key = any(action.is_stochastic for action in self.places.values())

    def applies(self, place: str, training: bool) -> bool:
        action = self.places.get(place)
        return action is not None and (training or action.spec.eval != "off")

    def rounds_output(self, training: bool) -> bool:
        return self.applies("activation", training) or "grad_activation" in self.places


class Slots:
    """The rounding of the six slots of one product, as :class:`SlotProduct` asks for it."""

    def __init__(self, chosen: dict[str, tuple[PlaceAction, Here]], weight_key: Tensor | None) -> None:
        self.chosen = chosen
        self.weight_key = weight_key
        #: Whether x is kept as the weight's gradient wants it, rounded and packed, rather than as it came.
        self.keeps_rounded_x = "wgrad.x" in chosen and _keeps_little(chosen["wgrad.x"][0])

    def round(self, slot: str, tensor: Tensor) -> Tensor:
        if slot not in self.chosen:
            return tensor
        action, here = self.chosen[slot]
        return action.round(tensor.detach(), here, self.weight_key if slot.endswith(".w") else None)


class RoundedGradient(torch.autograd.Function):
    """The tensor itself forward; backward its gradient, rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, action: PlaceAction, here: Here) -> Tensor:
        ctx.action, ctx.here = action, here
        y = x.clone()  # not a view: the caller may go on to change it in place
        if _keeps_little(action):
            note_copy(y, x)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.action.round(grads[0], ctx.here), None, None


class RoundedBothWays(torch.autograd.Function):
    """The rounded tensor forward, its rounded gradient backward: one copy less than one after the other."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        forward: PlaceAction,
        backward: PlaceAction,
        here: Here,
        back: Here,
        weight_key: Tensor | None,
    ) -> Tensor:
        ctx.action, ctx.here = backward, back
        return forward.round(x.detach(), here, weight_key)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.action.round(grads[0], ctx.here), None, None, None, None, None


class GridRelu(torch.autograd.Function):
    """ReLU of a tensor that lies on the grid already: so does its positive part, and so does a rounded gradient's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backward: PlaceAction, back: Here) -> Tensor:
        ctx.action, ctx.here = backward, back
        y = torch.relu(x)
        if _keeps_little(backward):
            ctx.passes = Passes(y)
            note_copy(y, x)
            ctx.passes.wait_for_copy(y)
        else:
            ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rounded = ctx.action.round(grads[0], ctx.here)
        if ctx.saved_tensors:
            passed = torch.ops.aten.threshold_backward(rounded, ctx.saved_tensors[0], 0)
        else:
            passed = ctx.passes.apply(rounded)
        return mark(passed, ctx.action.grid), None, None


def _keeps_little(*actions: PlaceAction | None) -> bool:
    """Whether execution is packed, and eager: compiled, the partitioner of the graph decides what is kept."""
    return not is_traced() and any(action is not None and action.is_packed for action in actions)


# --- compiled -----------------------------------------------------------------------------------------------
#
# torch.compile would follow every Python step of rounding, for every tensor of a model: minutes for a ResNet-50. So it
# is given single functions of tensors and plain constants, which run as they are when the graph below is made.

Ticket = tuple[int, int]
_NOTHING: Ticket = (-1, -1)


def _ticket(action: PlaceAction | None, here: Here) -> Ticket:
    """What stands for an action in a graph: its number, and the row of its record (-1 where there is none)."""
    if action is None:
        return _NOTHING
    seen = action.seen_at(here)
    return action.number, -1 if seen is None else seen


def _action(ticket: Ticket) -> PlaceAction | None:
    return None if ticket[0] < 0 else _settled[ticket[0]]


def _there(here: Circumstances, ticket: Ticket, table: Tensor | None, record: Tensor | None) -> Here:
    there = Here.__new__(Here)
    there.module = None
    there.site, there.salt, there.training, there.observing = here
    there.table, there._record = table, record
    there.seen = None if ticket[1] < 0 else ticket[1]
    return there


Circumstances = tuple[str, str, bool, bool]


def _circumstances(here: Here) -> Circumstances:
    return here.site, here.salt, here.training, here.observing


@taken_whole
def _both_ways_in_graph(
    x: Tensor,
    forward: Ticket,
    backward: Ticket,
    here: Circumstances,
    table: Tensor | None,
    record: Tensor | None,
    weight_key: Tensor | None,
) -> Tensor:
    there, back = (_there(here, ticket, table, record) for ticket in (forward, backward))
    return _both_ways(x, _action(forward), _action(backward), there, back, weight_key)


@taken_whole
def _relu_in_graph(
    x: Tensor, forward: Ticket, backward: Ticket, here: Circumstances, table: Tensor | None, record: Tensor | None
) -> Tensor:
    there, back = (_there(here, ticket, table, record) for ticket in (forward, backward))
    return _relu(x, _action(forward), _action(backward), there, back)


@taken_whole
def _slot_product_in_graph(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    op: str,
    settings: tuple[Any, ...],
    tickets: tuple[Ticket, ...],
    here: Circumstances,
    table: Tensor | None,
    record: Tensor | None,
    weight_key: Tensor | None,
) -> Tensor:
    chosen: dict[str, tuple[PlaceAction, Here]] = {}
    for slot, ticket in zip(SLOTS, tickets, strict=True):
        action = _action(ticket)
        if action is not None:
            chosen[slot] = action, _there(here, ticket, table, record)
    return slot_product(x, w, bias, Product(op, settings), Slots(chosen, weight_key))


# --- what the rounder asks for --------------------------------------------------------------------------------


def rounded(x: Tensor, action: PlaceAction, here: Here, weight_key: Tensor | None = None) -> Tensor:
    """`x` rounded; the gradient passes straight through."""
    return rounded_both_ways(x, action, None, here, weight_key)


def rounded_gradient(x: Tensor, action: PlaceAction, here: Here) -> Tensor:
    """`x`, whose gradient is rounded on its way back."""
    return rounded_both_ways(x, None, action, here)


def rounded_both_ways(
    x: Tensor, forward: PlaceAction | None, backward: PlaceAction | None, here: Here, weight_key: Tensor | None = None
) -> Tensor:
    """`x` rounded, its gradient rounded, or both."""
    if forward is None and backward is None:
        return x
    if not torch.compiler.is_compiling():
        return _both_ways(x, forward, backward, here, here, weight_key)
    return _both_ways_in_graph(
        *(x, _ticket(forward, here), _ticket(backward, here), _circumstances(here)),
        *(here.table, here.record, weight_key),
    )


def rounded_relu(x: Tensor, forward: PlaceAction | None, backward: PlaceAction | None, here: Here) -> Tensor:
    """The positive part of `x`, rounded both ways; nothing is rounded that lies on the grid already."""
    if not torch.compiler.is_compiling():
        return _relu(x, forward, backward, here, here)
    return _relu_in_graph(
        x, _ticket(forward, here), _ticket(backward, here), _circumstances(here), here.table, here.record
    )


def rounded_product(
    x: Tensor, w: Tensor, bias: Tensor | None, product: Product, action: Action, here: Here, weight_key: Tensor | None
) -> Tensor:
    """y = x w with the six slots rounded as the action says."""
    applied = {slot: action.places[slot] for slot in SLOTS if action.applies(slot, here.training)}
    if not torch.compiler.is_compiling():
        slots = Slots({slot: (place, here) for slot, place in applied.items()}, weight_key)
        return slot_product(x, w, bias, product, slots)
    tickets = tuple(_ticket(applied.get(slot), here) for slot in SLOTS)
    return _slot_product_in_graph(
        *(x, w, bias, product.op, product.settings, tickets, _circumstances(here)),
        *(here.table, here.record, weight_key),
    )


def _both_ways(
    x: Tensor,
    forward: PlaceAction | None,
    backward: PlaceAction | None,
    here: Here,
    back: Here,
    weight_key: Tensor | None,
) -> Tensor:
    if backward is None:
        return x if forward is None else forward.round(x, here, weight_key)
    if forward is None or forward.changes_nothing_in(x):
        passed: Tensor = RoundedGradient.apply(x, backward, back)  # type: ignore[no-untyped-call]
    else:
        passed = RoundedBothWays.apply(x, forward, backward, here, back, weight_key)  # type: ignore[no-untyped-call]
    return passed if forward is None else mark(passed, forward.grid)


def _relu(x: Tensor, forward: PlaceAction | None, backward: PlaceAction | None, here: Here, back: Here) -> Tensor:
    relu = sparing_relu if _keeps_little(forward, backward) else torch.relu
    if forward is None or not forward.changes_nothing_in(x):
        return _both_ways(relu(x), forward, backward, here, back, None)
    if backward is None:
        y = relu(x)
        if _keeps_little(forward):
            note_copy(y, x)
        return mark(y, forward.grid)
    passed: Tensor = GridRelu.apply(x, backward, back)  # type: ignore[no-untyped-call]
    return mark(passed, forward.grid)
