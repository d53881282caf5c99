"""Time, tensors and formats in one plan: each keeps what the others need, or a sentence says why it cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import runner
from torch import nn
from torch.nn import functional as F

import bitplan as bp
from bitplan.analysis.explain import plan_at
from bitplan.analysis.measure import Measurement, measure
from bitplan.cli import main
from bitplan.errors import PlanError
from bitplan.lab.tasks.registry import find_task
from bitplan.planners.advise import SlotAdvice, advise, advise_on, make_plan
from bitplan.planners.combining import origin_of
from bitplan.plans import Plan, QuantizerSpec
from bitplan.plans.schedules import AtLeast, schedule, schedule_from_data

CR = schedule("CR", low=4, high=8)
STEPS = 40


def slot(product: str, name: str, format: str, need: int | None) -> SlotAdvice:
    return SlotAdvice(product, name, QuantizerSpec(format, scale="tensor"), 0.0, "", None, need)


def bits_over_time(plan: Plan, module: str, place: str) -> list[int]:
    """The bits at every step, as the plan at that step decides them."""
    found = []
    for step in range(STEPS):
        quantizer = plan_at(plan, step, STEPS).decide(module, "linear.0")[place].quantizer
        assert quantizer is not None
        found.append(quantizer.target.bits)
    return found


def test_no_slot_falls_below_its_need() -> None:
    slots = [
        slot("a/linear.0", "fprop.x", "int8", 8),
        slot("a/linear.0", "fprop.w", "int8", 6),
        slot("b/linear.0", "fprop.x", "int4", 4),
        slot("b/linear.0", "fprop.w", "int4", 3),
        slot("b/linear.0", "dgrad.w", "e4m3", None),
    ]
    plan = make_plan(slots, schedule=CR)
    plan = Plan.from_yaml(plan.to_yaml())
    own = CR.table(STEPS).tolist()
    assert min(own) == 4
    assert bits_over_time(plan, "a", "fprop.x") == [8] * STEPS
    assert bits_over_time(plan, "a", "fprop.w") == [max(bits, 6) for bits in own]
    assert bits_over_time(plan, "b", "fprop.x") == bits_over_time(plan, "b", "fprop.w") == own
    assert bits_over_time(plan, "b", "dgrad.w") == [8] * STEPS  # a float stays


@pytest.mark.parametrize(
    ("needs", "bits", "named"),
    [((8, 4), (3, 6), "fprop.x of a needs 8"), ((8, 8), (4, 8), "move nothing"), ((None, None), (4, 8), "no slot")],
)
def test_what_cannot_be_combined_is_a_sentence(
    needs: tuple[int | None, int | None], bits: tuple[int, int], named: str
) -> None:
    slots = [
        slot("a/linear.0", operand, "e4m3" if need is None else f"int{need}", need)
        for operand, need in zip(("fprop.x", "fprop.w"), needs, strict=True)
    ]
    with pytest.raises(PlanError, match=named) as error:
        make_plan(slots, schedule=schedule("CR", low=bits[0], high=bits[1]))
    assert "\n" not in str(error.value)


def test_a_base_with_a_schedule_of_the_same_name_keeps_it() -> None:
    first = make_plan([slot("a/linear.0", "fprop.x", "int4", 4)], schedule=CR)
    other = schedule("LT", low=5, high=8)
    both = make_plan([slot("b/linear.0", "fprop.x", "int5", 5)], base=first, schedule=other)
    assert both.schedules == {"advised": CR, "advised2": other}
    assert bits_over_time(both, "a", "fprop.x") == CR.table(STEPS).tolist()
    assert bits_over_time(both, "b", "fprop.x") == other.table(STEPS).tolist()


def planted() -> tuple[nn.Module, list[Any]]:
    """Two layers in a row; the inputs of the second have one channel of large values."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with torch.no_grad():
        model[0].weight[7] *= 30
    return model, [torch.randn(256, 64)]


def test_needs_come_from_measured_widths() -> None:
    model, batches = planted()
    advice = advise(
        model, batches, lambda y: y.square().sum(), ["int8 tensor", "e4m3 tensor"], tau=0.12, rows=32, schedule=CR
    )
    assert {row.candidate for row in advice.measurement.rows} >= {f"int{bits} tensor" for bits in range(4, 9)}
    needs = {str(one.where): one.need for one in advice.slots}
    # An outlier of 30 costs five bits; the clean input needs fewer than the spoilt one.
    clean, spoilt = needs["fprop.x of 0"], needs["fprop.x of 1"]
    assert clean is not None
    assert clean < (spoilt or 9)
    again = Plan.from_yaml(advice.plan.to_yaml())
    with bp.attach(model, again, steps=STEPS, example=batches[0]) as run:
        for step in range(STEPS):
            table = {row.site.name: row for row in run.table(step=step)}
            for one in advice.slots:
                if one.need is not None:
                    module = one.product.partition("/")[0]
                    quantizer = next(
                        row.quantizer
                        for name, row in table.items()
                        if name.startswith(f"{module}/linear.0") and row.site.role == one.slot
                    )
                    assert quantizer is not None
                    assert quantizer.target.bits == max(CR.bits(step, STEPS), one.need)


def test_a_cost_that_counts_no_bits_does_not_raise_needs() -> None:
    model, batches = planted()
    candidates = ["int8 tensor", "int6 tensor", "int4 tensor", "e4m3 tensor"]
    measured = measure(model, batches, lambda y: y.square().sum(), candidates, rows=32)
    advice = advise_on(measured, tau=0.3, cost="time")
    integers = [one for one in advice.slots if one.need is not None]
    assert {one.spec.target.bits for one in integers} == {8}
    assert {one.need for one in integers} >= {4, 6}  # what each can do with, and the same choice for all
    cheapest = {one.where: one.spec.target.bits for one in advise_on(measured, tau=0.3, cost="bitops").slots}
    assert all(cheapest[one.where] <= (one.need or 8) for one in integers)


# --- Budgets


def net() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    target = find_task("digits", ["width=0.5", "batch=64"]).target()
    return target.model, target.batch


@pytest.fixture(scope="module")
def budgeted() -> Plan:
    model, batch = net()
    return bp.assign(model, batch, F.cross_entropy, budget="90%")


def test_the_budget_stays_in_made_by(budgeted: Plan) -> None:
    model, batch = net()
    advice = advise(model, [batch], F.cross_entropy, ["int8 tensor", "e4m3 tensor"], base=budgeted, rows=32)
    base, made_by = budgeted.made_by, advice.plan.made_by
    assert isinstance(base, dict)
    assert isinstance(made_by, dict)
    assert made_by["planner"] == "advise"
    assert made_by["budget"] == base["budget"] == "90%"
    assert made_by["budget_bytes"] == base["budget_bytes"]
    assert made_by["base"]["planner"] == "bitplan assign"
    assert 0 < made_by["peak_predicted"] <= made_by["budget_bytes"]
    peak = bp.estimate_memory(model, batch, F.cross_entropy, plan=advice.plan, execution="packed").peak
    assert made_by["peak_predicted"] == pytest.approx(peak, rel=0.02)


def test_a_budget_that_the_advice_would_break_is_a_sentence(budgeted: Plan) -> None:
    model, batch = net()
    base = budgeted.made_by
    assert isinstance(base, dict)
    tight = replace(budgeted, made_by={**base, "budget_bytes": base["peak_predicted"] // 2})
    with pytest.raises(PlanError, match="does not fit into the budget") as error:
        advise(model, [batch], F.cross_entropy, ["int8 tensor", "e4m3 tensor"], base=tight, rows=32)
    assert "\n" not in str(error.value)


def test_a_base_below_what_products_need_is_told() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    low = Plan.from_yaml('version: 1\nrules: [{match: "*", op: linear, weight: {format: int3, scale: tensor}}]\n')
    measured = measure(model, [torch.randn(64, 16)], candidates=["int8 tensor", "e4m3 tensor"], rows=16)
    made_by = advise_on(measured, base=low).plan.made_by
    assert isinstance(made_by, dict)
    assert set(made_by["below_need"]) == {"fprop.w of 0"}
    assert "3 bits" in made_by["below_need"]["fprop.w of 0"]
    moving = Plan.from_yaml(
        "version: 1\nschedules: {s: {name: CR, low: 3, high: 8}}\nrules:\n"
        '- {match: "*", op: linear, weight: {format: int, bits: s, scale: tensor}}\n'
    )
    moved = advise_on(measured, base=moving).plan.made_by
    assert isinstance(moved, dict)
    assert "3 bits" in moved["below_need"]["fprop.w of 0"]  # at times


def test_bases_without_a_record_are_named() -> None:
    assert origin_of(Plan(name="mine")) == {"base": "mine"}
    assert origin_of(Plan(made_by={"planner": "x", "why": {"long": "text"}})) == {"base": {"planner": "x"}}


# --- The schedule with a lower bound


def test_at_least_is_read_and_written() -> None:
    bound = AtLeast(6, CR)
    assert (bound.lowest, bound.highest, str(bound)) == (6, 8, "CR 4-8 x8, at least 6")
    assert schedule_from_data(bound.to_data()) == bound
    assert schedule("at-least", schedule=CR, least=6) == bound
    assert bound.table(STEPS).tolist() == [max(bits, 6) for bits in CR.table(STEPS).tolist()]
    text = """
version: 1
schedules: {s: {name: at-least, least: 5, schedule: {name: LR, low: 3, high: 8, cycles: 2}}}
rules: [{match: "*", weight: {format: int, bits: s, scale: tensor}}]
"""
    plan = Plan.from_yaml(text)
    assert plan == Plan.from_yaml(plan.to_yaml())
    assert plan.schedules["s"].lowest == 5


# --- The command


def test_the_command_keeps_schedule_and_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bitplan: Callable[..., Any] = runner(main, capsys, monkeypatch)
    small = ("--set", "width=0.5", "--set", "batch=64")
    assert bitplan("assign", "digits", *small, "--budget", "90%", "-o", "b.yaml").code == 0
    options = ("--early", "--steps", 2, "-c", "int8 tensor", "--rows", 16)
    ran = bitplan(
        "advise", "digits", *small, *options, "--base", "b.yaml", "--schedule", "CR", "-o", "a.yaml", "--json"
    )
    assert ran.code == 0, ran.err
    made_by = ran.json["plan"]["made_by"]
    assert made_by["schedule"] == "CR 4-8 x8"
    assert made_by["budget"] == "90%"
    assert made_by["peak_predicted"] <= made_by["budget_bytes"]
    assert all(name.startswith("advised") for name in ran.json["plan"]["schedules"])
    needs = [one["need"] for one in ran.json["slots"] if one["need"] is not None]
    assert needs
    assert all(4 <= need <= 8 for need in needs)
    assert bitplan("plan", "explain", "a.yaml", "digits", *small, "--step", 100).code == 0
    too_low = bitplan("advise", "digits", *small, *options, "--tau", 0.01, "--schedule", "CR", "--bits", "3-5")
    assert (too_low.code, too_low.err.count("\n")) == (2, 1)


def test_a_measurement_without_narrow_widths_is_taken_as_it_is() -> None:
    """Of a slot that was measured in 8 bits alone, it is not known that it can do with fewer."""
    model, batches = planted()
    measured: Measurement = measure(model, batches, lambda y: y.square().sum(), ["int8 tensor", "e4m3 tensor"], rows=32)
    with pytest.raises(PlanError, match="move nothing"):
        advise_on(measured, schedule=CR)
