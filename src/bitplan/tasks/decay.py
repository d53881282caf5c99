"""How a learning rate changes over a run: factors of its peak, as functions of the step."""

from __future__ import annotations

import math

#: Names of the ways to fall.
DECAYS = ("constant", "steps", "cosine", "linear")


def decayed(decay: str, step: int, steps: int, warmup: int = 0) -> float:
    """The factor at `step` of `steps`: a linear rise over the first `warmup` steps, then the fall.

    ``steps`` divides by ten at 50 % and again at 75 % of the run; ``cosine`` and ``linear`` fall to zero at its end.

    >>> [decayed("steps", step, 100) for step in (0, 50, 75)]
    [1.0, 0.1, 0.01]
    >>> decayed("cosine", 50, 100)
    0.5
    >>> [decayed("constant", step, 100, warmup=2) for step in (0, 1, 2)]
    [0.5, 1.0, 1.0]
    """
    if step < warmup:
        return (step + 1) / warmup
    if decay == "constant":
        return 1.0
    if decay == "steps":
        return (1.0, 0.1, 0.01)[(step >= steps * 0.5) + (step >= steps * 0.75)]
    gone = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 1 - gone if decay == "linear" else (1 + math.cos(math.pi * gone)) / 2
