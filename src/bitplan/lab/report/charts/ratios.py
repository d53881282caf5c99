"""How much low precision a task bears: the metric against the ratio of low values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bitplan.lab.report.charts.common import bare_layout, metric_axis, plotly, safe, styles_of
from bitplan.lab.report.palette import NEUTRAL
from bitplan.lab.report.ratios import Assigned, assigned_plans
from bitplan.lab.report.summaries import Experiment

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


def ratio_chart(experiment: Experiment) -> Figure | None:
    """A point for each plan at the ratio of its runs; assignments of one order are joined."""
    go = plotly()
    figure, styles = go.Figure(), styles_of(experiment)
    scale = 100 if experiment.metric_is_share else 1
    shown = [each for each in assigned_plans(experiment) if each.plan.value and math.isfinite(each.plan.value.mean)]
    if not any(each.order is not None for each in shown):
        return None
    for order in dict.fromkeys(each.order for each in shown if each.order is not None):
        line = sorted((each for each in shown if each.order == order), key=lambda each: each.ratio)
        figure.add_trace(
            go.Scatter(
                x=[each.ratio for each in line],
                y=[scale * _mean(each) for each in line],
                mode="lines",
                line={"color": NEUTRAL[0], "width": 1},
                hoverinfo="skip",
                showlegend=False,
            )
        )
    for each in shown:
        value, style = each.plan.value, styles[each.number]
        assert value is not None
        promoted = f"<br>{each.promoted:.3g} tensors promoted" if each.promoted else ""
        words = f"<b>{safe(each.plan.label)}</b><br>{safe(experiment.spread_words(each.plan))}"
        figure.add_trace(
            go.Scatter(
                x=[each.ratio],
                y=[scale * value.mean],
                error_y={"array": [scale * value.deviation], "visible": value.count > 1, "thickness": 1.5, "width": 5},
                mode="markers",
                cliponaxis=False,
                marker={
                    "size": 12,
                    "symbol": "x" if each.plan.verdict == "fails" else style.sign,
                    "color": style.colour,
                    "line": {"width": 1.5},
                },
                hovertext=[f"{words}<br>ratio {each.ratio:.3f}{promoted}"],
                hoverinfo="text",
                showlegend=False,
                meta={"plan": each.number},
            )
        )
    reference = next((plan for plan in experiment.plans if plan.verdict == "reference" and plan.value), None)
    if reference is not None and reference.value is not None and math.isfinite(reference.value.mean):
        figure.add_hline(y=scale * reference.value.mean, line={"color": NEUTRAL[0], "width": 1.5, "dash": "dot"})
    figure.update_layout(
        xaxis={"title": "low-precision ratio, mean over the run", "range": [-0.04, 1.06]},
        yaxis=metric_axis(experiment),
        **bare_layout(380),
    )
    return figure


def _mean(each: Assigned) -> float:
    assert each.plan.value is not None
    return each.plan.value.mean
