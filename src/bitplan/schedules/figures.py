"""Schedules drawn with plotly, for notebooks and pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bitplan.errors import ScheduleError
from bitplan.schedules.base import Schedule, Whole, check_total

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

#: No drawing looks at more steps than this; of longer runs it takes so many, spread evenly.
_FINEST = 100_000
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

    >>> from bitplan.schedules import schedule
    >>> pieces_of(schedule("deficit", low=3, high=8, start=2, end=5), 8)
    [Piece(first=0, last=1, bits=8), Piece(first=2, last=4, bits=3), Piece(first=5, last=7, bits=8)]
    """
    check_total(total)
    steps = np.arange(total, dtype=np.int64) if total <= _FINEST else _spread(total)
    bits = schedule.at(steps, total)
    begins = [0, *(np.flatnonzero(np.diff(bits)) + 1).tolist()]
    firsts = [int(steps[begin]) for begin in begins]
    lasts = [*(first - 1 for first in firsts[1:]), total - 1]
    return [Piece(first, last, int(bits[begin])) for first, last, begin in zip(firsts, lasts, begins, strict=True)]


def _spread(total: int) -> Whole:
    """As many steps as a drawing looks at, the first and the last among them."""
    return np.linspace(0, total - 1, _FINEST).round().astype(np.int64)


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
