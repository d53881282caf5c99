"""Critical learning periods: what a window of low precision leaves behind, and how training recovers from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bitplan.lab.report.charts.common import bare_layout, metric_axis, plotly, safe, styles_of
from bitplan.lab.report.charts.curves import curve_line, mean_curve, scaled_curve, template_safe
from bitplan.lab.report.deficits import (
    Course,
    courses_of,
    early_windows,
    recovering,
    sliding_windows,
    without_deficit,
)
from bitplan.lab.report.palette import NEUTRAL, Style
from bitplan.lab.report.summaries import Experiment

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

#: How far points stand beside those whose place they share, in per cent of the run.
_BESIDE = 3.0


def early_chart(experiment: Experiment) -> Figure | None:
    """The final metric against how long an early window was that a full budget followed."""
    courses = courses_of(experiment)
    points = [(100 * window.length / window.budget, course) for window, course in early_windows(courses)]
    if not points:
        return None
    plain = without_deficit(courses)
    line = ([(0.0, plain)] if plain is not None else []) + points
    levels = [course for course in courses if course.window is None and course is not plain]
    return _windows_chart(experiment, line, (), levels, "low precision before a full budget, % of the budget")


def sliding_chart(experiment: Experiment) -> Figure | None:
    """The final metric against when a window within the budget began."""
    courses = courses_of(experiment)
    within = [(100 * window.start / window.budget, course, window) for window, course in sliding_windows(courses)]
    line = [(place, course) for place, course, window in within if window.is_of_forward]
    # They lie where windows of all lie, so they stand a little beside them, with their initials.
    others = [(place, course) for place, course, window in within if not window.is_of_forward]
    single = [(place + _BESIDE * number, course) for number, (place, course) in enumerate(others, 1)]
    levels = [course for course in courses if course.window is None and course.hold == 0]
    return _windows_chart(experiment, line, single, levels, "where the window begins, % of the run")


def recovery_chart(experiment: Experiment) -> Figure | None:
    """The metric over time, counted from where low precision ends."""
    go = plotly()
    figure, styles, metric = go.Figure(), styles_of(experiment), experiment.metric
    scale = 100 if experiment.metric_is_share else 1
    for course in recovering(courses_of(experiment)):
        curves = [scaled_curve(run.curve(metric.name), scale) for run in course.plan.judged]
        known = [([step - course.recovers_from for step in steps], values) for steps, values in curves if steps]
        mean = mean_curve(known) if known else None
        if mean is not None:
            style = styles[course.number]
            figure.add_trace(curve_line(go, course.number, course.plan, style, "mean", *mean, strong=True))
    if not figure.data:
        return None
    figure.add_vline(x=0, line={"color": NEUTRAL[0], "width": 1, "dash": "dot"})
    figure.update_layout(
        xaxis={"title": "steps since low precision ended"}, yaxis=metric_axis(experiment), **bare_layout(400)
    )
    return figure


def _windows_chart(
    experiment: Experiment,
    line: Sequence[tuple[float, Course]],
    single: Sequence[tuple[float, Course]],
    levels: Sequence[Course],
    title: str,
) -> Figure | None:
    """Points by their windows, those of `line` joined, and a level line for each plan that had no window."""
    go = plotly()
    figure, styles = go.Figure(), styles_of(experiment)
    scale = 100 if experiment.metric_is_share else 1
    known = [(place, course) for place, course in line if _has_value(course)]
    if len(known) > 1:
        figure.add_trace(
            go.Scatter(
                x=[place for place, _ in known],
                y=[scale * _mean(course) for _, course in known],
                mode="lines",
                line={"color": NEUTRAL[0], "width": 1},
                hoverinfo="skip",
                showlegend=False,
            )
        )
    points = [*known, *((place, course) for place, course in single if _has_value(course))]
    for place, course in points:
        figure.add_trace(_point(go, experiment, course, styles[course.number], place, scale))
    if not figure.data:
        return None
    last = max(place for place, _ in points)
    for course in levels:
        if _has_value(course):
            figure.add_trace(_level(go, experiment, course, styles[course.number], last, scale))
    figure.update_layout(
        xaxis={"title": title, "range": [-4, max(last, 1) * 1.06 + 2]},
        yaxis=metric_axis(experiment),
        **bare_layout(360),
    )
    return figure


def _point(go: Any, experiment: Experiment, course: Course, style: Style, place: float, scale: int) -> Any:
    value, window = course.plan.value, course.window
    assert value is not None
    name = "" if window is None or window.is_of_forward else "".join(part[0].upper() for part in window.parts)
    return go.Scatter(
        x=[place],
        y=[scale * value.mean],
        error_y={"array": [scale * value.deviation], "visible": value.count > 1, "thickness": 1.5, "width": 5},
        mode="markers+text" if name else "markers",
        text=[safe(name)],
        textposition="middle right",
        cliponaxis=False,
        marker={"size": 12, "symbol": style.sign, "color": style.colour, "line": {"width": 1.5}},
        hovertext=[f"<b>{safe(course.plan.label)}</b><br>{safe(experiment.spread_words(course.plan))}"],
        hoverinfo="text",
        showlegend=False,
        meta={"plan": course.number},
    )


def _level(go: Any, experiment: Experiment, course: Course, style: Style, last: float, scale: int) -> Any:
    words = f"{template_safe(course.plan.label)}: {template_safe(experiment.spread_words(course.plan))}"
    return go.Scatter(
        x=[0, max(last, 1)],
        y=[scale * _mean(course)] * 2,
        mode="lines",
        line={"color": style.colour, "width": 2.2, "dash": style.line},
        hovertemplate=f"{words}<extra></extra>",
        showlegend=False,
        meta={"plan": course.number},
    )


def _has_value(course: Course) -> bool:
    return course.plan.value is not None and math.isfinite(course.plan.value.mean)


def _mean(course: Course) -> float:
    assert course.plan.value is not None
    return course.plan.value.mean
