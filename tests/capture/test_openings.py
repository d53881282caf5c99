from __future__ import annotations

from typing import Any

import pytest

from bitplan.capture.decompositions import decision_for, is_decomposed
from bitplan.plans import Plan

ATTENTION = "scaled_dot_product_attention"


def plan_of(*rules: dict[str, Any]) -> Plan:
    return Plan.from_dict({"version": 1, "rules": list(rules)})


@pytest.mark.parametrize(
    ("rule", "opened"),
    [
        ({"op": "matmul", "x": "int8"}, {ATTENTION}),
        ({"op": "matmul.1", "x": "int8"}, {ATTENTION}),
        ({"op": "re:matmul", "x": "int8"}, {ATTENTION}),
        ({"op": "softmax", "activation": "int8"}, {ATTENTION}),
        ({"op": "linear", "x": "int8"}, {"lstm", "gru", "rnn_tanh", "rnn_relu"}),
        ({"op": ATTENTION, "x": "int8"}, {ATTENTION}),
        ({"op": "lstm", "dgrad.dy": "int8"}, {"lstm"}),
        ({"x": "int8"}, {ATTENTION, "lstm", "gru", "rnn_tanh", "rnn_relu"}),
        # What is around a fused operation asks for nothing inside it.
        ({"activation": "int8", "weight": "int8"}, set()),
        ({"op": ATTENTION, "activation": "int8"}, set()),
        ({"op": "*", "activation": "int8"}, set()),
        ({"op": "conv2d", "x": "int8"}, set()),
        ({"op": "matmul", "keep": True}, set()),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),  # the same in every process
)
def test_a_fused_operation_is_opened_when_and_only_when_a_rule_asks_for_something_inside(
    rule: dict[str, Any], opened: set[str]
) -> None:
    plan = plan_of({"match": "block", **rule})
    fused = (ATTENTION, "lstm", "gru", "rnn_tanh", "rnn_relu", "conv2d", "linear")
    assert {op for op in fused if is_decomposed(plan, "block.attention", op)} == opened
    assert not any(is_decomposed(plan, "elsewhere", op) for op in fused)


def test_products_inside_follow_the_slots_of_the_operation_around_them() -> None:
    plan = plan_of({"match": "*", "op": ATTENTION, "x": "int4"}, {"match": "*", "op": "matmul", "x": "int8"})
    inside = decision_for(plan.decide, "block", "matmul.0", inside=ATTENTION)
    alone = decision_for(plan.decide, "block", "matmul.0")
    assert [str(decision["fprop.x"].quantizer) for decision in (inside, alone)] == ["int4", "int8"]


def test_where_the_operation_around_has_no_slots_its_insides_follow_their_own_rules() -> None:
    plan = plan_of({"match": "*", "op": ATTENTION, "activation": "int4"}, {"match": "*", "op": "matmul", "x": "int8"})
    decision = decision_for(plan.decide, "block", "matmul.0", inside=ATTENTION)
    assert str(decision["fprop.x"].quantizer) == "int8"
    assert decision["activation"].quantizer is None
    assert decision_for(plan.decide, "block", "softmax.0", inside=ATTENTION)["activation"].quantizer is None
