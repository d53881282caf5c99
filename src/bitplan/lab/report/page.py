"""Pages of reports, measurements and schedules: single HTML files that need no network.

The templates escape all text (Jinja2's autoescape), and a content security policy forbids requests.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bitplan._version import __version__
from bitplan.analysis.measure import Measurement
from bitplan.lab.report.answer import best_plan, counted, listed, number_text, percent_text
from bitplan.lab.report.charts import bits_chart, loss_chart, measured_chart, memory_chart, metric_chart, price_chart
from bitplan.lab.report.deficits import deficit_drawings
from bitplan.lab.report.figures import (
    LINE_DASHES,
    SYMBOL_PATHS,
    Drawing,
    bare_layout,
    class_colour,
    dark_partners,
    plan_styles,
    plotly,
)
from bitplan.lab.report.heatmaps import measured_drawing, measured_in_file, measured_in_run, measures_of, sites_chart
from bitplan.lab.report.layers import over_time_drawings, pair_drawings
from bitplan.lab.report.ratios import ratio_drawings
from bitplan.lab.report.runs import Run
from bitplan.lab.report.summaries import Experiment, Report
from bitplan.lab.report.tables import (
    COLUMNS_NOTE,
    Cell,
    Table,
    class_text,
    curve_table,
    figures_table,
    memory_classes,
    memory_table,
    plan_columns,
    plans_table,
    promotions_table,
    runs_table,
    sites_table,
    verdict_text,
)
from bitplan.plans.schedules import Schedule
from bitplan.plans.schedules.named import GROUPS_EXPLAINED, group_of
from bitplan.plans.schedules.plots import Piece, pieces_of


@dataclass(frozen=True)
class Section:
    """An experiment, a measurement or a list of schedules on a page."""

    id: str
    heading: str
    charts: Sequence[Drawing]
    answer: str = ""
    note: str = ""
    #: (name, value); those without a value are left out.
    facts: Sequence[tuple[str, str]] = ()
    #: (plan, style, verdict), for the legend of all charts.
    legend: Sequence[Any] = ()
    #: (heading, table, note below it).
    tables: Sequence[tuple[str, Table, str]] = ()


def page_html(report: Report, refresh: float | None = None) -> str:
    """The page of a report.

    :param refresh: seconds after which the page loads itself again, while runs go on; None: it does not.
    """
    sections = [_experiment_section(experiment, f"e{number}") for number, experiment in enumerate(report.experiments)]
    title = ", ".join(dict.fromkeys(experiment.task for experiment in report.experiments))
    return _page(title, sections, counted(len(report.runs), "run"), "report", refresh)


def measurement_page_html(measurement: Measurement) -> str:
    """The page of a measurement: a heat map of products by format for each stage."""
    target = measurement.target or "a model"
    facts = [
        ("products", str(len(measurement.products))),
        ("candidates", ", ".join(measurement.candidates)),
        ("not measured", "; ".join(f"{name}: {why}" for name, why in measurement.skipped.items())),
        ("command", measurement.command or ""),
    ]
    charts = _numbered([measured_drawing(measured, target) for measured in measured_in_file(measurement)], "m-")
    section = Section("m", target, charts, answer=measurement_answer(measurement), facts=facts)
    return _page(target, [section], counted(len(measurement.rows), "figure"), "measurement")


def measurement_answer(measurement: Measurement) -> str:
    """Which candidate has the least error, and which product is the hardest, in a sentence."""
    levels: dict[str, list[float]] = {}
    rows = [row for row in measurement.rows if math.isfinite(row.median)]
    for row in rows:
        levels.setdefault(row.candidate, []).append(math.log(max(row.median, 1e-12)))
    if not levels:
        return ""
    means = {candidate: math.exp(sum(values) / len(values)) for candidate, values in levels.items()}
    best, worst = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
    hardest = max((row for row in rows if row.candidate == best), key=lambda row: row.median)
    other = "" if best == worst else f", and {worst} the largest ({means[worst]:.1e})"
    return (
        f"Over {counted(len(measurement.products), 'product')}, {best} has the least error ({means[best]:.1e}, the "
        f"geometric mean of medians){other}; the hardest for {best} is {hardest.product} in {hardest.pass_} "
        f"({hardest.median:.1e})."
    )


def schedules_page_html(schedules: Sequence[Schedule], total: int) -> str:
    """The page of schedules over a run of `total` steps."""
    names = ", ".join(schedule.name for schedule in schedules)
    section = Section(
        "s",
        names,
        _numbered([_schedule_drawing(schedule, total, len(schedules) == 1) for schedule in schedules], "s"),
        answer=_schedules_answer(schedules, total),
        tables=[("Figures", _schedules_table(schedules, total), _schedules_note(schedules))],
    )
    return _page(names, [section], counted(len(schedules), "schedule"), "schedules")


def summary_html(experiment: Experiment) -> str:
    """The answer and the table of plans, for a notebook."""
    return _templates().get_template("summary.html").render(experiment=experiment, columns=plan_columns(experiment))


def _page(title: str, sections: Sequence[Section], source: str, name: str, refresh: float | None = None) -> str:
    plotly()  # raises where it is not installed
    from plotly.offline import get_plotlyjs

    drawings = {chart.id: _drawing_data(chart) for section in sections for chart in section.charts if chart.has_data}
    return (
        _templates()
        .get_template("page.html")
        .render(
            title=f"bitplan: {title}",
            name=name,
            sections=sections,
            source=source,
            refresh=refresh,
            version=__version__,
            data={"drawings": drawings, "dark": dark_partners()},
            symbol_paths=SYMBOL_PATHS,
            line_dashes=LINE_DASHES,
            css=_asset("page.css"),
            js=_asset("page.js"),
            plotly=Markup(get_plotlyjs()),
        )
    )


def _drawing_data(chart: Drawing) -> Any:
    if chart.pairs:
        return {"pairs": chart.pairs}
    return {"choices": chart.choices} if chart.choices else json.loads(chart.figure.to_json())


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("bitplan.lab.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment


def _asset(name: str) -> Markup:
    return Markup((files("bitplan.lab.report") / "assets" / name).read_text(encoding="utf-8"))


def _numbered(charts: Iterable[Drawing], prefix: str) -> list[Drawing]:
    return [replace(chart, id=f"{prefix}{number}") for number, chart in enumerate(charts)]


# --- Experiments


def _experiment_section(experiment: Experiment, key: str) -> Section:
    charts = _numbered(_experiment_drawings(experiment), f"{key}-")
    styles = plan_styles(experiment.plans)
    promotions = promotions_table(experiment)
    has_bytes = len(experiment.plans) > 1 and any(plan.memory for plan in experiment.plans)
    is_emulated = any(run.execution == "emulate" and run.plan is not None for run in experiment.runs)
    return Section(
        key,
        experiment.name,
        [
            *_without_gap(charts),
            *_sites_drawings(experiment, key),
            *_layer_drawings(experiment, key),
            *_measured_drawings(experiment, key),
        ],
        answer=experiment.answer.replace(" %", "\N{NO-BREAK SPACE}%"),
        note=" ".join([_EMULATION_NOTE] * is_emulated + [_BYTES_NOTE] * (has_bytes and not experiment.changes_bytes)),
        facts=_facts(experiment),
        legend=[(plan, style, verdict_text(plan)) for plan, style in zip(experiment.plans, styles, strict=True)],
        tables=[
            ("Plans", plans_table(experiment), COLUMNS_NOTE),
            ("Runs", runs_table(experiment), ""),
            *([("Promotions", promotions, "")] if promotions is not None else []),
        ],
    )


def _without_gap(charts: Sequence[Drawing]) -> list[Drawing]:
    """The charts, the last one of an odd number in a row of halves as wide as the page."""
    filled: list[Drawing] = []
    halves = 0
    for number, chart in enumerate(charts):
        halves = 0 if chart.is_wide else halves + 1
        is_last = number + 1 == len(charts) or charts[number + 1].is_wide
        filled.append(replace(chart, is_wide=True) if is_last and halves % 2 else chart)
    return filled


_EMULATION_NOTE = (
    "These runs emulate: values were rounded, arithmetic was not. Bit operations and bytes are what a plan would need, "
    "and nothing was saved yet."
)


_BYTES_NOTE = (
    "No plan changes the bytes of a step's tensors: they round operands of products, and charts of bytes are left out."
)


def _facts(experiment: Experiment) -> list[tuple[str, str]]:
    """What was run."""
    runs, metric = experiment.runs, experiment.metric
    settings = ", ".join(f"{key} {value}" for key, value in experiment.shared_settings.items())
    trivial = f"; trivial {experiment.metric_text(metric.trivial)}" if math.isfinite(metric.trivial) else ""
    return [
        ("metric", f"{metric.name}, {metric.better} is better{trivial}"),
        ("plans", listed([plan.label for plan in experiment.plans], 12)),
        ("runs", f"{len(runs)}, seeds {listed([str(seed) for seed in experiment.seeds], 12)}"),
        ("settings", settings or "-"),
        (
            "margin",
            f"{percent_text(experiment.margin)} of the reference's {metric.name}: a plan keeps it if a one-sided test "
            "at 2.5 %, paired by seed and corrected for the number of plans, shows a smaller loss, and loses it if one "
            "shows a larger loss",
        ),
        ("execution", _distinct(f"{run.execution}{', compiled' if run.compiled else ''}" for run in runs)),
        ("device", _distinct(_device_text(run) for run in runs)),
        ("versions", _distinct(", ".join(f"{name} {value}" for name, value in run.versions.items()) for run in runs)),
    ]


def _distinct(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(texts))


def _device_text(run: Run) -> str:
    about = [
        value if isinstance(value, str) else f"{key} {value}"
        for key, value in run.machine.items()
        if isinstance(value, (str, int)) and value != "" and key != "system"
    ]
    return ", ".join([run.device, *about])


def _experiment_drawings(experiment: Experiment) -> list[Drawing]:
    metric = experiment.metric.name
    figures = figures_table(experiment)
    front = (
        "Dotted: the Pareto front, where nothing that works is both cheaper and better. Bars: one standard deviation "
        "over seeds; faint: single seeds; a cross: a plan that fails."
    )
    lengths = "Costs are those of whole runs, which differ in length. " if experiment.has_lengths else ""
    of_bytes = [
        Drawing(
            f"{metric} against bytes",
            f"Bytes of a step's tensors in the plan's formats: counted, not measured. {front}",
            price_chart(experiment, "memory"),
            figures,
        )
    ]
    by_class = [
        Drawing(
            "bytes by class of tensors",
            "Bytes of a step's tensors in the plan's formats: counted, not measured, and not a peak.",
            memory_chart(experiment),
            memory_table(experiment),
            legend=[(class_colour(n), class_text(name)) for n, name in enumerate(memory_classes(experiment))],
        )
    ]
    measured = measured_chart(experiment)
    has_bytes = experiment.changes_bytes or len(experiment.plans) == 1
    drawings = [
        Drawing(f"{metric} against bit operations", f"{lengths}{front}", price_chart(experiment, "cost"), figures),
        *(of_bytes if has_bytes else ()),
        Drawing(
            "loss",
            "Training loss; thin: single seeds, thick: their mean; a cross: where a run diverged.",
            loss_chart(experiment),
            curve_table(experiment, "loss", number_text),
        ),
        Drawing(
            f"{metric} over time",
            "On held-out data; thin: single seeds, thick: their mean.",
            metric_chart(experiment),
            curve_table(experiment, metric, experiment.metric_text),
        ),
        Drawing(
            "bits over time",
            "The width of both operands at which products would have cost what they did.",
            bits_chart(experiment),
            curve_table(experiment, "bits", lambda bits: f"{bits:.1f}"),
        ),
        *(by_class if has_bytes else ()),
    ]
    if measured is not None:
        drawings.append(Drawing("time a step and peak memory", _MEASURED_NOTE, measured, plans_table(experiment)))
    return [*drawings, *deficit_drawings(experiment), *ratio_drawings(experiment)]


_MEASURED_NOTE = (
    "Measured, not counted: the median time of a step, and the most bytes held, of torch's allocator on a GPU, else "
    "of the whole process with everything that it has trained before. Emulation takes time and saves none."
)


def _layer_drawings(experiment: Experiment, key: str) -> list[Drawing]:
    drawings = [*over_time_drawings(experiment), *pair_drawings(experiment)]
    return [replace(drawing, id=f"{key}-layers{number}") for number, drawing in enumerate(drawings)]


def _sites_drawings(experiment: Experiment, key: str) -> list[Drawing]:
    """The heat map of tensors, with a choice of the plan and of what is shown."""
    choices, plans = {}, []
    for number, plan in enumerate(experiment.plans):
        for measure in measures_of(plan):
            figure = sites_chart(plan, measure)
            assert figure is not None
            choices[f"{number}/{measure}"] = json.loads(figure.to_json())
        if measures_of(plan):
            plans.append((number, plan.label, plan is best_plan(experiment)))
    if not plans:
        return []
    title = "tensors by format and by error"
    moves = any("meta" in figure["layout"] for figure in choices.values())
    caption = (
        "Every tensor that the plan rounds: operations down in the order they run, roles across. The error is the root "
        "of mean squared error over mean square; what is empty is left alone."
        + " Bits that move have their range, and the slider their bits at a step."
        * moves
    )
    table = sites_table(experiment)
    return [
        Drawing(
            *(title, caption, None, table),
            is_wide=True,
            choices=choices,
            plans=plans,
            id=f"{key}-sites",
            measures=[("format", "format"), ("error", "error of rounding")],
        ),
    ]


def _measured_drawings(experiment: Experiment, key: str) -> list[Drawing]:
    """What each format would do, from the first run of every plan that was measured during training."""
    drawings = []
    for number, plan in enumerate(experiment.plans):
        measurements = (measured_in_run(run.folder) for run in plan.runs)
        measured = next((measured for measured in measurements if measured is not None), None)
        if measured is not None:
            drawings.append(replace(measured_drawing(measured, plan.label), id=f"{key}-measured{number}"))
    return drawings


# --- Schedules


def _schedule_drawing(schedule: Schedule, total: int, is_wide: bool) -> Drawing:
    figure = schedule.plot(total)
    figure.update_layout(title=None, **bare_layout(320 if is_wide else 220))
    summary = schedule.summary(total)
    caption = (
        f"From {summary.first} to {summary.last} bits, {summary.mean_bits:.2f} on average; at the top for "
        f"{summary.share_at_max:.1%} of the steps; relative cost {summary.relative_cost:.3f}."
    )
    return Drawing(str(schedule), caption, figure, _pieces_table(pieces_of(schedule, total)), is_wide=is_wide)


def _schedules_answer(schedules: Sequence[Schedule], total: int) -> str:
    costs = {schedule.name: schedule.summary(total).relative_cost for schedule in schedules}
    if len(schedules) == 1:
        schedule = schedules[0]
        return (
            f"{schedule} costs {costs[schedule.name]:.1%} of the bit operations of {schedule.highest} bits throughout, "
            f"over {total:,} steps."
        )
    cheapest, dearest = min(costs, key=costs.__getitem__), max(costs, key=costs.__getitem__)
    return (
        f"Over {total:,} steps, {cheapest} costs {costs[cheapest]:.1%} and {dearest} {costs[dearest]:.1%} of the bit "
        f"operations of the highest bits throughout."
    )


def _schedules_note(schedules: Sequence[Schedule]) -> str:
    grouped = any(group_of(schedule.name) for schedule in schedules)
    return (
        "Relative cost: bit operations against the highest bits throughout, with the backward pass at the highest bits."
        + f" {GROUPS_EXPLAINED}" * grouped
    )


def _schedules_table(schedules: Sequence[Schedule], total: int) -> Table:
    titles = ("schedule", "group", "first", "last", "mean bits", "at the top", "relative cost")
    columns = [(title, title not in ("schedule", "group")) for title in titles]
    rows = []
    for schedule in schedules:
        summary, group = schedule.summary(total), group_of(schedule.name)
        rows.append(
            [
                Cell(str(schedule), schedule.name),
                Cell(group or "-", group),
                Cell(str(summary.first), summary.first),
                Cell(str(summary.last), summary.last),
                Cell(f"{summary.mean_bits:.2f}", summary.mean_bits),
                Cell(f"{summary.share_at_max:.1%}", summary.share_at_max),
                Cell(f"{summary.relative_cost:.3f}", summary.relative_cost),
            ]
        )
    return Table("schedules in figures", columns, rows, is_sortable=True)


#: Rows of the table of a schedule's pieces, at most.
_MOST_PIECES = 64


def _pieces_table(pieces: Sequence[Piece]) -> Table:
    shown = pieces if len(pieces) <= _MOST_PIECES else pieces[: _MOST_PIECES - 1]
    rows = [[Cell(f"{piece.first:,}"), Cell(f"{piece.last:,}"), Cell(str(piece.bits))] for piece in shown]
    if len(shown) < len(pieces):
        rows.append([Cell(f"{pieces[len(shown)].first:,}"), Cell(f"{pieces[-1].last:,}"), Cell("changes further")])
    return Table("bits over the run", [("from step", True), ("to step", True), ("bits", True)], rows)
