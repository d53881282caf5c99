r"""Patterns over module paths and operations, and the sentence for a rule that matched nothing.

==================  ===============================================================================
``layer1``          that module and everything beneath it: ``layer1.0.conv1`` too, ``layer10`` not
``layer[12].*.bn?`` a glob, as soon as it has one of ``* ? [``; ``*`` crosses dots. A module that
                    it fits is meant with everything beneath it, as with a plain path
``re:.*conv\d``     a regular expression for the *whole* path, and nothing beneath: the exact form
``""`` or ``*``     everything; the path of the model itself is ``""``
==================  ===============================================================================

Operations (``conv2d``, ``linear``, ``add``) are matched by the same patterns. Where the caller tells apart the
occurrences of an operation in one module (``relu.0``, ``relu.1``), ``relu`` means all of them and ``relu.1`` one.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Literal, Protocol

from bitplan.errors import PlanError
from bitplan.numerics.wire_format import DGRAD, FPROP, ROLES, SLOTS, WGRAD
from bitplan.plans.regex import BoundedExpression, compile_expression

# --- Where a rule can round: the four roles, the six operand slots, and the shorthands that mean several of them


#: What a tensor of training is, and the operands of the three products.
PLACES: tuple[str, ...] = (*ROLES, *SLOTS)

#: An operand in both of its products: rounded once, and the one rounded tensor is shared.
OPERANDS: dict[str, tuple[str, str]] = {
    "x": ("fprop.x", "wgrad.x"),
    "w": ("fprop.w", "dgrad.w"),
    "dy": ("dgrad.dy", "wgrad.dy"),
}
#: Both operands of one product: two different tensors, each rounded by itself.
PASSES: dict[str, tuple[str, str]] = {
    FPROP: ("fprop.x", "fprop.w"),
    DGRAD: ("dgrad.dy", "dgrad.w"),
    WGRAD: ("wgrad.dy", "wgrad.x"),
}

#: Every key of a rule that takes a quantizer, in the order rules are printed, with the places it means.
KEYS: dict[str, tuple[str, ...]] = {
    **{role: (role,) for role in ROLES},
    **OPERANDS,
    **PASSES,
    **{slot: (slot,) for slot in SLOTS},
}

#: Keys that one rule cannot both have, because a place would get two quantizers.
CONFLICTS: tuple[tuple[str, str], ...] = tuple(
    (one, other) for one, other in combinations(KEYS, 2) if set(KEYS[one]) & set(KEYS[other])
)

#: Where a gradient that flows back through a fan-out is rounded: once where it was summed up, in the module that
#: produced the activation, or each branch by itself where it leaves the consumer.
GradAt = Literal["producer", "consumer"]


# --- Which tensors a rule chooses by what they are in the model's graph, see bitplan.capture.selectors


#: What may be said of the tensor that an operation returns.
SELECTORS: dict[str, str] = {
    "product": "returned by a matrix product: linear, convolution, matmul, addmm, einsum",
    "weight-product": "returned by a product of an activation with a parameter",
    "first-product": "returned by a product with a parameter that none comes before",
    "last-product": "returned by a product with a parameter that none comes after: a head, a classifier",
    "gate": "a half of a gate: two products of one tensor, or two parts of one product, multiplied with each other",
    "widening": "returned by a product, and larger than what was multiplied with the weight",
    "router": "returned by a product, and ranked by topk or argmax, as the scores of experts are",
    "residual": "a sum of a tensor and of a branch that was computed from it",
    "saved": "kept for the backward pass, if nothing is planned",
    "pointwise-readers": "read by pointwise operations only, such as gelu or mul, and not by a norm",
    "nonlinear-readers": "read by a nonlinear pointwise function, such as gelu, relu or silu",
    "norm-readers": "read by a norm, fused or written out",
}

#: In front of a selector: the opposite.
NOT = "not "

#: All that `select` may hold.
SELECTIONS: tuple[str, ...] = (*SELECTORS, *(f"{NOT}{name}" for name in SELECTORS))


#: What makes a pattern a regular expression.
REGEX_PREFIX = "re:"

_GLOB_SIGNS = "*?["


class Matching(Protocol):
    """What matching needs of a rule."""

    @property
    def match(self) -> tuple[str, ...]: ...
    @property
    def op(self) -> tuple[str, ...]: ...
    @property
    def where(self) -> str: ...


@dataclass(frozen=True)
class Pattern:
    """One pattern, compiled; a plain value, so that plans can be pickled and copied."""

    text: str
    #: None for a plain path, which is compared as it stands: plans that name every layer have thousands of these.
    expression: re.Pattern[str] | BoundedExpression | None = None
    with_everything_beneath: bool = True

    def __call__(self, path: str) -> bool:
        if self.expression is None:
            return path == self.text or not self.text or path.startswith(f"{self.text}.")
        if self.expression.fullmatch(path):
            return True
        return self.with_everything_beneath and any(map(self.expression.fullmatch, ancestors(path)))


def is_pattern(text: str) -> bool:
    """Whether the text is more than a name: a glob or a regular expression."""
    return text.startswith(REGEX_PREFIX) or any(sign in text for sign in _GLOB_SIGNS)


@lru_cache(maxsize=4096)
def compile_pattern(text: str) -> Pattern:
    """The pattern a text stands for.

    >>> compile_pattern("layer1")("layer1.0.conv1"), compile_pattern("layer1")("layer10")
    (True, False)
    """
    if not text.startswith(REGEX_PREFIX):
        return Pattern(text, re.compile(fnmatch.translate(text)) if is_pattern(text) else None)
    source = text.removeprefix(REGEX_PREFIX)
    try:
        with warnings.catch_warnings():
            # Python only warns of what a later version will read differently; a plan should not be ambiguous.
            warnings.simplefilter("error")
            return Pattern(text, compile_expression(source), with_everything_beneath=False)
    except (re.error, Warning, RecursionError, OverflowError) as error:
        raise PlanError(f"{text!r} is not a regular expression: {error}.") from None


@lru_cache(maxsize=65536)
def ancestors(path: str) -> tuple[str, ...]:
    """The paths above `path`, nearest first; the model itself, ``""``, is the last.

    >>> ancestors("layer1.0.conv1")
    ('layer1.0', 'layer1', '')
    """
    above = []
    while path:
        path = path.rpartition(".")[0]
        above.append(path)
    return tuple(above)


@dataclass(frozen=True)
class Matcher:
    """Whether a rule speaks of an operation in a module."""

    modules: tuple[Pattern, ...]
    #: Nothing here means every operation.
    operations: tuple[Pattern, ...]
    #: Whole paths, of regular expressions that are nothing but one: plans may list hundreds of modules.
    paths: frozenset[str] = frozenset()

    def __call__(self, module: str, op: str) -> bool:
        return self.matches_module(module) and self.matches_operation(op)

    def matches_module(self, path: str) -> bool:
        return path in self.paths or any(pattern(path) for pattern in self.modules)

    def matches_operation(self, op: str) -> bool:
        if not self.operations:
            return True
        bare = op.partition(".")[0]  # a regular expression for conv2d is one for conv2d.0, too
        return any(pattern(op) or pattern(bare) for pattern in self.operations)


def compile_match(rule: Matching) -> Matcher:
    """The question ``(module path, operation) -> does the rule speak of it``."""
    return _matcher(rule.match, rule.op)


@lru_cache(maxsize=4096)
def _matcher(modules: tuple[str, ...], operations: tuple[str, ...]) -> Matcher:
    exact = {text: _only_path(text) for text in modules}
    return Matcher(
        tuple(compile_pattern(text) for text in modules if exact[text] is None),
        tuple(map(compile_pattern, operations)),
        frozenset(path for path in exact.values() if path is not None),
    )


def exact_pattern(path: str) -> str:
    """The pattern of one module and nothing beneath it.

    >>> exact_pattern("layers.0.mlp")
    're:layers\\\\.0\\\\.mlp'
    """
    return REGEX_PREFIX + re.escape(path)


def _only_path(text: str) -> str | None:
    """The path that a pattern of :func:`exact_pattern` was made of; None for every other pattern."""
    path = re.sub(r"\\(.)", r"\1", text.removeprefix(REGEX_PREFIX), flags=re.DOTALL)
    return path if text == exact_pattern(path) else None


def closest(pattern: str, names: Iterable[str], most: int = 3) -> list[str]:
    """The names that someone who wrote `pattern` most likely meant, best first; none where none is near.

    >>> closest("layr1.*", ["layer1", "layer2", "head"])
    ['layer1', 'layer2']
    """
    literal = re.sub(r"[*?\[\]\\^$()|+]", "", pattern.removeprefix(REGEX_PREFIX)).strip(".")
    distinct = list(dict.fromkeys(names))
    near = difflib.get_close_matches(literal, distinct, n=most, cutoff=0.5)
    return near or _closest_by_last_part(literal, distinct)[:most]


def _closest_by_last_part(literal: str, paths: Sequence[str]) -> list[str]:
    """Paths whose last part is like that of `literal`, as patterns: ``*.gate_proj`` for ``*.gate``.

    >>> _closest_by_last_part("gate", ["layers.0.gate_proj", "layers.1.gate_proj", "head"])
    ['*.gate_proj']
    """
    last = literal.rpartition(".")[2].lower()
    by_part = {path.rpartition(".")[2]: path for path in paths if path}
    parts = [part for part in by_part if len(last) > 1 and (last in part.lower() or part.lower() in last)]
    parts += [part for part in difflib.get_close_matches(last, by_part, cutoff=0.6) if part not in parts]
    return [part if by_part[part] == part else f"*.{part}" for part in parts]


def unmatched_message(rule: Matching, module_paths: Iterable[str], ops: Iterable[str]) -> str:
    """Why a rule matched nothing among these modules and operations, with the closest names."""
    matcher = compile_match(rule)
    paths, operations = list(dict.fromkeys(module_paths)), list(dict.fromkeys(ops))
    place = f"{rule.where}: " if rule.where else ""
    if not any(map(matcher.matches_module, paths)):
        known_paths = [path for inner in paths for path in (inner, *ancestors(inner)) if path]
        is_class = any(pattern.isidentifier() and pattern[0].isupper() for pattern in rule.match)
        if is_class and not any(closest(pattern, known_paths) for pattern in rule.match):
            return (
                f"{place}the rule matches nothing: {_listed(rule.match)} is no path of a module; kinds of layers are "
                f"chosen by their operation, as in match: '*' and op: linear."
            )
        return f"{place}the rule matches nothing: no module fits {_listed(rule.match)}{_hint(rule.match, known_paths)}"
    if not any(map(matcher.matches_operation, operations)):
        return f"{place}the rule matches nothing: no operation fits {_listed(rule.op)}{_hint(rule.op, operations)}"
    return (
        f"{place}the rule matches nothing: there are modules that fit {_listed(rule.match)}, and operations that fit "
        f"{_listed(rule.op or ('*',))}, but no such operation runs in such a module."
    )


def _listed(patterns: Iterable[str]) -> str:
    return " or ".join(repr(pattern) for pattern in patterns)


def _hint(patterns: Iterable[str], known_paths: list[str]) -> str:
    near = list(dict.fromkeys(name for pattern in patterns for name in closest(pattern, known_paths)))
    if near:
        return f"; the closest are {', '.join(near)}."
    some = list(dict.fromkeys(known_paths))[:8]
    return f"; there are {', '.join(some)}{', ...' if len(set(known_paths)) > len(some) else ''}." if some else "."
