"""A heat map of one plan: every tensor by its format, or by the error that rounding made there."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from bitplan.errors import BitplanError
from bitplan.files import byte_text
from bitplan.lab.report.answer import percent_words
from bitplan.lab.report.charts.common import bare_layout, byte_unit, plotly, safe, shortened
from bitplan.lab.report.palette import class_colour
from bitplan.lab.report.runs import SiteRecord
from bitplan.lab.report.summaries import Experiment, PlanSummary
from bitplan.numerics.formats import get_format
from bitplan.plans import PLACES

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


Measure = Literal["format", "error"]

#: Viridis, which colour-blind readers see as it is, from few bits or a small error (dark) to many or large (light).
_COLOURS = "viridis"

_ROW = 17
#: Smaller errors, and none at all, are drawn as this one: they must not take the colours of the others.
_SMALLEST = 1e-5


def measures_of(plan: PlanSummary) -> list[Measure]:
    """What is known of a plan's tensors."""
    measures: list[Measure] = []
    if any(site.format for site in plan.sites):
        measures.append("format")
    if any(_has_error(site) for site in plan.sites):
        measures.append("error")
    return measures


def sites_chart(plan: PlanSummary, measure: Measure) -> Figure | None:
    """Operations down, roles across; what the plan leaves alone stays empty."""
    go = plotly()
    chosen = [site for site in plan.sites if (site.format if measure == "format" else _has_error(site))]
    if not chosen:
        return None
    operations = list(dict.fromkeys(site.site for site in chosen))
    roles = _in_order({site.role for site in chosen})
    cells = {(site.site, site.role): site for site in chosen}

    def grid(of: Any, empty: Any = "") -> list[list[Any]]:
        return [[of(cells[key]) if (key := (each, role)) in cells else empty for role in roles] for each in operations]

    figure = go.Figure(
        go.Heatmap(
            z=grid(lambda site: _heat(site, measure), None),
            x=[safe(role).replace("_", "<br>").replace(".", "<br>.").replace("(", "<br>(") for role in roles],
            y=list(range(len(operations))),
            text=grid(lambda site: _cell_words(site, measure)),
            texttemplate="%{text}",
            textfont={"size": 10},
            hovertext=grid(_hover),
            hoverinfo="text",
            hoverongaps=False,
            xgap=2,
            ygap=1,
            colorscale=_COLOURS,
            colorbar=_colour_bar(chosen, measure),
            **_range(chosen, measure),
        )
    )
    height = 110 + _ROW * len(operations)
    figure.update_layout(
        xaxis={"side": "top", "type": "category", "tickangle": 0, "showgrid": False},
        yaxis={
            "tickvals": list(range(len(operations))),
            "ticktext": [safe(_tail(operation)) for operation in operations],
            "tickfont": {"size": 11},
            "range": [len(operations) - 0.5, -0.5],
            "showgrid": False,
            "zeroline": False,
        },
        **bare_layout(max(height, 200)),
    )
    return figure


def format_bits(quantizer: str) -> int | None:
    """The bits of a quantizer as plans write it; its first word is the format.

    >>> format_bits("int8 channel minmax"), format_bits("e4m3"), format_bits("what")
    (8, 8, None)
    """
    try:
        return get_format(quantizer.split()[0]).bits
    except (BitplanError, IndexError):
        return None


def _has_error(site: SiteRecord) -> bool:
    return site.error is not None and math.isfinite(site.error)


def _in_order(roles: set[str]) -> list[str]:
    """As plans list them; a second weight stands behind the first."""
    places = {place: number for number, place in enumerate(PLACES)}
    return sorted(roles, key=lambda role: (places.get(role.partition("(")[0], len(places)), role))


def _heat(site: SiteRecord, measure: Measure) -> float | None:
    """The height of a cell: the logarithm of bits or of the error."""
    if measure == "format":
        bits = format_bits(site.format or "")
        return None if bits is None else math.log2(bits)
    assert site.error is not None
    return round(math.log10(max(site.error, _SMALLEST)), 4)


def _cell_words(site: SiteRecord, measure: Measure) -> str:
    if measure == "format":
        return safe(shortened((site.format or "").split()[0], 8))
    return percent_words(site.error).replace(" ", "") if site.error else "0"


def _hover(site: SiteRecord) -> str:
    lines = [f"<b>{safe(site.site)}</b>, {safe(site.role)}", safe(site.format or "left alone")]
    if site.rule:
        lines.append(f"by {safe(site.rule)}")
    for name, value in (("error", site.error), ("overflow", site.overflow), ("underflow", site.underflow)):
        if value is not None:
            lines.append(f"{name} {percent_words(value)}")
    return "<br>".join(lines)


def _range(chosen: list[SiteRecord], measure: Measure) -> dict[str, float]:
    """The same colours for the same bits, whatever the plan; errors over their own range."""
    if measure == "format":
        return {"zmin": 0.0, "zmax": 5.0}
    heats = [heat for site in chosen if (heat := _heat(site, measure)) is not None]
    low, high = min(heats), max(heats)
    return {"zmin": low, "zmax": max(high, low + 0.5)}


def _colour_bar(chosen: list[SiteRecord], measure: Measure) -> dict[str, Any]:
    bar: dict[str, Any] = {"thickness": 10, "outlinewidth": 0, "len": 1.0, "xpad": 4, "ypad": 0}
    if measure == "format":
        return bar | {"tickvals": [0, 1, 2, 3, 4, 5], "ticktext": ["1", "2", "4", "8", "16", "32 bits"]}
    bounds = _range(chosen, measure)
    ticks = list(range(math.floor(bounds["zmin"]), math.ceil(bounds["zmax"]) + 1))
    return bar | {"tickvals": ticks, "ticktext": [f"{100 * 10.0**tick:g} %" for tick in ticks]}


def _tail(name: str, most: int = 34) -> str:
    """The end of a long name, which tells more than its beginning."""
    return name if len(name) <= most else f"…{name[1 - most :]}"


# --- Bytes by class of tensors


_CLASS_NAMES = {
    "weight": "weights",
    "activation": "activations",
    "grad_activation": "gradients of activations",
    "grad_weight": "gradients of weights",
}


def memory_chart(experiment: Experiment) -> Figure | None:
    """Bytes by class of tensors, a bar for each plan."""
    go = plotly()
    plans = [plan for plan in experiment.plans if plan.memory_classes]
    if not plans:
        return None
    largest = max(plan.memory or 0.0 for plan in plans)
    unit, divisor = byte_unit(largest)
    figure = go.Figure()
    for number, name in enumerate(memory_classes(experiment)):
        sizes = [plan.memory_classes.get(name, 0.0) for plan in plans]
        figure.add_trace(
            go.Bar(
                y=list(range(len(plans))),
                x=[size / divisor for size in sizes],
                orientation="h",
                name=class_words(name),
                marker={"color": class_colour(number), "line": {"width": 0}},
                hovertext=[
                    f"<b>{safe(plan.label)}</b><br>{safe(class_words(name))}: {byte_text(size)}"
                    for plan, size in zip(plans, sizes, strict=True)
                ],
                hoverinfo="text",
                showlegend=False,
            )
        )
    height = 80 + len(plans) * (36 if len(plans) <= 12 else 20)
    figure.update_layout(
        barmode="stack",
        bargap=0.3,
        xaxis={"title": unit, "rangemode": "tozero"},
        yaxis={
            "tickvals": list(range(len(plans))),
            "ticktext": [safe(shortened(plan.label)) for plan in plans],
            "autorange": "reversed",
        },
        **bare_layout(max(height, 180)),
    )
    return figure


def memory_classes(experiment: Experiment) -> list[str]:
    """The classes of tensors that its runs tell of, in their order."""
    return list(dict.fromkeys(name for plan in experiment.plans for name in plan.memory_classes))


def class_words(name: str) -> str:
    """A class of tensors, for people."""
    return _CLASS_NAMES.get(name, name.replace("_", " "))
