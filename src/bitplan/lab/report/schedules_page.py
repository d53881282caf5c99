"""A page of schedules: the bits of each over a run, what they cost, and the same as tables."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from bitplan.lab.report.answer import counted
from bitplan.lab.report.charts.common import bare_layout
from bitplan.lab.report.figures import Drawing, chart_figure
from bitplan.lab.report.page import document
from bitplan.lab.report.tables import Cell, table_html
from bitplan.plans.schedules import Schedule
from bitplan.plans.schedules.named import GROUPS_EXPLAINED, group_of
from bitplan.plans.schedules.plots import Piece, pieces_of

#: A chart's table has at most so many lines.
_MOST_PIECES = 64


def schedules_page(schedules: Sequence[Schedule], total: int) -> str:
    """The page of these schedules, over a run of `total` steps."""
    drawings: dict[str, Any] = {}
    charts = "".join(
        chart_figure(f"s{number}", _drawing(schedule, total, is_wide=len(schedules) == 1), drawings)
        for number, schedule in enumerate(schedules)
    )
    names = ", ".join(schedule.name for schedule in schedules)
    sections = (
        f'<section class="experiment" id="s"><h2>{html.escape(names)}</h2>'
        f'<p class="answer">{html.escape(_answer(schedules, total))}</p>'
        f'<div class="charts">{charts}</div>'
        f'<h3 class="part">Figures</h3>{_figures_table(schedules, total)}'
        f'<p class="quiet small">{html.escape(_note(schedules))}</p></section>'
    )
    return document(f"bitplan: {names}", sections, drawings, counted(len(schedules), "schedule"), "schedules")


def _drawing(schedule: Schedule, total: int, is_wide: bool) -> Drawing:
    figure = schedule.plot(total)
    figure.update_layout(title=None, **bare_layout(320 if is_wide else 220))
    summary = schedule.summary(total)
    words = (
        f"From {summary.first} to {summary.last} bits, {summary.mean_bits:.2f} on average; at the top for "
        f"{summary.share_at_max:.1%} of the steps; relative cost {summary.relative_cost:.3f}."
    )
    return Drawing(str(schedule), words, figure, _pieces_table(pieces_of(schedule, total)), is_wide=is_wide)


def _answer(schedules: Sequence[Schedule], total: int) -> str:
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


def _note(schedules: Sequence[Schedule]) -> str:
    grouped = any(group_of(schedule.name) for schedule in schedules)
    return (
        "Relative cost: bit operations against the highest bits throughout, with the backward pass at the highest bits."
        + f" {GROUPS_EXPLAINED}" * grouped
    )


def _figures_table(schedules: Sequence[Schedule], total: int) -> str:
    head = [
        *(("schedule", False), ("group", False), ("first", True), ("last", True)),
        *(("mean bits", True), ("at the top", True), ("relative cost", True)),
    ]
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
    return table_html(head, rows, "schedules in figures", True)


def _pieces_table(pieces: Sequence[Piece]) -> str:
    shown = pieces if len(pieces) <= _MOST_PIECES else pieces[: _MOST_PIECES - 1]
    rows = [[Cell(f"{piece.first:,}"), Cell(f"{piece.last:,}"), Cell(str(piece.bits))] for piece in shown]
    if len(shown) < len(pieces):
        rows.append([Cell(f"{pieces[len(shown)].first:,}"), Cell(f"{pieces[-1].last:,}"), Cell("changes further")])
    return table_html([("from step", True), ("to step", True), ("bits", True)], rows, "bits over the run", False)
