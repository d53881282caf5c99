"""The chart of assignments on the page; none where no plan is one."""

from __future__ import annotations

from bitplan.lab.report.charts.ratios import ratio_chart
from bitplan.lab.report.figures import Drawing
from bitplan.lab.report.ratios import assigned_plans
from bitplan.lab.report.summaries import Experiment
from bitplan.lab.report.tables import Cell, table_html


def ratio_drawings(experiment: Experiment) -> list[Drawing]:
    """What the metric is at each ratio of low values."""
    known = assigned_plans(experiment)
    if not any(each.order is not None for each in known):
        return []
    head = [("plan", False), ("asked", True), ("order", False), ("ratio", True), ("promoted", True)]
    rows = [
        [
            Cell(each.plan.label),
            Cell("-" if each.asked is None else f"{each.asked:g}"),
            Cell(each.order or "baseline"),
            Cell(f"{each.ratio:.3f}"),
            Cell(f"{each.promoted:g}"),
            Cell(experiment.spread_words(each.plan)),
        ]
        for each in known
    ]
    words = (
        "The ratio is 0 where every tensor has 16 bits and 1 where every one has 8; memory against 16 bits is 1 - "
        "ratio / 2, an aggregate and not a peak. It is a mean over the run, which promotions lower. Joined: "
        "assignments of one order; dotted: the reference; a cross: a plan that fails."
    )
    table = table_html([*head, (experiment.metric.name, True)], rows, "assignments", False)
    return [Drawing(f"{experiment.metric.name} against the low-precision ratio", words, ratio_chart(experiment), table)]
