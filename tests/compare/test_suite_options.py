"""Options of suites: the papers' remaining tables by command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import runner

from bitplan.analysis.cost import estimate_cost
from bitplan.cli import main
from bitplan.cli.compare import Comparison
from bitplan.errors import RunError, ScheduleError
from bitplan.lab.compare import Choice, SuiteOptions, find_suite
from bitplan.lab.compare.suite_options import read_names, read_shares, read_widths
from bitplan.lab.tasks.registry import find_task
from bitplan.lab.tasks.task import Task
from bitplan.lab.train import RunFolder, train
from bitplan.plans import Plan
from bitplan.plans.schedules import TEN, Cyclic, Deficit


@pytest.fixture(scope="module")
def digits() -> Task:
    return find_task("digits", ["steps=400", "width=0.5"])


@pytest.fixture
def bitplan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    monkeypatch.chdir(tmp_path)
    return runner(main, capsys, monkeypatch)


def choices(suite: str, task: Task, **options: Any) -> dict[str, Choice]:
    made = find_suite(suite).choices_for(lambda: task, SuiteOptions(**options))
    return {choice.label: choice for choice in made}


def plan_of(choice: Choice) -> Plan:
    assert isinstance(choice.plan, Plan)
    return choice.plan


def bits_of(plan: Plan, operand: str) -> tuple[int, int]:
    spec = plan.decide("conv1", "conv2d")[operand].quantizer
    assert spec is not None
    moving = spec.moved_by
    return (spec.target.bits, spec.target.bits) if moving is None else (moving.lowest, moving.highest)


@pytest.mark.parametrize("bits", [(3, 6), (4, 6), (5, 6), (4, 8), (5, 8)])
def test_the_published_ranges(digits: Task, bits: tuple[int, int]) -> None:
    made = choices("cpt", digits, bits=bits, cycles=4)
    static = ["static 8", "static 6"] if bits[1] == 8 else ["static 6"]
    assert list(made) == ["FP32", *static, "static at the cost of CR", *TEN]
    for name in TEN:
        moving = plan_of(made[name]).followed["cpt"]
        assert isinstance(moving, Cyclic)
        assert (moving.low, moving.high, moving.cycles, moving.name) == (*bits, 4, name)
        assert bits_of(plan_of(made[name]), "dgrad.dy") == (bits[1], bits[1])
    target = digits.target()
    costs = [
        estimate_cost(target.model, plan_of(made[label]), target.batch, target.loss, steps=400).relative
        for label in ("CR", "static at the cost of CR")
    ]
    assert costs[1] == pytest.approx(costs[0], rel=0.02)


def test_gradients_schedules_statics_and_periods(digits: Task) -> None:
    made = choices(
        "cpt", digits, bits=(3, 6), static=(6, 5), schedules=("RR", "LT"), gradient_bits=8, period="published"
    )
    assert list(made) == ["FP32", "static 6", "static 5", "static at the cost of RR", "RR", "LT"]
    for label, choice in made.items():
        if label != "FP32":  # CPT's rows such as 6/8: all plans have the bits of gradients
            assert bits_of(plan_of(choice), "dgrad.dy") == (8, 8)
    assert bits_of(plan_of(made["static 5"]), "fprop.w") == (5, 5)
    moving = plan_of(made["RR"]).followed["cpt"]
    assert isinstance(moving, Cyclic)
    assert moving.period == "published"


def test_deficits_of_other_ranges(digits: Task) -> None:
    made = choices("deficits", digits, bits=(5, 8), gradient_bits=6)
    early = plan_of(made["early 50%, then a full budget"])
    assert isinstance(early.followed["cpt"], Deficit)
    assert bits_of(early, "fprop.w") == (5, 8)
    assert bits_of(early, "dgrad.dy") == (6, 6)
    assert bits_of(plan_of(made["no deficit"]), "fprop.x") == (8, 8)
    alone = plan_of(made["half from 0%, gradients only"])
    assert bits_of(alone, "dgrad.dy") == (5, 8)


def test_assignments_in_tenths_with_all_baselines_and_orders(digits: Task) -> None:
    made = choices("assign", digits, ratios=read_shares("tenths"))
    expected = [f"r = {tenth / 10:g}" for tenth in range(11)]
    assert list(made) == ["FP32", "operator", "operator prime", "uniform low", *expected]
    assert all(choice.settings == ("loss_scale=65536",) for label, choice in made.items() if label != "FP32")
    ratios = [plan_of(made[label]).made_by["selection_ratio"] for label in expected]  # type: ignore[index, call-overload]
    assert ratios == sorted(ratios)
    assert (ratios[0], ratios[-1]) == (0, 1)
    ablations = choices(
        "assign", digits, ratios=(0.5,), orders=("largest", "smallest", "random"), promotions=(0.01, 0.0, 0.1)
    )
    labels = list(ablations)[4:]
    assert len(labels) == (1 + 1 + 3) * 3
    assert {"r = 0.5, promotion 0.01", "r = 0.5, smallest, no promotion", "r = 0.5, random 2, promotion 0.1"} <= {
        *labels
    }
    plans = {label: plan_of(ablations[label]) for label in labels}
    without, with_ = plans["r = 0.5, smallest, no promotion"].made_by, plans["r = 0.5, smallest, promotion 0.1"].made_by
    assert isinstance(without, dict)
    assert isinstance(with_, dict)
    assert ("promotion" in without, with_["promotion"], with_["order"]) == (False, 0.1, "smallest")
    orders = [plans[f"r = 0.5, random {seed}, no promotion"].to_yaml() for seed in range(3)]
    assert len(set(orders)) == 3


def test_what_a_suite_does_not_have_is_refused(digits: Task) -> None:
    for suite, options, token in (
        ("static", {"bits": (3, 6)}, "--bits"),
        ("assign", {"cycles": 4}, "--cycles"),
        ("deficits", {"static": (6,)}, "--static"),
        ("cpt", {"ratios": (0.5,)}, "--ratios"),
    ):
        with pytest.raises(RunError, match=token):
            choices(suite, digits, **options)
    for options in ({"schedules": ("XX",)}, {"orders": ("best",)}, {"ratios": (1.5,)}, {"period": "long"}):
        with pytest.raises(RunError):
            SuiteOptions(**options)
    with pytest.raises(ScheduleError):
        SuiteOptions(bits=(8, 3))
    for read, text in ((read_widths, "8,x"), (read_shares, "a"), (read_names, "CR,,RR")):
        with pytest.raises(RunError, match="is no list"):
            read(text)


def test_folder_and_command_tell_comparisons_apart() -> None:
    options = SuiteOptions(bits=(3, 6), cycles=4, static=(6,), as_published=True)
    comparison = Comparison("digits", (), None, "cpu", False, options)
    folder = comparison.folder("cpt", (), None)
    assert folder != Comparison("digits").folder("cpt", (), None)
    command = comparison.command("cpt", (), 1, None)
    assert command == ("bitplan compare digits --suite cpt --bits 3-6 --cycles 4 --static 6 --as-published --seeds 1")
    assert str(Comparison("digits").folder("cpt", (), None)) == "runs/compare-digits-cpt"  # as before


def test_the_command(bitplan: Callable[..., Any]) -> None:
    small = ("--set", "steps=2", "--set", "batch=8", "--set", "width=0.25", "--set", "evaluate_every=2")
    options = ("--suite", "cpt", "--bits", "3-6", "--cycles", 4, "--schedules", "cr", "--seeds", 1)
    ran = bitplan("compare", "digits", *options, *small, "--json")
    assert ran.code == 0, ran.err
    plans = [row["plan"] for row in ran.json["experiments"][0]["plans"]]
    assert plans == ["FP32", "static 6", "static at the cost of CR", "CR"]
    (run,) = Path("runs").glob("compare-*bits=3-6-cycles=4*")
    cr = RunFolder(run / "cr-s0").plan()
    assert cr is not None
    assert str(cr.followed["cpt"]) == "CR 3-6 x4"
    refused = bitplan("compare", "digits", "--plans", "fp32", "--bits", "3-6")
    assert (refused.code, refused.err.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("graph", ["features=8"]),
        ("graph", ["model=gat", "features=8"]),
        ("lstm-lm", ["features=8", "batch=2", "length=4", "evaluation=1"]),
        ("lm", ["features=8", "layers=1", "heads=1", "batch=2", "length=8", "evaluation=1"]),
        ("detection", ["batch=2", "size=32", "width=0.05", "head=1"]),
    ],
)
def test_deficits_of_every_kind_of_task(name: str, settings: list[str], tmp_path: Path) -> None:
    recipe = [*settings, "steps=2", "evaluate_every=1"]
    task = find_task(name, recipe)
    made = {choice.label: choice for choice in find_suite("deficits").choices_for(lambda: task)}
    assert len(made) == 14
    choice = made["early 100%, then a full budget"]
    assert choice.settings == ("hold=2",)
    summary = train(find_task(name, [*recipe, *choice.settings]), plan_of(choice), folder=tmp_path / "run")
    assert (summary.status, summary.step) == ("finished", 4)


def test_a_plateau_before_the_recipe_begins_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations in the hold would divide the learning rate of the full budget that follows it."""
    from bitplan.lab.tasks.lstm_lm import LSTMLanguageModelling

    # An evaluation that always gets worse: each one after the first divides the rate.
    worse = iter(range(1, 100))
    monkeypatch.setattr(LSTMLanguageModelling, "evaluate", lambda self, model: {"perplexity": float(next(worse))})
    small = ["features=8", "batch=2", "length=4", "steps=3", "evaluate_every=1", "hold=3"]
    train(find_task("lstm-lm", small), folder=tmp_path / "run", log_every=1)
    rates = [line["lr"] for line in RunFolder(tmp_path / "run").metrics() if "lr" in line]
    assert rates == [20.0, 20.0, 20.0, 20.0, 20.0, 5.0]
