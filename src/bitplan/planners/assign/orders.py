"""In which order groups are given a lower precision: a list of moves, of which a cut makes an assignment."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bitplan.errors import PlanError, nearest_names
from bitplan.planners.assign.groups import Group

ORDERS = ("largest", "smallest", "random", "sensitivity")


@dataclass(frozen=True)
class Move:
    """A group goes down to a level."""

    group: int
    level: int


def moves_of(order: str, groups: Sequence[Group], lowest: int, seed: int = 0) -> list[Move]:
    """All moves, level by level: every group goes down to the first, then every group to the next.

    >>> groups = [Group(0, "input", 5, 1), Group(1, "a/linear.0", 9, 1), Group(2, "b/linear.0", 9, 1)]
    >>> [move.group for move in moves_of("largest", groups, 1)]
    [1, 2, 0]
    """
    require_order(order)
    numbers = [group.number for group in groups]
    sizes = {group.number: group.size for group in groups}
    if order == "largest":
        numbers.sort(key=lambda number: (-sizes[number], number))
    elif order == "smallest":
        numbers.sort(key=lambda number: (sizes[number], number))
    elif order == "random":
        random.Random(seed).shuffle(numbers)
    else:
        raise PlanError("the order sensitivity needs the damage of every move, which a probe measures.")
    return [Move(number, level) for level in range(1, lowest + 1) for number in numbers]


def moves_by_damage(damages: Mapping[Move, float], savings: Mapping[Move, float]) -> list[Move]:
    """Least damage per byte saved first. A group goes down level by level, so a move waits for the one before it.

    :param damages: of having made the move; what a further one adds is the difference.

    >>> moves = [Move(0, 1), Move(1, 1)]
    >>> moves_by_damage(dict(zip(moves, (3.0, 1.0))), dict.fromkeys(moves, 2.0))[0]
    Move(group=1, level=1)
    """
    waiting = sorted(damages, key=lambda move: (move.level, move.group))
    ordered: list[Move] = []
    reached: dict[int, int] = {}
    while waiting:
        ready = [move for move in waiting if move.level == reached.get(move.group, 0) + 1]
        best = min(ready, key=lambda move: (_added(move, damages) / max(savings[move], 1.0), move.level, move.group))
        ordered.append(best)
        reached[best.group] = best.level
        waiting.remove(best)
    return ordered


def _added(move: Move, damages: Mapping[Move, float]) -> float:
    before = damages.get(Move(move.group, move.level - 1), 0.0)
    return max(damages[move] - before, 0.0) if before < damages[move] else 0.0


def require_order(order: str) -> None:
    if order not in ORDERS:
        raise PlanError(f"there is no order {order!r}; {nearest_names(order, ORDERS)}")
