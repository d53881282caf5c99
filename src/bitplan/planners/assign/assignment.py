"""An assignment: the precision of every tensor of a training step, the share of low values, and the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from bitplan.capture.recording import Operation
from bitplan.errors import PlanError, nearest_names
from bitplan.planners.assign.groups import OperationKey, StepTensors, Unit, is_product, operation_key, part_of
from bitplan.planners.assign.levels import Formats, Move
from bitplan.planners.assign.rules import write_rules
from bitplan.plans import Plan


@dataclass(frozen=True)
class Assignment:
    """The level of every unit of a training step's tensors."""

    step_tensors: StepTensors
    formats: Formats
    #: The level of each unit; None: nothing is rounded at all.
    levels: tuple[int, ...] | None
    #: The level of each group; None where units were chosen one by one.
    group_levels: tuple[int, ...] | None = None
    #: Planner options and results for the plan's ``made_by``.
    provenance: Mapping[str, Any] = field(default_factory=dict)
    #: The moves in order, and how many of them were made.
    moves: tuple[Move, ...] = ()
    moves_made: int = 0
    #: The share of values that overflow (scaled formats: underflow to zero) at which a low tensor is promoted to the
    #: highest level; None: never.
    promotion: float | None = None

    @classmethod
    def after(
        cls,
        step_tensors: StepTensors,
        formats: Formats,
        moves: Sequence[Move],
        moves_made: int,
        provenance: Mapping[str, Any],
        promotion: float | None = None,
    ) -> Assignment:
        """The assignment after the first `moves_made` moves."""
        groups = [0] * len(step_tensors.groups)
        for move in moves[:moves_made]:
            groups[move.group] = max(groups[move.group], move.level)
        # A unit of several groups gets the highest precision that any of them has.
        levels = tuple(min(groups[number] for number in unit.groups) for unit in step_tensors.units)
        return cls(step_tensors, formats, levels, tuple(groups), provenance, tuple(moves), moves_made, promotion)

    @property
    def demoted(self) -> int:
        """The number of groups below the highest level."""
        return sum(level > 0 for level in self.group_levels or ())

    @property
    def selection_ratio(self) -> float:
        """The share of low values among all, parameter gradients included.

        With more than two levels: the saving relative to the largest possible saving.
        """
        if self.levels is None:
            return 0.0
        low = sum(
            tensor.elements * self.formats.gain(self.levels[tensor.unit])
            for tensor in self.step_tensors.tensors
            # Where units were chosen one by one, parameter gradients stay in the high format.
            if self.group_levels is not None or tensor.role != "grad_weight"
        )
        return low / self.step_tensors.elements

    @property
    def reported_ratio(self) -> float:
        """2 (bits all high - bits now) / bits all high: 0 at the high level, 1 where every value has half its bits."""
        high = sum(tensor.elements * self.formats.levels[0].bits(tensor.role) for tensor in self.step_tensors.tensors)
        return 2 * (high - self.bits) / high

    @property
    def bits(self) -> float:
        """Bits of all tensors together: a sum over the step, not a peak."""
        if self.levels is None:
            return 32.0 * self.step_tensors.elements
        levels = self.formats.levels
        return sum(
            tensor.elements * levels[self.levels[tensor.unit]].bits(tensor.role) for tensor in self.step_tensors.tensors
        )

    @cached_property
    def plan(self) -> Plan:
        """The plan that trains with these levels."""
        made_by = {"planner": "bitplan assign", **self.provenance, **self.facts()}
        if self.levels is None:
            return Plan(name=self.name, description=self._description, made_by=made_by)
        names, rules = write_rules(self.step_tensors, self.formats, self.levels, self.promotion)
        return Plan(tuple(rules), quantizers=names, name=self.name, description=self._description, made_by=made_by)

    @property
    def name(self) -> str:
        """A short name for tables and directories."""
        if "baseline" in self.provenance:
            return str(self.provenance["baseline"])
        order = self.provenance.get("order", "largest")
        suffix = "" if order == "largest" else f"-{order}"
        target = self.provenance.get("budget") or f"r{self.provenance.get('ratio', self.selection_ratio):g}"
        return f"assign-{target}{suffix}".replace("%", "pct")

    @property
    def _description(self) -> str:
        if self.levels is None:
            return "Nothing is rounded."
        level_names = " / ".join(map(str, self.formats.levels))
        if self.group_levels is None:
            return f"{self.selection_ratio:.1%} of all values are low: {level_names}."
        return (
            f"{self.demoted} of {len(self.step_tensors.groups)} groups of tensors are low, with "
            f"{self.selection_ratio:.1%} of all values: {level_names}."
        )

    def facts(self) -> dict[str, Any]:
        """Statistics of the assignment."""
        return {
            "parameters": self.step_tensors.parameters,
            "tensors": len(self.step_tensors.tensors),
            "groups": len(self.step_tensors.groups),
            "demoted": self.demoted,
            "selection_ratio": round(self.selection_ratio, 6),
            "reported_ratio": round(self.reported_ratio, 6),
        }

    def rows(self) -> list[dict[str, Any]]:
        """A row for each group, in the order of demotion."""
        rank: dict[int, int] = {}
        for position, move in enumerate(self.moves):
            rank.setdefault(move.group, position)
        groups = sorted(self.step_tensors.groups, key=lambda group: (rank.get(group.number, 0), group.number))
        total = self.step_tensors.elements
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


def count_moves_for_ratio(step_tensors: StepTensors, formats: Formats, moves: Sequence[Move], ratio: float) -> int:
    """Count the moves until the selection ratio is at least `ratio`."""
    if not 0 <= ratio <= 1:
        raise PlanError(f"ratio is {ratio:g}; it must be a share from 0 to 1.")
    if ratio == 0:
        return 0
    group_levels = [0] * len(step_tensors.groups)
    elements = [0] * len(step_tensors.units)
    for tensor in step_tensors.tensors:
        elements[tensor.unit] += tensor.elements
    members: list[list[int]] = [[] for _ in step_tensors.groups]
    for number, unit in enumerate(step_tensors.units):
        for group in unit.groups:
            members[group].append(number)
    levels = [0] * len(step_tensors.units)
    low, low_elements_needed = 0.0, ratio * step_tensors.elements
    for moves_made, move in enumerate(moves, start=1):
        group_levels[move.group] = max(group_levels[move.group], move.level)
        for number in members[move.group]:
            level = min(group_levels[group] for group in step_tensors.units[number].groups)
            low += elements[number] * (formats.gain(level) - formats.gain(levels[number]))
            levels[number] = level
        if low >= low_elements_needed and ratio < 1:
            return moves_made
    return len(moves)


BASELINES = ("fp32", "all-high", "uniform-low", "operator", "operator-prime")
#: Remarks on baselines, for ``made_by`` and the command line.
REMARKS = {"operator-prime": "our reading: inputs and outputs of products low in both passes"}

#: Rules have no key for the gradient of an operand.
PART_REMARK = "; gradients of split parts count as low, and are rounded in the format of the whole tensor"


def make_baseline(name: str, step_tensors: StepTensors, formats: Formats) -> Assignment:
    """The baseline of this name, one of :data:`BASELINES`."""
    if name not in BASELINES:
        raise PlanError(f"there is no baseline {name!r}; {nearest_names(name, BASELINES)}")
    provenance = {"baseline": name, "formats": formats.name}
    if name in REMARKS:
        provenance["remark"] = REMARKS[name]
    if name == "fp32":
        return Assignment(step_tensors, formats, None, provenance=provenance)
    if name in ("all-high", "uniform-low"):
        level = 0 if name == "all-high" else formats.low
        groups = (level,) * len(step_tensors.groups)
        return Assignment(step_tensors, formats, (level,) * len(step_tensors.units), groups, provenance)
    low_units = _ProductUnits(step_tensors, both_sides=name == "operator-prime")
    levels = tuple(formats.low if unit in low_units else 0 for unit in step_tensors.units)
    if any(level and unit.kind == "grad_part" for unit, level in zip(step_tensors.units, levels, strict=True)):
        provenance["remark"] += PART_REMARK
    return Assignment(step_tensors, formats, levels, provenance=provenance)


class _ProductUnits:
    """Units that products read or write, except those of the first product and of the last group.

    :param both_sides: inputs and outputs in both passes; otherwise inputs forward and outputs backward.
    """

    def __init__(self, step_tensors: StepTensors, both_sides: bool) -> None:
        self.both_sides = both_sides
        operations, group_of = step_tensors.operations, step_tensors.group_of
        products = [number for number, operation in enumerate(operations) if is_product(operation)]
        last = max(group_of)
        in_last = {number for number, group in enumerate(group_of) if group == last}
        excluded = {products[0]} | in_last | {source for number in in_last for source in operations[number].inputs}
        split_readers = {key for unit in step_tensors.units if unit.whole is not None for key in unit.operations}
        inputs = {
            source
            for number in products
            for source in operations[number].inputs
            if operation_key(operations[number]) not in split_readers or _reads_whole(operations, number, source)
        }
        outputs = set(products)
        forward = (inputs | outputs if both_sides else inputs) - excluded
        backward = (inputs | outputs if both_sides else outputs) - excluded
        self.forward = {operation_key(operations[number]) for number in forward}
        self.backward = {operation_key(operations[number]) for number in backward}
        self.weighted = {operation_key(operations[number]) for number in outputs - {products[0]} - in_last}

    def __contains__(self, unit: Unit) -> bool:
        low_operations = {
            "input": set[OperationKey](),
            "activation": self.forward,
            "grad_activation": self.backward,
            "weight": self.weighted,
            "part": self.weighted,
            "grad_part": self.weighted if self.both_sides else set[OperationKey](),
        }[unit.kind]
        return bool(unit.operations) and low_operations.issuperset(unit.operations)


def _reads_whole(operations: Sequence[Operation], number: int, source: int) -> bool:
    """Whether an operation reads more of another's result than parts that it was split into."""
    reads = [read for read in operations[number].reads if read.source == source]
    return not reads or any(part_of(read, operations) is None for read in reads)
