"""Tables of an experiment: for the page, for a notebook and for the terminal, and as JSON and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bitplan.files import byte_text
from bitplan.lab.report.answer import counted, duration_text, number_text, percent_text
from bitplan.lab.report.runs import Run, SiteRecord
from bitplan.lab.report.summaries import Experiment, PlanSummary, Report

#: Precedes the price of a plan on the Pareto front.
FRONT_MARK = "◆"
#: The meaning of the columns, shown below the table.
COLUMNS_NOTE = (
    f"Mean ± standard deviation over seeds. Bit operations as a share of FP32's, and bytes of a step's tensors, are "
    f"counted; {FRONT_MARK} marks the Pareto front: nothing that works is both cheaper and better. Verdicts compare "
    f"runs with the same seed; one seed decides nothing."
)


@dataclass(frozen=True)
class Cell:
    """What a reader sees, and the value that sorting uses (None sorts last)."""

    text: str
    order: float | str | None = None
    #: The CSS class of a badge around the text.
    badge: str = ""
    #: Small print below the text.
    note: str = ""
    #: Commands to copy: beneath the text, or in place of it where it is empty.
    commands: Sequence[str] = ()


@dataclass(frozen=True)
class Table:
    """A table on the page."""

    caption: str
    #: (heading, whether the values are numbers).
    columns: Sequence[tuple[str, bool]]
    rows: Sequence[Sequence[Cell]]
    #: Whether a click on a heading sorts the rows.
    is_sortable: bool = False


@dataclass(frozen=True)
class Column:
    """A heading, and the cell under it for each plan."""

    title: str
    cell: Callable[[PlanSummary], Cell]
    is_number: bool = True


def plan_columns(experiment: Experiment) -> list[Column]:
    """The columns of the table of plans."""
    metric = experiment.metric.name
    sizes = (  # of all tensors, which plans of operands alone leave as they are
        Column("tensor bytes", lambda plan: _marked(plan.memory, byte_text, plan.on_memory_front)),
        Column("mean bits", lambda plan: _cell(plan.mean_bits, lambda bits: f"{bits:.1f}")),
    )
    return [
        Column("plan", lambda plan: Cell(plan.label, plan.label), is_number=False),
        Column(metric, lambda plan: Cell(experiment.spread_text(plan), plan.value.mean if plan.value else None)),
        Column("bit operations", lambda plan: _marked(plan.cost, percent_text, plan.on_cost_front)),
        *(sizes if experiment.changes_bytes or len(experiment.plans) == 1 else ()),
        Column("time", lambda plan: _cell(plan.seconds, duration_text)),
        Column("runs", lambda plan: Cell(_runs_text(plan), len(plan.runs))),
        Column("verdict", lambda plan: Cell(verdict_text(plan), _VERDICT_ORDER[plan.verdict]), is_number=False),
    ]


_VERDICT_ORDER = {"reference": 0, "keeps": 1, "undecided": 2, "loses": 3, "alone": 4, "unfinished": 5, "fails": 6}


def verdict_text(plan: PlanSummary) -> str:
    """The verdict as readers see it."""
    return "better" if plan.is_better else {"alone": "no reference"}.get(plan.verdict, plan.verdict)


def _cell(value: float | None, text: Callable[[float], str]) -> Cell:
    return Cell("-") if value is None else Cell(text(value), value)


def _marked(value: float | None, text: Callable[[float], str], on_front: bool) -> Cell:
    cell = _cell(value, text)
    return replace(cell, text=f"{FRONT_MARK} {cell.text}") if on_front else cell


def step_text(seconds: float) -> str:
    """The time of a step.

    >>> step_text(0.0123), step_text(2.5)
    ('12.3 ms', '2.5 s')
    """
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else duration_text(seconds)


def _runs_text(plan: PlanSummary) -> str:
    return f"{len(plan.runs)} ({plan.status_text})" if plan.status_text else str(len(plan.runs))


# --- Tables of the page


def plans_table(experiment: Experiment) -> Table:
    """All plans with their verdicts, measured time and memory, and the commands that reproduce them."""
    *columns, verdicts = plan_columns(experiment)
    columns += [
        Column("time a step", lambda plan: _cell(plan.step_seconds, step_text)),
        Column("measured peak", lambda plan: _cell(plan.peak, byte_text)),
        verdicts,
    ]
    rows = []
    for plan in experiment.plans:
        *cells, verdict = (column.cell(plan) for column in columns)
        note = "" if plan.verdict == "reference" else plan.why
        commands = tuple(run.command for run in plan.runs)
        rows.append(
            [
                *cells,
                replace(verdict, badge=plan.verdict, note=note),
                Cell(counted(len(commands), "command"), commands=commands),
            ]
        )
    headings = [*((column.title, column.is_number) for column in columns), ("reproduce", False)]
    return Table(f"plans on {experiment.name}", headings, rows, is_sortable=True)


def figures_table(experiment: Experiment) -> Table:
    """All plans with the figures that charts of their prices show."""
    columns = plan_columns(experiment)
    rows = [[column.cell(plan) for column in columns] for plan in experiment.plans]
    return Table("the plotted figures", [(column.title, column.is_number) for column in columns], rows)


def runs_table(experiment: Experiment) -> Table:
    titles = ("plan", "seed", "status", "step", experiment.metric.name, "best", "last loss", "time", "command")
    numbers = (False, True, False, True, True, True, True, True, False)
    rows = [
        [
            Cell(plan.label, plan.label),
            Cell(str(run.seed), run.seed),
            Cell(run.status, run.status, badge=run.status, note=run.why),
            Cell(str(run.step), run.step),
            _cell(run.value, experiment.metric_text),
            _cell(run.best, experiment.metric_text),
            _cell(run.loss, number_text),
            _cell(run.seconds, duration_text),
            Cell("", run.command, commands=(run.command,)),
        ]
        for plan in experiment.plans
        for run in plan.runs
    ]
    return Table(f"runs on {experiment.name}", list(zip(titles, numbers, strict=True)), rows, is_sortable=True)


def promotions_table(experiment: Experiment) -> Table | None:
    """Which tensors were promoted in which run, and when; None where none was."""
    rows = [
        [
            Cell(plan.label, plan.label),
            Cell(str(run.seed), run.seed),
            Cell(str(promotion.step), promotion.step),
            Cell(promotion.site, promotion.site),
            Cell(f"{promotion.measure} {percent_text(promotion.share)}", promotion.share),
            Cell(promotion.to, promotion.to),
        ]
        for plan in experiment.plans
        for run in plan.runs
        for promotion in run.promotions
    ]
    titles = ("plan", "seed", "from step", "tensor", "because of", "promoted to")
    columns = list(zip(titles, (False, True, True, False, True, False), strict=True))
    return Table(f"promotions on {experiment.name}", columns, rows, is_sortable=True) if rows else None


def curve_table(experiment: Experiment, name: str, text: Callable[[float], str]) -> Table:
    """A logged value at a few steps, of each plan's first run."""
    curves = [dict(zip(*plan.runs[0].curve(name), strict=True)) for plan in experiment.plans]
    steps = sampled_steps(sorted({step for curve in curves for step in curve}))
    rows = [
        [Cell(plan.label), *(Cell(text(curve[step]) if step in curve else "-") for step in steps)]
        for plan, curve in zip(experiment.plans, curves, strict=True)
    ]
    columns = [("plan (first seed)", False), *((f"step {step}", True) for step in steps)]
    return Table(f"{name} over time", columns, rows)


def sampled_steps(steps: Sequence[int]) -> list[int]:
    """About a dozen of the steps, the last among them."""
    stride = -(-len(steps) // 12) or 1
    return [*steps[::stride], *(steps[-1:] if (len(steps) - 1) % stride else ())]


def memory_table(experiment: Experiment) -> Table:
    """Bytes of every class of tensors and plan."""
    classes = memory_classes(experiment)
    columns = [("plan", False), *((class_text(name), True) for name in classes), ("all", True)]
    rows = []
    for plan in experiment.plans:
        sizes = [*(plan.memory_classes.get(name) for name in classes), plan.memory]
        rows.append([Cell(plan.label), *(Cell("-" if size is None else byte_text(size)) for size in sizes)])
    return Table("bytes by class of tensors", columns, rows)


def memory_classes(experiment: Experiment) -> list[str]:
    """The classes of tensors in the records of its runs, in their order."""
    return list(dict.fromkeys(name for plan in experiment.plans for name in plan.memory_classes))


def class_text(name: str) -> str:
    """The name of a class of tensors for readers."""
    return _CLASS_NAMES.get(name, name.replace("_", " "))


_CLASS_NAMES = {
    "weight": "weights",
    "activation": "activations",
    "grad_activation": "gradients of activations",
    "grad_weight": "gradients of weights",
}


def sites_table(experiment: Experiment) -> Table:
    """For each plan, operand and format: how many tensors, their mean error, and the worst of them."""
    titles = ("plan", "role", "format", "tensors", "mean error", "worst")
    rows = []
    for plan in experiment.plans:
        groups: dict[tuple[str, str], list[SiteRecord]] = {}
        for site in plan.sites:
            groups.setdefault((site.role, site.format or "left alone"), []).append(site)
        for (role, format_name), sites in groups.items():
            errors = [(site.error, site.site) for site in sites if site.error is not None]
            worst = max(errors, key=lambda error: error[0], default=None)
            mean = "-" if not errors else percent_text(sum(error for error, _ in errors) / len(errors))
            texts = (
                *(plan.label, role, format_name, str(len(sites)), mean),
                "-" if worst is None else f"{worst[1]} ({percent_text(worst[0])})",
            )
            rows.append([Cell(text) for text in texts])
    columns = list(zip(titles, (False, False, False, True, True, False), strict=True))
    return Table("tensors by role and format", columns, rows)


# --- A report as plain values, for JSON and CSV


def report_record(report: Report) -> dict[str, Any]:
    """The report that ``--json`` prints."""
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
        "loss": None if plan.judgement is None or plan.judgement.loss is None else plan.judgement.loss.to_dict(),
        "margin": None if plan.judgement is None else plan.judgement.margin,
        "p_value": None if plan.judgement is None else plan.judgement.p_value,
        "metric": None if value is None else value.mean,
        "deviation": None if value is None else value.deviation,
        "relative_to_fp32": plan.cost,
        "mean_bits": plan.mean_bits,
        "memory_bytes": plan.memory,
        "on_cost_front": plan.on_cost_front,
        "on_memory_front": plan.on_memory_front,
        "seconds": plan.seconds,
        "seconds_per_step": plan.step_seconds,
        "peak_bytes": plan.peak,
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
        "total_cost": run.total_cost,
        "bit_operations": run.bit_operations,
        "mean_bits": run.mean_bits,
        "memory_bytes": run.total_memory,
        "peak_bytes": run.peak,
        "seconds": run.seconds,
        "seconds_per_step": run.step_seconds,
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
