from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitplan.errors import RunError
from bitplan.lab.report.summaries import Experiment, Report
from bitplan.lab.report.tables import verdict_text

WriteRun = Callable[..., Path]


@pytest.fixture
def experiment(write_run: WriteRun, tmp_path: Path) -> Callable[..., Experiment]:
    """One experiment; each keyword is a plan, its value the facts of each of its runs."""

    def make(**plans: list[dict[str, Any]]) -> Experiment:
        for name, runs in plans.items():
            for seed, facts in enumerate(runs):
                plan = None if name == "fp32" else name
                write_run(tmp_path / f"{name}-{seed}", **({"plan": plan, "seed": seed} | facts))
        (result,) = Report.of([tmp_path]).experiments
        return result

    return make


Make = Callable[..., Experiment]


def verdicts(experiment: Experiment) -> dict[str, str]:
    return {plan.label: plan.verdict for plan in experiment.plans}


def seeds(*values: float, **facts: Any) -> list[dict[str, Any]]:
    """The runs of a plan, one for each seed."""
    return [{"value": value, **facts} for value in values]


def test_seeds_of_a_plan_are_one_row_with_mean_and_spread(experiment: Make) -> None:
    (plan,) = experiment(p=[{"value": 0.5, "cost": 0.25, "memory": 100.0}, {"value": 0.7, "cost": 0.25}]).plans
    assert plan.value is not None
    assert (plan.value.mean, plan.value.count, plan.cost) == (pytest.approx(0.6), 2, 0.25)
    assert plan.memory == 2050.0
    assert plan.memory_classes == {"weight": 512.5, "activation": 1025.0, "grad_activation": 512.5}


def test_what_keeps_loses_and_fails_against_fp32(experiment: Make) -> None:
    result = experiment(
        fp32=seeds(0.90, 0.91, 0.89),  # the margin is one per cent: 0.009
        near=seeds(0.898, 0.907, 0.888),  # 0.0023 worse, at most 0.0038
        edge=seeds(0.893, 0.901, 0.883),  # 0.0077 worse, at most 0.0115
        far=seeds(0.88, 0.891, 0.869),  # 0.02 worse, at least 0.0175
        spread=seeds(0.92, 0.88, 0.90),  # as good in the mean, by up to 0.02 either way
        bad=seeds(0.49, 0.49, 0.49),  # fp32 gains 0.8 over the trivial 0.1, and this loses more than half of it
        guess=seeds(0.1, 0.1, 0.1),
    )
    assert verdicts(result) == {
        "fp32": "reference",
        "near": "keeps",
        "edge": "undecided",
        "far": "loses",
        "spread": "undecided",
        "bad": "fails",
        "guess": "fails",
    }
    plans = {plan.label: plan for plan in result.plans}
    assert plans["near"].why == "worse by 0.002333 (0.0008991 to 0.003768) over 3 seeds, margin 1.0 % of fp32"
    assert [name for name, plan in plans.items() if plan.is_near] == ["edge", "spread"]


def test_one_seed_decides_nothing(experiment: Make) -> None:
    result = experiment(fp32=seeds(0.9), same=seeds(0.9), better=seeds(0.99), worse=seeds(0.8), bad=seeds(0.4))
    assert verdicts(result) == {
        "fp32": "reference",
        **dict.fromkeys(("same", "better", "worse"), "undecided"),
        "bad": "fails",  # so bad that no other seed is needed
    }
    assert {plan.why for plan in result.plans if plan.verdict == "undecided"} == {"one seed decides nothing"}


def test_runs_are_paired_by_their_seeds(experiment: Make) -> None:
    """Seeds differ by 0.3, and the plan from FP32 by 0.001: only pairs show that."""
    result = experiment(fp32=seeds(0.6, 0.75, 0.9), p=seeds(0.599, 0.7491, 0.8988), other=[{"seed": 7}, {"seed": 8}])
    assert verdicts(result) == {"fp32": "reference", "p": "keeps", "other": "undecided"}
    plans = {plan.label: plan for plan in result.plans}
    assert plans["other"].why == "no seed in common with fp32"
    assert plans["p"].judgement is not None
    assert plans["p"].judgement.margin == pytest.approx(0.0075)
    assert 0 < (plans["p"].judgement.p_value or 0.0) < 0.001


def test_the_margin_is_an_argument(experiment: Make, tmp_path: Path) -> None:
    experiment(fp32=seeds(0.90, 0.91, 0.89), p=seeds(0.88, 0.891, 0.869))
    for margin, verdict in ((0.01, "loses"), (0.023, "undecided"), (0.05, "keeps")):
        (result,) = Report.of([tmp_path], margin=margin).experiments
        assert verdicts(result)["p"] == verdict
    for wrong in (0.0, 1.0, -0.5, float("nan")):
        with pytest.raises(RunError, match="must be a share"):
            Report.of([tmp_path], margin=wrong)


def test_where_lower_is_better(experiment: Make) -> None:
    metric = {"name": "perplexity", "better": "lower", "trivial": 500.0}
    result = experiment(
        fp32=seeds(100.0, 101.0, metric=metric),
        a=seeds(100.4, 101.4001, metric=metric),
        b=seeds(102.0, 103.0001, metric=metric),
        c=seeds(301.0, 301.0, metric=metric),
        d=seeds(90.0, 91.0001, metric=metric),
    )
    assert [plan.label for plan in result.plans if plan.is_better] == ["d"]
    assert verdicts(result) == {"a": "keeps", "b": "loses", "c": "fails", "d": "keeps", "fp32": "reference"}


def test_a_plan_fails_if_any_of_its_runs_diverged_and_no_run_is_dropped(experiment: Make) -> None:
    result = experiment(
        fp32=[{"value": 0.9}, {"value": 0.9}],
        p=[{"value": 0.9}, {"value": 0.2, "status": "diverged"}],
    )
    plan = next(plan for plan in result.plans if plan.label == "p")
    assert (plan.verdict, plan.why) == ("fails", "diverged in 1 of 2 runs")
    assert len(plan.runs) == 2
    assert plan.value is not None
    assert plan.value.mean == 0.9  # of what finished
    assert plan.status_text == "1 of 2 diverged"


def test_plans_that_have_not_finished_are_shown_and_judged_by_nothing(experiment: Make) -> None:
    result = experiment(fp32=[{"value": 0.9}], p=[{"value": 0.3, "status": "unfinished"}])
    plan = result.plans[1]
    assert (plan.verdict, plan.value is not None, plan.on_cost_front) == ("unfinished", True, False)


def test_without_fp32_the_dearest_plan_is_the_reference(experiment: Make) -> None:
    assert verdicts(experiment(a=[{"cost": 0.1}], b=[{"cost": 0.5}])) == {"a": "undecided", "b": "reference"}


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_the_longest_run_without_a_plan_is_the_reference(write_run: WriteRun, tmp_path: Path, names: list[str]) -> None:
    """Whatever the folders are called: a trial of a few steps lies in front of everything, or behind it."""
    short, long = names
    for name, steps, value in ((short, 10, 0.3), (long, 20, 0.7)):
        folder = write_run(tmp_path / name, value=value, settings={"steps": steps})
        summary = json.loads((folder / "summary.json").read_text())
        (folder / "summary.json").write_text(json.dumps({**summary, "step": steps}))
    write_run(tmp_path / "c", plan="int8", value=0.6, settings={"steps": 20})
    (result,) = Report.of([tmp_path]).experiments
    assert verdicts(result)["fp32 (steps=20)"] == "reference"
    assert verdicts(result)["int8"] == "undecided"
    assert "no plan is within the margin of the accuracy of fp32 (steps=20) (70.0 %)" in result.answer


def test_one_plan_alone_has_no_reference(experiment: Make) -> None:
    assert verdicts(experiment(a=[{}])) == {"a": "alone"}


def test_fronts_leave_out_what_fails_however_cheap_it_is(experiment: Make) -> None:
    result = experiment(
        fp32=[{"value": 0.9, "cost": 1.0, "memory": 100}],
        a=[{"value": 0.89, "cost": 0.5, "memory": 100}],
        b=[{"value": 0.88, "cost": 0.6, "memory": 50}],
        c=[{"value": 0.1, "cost": 0.1, "memory": 10}],
    )
    assert [plan.label for plan in result.plans if plan.on_cost_front] == ["a", "fp32"]
    assert [plan.label for plan in result.plans if plan.on_memory_front] == ["b", "fp32"]


def test_equal_names_say_in_what_they_differ(write_run: WriteRun, tmp_path: Path) -> None:
    write_run(tmp_path / "1", settings={"steps": 30, "lr": 0.1})
    write_run(tmp_path / "2", settings={"steps": 30, "lr": 0.2})
    write_run(tmp_path / "3", settings={"steps": 30, "lr": 0.2}, compile=True)
    (result,) = Report.of([tmp_path]).experiments
    assert [plan.label for plan in result.plans] == [
        "fp32 (compile=False, lr=0.1)",
        "fp32 (compile=False, lr=0.2)",
        "fp32 (compile=True, lr=0.2)",
    ]


def test_plans_of_one_name_that_say_different_things_are_two(write_run: WriteRun, tmp_path: Path) -> None:
    for name in ("one", "two"):
        folder = write_run(tmp_path / name, plan="p")
        (folder / "plan.yaml").write_text(f"version: 1\ndescription: {name}\nrules: []\n")
    (result,) = Report.of([tmp_path]).experiments
    assert [plan.label for plan in result.plans] == ["p (one)", "p (two)"]


def test_tasks_are_experiments_of_their_own(write_run: WriteRun, tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", task="letters")
    report = Report.of([tmp_path])
    assert [experiment.task for experiment in report.experiments] == ["digits", "letters"]
    assert report.answer.count("On ") == 2


def test_networks_are_experiments_of_their_own(write_run: WriteRun, tmp_path: Path) -> None:
    """A network is judged by its own FP32, not by another's."""
    for model, best in (("resnet8", 0.9), ("resnet20", 0.97)):
        settings = {"steps": 30, "model": model, "width": 1.0}
        write_run(tmp_path / f"{model}-fp32", value=best, settings=settings)
        write_run(
            tmp_path / f"{model}-int8", plan="int8", value=best - 0.001, settings={**settings, "loss_scale": 1024}
        )
    small, large = Report.of([tmp_path]).experiments
    assert [small.name, large.name] == ["digits, model resnet20", "digits, model resnet8"]
    assert small.task == large.task == "digits"
    assert verdicts(small) == verdicts(large) == {"fp32": "reference", "int8": "undecided"}
    assert small.answer.startswith(
        "On digits, model resnet20 (1 seed, 30 steps), the mean accuracy of int8 is at most 1.0 % worse"
    )


def test_the_same_data_in_two_places_is_the_same(write_run: WriteRun, tmp_path: Path) -> None:
    write_run(tmp_path / "a", settings={"data": "/here/set.npz"})
    write_run(tmp_path / "b", plan="int8", settings={"data": "there/set.npz"})
    write_run(tmp_path / "c", plan="int8", settings={"data": "there/other.npz"})
    assert [item.name for item in Report.of([tmp_path]).experiments] == [
        "digits, data set.npz",
        "digits, data other.npz",
    ]


def test_a_network_alone_needs_no_name(write_run: WriteRun, tmp_path: Path) -> None:
    write_run(tmp_path / "a", settings={"model": "resnet8"})
    (result,) = Report.of([tmp_path]).experiments
    assert result.name == "digits"


def test_errors_of_a_site_are_means_over_runs(experiment: Make) -> None:
    site = {"site": "a/linear.0:weight", "role": "weight", "format": "int4", "rule": None}
    (plan,) = experiment(p=[{"sites": [site | {"error": 0.1}]}, {"sites": [site | {"error": 0.3}]}]).plans
    assert [record.error for record in plan.sites] == [pytest.approx(0.2)]


@pytest.mark.parametrize(
    ("values", "message"),
    [([0.9812], "98.1 %"), ([0.97, 0.99], "98.0 ± 1.4 %"), ([0.98, 0.98], "98.0 ± 0.00 %")],
)
def test_shares_are_told_in_per_cent(experiment: Make, values: list[float], message: str) -> None:
    result = experiment(fp32=[{"value": value} for value in values])
    assert result.spread_text(result.plans[0]) == message


def test_summaries_show_in_a_notebook(experiment: Make) -> None:
    result = experiment(fp32=[{"value": 0.9}], **{"<b>p": [{"value": 0.9}]})
    shown = result._repr_html_()
    assert shown.startswith("<p>On digits")
    assert "&lt;b&gt;p" in shown
    assert "<b>" not in shown
    assert shown.count("<tr>") == 3
    assert shown in Report((result, result))._repr_html_()


def test_a_plan_above_the_reference_is_called_better(experiment: Make) -> None:
    result = experiment(fp32=seeds(0.8, 0.82), up=seeds(0.9, 0.921, cost=0.1), near=seeds(0.8, 0.8201))
    plans = {plan.label: plan for plan in result.plans}
    assert (plans["up"].verdict, plans["up"].is_better, verdict_text(plans["up"])) == ("keeps", True, "better")
    assert plans["up"].why.startswith("better by 0.1005 (0.09415 to 0.1069) over 2 seeds")
    assert (plans["near"].verdict, plans["near"].is_better, verdict_text(plans["near"])) == ("keeps", False, "keeps")
    assert "up improves on the accuracy of fp32" in result.answer
