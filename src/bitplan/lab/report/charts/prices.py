"""The metric against its price, bit operations or bytes, with the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from bitplan.files import byte_text
from bitplan.lab.report.answer import percent_words
from bitplan.lab.report.charts.common import bare_layout, byte_unit, log_ticks, metric_axis, plotly, safe, styles_of
from bitplan.lab.report.palette import NEUTRAL, Style
from bitplan.lab.report.runs import Run
from bitplan.lab.report.summaries import Experiment, PlanSummary

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

#: Up to so many plans are named beside their points; more are named when pointed at.
MOST_NAMES = 12

Price = Literal["cost", "memory"]


def price_chart(experiment: Experiment, price: Price) -> Figure | None:
    """The metric against bit operations or bytes, with its spread over seeds and the Pareto front."""
    go = plotly()
    of_plan, of_run, axis = _price_axis(experiment, price)
    drawn = [
        (number, plan, style)
        for number, (plan, style) in enumerate(zip(experiment.plans, styles_of(experiment), strict=True))
        if plan.value is not None and plan.value.is_finite and of_plan(plan) is not None
    ]
    lost = [
        (number, plan, style)
        for number, (plan, style) in enumerate(zip(experiment.plans, styles_of(experiment), strict=True))
        if (plan.value is None or not plan.value.is_finite) and of_plan(plan) is not None
    ]
    if not drawn and not lost:
        return None
    scale = 100 if experiment.metric_is_share else 1
    figure = go.Figure()
    _add_front(figure, go, [plan for _, plan, _ in drawn], price, of_plan, scale)
    for number, plan, style in drawn:
        _add_seeds(figure, go, experiment, plan, number, style, of_run, scale)
    points = [(of_plan(plan) or 0.0, plan.value.mean) for _, plan, _ in drawn if plan.value]
    prices = [of_plan(plan) or 0.0 for _, plan, _ in (*drawn, *lost)]
    places = _name_places(points, experiment.metric.trivial, min(prices))
    for (number, plan, style), place in zip(drawn, places, strict=True):
        assert plan.value is not None
        named = len(drawn) <= MOST_NAMES
        figure.add_trace(
            go.Scatter(
                x=[of_plan(plan)],
                y=[scale * plan.value.mean],
                error_y={
                    "type": "data",
                    "array": [scale * plan.value.deviation],
                    "visible": plan.value.count > 1,
                    "thickness": 1.5,
                    "width": 5,
                },
                mode="markers+text" if named else "markers",
                text=[safe(plan.label) + _verdict_mark(plan)],
                textposition=place,
                cliponaxis=False,
                marker={"size": 12, "symbol": _sign(plan, style), "color": style.colour, "line": {"width": 1.5}},
                hovertext=[_hover(experiment, plan)],
                hoverinfo="text",
                showlegend=False,
                meta={"plan": number},
            )
        )
    figure.update_layout(xaxis=axis, yaxis=metric_axis(experiment), **bare_layout(380))
    for number, plan, style in lost:
        figure.add_trace(_lost(go, experiment, plan, number, style, of_plan(plan)))
    if lost:
        # A strip below all values, where these stand.
        heights = [
            scale * value for value in (*(y for _, y in points), experiment.metric.trivial) if math.isfinite(value)
        ]
        low, high = (min(heights), max(heights)) if heights else (0.0, 1.0)
        span = (high - low) or 1.0
        figure.update_yaxes(range=[low - 0.2 * span, high + 0.08 * span])
        figure.update_layout(yaxis2={"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True})
    _add_trivial(figure, experiment, scale)
    return figure


def _price_axis(
    experiment: Experiment, price: Price
) -> tuple[Callable[[PlanSummary], float | None], Callable[[Run], float | None], dict[str, Any]]:
    """How plans and runs are priced, and the axis for it."""
    if price == "cost":
        prices = [100 * plan.cost for plan in experiment.plans if plan.cost]
        ticks = log_ticks(prices)
        axis = {
            "title": "bit operations, % of FP32",
            "type": "log",
            "tickvals": ticks,
            "ticktext": [f"{tick:g}" for tick in ticks],
        }
        return (
            lambda plan: 100 * plan.cost if plan.cost else None,
            lambda run: 100 * run.relative_cost if run.relative_cost else None,
            axis | _room(prices),
        )
    sizes = [plan.memory for plan in experiment.plans if plan.memory]
    unit, divisor = byte_unit(max(sizes, default=0.0))
    ticks = log_ticks([size / divisor for size in sizes])
    axis = {"title": unit, "type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}
    return (
        lambda plan: plan.memory / divisor if plan.memory else None,
        lambda run: run.total_memory / divisor if run.total_memory else None,
        axis | _room([size / divisor for size in sizes]),
    )


def _room(prices: list[float]) -> dict[str, Any]:
    """A range with room for names at both ends."""
    if not prices:
        return {}
    low, high = math.log10(min(prices)), math.log10(max(prices))
    margin = max(0.12 * (high - low), (1 - (high - low)) / 2)
    return {"range": [low - margin, high + margin]}


def _add_front(
    figure: Any,
    go: Any,
    plans: list[PlanSummary],
    price: Price,
    of_plan: Callable[[PlanSummary], float | None],
    scale: float,
) -> None:
    on_front = [plan for plan in plans if (plan.on_cost_front if price == "cost" else plan.on_memory_front)]
    front = sorted((of_plan(plan) or 0.0, scale * plan.value.mean) for plan in on_front if plan.value)
    figure.add_trace(
        go.Scatter(
            x=[x for x, _ in front],
            y=[y for _, y in front],
            mode="lines",
            line={"shape": "hv", "width": 1.5, "dash": "dot", "color": NEUTRAL[0]},
            hoverinfo="skip",
            showlegend=False,
            meta={"front": True},
        )
    )


def _add_seeds(
    figure: Any,
    go: Any,
    experiment: Experiment,
    plan: PlanSummary,
    number: int,
    style: Style,
    of_run: Callable[[Run], float | None],
    scale: float,
) -> None:
    """Each seed by itself, faintly."""
    if len(plan.runs) < 2:
        return
    runs = [run for run in plan.runs if run.value is not None and of_run(run) is not None]
    figure.add_trace(
        go.Scatter(
            x=[of_run(run) for run in runs],
            y=[scale * run.value for run in runs if run.value is not None],
            mode="markers",
            marker={"size": 6, "symbol": style.sign, "color": style.colour, "opacity": 0.4},
            hovertext=[
                f"<b>{safe(plan.label)}</b>, seed {run.seed}, {run.status}<br>"
                f"{safe(experiment.metric.name)} {experiment.metric_words(run.value)}"
                for run in runs
                if run.value is not None
            ],
            hoverinfo="text",
            showlegend=False,
            meta={"plan": number},
        )
    )


def _lost(go: Any, experiment: Experiment, plan: PlanSummary, number: int, style: Style, price: float | None) -> Any:
    """A plan that has no value, at the foot of the chart, where no value is meant."""
    return go.Scatter(
        x=[price],
        y=[0.05],
        yaxis="y2",
        mode="markers+text",
        text=[f"{safe(plan.label)} ({plan.runs[0].status}, no {safe(experiment.metric.name)})"],
        textposition="middle right",
        cliponaxis=False,
        marker={"size": 11, "symbol": _sign(plan, style), "color": style.colour, "line": {"width": 1.5}},
        hovertext=[_hover(experiment, plan)],
        hoverinfo="text",
        showlegend=False,
        meta={"plan": number},
    )


def _add_trivial(figure: Any, experiment: Experiment, scale: float) -> None:
    """The line that a predictor gets which has learned nothing."""
    trivial = experiment.metric.trivial
    values = [plan.value.mean for plan in experiment.plans if plan.value is not None and plan.value.is_finite]
    if not math.isfinite(trivial) or not values:
        return
    # Far from everything else, it would only press the points together.
    reach = max(values) - min(values)
    if not experiment.metric_is_share and not min(values) - 2 * reach <= trivial <= max(values) + 2 * reach:
        return
    figure.add_hline(
        y=scale * trivial,
        line={"width": 1, "dash": "dash", "color": NEUTRAL[0]},
        annotation={"text": "trivial predictor", "font": {"size": 11}},
        annotation_position="bottom right",
    )


def _sign(plan: PlanSummary, style: Style) -> str:
    if plan.verdict == "fails":
        return "x"
    return f"{style.sign}-open" if plan.verdict == "unfinished" else style.sign


def _verdict_mark(plan: PlanSummary) -> str:
    return {"fails": " (fails)", "unfinished": " (unfinished)"}.get(plan.verdict, "")


def _hover(experiment: Experiment, plan: PlanSummary) -> str:
    lines = [f"<b>{safe(plan.label)}</b>", f"{safe(experiment.metric.name)} {experiment.spread_words(plan)}"]
    if plan.cost is not None:
        lines.append(f"{percent_words(plan.cost)} of FP32's bit operations")
    if plan.memory is not None:
        lines.append(f"{byte_text(plan.memory)} of tensors")
    lines.append(safe(f"{plan.verdict}: {plan.why}" if plan.why else plan.verdict))
    if plan.status_words:
        lines.append(plan.status_words)
    return "<br>".join(lines)


def _name_places(points: list[tuple[float, float]], trivial: float, cheapest: float) -> list[str]:
    """Where each name stands: off those of near points, and off the trivial predictor's line."""
    if not points:
        return []
    xs = [math.log10(x) if x > 0 else 0.0 for x, _ in points]
    ys = [y for _, y in points]
    seen = [*ys, trivial] if math.isfinite(trivial) else ys
    width, height = (max(xs) - min(xs)) or 1.0, (max(seen) - min(seen)) or 1.0
    places: dict[int, str] = {}
    for i in sorted(range(len(points)), key=lambda i: xs[i]):
        near = [places[j] for j in places if abs(xs[i] - xs[j]) < 0.2 * width and abs(ys[i] - ys[j]) < 0.15 * height]
        choices = ["bottom center", "top center", "middle right", "middle left"]
        if points[i][0] == cheapest and len(points) > 1:  # its name would run into the axis
            choices = ["middle right", "bottom right", "top right"]
        elif abs(ys[i] - trivial) < 0.1 * height:
            choices = ["top center", "middle right"]
        free = [place for place in choices if place not in near]
        places[i] = free[0] if free else choices[0]
    return [places[i] for i in range(len(points))]
