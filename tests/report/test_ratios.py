"""Assignments on the page: the metric against the ratio of each run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bitplan.lab.compare.suites import assign_choices
from bitplan.lab.report.page import page_html
from bitplan.lab.report.ratios import assigned_plans, ratio_chart
from bitplan.lab.report.summaries import Experiment, Report
from bitplan.lab.tasks.registry import find_task
from bitplan.plans import Plan

pytest.importorskip("plotly")

WriteRun = Callable[..., Path]


@pytest.fixture
def experiment(write_run: WriteRun, tmp_path: Path) -> Experiment:
    """The suite's runs as folders; accuracy falls with the number of the plan."""
    task = find_task("digits", ["width=0.25"])
    for number, choice in enumerate(assign_choices(task, (0.5, 1.0))):
        folder = tmp_path / f"{number:02}"
        promotion = {"site": "fc/linear.0:activation", "step": 3, "measure": "overflow", "share": 0.02, "to": "e6m9b0"}
        cost = {"bitops": 1e9, "relative_to_fp32": 1.0, "relative_to_bf16": 4.0, "mean_bits": 9.0}
        cost["low_precision_ratio"] = 0.2 * number
        reported = {"cost": cost, "promotions": [promotion] * (choice.label == "r = 1")}
        write_run(
            folder, plan=None if choice.plan is None else choice.label, value=0.9 - 0.1 * number, summary=reported
        )
        if isinstance(choice.plan, Plan):
            choice.plan.save(folder / "plan.yaml")
    return Report.of([tmp_path]).experiments[0]


def test_assignments_and_their_baselines_are_found(experiment: Experiment) -> None:
    by_label = {assigned_plan.plan.label: assigned_plan for assigned_plan in assigned_plans(experiment)}
    assert list(by_label) == ["operator", "uniform low", "r = 0.5", "r = 1"]
    assert by_label["operator"].order is None
    assert (by_label["r = 0.5"].order, by_label["r = 0.5"].target) == ("largest", 0.5)
    assert by_label["r = 0.5"].ratio == pytest.approx(0.6)
    assert [item.promoted for item in by_label.values()] == [0, 0, 0, 1]


def test_the_chart_joins_assignments_and_the_page_has_it(experiment: Experiment) -> None:
    figure = ratio_chart(experiment)
    assert figure is not None
    line = figure.data[0]
    assert list(line.x) == pytest.approx([0.6, 0.8])
    assert list(line.y) == pytest.approx([60, 50])
    assert len([trace for trace in figure.data if trace.mode == "markers"]) == 4


def test_other_comparisons_have_no_such_chart(write_run: WriteRun, tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", plan="fp8-all")
    report = Report.of([tmp_path])
    assert ratio_chart(report.experiments[0]) is None
    assert "against the low-precision ratio" not in page_html(report)
