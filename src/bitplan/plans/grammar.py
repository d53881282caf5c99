"""The grammar of plans: which keys there are, what each may hold, and what is made of it.

The tables `QUANTIZER`, `RULE` and `PLAN` are all of it: :mod:`bitplan.plans.loading` reads plans by them, and
:mod:`bitplan.plans.schema` publishes the same ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

from bitplan.errors import PlanError, ScheduleError
from bitplan.numerics.formats import OWN_NAME_PATTERN, Overflow, check_own_name
from bitplan.numerics.reference import ROUNDINGS
from bitplan.numerics.rotation import ROTATION_SIZES
from bitplan.numerics.scaling import LONGEST_HISTORY, MOST_MARGIN, Granularity, Range
from bitplan.numerics.wire_format import ROLES
from bitplan.plans.code import REFERENCE_PATTERN, check_reference
from bitplan.plans.communication import Communicating
from bitplan.plans.document import LOSSES, VERSION
from bitplan.plans.execution import Executing
from bitplan.plans.fields import (
    Anything,
    Choice,
    Flag,
    Kind,
    Listing,
    Named,
    Number,
    OneOrMore,
    Record,
    Schema,
    Share,
    Text,
    Whole,
    entries_of,
)
from bitplan.plans.frozen import Freezing
from bitplan.plans.match import KEYS, OPERANDS, PASSES, SELECTIONS, GradAt, compile_pattern
from bitplan.plans.quantizer_use import Choosing, Switch, Use, use_from_text
from bitplan.plans.schedules import SCHEDULE_NAMES, TEN, RunPoint, Schedule, schedule_from_data
from bitplan.plans.schedules.base import LEAST_BITS, MOST_BITS
from bitplan.plans.schedules.cyclic import MOST_CYCLES, PROFILES, Period, Reflection, Shape
from bitplan.plans.schedules.named import SCHEDULE_NEEDS, SCHEDULE_OPTIONS
from bitplan.plans.spec import (
    FAMILIES,
    QUANTIZER_NAME,
    RESERVED_NAMES,
    Evaluation,
    Optimizing,
    Promotion,
    QuantizerSpec,
    Rule,
    any_case,
    check_name,
    check_quantizer_name,
)
from bitplan.plans.tree import Node

# --- The kinds of fields that speak of time: schedules, moments, and widths that a schedule may move


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
class When(Kind[RunPoint]):
    """A step (5000) or a share of the run (90%)."""

    def read(self, node: Node) -> RunPoint:
        try:
            return RunPoint.of(node.value)  # type: ignore[arg-type]  # which says so where it is something else
        except (ScheduleError, OverflowError, ValueError) as error:
            is_schedule_error = isinstance(error, ScheduleError)
            raise node.error(str(error) if is_schedule_error else f"this is no moment of a run: {error}.") from None

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
    "period": Choice("The length of a cycle: exact (T / n), or that of the authors' code.", get_args(Period)),
    "bits": Whole("The bits.", LEAST_BITS, MOST_BITS),
    "at": Listing("When each but the first begins: steps, or shares such as 50%.", When("")),
    "last": When("How much of the run is high: a share such as 10%, or steps."),
    "start": When("When the window begins."),
    "end": When("When the window ends."),
    "pieces": Listing("Schedules, one after another.", Scheduled("")),
    "schedule": Scheduled("The schedule whose bits are raised."),
    "least": Whole("The bits that it never falls below.", LEAST_BITS, MOST_BITS),
    "function": Text(
        "Your own function (step, total) -> bits, as module:name; it is imported only where you allow it.",
        check=check_reference,
        pattern=REFERENCE_PATTERN,
    ),
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


@dataclass(frozen=True)
class _Promoting(Kind[Promotion]):
    def read(self, node: Node) -> Promotion:
        values = PROMOTION.read(node)
        try:
            return Promotion(values.pop("to").use, **values)
        except PlanError as error:
            raise node.error(str(error)) from None

    def shape(self) -> Schema:
        return {"$ref": "#/$defs/promotion"}


@dataclass(frozen=True)
class BlockSize(Kind[int | tuple[int, int]]):
    """A whole number, or a list of two."""

    least: int
    most: int

    def read(self, node: Node) -> int | tuple[int, int]:
        size = Whole("", self.least, self.most)
        if not isinstance(node.value, list):
            return size.read(node)
        if len(node.value) != 2:
            raise node.error("a block is a number or two numbers, rows and columns, as in block: [128, 128].")
        rows, columns = map(size.read, node.value)
        return rows, columns

    def shape(self) -> Schema:
        size = Whole("", self.least, self.most).shape()
        return {"anyOf": [size, {"type": "array", "items": size, "minItems": 2, "maxItems": 2}]}


@dataclass(frozen=True)
class RotationSize(Kind[int]):
    """A power of two."""

    def read(self, node: Node) -> int:
        return Whole("", ROTATION_SIZES[0], ROTATION_SIZES[-1]).read(node)

    def shape(self) -> Schema:
        return {"enum": list(ROTATION_SIZES)}


QUANTIZER = Record(
    "How one tensor is rounded.",
    {
        "format": Text("A number format such as e4m3, bf16 or int8; or a family, int or float, with bits."),
        "bits": Width("Bits of a value, sign included, or the schedule that moves them; with format: int or float."),
        "exponent_bits": Whole("How many of a float's bits are the exponent's (8 if not given).", 1, 8),
        "rounding": Choice("How a value between two neighbours chooses.", ROUNDINGS),
        "scale": Choice(
            "What shares a scale: the tensor, a channel, a vector along the summed axis, a block of neighbours.",
            get_args(Granularity),
        ),
        "axis": Whole("The axis of the scale; the role decides where it is not given.", -64, 63),
        "block": BlockSize(
            "How many neighbours along the summed axis share a scale; or two numbers, [rows, columns], of which the "
            "columns lie along the summed axis. With scale: block; two numbers also with a block format.",
            *(1, 2**31 - 1),
        ),
        "rotate": Choice(
            "Both operands of a product are rotated alike along its summed axis before they are rounded.", ("hadamard",)
        ),
        "rotate_size": RotationSize("How many neighbours are rotated together (16 if not given); with rotate."),
        "range": Choice("What a scale covers: the largest magnitude, or least to largest (integers).", get_args(Range)),
        "power_of_two": Flag("Round the scale up to a power of two."),
        "history": Whole(
            "The scale comes from the largest magnitudes of so many past steps (delayed); with scale: tensor.",
            *(1, LONGEST_HISTORY),
        ),
        "margin": Whole("The scale makes room for 2^margin times those magnitudes; with history.", 0, MOST_MARGIN),
        "overflow": Choice("What lies beyond the largest value becomes it, or infinity / NaN.", get_args(Overflow)),
        "eval": Choice(
            "In evaluation: the same, running ranges, no rounding, or the top precision.", get_args(Evaluation)
        ),
        "promote": _Promoting("When a tensor gets another quantizer for the rest of the run, and which."),
        "function": Text(
            "Your own function or class, as module:name, that rounds with the help of this quantizer; it is imported "
            "only where you allow it.",
            check=check_reference,
            pattern=REFERENCE_PATTERN,
        ),
    },
    required=("format",),
)

_AT = Choice("Where grad_activation rounds: at the producer, after the sum, or at each consumer.", get_args(GradAt))

GRAD_QUANTIZER = Record(
    "How the gradient of an activation is rounded, and where.",
    {**QUANTIZER.fields, "at": _AT},
    QUANTIZER.required,
)


class _Placed(NamedTuple):
    """A quantizer, and for grad_activation perhaps where it rounds."""

    use: Use
    at: GradAt | None = None


@dataclass(frozen=True)
class Quantizing(Kind[_Placed]):
    """A format name, the name of a quantizer, ``keep``, or a mapping."""

    record: Record
    #: The record's name under the schema's ``$defs``.
    reference: str

    def read(self, node: Node) -> _Placed:
        try:
            if isinstance(node.value, str):
                return _Placed(use_from_text(node.value))
            if not isinstance(node.value, dict):
                advice = f" Whole numbers of {node.value} bits are int{node.value}." if type(node.value) is int else ""
                raise PlanError(f"a quantizer is a format name, a name or a mapping, not {node.describe()}.{advice}")
        except PlanError as error:
            raise node.error(str(error)) from None
        over_time = next((record for key, record in OVER_TIME.items() if key in node.value), None)
        values = (over_time or self.record).read(node)
        at = values.pop("at", None)
        try:
            return _Placed(_changing(values) if over_time else QuantizerSpec(**values), at)
        except PlanError as error:
            raise node.error(str(error)) from None

    def shape(self) -> Schema:
        alone = {"type": "string", "minLength": 1, "not": {"pattern": any_case("|".join(FAMILIES))}}
        mappings = (self.reference, "switch", "choosing")
        return {"anyOf": [alone, *({"$ref": f"#/$defs/{name}"} for name in mappings)]}


@dataclass(frozen=True)
class _Cases(Kind[tuple[tuple[int, Use], ...]]):
    """Quantizers by the bits from which they are chosen."""

    def read(self, node: Node) -> tuple[tuple[int, Use], ...]:
        cases = []
        for text, item in entries_of(node).items():
            if not _LEVEL.fullmatch(text):
                raise item.error(f"{text!r} is no number of bits: choose by whole numbers of 1 to 32.")
            cases.append((int(text), _USE.read(item).use))
        if not cases:
            raise node.error("this mapping is empty: give quantizers by bits, such as {4: low, 8: high}.")
        return tuple(cases)

    def shape(self) -> Schema:
        names = {"pattern": f"^({_LEVEL.pattern})$"}
        return {
            "type": "object",
            "propertyNames": names,
            "additionalProperties": _USE.schema(),
            "minProperties": 1,
        }


#: Bits as the key of a mapping.
_LEVEL = re.compile(r"[1-9]|[12][0-9]|3[0-2]")

_USE = Quantizing("", QUANTIZER, "quantizer")

SWITCH = Record(
    "One quantizer until some moment of the run, then another.",
    {
        "until": When("A step, or a share of the run such as 90%."),
        "use": Quantizing("The quantizer until then.", QUANTIZER, "quantizer"),
        "then": Quantizing("The quantizer from then on.", QUANTIZER, "quantizer"),
    },
    required=("until", "use", "then"),
)

CHOOSING = Record(
    "The quantizer that a schedule's bits choose.",
    {
        "by": Text("The schedule.", check=check_name, pattern=NAME_PATTERN),
        "choose": _Cases("Bits -> the quantizer from these bits on."),
    },
    required=("by", "choose"),
)

PROMOTION = Record(
    "A tensor for which the watched share (overflow 0.01 if none is named) is reached gets `to` from the next step on.",
    {
        "to": Quantizing("The quantizer of a promoted tensor; keep: it is left alone.", QUANTIZER, "quantizer"),
        "overflow": Share("The share of values at or over the overflow threshold; formats without a scale only."),
        "underflow": Share("The share of values that are not zero and become zero."),
        "error": Share("The relative error: root of (mean squared error / mean square)."),
    },
    required=("to",),
)
#: The key that tells what changes as a whole over time -> its grammar.
OVER_TIME = {"until": SWITCH, "by": CHOOSING}


def _changing(values: dict[str, Any]) -> Switch | Choosing:
    if "until" in values:
        return Switch(values["until"], values["use"].use, values["then"].use)
    return Choosing(values["by"], values["choose"])


def _about(key: str) -> str:
    if key in ROLES:
        return f"The {key.replace('grad_', 'gradient of the ')}."
    if key in OPERANDS:
        return f"The operand {key} of products, rounded once and shared by {' and '.join(KEYS[key])}."
    if key in PASSES:
        return f"Both operands of {key}, each rounded by itself: {' and '.join(KEYS[key])}."
    return f"The operand {key.split('.')[1]} of {key.split('.')[0]}."


_PATTERN_TEXT = "a path and all beneath it, a glob (* crosses dots), or re: and a regular expression"

RULE = Record(
    "What is rounded at which operations in which modules; a later rule overrides an earlier one, place by place.",
    {
        "match": OneOrMore(
            f"Module paths: {_PATTERN_TEXT}, or a list of these.", Text("", may_be_empty=True, check=compile_pattern)
        ),
        "op": OneOrMore("Operations such as conv2d or linear; all if not given.", Text("", check=compile_pattern)),
        "select": OneOrMore(
            "What the tensor that the operation returns must be, all of the list; with it, match may be left out.",
            Choice("", SELECTIONS),
        ),
        "min_elements": Whole("The fewest elements of that tensor.", 1, 2**62),
        "max_elements": Whole("The most elements of that tensor.", 1, 2**62),
        **{
            key: Quantizing(_about(key), GRAD_QUANTIZER, "grad_quantizer")
            if key == "grad_activation"
            else Quantizing(_about(key), QUANTIZER, "quantizer")
            for key in KEYS
        },
        "frozen": Freezing("What weights that are not trained are stored in; keep: as they are."),
        "grad_at": _AT,
        "keep": Flag("Leave these places alone, whatever earlier rules said."),
        "strict": Flag("false: warn, instead of raising, where the rule matches nothing."),
        "constants": Flag("true: round constants, such as positions and rotary angles, like activations."),
    },
)

#: Keys of which a rule has at least one: where it applies.
APPLIES_BY = ("match", "select", "min_elements", "max_elements")


@dataclass(frozen=True)
class _Rules(Kind[Rule]):
    def read(self, node: Node) -> Rule:
        values = RULE.read(node)
        if not any(key in values for key in APPLIES_BY):
            raise node.error("the key 'match' is missing: add it.")
        placed: dict[str, _Placed] = {key: values[key] for key in KEYS if key in values}
        nested_at = placed["grad_activation"].at if "grad_activation" in placed else None
        if nested_at is not None and "grad_at" in values:
            raise node.error("grad_at and grad_activation.at both say where grad_activation rounds: drop one of them.")
        try:
            return Rule(
                values.get("match", ("*",)),
                values.get("op", ()),
                tuple((key, placed_use.use) for key, placed_use in placed.items()),
                values.get("grad_at", nested_at),
                values.get("keep", False),
                values.get("strict", True),
                values.get("constants", False),
                values.get("select", ()),
                values.get("min_elements"),
                values.get("max_elements"),
                values.get("frozen"),
                where=node.where,
            )
        except PlanError as error:
            raise node.error(str(error)) from None

    def shape(self) -> Schema:
        return {"$ref": "#/$defs/rule"}


PLAN = Record(
    "A bitplan plan: which tensors of a training run get which number format.",
    {
        "version": Whole("The version of the plan language.", VERSION, VERSION),
        "name": Text("A name for people."),
        "description": Text("What the plan does, for people."),
        "extends": Text("A plan file, relative to this one, or a preset's name; its rules come first."),
        "made_by": Anything("Who or what made the plan, and how: kept, never interpreted."),
        "formats": Named(
            "Number formats of your own: up to 256 values under a name that quantizers can give as format.",
            Listing("The values, in any order.", Number("")),
            check_own_name,
            {"pattern": OWN_NAME_PATTERN},
        ),
        "schedules": Named(
            "How bits move while a run goes on, under a name that quantizers can give as bits.",
            Scheduled(""),
            check_name,
            {"pattern": NAME_PATTERN},
        ),
        "quantizers": Named(
            "Quantizers under a name that rules can use.",
            Quantizing("", QUANTIZER, "quantizer"),
            check_quantizer_name,
            {"pattern": f"^{QUANTIZER_NAME.pattern}$", "not": {"pattern": any_case(RESERVED_NAMES)}},
        ),
        "optimizer": Optimizing("What the optimizer's state is kept in, by torchao's optimizers."),
        "execution": Executing("How the plan is computed where attach() does not say: emulate, packed or native."),
        "loss": Choice(
            "chunked: a language model of transformers computes its loss in chunks of tokens and returns no logits.",
            LOSSES,
        ),
        "communication": Communicating("The formats in which processes exchange weights and gradients."),
        "rules": Listing("Ordered rules.", _Rules("")),
    },
    required=("version",),
)
