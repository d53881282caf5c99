"""Planners and suites take the tasks whose data are no images, texts or graphs, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from bitplan.lab.compare.suites import find_suite
from bitplan.lab.task_planners import AssignOptions, assign_task, range_test_of_task
from bitplan.lab.tasks.registry import find_task
from bitplan.lab.tasks.task import Task
from bitplan.lab.train import train
from bitplan.lab.train.stages import measure_task
from bitplan.planners import advise

SETTINGS = {
    "forecast": ("steps=8", "length=48", "horizon=8", "batch=8"),
    "rl": ("steps=8", "environments=2", "rollout=16", "batch=16", "epochs=2", "features=16"),
}


def make(name: str, *settings: str) -> Task:
    return find_task(name, (*SETTINGS[name], *settings))


@pytest.mark.parametrize("name", SETTINGS)
def test_errors_are_measured_and_advise_formats(name: str) -> None:
    measurement = measure_task(make(name), ["e4m3", "int4"], stages=["early"], steps=2)
    assert {row.step for row in measurement.rows} == {1}
    target = make(name).target()
    advice = advise(target.model, [target.batch], target.loss)
    assert advice.plan.rules


@pytest.mark.parametrize("name", SETTINGS)
def test_sensitivity_assigns_formats(name: str) -> None:
    options = AssignOptions("0.5", order="sensitivity")
    assignment = assign_task(make(name), options.request(0), options.choose_formats())
    assert assignment.plan.rules


@pytest.mark.parametrize("name", SETTINGS)
def test_a_model_that_learns_passes_the_range_test(name: str) -> None:
    result = range_test_of_task(make(name), low=6, high=8, window=30)
    assert result.low == 6, result.reason


@pytest.mark.parametrize("name", SETTINGS)
def test_suites_make_plans_that_train(name: str, tmp_path: Path) -> None:
    choices = {choice.label: choice for choice in find_suite("cpt").choices_for(lambda: make(name))}
    assert len(choices) == 14
    deficits = {choice.label: choice for choice in find_suite("deficits").choices_for(lambda: make(name))}
    early = deficits["early 50%, then a full budget"]
    for plan, settings in ((choices["CR"].plan, ()), (early.plan, early.settings)):
        summary = train(make(name, *settings), plan, folder=tmp_path / str(len(settings)))
        assert summary.status == "finished"
        assert 0 < summary.cost["relative_to_fp32"] < 0.1
