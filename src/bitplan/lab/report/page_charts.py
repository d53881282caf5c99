"""The charts' part of the page: what each chart says, and its place."""

from __future__ import annotations

import html
import json
from typing import Any

from bitplan.lab.report.answer import best_plan, number_words
from bitplan.lab.report.charts.curves import bits_chart, loss_chart, metric_chart
from bitplan.lab.report.charts.measured import measured_drawing
from bitplan.lab.report.charts.prices import price_chart
from bitplan.lab.report.charts.sites import class_words, measures_of, memory_chart, memory_classes, sites_chart
from bitplan.lab.report.figures import Drawing, chart_figure, memory_table, sites_table, time_table
from bitplan.lab.report.measured import measured_in_run
from bitplan.lab.report.page_deficits import deficit_drawings
from bitplan.lab.report.page_ratios import ratio_drawings
from bitplan.lab.report.palette import class_colour
from bitplan.lab.report.summaries import Experiment
from bitplan.lab.report.tables import plan_columns, table_html


def charts_html(experiment: Experiment, key: str, drawings: dict[str, Any]) -> str:
    metric = experiment.metric.name
    plan_rows = _plan_rows(experiment)
    front = (
        "Dotted: the Pareto front, where nothing that works is both cheaper and better. Bars: one standard deviation "
        "over seeds; faint: single seeds; a cross: a plan that fails."
    )
    charts = [
        Drawing(f"{metric} against bit operations", front, price_chart(experiment, "cost"), plan_rows),
        Drawing(
            f"{metric} against bytes",
            f"Bytes of a step's tensors in the plan's formats: counted, not measured. {front}",
            price_chart(experiment, "memory"),
            plan_rows,
        ),
        Drawing(
            "loss",
            "Training loss; thin: single seeds, thick: their mean; a cross: where a run diverged.",
            loss_chart(experiment),
            time_table(experiment, "loss", number_words),
        ),
        Drawing(
            f"{metric} over time",
            "On held-out data; thin: single seeds, thick: their mean.",
            metric_chart(experiment),
            time_table(experiment, metric, experiment.metric_words),
        ),
        Drawing(
            "bits over time",
            "The width of both operands at which products would have cost what they did.",
            bits_chart(experiment),
            time_table(experiment, "bits", lambda bits: f"{bits:.1f}"),
        ),
        Drawing(
            "bytes by class of tensors",
            "Bytes of a step's tensors in the plan's formats: counted, not measured, and not a peak.",
            memory_chart(experiment),
            memory_table(experiment),
            _class_legend(experiment),
        ),
    ]
    charts += deficit_drawings(experiment)
    charts += ratio_drawings(experiment)
    shown = [chart_figure(f"{key}-{number}", chart, drawings) for number, chart in enumerate(charts)]
    return "".join(shown) + _sites_html(experiment, key, drawings) + _measured_html(experiment, key, drawings)


def _class_legend(experiment: Experiment) -> str:
    entries = "".join(
        f'<li><span class="sign" data-color="{class_colour(number)}"></span>{html.escape(class_words(name))}</li>'
        for number, name in enumerate(memory_classes(experiment))
    )
    return f'<ul class="legend small">{entries}</ul>'


def _sites_html(experiment: Experiment, key: str, drawings: dict[str, Any]) -> str:
    """The heat map, with a choice of the plan and of what is shown."""
    choices, options = {}, []
    for number, plan in enumerate(experiment.plans):
        for measure in measures_of(plan):
            figure = sites_chart(plan, measure)
            assert figure is not None
            choices[f"{number}/{measure}"] = json.loads(figure.to_json())
        if measures_of(plan):
            selected = " selected" if plan is best_plan(experiment) else ""
            options.append(f'<option value="{number}"{selected}>{html.escape(plan.label)}</option>')
    if not options:
        return ""
    place = f"{key}-sites"
    controls = (
        f'<p class="controls"><label>plan <select id="{place}-plan">{"".join(options)}</select></label> '
        f'<label>show <select id="{place}-measure"><option value="format">format</option>'
        f'<option value="error">error of rounding</option></select></label></p>'
    )
    words = (
        "Every tensor that the plan rounds: operations down in the order they run, roles across. The error is the root "
        "of mean squared error over mean square; what is empty is left alone."
    )
    drawing = Drawing("tensors by format and by error", words, None, sites_table(experiment), controls, is_wide=True)
    return chart_figure(place, drawing, drawings, choices)


def _measured_html(experiment: Experiment, key: str, drawings: dict[str, Any]) -> str:
    """Beside it, what each format would do: of the first run of each plan that was looked at while it ran."""
    shown = []
    for number, plan in enumerate(experiment.plans):
        measured = next((found for run in plan.runs if (found := measured_in_run(run.folder)) is not None), None)
        if measured is not None:
            shown.append(chart_figure(f"{key}-measured{number}", measured_drawing(measured, plan.label), drawings))
    return "".join(shown)


def _plan_rows(experiment: Experiment) -> str:
    columns = plan_columns(experiment)
    rows = [[column.cell(plan) for column in columns] for plan in experiment.plans]
    return table_html([(column.title, column.is_number) for column in columns], rows, "the plotted figures", False)
