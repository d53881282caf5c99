"""The plan's word on optimizer state: both texts, what extends what, and the sentences."""

import json
from pathlib import Path

import pytest

from bitplan.errors import PlanError
from bitplan.plans import Plan
from bitplan.plans.spec import STATE_FORMATS, OptimizerRule


@pytest.mark.parametrize("state", [*STATE_FORMATS, "keep"])
def test_both_texts_say_it_both_ways(state: str) -> None:
    plan = Plan.from_yaml(f"version: 1\noptimizer: {{state: {state}}}\nrules: []\n")
    assert plan.optimizer == OptimizerRule(state)
    assert Plan.from_yaml(plan.to_yaml()) == plan == Plan.from_json(plan.to_json())
    assert json.loads(plan.to_json())["optimizer"] == {"state": state}
    assert "optimizer" not in Plan().to_dict()


def test_the_plans_own_word_replaces_the_extended_ones(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("version: 1\noptimizer: {state: int8}\n")
    for own, effect in [("", "int8"), ("optimizer: {state: int4}\n", "int4"), ("optimizer: {state: keep}\n", None)]:
        (tmp_path / "plan.yaml").write_text(f"version: 1\nextends: base.yaml\n{own}")
        plan = Plan.load(tmp_path / "plan.yaml")
        assert (plan.optimizer_rule and plan.optimizer_rule.state) == effect
        assert plan.flattened().optimizer_rule == plan.optimizer_rule
    assert Plan.from_yaml("version: 1").optimizer_rule is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "optimizer: {state: int3}",
            "p.yaml:2: optimizer.state: optimizer state can be kept as int8, int4 or e4m3 (or keep), not as 'int3'.",
        ),
        ("optimizer: {state: 8}", "p.yaml:2: optimizer.state: this must be one of int8, int4, e4m3, keep, not the"),
        ("optimizer: int8", "p.yaml:2: optimizer: this must be a mapping, not the text 'int8'."),
        ("optimizer: {}", "p.yaml:2: optimizer: the key 'state' is missing: add it."),
        ("optimizer: {states: int8}", "p.yaml:2: optimizer: there is no key 'states' here; did you mean state?"),
    ],
)
def test_sentences_name_the_place(text: str, sentence: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_yaml(f"version: 1\n{text}\n", "p.yaml")
    assert str(caught.value).startswith(sentence)
