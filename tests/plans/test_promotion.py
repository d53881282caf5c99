"""The grammar of promotion."""

from __future__ import annotations

from typing import Any

import pytest

from bitplan import Plan
from bitplan.errors import PlanError
from bitplan.plans.spec import Promotion, QuantizerSpec

BF16 = QuantizerSpec("bf16")


def plan_of(activation: Any, **quantizers: Any) -> Plan:
    rules = [{"match": "*", "activation": activation}]
    return Plan.from_dict({"version": 1, "quantizers": quantizers, "rules": rules})


def promotion_in(plan: Plan) -> Promotion:
    spec = plan.decide("fc", "linear")["activation"].quantizer
    assert spec is not None
    assert spec.promote is not None
    return spec.promote


@pytest.mark.parametrize(
    ("to", "target"),
    [
        ("bf16", BF16),
        ("high", BF16),
        ("another", BF16),
        ("keep", None),
        ({"format": "e5m2", "scale": "tensor"}, QuantizerSpec("e5m2", scale="tensor")),
    ],
)
def test_what_a_promotion_leads_to_is_a_format_a_name_a_mapping_or_nothing(to: Any, target: QuantizerSpec) -> None:
    plan = plan_of({"format": "e4m3", "promote": {"to": to}}, high="bf16", another="high")
    promotion = promotion_in(plan)
    assert promotion.target == target
    assert (promotion.measure, promotion.limit) == ("overflow", 0.01)


def test_it_is_written_as_it_is_read() -> None:
    low = {"format": "e4m3", "scale": "tensor", "promote": {"to": "high", "underflow": 0.05}}
    plan = plan_of("low", low=low, high={"format": "e5m10", "rounding": "stochastic"})
    assert plan.to_dict()["quantizers"]["low"] == low
    for again in (Plan.from_dict(plan.to_dict()), Plan.from_yaml(plan.to_yaml()), Plan.from_json(plan.to_json())):
        assert again == plan
        assert promotion_in(again) == promotion_in(plan)
    text = str(plan.decide("fc", "linear")["activation"].quantizer)
    assert text == "e4m3 tensor (promoted to fp16 stochastic at underflow 0.05)"


@pytest.mark.parametrize(
    ("low", "message"),
    [
        ({"format": "e4m3", "promote": {}}, "'to' is missing"),
        ({"format": "e4m3", "promote": {"to": "hihg"}}, "no quantizer or number format 'hihg'; did you mean high"),
        ({"format": "e4m3", "promote": {"to": "bf16", "overflow": 0}}, "above 0 and at most 1"),
        ({"format": "e4m3", "promote": {"to": "bf16", "overflow": True}}, "a number above 0"),
        ({"format": "e4m3", "promote": {"to": "bf16", "error": "1e-2"}}, "write it as 0.01"),
        ({"format": "e4m3", "promote": {"to": "bf16", "error": 0.1, "overflow": 0.1}}, "one sign, not overflow and"),
        ({"format": "e4m3", "scale": "tensor", "promote": {"to": "bf16"}}, "could never fire"),
        ({"format": "mxfp8", "promote": {"to": "bf16", "overflow": 0.5}}, "could never fire"),
        ({"format": "bf16", "promote": {"to": "e4m3"}}, "e4m3 has fewer bits than bf16"),
        ({"format": "bf16", "promote": {"to": "high"}}, "the same quantizer"),
        ({"format": "e4m3", "promote": {"to": "chain"}}, "not promoted again"),
        ({"format": "e4m3", "promote": {"to": "later"}}, "does not change over time"),
        ({"format": "int4", "promote": {"to": {"format": "int", "bits": "cpt"}}}, "follows no schedule"),
    ],
)
def test_mistakes_are_sentences_with_their_place(low: Any, message: str) -> None:
    data = {
        "version": 1,
        "schedules": {"cpt": {"name": "CR", "low": 4, "high": 8}},
        "quantizers": {
            "high": "bf16",
            "chain": {"format": "e5m2", "promote": {"to": "bf16"}},
            "later": {"until": "50%", "use": "bf16", "then": "fp16"},
        },
        "rules": [{"match": "*", "activation": low}],
    }
    with pytest.raises(PlanError) as error:
        Plan.from_dict(data)
    assert message in str(error.value)
    assert "rules[0].activation" in str(error.value)
