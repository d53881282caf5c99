"""What autograd does with a rounded tensor: the two functions that round gradients, and the actions they carry.

A :class:`PlaceAction` is one quantizer in one place of one operation; an :class:`Action` is all that a plan decided for
an operation, ready to be applied.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from bitplan.axes import resolve
from bitplan.noise import bits_of_key, key_of
from bitplan.ops import constant_when_traced
from bitplan.plan import OPERANDS, SLOTS, Decision
from bitplan.plan.spec import QuantizerSpec
from bitplan.quantizer import Quantizer, straight_through


class PlaceAction:
    """One quantizer in one place of one operation."""

    def __init__(self, spec: QuantizerSpec, place: str, op: str) -> None:
        self.spec = spec
        self.place = place
        self.op = op
        self.is_stochastic = spec.rounding == "stochastic"
        self._resolved: dict[int, Quantizer] = {dims: resolve(spec, place, op, dims) for dims in range(7)}

    def round(self, x: Tensor, key: Tensor | None, index: int = 0) -> Tensor:
        """`x` rounded; the gradient passes straight through."""
        quantizer = self._resolved[x.dim()]
        quantizer.check(x)
        bits = None
        if self.is_stochastic:
            assert key is not None
            first, second = _salt(f"{self.op}.{index}:{self.place}")
            bits = bits_of_key(x, key[0] ^ first, key[1] ^ second)
        return straight_through(quantizer, x, bits)


@constant_when_traced
def _salt(site: str) -> tuple[int, int]:
    """What tells one site of a module from another, mixed into the module's key."""
    return key_of(zlib.crc32(site.encode()), 0)


class Action:
    """What happens around one operation."""

    def __init__(self, decision: Decision, op: str) -> None:
        self.op = op
        self.places = {
            place: PlaceAction(choice.quantizer, place, op)
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
        self.needs_key = any(action.is_stochastic for action in self.places.values())

    def applies(self, place: str, training: bool) -> bool:
        action = self.places.get(place)
        return action is not None and (training or action.spec.eval != "off")


class Slots:
    """The rounding of the six slots of one product, as :class:`SlotProduct` asks for it."""

    def __init__(self, action: Action, training: bool, index: int) -> None:
        self.action = action
        self.training = training
        self.index = index

    def round(self, slot: str, tensor: Tensor, key: Tensor | None) -> Tensor:
        if not self.action.applies(slot, self.training):
            return tensor
        return self.action.places[slot].round(tensor.detach(), key, self.index)


class RoundedGradient(torch.autograd.Function):
    """The tensor itself forward; backward its gradient, rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, action: PlaceAction, key: Tensor | None, index: int) -> Tensor:
        ctx.action, ctx.key, ctx.index = action, key, index
        return x.clone()  # not a view: the caller may go on to change it in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.action.round(grads[0], ctx.key, ctx.index), None, None, None


class RoundedBothWays(torch.autograd.Function):
    """The rounded tensor forward, its rounded gradient backward: one copy less than one after the other."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: PlaceAction, backward: PlaceAction, key: Tensor | None, index: int
    ) -> Tensor:
        ctx.action, ctx.key, ctx.index = backward, key, index
        return forward.round(x.detach(), key, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.action.round(grads[0], ctx.key, ctx.index), None, None, None, None


def rounded_gradient(x: Tensor, action: PlaceAction, key: Tensor | None, index: int) -> Tensor:
    """`x`, whose gradient is rounded on its way back."""
    passed: Tensor = RoundedGradient.apply(x, action, key, index)  # type: ignore[no-untyped-call]
    return passed


def rounded_both_ways(
    x: Tensor, forward: PlaceAction | None, backward: PlaceAction | None, key: Tensor | None, index: int
) -> Tensor:
    """`x` rounded, its gradient rounded, or both."""
    if backward is None:
        return x if forward is None else forward.round(x, key, index)
    if forward is None:
        return rounded_gradient(x, backward, key, index)
    passed: Tensor = RoundedBothWays.apply(x, forward, backward, key, index)  # type: ignore[no-untyped-call]
    return passed
