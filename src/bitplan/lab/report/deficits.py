"""Critical learning periods: which plans had low precision for a while, what it left behind, and how runs recovered.

Windows are read from the runs' plans and settings, so that a user's plans are treated like those of the suite.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bitplan.errors import BitplanError
from bitplan.lab.report.answer import listed
from bitplan.lab.report.charts import curve_line, mean_curve, scaled_curve
from bitplan.lab.report.figures import (
    NEUTRAL,
    Drawing,
    Style,
    bare_layout,
    metric_axis,
    plan_styles,
    plotly,
    safe,
    template_safe,
)
from bitplan.lab.report.runs import Run
from bitplan.lab.report.summaries import Experiment, PlanSummary
from bitplan.lab.report.tables import Cell, Table, sampled_steps
from bitplan.plans import Plan, QuantizerSpec
from bitplan.plans.schedules import Deficit, Schedule, Static

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

#: What is rounded, and its names in plans.
_PARTS = {
    "weights": {"w", "weight", "fprop.w", "dgrad.w"},
    "activations": {"x", "activation", "fprop.x", "wgrad.x"},
    "gradients": {"dy", "grad_activation", "grad_weight", "dgrad.dy", "wgrad.dy"},
}
#: Names that stand for both operands of a product.
_BOTH = {"fprop"}


@dataclass(frozen=True)
class Window:
    """When a plan had low precision, in steps: from `start` until before `end`."""

    start: int
    end: int
    low: int
    high: int
    #: Steps of the recipe, without those of `hold` before it.
    budget: int
    #: What had the low precision: weights, activations, gradients.
    parts: tuple[str, ...]

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def is_of_forward(self) -> bool:
        """Whether weights and activations had it, both."""
        return {"weights", "activations"} <= set(self.parts)


@dataclass(frozen=True)
class Course:
    """A plan of the experiment, with its window if it has one."""

    plan: PlanSummary
    #: Its index in the experiment.
    number: int
    window: Window | None
    #: Steps before its recipe begins.
    hold: int
    budget: int
    #: The width of all tensors it rounds; None where there are several widths, or no plan.
    width: int | None

    @property
    def is_early(self) -> bool:
        """Whether its window comes first, and a full budget after it."""
        return self.window is not None and self.window.start == 0 and 0 < self.window.end == self.hold

    @property
    def recovers_from(self) -> int:
        """The step at which low precision ends; without any, that at which the recipe begins."""
        return self.hold if self.window is None else self.window.end


def courses_of(experiment: Experiment) -> list[Course]:
    """Every plan of the experiment; none where no plan has a window."""
    courses = [_course(plan, number) for number, plan in enumerate(experiment.plans)]
    return courses if any(course.window is not None for course in courses) else []


def without_deficit(courses: Sequence[Course]) -> Course | None:
    """The plan that has the high precision of the others throughout, and no step more."""
    high = next((course.window.high for course in courses if course.window is not None), None)
    plain = [course for course in courses if course.window is None and course.hold == 0 and course.width == high]
    return plain[0] if plain and high is not None else None


def early_windows(courses: Sequence[Course]) -> list[tuple[Window, Course]]:
    """Windows that come first and are followed by a full budget, the shortest first."""
    windows = [(course.window, course) for course in courses if course.window is not None and course.is_early]
    return sorted(windows, key=lambda pair: pair[0].length)


def sliding_windows(courses: Sequence[Course]) -> list[tuple[Window, Course]]:
    """Windows within the budget, the earliest first."""
    windows = [(course.window, course) for course in courses if course.window is not None and course.hold == 0]
    return sorted(windows, key=lambda pair: pair[0].start)


def recovering(courses: Sequence[Course]) -> list[Course]:
    """Plans whose forward pass had low precision for a while, and those that had the high one throughout."""
    high = {course.window.high for course in courses if course.window is not None}
    return [
        course
        for course in courses
        if (course.window.is_of_forward if course.window is not None else course.width in high)
    ]


def _course(plan: PlanSummary, number: int) -> Course:
    run = plan.runs[0]
    hold, budget = _positive_setting(run, "hold"), _positive_setting(run, "steps")
    document = _plan_document(run)
    window = None if document is None else _window(document, hold, budget)
    width = None if document is None or window is not None else _width(document)
    return Course(plan, number, window, hold, budget, width)


def _plan_document(run: Run) -> Plan | None:
    if run.plan_text is None:
        return None
    try:
        return Plan.from_yaml(run.plan_text)
    except BitplanError:  # perhaps written by another version; the plan keeps its row
        return None


def _window(plan: Plan, hold: int, budget: int) -> Window | None:
    total = hold + budget
    for name, schedule in plan.all_schedules.items():
        if not isinstance(schedule, Deficit) or budget < 1:
            continue
        start, end = (min(moment.first_step(total), total) for moment in (schedule.start, schedule.end))
        followed = {place for place, spec in _specs(plan) if spec.bits == name}
        if followed & _BOTH:
            followed |= {"w", "x"}
        parts = tuple(part for part, places in _PARTS.items() if places & followed)
        return Window(start, end, schedule.low, schedule.high, budget, parts)
    return None


def _specs(plan: Plan) -> Iterator[tuple[str, QuantizerSpec]]:
    """The sites that the plan's rules round and their quantizers; switched quantizers are no deficits."""
    named = plan.all_quantizers
    for rule in plan.all_rules:
        for place, use in rule.quantizers:
            spec = named.get(use) if isinstance(use, str) else use
            if isinstance(spec, QuantizerSpec):
                yield place, spec


def _width(plan: Plan) -> int | None:
    widths = {_constant_width(spec, plan.all_schedules) for _, spec in _specs(plan)}
    return widths.pop() if len(widths) == 1 else None


def _constant_width(spec: QuantizerSpec, schedules: Mapping[str, Schedule]) -> int | None:
    """The width of an integer format that never changes; None for all others."""
    if spec.format == "int":
        followed = schedules.get(spec.bits) if isinstance(spec.bits, str) else spec.bits
        return followed.width if isinstance(followed, Static) else followed if isinstance(followed, int) else None
    digits = spec.format.removeprefix("int")
    return int(digits) if digits.isdigit() else None


def _positive_setting(run: Run, name: str) -> int:
    value = run.settings.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


#: The distance between points that would coincide, in per cent of the run.
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
    # Their windows coincide with those of all roundings: they are shifted, and labelled by their initials.
    others = [(place, course) for place, course, window in within if not window.is_of_forward]
    single = [(place + _BESIDE * number, course) for number, (place, course) in enumerate(others, 1)]
    levels = [course for course in courses if course.window is None and course.hold == 0]
    return _windows_chart(experiment, line, single, levels, "where the window begins, % of the run")


def recovery_chart(experiment: Experiment) -> Figure | None:
    """The metric over time, counted from where low precision ends."""
    go = plotly()
    figure, styles, metric = go.Figure(), plan_styles(experiment.plans), experiment.metric
    scale = experiment.metric_scale
    for course in recovering(courses_of(experiment)):
        curves = [scaled_curve(run.curve(metric.name), scale) for run in course.plan.judged]
        shifted = [([step - course.recovers_from for step in steps], values) for steps, values in curves if steps]
        mean = mean_curve(shifted) if shifted else None
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
    figure, styles = go.Figure(), plan_styles(experiment.plans)
    scale = experiment.metric_scale
    joined = [(x, course) for x, course in line if course.plan.has_value]
    if len(joined) > 1:
        figure.add_trace(
            go.Scatter(
                x=[x for x, _ in joined],
                y=[scale * _mean(course) for _, course in joined],
                mode="lines",
                line={"color": NEUTRAL[0], "width": 1},
                hoverinfo="skip",
                showlegend=False,
            )
        )
    points = [*joined, *((x, course) for x, course in single if course.plan.has_value)]
    for x, course in points:
        figure.add_trace(_point(go, experiment, course, styles[course.number], x, scale))
    if not figure.data:
        return None
    last = max(x for x, _ in points)
    for course in levels:
        if course.plan.has_value:
            figure.add_trace(_level(go, experiment, course, styles[course.number], last, scale))
    figure.update_layout(
        xaxis={"title": title, "range": [-4, max(last, 1) * 1.06 + 2]},
        yaxis=metric_axis(experiment),
        **bare_layout(360),
    )
    return figure


def _point(go: Any, experiment: Experiment, course: Course, style: Style, x: float, scale: int) -> Any:
    value, window = course.plan.value, course.window
    assert value is not None
    name = "" if window is None or window.is_of_forward else "".join(part[0].upper() for part in window.parts)
    return go.Scatter(
        x=[x],
        y=[scale * value.mean],
        error_y={"array": [scale * value.deviation], "visible": value.count > 1, "thickness": 1.5, "width": 5},
        mode="markers+text" if name else "markers",
        text=[safe(name)],
        textposition="middle right",
        cliponaxis=False,
        marker={"size": 12, "symbol": style.symbol, "color": style.colour, "line": {"width": 1.5}},
        hovertext=[f"<b>{safe(course.plan.label)}</b><br>{safe(experiment.spread_text(course.plan))}"],
        hoverinfo="text",
        showlegend=False,
        meta={"plan": course.number},
    )


def _level(go: Any, experiment: Experiment, course: Course, style: Style, last: float, scale: int) -> Any:
    label = f"{template_safe(course.plan.label)}: {template_safe(experiment.spread_text(course.plan))}"
    return go.Scatter(
        x=[0, max(last, 1)],
        y=[scale * _mean(course)] * 2,
        mode="lines",
        line={"color": style.colour, "width": 2.2, "dash": style.line},
        hovertemplate=f"{label}<extra></extra>",
        showlegend=False,
        meta={"plan": course.number},
    )


def _mean(course: Course) -> float:
    assert course.plan.value is not None
    return course.plan.value.mean


_LEVELS = "Level lines: runs without a deficit. Bars: one standard deviation over seeds."


def deficit_drawings(experiment: Experiment) -> list[Drawing]:
    """What windows of low precision did, by their length and their start, and the recovery."""
    courses, metric = courses_of(experiment), experiment.metric.name
    drawings = []
    early = [course for _, course in early_windows(courses)]
    if early:
        plain = without_deficit(courses)
        others = [course for course in courses if course.window is None and course is not plain]
        begins = "; the line begins with no deficit at all" if plain is not None else ""
        drawings.append(
            Drawing(
                f"{metric} after an early deficit",
                f"{_bits(early)} at first, and then a whole budget{begins}. {_LEVELS}",
                early_chart(experiment),
                _windows_table(experiment, [*([plain] if plain else []), *early, *others]),
            )
        )
    sliding = [course for _, course in sliding_windows(courses)]
    if sliding:
        others = [course for course in courses if course.window is None and course.hold == 0]
        drawings.append(
            Drawing(
                f"{metric} by where a deficit lies",
                f"{_bits(sliding)} inside a window of the run. Beside the line W, A, G: where only weights, "
                f"activations or gradients had it. {_LEVELS}",
                sliding_chart(experiment),
                _windows_table(experiment, [*sliding, *others]),
            )
        )
    if courses:
        drawings.append(
            Drawing(
                "recovery",
                f"{metric} on held-out data, mean over seeds, with all runs laid so that low precision ends at 0; of "
                f"runs without it, so that the recipe begins there.",
                recovery_chart(experiment),
                _recovery_table(experiment, recovering(courses)),
                is_wide=True,
            )
        )
    return drawings


def _bits(courses: list[Course]) -> str:
    pairs = dict.fromkeys((course.window.low, course.window.high) for course in courses if course.window is not None)
    return " or ".join(f"{low} bits rather than {high}" for low, high in pairs)


def _windows_table(experiment: Experiment, courses: list[Course]) -> Table:
    columns = [("plan", False), ("low precision of", False), ("from step", True), ("to step", True)]
    columns += [("then steps", True), (experiment.metric.name, True)]
    rows = []
    for course in courses:
        window, total = course.window, course.hold + course.budget
        texts = ["-", "-", "-", f"{total:,}"]
        if window is not None:
            texts = [listed(list(window.parts)) if window.parts else "-", f"{window.start:,}", f"{window.end - 1:,}"]
            texts.append(f"{total - window.end:,}")
        rows.append([Cell(course.plan.label), *map(Cell, texts), Cell(experiment.spread_text(course.plan))])
    return Table("windows of low precision", columns, rows)


def _recovery_table(experiment: Experiment, courses: list[Course]) -> Table:
    """The metric of each plan's first run at a few steps after low precision."""
    curves = []
    for course in courses:
        steps, values = course.plan.judged[0].curve(experiment.metric.name)
        curves.append(dict(zip((step - course.recovers_from for step in steps), values, strict=True)))
    after = sorted({step for curve in curves for step in curve if step >= 0})
    chosen = sampled_steps(after)
    columns = [("plan (first seed)", False), ("before", True), *((f"+{step:,}", True) for step in chosen)]
    rows = []
    for course, curve in zip(courses, curves, strict=True):
        earlier = [step for step in curve if step < 0]
        steps_shown = [max(earlier, default=None), *chosen]
        texts = ["-" if step not in curve else experiment.metric_text(curve[step]) for step in steps_shown]
        rows.append([Cell(course.plan.label), *map(Cell, texts)])
    return Table("recovery from low precision", columns, rows)
