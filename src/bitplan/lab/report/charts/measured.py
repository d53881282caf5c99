"""A heat map of products by format: what each candidate would do there."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from bitplan.lab.report.charts.common import bare_layout, plotly, safe
from bitplan.lab.report.figures import Drawing
from bitplan.lab.report.measured import Measured, MeasuredCell, of_pass
from bitplan.lab.report.tables import Cell, table_html

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_ROW = 17
#: Smaller levels, and none at all, are drawn as this one.
_SMALLEST = 1e-4
_WORDS = (
    "Products and passes down, candidates across: the median backward error of each, measured on sampled elements. "
    "Colours are of the error times the root of the sum's length, so that rows can be compared; light is bad."
)


def measured_drawing(measured: Measured, label: str) -> Drawing:
    """The heat map with its words and its table."""
    alarms = f" Alarms: {' '.join(measured.alarms)}" if measured.alarms else ""
    title = f"error by format, {label}, {measured.when}"
    return Drawing(title, _WORDS + alarms, measured_chart(measured), measured_table(measured), is_wide=True)


def measured_chart(measured: Measured) -> Figure | None:
    """Rows in the order of the forward pass; what was not measured stays empty."""
    go = plotly()
    rows = of_pass(measured.cells)
    candidates = list(dict.fromkeys(cell.candidate for cell in measured.cells))
    if not rows:
        return None

    def grid(of: Any, empty: Any = "") -> list[list[Any]]:
        return [[of(row[each]) if each in row else empty for each in candidates] for row in rows.values()]

    heats = [_heat(cell) for cell in measured.cells if math.isfinite(cell.level)]
    low, high = min(heats, default=-4.0), max(heats, default=0.0)
    ticks = list(range(math.floor(low), math.ceil(high) + 1))
    figure = go.Figure(
        go.Heatmap(
            z=grid(lambda cell: _heat(cell) if math.isfinite(cell.level) else None, None),
            x=[safe(each).replace(" ", "<br>").replace("/", "/<br>").replace("-dy", "-<br>dy") for each in candidates],
            y=list(range(len(rows))),
            text=grid(lambda cell: f"{cell.median:.0e}".replace("e-0", "e-")),
            texttemplate="%{text}",
            textfont={"size": 10},
            hovertext=grid(_hover),
            hoverinfo="text",
            hoverongaps=False,
            xgap=2,
            ygap=1,
            colorscale="viridis",
            zmin=low,
            zmax=max(high, low + 0.5),
            colorbar={
                "thickness": 10,
                "outlinewidth": 0,
                "len": 1.0,
                "xpad": 4,
                "ypad": 0,
                "tickvals": ticks,
                "ticktext": [f"{10.0**tick:g}" for tick in ticks],
            },
        )
    )
    figure.update_layout(
        xaxis={"side": "top", "type": "category", "tickangle": 0, "showgrid": False},
        yaxis={
            "tickvals": list(range(len(rows))),
            "ticktext": [safe(_tail(f"{product}  {pass_}")) for product, pass_ in rows],
            "tickfont": {"size": 11},
            "range": [len(rows) - 0.5, -0.5],
            "showgrid": False,
            "zeroline": False,
        },
        **bare_layout(max(130 + _ROW * len(rows), 200)),
    )
    return figure


def measured_table(measured: Measured) -> str:
    """Medians by product, pass and candidate."""
    candidates = list(dict.fromkeys(cell.candidate for cell in measured.cells))
    head = [("product", False), ("pass", False), *((candidate, True) for candidate in candidates)]
    rows = [
        [Cell(product), Cell(pass_), *(Cell(f"{row[each].median:.1e}" if each in row else "-") for each in candidates)]
        for (product, pass_), row in of_pass(measured.cells).items()
    ]
    return table_html(head, rows, "median backward error by product and candidate", False)


def _heat(cell: MeasuredCell) -> float:
    return round(math.log10(max(cell.level, _SMALLEST)), 4)


def _hover(cell: MeasuredCell) -> str:
    lines = [
        f"<b>{safe(cell.product)}</b>, {safe(cell.pass_)}",
        safe(cell.candidate),
        f"median {cell.median:.2e}, 99 % below {cell.p99:.2e}",
        f"times the root of the sum's length {cell.level:.3g}",
        f"SQNR {cell.sqnr:.1f} dB",
        f"underflow {cell.underflow:.1%}, overflow {cell.overflow:.1%}",
        f"kurtosis {cell.kurtosis[0]:.1f} left, {cell.kurtosis[1]:.1f} right",
    ]
    return "<br>".join(lines)


def _tail(name: str, most: int = 44) -> str:
    """The end of a long name, which tells more than its beginning."""
    return name if len(name) <= most else f"…{name[1 - most :]}"
