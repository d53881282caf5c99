"""Charts of an experiment: the metric against its price, curves over steps, and bytes by class of tensors.

Every function returns a plotly figure, or None where the runs hold no data for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from bitplan.files import byte_text
from bitplan.lab.report.answer import percent_text
from bitplan.lab.report.figures import (
    NEUTRAL,
    Style,
    bare_layout,
    byte_unit,
    class_colour,
    log_ticks,
    metric_axis,
    plan_styles,
    plotly,
    safe,
    start_of,
    template_safe,
)
from bitplan.lab.report.runs import Run
from bitplan.lab.report.summaries import Experiment, PlanSummary
from bitplan.lab.report.tables import class_text, memory_classes, step_text

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

#: Points of a line, at most: more cannot be seen, and a page of a hundred runs must still open.
MOST_POINTS = 400


def loss_chart(experiment: Experiment) -> Figure | None:
    """The training loss of every run, and for each plan their mean."""
    return _runs_chart(experiment, "loss", "training loss", scale=1, logarithmic=True)


def metric_chart(experiment: Experiment) -> Figure | None:
    """The metric at every evaluation of every run, and for each plan their mean."""
    title, name = metric_axis(experiment)["title"], experiment.metric.name
    figure = _runs_chart(experiment, name, title, scale=experiment.metric_scale, logarithmic=False)
    if figure is not None:
        late, everything = [], []
        for plan in experiment.plans:
            for run in plan.runs:
                steps, values = scaled_curve(run.curve(name), experiment.metric_scale)
                everything += values
                late += [
                    value
                    for step, value in zip(steps, values, strict=True)
                    if 2 * step > steps[-1] and plan in experiment.working
                ]
        zoom_axis(figure, late, everything, _most(experiment))
    return figure


def zoom_axis(
    figure: Any, working: list[float], everything: list[float], most: float = math.inf, strip: float = 0.0
) -> None:
    """Let the vertical axis show the values of plans that work, where all values need more than twice that space.

    The page has a button for the whole axis.

    :param most: the largest value that there can be.
    :param strip: the share of the axis that stays free below the values.
    """
    working, everything = ([value for value in values if math.isfinite(value)] for values in (working, everything))
    if not working:
        return
    low, high = min(working), min(max(working), most)
    room = max(high - low, 0.02 * abs(high), 1e-6)
    zoom = [low - (0.15 + strip) * room, high + (0.15 if high < most else 0.04) * room]
    if max([high, *everything]) - min([low, *everything]) <= 2 * (zoom[1] - zoom[0]):
        return
    figure.update_layout(meta={"zoom": zoom, "whole": figure.layout.yaxis.range})
    figure.update_yaxes(range=zoom, selector={"overlaying": None})


def _runs_chart(experiment: Experiment, name: str, title: str, scale: int, logarithmic: bool) -> Figure | None:
    go = plotly()
    figure = go.Figure()
    finite: list[float] = []
    for number, (plan, style) in enumerate(zip(experiment.plans, plan_styles(experiment.plans), strict=True)):
        curves = [scaled_curve(run.curve(name), scale) for run in plan.runs]
        for run, (steps, values) in zip(plan.runs, curves, strict=True):
            if not steps:
                continue
            finite += [value for value in values if math.isfinite(value)]
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
    if logarithmic and finite and min(finite) > 0:
        ticks = log_ticks(finite)
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
    for number, (plan, style) in enumerate(zip(experiment.plans, plan_styles(experiment.plans), strict=True)):
        # The bits of all seeds are alike: the longest run shows the most.
        steps, bits = max((run.curve("bits") for run in plan.runs), key=lambda curve: len(curve[0]))
        if not steps:
            continue
        highest = max([highest, *filter(math.isfinite, bits)])
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


def _end_of_diverged(
    go: Any, number: int, plan: PlanSummary, style: Style, run: Run, steps: list[int], losses: list[float]
) -> Any:
    """A cross where the loss was last a number."""
    finite = [(step, loss) for step, loss in zip(steps, losses, strict=True) if math.isfinite(loss)] or [(0, 1.0)]
    return go.Scatter(
        x=[finite[-1][0]],
        y=[finite[-1][1]],
        mode="markers",
        marker={"symbol": "x", "size": 10, "color": style.colour},
        hovertext=[f"<b>{safe(plan.label)}</b>, seed {run.seed}<br>diverged at step {run.step}"],
        hoverinfo="text",
        showlegend=False,
        meta={"plan": number},
    )


def mean_curve(curves: list[tuple[list[int], list[float]]]) -> tuple[list[int], list[float]] | None:
    """The mean of several curves, at the steps that all of them have."""
    by_step = [dict(zip(*curve, strict=True)) for curve in curves]
    shared = [step for step in by_step[0] if all(step in curve for curve in by_step)]
    if not shared:
        return None
    return shared, [sum(curve[step] for curve in by_step) / len(by_step) for step in shared]


def _thinned(values: list[Any]) -> list[Any]:
    """Evenly spaced values, and the last."""
    stride = -(-len(values) // MOST_POINTS) or 1
    kept = values[::stride]
    return kept if not values or (len(values) - 1) % stride == 0 else [*kept, values[-1]]


# --- The metric against its price

#: Up to so many plans have labels beside their points; more have them on hover, and on the page where there is room.
MOST_NAMES = 12

Price = Literal["cost", "memory"]


def price_chart(experiment: Experiment, price: Price) -> Figure | None:
    """The metric against bit operations or bytes, with its spread over seeds and the Pareto front."""
    go = plotly()
    of_plan, of_run, axis = _price_axis(experiment, price)
    priced = [
        (number, plan, style)
        for number, (plan, style) in enumerate(zip(experiment.plans, plan_styles(experiment.plans), strict=True))
        if of_plan(plan) is not None
    ]
    drawn = [entry for entry in priced if entry[1].has_value]
    lost = [entry for entry in priced if not entry[1].has_value]
    if not priced:
        return None
    scale = experiment.metric_scale
    figure = go.Figure()
    _add_front(figure, go, [plan for _, plan, _ in drawn], price, of_plan, scale)
    for number, plan, style in drawn:
        _add_seeds(figure, go, experiment, plan, number, style, of_run, scale)
    points = [(of_plan(plan) or 0.0, plan.value.mean) for _, plan, _ in drawn if plan.value]
    prices = [of_plan(plan) or 0.0 for _, plan, _ in priced]
    positions = _label_positions(points, experiment.metric.trivial, min(prices))
    for (number, plan, style), position in zip(drawn, positions, strict=True):
        assert plan.value is not None
        is_labelled = len(drawn) <= MOST_NAMES
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
                mode="markers+text" if is_labelled else "markers",
                text=[safe(plan.label) + _verdict_mark(plan)],
                textposition=position,
                cliponaxis=False,
                marker={"size": 12, "symbol": _symbol(plan, style), "color": style.colour, "line": {"width": 1.5}},
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
        # A strip below all values, for plans without one.
        heights = [
            scale * value for value in (*(y for _, y in points), experiment.metric.trivial) if math.isfinite(value)
        ]
        low, high = (min(heights), max(heights)) if heights else (0.0, 1.0)
        span = (high - low) or 1.0
        figure.update_yaxes(range=[low - 0.2 * span, high + 0.08 * span])
        figure.update_layout(yaxis2={"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True})
    _add_trivial(figure, experiment, scale)
    values = [scale * value for plan in experiment.working for value in _ends(plan)]
    shown = [scale * plan.value.mean for _, plan, _ in drawn if plan.value is not None]
    has_trivial = len(figure.layout.shapes) > 0
    trivial = [scale * experiment.metric.trivial] if has_trivial else []
    zoom_axis(figure, values, [*shown, *trivial], _most(experiment), 0.2 * bool(lost))
    return figure


def _most(experiment: Experiment) -> float:
    return 100.0 if experiment.metric_is_share else math.inf


def _ends(plan: PlanSummary) -> tuple[float, float]:
    assert plan.value is not None
    spread = max(plan.value.deviation, plan.value.high - plan.value.mean, plan.value.mean - plan.value.low)
    return plan.value.mean - spread, plan.value.mean + spread


def _price_axis(
    experiment: Experiment, price: Price
) -> tuple[Callable[[PlanSummary], float | None], Callable[[Run], float | None], dict[str, Any]]:
    """How plans and runs are priced, and the axis for it."""
    if price == "cost":
        title, scale = f"bit operations, % of {experiment.cost_unit}", 100.0
        prices = [scale * plan.cost for plan in experiment.plans if plan.cost]
    else:
        title, divisor = byte_unit(max((plan.memory or 0.0 for plan in experiment.plans), default=0.0))
        scale = 1 / divisor
        prices = [scale * plan.memory for plan in experiment.plans if plan.memory]
    ticks = log_ticks(prices)
    axis = {"title": title, "type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}

    def of_plan(plan: PlanSummary) -> float | None:
        value = plan.cost if price == "cost" else plan.memory
        return scale * value if value else None

    def of_run(run: Run) -> float | None:
        value = run.total_cost if price == "cost" else run.total_memory
        return scale * value if value else None

    return of_plan, of_run, axis | _room(prices)


def _room(prices: list[float]) -> dict[str, Any]:
    """A range with space for labels at both ends."""
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
    """Every seed as a faint point."""
    if len(plan.runs) < 2:
        return
    runs = [run for run in plan.runs if run.value is not None and of_run(run) is not None]
    figure.add_trace(
        go.Scatter(
            x=[of_run(run) for run in runs],
            y=[scale * run.value for run in runs if run.value is not None],
            mode="markers",
            marker={"size": 6, "symbol": style.symbol, "color": style.colour, "opacity": 0.4},
            hovertext=[
                f"<b>{safe(plan.label)}</b>, seed {run.seed}, {run.status}<br>"
                f"{safe(experiment.metric.name)} {experiment.metric_text(run.value)}"
                for run in runs
                if run.value is not None
            ],
            hoverinfo="text",
            showlegend=False,
            meta={"plan": number},
        )
    )


def _lost(go: Any, experiment: Experiment, plan: PlanSummary, number: int, style: Style, price: float | None) -> Any:
    """A plan without a value of the metric, in the strip below all values."""
    return go.Scatter(
        x=[price],
        y=[0.05],
        yaxis="y2",
        mode="markers+text",
        text=[f"{safe(plan.label)} ({plan.runs[0].status}, no {safe(experiment.metric.name)})"],
        textposition="middle right",
        cliponaxis=False,
        marker={"size": 11, "symbol": _symbol(plan, style), "color": style.colour, "line": {"width": 1.5}},
        hovertext=[_hover(experiment, plan)],
        hoverinfo="text",
        showlegend=False,
        meta={"plan": number},
    )


def _add_trivial(figure: Any, experiment: Experiment, scale: float) -> None:
    """The metric of a predictor that has learned nothing, as a line."""
    trivial = experiment.metric.trivial
    values = [plan.value.mean for plan in experiment.plans if plan.value is not None and plan.has_value]
    if not math.isfinite(trivial) or not values:
        return
    # Far from all points, it would only compress them.
    span = max(values) - min(values)
    if not experiment.metric_is_share and not min(values) - 2 * span <= trivial <= max(values) + 2 * span:
        return
    figure.add_hline(
        y=scale * trivial,
        line={"width": 1, "dash": "dash", "color": NEUTRAL[0]},
        annotation={"text": "trivial predictor", "font": {"size": 11}},
        annotation_position="bottom right",
    )


def _symbol(plan: PlanSummary, style: Style) -> str:
    if plan.verdict == "fails":
        return "x"
    return f"{style.symbol}-open" if plan.verdict == "unfinished" else style.symbol


def _verdict_mark(plan: PlanSummary) -> str:
    return {"fails": " (fails)", "unfinished": " (unfinished)"}.get(plan.verdict, "")


def _hover(experiment: Experiment, plan: PlanSummary) -> str:
    lines = [f"<b>{safe(plan.label)}</b>", f"{safe(experiment.metric.name)} {experiment.spread_text(plan)}"]
    if plan.cost is not None:
        lines.append(f"{percent_text(plan.cost)} of the bit operations of {experiment.cost_unit}")
    if plan.memory is not None:
        lines.append(f"{byte_text(plan.memory)} of tensors")
    lines.append(safe(f"{plan.verdict}: {plan.why}" if plan.why else plan.verdict))
    if plan.status_text:
        lines.append(plan.status_text)
    return "<br>".join(lines)


def _label_positions(points: list[tuple[float, float]], trivial: float, cheapest: float) -> list[str]:
    """The position of every label: not over those of near points, nor over the line of the trivial predictor."""
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
        if points[i][0] == cheapest and len(points) > 1:  # its label would overlap the axis
            choices = ["middle right", "bottom right", "top right"]
        elif abs(ys[i] - trivial) < 0.1 * height:
            choices = ["top center", "middle right"]
        free = [place for place in choices if place not in near]
        places[i] = free[0] if free else choices[0]
    return [places[i] for i in range(len(points))]


# --- What was measured


def measured_chart(experiment: Experiment) -> Figure | None:
    """The measured time of a step against the measured peak of memory, a point for each plan."""
    go = plotly()
    plans = [
        (number, plan, style)
        for number, (plan, style) in enumerate(zip(experiment.plans, plan_styles(experiment.plans), strict=True))
        if plan.step_seconds is not None and plan.peak is not None
    ]
    if not plans:
        return None
    is_short = max(plan.step_seconds or 0.0 for _, plan, _ in plans) < 1
    unit, divisor = byte_unit(max(plan.peak or 0.0 for _, plan, _ in plans))
    times = [(plan.step_seconds or 0.0) * (1000 if is_short else 1) for _, plan, _ in plans]
    peaks = [(plan.peak or 0.0) / divisor for _, plan, _ in plans]
    figure = go.Figure()
    for (number, plan, style), seconds, peak in zip(plans, times, peaks, strict=True):
        figure.add_trace(
            go.Scatter(
                x=[seconds],
                y=[peak],
                mode="markers+text" if len(plans) <= MOST_NAMES else "markers",
                text=[safe(start_of(plan.label))],
                textposition="top center",
                cliponaxis=False,
                marker={"size": 12, "symbol": _symbol(plan, style), "color": style.colour, "line": {"width": 1.5}},
                hovertext=[
                    f"<b>{safe(plan.label)}</b><br>{step_text(plan.step_seconds or 0.0)} a step<br>"
                    f"{byte_text(plan.peak or 0.0)} at the peak"
                ],
                hoverinfo="text",
                showlegend=False,
                meta={"plan": number},
            )
        )
    figure.update_layout(
        xaxis={"title": f"time a step, {'ms' if is_short else 's'}", "range": [0, 1.15 * max(times)]},
        yaxis={"title": f"{unit.split()[0]} at the peak", "range": [0, 1.2 * max(peaks)]},
        **bare_layout(360),
    )
    return figure


# --- Bytes by class of tensors


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
                name=class_text(name),
                marker={"color": class_colour(number), "line": {"width": 0}},
                hovertext=[
                    f"<b>{safe(plan.label)}</b><br>{safe(class_text(name))}: {byte_text(size)}"
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
            "ticktext": [safe(start_of(plan.label)) for plan in plans],
            "autorange": "reversed",
        },
        **bare_layout(max(height, 180)),
    )
    return figure
