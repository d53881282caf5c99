"""The heat map of products by format: from a run that was looked at, and from a measurement's file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bitplan.analysis.measure import Measurement, measure
from bitplan.cli import main
from bitplan.errors import RunError
from bitplan.lab.report.heatmaps import measured_chart, measured_in_file, measured_in_run, measured_table
from bitplan.lab.report.page import measurement_page_html, page_html
from bitplan.lab.report.summaries import Report
from bitplan.lab.tasks.registry import find_task
from bitplan.lab.train import train

TINY = f"{Path(__file__).parents[1] / 'train' / 'tiny_task.py'}:Tiny"


def drawings_in(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    drawings: dict[str, Any] = json.loads(found[1])["drawings"]
    return drawings


@pytest.fixture
def found() -> Measurement:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return measure(model, [torch.randn(16, 8)], candidates=["int8", "e4m3 vector", "e4m3 stochastic-dy"], target="<b>")


def test_rows_are_passes_and_columns_are_candidates(found: Measurement) -> None:
    (measured,) = measured_in_file(found)
    assert measured.when == "as it is"
    figure = json.loads(measured_chart(measured).to_json())  # type: ignore[union-attr]
    (heat,) = figure["data"]
    assert [name.replace("-<br>", "-").replace("<br>", " ") for name in heat["x"]] == found.candidates
    assert figure["layout"]["yaxis"]["ticktext"] == [
        "0/linear.0  fprop",
        "0/linear.0  wgrad",
        *(f"1/linear.0  {pass_}" for pass_ in ("fprop", "dgrad", "wgrad")),
    ]
    assert len(heat["z"]) == 5
    assert heat["z"][0][2] is None  # no gradient, and nothing to round stochastically, in fprop
    row = found.select(product="1/linear.0", pass_="dgrad", candidate="e4m3 vector")[0]
    assert 10 ** heat["z"][3][1] == pytest.approx(row.level, rel=1e-3)
    assert f"{row.median:.1e}" in [cell.text for cell in measured_table(measured).rows[3]]


def test_a_page_of_its_own(found: Measurement, tmp_path: Path) -> None:
    page = measurement_page_html(found)
    assert "<h2>&lt;b&gt;</h2>" in page
    assert list(drawings_in(page)) == ["m-0"]
    found.save(tmp_path / "m.json")
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path / "m.json"), "-o", str(tmp_path / "page.html")])
    assert not ended.value.code
    assert (tmp_path / "page.html").read_text() == page


def test_a_run_that_was_looked_at_shows_its_last_look_and_its_alarms(tmp_path: Path) -> None:
    train(find_task(TINY), "fp8-linear", folder=tmp_path / "run", measure_every=10)
    train(find_task(TINY), folder=tmp_path / "other")
    measured = measured_in_run(tmp_path / "run")
    assert measured is not None
    assert measured.when == "after 20 steps"
    assert {cell.candidate for cell in measured.cells} == {"int8 tensor", "e4m3 tensor", "plan"}
    assert measured_in_run(tmp_path / "other") is None
    lines = (tmp_path / "run" / "measurements.jsonl").read_text().splitlines(keepends=True)
    alarmed = lines[0].replace('"alarm": null', '"alarm": {"sentence": "the <roof> is on fire."}')
    (tmp_path / "run" / "measurements.jsonl").write_text(alarmed + "".join(lines[1:]))
    page = page_html(Report.of([tmp_path]))
    assert "the &lt;roof&gt; is on fire." in page
    assert [place for place in drawings_in(page) if "measured" in place] == ["e0-measured1"]
    (tmp_path / "run" / "measurements.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(RunError, match="damaged"):
        measured_in_run(tmp_path / "run")
