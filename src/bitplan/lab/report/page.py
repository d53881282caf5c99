"""The page: one HTML file that holds everything it shows and asks the network for nothing.

Every text that a user or a file gave goes through :func:`html.escape`, and what scripts read lies in JSON whose ``<``
is written as an escape, so that no name can end a script. A content security policy in the page forbids requests.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from importlib.resources import files
from typing import Any

from bitplan._version import __version__
from bitplan.lab.report.answer import counted, listed
from bitplan.lab.report.charts.common import plotly, styles_of
from bitplan.lab.report.page_charts import charts_html
from bitplan.lab.report.palette import dark_partners, sign_svg
from bitplan.lab.report.runs import Run
from bitplan.lab.report.summaries import Experiment, Report
from bitplan.lab.report.tables import badge, plans_html, promotions_html, runs_html

#: Nothing may be fetched: scripts and styles are in the page, pictures are made by it.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"
)


def page_html(report: Report) -> str:
    """The whole page."""
    plotly()  # says in a sentence where it is missing
    drawings: dict[str, Any] = {}
    sections = "".join(
        _experiment_html(experiment, f"e{number}", drawings) for number, experiment in enumerate(report.experiments)
    )
    title = f"bitplan: {', '.join(dict.fromkeys(experiment.task for experiment in report.experiments))}"
    return document(title, sections, drawings, counted(len(report.runs), "run"))


def document(title: str, sections: str, drawings: dict[str, Any], source: str, name: str = "report") -> str:
    """A page with these sections, each of class ``experiment``, and all that its charts need."""
    from plotly.offline import get_plotlyjs

    data = {"drawings": drawings, "dark": dark_partners()}
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(_POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_asset('page.css')}</style>\n</head>\n<body>\n"
        f'<header><h1>bitplan <span class="quiet">{html.escape(name)}</span></h1>'
        '<button type="button" id="theme" class="plain">Light or dark</button></header>\n'
        f"<main>{sections}</main>\n"
        f'<footer class="quiet">Made by bitplan {html.escape(__version__)} from '
        f"{html.escape(source)}. This file needs no network.</footer>\n"
        f'<script type="application/json" id="data">{script_json(data)}</script>\n'
        f"<script>{get_plotlyjs()}</script>\n<script>{_asset('page.js')}</script>\n</body>\n</html>\n"
    )


def script_json(content: Any) -> str:
    """JSON that may stand in a script: no text in it can end the script or begin a comment there."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return (files("bitplan.lab.report") / "assets" / name).read_text(encoding="utf-8")


def _experiment_html(experiment: Experiment, key: str, drawings: dict[str, Any]) -> str:
    name = html.escape(experiment.name)
    return (
        f'<section class="experiment" id="{key}"><h2>{name}</h2>'
        f'<p class="answer">{_unbroken(experiment.answer)}</p>'
        f"{_emulation_note(experiment)}{_facts_html(experiment)}{_legend_html(experiment, key)}"
        f'<div class="charts">{charts_html(experiment, key, drawings)}</div>'
        f'<h3 class="part">Plans</h3>{plans_html(experiment)}'
        f'<h3 class="part">Runs</h3>{runs_html(experiment)}{promotions_html(experiment)}</section>'
    )


def _unbroken(sentence: str) -> str:
    """A sentence whose numbers stay with their per cent signs."""
    return html.escape(sentence).replace(" %", "&nbsp;%")


def _emulation_note(experiment: Experiment) -> str:
    if not any(run.execution == "emulate" and run.plan is not None for run in experiment.runs):
        return ""
    return (
        '<p class="note">These runs emulate: values were rounded, arithmetic was not. Bit operations and bytes are '
        "what a plan would need, and nothing was saved yet.</p>"
    )


def _facts_html(experiment: Experiment) -> str:
    """What was run."""
    runs, metric = experiment.runs, experiment.metric
    settings = ", ".join(f"{key} {value}" for key, value in experiment.shared_settings.items())
    facts = [
        ("metric", f"{metric.name}, {metric.better} is better; trivial {experiment.metric_words(metric.trivial)}"),
        ("plans", listed([plan.label for plan in experiment.plans], 12)),
        ("runs", f"{len(runs)}, seeds {listed([str(seed) for seed in experiment.seeds], 12)}"),
        ("settings", settings or "-"),
        ("execution", _distinct(f"{run.execution}{', compiled' if run.compiled else ''}" for run in runs)),
        ("device", _distinct(_device_words(run) for run in runs)),
        ("versions", _distinct(", ".join(f"{name} {value}" for name, value in run.versions.items()) for run in runs)),
    ]
    rows = "".join(f"<dt>{name}</dt><dd>{html.escape(words)}</dd>" for name, words in facts if words)
    return f'<dl class="facts">{rows}</dl>'


def _distinct(words: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(words))


def _device_words(run: Run) -> str:
    about = [
        value if isinstance(value, str) else f"{key} {value}"
        for key, value in run.machine.items()
        if isinstance(value, (str, int)) and value != "" and key != "system"
    ]
    return ", ".join([run.device, *about])


def _legend_html(experiment: Experiment, key: str) -> str:
    """One legend for all charts: a button for each plan that shows and hides it."""
    entries = "".join(
        f'<li><button type="button" class="entry" data-plan="{number}" aria-pressed="true">'
        f'<span class="line" data-color="{style.colour}">{sign_svg(style)}</span>'
        f"{html.escape(plan.label)}{badge(plan)}</button></li>"
        for number, (plan, style) in enumerate(zip(experiment.plans, styles_of(experiment), strict=True))
    )
    return f'<ul class="legend" data-for="{key}" aria-label="Plans: press to hide or show">{entries}</ul>'
