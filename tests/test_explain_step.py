"""What each tensor gets at one step of a run: ``explain(step=)``, ``run.table(step=)``, ``plan explain --step``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import runner
from torch import nn

import bitplan as bp
from bitplan.analysis.explain import Explanation, explain
from bitplan.cli import main
from bitplan.errors import PlanError
from bitplan.plans import Plan
from bitplan.plans.schedules import schedule

STEPS = 12
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))

PLAN = Plan.from_yaml("""
version: 1
schedules: {up: {name: LR, low: 3, high: 8, cycles: 2}}
quantizers:
  w: {format: int, bits: up, scale: tensor}
  late: {until: 50%, use: {format: e4m3, scale: tensor}, then: keep}
rules:
- {match: "*", op: linear, weight: w}
- {match: "2", activation: late}
""")
UP = schedule("LR", low=3, high=8, cycles=2)


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


def by_site(rows: Any) -> dict[str, Explanation]:
    return {row.site.name: row for row in rows}


@pytest.fixture
def bitplan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    return runner(main, capsys, monkeypatch)


@pytest.mark.parametrize("step", [0, 5, 6, 11])
def test_explain_says_the_bits_and_the_case_of_a_step(step: int) -> None:
    rows = by_site(explain(small(), PLAN, X, step=step, steps=STEPS))
    assert rows["0/linear.0:weight"].words == f"int{UP.bits(step, STEPS)} tensor"
    last = rows["2/linear.0:activation"]
    assert (last.words, last.rule) == ("e4m3 tensor" if step < 6 else None, 1)
    assert {UP.bits(step, STEPS) for step in (0, 5, 6, 11)} == {3, 7, 8}  # the steps differ
    whole = by_site(explain(small(), PLAN, X))
    assert whole["0/linear.0:weight"].words == "int LR 3-8 x2 tensor"


def test_the_table_of_a_step_is_what_the_step_has() -> None:
    """Before, at and after a step the table says the format that the weights are rounded to there."""
    model, eye = small(), torch.eye(6)
    nn.init.zeros_(model[0].bias)
    asked: list[list[str | None]] = []
    with bp.attach(model, PLAN, steps=STEPS, example=X) as run:
        for step in range(STEPS):
            words = by_site(run.table(step=step))["0/linear.0:weight"]
            assert words.quantizer is not None
            expected = bp.quantize(model[0].weight.detach(), words.quantizer.target, scale="tensor")
            assert torch.equal(expected, model[0](eye).T)
            asked.append([by_site(run.table(step=other))["0/linear.0:weight"].words for other in range(STEPS)])
            run.step()
        asked.append([by_site(run.table(step=other))["0/linear.0:weight"].words for other in range(STEPS)])
    bits = [f"int{UP.bits(step, STEPS)} tensor" for step in range(STEPS)]
    assert asked == [bits] * (STEPS + 1)


def test_formats_set_by_hand_and_promotions_hold_from_their_step_on() -> None:
    plan = Plan.from_yaml("""
version: 1
quantizers: {w: e4m3}
rules:
- {match: "0", weight: w}
- {match: "2", activation: {format: e4m3b4, rounding: nearest-away, promote: {to: e6m9b0}}}
""")
    model = small()
    nn.init.constant_(model[2].bias, 1000.0)  # overflows 30 at once
    with bp.attach(model, plan, mutable_formats=True, example=X) as run:
        for step in range(4):
            if step == 2:
                run.set_format("w", "e5m2")
            model(X).square().sum().backward()
            run.step()
        (promotion,) = run.promotions()
        tables = [by_site(run.table(step=step)) for step in range(6)]
    assert [table["0/linear.0:weight"].words for table in tables] == ["e4m3", "e4m3", "e5m2", "e5m2", "e5m2", "e5m2"]
    assert promotion.step == 1
    words = [str(table["2/linear.0:activation"].words) for table in tables]
    assert words[0].startswith("e4m3b4")
    assert words[1:] == ["e6m9b0 (promoted at step 1)"] * 5


@pytest.mark.parametrize(
    ("options", "named"),
    [({"step": 12, "steps": 12}, "0 to 11"), ({"step": -1, "steps": 12}, "-1"), ({"step": 3}, "steps")],
)
def test_a_step_that_does_not_exist_is_refused(options: dict[str, int], named: str) -> None:
    with pytest.raises(PlanError, match=named):
        explain(small(), PLAN, X, **options)


def test_a_run_that_counts_no_steps_has_no_table_of_a_step() -> None:
    plan = Plan.from_yaml(
        "version: 1\nschedules: {up: {name: LR, low: 3, high: 8}}\nrules:\n"
        '- {match: "*", op: linear, weight: {format: int, bits: up, scale: tensor}}\n'
    )
    with bp.attach(small(), plan, steps="progress", example=X) as run, pytest.raises(PlanError, match="progress"):
        run.table(step=3)


def test_a_plan_that_stands_still_is_the_same_at_every_step() -> None:
    model = small()
    plan = Plan.from_yaml('version: 1\nrules: [{match: "*", op: linear, weight: e4m3}]\n')
    assert [row.words for row in explain(model, plan, X, step=1000)] == [row.words for row in explain(model, plan, X)]
    with bp.attach(model, plan, example=X) as run:
        assert [row.words for row in run.table(step=7)] == [row.words for row in run.table()]


def test_the_command(bitplan: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert bitplan("plan", "cpt", "digits", "-o", "cpt.yaml").code == 0
    cr = schedule("CR", low=3, high=8, cycles=8)
    for step, total, options in ((100, 300, ()), (100, 900, ("--steps", 900)), (100, 400, ("--set", "steps=400"))):
        rows = bitplan("plan", "explain", "cpt.yaml", "digits", "--step", step, *options, "--json").json
        weight = next(
            row for row in rows if row["name"] == "conv1/conv2d.0:weight[fprop.w]" or row["role"] == "fprop.w"
        )
        assert weight["quantizer"] == f"int{cr.bits(step, total)} channel minmax", (step, total)
    assert {cr.bits(100, total) for total in (300, 900, 400)} != {cr.bits(100, 300)}
    for arguments in (
        ("digits", "--step", 300),
        ("resnet20", "--step", 3),
        ("digits", "--steps", 3),
    ):
        ran = bitplan("plan", "explain", "cpt.yaml", *arguments)
        assert (ran.code, ran.err.count("\n")) == (2, 1)
        assert "step" in ran.err
