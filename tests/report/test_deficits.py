"""Windows of low precision: found in plans, drawn on the page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitplan.lab.compare.suites import deficit_choices
from bitplan.lab.report.deficits import (
    Window,
    courses_of,
    early_chart,
    early_windows,
    recovering,
    recovery_chart,
    sliding_chart,
    sliding_windows,
    without_deficit,
)
from bitplan.lab.report.page import page_html
from bitplan.lab.report.summaries import Experiment, Report
from bitplan.lab.tasks.registry import find_task
from bitplan.plans import Plan

pytest.importorskip("plotly")

WriteRun = Callable[..., Path]
STEPS = 400


@pytest.fixture(scope="module")
def suite() -> dict[str, tuple[Plan | None, int]]:
    """The plans of the suite, and the steps that each holds."""
    result = {}
    for choice in deficit_choices(find_task("digits", [f"steps={STEPS}"])):
        hold = int(choice.settings[0].removeprefix("hold=")) if choice.settings else 0
        assert choice.plan is None or isinstance(choice.plan, Plan)
        result[choice.label] = (choice.plan, hold)
    return result


@pytest.fixture
def experiment(
    suite: dict[str, tuple[Plan | None, int]], write_run: WriteRun, tmp_path: Path
) -> Callable[..., Experiment]:
    """The suite's runs as folders; of plan number n, accuracies rise from n % over the run to a half more."""

    def make(seeds: int = 2, leave_out: tuple[str, ...] = ()) -> Experiment:
        for number, (label, (plan, hold)) in enumerate(suite.items()):
            for seed in range(seeds if label not in leave_out else 0):
                folder = tmp_path / f"{number:02}-{seed}"
                final = 0.5 + 0.01 * number + 0.002 * seed
                settings = {"steps": STEPS, "hold": hold}
                write_run(folder, plan=None if plan is None else label, seed=seed, value=final, settings=settings)
                if plan is not None:
                    (folder / "plan.yaml").write_text(plan.to_yaml())
                steps = range(100, STEPS + hold + 1, 100)
                lines = [
                    {"step": step, "evaluation": True, "accuracy": final * step / (STEPS + hold)} for step in steps
                ]
                (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (result,) = Report.of([tmp_path]).experiments
        return result

    return make


def drawn(figure: Any) -> Any:
    assert figure is not None
    return json.loads(figure.to_json())


def markers(figure: Any) -> dict[int, Any]:
    return {
        trace["meta"]["plan"]: trace for trace in drawn(figure)["data"] if trace.get("mode", "").startswith("markers")
    }


def levels(figure: Any) -> set[int]:
    return {trace["meta"]["plan"] for trace in drawn(figure)["data"] if trace["mode"] == "lines" and "meta" in trace}


def numbers(result: Experiment) -> dict[str, int]:
    return {plan.label: number for number, plan in enumerate(result.plans)}


def test_windows_are_read_from_plans_and_settings(experiment: Callable[..., Experiment]) -> None:
    result = experiment(seeds=1)
    courses = {course.plan.label: course for course in courses_of(result)}
    assert len(courses) == len(result.plans)
    forward = ("weights", "activations")
    early = courses["early 25%, then a full budget"]
    assert early.window == Window(0, 100, 3, 8, STEPS, forward)
    assert (early.is_early, early.recovers_from) == (True, 100)
    assert courses["half from 12.5%"].window == Window(50, 250, 3, 8, STEPS, forward)
    assert not courses["half from 0%"].is_early
    gradients = courses["half from 0%, gradients only"].window
    assert gradients is not None
    assert (gradients.parts, gradients.is_of_forward) == (("gradients",), False)
    plain = without_deficit([*courses.values()])
    assert plain is not None
    assert plain.plan.label == "no deficit"
    assert courses["no deficit, 100% longer"].recovers_from == STEPS
    assert courses["static at the cost of half"].width is None
    assert courses["fp32"].window is None


@pytest.fixture
def priced(write_run: WriteRun, tmp_path: Path) -> Callable[..., Experiment]:
    """Runs by name: bit operations per step relative to FP32's, steps, accuracy."""

    def make(**runs: tuple[float, int, float]) -> Experiment:
        for label, (cost, steps, value) in runs.items():
            record = {"bitops": 1e6 * cost * steps, "relative_to_fp32": cost, "mean_bits": 8.0}
            write_run(
                tmp_path / label,
                plan=None if label == "fp32" else label,
                value=value,
                settings={"steps": 400, "hold": steps - 400},
                summary={"step": steps, "cost": record},
            )
        (result,) = Report.of([tmp_path]).experiments
        return result

    return make


def test_cost_is_that_of_the_whole_run(priced: Callable[..., Experiment]) -> None:
    result = priced(fp32=(1.0, 400, 0.9), short=(0.125, 400, 0.88), long=(0.125, 800, 0.895))
    assert {plan.label: plan.cost for plan in result.plans} == {"fp32": 1.0, "short": 0.125, "long": 0.25}
    assert [plan.label for plan in result.plans if plan.on_cost_front] == ["fp32", "long", "short"]
    assert "whole runs, which differ in length" in page_html(Report((result,)))
    # An eighth of FP32's bit operations in each step, and twice its steps.
    assert "the mean accuracy of long is at most 1.0 % worse than that of fp32" in result.answer
    assert "25.0 % of its bit operations" in result.answer


def test_a_run_that_is_cheap_per_iteration_and_long_is_not_cheap(priced: Callable[..., Experiment]) -> None:
    result = priced(fp32=(1.0, 400, 0.9), tripled=(0.6, 1200, 0.9))
    assert [plan.label for plan in result.plans if plan.on_cost_front] == ["fp32"]


def test_runs_of_one_length_cost_what_an_iteration_costs(priced: Callable[..., Experiment]) -> None:
    result = priced(fp32=(1.0, 400, 0.9), cheap=(0.6, 400, 0.9))
    assert not result.has_lengths
    assert "differ in length" not in page_html(Report((result,)))


def test_order_and_kinds(experiment: Callable[..., Experiment]) -> None:
    courses = courses_of(experiment(seeds=1))
    assert [window.length for window, _ in early_windows(courses)] == [100, 200, 400]
    assert [window.start for window, _ in sliding_windows(courses)] == [0, 0, 0, 0, 50, 100, 200]
    assert [course.plan.label for course in recovering(courses)] == [
        "no deficit",
        *(f"early {share}%, then a full budget" for share in (25, 50, 100)),
        "no deficit, 100% longer",
        *(f"half from {start}" for start in ("0%", "12.5%", "25%", "50%")),
    ]


def test_the_chart_of_early_windows(experiment: Callable[..., Experiment]) -> None:
    actual = experiment()
    number, figure = numbers(actual), early_chart(actual)
    points = markers(figure)
    expected = {"no deficit": 0, **{f"early {share}%, then a full budget": share for share in (25, 50, 100)}}
    assert {plan: trace["x"] for plan, trace in points.items()} == {
        number[label]: [place] for label, place in expected.items()
    }
    third = points[number["early 50%, then a full budget"]]
    assert third["y"] == [pytest.approx(53.1)]
    assert third["error_y"]["array"] == [pytest.approx(0.1414, abs=1e-3)]
    (line,) = [trace for trace in drawn(figure)["data"] if "meta" not in trace]
    assert line["x"] == [0, 25, 50, 100]
    assert levels(figure) == {
        number[name] for name in ("fp32", "no deficit, 100% longer", "static at the cost of half")
    }


def test_the_chart_of_sliding_windows(experiment: Callable[..., Experiment]) -> None:
    result = experiment()
    number, figure = numbers(result), sliding_chart(result)
    (line,) = [trace for trace in drawn(figure)["data"] if "meta" not in trace]
    assert line["x"] == [0, 12.5, 25, 50]
    points = markers(figure)
    for part, letter in (("weights", "W"), ("activations", "A"), ("gradients", "G")):
        point = points[number[f"half from 0%, {part} only"]]
        assert point["text"] == [letter]
        assert 0 < point["x"][0] < 12.5  # beside the line's first point
    assert levels(figure) == {number[name] for name in ("fp32", "no deficit", "static at the cost of half")}


def test_recoveries_are_laid_where_low_precision_ends(experiment: Callable[..., Experiment]) -> None:
    result = experiment()
    number, content = numbers(result), drawn(recovery_chart(result))
    lines = {trace["meta"]["plan"]: trace for trace in content["data"]}
    assert lines[number["early 50%, then a full budget"]]["x"] == [-100, 0, 100, 200, 300, 400]
    assert lines[number["half from 25%"]]["x"] == [-200, -100, 0, 100]
    assert lines[number["no deficit"]]["x"] == [100, 200, 300, 400]
    assert lines[number["no deficit, 100% longer"]]["x"][0] == -300
    assert lines[number["no deficit"]]["y"][-1] == pytest.approx(51.1)  # the mean of two seeds
    assert [shape["x0"] for shape in content["layout"]["shapes"]] == [0]


def test_the_page_shows_them_with_words_and_tables(experiment: Callable[..., Experiment]) -> None:
    page = page_html(Report((experiment(seeds=1),)))
    for title in ("accuracy after an early deficit", "accuracy by where a deficit lies", "recovery"):
        assert f"<h3>{title}</h3>" in page
        assert f'aria-label="Chart: {title}. ' in page
    for caption in ("windows of low precision", "recovery from low precision"):
        assert caption in page
    assert "3 bits rather than 8 at first, and then a whole budget; the line begins with no deficit at all." in page


def test_without_a_control_the_line_begins_with_the_first_window(experiment: Callable[..., Experiment]) -> None:
    result = experiment(seeds=1, leave_out=("no deficit", "no deficit, 100% longer"))
    assert without_deficit(courses_of(result)) is None
    (line,) = [trace for trace in drawn(early_chart(result))["data"] if "meta" not in trace]
    assert line["x"] == [25, 50, 100]
    assert "at first, and then a whole budget. Level lines" in page_html(Report((result,)))


def test_other_experiments_have_no_such_charts(write_run: WriteRun, tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", plan="int8")
    (tmp_path / "b" / "plan.yaml").write_text("version: 99\nrules: nothing that can be read")
    (result,) = Report.of([tmp_path]).experiments
    assert courses_of(result) == []
    assert early_chart(result) is sliding_chart(result) is recovery_chart(result) is None
    assert "recovery" not in page_html(Report((result,)))


def test_a_browser_draws_them_in_both_themes(
    browser: Any, experiment: Callable[..., Experiment], tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    file.write_text(page_html(Report((experiment(),))))
    browser.open(file, width=390, dark=True)
    assert browser.complaints == []
    assert browser.run("document.querySelectorAll('#e0-4 .scatterlayer .point').length") == 4
    assert browser.run("document.querySelectorAll('#e0-5 .scatterlayer .point').length") == 7
    assert browser.run("document.querySelectorAll('#e0-6 .scatterlayer path.js-line').length") == 9
    line = "getComputedStyle(document.querySelector('#e0-6 .shapelayer path')).stroke"
    assert browser.run(line) == "rgb(213, 218, 227)"
    browser.prefer(dark=False)
    browser.wait_for(f"{line} === 'rgb(63, 71, 86)'")
    assert browser.run("document.documentElement.scrollWidth") == 390
