"""The tables' part of the page: plans and runs, sorted by a press on a heading, with the commands that make them."""

from __future__ import annotations

import html
from collections.abc import Callable

from bitplan.report.runs import Run
from bitplan.report.summaries import Experiment, PlanSummary
from bitplan.report.tables import COLUMNS_NOTE, Cell, plan_columns, table_html, verdict_words
from bitplan.report.words import counted, duration_words, number_words, percent_words


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
