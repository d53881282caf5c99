"""The key ``communication`` of a plan: the formats in which processes exchange weights and gradients."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from bitplan.errors import PlanError
from bitplan.plans.fields import Choice, Flag, Kind, Record, Schema, Whole
from bitplan.plans.tree import Node

#: Formats of one byte that every process decodes alike.
FORMATS = ("e4m3", "e5m2")
GATHER_SCALES = ("channel", "tensor")
ROUNDINGS = ("nearest", "stochastic")
DEFAULT_BLOCK, LARGEST_BLOCK = 128, 1 << 16
_SCALE_BYTES = 4


@dataclass(frozen=True)
class Gather:
    """``gather: e4m3``: the format in which FSDP2 gathers weight matrices.

    With ``scale: channel`` a row brings its scale along; with ``scale: tensor`` the scale is that of the previous
    step's weights, which every process knows.
    """

    format: str
    scale: Literal["channel", "tensor"] = "channel"

    def __post_init__(self) -> None:
        _require("gather.format", self.format, FORMATS)
        _require("gather.scale", self.scale, GATHER_SCALES)

    def bytes_of(self, rows: int, columns: int) -> int:
        """Bytes of a weight matrix on the wire."""
        return rows * columns + _SCALE_BYTES * (rows if self.scale == "channel" else 1)


@dataclass(frozen=True)
class Reduce:
    """``reduce: {format: e5m2, rounding: stochastic}``: the format in which gradients are sent to be added up.

    They are added in float32. With ``error_feedback`` what rounding has lost is added to the next step's gradient, at
    the price of a copy of the unsharded gradients.
    """

    format: str
    scale: Literal["block"] = "block"
    block: int = DEFAULT_BLOCK
    rounding: Literal["nearest", "stochastic"] = "nearest"
    error_feedback: bool = False

    def __post_init__(self) -> None:
        _require("reduce.format", self.format, FORMATS)
        _require("reduce.scale", self.scale, ("block",))
        _require("reduce.rounding", self.rounding, ROUNDINGS)
        if not 2 <= self.block <= LARGEST_BLOCK:
            raise PlanError(f"reduce.block is 2 to {LARGEST_BLOCK} neighbours that share a scale.")

    def bytes_of(self, elements: int) -> int:
        """Bytes of so many elements on the wire."""
        blocks = -(-elements // self.block)
        return blocks * (self.block + _SCALE_BYTES)


@dataclass(frozen=True)
class Communication:
    """How processes exchange weights and gradients; None: in their own dtype."""

    gather: Gather | None = None
    reduce: Reduce | None = None

    def to_data(self) -> dict[str, Any]:
        """As a plan writes it."""
        own = {"gather": self.gather, "reduce": self.reduce}
        return {key: _spec_data(spec) for key, spec in own.items() if spec is not None}


def _spec_data(spec: Gather | Reduce) -> str | dict[str, Any]:
    if spec == type(spec)(spec.format):
        return spec.format
    return {f.name: getattr(spec, f.name) for f in fields(spec) if getattr(spec, f.name) != f.default}


def _require(key: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise PlanError(f"{key} is {' or '.join(allowed)}, not {value!r}.")


_GATHER = Record(
    "A format with its scale.",
    {
        "format": Choice("The format.", FORMATS),
        "scale": Choice("channel: one scale for a row, sent along; tensor: that of the previous step.", GATHER_SCALES),
    },
    required=("format",),
)
_REDUCE = Record(
    "A format with its scale and rounding.",
    {
        "format": Choice("The format.", FORMATS),
        "scale": Choice("What shares a scale.", ("block",)),
        "block": Whole("How many neighbours share a scale; 128 if not given.", 2, LARGEST_BLOCK),
        "rounding": Choice("How gradients are rounded.", ROUNDINGS),
        "error_feedback": Flag("true: add what rounding has lost to the gradient of the next step."),
    },
    required=("format",),
)


@dataclass(frozen=True)
class _Spec(Kind[Any]):
    record: Record
    make: type[Gather] | type[Reduce]

    def read(self, node: Node) -> Gather | Reduce:
        values = {"format": node.value} if isinstance(node.value, str) else self.record.read(node)
        try:
            return self.make(**values)
        except PlanError as error:
            raise node.error(str(error)) from None

    def shape(self) -> Schema:
        return {"anyOf": [{"enum": list(FORMATS)}, self.record.schema()]}


_COMMUNICATION = Record(
    "",
    {
        "gather": _Spec("The format in which FSDP2 gathers weight matrices.", _GATHER, Gather),
        "reduce": _Spec("The format in which gradients are reduced.", _REDUCE, Reduce),
    },
)


@dataclass(frozen=True)
class Communicating(Kind[Communication]):
    """The value of the key ``communication``."""

    def read(self, node: Node) -> Communication:
        return Communication(**_COMMUNICATION.read(node))

    def shape(self) -> Schema:
        return _COMMUNICATION.shape()
