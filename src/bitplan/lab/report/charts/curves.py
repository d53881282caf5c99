"""What changed over time: the loss, and the bits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from bitplan.lab.report.charts.common import bare_layout, log_ticks, plotly, safe, styles_of
from bitplan.lab.report.palette import Style
from bitplan.lab.report.runs import Run
from bitplan.lab.report.summaries import Experiment, PlanSummary

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

#: A line has at most so many points: more cannot be seen, and a hundred runs must stay a page that opens.
MOST_POINTS = 400


def loss_chart(experiment: Experiment) -> Figure | None:
    """The training loss of every run, and for each plan their mean."""
    return _runs_chart(experiment, "loss", "training loss", scale=1, logarithmic=True)


def metric_chart(experiment: Experiment) -> Figure | None:
    """The metric at every evaluation of every run, and for each plan their mean."""
    metric = experiment.metric
    percent = experiment.metric_is_share
    title = f"{safe(metric.name)}{', %' if percent else ''} ({metric.better} is better)"
    return _runs_chart(experiment, metric.name, title, scale=100 if percent else 1, logarithmic=False)


def _runs_chart(experiment: Experiment, name: str, title: str, scale: int, logarithmic: bool) -> Figure | None:
    go = plotly()
    figure = go.Figure()
    known: list[float] = []
    for number, (plan, style) in enumerate(zip(experiment.plans, styles_of(experiment), strict=True)):
        curves = [scaled_curve(run.curve(name), scale) for run in plan.runs]
        for run, (steps, values) in zip(plan.runs, curves, strict=True):
            if not steps:
                continue
            known += [value for value in values if math.isfinite(value)]
            alone = len(plan.runs) == 1
            figure.add_trace(curve_line(go, number, plan, style, f"seed {run.seed}", steps, values, alone))
            if run.status == "diverged":
                figure.add_trace(_end_of_diverged(go, number, plan, style, run, steps, values))
        judged = [curve for run, curve in zip(plan.runs, curves, strict=True) if run in plan.judged]
        if len(plan.runs) > 1 and (mean := mean_curve(judged)) is not None:
            figure.add_trace(curve_line(go, number, plan, style, "mean", *mean, strong=True))
    if not figure.data:
        return None
    axis: dict[str, Any] = {}
    if logarithmic and known and min(known) > 0:
        ticks = log_ticks(known)
        axis = {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}
    figure.update_layout(
        xaxis={"title": "step", "rangemode": "tozero"}, yaxis={"title": title, **axis}, **bare_layout(360)
    )
    return figure


def scaled_curve(curve: tuple[list[int], list[float]], scale: int) -> tuple[list[int], list[float]]:
    return curve[0], [scale * value for value in curve[1]]


def bits_chart(experiment: Experiment) -> Figure | None:
    """The bits of products' operands over time."""
    go = plotly()
    figure = go.Figure()
    highest = 0.0
    for number, (plan, style) in enumerate(zip(experiment.plans, styles_of(experiment), strict=True)):
        # Seeds share their plan, so that one run tells; the longest tells most.
        steps, bits = max((run.curve("bits") for run in plan.runs), key=lambda curve: len(curve[0]))
        if not steps:
            continue
        highest = max([highest, *(each for each in bits if math.isfinite(each))])
        line = curve_line(go, number, plan, style, "bits", steps, bits, strong=True)
        line.update(line={"shape": "hv"})
        figure.add_trace(line)
    if not figure.data:
        return None
    ticks = [2**power for power in range(1, 7)]
    figure.update_layout(
        xaxis={"title": "step", "rangemode": "tozero"},
        yaxis={"title": "bits of products", "type": "log", "tickvals": ticks, "ticktext": list(map(str, ticks))},
        **bare_layout(360),
    )
    figure.update_yaxes(range=[math.log10(1.5), math.log10(max(highest, 8) * 1.4)])
    return figure


def curve_line(
    go: Any,
    number: int,
    plan: PlanSummary,
    style: Style,
    what: str,
    steps: list[int],
    values: list[float],
    strong: bool,
) -> Any:
    steps, values = _thinned(steps), _thinned(values)
    return go.Scatter(
        x=steps,
        y=values,
        mode="lines" if len(steps) > 1 else "markers",
        line={"color": style.colour, "width": 2.2 if strong else 1, "dash": style.line},
        opacity=1.0 if strong else 0.35,
        hovertemplate=f"step %{{x}}: %{{y:.4g}}<extra>{template_safe(plan.label)}, {what}</extra>",
        showlegend=False,
        meta={"plan": number},
    )


def template_safe(text: str) -> str:
    """A user's text within a hover template, where %{...} would be read."""
    return safe(text).replace("%{", "% {")


def _end_of_diverged(
    go: Any, number: int, plan: PlanSummary, style: Style, run: Run, steps: list[int], losses: list[float]
) -> Any:
    """A cross where the loss was last a number."""
    known = [(step, loss) for step, loss in zip(steps, losses, strict=True) if math.isfinite(loss)] or [(0, 1.0)]
    return go.Scatter(
        x=[known[-1][0]],
        y=[known[-1][1]],
        mode="markers",
        marker={"symbol": "x", "size": 10, "color": style.colour},
        hovertext=[f"<b>{safe(plan.label)}</b>, seed {run.seed}<br>diverged at step {run.step}"],
        hoverinfo="text",
        showlegend=False,
        meta={"plan": number},
    )


def mean_curve(curves: list[tuple[list[int], list[float]]]) -> tuple[list[int], list[float]] | None:
    """The mean of several curves, at the steps that all of them have."""
    known = [dict(zip(*curve, strict=True)) for curve in curves]
    shared = [step for step in known[0] if all(step in curve for curve in known)]
    if not shared:
        return None
    return shared, [sum(curve[step] for curve in known) / len(known) for step in shared]


def _thinned(values: list[Any]) -> list[Any]:
    """Every so many-th value, and the last."""
    stride = -(-len(values) // MOST_POINTS) or 1
    kept = values[::stride]
    return kept if not values or (len(values) - 1) % stride == 0 else [*kept, values[-1]]
