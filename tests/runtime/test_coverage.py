"""Rules without effect raise, and the coverage says which products a plan rounds."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bitplan
from bitplan import Plan
from bitplan.errors import BitplanWarning, PlanError
from bitplan.runtime.coverage import ProductCoverage

F8 = {"format": "e4m3", "scale": "tensor"}


def plan_of(*rules: dict[str, Any]) -> Plan:
    return Plan.from_dict({"version": 1, "rules": list(rules)})


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def trained(model: nn.Module, plan: Plan, **options: Any) -> None:
    """One step without an example."""
    with bitplan.attach(model, plan, **options) as run:
        model(torch.randn(3, 8)).sum().backward()
        run.step()


# --- rules without effect ---


def test_a_pattern_that_no_module_fits_raises_when_attached() -> None:
    plan = plan_of({"match": "*", "weight": F8}, {"match": "layer7", "activation": F8})
    model = mlp()
    with pytest.raises(PlanError, match="layer7"):
        bitplan.attach(model, plan)
    bitplan.attach(model, "fp8-all").detach()  # nothing was left behind


def test_an_operation_or_a_loss_that_is_not_known_yet_waits() -> None:
    for rule in ({"match": "*", "op": "gelu", "activation": F8}, {"match": "loss", "activation": F8}):
        bitplan.attach(mlp(), plan_of(rule)).detach()


def test_with_strict_false_it_is_warned_of_once() -> None:
    plan = plan_of({"match": "*", "weight": F8}, {"match": "layer7", "activation": F8, "strict": False})
    with pytest.warns(BitplanWarning, match="layer7") as warned:
        trained(mlp(), plan)
    assert len(warned) == 1


OVERRIDDEN = [
    [{"match": "0", "weight": F8}, {"match": "*", "weight": "bf16"}],
    [{"match": "0", "x": F8, "w": F8}, {"match": "0", "x": "bf16"}, {"match": "*", "w": "bf16"}],
    [{"match": "*", "weight": F8}, {"match": "2", "keep": True}, {"match": "*", "op": "linear", "weight": "bf16"}],
]
UNCHANGED = [
    [{"match": "*", "activation": "fp32"}],
    [{"match": "*", "weight": F8}, {"match": "*", "activation": "fp32", "grad_activation": "fp32"}],
    [{"match": "*", "activation": {"until": "50%", "use": "fp32", "then": "keep"}}],
]


@pytest.mark.parametrize("has_example", [True, False])
@pytest.mark.parametrize("rules", [*OVERRIDDEN, *UNCHANGED])
def test_a_rule_that_is_overridden_everywhere_or_changes_nothing_raises(
    rules: list[dict[str, Any]], has_example: bool
) -> None:
    model = mlp()
    plan = plan_of(*rules)
    expected = "override" if rules in OVERRIDDEN else "changes nothing"
    with pytest.raises(PlanError, match=expected):
        trained(model, plan, steps=4, **({"example": torch.randn(3, 8)} if has_example else {}))
    lenient = plan_of(*({**rule, "strict": False} for rule in rules))
    with pytest.warns(BitplanWarning, match=expected):
        bitplan.attach(mlp(), lenient, steps=4, example=torch.randn(3, 8)).detach()


@pytest.mark.parametrize(
    ("rules", "options"),
    [
        ([{"match": "*", "weight": F8}, {"match": "0", "weight": "bf16"}], {}),
        ([{"match": "*", "weight": F8, "activation": F8}, {"match": "*", "weight": "bf16"}], {}),
        ([{"match": "*", "weight": F8}, {"match": "0", "weight": "fp32"}], {}),  # as keep
        ([{"match": "*", "op": "linear", "weight": F8}, {"match": "1", "keep": True}], {}),
        ([{"match": "*", "weight": F8, "activation": "fp32"}], {}),
        ([{"match": "*", "activation": {"until": "50%", "use": "fp32", "then": "bf16"}}], {"steps": 4}),
        ([{"match": "*", "activation": "fp32"}], {"mutable_formats": True}),
        ([{"match": "*", "activation": "fp32"}], {"stats": True}),
    ],
)
def test_a_rule_with_some_effect_is_accepted(rules: list[dict[str, Any]], options: dict[str, Any]) -> None:
    bitplan.attach(mlp(), plan_of(*rules), example=torch.randn(3, 8), **options).detach()
    trained(mlp(), plan_of(*rules), **options)


def test_the_dtype_of_the_model_decides_what_changes_nothing() -> None:
    plan = plan_of({"match": "*", "activation": "bf16"})
    bitplan.attach(mlp(), plan, example=torch.randn(3, 8)).detach()
    with pytest.raises(PlanError, match="bfloat16"):
        bitplan.attach(mlp().bfloat16(), plan, example=torch.randn(3, 8).bfloat16())


# --- products ---


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        return nn.functional.scaled_dot_product_attention(x, x, x)


#: Multiply-accumulates of the layer's three passes, and of those of one of attention's two products.
LAYER, SCORES = 3 * 2 * 5 * 8 * 8, 3 * 2 * 5 * 5 * 8


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"match": "*", "op": "linear", "x": F8}, (1, LAYER * 2 // 3)),
        ({"match": "*", "op": "linear", "weight": F8}, (1, LAYER * 2 // 3)),
        ({"match": "*", "op": "linear", "fprop.x": F8}, (1, LAYER // 3)),
        # Not the gradient of the values, which multiplies two tensors inside attention.
        ({"match": "enter", "activation": F8}, (2, 2 * SCORES - SCORES // 3)),
        ({"match": "*", "weight": F8, "activation": F8, "grad_activation": F8}, (3, LAYER + 2 * SCORES)),
    ],
)
def test_products_with_a_rounded_operand_are_counted_by_pass(
    rule: dict[str, Any], expected: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "bitplan"):
        run = bitplan.attach(Attends(), plan_of(rule), example=torch.randn(2, 5, 8))
    coverage = run.coverage()
    run.detach()
    assert (coverage.rounded_products, coverage.rounded_macs) == expected
    assert (coverage.products, coverage.macs) == (3, LAYER + 2 * SCORES)
    assert coverage.macs == run.cost().training_macs
    assert str(coverage) in caplog.text
    rounded = {"enter/linear.0"} if {"op", "weight"} & set(rule) else set()
    rounded |= {"/scaled_dot_product_attention.0"} if "activation" in rule else set()
    assert set(coverage.unrounded) == {"enter/linear.0", "/scaled_dot_product_attention.0"} - rounded


def test_a_coverage_reads_as_a_sentence() -> None:
    whole = ProductCoverage(14, 12, 100, 93, unrounded=("head/linear.0",), uncounted=("/multi_dot.0",))
    assert "12 of 14 products, 93 % of multiplications" in str(whole)
    assert "head/linear.0" in str(whole)
    assert "/multi_dot.0" in str(whole)
    assert "over 99 %" in str(ProductCoverage(2, 2, 1000, 999))
    assert "under 1 %" in str(ProductCoverage(2, 2, 1000, 1))
    assert whole.to_dict()["share"] == 0.93
