"""An assignment: the precision of every tensor of a training step, what share of them is low, and the plan for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from bitplan.errors import PlanError, nearest_names
from bitplan.planners.assign.groups import Account, Unit, is_product, place_of
from bitplan.planners.assign.levels import Formats, Move
from bitplan.planners.assign.rules import rules_of
from bitplan.plans import Plan


@dataclass(frozen=True)
class Assignment:
    """What every unit of an account gets."""

    account: Account
    formats: Formats
    #: The level of each unit; None: nothing is rounded at all.
    levels: tuple[int, ...] | None
    #: The level of each group, where groups decided.
    group_levels: tuple[int, ...] | None = None
    #: How it came about, for the plan's ``made_by``.
    story: Mapping[str, Any] = field(default_factory=dict)
    #: The moves in their order, and how many of them were made.
    moves: tuple[Move, ...] = ()
    made: int = 0
    #: The share of values that overflow (with a scale: that become zero) from which on a low tensor is promoted to the
    #: highest level; None: none is.
    promotion: float | None = None

    @classmethod
    def after(
        cls,
        account: Account,
        formats: Formats,
        moves: Sequence[Move],
        made: int,
        story: Mapping[str, Any],
        promotion: float | None = None,
    ) -> Assignment:
        """The assignment after the first `made` of the moves."""
        groups = [0] * len(account.groups)
        for move in moves[:made]:
            groups[move.group] = max(groups[move.group], move.level)
        # A unit of several groups gets the highest precision that any of them has.
        levels = tuple(min(groups[number] for number in unit.groups) for unit in account.units)
        return cls(account, formats, levels, tuple(groups), story, tuple(moves), made, promotion)

    @property
    def demoted(self) -> int:
        """How many groups lie below the highest level."""
        return sum(level > 0 for level in self.group_levels or ())

    @property
    def selection_ratio(self) -> float:
        """The share of all values that are low, their parameters' gradients with them.

        With more than two levels: the saving as a share of the greatest possible one.
        """
        if self.levels is None:
            return 0.0
        whole = self.group_levels is not None
        low = sum(
            tensor.elements * self.formats.gain(self.levels[tensor.unit])
            for tensor in self.account.tensors
            # Of single tensors, what stays in the high format is not low.
            if whole or tensor.role != "grad_weight"
        )
        return low / self.account.elements

    @property
    def reported_ratio(self) -> float:
        """2 (bits all high - bits now) / bits all high: 0 at the high level, 1 where every value has half its bits."""
        high = sum(tensor.elements * self.formats.levels[0].bits(tensor.role) for tensor in self.account.tensors)
        return 2 * (high - self.bits) / high

    @property
    def bits(self) -> float:
        """Of all tensors together: an aggregate of a step, and no peak."""
        if self.levels is None:
            return 32.0 * self.account.elements
        levels = self.formats.levels
        return sum(
            tensor.elements * levels[self.levels[tensor.unit]].bits(tensor.role) for tensor in self.account.tensors
        )

    @cached_property
    def plan(self) -> Plan:
        """The plan that trains so."""
        made_by = {"planner": "bitplan assign", **self.story, **self.facts()}
        if self.levels is None:
            return Plan(name=self.name, description=self._description, made_by=made_by)
        names, rules = rules_of(self.account, self.formats, self.levels, self.promotion)
        return Plan(tuple(rules), quantizers=names, name=self.name, description=self._description, made_by=made_by)

    @property
    def name(self) -> str:
        """A short one, for tables and folders."""
        if "baseline" in self.story:
            return str(self.story["baseline"])
        order = self.story.get("order", "largest")
        shown = "" if order == "largest" else f"-{order}"
        target = self.story.get("budget") or f"r{self.story.get('ratio', self.selection_ratio):g}"
        return f"assign-{target}{shown}".replace("%", "pct")

    @property
    def _description(self) -> str:
        if self.levels is None:
            return "Nothing is rounded."
        named = " / ".join(map(str, self.formats.levels))
        if self.group_levels is None:
            return f"{self.selection_ratio:.1%} of all values are low: {named}."
        return (
            f"{self.demoted} of {len(self.account.groups)} groups of tensors are low, with {self.selection_ratio:.1%} "
            f"of all values: {named}."
        )

    def facts(self) -> dict[str, Any]:
        """The figures of an assignment."""
        return {
            "parameters": self.account.parameters,
            "tensors": len(self.account.tensors),
            "groups": len(self.account.groups),
            "demoted": self.demoted,
            "selection_ratio": round(self.selection_ratio, 6),
            "reported_ratio": round(self.reported_ratio, 6),
        }

    def rows(self) -> list[dict[str, Any]]:
        """The groups in the order in which they go down: number, start, tensors, size, level and whether it is cut."""
        rank: dict[int, int] = {}
        for position, move in enumerate(self.moves):
            rank.setdefault(move.group, position)
        groups = sorted(self.account.groups, key=lambda group: (rank.get(group.number, 0), group.number))
        total = self.account.elements
        levels = self.group_levels or (0,) * len(groups)
        return [
            {
                "group": group.number,
                "start": group.start,
                "tensors": group.tensors,
                "elements": group.size,
                "share": group.size / total,
                "level": self.formats.levels[levels[group.number]].name,
                "is_low": levels[group.number] > 0,
            }
            for group in groups
        ]


def cut_for_ratio(account: Account, formats: Formats, moves: Sequence[Move], ratio: float) -> int:
    """How many moves it takes until the selection ratio is at least `ratio`."""
    if not 0 <= ratio <= 1:
        raise PlanError(f"ratio is {ratio:g}; it must be a share from 0 to 1.")
    if ratio == 0:
        return 0
    groups = [0] * len(account.groups)
    elements = [0] * len(account.units)
    for tensor in account.tensors:
        elements[tensor.unit] += tensor.elements
    members: list[list[int]] = [[] for _ in account.groups]
    for number, unit in enumerate(account.units):
        for group in unit.groups:
            members[group].append(number)
    levels = [0] * len(account.units)
    low, low_elements_needed = 0.0, ratio * account.elements
    for made, move in enumerate(moves, start=1):
        groups[move.group] = max(groups[move.group], move.level)
        for number in members[move.group]:
            level = min(groups[group] for group in account.units[number].groups)
            low += elements[number] * (formats.gain(level) - formats.gain(levels[number]))
            levels[number] = level
        if low >= low_elements_needed and ratio < 1:
            return made
    return len(moves)


# --- What assignments are compared with


BASELINES = ("fp32", "all-high", "uniform-low", "operator", "operator-prime")
#: What is said beside a baseline's name.
REMARKS = {"operator-prime": "our reading: inputs and outputs of products low in both passes"}


def baseline(name: str, account: Account, formats: Formats) -> Assignment:
    """The assignment of that name."""
    if name not in BASELINES:
        raise PlanError(f"there is no baseline {name!r}; {nearest_names(name, BASELINES)}")
    story = {"baseline": name, "formats": formats.name}
    if name in REMARKS:
        story["remark"] = REMARKS[name]
    if name == "fp32":
        return Assignment(account, formats, None, story=story)
    if name in ("all-high", "uniform-low"):
        level = 0 if name == "all-high" else formats.low
        groups = (level,) * len(account.groups)
        return Assignment(account, formats, (level,) * len(account.units), groups, story)
    low = _LowUnits(account, with_both_sides=name == "operator-prime")
    levels = tuple(formats.low if low.has(unit) else 0 for unit in account.units)
    return Assignment(account, formats, levels, story=story)


class _LowUnits:
    """Which units are low because of the products they belong to."""

    def __init__(self, account: Account, with_both_sides: bool) -> None:
        operations, group_of = account.operations, account.group_of
        products = [number for number, operation in enumerate(operations) if is_product(operation)]
        last = max(group_of)
        in_last = {number for number, group in enumerate(group_of) if group == last}
        spared = {products[0]} | in_last | {source for number in in_last for source in operations[number].inputs}
        read = {source for number in products for source in operations[number].inputs}
        made = set(products)
        forward = (read | made if with_both_sides else read) - spared
        backward = (read | made if with_both_sides else made) - spared
        self.forward = {place_of(operations[number]) for number in forward}
        self.backward = {place_of(operations[number]) for number in backward}
        self.weighted = {place_of(operations[number]) for number in made - {products[0]} - in_last}

    def has(self, unit: Unit) -> bool:
        places = {
            "input": set[tuple[str, str]](),
            "activation": self.forward,
            "grad_activation": self.backward,
            "weight": self.weighted,
        }[unit.kind]
        return all(place in places for place in unit.places)
