"""Candidates: plans that differ in execution, in the products that run natively and in the rounded activations.

The activations to round under a memory budget are a knapsack: as little damage as possible for the bytes that must go.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bitplan.numerics.formats import get_format
from bitplan.planners.auto.damage import Damage
from bitplan.planners.auto.groups import KINDS, ActivationGroup, ProductGroup, SiteKey, fold
from bitplan.plans import Plan
from bitplan.plans.match import exact_pattern

#: Quantizers of saved activations, by name. Without a scale there is no pass over the tensor for its amax.
ACTIVATION_QUANTIZERS: dict[str, dict[str, Any]] = {
    "e4m3": {"format": "e4m3"},
    "scaled": {"format": "e4m3", "scale": "tensor", "power_of_two": True},
    "e3m2": {"format": "e3m2"},
}
#: The quantizer with fewer bits, where eight are too many. Only eager code stores less than a byte for a value.
LOWER = "e3m2"
#: A scale is used where E4M3 without one has more than this many times the damage.
_SCALE_FROM = 2.0
#: Quantizers of operands by backend: x and w, dy.
_OPERANDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp8": (
        {"format": "e4m3", "scale": "tensor", "history": 16, "power_of_two": True},
        {"format": "e5m2", "scale": "tensor", "history": 16, "power_of_two": True},
    ),
    "int8": ({"format": "int8", "scale": "tensor"}, {"format": "int8", "scale": "tensor"}),
}
#: The least share of all savings that a set of activations adds to the one before.
_LEAST_SET = 0.08
#: Steps into which the knapsack divides the bytes to save.
_RESOLUTION = 256


@dataclass(frozen=True)
class Candidate:
    """A plan that may be the answer."""

    name: str
    #: None: the model as it is.
    plan: Plan | None
    #: Bytes that rounding takes off the saved tensors, as counted from shapes.
    saved_bytes: int = 0
    #: Expected squared change of the loss by rounded activations, see :mod:`bitplan.planners.auto.damage`.
    damage: float = 0.0
    #: ``none``, ``recompute``, ``packed``, ``native``, or ``planner`` for those of the user's own planners.
    family: str = "none"


@dataclass(frozen=True)
class Item:
    """One activation that may be rounded."""

    site: SiteKey
    kind: str
    #: The quantizer's name in :data:`ACTIVATION_QUANTIZERS`.
    quantizer: str
    #: Bytes that rounding it saves.
    saving: int
    damage: float
    #: Bytes of its codes, a byte a value.
    remaining: int = 0


def make_items(groups: Sequence[ActivationGroup], damage: Damage) -> list[Item]:
    """One item for each activation, with the quantizer that serves its group best."""
    items = []
    for group in groups:
        scores = [damage.get(site, {}) for site, _ in group.bytes_by_site]
        totals = {name: sum(score.get(name, 0.0) for score in scores) for name in ACTIVATION_QUANTIZERS}
        is_scaled = totals["e4m3"] > _SCALE_FROM * totals["scaled"]
        quantizer = "scaled" if is_scaled else "e4m3"
        for (site, count), score in zip(group.bytes_by_site, scores, strict=True):
            saving = count - count // group.itemsize
            items.append(Item(site, group.kind, quantizer, saving, score.get(quantizer, 0.0), count - saving))
    return items


def lowered(items: Sequence[Item], damage: Damage) -> list[Item]:
    """The same activations with :data:`LOWER` bits."""
    bits = get_format(LOWER).bits_per_value
    return [
        replace(
            item,
            quantizer=LOWER,
            # A byte of eight bits is what remained.
            saving=item.saving + int(item.remaining * (1 - bits / 8)),
            damage=damage.get(item.site, {}).get(LOWER, item.damage),
        )
        for item in items
    ]


def cheapest(items: Sequence[Item], lower: Sequence[Item], needed: int) -> list[Item] | None:
    """The items with the least damage that save `needed` bytes: in eight bits as far as that is enough.

    :param lower: the same items with fewer bits, or nothing.
    """
    chosen = least_damage(items, needed)
    if chosen is not None or not lower:
        return chosen
    steps = [
        replace(low, saving=low.saving - item.saving, damage=max(0.0, low.damage - item.damage))
        for item, low in zip(items, lower, strict=True)
    ]
    further = least_damage(steps, needed - sum(item.saving for item in items))
    if further is None:
        return None
    sites = {step.site for step in further}
    return [low if low.site in sites else item for item, low in zip(items, lower, strict=True)]


def levels(items: Sequence[Item]) -> list[tuple[str, list[Item]]]:
    """Growing sets of items, each kind with those before it: gates first, then by damage for each saved byte.

    A kind that saves little is no set of its own, because every candidate takes a compilation: it joins the next.
    """

    def saving(kind: str) -> int:
        return sum(item.saving for item in items if item.kind == kind)

    def damage_per_byte(kind: str) -> float:
        return sum(item.damage for item in items if item.kind == kind) / max(1, saving(kind))

    kinds = [kind for kind in KINDS if any(item.kind == kind for item in items)]
    order = sorted(kinds, key=lambda kind: (kind != KINDS[0], damage_per_byte(kind)))
    total = sum(map(saving, order))
    sets, added = [], 0
    for count, kind in enumerate(order, start=1):
        added += saving(kind)
        if added >= _LEAST_SET * total or count == len(order):
            sets.append((" + ".join(order[:count]), [item for item in items if item.kind in order[:count]]))
            added = 0
    return sets


def least_damage(items: Sequence[Item], needed: int) -> list[Item] | None:
    """The items with the least damage that save at least `needed` bytes; None where all of them save less.

    >>> def item(name, saving, damage):
    ...     return Item(SiteKey(name, "linear.0"), "gate", "e4m3", saving, damage)
    >>> [chosen.site.module for chosen in least_damage([item("a", 4, 9.0), item("b", 2, 1.0), item("c", 2, 2.0)], 4)]
    ['b', 'c']
    """
    if needed <= 0:
        return []
    if sum(item.saving for item in items) < needed:
        return None
    unit = max(1, needed // _RESOLUTION)
    goal = math.ceil(needed / unit)
    # best[s]: least damage for savings of s units, or of at least `goal`; the items are rebuilt from `takes`.
    best = [0.0] + [math.inf] * goal
    takes: list[list[bool]] = []
    finite = [item if math.isfinite(item.damage) else replace(item, damage=1e300) for item in items]
    for item in finite:
        gain = item.saving // unit
        taken = [False] * (goal + 1)
        for saving in range(goal, 0, -1):
            before = best[max(0, saving - gain)] + item.damage
            if before < best[saving]:
                best[saving], taken[saving] = before, True
        takes.append(taken)
    if math.isinf(best[goal]):
        return list(items)  # rounding to whole units hides a few bytes
    chosen, saving = [], goal
    for item, taken in zip(reversed(items), reversed(takes), strict=True):
        if taken[saving]:
            chosen.append(item)
            saving = max(0, saving - item.saving // unit)
    return chosen[::-1]


def make_candidate(
    name: str,
    family: str,
    items: Sequence[Item],
    products: Sequence[ProductGroup] = (),
    backend: str = "fp8",
    *,
    recompute: str | None = None,
    chunks_loss: bool = False,
    all_sites: Iterable[SiteKey] = (),
) -> Candidate:
    """The candidate that rounds these activations and runs these products natively.

    :param recompute: of the execution; see :class:`bitplan.Packed` and :class:`bitplan.Native`.
    :param chunks_loss: the loss of a language model is computed in chunks of tokens.
    :param all_sites: every operation of the model, so that a pattern for all layers covers nothing else.
    """
    sites = list(all_sites)
    used = {item.quantizer for item in items}
    quantizers = {"scaled": ACTIVATION_QUANTIZERS["scaled"]} if "scaled" in used else {}
    execution: dict[str, Any] = {"kind": family}
    rules: list[dict[str, Any]] = []
    if family == "native":
        execution |= {"min_macs": 0, "fast_accumulation": True}
        if products:
            quantizers["operand"], quantizers["gradient"] = _OPERANDS[backend]
        members = [site for product in products for site in product.sites]
        for op, patterns in _patterns(members, sites).items():
            rules.append({"match": patterns, "op": op, "x": "operand", "w": "operand", "dy": "gradient"})
    if recompute is not None:
        execution["recompute"] = recompute
    for quantizer in ACTIVATION_QUANTIZERS:
        members = [item.site for item in items if item.quantizer == quantizer]
        for op, patterns in _patterns(members, sites).items():
            rules.append({"match": patterns, "op": op, "activation": quantizer})
    document: dict[str, Any] = {"version": 1, "quantizers": quantizers, "execution": execution, "rules": rules}
    if chunks_loss:
        document["loss"] = "chunked"
    plan = Plan.from_dict({key: value for key, value in document.items() if value or key == "rules"})
    kind = family if rules else "recompute"
    return Candidate(name, plan, sum(item.saving for item in items), sum(item.damage for item in items), kind)


def _patterns(members: Sequence[SiteKey], sites: Sequence[SiteKey]) -> Mapping[str, list[str]]:
    """Operation -> patterns of the modules of `members`: one for all layers where it covers nothing else."""
    by_op: dict[str, dict[str, list[str]]] = {}
    for site in dict.fromkeys(members):
        by_op.setdefault(site.op, {}).setdefault(fold(site.module), []).append(site.module)
    patterns: dict[str, list[str]] = {}
    for op, modules_by_fold in by_op.items():
        for folded, modules in modules_by_fold.items():
            in_model = {site.module for site in sites if site.op == op and fold(site.module) == folded}
            whole = "re:" + r"\d+".join(map(re.escape, folded.split("*")))
            is_whole = len(modules) > 1 and in_model == set(modules)
            patterns.setdefault(op, []).extend([whole] if is_whole else map(exact_pattern, modules))
    return patterns
