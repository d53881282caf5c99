"""Schedules drawn with plotly, for notebooks and pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bitplan.errors import ScheduleError
from bitplan.plans.schedules.base import Schedule, Whole, check_total

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


# --- Schedules drawn with characters


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

    >>> from bitplan.plans.schedules import schedule
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


#: No drawing looks at more steps than this; of longer runs it takes so many, spread evenly.
_FINEST_PLOT = 100_000
#: The line's colour: one that reports know a partner of on dark ground.
LINE = "#0068a8"


@dataclass(frozen=True)
class Piece:
    """Steps in a row that have the same bits."""

    first: int
    last: int
    bits: int


def pieces_of(schedule: Schedule, total: int) -> list[Piece]:
    """The run as pieces of equal bits.

    >>> from bitplan.plans.schedules import schedule
    >>> pieces_of(schedule("deficit", low=3, high=8, start=2, end=5), 8)
    [Piece(first=0, last=1, bits=8), Piece(first=2, last=4, bits=3), Piece(first=5, last=7, bits=8)]
    """
    check_total(total)
    steps = np.arange(total, dtype=np.int64) if total <= _FINEST_PLOT else _spread(total)
    bits = schedule.at(steps, total)
    begins = [0, *(np.flatnonzero(np.diff(bits)) + 1).tolist()]
    firsts = [int(steps[begin]) for begin in begins]
    lasts = [*(first - 1 for first in firsts[1:]), total - 1]
    return [Piece(first, last, int(bits[begin])) for first, last, begin in zip(firsts, lasts, begins, strict=True)]


def _spread(total: int) -> Whole:
    """As many steps as a drawing looks at, the first and the last among them."""
    return np.linspace(0, total - 1, _FINEST_PLOT).round().astype(np.int64)


def schedule_figure(schedule: Schedule, total: int) -> Figure:
    """The bits over a run of `total` steps."""
    try:
        import plotly.graph_objects as go
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "plotly":
            raise
        raise ScheduleError(
            "drawing a schedule needs plotly, which is not installed: run 'pip install plotly'."
        ) from None
    pieces = pieces_of(schedule, total)
    ends = [pieces[-1].last + 1], [pieces[-1].bits]
    figure = go.Figure(
        go.Scatter(
            x=[*(piece.first for piece in pieces), *ends[0]],
            y=[*(piece.bits for piece in pieces), *ends[1]],
            mode="lines",
            line={"color": LINE, "width": 2.2, "shape": "hv"},
            hovertemplate="from step %{x}: %{y} bits<extra></extra>",
            name=str(schedule),
        )
    )
    low, high = schedule.lowest, schedule.highest
    figure.update_layout(
        title=f"{schedule}, over {total:,} steps",
        xaxis={"title": "step", "range": [0, total]},
        yaxis={"title": "bits", "range": [low - 0.5, high + 0.5], "dtick": 1 if high - low <= 12 else 4},
        template="none",
        showlegend=False,
    )
    return figure
