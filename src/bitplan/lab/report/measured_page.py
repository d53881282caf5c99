"""A page about a measurement alone: heat maps of products by format, a stage each."""

from __future__ import annotations

import html
from typing import Any

from bitplan.analysis.measure import Measurement
from bitplan.lab.report.answer import counted
from bitplan.lab.report.charts.measured import measured_drawing
from bitplan.lab.report.figures import chart_figure
from bitplan.lab.report.measured import measured_in_file
from bitplan.lab.report.page import document


def measurement_page_html(measurement: Measurement) -> str:
    """The whole page."""
    drawings: dict[str, Any] = {}
    target = measurement.target or "a model"
    charts = "".join(
        chart_figure(f"m-{number}", measured_drawing(measured, target), drawings)
        for number, measured in enumerate(measured_in_file(measurement))
    )
    facts = [
        ("products", str(len(measurement.products))),
        ("candidates", ", ".join(measurement.candidates)),
        ("not measured", "; ".join(f"{name}: {why}" for name, why in measurement.skipped.items())),
        ("command", measurement.command or ""),
    ]
    rows = "".join(f"<dt>{name}</dt><dd>{html.escape(words)}</dd>" for name, words in facts if words)
    section = (
        f'<section class="experiment" id="m"><h2>{html.escape(target)}</h2><dl class="facts">{rows}</dl>'
        f'<div class="charts">{charts}</div></section>'
    )
    return document(f"bitplan: {target}", section, drawings, counted(len(measurement.rows), "figure"), "measurement")
