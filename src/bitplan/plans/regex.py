r"""Regular expressions of plans, matched in bounded time.

Python's ``re`` backtracks: ``(\w+\.?)+!`` takes minutes on an ordinary module path, and a plan may come from anybody.
So an expression that can backtrack much is matched here, by following the set of all positions that a prefix of the
expression can reach. Each part advances the whole set at once, whatever the text. Single characters and anchors are
left to ``re``. What a set of positions cannot express is refused: references to groups, and atomic groups.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
from typing import Any

#: (text, positions before) -> positions after.
Advance = Callable[[str, frozenset[int]], frozenset[int]]

#: How many results are kept, longer than any path.
_MOST_KNOWN = 4096

_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT)
_SINGLE = (_constants.LITERAL, _constants.NOT_LITERAL, _constants.ANY, _constants.IN, _constants.AT)
_ASSERTIONS = (_constants.ASSERT, _constants.ASSERT_NOT)


def compile_expression(source: str) -> re.Pattern[str] | BoundedExpression:
    """The expression, whose ``fullmatch`` takes little time on any path. Raises ``re.error`` where there is none."""
    compiled = re.compile(source)
    if _backtracks_little(_parser.parse(source)):
        return compiled
    expression = BoundedExpression(source)
    expression.fullmatch("")  # what is refused is noticed now
    return expression


def _backtracks_little(tree: Any) -> bool:
    """Whether at most two parts repeat, and these are single characters: quadratic in the length of the path."""
    repeats = 0
    for op, value in _flat(tree):
        if op in _REPEATS:
            repeats += 1
            if any(inner not in _SINGLE for inner, _ in value[2]):
                return False
        elif op not in (*_SINGLE, _constants.SUBPATTERN, _constants.BRANCH):
            return False
    return repeats <= 2


def _flat(nodes: Iterable[Any]) -> Iterable[Any]:
    """Every node outside of repetitions, which are listed but not entered."""
    for op, value in nodes:
        yield op, value
        if op is _constants.SUBPATTERN:
            yield from _flat(value[-1])
        elif op is _constants.BRANCH:
            for branch in value[1]:
                yield from _flat(branch)


@dataclass(frozen=True)
class BoundedExpression:
    """A regular expression that is matched without backtracking."""

    source: str

    @cached_property
    def _advance(self) -> Advance:
        tree = _parser.parse(self.source)
        return _sequence(tree, tree.state.flags)

    def fullmatch(self, text: str) -> bool:
        """Whether the expression matches the whole text."""
        return _fullmatch(self, text)

    def __reduce__(self) -> tuple[type[BoundedExpression], tuple[str]]:
        return BoundedExpression, (self.source,)


@lru_cache(maxsize=65536)
def _fullmatch(expression: BoundedExpression, text: str) -> bool:
    return len(text) in expression._advance(text, frozenset({0}))


def _sequence(nodes: Iterable[Any], flags: int) -> Advance:
    parts = [_part(op, value, flags) for op, value in nodes]

    def advance(text: str, positions: frozenset[int]) -> frozenset[int]:
        for part in parts:
            if not positions:
                break
            positions = part(text, positions)
        return positions

    return advance


def _part(op: Any, value: Any, flags: int) -> Advance:
    if op in _SINGLE:
        return _single(op, value, flags)
    if op is _constants.SUBPATTERN:
        _, added, removed, body = value
        return _sequence(body, (flags | added) & ~removed)
    if op is _constants.BRANCH:
        branches = [_sequence(branch, flags) for branch in value[1]]
        return lambda text, positions: frozenset().union(*(branch(text, positions) for branch in branches))
    if op in _REPEATS:
        least, most, body = value
        return _repeated(_sequence(body, flags), least, most)
    if op in _ASSERTIONS:
        direction, body = value
        width = body.getwidth()[0] if direction < 0 else 0  # what looks behind has one width
        return _asserted(_sequence(body, flags), width, op is _constants.ASSERT)
    raise re.error("references to groups, atomic groups and possessive repetitions are not supported in plans")


def _single(op: Any, value: Any, flags: int) -> Advance:
    tree = _parser.SubPattern(_parser.State(), [(op, value)])
    tree.state.flags = flags
    match = _compiler.compile(tree, flags).match

    def advance(text: str, positions: frozenset[int]) -> frozenset[int]:
        found = (match(text, position) for position in positions)
        return frozenset(hit.end() for hit in found if hit is not None)

    return advance


def _repeated(body: Advance, least: int, most: int) -> Advance:
    from_each = _by_position(body)

    def advance(text: str, positions: frozenset[int]) -> frozenset[int]:
        for _ in range(min(least, len(text) + 1)):  # after that many rounds nothing new is reached
            before, positions = positions, from_each(text, positions)
            if positions == before:
                break
        reached = frontier = positions
        for _ in range(min(most - least, len(text) + 1)):
            frontier = from_each(text, frontier) - reached
            if not frontier:
                break
            reached |= frontier
        return reached

    return advance


def _by_position(body: Advance) -> Advance:
    """`body`, computed once for each position of a text, however often repetitions around it ask."""
    known: dict[tuple[str, int], frozenset[int]] = {}

    def advance(text: str, positions: frozenset[int]) -> frozenset[int]:
        if len(known) > _MOST_KNOWN:
            known.clear()
        reached: set[int] = set()
        for position in positions:
            ends = known.get((text, position))
            if ends is None:
                ends = known[text, position] = body(text, frozenset({position}))
            reached |= ends
        return frozenset(reached)

    return advance


def _asserted(body: Advance, width: int, holds: bool) -> Advance:
    def is_met(text: str, position: int) -> bool:
        start = position - width
        if start < 0:
            return not holds
        reached = body(text, frozenset({start}))
        return (position in reached if width else bool(reached)) == holds

    return lambda text, positions: frozenset(position for position in positions if is_met(text, position))
