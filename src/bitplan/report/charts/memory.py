"""Bytes by class of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitplan.report.charts.common import bare_layout, byte_unit, plotly, safe, shortened
from bitplan.report.palette import class_colour
from bitplan.report.summaries import Experiment
from bitplan.sizes import byte_text

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

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
