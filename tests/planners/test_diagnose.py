"""The bisection of a diagnosis, on runs whose losses are known functions of the plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from bitplan.capture.decompositions import is_decomposed
from bitplan.capture.recording import record
from bitplan.errors import PlanError
from bitplan.planners.diagnose import (
    Diagnosis,
    RoundedTensor,
    Window,
    diagnose,
    excess,
    halves,
    keep_plan,
    remedies,
    rounded_tensors,
)
from bitplan.plans import Plan
from bitplan.plans.spec import QuantizerSpec

RULES = [{"match": "*", "op": "linear", "x": "e2m1", "w": "e2m1", "dy": "e2m1"}]
PLAN = Plan.from_dict({"version": 1, "name": "narrow", "rules": RULES})
STEPS = 8
HIGH = [2.0] * STEPS


def layers(count: int = 8) -> list[RoundedTensor]:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))
    return rounded_tensors(PLAN, record(model, torch.randn(2, 4)))


class Known:
    """Replays whose loss depends on which of the chosen tensors a plan gives fewer than 8 bits."""

    def __init__(self, sites: Iterable[str], loss: Callable[[int], list[float]]) -> None:
        self.sites, self.loss, self.plans = [*sites], loss, list[Plan]()

    def __call__(self, plan: Plan, rate: float = 1.0) -> list[float]:
        self.plans.append(plan)
        return self.loss(sum(self._is_narrow(plan, site) for site in self.sites))

    @staticmethod
    def _is_narrow(plan: Plan, site: str) -> bool:
        operation, place = site.split(":")
        module, op = operation.split("/")
        spec = plan.decide(module, op)[place].quantizer
        return spec is not None and spec.target.bits < 8


def run(known: Known, tensors: list[RoundedTensor], **options: Any) -> Diagnosis:
    return diagnose(known, PLAN, tensors, Window(0), **options)


@pytest.mark.parametrize(
    "sites",
    [
        ["3/linear.0:dgrad.dy"],
        ["0/linear.0:fprop.x"],
        ["7/linear.0:wgrad.x"],
        ["2/linear.0:fprop.w", "6/linear.0:wgrad.dy"],
        ["1/linear.0:dgrad.w", "1/linear.0:dgrad.dy", "5/linear.0:fprop.x"],
    ],
)
@pytest.mark.parametrize("broken", [math.nan, 3.0])
def test_the_tensors_that_have_to_be_wider_are_found(sites: list[str], broken: float) -> None:
    known = Known(sites, lambda count: [2.0] * (STEPS - 1) + [broken] if count else HIGH)
    diagnosis = run(known, layers())
    assert diagnosis.cause == "plan"
    assert {str(tensor) for tensor in diagnosis.culprits} == set(sites)
    assert all(site in diagnosis.summary for site in sites)
    assert diagnosis.plan is not None
    fixed = Known(sites, lambda count: [float(count)])
    assert fixed(diagnosis.plan) == [0.0]
    # No other tensor has become wider, and each took a logarithmic number of replays.
    assert sum(fixed._is_narrow(diagnosis.plan, str(tensor)) for tensor in layers()) == len(layers()) - len(sites)
    assert len(known.plans) <= 8 + 2 * len(sites) * math.ceil(math.log2(len(layers())))


def test_a_cause_that_takes_two_tensors_at_once_needs_one_of_them() -> None:
    sites = ["2/linear.0:fprop.w", "6/linear.0:wgrad.dy"]
    diagnosis = run(Known(sites, lambda count: [math.inf] if count == 2 else HIGH), layers())
    assert [str(tensor) for tensor in diagnosis.culprits] in ([sites[0]], [sites[1]])
    assert "it takes other rounded tensors, too" in diagnosis.summary


def test_what_every_tensor_causes_is_not_blamed_on_one() -> None:
    tensors = layers()
    known = Known(map(str, tensors), lambda count: [2.0 + count / len(tensors)] * STEPS)
    diagnosis = run(known, tensors, most_replays=20)
    assert len(diagnosis.culprits) > len(tensors) / 2
    assert "No few tensors are the cause" in diagnosis.summary
    assert len(diagnosis.records) <= 20 + 8  # those of the remedies come on top


@pytest.mark.parametrize("reference", [[2.0, 3.0, 6.0, 20.0, 1e3, 1e5, 1e8, 1e12], [2.0, 5.0, math.nan]])
def test_a_run_that_diverges_without_rounding_blames_no_operand(reference: list[float]) -> None:
    def replay(plan: Plan, rate: float = 1.0) -> list[float]:
        return HIGH if rate < 0.1 else [2.0, 4.0, math.nan] if plan.rules else reference

    diagnosis = diagnose(replay, PLAN, layers(), Window(5, "The run diverged in step 8."))
    assert (diagnosis.cause, diagnosis.plan, diagnosis.culprits) == ("not the plan", None, ())
    assert diagnosis.rate == 1 / 16
    assert diagnosis.summary.startswith("The run diverged in step 8.")
    assert "no operand is to blame" in diagnosis.summary


def test_a_spike_of_the_reference_alone_is_no_divergence() -> None:
    rising = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0, 3.0]
    known = Known(["1/linear.0:fprop.x"], lambda count: [loss + 2 * bool(count) for loss in rising])
    assert [str(tensor) for tensor in run(known, layers()).culprits] == ["1/linear.0:fprop.x"]


def test_a_loss_within_the_tolerance_is_no_trouble() -> None:
    known = Known(["1/linear.0:fprop.x"], lambda count: [2.0 + 0.03 * bool(count)] * STEPS)
    assert run(known, layers()).cause == "none"
    assert run(known, layers(), tolerance=0.01).cause == "plan"


def test_losses_that_cross_each_other_differ_by_chance() -> None:
    apart = [0.5, -0.4, 0.5, -0.4, -0.4, 0.5, -0.4, 0.5]
    known = Known(["1/linear.0:fprop.x"], lambda count: [2 + difference * bool(count) for difference in apart])
    assert run(known, layers()).cause == "none"


def test_a_cause_besides_the_tensors_is_said_to_be_there() -> None:
    diagnosis = diagnose(lambda plan, rate=1.0: HIGH if not plan.rules else [math.nan], PLAN, layers(2), Window(0))
    assert (diagnosis.cause, diagnosis.culprits, diagnosis.plan) == ("plan", (), None)
    assert "besides rounding" in diagnosis.summary


def test_the_cheapest_remedy_that_is_as_good_as_high_precision_is_chosen() -> None:
    def replay(plan: Plan, rate: float = 1.0) -> list[float]:
        spec = plan.decide("1", "linear.0")["fprop.w"].quantizer
        return [2.0 + {None: 0.0, "bf16": 0.0, "e4m3": 0.01}.get(spec and spec.target.name, 1.0)] * STEPS

    diagnosis = diagnose(replay, PLAN, layers(2), Window(0))
    assert diagnosis.plan is not None
    (*_, rule) = diagnosis.plan.rules
    assert rule.to_data() == {
        "match": "re:1", "op": "linear.0", "fprop.w": {"format": "e4m3", "scale": "tensor"}
    }  # fmt: skip
    assert [record.verdict for record in diagnosis.records][-1] == "mends it"


def test_rules_that_decide_nothing_any_more_are_dropped() -> None:
    rules = [*RULES, {"match": "1", "op": "linear", "dgrad.dy": "e1m2"}]
    plan = Plan.from_dict({"version": 1, "rules": rules})
    tensors = rounded_tensors(plan, record(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)))
    known = Known(["1/linear.0:dgrad.dy"], lambda count: [math.nan] if count else HIGH)
    mended = diagnose(known, plan, tensors, Window(0)).plan
    assert mended is not None
    assert [rule.to_data()["match"] for rule in mended.rules] == ["*", "re:1"]


def test_the_result_prints_and_is_plain_data() -> None:
    diagnosis = run(Known(["1/linear.0:fprop.x"], lambda count: [math.nan] if count else HIGH), layers(2))
    assert str(diagnosis) == diagnosis.summary
    assert "verdict" in str(diagnosis.replays)
    data = diagnosis.to_dict()
    assert data["culprits"] == [{"site": "1/linear.0:fprop.x", "place": "fprop.x", "quantizer": "e2m1"}]
    assert Plan.from_dict(data["plan"]) == diagnosis.plan


@pytest.mark.parametrize("options", [{"tolerance": 0.0}, {"tolerance": 1.5}, {"most_replays": 3}])
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=next(iter(options)).partition("_")[2] or "tolerance"):
        run(Known([], lambda count: HIGH), layers(1), **options)


# --- parts ---


def test_the_tensors_of_a_plan() -> None:
    rules = [
        {"match": "*", "activation": "e4m3", "grad_weight": "e5m2"},
        {"match": "", "op": "scaled_dot_product_attention", "x": "int8"},
    ]

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.fc(x)
            return nn.functional.scaled_dot_product_attention(y, y, y)

    plan = Plan.from_dict({"version": 1, "rules": rules})
    operations = record(Attention(), torch.randn(2, 3, 4), opens=partial(is_decomposed, plan))
    names = [str(tensor) for tensor in rounded_tensors(plan, operations)]
    assert names[-1] == "/scaled_dot_product_attention:wgrad.x"  # rules name its products by the whole operation
    assert "fc/linear.0:activation" in names
    assert "fc/linear.0:grad_weight" in names
    assert "fc/linear.0:fprop.x" not in names
    kept = keep_plan(plan, rounded_tensors(plan, operations))
    assert not rounded_tensors(kept, operations)


def test_halves_are_passes_first_and_then_modules() -> None:
    tensors = layers(4)
    forward, backward = halves(tensors)
    assert {tensor.is_forward for tensor in forward} == {True}
    assert {tensor.is_forward for tensor in backward} == {False}
    first, second = halves(backward)
    assert ({tensor.module for tensor in first}, {tensor.module for tensor in second}) == ({"0", "1"}, {"2", "3"})


@pytest.mark.parametrize(
    ("spec", "place", "expected"),
    [
        (QuantizerSpec("int8", scale="tensor"), "fprop.w", ["int8 channel", "int8 vector", "e4m3 tensor", "bf16"]),
        (QuantizerSpec("e2m1"), "dgrad.dy", ["e2m1 tensor", "e2m1 channel", "e5m2 tensor", "bf16"]),
        (QuantizerSpec("e4m3", scale="tensor", history=4), "fprop.x", ["e4m3 channel", "e4m3 vector", "bf16"]),
        (QuantizerSpec("mxfp4"), "weight", ["e4m3 tensor", "bf16"]),
        (QuantizerSpec("bf16"), "activation", ["bf16 tensor", "bf16 channel"]),
    ],
)
def test_remedies_grow(spec: QuantizerSpec, place: str, expected: list[str]) -> None:
    *uses, last = remedies(RoundedTensor("fc", "linear.0", place, str(spec), spec))
    assert [str(use) for use in uses] == expected
    assert last == "keep"


def test_the_excess_is_that_of_the_worst_quarter() -> None:
    assert excess([2.0] * 6 + [3.0] * 2, [2.0] * 8) == 1.0
    assert excess([1.0] * 8, [2.0] * 8) == -1.0
    assert excess([2.0] * 7, [2.0] * 8) == math.inf
