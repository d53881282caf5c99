"""The Pareto front: what nothing else beats in both price and result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal


def pareto_front(points: Sequence[tuple[float, float]], better: Literal["higher", "lower"]) -> list[int]:
    """The indexes of the points (price, result) that no other point dominates, from cheap to dear.

    A point dominates another that it beats in one of the two and is not worse in the other; a lower price is always
    better. Equal points do not dominate each other, and what is not a number is on no front.

    >>> pareto_front([(1.0, 0.9), (2.0, 0.8), (3.0, 0.95)], "higher")
    [0, 2]
    """
    sign = 1.0 if better == "higher" else -1.0
    known = [i for i, (price, result) in enumerate(points) if price == price and result == result]
    order = sorted(known, key=lambda i: (points[i][0], -sign * points[i][1]))
    front: list[int] = []
    for i in order:
        price, result = points[i]
        if not front or sign * result > sign * points[front[-1]][1] or points[front[-1]] == (price, result):
            front.append(i)
    return front
