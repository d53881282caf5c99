"""The kinds of fields that speak of time: schedules, moments, and widths that a schedule may move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from bitplan.errors import PlanError, ScheduleError
from bitplan.plan.kinds import Choice, Kind, Listing, Record, Schema, Whole, entries_of
from bitplan.plan.spec import QUANTIZER_NAME, check_name
from bitplan.plan.tree import Node
from bitplan.schedules import SCHEDULE_NAMES, TEN, Moment, Schedule, schedule_from_data
from bitplan.schedules.base import LEAST_BITS, MOST_BITS
from bitplan.schedules.cyclic import MOST_CYCLES, PROFILES, Reflection, Shape
from bitplan.schedules.named import SCHEDULE_NEEDS, SCHEDULE_OPTIONS

#: Names of the user's own.
NAME_PATTERN = f"^{QUANTIZER_NAME.pattern}$"


@dataclass(frozen=True)
class Width(Kind[int | str]):
    """Bits as a number, or the name of the schedule that moves them."""

    def read(self, node: Node) -> int | str:
        if not isinstance(node.value, str):
            return Whole("", LEAST_BITS, MOST_BITS).read(node)
        try:
            check_name(node.value)
        except PlanError as error:
            raise node.error(str(error)) from None
        return node.value

    def shape(self) -> Schema:
        number = {"type": "integer", "minimum": LEAST_BITS, "maximum": MOST_BITS}
        return {"anyOf": [number, {"type": "string", "pattern": NAME_PATTERN}]}


@dataclass(frozen=True)
class When(Kind[Moment]):
    """A step (5000) or a share of the run (90%)."""

    def read(self, node: Node) -> Moment:
        try:
            return Moment.of(node.value)  # type: ignore[arg-type]  # which says so where it is something else
        except (ScheduleError, OverflowError, ValueError) as error:
            known = isinstance(error, ScheduleError)
            raise node.error(str(error) if known else f"this is no moment of a run: {error}.") from None

    def shape(self) -> Schema:
        share = r"^\s*(100(\.0{1,9})?|[0-9]{1,2}(\.[0-9]{1,9})?|0[0-9]{2}(\.[0-9]{1,9})?)\s*%\s*$"
        number = {"type": "integer", "minimum": 0}
        between = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
        return {"anyOf": [number, between, {"type": "string", "pattern": share}]}


@dataclass(frozen=True)
class Scheduled(Kind[Schedule]):
    """One schedule: its name, and the options that a schedule of that name has."""

    def read(self, node: Node) -> Schedule:
        entries = entries_of(node)
        if "name" not in entries:
            raise node.error("the key 'name' is missing: add it, such as name: CR.")
        name = _NAME.read(entries["name"])
        values = _RECORDS[name].read(node)
        try:
            return schedule_from_data(values)
        except ScheduleError as error:
            raise node.error(str(error)) from None

    def shape(self) -> Schema:
        return {"$ref": "#/$defs/schedule"}


_NAME = Choice("One of the ten cyclic schedules, or another kind.", SCHEDULE_NAMES)
_BITS = Whole("", LEAST_BITS, MOST_BITS)
_FIELDS: dict[str, Kind[Any]] = {
    "name": _NAME,
    "low": Whole("The fewest bits.", LEAST_BITS, MOST_BITS),
    "high": Whole("The most bits.", LEAST_BITS, MOST_BITS),
    "cycles": Whole("How often it grows; of triangular ones, how often it falls or grows.", 1, MOST_CYCLES),
    "profile": Choice("How it grows: cosine, linear, exponential, reverse exponential.", tuple(PROFILES)),
    "shape": Choice("Every cycle grows, or cycles fall and grow by turns.", get_args(Shape)),
    "reflection": Choice("Falls mirror the growth vertically or horizontally (in time).", get_args(Reflection)),
    "bits": Whole("The bits.", LEAST_BITS, MOST_BITS),
    "at": Listing("When each but the first begins: steps, or shares such as 50%.", When("")),
    "last": When("How much of the run is high: a share such as 10%, or steps."),
    "start": When("When the window begins."),
    "end": When("When the window ends."),
    "pieces": Listing("Schedules, one after another.", Scheduled("")),
}


def _record(name: str) -> Record:
    fields = {key: _FIELDS[key] for key in ("name", *SCHEDULE_OPTIONS[name])}
    if name == "steps":
        fields["bits"] = Listing("The widths, one after another.", _BITS)
    return Record("", fields, required=("name", *SCHEDULE_NEEDS[name]))


_RECORDS: dict[str, Record] = {name: _record(name) for name in SCHEDULE_NAMES}


def schedule_schema() -> Schema:
    """What a schedule may be; whether its numbers fit together only the loader knows."""
    cases = []
    for names in (tuple(TEN), *((name,) for name in SCHEDULE_NAMES if name not in TEN)):
        shape = _RECORDS[names[0]].schema()
        shape["properties"]["name"] = {"enum": list(names)}
        cases.append(shape)
    return {"description": "How bits move while a run goes on.", "type": "object", "anyOf": cases}
