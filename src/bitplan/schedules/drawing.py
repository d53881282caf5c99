"""Schedules drawn with characters."""

from __future__ import annotations

import numpy as np

from bitplan.schedules.base import Schedule

_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_BARS = ".:-=+*#@"
#: No drawing shows more steps than this.
_FINEST = 100_000


def sampled(schedule: Schedule, total: int, columns: int) -> list[int]:
    """The bits in so many columns: of each, those farthest from the mean, so that short peaks and dips are seen."""
    bits = schedule.table(min(total, _FINEST))
    mean = bits.mean()
    parts = np.array_split(bits, min(columns, len(bits)))
    return [int(part[np.abs(part - mean).argmax()]) for part in parts]


def sparkline(schedule: Schedule, total: int, columns: int = 64, plain: bool = False) -> str:
    """One line: the higher the bar, the more bits. `plain`: in ASCII.

    >>> from bitplan.schedules import schedule
    >>> sparkline(schedule("LR", low=3, high=8, cycles=2), 1000, 16)
    '▁▂▂▅▅▇▇█▁▂▂▅▅▇▇█'
    """
    bars = _PLAIN_BARS if plain else _BARS
    span = max(schedule.highest - schedule.lowest, 1)
    return "".join(
        bars[round((bits - schedule.lowest) / span * (len(bars) - 1))] for bits in sampled(schedule, total, columns)
    )


def drawing(schedule: Schedule, total: int, columns: int = 72, plain: bool = False) -> list[str]:
    """A line for each number of bits, the highest first, and one for the steps."""
    bits = sampled(schedule, total, columns)
    full = "#" if plain else "█"
    lines = []
    for level in range(schedule.highest, schedule.lowest - 1, -1):
        lines.append(f"{level:>3} |" + "".join(full if here >= level else " " for here in bits).rstrip())
    lines.append("    +" + "-" * len(bits))
    last = f"step {total - 1:,}" if total > 1 else ""
    lines.append(f"     step 0{last:>{max(len(bits) - 6, len(last) + 2)}}")
    return lines
