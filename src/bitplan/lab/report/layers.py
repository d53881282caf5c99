"""Layer by layer: the rounding of every tensor over time, and two runs side by side.

Recorded loops write statistics of every tensor as they train (``statistics.jsonl``), and runs with
``--measure-every`` the errors of every product (``measurements.jsonl``); a page made meanwhile shows them so far.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from bitplan.analysis.measure.candidate import PLANNED
from bitplan.errors import RunError
from bitplan.lab.report.answer import percent_text
from bitplan.lab.report.figures import CELL_INK, DIFFERENCES, Drawing, end_of, safe
from bitplan.lab.report.heatmaps import format_text, heatmap, moving_bits, operand_text, operands_in_order, row_names
from bitplan.lab.report.runs import Run
from bitplan.lab.report.summaries import Experiment
from bitplan.lab.report.tables import Cell, Table, sampled_steps, sites_table
from bitplan.lab.train.folder import RunFolder, read_lines

#: Row -> value at each step.
Rows = Mapping[str, Sequence[float | None]]

MEASURES = {"error": "error of rounding", "overflow": "overflow", "underflow": "underflow"}
#: Steps across, at most.
_MOST_STEPS = 40
#: Smaller shares have the colour of this one.
_SMALLEST = 1e-5
#: Runs to choose from where two are compared, at most: each brings all its tensors onto the page.
_MOST_RUNS = 40


def over_time_drawings(experiment: Experiment) -> list[Drawing]:
    """The statistics of every tensor over time, with a choice of the plan; none where no run has written any."""
    choices: dict[str, Any] = {}
    plans: list[tuple[int, str, bool]] = []
    tables: list[list[Cell]] = []
    for number, plan in enumerate(experiment.plans):
        series = next((series for run in plan.runs if (series := read_series(run)) and series[1]["error"]), None)
        if series is None:
            continue
        steps, by_measure = series
        for measure, rows in by_measure.items():
            choices[f"{number}/{measure}"] = json.loads(_over_time_chart(steps, rows).to_json())
        plans.append((number, plan.label, not plans))
        tables += [[Cell(plan.label), *cells] for cells in _table_rows(steps, by_measure["error"])]
    if not plans:
        return []
    measures = [item for item in MEASURES.items() if any(key.endswith(f"/{item[0]}") for key in choices)]
    columns = [("plan", False), ("tensor", False), ("first", True), ("last", True), ("largest", True)]
    caption = (
        "Tensors, or products where runs were measured, down in the order they run; steps across, of each plan's first "
        "run. The error is the root of mean squared error over mean square since the column before; dark is bad."
    )
    table = Table("error of rounding over time", columns, tables)
    return [
        Drawing("layers over time", caption, None, table, is_wide=True, choices=choices, plans=plans, measures=measures)
    ]


def read_series(run: Run) -> tuple[list[int], dict[str, Rows]] | None:
    """The steps of a run's statistics, and the rows of each measure; None where it has none."""
    place = RunFolder(run.folder)
    try:
        lines = _thinned(read_lines(place.statistics_file))
        if lines:
            names = list(dict.fromkeys(name for line in lines for name in line["sites"]))
            return [int(line["step"]) for line in lines], {
                measure: {name: [_share(line["sites"].get(name, {}).get(measure)) for line in lines] for name in names}
                for measure in MEASURES
            }
        lines = _thinned(read_lines(place.measurements_file))
        return ([int(line["step"]) for line in lines], {"error": _measured_rows(lines)}) if lines else None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"the statistics of {run.folder} are damaged: restore them, or leave that run out.") from error


def _measured_rows(lines: Sequence[Mapping[str, Any]]) -> Rows:
    """Median backward errors: of the plan's own formats, or of E4M3 where there is no plan."""
    candidates = {str(row["candidate"]) for line in lines for row in line["rows"]}
    chosen = PLANNED if PLANNED in candidates else "e4m3 tensor"
    by_step = [
        {f"{row['product']} {row['pass']}": _share(row["median"]) for row in line["rows"] if row["candidate"] == chosen}
        for line in lines
    ]
    names = dict.fromkeys(name for rows in by_step for name in rows)
    return {name: [rows.get(name) for rows in by_step] for name in names}


def _thinned(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    stride = -(-len(lines) // _MOST_STEPS) or 1
    return [*lines[:-1][::stride], *lines[-1:]]


def _share(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and math.isfinite(value) else None


def _over_time_chart(steps: Sequence[int], rows: Rows) -> Any:
    heats = [[None if value is None else _heat(value) for value in values] for values in rows.values()]
    known = [heat for row in heats for heat in row if heat is not None]
    low, high = min(known, default=-4.0), max(known, default=0.0)
    figure = heatmap(
        heats,
        [["" for _ in steps] for _ in rows],
        [
            [f"<b>{safe(name)}</b><br>step {step}: {_text(value)}" for step, value in zip(steps, values, strict=True)]
            for name, values in rows.items()
        ],
        [str(step) for step in steps],
        [safe(end_of(name, 44)) for name in rows],
        (low, max(high, low + 0.5)),
        [(tick, f"{100 * 10.0**tick:g} %") for tick in range(math.floor(low), math.ceil(high) + 1)],
        90,
    )
    figure.update_layout(xaxis={"title": {"text": "step"}, "nticks": 10, "tickmode": "auto"})
    figure.update_traces(xgap=0.5)
    return figure


def _text(value: float | None) -> str:
    return "-" if value is None else percent_text(value)


def _heat(value: float) -> float:
    return round(math.log10(max(value, _SMALLEST)), 3)


def _table_rows(steps: Sequence[int], rows: Rows) -> list[list[Cell]]:
    """The first, the last and the largest error of some rows."""
    names = list(rows)
    table = []
    for number in sampled_steps(range(len(names))):
        values = [value for value in rows[names[number]] if value is not None]
        if values:
            table.append([Cell(names[number]), *(Cell(percent_text(v)) for v in (values[0], values[-1], max(values)))])
    return table


# --- Two runs


def pair_drawings(experiment: Experiment) -> list[Drawing]:
    """Two runs of the experiment, tensor by tensor; none where fewer than two have recorded what they rounded."""
    runs = [
        (plan.label, run)
        for plan in experiment.plans
        for run in plan.runs
        if any(site.format or site.error is not None for site in run.sites)
    ][:_MOST_RUNS]
    if len(runs) < 2:
        return []
    sites = [site for _, run in runs for site in run.sites if site.format or site.error is not None]
    operations = list(dict.fromkeys(site.site for site in sites))
    operands = operands_in_order({site.role for site in sites})
    labels = [f"{label}, seed {run.seed}" for label, run in runs]
    other = next((number for number, (label, _) in enumerate(runs) if label != runs[0][0]), 1)
    pairs = {
        "labels": labels,
        "shown": [0, other],
        "rows": row_names(operations),
        "names": [safe(operation) for operation in operations],
        "columns": [operand_text(operand) for operand in operands],
        "colours": list(DIFFERENCES),
        "ink": CELL_INK,
        "runs": [_cells(run, operations, operands) for _, run in runs],
    }
    caption = (
        "The second run against the first. Numbers: the error of rounding in the second as a multiple of the first's; "
        "orange is larger, blue smaller. Where formats differ and errors were not recorded, the two formats, or "
        "\N{NOT EQUAL TO} where there is no room for them."
    )
    return [Drawing("two runs, layer by layer", caption, None, sites_table(experiment), is_wide=True, pairs=pairs)]


def _cells(run: Run, operations: Sequence[str], operands: Sequence[str]) -> list[list[Any]]:
    """Row, column, format, error and the format in short of every tensor of a run."""
    row = {name: number for number, name in enumerate(operations)}
    column = {name: number for number, name in enumerate(operands)}
    moving = moving_bits(run)
    return [
        [row[site.site], column[site.role], safe(site.format or ""), _share(site.error), format_text(site, moving)]
        for site in run.sites
        if site.format or site.error is not None
    ]
