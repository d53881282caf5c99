"""Plan texts as trees of plain values that know their file, line and field. Nothing read here can run code.

YAML is taken in a narrow reading, on purpose: the scalars of YAML 1.2 (so ``1e-2`` is a number, and ``on`` and ``no``
are text), no tags, no anchors, no duplicate keys, and limits on size and depth. What JSON and Python mappings
can say is the same, so all three give the same tree.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from bitplan.errors import PlanError

Scalar = str | int | float | bool | None

#: A plan that names every layer of a very large model stays under a tenth of this.
MAX_CHARACTERS = 1_000_000
#: Plans are at most five levels deep, but `made_by` may hold a structure of its own.
MAX_DEPTH = 32

_NULLS = {"", "~", "null", "Null", "NULL"}

_BOOLEANS = {word: value for value in (True, False) for word in (str(value), str(value).lower(), str(value).upper())}

_INTEGER = re.compile(r"[-+]?[0-9]+")
#: Every plain YAML scalar that is a number; the writer quotes texts that look like one.
NUMBER = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")


@dataclass(frozen=True)
class Node:
    """One value of a plan, and where it stands."""

    value: Scalar | list[Node] | dict[str, Node]
    source: str
    #: Such as ``rules[1].weight``; empty for the whole plan.
    field: str = ""
    line: int | None = None

    @property
    def where(self) -> str:
        """``plan.yaml:7: rules[1].weight``, without what is not known."""
        place = self.source if self.line is None else f"{self.source}:{self.line}"
        return f"{place}: {self.field}" if self.field else place

    def error(self, sentence: str) -> PlanError:
        return PlanError(f"{self.where}: {sentence}")

    def child(self, key: str | int, value: Any = None, line: int | None = None) -> Node:
        """A node of the same source one level down; its value may be filled in by the caller."""
        step = f"[{key}]" if isinstance(key, int) else f".{key}" if self.field else key
        return Node(value, self.source, self.field + step, line)

    def describe(self) -> str:
        """The value's kind in the words of a plan, for "..., not ..."."""
        match self.value:
            case None:
                return "nothing"
            case bool():
                return str(self.value).lower()
            case dict():
                return "a mapping"
            case list():
                return "a list"
            case str():
                return f"the text {self.value!r}" if len(self.value) <= 40 else "a long text"
            case _:
                return f"the number {self.value}"


def tree_from_yaml(text: str, source: str) -> Node:
    """The tree of a YAML text, or one sentence about why there is none."""
    document = _compose(_checked_size(text, source), source, "YAML")
    root = Node(None, source)
    return root if document is None else _from_yaml_node(document, root, 1)


def _compose(text: str, source: str, language: str) -> yaml.Node | None:
    """PyYAML's nodes, which know their lines; `language` is what error messages call the text."""
    loader = None
    try:
        loader = _Composer(text)
        document: yaml.Node | None = loader.get_single_node()
    except _Refused as refused:
        raise PlanError(f"{source}:{refused.line}: {refused.sentence}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = source if mark is None else f"{source}:{mark.line + 1}"
        problem = error.problem or "it cannot be parsed"
        if "\\t" in problem:
            raise PlanError(f"{place}: a tab stands where YAML wants spaces: indent with spaces.") from None
        if "single document" in (error.context or ""):
            raise PlanError(f"{place}: a second document starts here: one file holds one plan.") from None
        if error.context == "while scanning an alias":
            raise PlanError(f'{place}: a * begins an alias in YAML: write it in quotes, as in match: "*".') from None
        if "cannot start any token" in problem:
            problem += "; put a text that begins with it in quotes"
        raise PlanError(f"{place}: this is not {language}: {problem}.") from None
    except yaml.reader.ReaderError as error:
        place = f"{source}:{text.count(chr(10), 0, error.position) + 1}"
        raise PlanError(f"{place}: the character {text[error.position]!r} is not allowed in a plan.") from None
    except (ValueError, OverflowError) as error:  # PyYAML lets through what chr() and int() say to broken escapes
        raise PlanError(f"{source}: this is not {language}: {error}.") from None
    finally:
        if loader is not None:
            loader.dispose()
    return document


class _Refused(Exception):
    """Something valid in YAML that plans do without."""

    def __init__(self, mark: yaml.Mark, sentence: str) -> None:
        super().__init__(sentence)
        self.line = mark.line + 1
        self.sentence = sentence


class _Composer(yaml.SafeLoader):
    """Only composes: the values are made by :func:`_from_yaml_node`, never by a constructor of PyYAML."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        # Aliases let a few bytes stand for gigabytes; a plan has names for what it says twice.
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise _Refused(event.start_mark, "plans have no anchors (& and *): give the value a name under quantizers.")
        if getattr(event, "tag", None):
            raise _Refused(event.start_mark, f"plans have no tags such as {str(event.tag)[:60]!r}: drop it.")
        if self._depth >= MAX_DEPTH:
            raise _Refused(event.start_mark, f"this is nested more than {MAX_DEPTH} levels deep.")
        self._depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _from_yaml_node(node: yaml.Node, at: Node, line: int) -> Node:
    if isinstance(node, yaml.MappingNode):
        entries: dict[str, Node] = {}
        for key_node, value_node in node.value:
            key_line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise at.child("?", line=key_line).error("a key must be a text.")
            child = at.child(key_node.value, line=key_line)
            _refuse_duplicate(entries, key_node.value, child)
            entries[key_node.value] = _from_yaml_node(value_node, child, key_line)
        return Node(entries, at.source, at.field, line)
    if isinstance(node, yaml.SequenceNode):
        lines = [item.start_mark.line + 1 for item in node.value]
        items = [_from_yaml_node(item, at.child(i), lines[i]) for i, item in enumerate(node.value)]
        return Node(items, at.source, at.field, line)
    here = Node(None, at.source, at.field, line)
    is_plain = isinstance(node, yaml.ScalarNode) and node.style is None  # quoted and block texts have a style
    return Node(_plain_scalar(node.value, here) if is_plain else node.value, at.source, at.field, line)


#: Python refuses to read integers of thousands of digits.
_MOST_DIGITS = 400
_TOO_LONG = "this number is too long."


def _plain_scalar(text: str, at: Node) -> Scalar:
    if text in _NULLS:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if not NUMBER.fullmatch(text):
        return text
    if len(text) > _MOST_DIGITS:
        raise at.error(_TOO_LONG)
    return int(text) if _INTEGER.fullmatch(text) else _finite(float(text), at)


def _finite(number: float, at: Node) -> float:
    if not math.isfinite(number):
        raise at.error("numbers in a plan are finite.")
    return number


def _refuse_duplicate(entries: dict[str, Node], key: str, again: Node) -> None:
    if key in entries:
        first = entries[key].line
        raise again.error(f"the key {key!r} is given twice{f' (first in line {first})' if first else ''}: drop one.")


class _Pairs(list[tuple[str, Any]]):
    """A JSON object with its duplicate keys."""


def tree_from_json(text: str, source: str) -> Node:
    """The tree of a JSON text: values as json reads them, lines as PyYAML counts them, for JSON is YAML."""
    text = _checked_size(text, source)
    try:
        value = json.loads(text, object_pairs_hook=_Pairs)
    except json.JSONDecodeError as error:
        problem = error.msg[:1].lower() + error.msg[1:]
        raise PlanError(f"{source}:{error.lineno}: this is not JSON: {problem}.") from None
    except ValueError as error:  # integers of thousands of digits
        raise PlanError(f"{source}: this is not JSON: {error}.") from None
    except RecursionError:
        raise PlanError(f"{source}: this is nested more than {MAX_DEPTH} levels deep.") from None
    # Strings of JSON hold no tabs, and between its tokens PyYAML takes none.
    document = _compose(text.replace("\t", " "), source, "JSON")
    assert document is not None
    return _from_json(value, document, Node(None, source), document.start_mark.line + 1)


def _from_json(value: Any, node: yaml.Node, at: Node, line: int) -> Node:
    if isinstance(value, _Pairs):
        entries: dict[str, Node] = {}
        for (key, item), (key_node, item_node) in zip(value, node.value, strict=True):
            key_line = key_node.start_mark.line + 1
            child = at.child(key, line=key_line)
            _refuse_duplicate(entries, key, child)
            entries[key] = _from_json(item, item_node, child, key_line)
        return Node(entries, at.source, at.field, line)
    if isinstance(value, list):
        items = [
            _from_json(item, item_node, at.child(index), item_node.start_mark.line + 1)
            for index, (item, item_node) in enumerate(zip(value, node.value, strict=True))
        ]
        return Node(items, at.source, at.field, line)
    scalar = Node(value, at.source, at.field, line)
    if isinstance(value, float):
        _finite(value, scalar)
    return scalar


def tree_from_data(data: object, source: str) -> Node:
    """The tree of what YAML or JSON would have given: mappings, lists, texts, numbers, booleans, None."""
    return _from_data(data, Node(None, source), 0)


def _from_data(data: object, at: Node, depth: int) -> Node:
    if depth >= MAX_DEPTH:
        raise at.error(f"this is nested more than {MAX_DEPTH} levels deep.")
    value: Scalar | list[Node] | dict[str, Node]
    match data:
        case None | bool():
            value = data
        # Subclasses, such as numpy's float64, become the plain value that a text would have given.
        case float():
            value = _finite(float(data), at)
        case int():
            if abs(data) >= 10 ** (_MOST_DIGITS - 1):  # with a sign, as many characters
                raise at.error(_TOO_LONG)
            value = int(data)
        case str():
            value = str.__str__(data)
        case list() | tuple():
            value = [_from_data(item, at.child(i), depth + 1) for i, item in enumerate(data)]
        case Mapping():
            value = {}
            for key, item in data.items():
                if not isinstance(key, str):
                    raise at.error(f"a key must be a text, not {key!r:.60}.")
                value[key] = _from_data(item, at.child(key), depth + 1)
        case _:
            advice = " A format has a name, such as e4m3, bf16 or int8." if type(data).__name__ == "dtype" else ""
            raise at.error(f"a plan holds mappings, lists, texts and numbers, not {type(data).__name__}.{advice}")
    return Node(value, at.source, at.field)


def _checked_size(text: object, source: str) -> str:
    if not isinstance(text, str):
        raise PlanError(f"{source}: the plan must be a text, not {type(text).__name__}.")
    if len(text) > MAX_CHARACTERS:
        raise PlanError(f"{source}: a plan has at most {MAX_CHARACTERS:,} characters, not {len(text):,}.")
    return text.removeprefix("\ufeff")


# --- writing ---


class _Dumper(yaml.SafeDumper):
    """Quotes what either YAML 1.1 (other tools) or our reading of it (``1e-2``) would not take for a text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Outside double quotes PyYAML folds some line breaks (U+0085 among them) into spaces.
    style = '"' if text and text.splitlines() != [text] else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)

_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, list("-+.0123456789"))


def yaml_text(data: dict[str, Any]) -> str:
    """One YAML document; the innermost mappings and lists stand on one line, as in ``{match: fc, keep: true}``."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, default_flow_style=None, allow_unicode=True, width=110)
    return text
