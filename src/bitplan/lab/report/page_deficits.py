"""The charts of critical learning periods on the page; none where no plan had low precision for a while."""

from __future__ import annotations

from bitplan.lab.report.answer import listed
from bitplan.lab.report.charts.deficits import early_chart, recovery_chart, sliding_chart
from bitplan.lab.report.deficits import Course, courses_of, early_windows, recovering, sliding_windows, without_deficit
from bitplan.lab.report.figures import Drawing
from bitplan.lab.report.summaries import Experiment
from bitplan.lab.report.tables import Cell, table_html

#: A curve's table has at most so many columns of steps.
_MOST_STEPS = 12

_LEVELS = "Level lines: runs without a deficit. Bars: one standard deviation over seeds."


def deficit_drawings(experiment: Experiment) -> list[Drawing]:
    """What windows of low precision did, by their length, by their place, and on the way back."""
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


def _windows_table(experiment: Experiment, courses: list[Course]) -> str:
    head = [("plan", False), ("low precision of", False), ("from step", True), ("to step", True)]
    head += [("then steps", True), (experiment.metric.name, True)]
    rows = []
    for course in courses:
        window, total = course.window, course.hold + course.budget
        place = ["-", "-", "-", f"{total:,}"]
        if window is not None:
            place = [listed(list(window.parts)) if window.parts else "-", f"{window.start:,}", f"{window.end - 1:,}"]
            place.append(f"{total - window.end:,}")
        rows.append([Cell(course.plan.label), *map(Cell, place), Cell(experiment.spread_words(course.plan))])
    return table_html(head, rows, "windows of low precision", False)


def _recovery_table(experiment: Experiment, courses: list[Course]) -> str:
    """The metric of each plan's first run at a few moments after low precision."""
    curves = []
    for course in courses:
        steps, values = course.plan.judged[0].curve(experiment.metric.name)
        curves.append(dict(zip((step - course.recovers_from for step in steps), values, strict=True)))
    after = sorted({step for curve in curves for step in curve if step >= 0})
    chosen = after[:: -(-len(after) // _MOST_STEPS) or 1]
    head = [("plan (first seed)", False), ("before", True), *((f"+{step:,}", True) for step in chosen)]
    rows = []
    for course, curve in zip(courses, curves, strict=True):
        earlier = [step for step in curve if step < 0]
        wanted = [max(earlier, default=None), *chosen]
        words = ["-" if step not in curve else experiment.metric_words(curve[step]) for step in wanted]
        rows.append([Cell(course.plan.label), *map(Cell, words)])
    return table_html(head, rows, "recovery from low precision", False)
