"""A chart on the page: its place, its words, and the same figures as a table for those who cannot see it."""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bitplan.files import byte_text
from bitplan.lab.report.answer import percent_words
from bitplan.lab.report.charts.sites import class_words, memory_classes
from bitplan.lab.report.summaries import Experiment
from bitplan.lab.report.tables import Cell, table_html

#: A curve's table has at most so many lines.
_MOST_STEPS = 12


@dataclass(frozen=True)
class Drawing:
    """What one chart shows and says."""

    title: str
    words: str
    #: The plotly figure; None where nothing is known of it.
    figure: Any
    #: The same figures as a table.
    table: str
    #: A legend or controls above the chart.
    above: str = ""
    #: As wide as the page.
    is_wide: bool = False


def chart_figure(place: str, drawing: Drawing, drawings: dict[str, Any], choices: dict[str, Any] | None = None) -> str:
    """The chart's HTML; its data goes into `drawings` under its place, where the page's script finds it."""
    title, words = html.escape(drawing.title), html.escape(drawing.words)
    if drawing.figure is None and choices is None:
        return f'<figure class="empty"><h3>{title}</h3><p class="quiet">The runs tell nothing of this.</p></figure>'
    kind = "wide" if drawing.is_wide else "half"
    drawings[place] = {"choices": choices} if choices is not None else json.loads(drawing.figure.to_json())
    return (
        f'<figure class="{kind}"><h3>{title}</h3>{drawing.above}<div class="scroll">'
        f'<div class="chart" id="{place}" role="img" aria-label="Chart: {title}. {words} The data follow as a table.">'
        f"</div></div><figcaption>{words}</figcaption>"
        f"<details><summary>Data as a table</summary>{drawing.table}</details></figure>"
    )


def time_table(experiment: Experiment, name: str, words: Callable[[float], str]) -> str:
    """A logged figure at a few steps, of each plan's first run."""
    curves = [dict(zip(*plan.runs[0].curve(name), strict=True)) for plan in experiment.plans]
    steps = sorted({step for curve in curves for step in curve})
    stride = -(-len(steps) // _MOST_STEPS) or 1
    chosen = steps[::stride]
    if steps and chosen[-1] != steps[-1]:
        chosen.append(steps[-1])
    head = [("plan (first seed)", False), *((f"step {step}", True) for step in chosen)]
    rows = [
        [Cell(plan.label), *(Cell(words(curve[step]) if step in curve else "-") for step in chosen)]
        for plan, curve in zip(experiment.plans, curves, strict=True)
    ]
    return table_html(head, rows, f"{name} over time", False)


def memory_table(experiment: Experiment) -> str:
    """Bytes of every class and plan."""
    classes = memory_classes(experiment)
    head = [("plan", False), *((class_words(name), True) for name in classes), ("all", True)]
    rows = []
    for plan in experiment.plans:
        sizes = [plan.memory_classes.get(name) for name in classes]
        rows.append(
            [Cell(plan.label), *(Cell("-" if size is None else byte_text(size)) for size in (*sizes, plan.memory))]
        )
    return table_html(head, rows, "bytes by class of tensors", False)


def sites_table(experiment: Experiment) -> str:
    """For each plan, role and format: how many tensors, their mean error, and the worst of them."""
    head = [
        ("plan", False),
        ("role", False),
        ("format", False),
        ("tensors", True),
        ("mean error", True),
        ("worst", False),
    ]
    rows = []
    for plan in experiment.plans:
        groups: dict[tuple[str, str], list[Any]] = {}
        for site in plan.sites:
            groups.setdefault((site.role, site.format or "left alone"), []).append(site)
        for (role, shape), sites in groups.items():
            known = [site for site in sites if site.error is not None]
            mean = sum(site.error for site in known) / len(known) if known else None
            worst = max(known, key=lambda site: site.error, default=None)
            rows.append(
                [
                    Cell(plan.label),
                    Cell(role),
                    Cell(shape),
                    Cell(str(len(sites))),
                    Cell("-" if mean is None else percent_words(mean)),
                    Cell("-" if worst is None else f"{worst.site} ({percent_words(worst.error)})"),
                ]
            )
    return table_html(head, rows, "tensors by role and format", False)
