"""Tables of an experiment: their columns once, for the page, for a notebook and for the terminal."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bitplan.report.summaries import Experiment, PlanSummary
from bitplan.report.words import duration_words, percent_words
from bitplan.sizes import byte_text

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
