"""A run whose plan promotes: what its folder tells, and that a resumed run ends the same."""

from __future__ import annotations

import json
from pathlib import Path

from bitplan import Plan
from bitplan.lab.report.page import page_html
from bitplan.lab.report.summaries import Report
from bitplan.lab.tasks.registry import find_task
from bitplan.lab.train.loop import train
from bitplan.lab.train.summary import Summary

SETTINGS = ["steps=8", "batch=16", "evaluate_every=4", "model=resnet8", "width=0.25"]
#: Its largest value is 1.75, so that some activations overflow at once.
LOW = {"format": "e2m2b2none", "promote": {"to": "e6m9", "overflow": 0.02}}
PLAN = Plan.from_dict({"version": 1, "rules": [{"match": "*", "activation": LOW, "weight": LOW}]})


def run(folder: Path, stop_after: int | None = None) -> Summary:
    seen = []
    task = find_task("digits", SETTINGS, seed=3)
    stop = None if stop_after is None else lambda: len(seen) >= stop_after
    return train(task, PLAN, folder=folder, log_every=1, on_progress=lambda now: seen.append(now), stop=stop)


def test_the_folder_tells_which_when_and_why_and_resuming_changes_nothing(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    counts = [line["promoted"] for line in lines if "promoted" in line]
    ratios = [line["low_precision_ratio"] for line in lines if "promoted" in line]
    assert len(counts) == 8
    assert 0 < counts[0] <= counts[-1] == len(whole.promotions)
    assert ratios[0] > ratios[-1]
    assert all(promotion.measure == "overflow" and promotion.share >= 0.02 for promotion in whole.promotions)
    assert whole.cost["low_precision_ratio"] == ratios[-1]
    assert Summary.from_dict(whole.folder, json.loads(json.dumps(whole.to_dict()))) == whole
    promoted = {promotion.site: promotion for promotion in whole.promotions if not promotion.site.startswith("loss/")}
    sites = json.loads((tmp_path / "whole" / "sites.json").read_text())
    reported = {site["site"]: site["format"] for site in sites if site["site"] in promoted}
    assert set(reported) == set(promoted)
    assert all(text.endswith(f"until step {promoted[site].step}, then e6m9") for site, text in reported.items())

    assert run(tmp_path / "stopped", stop_after=3).status == "stopped"
    again = run(tmp_path / "stopped")
    assert again.promotions == whole.promotions
    for name in ("metrics.jsonl", "model.safetensors"):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()

    page = page_html(Report.of([tmp_path]))
    assert '<h3 class="part">Promotions</h3>' in page
    assert page.count("promotions on digits") == 2  # the caption and the label of its frame
    assert all(promotion.site in page for promotion in whole.promotions)
