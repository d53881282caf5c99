"""Layer by layer: bits that move, statistics over time, and two runs side by side."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitplan.errors import RunError
from bitplan.lab.report.figures import CELL_INK, CELLS, DIFFERENCES, HUES, NEUTRAL
from bitplan.lab.report.heatmaps import sites_chart
from bitplan.lab.report.layers import over_time_drawings, pair_drawings, read_series
from bitplan.lab.report.page import page_html
from bitplan.lab.report.runs import read_run
from bitplan.lab.report.summaries import Report
from bitplan.lab.tasks.registry import find_task
from bitplan.lab.train import train

WriteRun = Callable[..., Path]
TINY = f"{Path(__file__).parents[1] / 'train' / 'tiny_task.py'}:Tiny"
DEFICIT = """
version: 1
name: p
schedules: {cpt: {name: deficit, low: 3, high: 8, start: '50%', end: '100%'}, same: {name: static, bits: 8}}
rules:
- match: '*'
  op: linear
  x: {format: int, bits: cpt, scale: tensor}
  dy: {format: int, bits: same, scale: tensor}
"""
SITES = [
    {"site": f"{layer}/linear.0:{role}", "role": role, "format": words, "rule": "r", "error": 0.01 * (layer + 1)}
    for layer in range(2)
    for role, words in (
        ("fprop.x", "int deficit 3 from 50% to 100%, else 8 tensor"),
        ("dgrad.dy", "int static 8 tensor"),
        ("weight", "e4m3 tensor"),
    )
]


def planned(write_run: WriteRun, folder: Path, plan: str = DEFICIT, **facts: Any) -> Path:
    run = write_run(folder, plan="p", sites=SITES, **facts)
    (run / "plan.yaml").write_text(plan)
    return run


def statistics(run: Path, factor: float = 1.0) -> None:
    lines = [
        {"step": step, "sites": {"0/linear.0:weight": {"error": factor / step, "overflow": 0.5, "underflow": 0.0}}}
        for step in (1, 10, 20)
    ]
    (run / "statistics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_bits_that_move_have_their_range_and_their_bits_at_every_step(write_run: WriteRun, tmp_path: Path) -> None:
    planned(write_run, tmp_path / "a")
    (experiment,) = Report.of([tmp_path]).experiments
    figure = json.loads(sites_chart(experiment.plans[0], "format").to_json())  # type: ignore[union-attr]
    (heat,) = figure["data"]
    assert heat["text"] == [["e4m3", "int3\N{EN DASH}8", "int8"]] * 2
    assert heat["z"][0] == [3.0, pytest.approx(math.log2(5.5)), 3.0]
    moving = figure["layout"]["meta"]
    assert moving["steps"] == list(range(30))
    assert moving["bits"] == [[8] * 15 + [3] * 15]
    assert moving["follows"] == [[None, 0, None]] * 2


def test_functions_of_a_run_folder_are_not_called(write_run: WriteRun, tmp_path: Path) -> None:
    """Whatever a plan's schedule names, a page shows the plan without executing it."""
    plan = DEFICIT.replace(
        "{name: deficit, low: 3, high: 8, start: '50%', end: '100%'}", "{name: function, function: 'x:y'}"
    )
    planned(write_run, tmp_path / "a", plan)
    assert "tensors by format" in page_html(Report.of([tmp_path]))


def test_statistics_over_time(write_run: WriteRun, tmp_path: Path) -> None:
    write_run(tmp_path / "fp32")
    statistics(planned(write_run, tmp_path / "p"))
    (experiment,) = Report.of([tmp_path]).experiments
    (drawing,) = over_time_drawings(experiment)
    assert [label for _, label, _ in drawing.plans] == ["p"]
    heat = drawing.choices["1/error"]["data"][0]
    assert heat["x"] == ["1", "10", "20"]
    assert heat["z"] == [[0.0, -1.0, pytest.approx(math.log10(0.05), abs=1e-3)]]
    assert set(drawing.choices) == {"1/error", "1/overflow", "1/underflow"}
    assert [cell.text for cell in drawing.table.rows[0]] == ["p", "0/linear.0:weight", "100 %", "5.0 %", "100 %"]
    (tmp_path / "p" / "statistics.jsonl").write_text('{"step": 1, "sites": [3]}\n')
    with pytest.raises(RunError, match="damaged"):
        over_time_drawings(experiment)


def test_measured_runs_show_the_errors_of_products(tmp_path: Path) -> None:
    train(find_task(TINY, ["steps=6"]), "int8-all", folder=tmp_path / "run", measure_every=3)
    series = read_series(read_run(tmp_path / "run"))
    assert series is not None
    steps, rows = series
    assert len(steps) == 2
    assert "0/linear.0 fprop" in rows["error"]
    assert all(value is not None and 0 < value < 1 for value in rows["error"]["0/linear.0 fprop"])


def test_two_runs_are_compared_in_the_browser(browser: Any, write_run: WriteRun, tmp_path: Path) -> None:
    statistics(planned(write_run, tmp_path / "p"))
    other = [{**site, "error": 4 * site["error"], "format": "int4 tensor"} for site in SITES[:5]]  # type: ignore[operator]
    write_run(tmp_path / "q", plan="q", sites=other)
    (tmp_path / "page.html").write_text(page_html(Report.of([tmp_path])))
    browser.open(tmp_path / "page.html")
    texts = "[...document.querySelectorAll('#e0-layers1 .heatmap-label text')].map(t => t.textContent)"
    assert browser.run(texts).count("\u00d74.0") == 5
    assert "e4m3 → -" in browser.run(texts)
    browser.run(
        "(() => { const s = document.getElementById('e0-layers1-second'); s.value = 0; "
        "s.dispatchEvent(new Event('change')) })()"
    )
    browser.wait_for(f"{texts}.every(t => t === '\u00d71.0')")
    browser.run(
        "(() => { const p = document.getElementById('e0-sites-plan'); p.value = 0; "
        "p.dispatchEvent(new Event('change')); "
        "const s = document.getElementById('e0-sites-step'); s.value = 29; "
        "s.dispatchEvent(new Event('input')) })()"
    )
    bits = "[...document.querySelectorAll('#e0-sites .heatmap-label text')].map(t => t.textContent)"
    browser.wait_for(f"{bits}.includes('int3')")
    assert browser.run("document.querySelector('#e0-sites-step + output').textContent") == "29"
    assert browser.complaints == []


def test_a_pair_needs_two_runs(write_run: WriteRun, tmp_path: Path) -> None:
    planned(write_run, tmp_path / "a")
    (experiment,) = Report.of([tmp_path]).experiments
    assert pair_drawings(experiment) == []
    planned(write_run, tmp_path / "b", seed=1)
    (experiment,) = Report.of([tmp_path]).experiments
    (drawing,) = pair_drawings(experiment)
    assert drawing.pairs["labels"] == ["p, seed 0", "p, seed 1"]


def contrast(first: str, second: str) -> float:
    """The contrast of two colours as WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_texts_in_cells_and_lines_of_plans_have_enough_contrast() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert min(contrast(CELL_INK, colour) for colour in (*CELLS, *DIFFERENCES)) >= 4.5
    cards = ("#ffffff", "#1a2029")
    for pair in (NEUTRAL, *HUES):
        assert all(contrast(colour, card) >= 3 for colour, card in zip(pair, cards, strict=True)), pair
