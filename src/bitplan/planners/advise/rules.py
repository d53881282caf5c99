"""Advice as a plan: rules for slots, alone or together with an assignment's rules and a schedule."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bitplan.numbers.formats import IntFormat
from bitplan.plan import Plan, QuantizerSpec, Rule
from bitplan.plan.match import REGEX_PREFIX
from bitplan.plan.places import OPERANDS
from bitplan.planners.advise.choice import SlotAdvice
from bitplan.planners.advise.slots import RECURRENT
from bitplan.schedules import Schedule
from bitplan.seeing.openings import is_opened

#: The name of a schedule in the plan.
SCHEDULE = "advised"

#: Key of a rule -> its quantizer.
Keys = tuple[tuple[str, str], ...]


def plan_of(
    slots: Sequence[SlotAdvice],
    made_by: Mapping[str, Any] | None = None,
    base: Plan | None = None,
    schedule: Schedule | None = None,
) -> Plan:
    """The plan that gives every slot what it should get.

    :param base: a plan whose rules come first, such as an assignment; what it rounds already to as few bits, and what
        lies in operations that it does not open, is left to it.
    :param schedule: what the bits of integers follow, instead of being fixed.
    """
    kept = [each for each in slots if base is None or not _is_left_to_base(base, each)]
    quantizers: dict[str, QuantizerSpec] = {}
    by_product: dict[str, dict[str, str]] = {}
    for each in kept:
        spec = _moved(each.spec, schedule)
        name = _quantizer_name(spec)
        quantizers[name] = spec
        by_product.setdefault(each.product, {})[each.slot] = name
    products = list(dict.fromkeys(each.product for each in slots))
    rules = _rules(by_product, products)
    follows = schedule is not None and any(spec.bits == SCHEDULE for spec in quantizers.values())
    schedules = {SCHEDULE: schedule} if follows and schedule is not None else {}
    flat = Plan() if base is None else base.flattened()
    return replace(
        flat,
        rules=(*flat.rules, *rules),
        quantizers={**flat.quantizers, **quantizers},
        schedules={**flat.schedules, **schedules},
        made_by=None if made_by is None else dict(made_by),
        name=None,
        origin=None,
    )


def _is_left_to_base(base: Plan, advice: SlotAdvice) -> bool:
    """Whether the base rounds that operand to as few bits before it comes to the slot, so that rounding it again would
    only add error; or leaves the operation closed that the slot lies in."""
    role = {"w": "weight", "dy": "grad_activation"}.get(advice.slot.split(".")[1])
    module, _, op = advice.product.rpartition("/")
    if advice.inside is not None and not is_opened(base, module, advice.inside):
        return True
    known = None if role is None else base.decide(module, op)[role].quantizer
    return known is not None and known.target.bits <= advice.spec.target.bits


def _moved(spec: QuantizerSpec, schedule: Schedule | None) -> QuantizerSpec:
    if schedule is None or not isinstance(spec.target, IntFormat):
        return spec
    return QuantizerSpec("int", bits=SCHEDULE, scale=spec.scale, rounding=spec.rounding)


def _quantizer_name(spec: QuantizerSpec) -> str:
    """A name for a quantizer that no format can have: ``tensor-e4m3``, ``vector-int8-stochastic``."""
    words = [spec.scale or "plain", f"{spec.format}-{spec.bits}" if isinstance(spec.bits, str) else spec.format]
    return "-".join(words + ["stochastic"] * (spec.rounding == "stochastic"))


def _rules(by_product: Mapping[str, Mapping[str, str]], products: Sequence[str]) -> list[Rule]:
    """Products that get the same share a rule; modules above others come first, so that later rules decide."""
    gathered: dict[tuple[str, Keys], list[str]] = {}
    for product, slots in by_product.items():
        module, _, op = product.rpartition("/")
        gathered.setdefault((_op_pattern(product, op, products), _keys(slots)), []).append(_pattern(module, products))
    return [
        Rule(tuple(dict.fromkeys(modules)), (op,), tuple((key, name) for key, name in keys))
        for (op, keys), modules in gathered.items()
    ]


def _keys(slots: Mapping[str, str]) -> Keys:
    """Slots, or the operand where both of its slots can share one rounded copy: one that every product could use."""
    keys = dict(slots)
    for operand, pair in OPERANDS.items():
        names = {keys.get(slot) for slot in pair}
        (name, *others) = names
        if not others and name is not None and not name.startswith("vector"):
            for slot in pair:
                del keys[slot]
            keys[operand] = name
    return tuple(keys.items())


def _pattern(module: str, products: Sequence[str]) -> str:
    """The module alone: where others with products lie beneath it, it is named exactly."""
    beneath = any(other.startswith(f"{module}.") for other in products) or not module
    special = any(sign in module for sign in "*?[")
    return f"{REGEX_PREFIX}{re.escape(module)}" if beneath or special else module


def _op_pattern(product: str, op: str, products: Sequence[str]) -> str:
    """The operation, with its number where the module has more than one of its kind."""
    bare = op.partition(".")[0]
    if bare in RECURRENT:
        return bare
    module = product.rpartition("/")[0]
    alike = [other for other in products if other.startswith(f"{module}/{bare}.")]
    return op if len(alike) > 1 else bare
