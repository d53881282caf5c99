"""Tables of an experiment: their columns once, for the page, for a notebook and for the terminal."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bitplan.files import byte_text
from bitplan.lab.report.answer import counted, duration_words, number_words, percent_words
from bitplan.lab.report.runs import Run
from bitplan.lab.report.summaries import Experiment, PlanSummary, Report

#: What stands before the price of a plan that is on the Pareto front.
FRONT_MARK = "◆"
#: What the columns mean, for below the table.
COLUMNS_NOTE = (
    f"Mean ± standard deviation over seeds. Bit operations as a share of FP32's, and bytes of a step's tensors, are "
    f"counted; {FRONT_MARK} marks the Pareto front: nothing that works is both cheaper and better."
)


@dataclass(frozen=True)
class Cell:
    """What a reader sees, and what sorting goes by (None sorts last)."""

    text: str
    order: float | str | None = None
    #: HTML in place of the text, made by this package alone.
    markup: str | None = None

    @property
    def html(self) -> str:
        return html.escape(self.text) if self.markup is None else self.markup


@dataclass(frozen=True)
class Column:
    """A heading, and the cell under it for each plan."""

    title: str
    cell: Callable[[PlanSummary], Cell]
    is_number: bool = True


def plan_columns(experiment: Experiment) -> list[Column]:
    """The columns of the table of plans."""
    metric = experiment.metric.name
    return [
        Column("plan", lambda plan: Cell(plan.label, plan.label), is_number=False),
        Column(metric, lambda plan: Cell(experiment.spread_words(plan), plan.value.mean if plan.value else None)),
        Column("bit operations", lambda plan: _marked(plan.cost, percent_words, plan.on_cost_front)),
        Column("tensor bytes", lambda plan: _marked(plan.memory, byte_text, plan.on_memory_front)),
        Column("mean bits", lambda plan: _cell(plan.mean_bits, lambda bits: f"{bits:.1f}")),
        Column("time", lambda plan: _cell(plan.seconds, duration_words)),
        Column("runs", lambda plan: Cell(_runs_words(plan), len(plan.runs))),
        Column("verdict", lambda plan: Cell(verdict_words(plan), _VERDICT_ORDER[plan.verdict]), is_number=False),
    ]


_VERDICT_ORDER = {"reference": 0, "keeps": 1, "loses": 2, "alone": 3, "unfinished": 4, "fails": 5}


def verdict_words(plan: PlanSummary) -> str:
    """The verdict in a word or two."""
    return {"alone": "no reference"}.get(plan.verdict, plan.verdict)


def summary_html(experiment: Experiment) -> str:
    """The answer and the table of plans, for a notebook."""
    columns = plan_columns(experiment)
    head = "".join(f"<th>{html.escape(column.title)}</th>" for column in columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{column.cell(plan).html}</td>' for column in columns)}</tr>" for plan in experiment.plans
    )
    return f"<p>{html.escape(experiment.answer)}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def table_html(head: Sequence[tuple[str, bool]], rows: Iterable[Sequence[Cell]], caption: str, sorts: bool) -> str:
    """A table of (heading, is a number) columns; one that sorts has its headings as buttons.

    It lies in a frame of its own that scrolls, which the keyboard can reach: wide tables must not widen a narrow page.
    """
    headings = "".join(_heading(title, is_number, sorts) for title, is_number in head)
    body = "".join(f"<tr>{''.join(map(_data, cells, (number for _, number in head)))}</tr>" for cells in rows)
    label = html.escape(caption)
    return (
        f'<div class="frame" role="region" tabindex="0" aria-label="{label}"><table{" data-sorts" if sorts else ""}>'
        f'<caption class="unseen">{label}</caption><thead><tr>{headings}</tr></thead><tbody>{body}</tbody>'
        "</table></div>"
    )


def _heading(title: str, is_number: bool, sorts: bool) -> str:
    kind = ' class="number"' if is_number else ""
    words = html.escape(title)
    if not sorts:
        return f'<th scope="col"{kind}>{words}</th>'
    return f'<th scope="col"{kind} aria-sort="none"><button type="button">{words}</button></th>'


def _data(cell: Cell, is_number: bool) -> str:
    kind = ' class="number"' if is_number else ""
    order = "" if cell.order is None else html.escape(str(cell.order))
    return f'<td{kind} data-order="{order}">{cell.html}</td>'


def _cell(value: float | None, words: Callable[[float], str]) -> Cell:
    return Cell("-") if value is None else Cell(words(value), value)


def _marked(value: float | None, words: Callable[[float], str], on_front: bool) -> Cell:
    cell = _cell(value, words)
    return Cell(f"{FRONT_MARK} {cell.text}", cell.order) if on_front else cell


def _runs_words(plan: PlanSummary) -> str:
    words = plan.status_words
    return f"{len(plan.runs)}" + (f" ({words})" if words else "")


# --- The tables' part of the page: plans and runs, sorted by a press on a heading, with the commands that make them


def badge(plan: PlanSummary) -> str:
    return f'<span class="badge {plan.verdict}">{html.escape(verdict_words(plan))}</span>'


def plans_html(experiment: Experiment) -> str:
    columns = plan_columns(experiment)
    head = [*((column.title, column.is_number) for column in columns), ("reproduce", False)]
    rows = []
    for plan in experiment.plans:
        *figures, verdict = (column.cell(plan) for column in columns)
        why = "" if plan.verdict == "reference" else f'<span class="why">{html.escape(plan.why)}</span>'
        commands = Cell("", None, _commands([run.command for run in plan.runs]))
        rows.append([*figures, Cell(verdict.text, verdict.order, f"{badge(plan)}{why}"), commands])
    note = f'<p class="quiet small">{html.escape(COLUMNS_NOTE)}</p>'
    return table_html(head, rows, f"plans on {experiment.name}", True) + note


def runs_html(experiment: Experiment) -> str:
    titles = ("plan", "seed", "status", "step", experiment.metric.name, "best", "last loss", "time", "command")
    numbers = (False, True, False, True, True, True, True, True, False)
    rows = []
    for plan in experiment.plans:
        for run in plan.runs:
            rows.append(
                [
                    Cell(plan.label, plan.label),
                    Cell(str(run.seed), run.seed),
                    Cell("", run.status, _status(run)),
                    Cell(str(run.step), run.step),
                    _number(run.value, experiment.metric_words),
                    _number(run.best, experiment.metric_words),
                    _number(run.loss, number_words),
                    _number(run.seconds, duration_words),
                    Cell("", run.command, _command(run.command)),
                ]
            )
    return table_html(list(zip(titles, numbers, strict=True)), rows, f"runs on {experiment.name}", True)


def promotions_html(experiment: Experiment) -> str:
    """Which tensors were promoted in which run, and when; nothing where none was."""
    rows = [
        [
            Cell(plan.label, plan.label),
            Cell(str(run.seed), run.seed),
            Cell(str(each.step), each.step),
            Cell(each.site, each.site),
            Cell(f"{each.measure} {percent_words(each.share)}", each.share),
            Cell(each.to, each.to),
        ]
        for plan in experiment.plans
        for run in plan.runs
        for each in run.promotions
    ]
    if not rows:
        return ""
    titles = ("plan", "seed", "from step", "tensor", "because of", "promoted to")
    numbers = (False, True, True, False, True, False)
    table = table_html(list(zip(titles, numbers, strict=True)), rows, f"promotions on {experiment.name}", True)
    return f'<h3 class="part">Promotions</h3>{table}'


def _number(value: float | None, words: Callable[[float], str]) -> Cell:
    return Cell("-") if value is None else Cell(words(value), value)


def _status(run: Run) -> str:
    why = f'<span class="why">{html.escape(run.why)}</span>' if run.why else ""
    return f'<span class="badge {run.status}">{html.escape(run.status)}</span>{why}'


def _commands(commands: list[str]) -> str:
    return (
        f"<details><summary>{counted(len(commands), 'command')}</summary>{''.join(map(_command, commands))}</details>"
    )


def _command(command: str) -> str:
    if not command:
        return "-"
    return (
        f'<span class="command"><code>{html.escape(command)}</code>'
        '<button type="button" class="plain copy" aria-label="Copy the command">Copy</button></span>'
    )


# --- A report as plain values: for JSON, for CSV, and for whatever else reads tables


def report_record(report: Report) -> dict[str, Any]:
    """All of a report that ``--json`` prints."""
    return {
        "answer": report.answer,
        "experiments": [
            {
                "task": experiment.task,
                "variant": experiment.variant,
                "metric": metric_record(experiment),
                "answer": experiment.answer,
                "plans": [plan_record(plan) for plan in experiment.plans],
                "runs": [run_record(run) for run in experiment.runs],
            }
            for experiment in report.experiments
        ],
    }


def metric_record(experiment: Experiment) -> dict[str, Any]:
    metric = experiment.metric
    return {"name": metric.name, "better": metric.better, "trivial": metric.trivial}


def plan_record(plan: PlanSummary) -> dict[str, Any]:
    """One plan with mean and spread over its runs."""
    value = plan.value
    return {
        "plan": plan.label,
        "runs": len(plan.runs),
        "finished": plan.count("finished"),
        "diverged": plan.count("diverged"),
        "verdict": plan.verdict,
        "why": plan.why,
        "metric": None if value is None else value.mean,
        "deviation": None if value is None else value.deviation,
        "relative_to_fp32": plan.cost,
        "mean_bits": plan.mean_bits,
        "memory_bytes": plan.memory,
        "on_cost_front": plan.on_cost_front,
        "on_memory_front": plan.on_memory_front,
        "seconds": plan.seconds,
    }


def run_record(run: Run) -> dict[str, Any]:
    """One run on one line."""
    return {
        "task": run.task,
        "plan": run.label,
        "seed": run.seed,
        "status": run.status,
        "step": run.step,
        "metric": run.metric.name,
        "value": run.value,
        "best": run.best,
        "loss": run.loss,
        "relative_to_fp32": run.relative_cost,
        "bit_operations": run.bit_operations,
        "mean_bits": run.mean_bits,
        "memory_bytes": run.total_memory,
        "peak_bytes": run.peak,
        "seconds": run.seconds,
        "execution": run.execution,
        "device": run.device,
        "compile": run.compiled,
        "why": run.why,
        "folder": str(run.folder),
        "command": run.command,
    }


def csv_text(report: Report) -> str:
    """Every run on a line of its own, with a heading."""
    records = [run_record(run) for run in report.runs]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return stream.getvalue()
