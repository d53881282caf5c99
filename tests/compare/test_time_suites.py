"""Suites of plans that change over time: what is in them, what they cost, and that they train."""

from __future__ import annotations

from pathlib import Path

import pytest

from bitplan.analysis.cost import estimate_cost
from bitplan.lab.compare import Choice, compare, find_suite
from bitplan.lab.compare.workers import Job
from bitplan.lab.report.runs import read_runs
from bitplan.lab.tasks.registry import find_task
from bitplan.lab.tasks.task import Task
from bitplan.lab.train import RunFolder
from bitplan.plans import Plan
from bitplan.plans.loading import find_plan
from bitplan.plans.schedules import TEN, Deficit


@pytest.fixture(scope="module")
def digits() -> Task:
    return find_task("digits", ["steps=400"])


def choices(suite: str, task: Task) -> dict[str, Choice]:
    return {choice.label: choice for choice in find_suite(suite).choices_for(lambda: task)}


def price(choice: Choice, task: Task) -> float:
    target = task.target()
    assert isinstance(choice.plan, Plan)
    held = sum(int(setting.removeprefix("hold=")) for setting in choice.settings)
    return estimate_cost(target.model, choice.plan, target.batch, target.loss, steps=400 + held).relative


def test_all_ten_beside_static_controls(digits: Task) -> None:
    result = choices("cpt", digits)
    assert list(result) == ["FP32", "static 8", "static 6", "static at the cost of CR", *TEN]
    assert price(result["static at the cost of CR"], digits) == pytest.approx(price(result["CR"], digits), rel=0.01)
    assert price(result["static 6"], digits) < price(result["static 8"], digits)
    control = result["static at the cost of CR"].plan
    assert isinstance(control, Plan)
    assert {item.name for item in control.followed.values()} == {"static"}
    for name in TEN:
        plan = result[name].plan
        assert isinstance(plan, Plan)
        assert plan.rules[-1].match == ("fc",)
        assert plan.followed["cpt"].name == name
        assert Plan.from_yaml(plan.to_yaml()) == plan


@pytest.mark.parametrize("suite", ["cpt", "deficits"])
def test_all_plans_of_a_suite_share_compiled_graphs(suite: str, digits: Task) -> None:
    result = choices(suite, digits)
    jobs = [Job(label, plan, None, 0, Path(label)) for label, c in result.items() if isinstance(plan := c.plan, Plan)]
    assert len({job.graphs for job in jobs}) == 1
    fixed = Job("fixed", find_plan("int8-all"), None, 0, Path("fixed"))
    assert fixed.graphs != jobs[0].graphs


def test_windows_controls_and_single_roundings(digits: Task) -> None:
    result = choices("deficits", digits)
    assert result["early 50%, then a full budget"].settings == ("hold=200",)
    early = result["early 50%, then a full budget"].plan
    assert isinstance(early, Plan)
    assert early.followed["cpt"].table(600).tolist() == [3] * 200 + [8] * 400
    half = result["half from 12.5%"].plan
    assert isinstance(half, Plan)
    assert half.followed["cpt"].table(400).tolist() == [8] * 50 + [3] * 200 + [8] * 150
    prices = [price(result[f"half from {start}"], digits) for start in ("0%", "12.5%", "25%", "50%")]
    assert len(set(prices)) == 1
    assert price(result["static at the cost of half"], digits) == pytest.approx(prices[0], rel=0.01)
    for part, moving in {"weights": "fprop.w", "activations": "fprop.x", "gradients": "dgrad.dy"}.items():
        plan = result[f"half from 0%, {part} only"].plan
        assert isinstance(plan, Plan)
        decision = plan.decide("conv1", "conv2d")
        moved = [
            slot
            for slot in ("fprop.w", "fprop.x", "dgrad.dy")
            if (spec := decision[slot].quantizer) is not None and isinstance(spec.moved_by, Deficit)
        ]
        assert moved == [moving]


def test_a_deficit_comes_on_top_of_the_whole_recipe(tiny: str, tmp_path: Path) -> None:
    task = find_task(tiny, ["steps=8"])
    expected = ("FP32", "early 50%, then a full budget", "half from 0%")
    chosen = [choice for label, choice in choices("deficits", task).items() if label in expected]
    summaries = compare(tiny, chosen, folder=tmp_path, settings=["steps=8"])
    assert [summary.step for summary in summaries] == [8, 12, 8]
    folder = RunFolder(tmp_path / "early-50-then-a-full-budget-s0")
    assert folder.config().settings["hold"] == 4
    assert "--set hold=4" in folder.config().command
    assert [run.label for run in read_runs([tmp_path])] == list(expected)
    again = compare(tiny, chosen, folder=tmp_path, settings=["steps=8"])
    assert [summary.to_dict() for summary in again] == [summary.to_dict() for summary in summaries]


def test_holding_keeps_the_peak_learning_rate_and_then_runs_the_recipe(tmp_path: Path) -> None:
    from bitplan.lab.train import train

    def rates(*settings: str) -> list[float]:
        place = tmp_path / ("-".join(settings) or "plain")
        chosen = ["steps=4", "evaluate_every=4", "batch=8", *settings]
        train(find_task("digits", chosen), folder=place, log_every=1)
        return [line["lr"] for line in RunFolder(place).metrics() if "lr" in line]

    plain = rates()
    assert rates("hold=3") == [plain[0]] * 3 + plain
