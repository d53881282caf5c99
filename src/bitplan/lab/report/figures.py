"""How charts look on the page: plotly, colours, symbols, layouts, and what stands around a chart.

Colours follow Okabe & Ito, darker for a light theme and lighter for a dark one; every plan also has a symbol and a line
style of its own, for readers who see no colours. Figures are drawn in light colours, and the page replaces them in its
dark theme. Text that a user wrote (plans, sites) goes through :func:`safe`, since plotly reads some HTML.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bitplan.errors import RunError
from bitplan.lab.report.summaries import Experiment, PlanSummary
from bitplan.lab.report.tables import Table


@dataclass(frozen=True)
class Drawing:
    """A chart on the page, with its caption and the same figures as a table for readers who cannot see it."""

    title: str
    caption: str
    #: The plotly figure; None where the runs hold no data for it.
    figure: Any
    table: Table
    #: (colour, label) of what the chart's colours mean, where these are not plans.
    legend: Sequence[tuple[str, str]] = ()
    #: As wide as the page.
    is_wide: bool = False
    #: In place of one figure, those that readers choose from, by ``plan number/measure``.
    choices: Mapping[str, Any] = field(default_factory=dict)
    #: (number, label, whether it is shown first) of the plans to choose from.
    plans: Sequence[tuple[int, str, bool]] = ()
    #: (value, label) of what to choose from for a plan.
    measures: Sequence[tuple[str, str]] = ()
    #: Runs to be compared with each other, which the page's script draws; see :mod:`bitplan.lab.report.layers`.
    pairs: Mapping[str, Any] = field(default_factory=dict)
    #: Of its element on the page.
    id: str = ""

    @property
    def has_data(self) -> bool:
        return self.figure is not None or bool(self.choices) or bool(self.pairs)

    @property
    def can_zoom(self) -> bool:
        """Whether its axis shows the plans that work, and on request all."""
        return self.figure is not None and bool((self.figure.layout.meta or {}).get("zoom"))


#: (light, dark), of the reference.
NEUTRAL = ("#3f4756", "#d5dae3")
#: (light, dark), in the order plans get them.
HUES = (
    ("#0068a8", "#5ab4ec"),
    ("#007f5c", "#2fc79a"),
    ("#b06a00", "#f0b040"),
    ("#c2410c", "#ff8a5c"),
    ("#9b3f78", "#e293c3"),
    ("#5b4bb5", "#a99cf5"),
    ("#6b6f00", "#cfd24a"),
)
#: (light, dark), of classes of tensors: unlike those of plans, and different in lightness alone.
CLASSES = (
    ("#274b7a", "#7fb0ee"),
    ("#4f8fc4", "#4a7fc0"),
    ("#8fc1d9", "#b9d3ee"),
    ("#c7a76c", "#d9bd86"),
    ("#8a8f99", "#8a94a3"),
    ("#5e6b4e", "#a9b894"),
)
#: Colours of cells from low to high, and of differences. All are light enough for text in :data:`CELL_INK`, in both
#: themes.
CELLS = ("#f4f8fb", "#cfe3f2", "#a3c9e4", "#78aed4", "#5a99c8")
DIFFERENCES = ("#5fa8d3", "#b9d9ec", "#f7f5f0", "#f3c9a5", "#e0975c")
CELL_INK = "#141a24"
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "pentagon", "hexagon", "star")
LINES = ("solid", "dash", "dot", "dashdot", "longdash")

#: The same for the legend of plans: SVG paths in a box of 12, and SVG dashes.
SYMBOL_PATHS = {
    "circle": "M6 1a5 5 0 1 1 0 10a5 5 0 1 1 0-10z",
    "square": "M1.5 1.5h9v9h-9z",
    "diamond": "M6 .3L11.7 6L6 11.7L.3 6z",
    "triangle-up": "M6 .8L11.6 10.5H.4z",
    "triangle-down": "M6 11.2L.4 1.5H11.6z",
    "pentagon": "M6 .6L11.4 4.5L9.3 10.9H2.7L.6 4.5z",
    "hexagon": "M6 .4L10.9 3.2V8.8L6 11.6L1.1 8.8V3.2z",
    "star": "M6 .4L7.5 4.2L11.6 4.5L8.4 7.1L9.5 11.1L6 8.9L2.5 11.1L3.6 7.1L.4 4.5L4.5 4.2z",
}
LINE_DASHES = {"solid": "none", "dash": "5 3", "dot": "1.6 2.4", "dashdot": "5 2 1.6 2", "longdash": "8 3"}


@dataclass(frozen=True)
class Style:
    """How a plan is drawn in every chart."""

    colour: str
    symbol: str
    line: str


def plan_styles(plans: Sequence[PlanSummary]) -> list[Style]:
    """The style of every plan; the reference has the neutral colour."""
    styles, number = [], 0
    for plan in plans:
        if plan.verdict == "reference":
            styles.append(Style(NEUTRAL[0], SYMBOLS[0], "solid"))
            continue
        # 7 hues and 5 lines make 35 plans that differ in lines, and 56 with 8 symbols.
        line = LINES[number % len(LINES)]
        styles.append(Style(HUES[number % len(HUES)][0], SYMBOLS[(number + 1) % len(SYMBOLS)], line))
        number += 1
    return styles


def class_colour(number: int) -> str:
    return CLASSES[number % len(CLASSES)][0]


def dark_partners() -> dict[str, str]:
    """Light colour -> its replacement in the dark theme."""
    return dict((NEUTRAL, *HUES, *CLASSES))


def plotly() -> Any:
    """The module of plotly's figures; raises where it is not installed."""
    try:
        import plotly.graph_objects
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "plotly":
            raise
        raise RunError("the page's charts need plotly, which is not installed: run 'pip install plotly'.") from None
    return plotly.graph_objects


def safe(text: str) -> str:
    """Text that plotly shows literally."""
    return html.escape(text, quote=False)


def bare_layout(height: int) -> dict[str, Any]:
    return {
        "height": height,
        "margin": {"l": 8, "r": 16, "t": 28, "b": 8, "pad": 2},
        "xaxis_automargin": True,
        "yaxis_automargin": True,
        "hovermode": "closest",
        "dragmode": False,
        "showlegend": False,
        "template": "none",
    }


def metric_axis(experiment: Experiment) -> dict[str, Any]:
    unit = ", %" if experiment.metric_is_share else ""
    return {"title": f"{safe(experiment.metric.name)}{unit} ({experiment.metric.better} is better)"}


def template_safe(text: str) -> str:
    """Text for a hover template, where %{...} would be replaced."""
    return safe(text).replace("%{", "% {")


def start_of(text: str, length: int = 22) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def end_of(text: str, length: int) -> str:
    """The last characters of a long name, which say more than its first."""
    return text if len(text) <= length else f"…{text[1 - length :]}"


def byte_unit(largest: float) -> tuple[str, float]:
    for unit, divisor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if largest >= divisor:
            return f"{unit} of a step's tensors", float(divisor)
    return "bytes of a step's tensors", 1.0


def log_ticks(values: list[float]) -> list[float]:
    """1, 2 and 5 times powers of ten over the range of the positive values; powers of ten alone over a long range."""
    positive = [value for value in values if 0 < value < math.inf]
    if not positive:
        return []
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    steps = (1, 2, 5) if high - low <= 3 else (1,)
    return [step * 10.0**power for power in range(low, high + 1) for step in steps]
