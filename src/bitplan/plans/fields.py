"""Kinds of fields. Each kind both reads a value and describes itself as JSON Schema, so the two cannot drift apart."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from bitplan.errors import FormatError, PlanError, nearest_names
from bitplan.plans.tree import Node

T = TypeVar("T")
Schema = dict[str, Any]


@dataclass(frozen=True)
class Kind(ABC, Generic[T]):
    """What may stand in one field."""

    #: One or two sentences for whoever writes a plan; they end up in the schema.
    about: str

    @abstractmethod
    def read(self, node: Node) -> T:
        """The value of `node`, or a :class:`PlanError` that names its place."""

    @abstractmethod
    def shape(self) -> Schema:
        """The schema without the description."""

    def schema(self) -> Schema:
        return {"description": self.about, **self.shape()} if self.about else self.shape()


@dataclass(frozen=True)
class Text(Kind[str]):
    """A text; `check` may refuse it by a :class:`PlanError`."""

    may_be_empty: bool = False
    check: Callable[[str], object] | None = None
    #: What the schema can say of the check: an ECMA regular expression.
    pattern: str | None = None

    def read(self, node: Node) -> str:
        if not isinstance(node.value, str):
            quote = ": put it in quotes" if isinstance(node.value, (int, float)) else ""
            raise node.error(f"this must be a text, not {node.describe()}{quote}.")
        if not node.value and not self.may_be_empty:
            raise node.error("this text is empty.")
        if self.check is not None:
            try:
                self.check(node.value)
            except PlanError as error:
                raise node.error(str(error)) from None
        return node.value

    def shape(self) -> Schema:
        shape: Schema = {"type": "string"}
        if not self.may_be_empty:
            shape["minLength"] = 1
        if self.pattern is not None:
            shape["pattern"] = self.pattern
        return shape


@dataclass(frozen=True)
class Choice(Kind[str]):
    """One word of a few."""

    options: tuple[str, ...]

    def read(self, node: Node) -> str:
        if isinstance(node.value, str) and node.value in self.options:
            return node.value
        if isinstance(node.value, str):
            raise node.error(f"there is no {node.value!r} here; {nearest_names(node.value, self.options)}")
        raise node.error(f"this must be one of {', '.join(self.options)}, not {node.describe()}.")

    def shape(self) -> Schema:
        return {"enum": list(self.options)}


@dataclass(frozen=True)
class Whole(Kind[int]):
    """A whole number; 8.0 is one too, as in JSON Schema."""

    least: int
    most: int

    def read(self, node: Node) -> int:
        value = node.value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
            advice = ": drop the quotes" if isinstance(value, str) and value.strip().isdigit() else ""
            raise node.error(f"this must be a whole number, not {node.describe()}{advice}.")
        if not self.least <= value <= self.most:
            only = f"{self.least}" if self.least == self.most else f"{self.least} to {self.most}"
            raise node.error(f"this must be {only}, not {value}.")
        return int(value)

    def shape(self) -> Schema:
        return {"type": "integer", "minimum": self.least, "maximum": self.most}


@dataclass(frozen=True)
class Number(Kind[float]):
    """A finite number."""

    def read(self, node: Node) -> float:
        value = node.value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < math.inf:
            raise node.error(f"this must be a number, not {node.describe()}.")
        return float(value)

    def shape(self) -> Schema:
        return {"type": "number"}


@dataclass(frozen=True)
class Share(Kind[float]):
    """A number above 0, at most 1."""

    def read(self, node: Node) -> float:
        value = node.value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            hint = ": write it as 0.01" if isinstance(value, str) else ""
            raise node.error(f"this must be a number above 0, at most 1, not {node.describe()}{hint}.")
        if not 0 < value <= 1:
            raise node.error(f"this must be above 0 and at most 1, not {value}.")
        return float(value)

    def shape(self) -> Schema:
        return {"type": "number", "exclusiveMinimum": 0, "maximum": 1}


@dataclass(frozen=True)
class Flag(Kind[bool]):
    """true or false."""

    def read(self, node: Node) -> bool:
        if not isinstance(node.value, bool):
            raise node.error(f"this must be true or false, not {node.describe()}.")
        return node.value

    def shape(self) -> Schema:
        return {"type": "boolean"}


@dataclass(frozen=True)
class OneOrMore(Kind[tuple[T, ...]]):
    """A value, or a list of such values that is not empty."""

    item: Kind[T]

    def read(self, node: Node) -> tuple[T, ...]:
        if not isinstance(node.value, list):
            return (self.item.read(node),)
        if not node.value:
            raise node.error("this list is empty.")
        return tuple(self.item.read(item) for item in node.value)

    def shape(self) -> Schema:
        return {"anyOf": [self.item.schema(), {"type": "array", "items": self.item.schema(), "minItems": 1}]}


@dataclass(frozen=True)
class Listing(Kind[tuple[T, ...]]):
    """A list, perhaps empty."""

    item: Kind[T]

    def read(self, node: Node) -> tuple[T, ...]:
        return tuple(self.item.read(item) for item in items_of(node))

    def shape(self) -> Schema:
        return {"type": "array", "items": self.item.schema()}


@dataclass(frozen=True)
class Named(Kind[dict[str, T]]):
    """A mapping from names of the user's own to values."""

    item: Kind[T]
    check_name: Callable[[str], object]
    name_schema: Schema

    def read(self, node: Node) -> dict[str, T]:
        values: dict[str, T] = {}
        for name, item in entries_of(node).items():
            try:
                self.check_name(name)
            except (FormatError, PlanError) as error:
                raise item.error(str(error)) from None
            values[name] = self.item.read(item)
        return values

    def shape(self) -> Schema:
        return {"type": "object", "propertyNames": self.name_schema, "additionalProperties": self.item.schema()}


@dataclass(frozen=True)
class Anything(Kind[Any]):
    """A text, or a mapping of whatever JSON can say: kept, never interpreted."""

    def read(self, node: Node) -> Any:
        if not isinstance(node.value, (str, dict)):
            raise node.error(f"this must be a text or a mapping, not {node.describe()}.")
        return plain(node)

    def shape(self) -> Schema:
        return {"type": ["string", "object"]}


#: Keys that are easily forgotten.
_EXAMPLES = {"version": "version: 1", "format": "format: int8", "to": "promote: {to: bf16}"}


@dataclass(frozen=True)
class Record(Kind[dict[str, Any]]):
    """A mapping with known keys."""

    fields: Mapping[str, Kind[Any]]
    required: tuple[str, ...] = ()

    def read(self, node: Node) -> dict[str, Any]:
        entries = entries_of(node)
        for key, item in entries.items():
            if key not in self.fields:
                # The key's own name is in the field that the message names, so the place is the mapping around it.
                place = Node(None, node.source, node.field, item.line)
                name, colon, _ = key.partition(":")
                if colon and name in self.fields:
                    raise place.error(f"a space is missing after {name}: in {key!r}; write {name}: and then the value.")
                raise place.error(f"there is no key {key!r} here; {nearest_names(key, self.fields)}")
        for key in self.required:
            if key not in entries:
                example = f", as in {_EXAMPLES[key]}" if key in _EXAMPLES else ""
                raise node.error(f"the key {key!r} is missing: add it{example}.")
        return {key: self.fields[key].read(item) for key, item in entries.items()}

    def shape(self) -> Schema:
        return {
            "type": "object",
            "properties": {key: kind.schema() for key, kind in self.fields.items()},
            "required": list(self.required),
            "additionalProperties": False,
        }


def entries_of(node: Node) -> dict[str, Node]:
    """The entries of a mapping, or a sentence."""
    if not isinstance(node.value, dict):
        advice = (
            ": promote: {to: bf16} names the quantizer of promoted tensors" if node.field.endswith("promote") else ""
        )
        raise node.error(f"this must be a mapping, not {node.describe()}{advice}.")
    return node.value


def items_of(node: Node) -> list[Node]:
    """The items of a list, or a sentence."""
    if not isinstance(node.value, list):
        advice = ": put it into a list, [...]" if isinstance(node.value, dict) else ""
        raise node.error(f"this must be a list, not {node.describe()}{advice}.")
    return node.value


def plain(node: Node) -> Any:
    """The node's value without places."""
    if isinstance(node.value, dict):
        return {key: plain(item) for key, item in node.value.items()}
    if isinstance(node.value, list):
        return [plain(item) for item in node.value]
    return node.value
