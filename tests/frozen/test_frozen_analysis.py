"""What tables, memory and planners say of frozen weights."""

import pytest
import torch
from frozen_models import NF4, batch, make, plan

import bitplan as bp
from bitplan.analysis.explain import explain
from bitplan.analysis.memory import measure_memory
from bitplan.errors import PlanError
from bitplan.plans.frozen import FrozenSpec


@pytest.mark.parametrize("is_attached", [False, True])
def test_tables_say_what_frozen_weights_are_stored_in(is_attached: bool) -> None:
    model = make()
    document = bp.Plan.from_dict(plan(NF4, {"match": "first", "op": "linear", "w": "e4m3"}))
    if is_attached:
        table = bp.attach(model, document, example=batch(), execution="packed").table()
    else:
        table = explain(model, document, batch())
    rows = {row.site.parameter: row for row in table if row.site.role == "weight"}
    stored = {"first.base.weight", "second.base.weight"}
    assert {name for name, row in rows.items() if row.frozen is not None} == stored
    assert {rows[name].words for name in stored} == {"frozen in nf4 block 64"}
    assert {rows[name].rule for name in stored} == {0}


def test_explain_raises_where_frozen_has_no_effect() -> None:
    document = bp.Plan.from_dict(plan({"match": "first.down", "frozen": "nf4"}))
    with pytest.raises(PlanError, match="trained"):
        explain(make(), document, batch())


def test_frozen_weights_are_a_class_of_memory() -> None:
    model = make()
    plain = bp.estimate_memory(model, batch())
    assert plain.frozen == 4 * (2 * 96 * 128 + 128)
    assert plain.weights == 4 * 2 * 4 * (96 + 128)
    small = bp.estimate_memory(model, batch(), plan=bp.Plan.from_dict(plan(NF4)), execution="packed")
    measured = measure_memory(model, batch(), plan=bp.Plan.from_dict(plan(NF4)), execution="packed")
    assert small.frozen == measured.frozen
    assert small.frozen - 4 * 128 < 0.54 * 2 * 96 * 128  # the bias is not stored in few bits
    assert small.weights == plain.weights
    assert abs(small.activations - measured.activations) <= 0.1 * measured.activations
    assert "frozen" in str(small)
    trained = bp.estimate_memory(torch.nn.Linear(4, 4), torch.zeros(1, 4))
    assert "frozen" not in str(trained)
    assert "frozen" not in trained.to_dict()


@pytest.mark.parametrize(
    ("value", "token"),
    [
        ("bf16", "bf16"),
        ("uint8", "uint8"),
        ({"format": "nf4", "scale": "vector"}, "vector"),
        ({"format": "mxfp4", "scale": "block"}, "mxfp4"),
        ({"format": "nf4", "scale": "tensor", "block": 64}, "block"),
        ({"format": "nf4", "history": 3}, "history"),
        (4, "mapping"),
        ("nf5", "nf5"),
    ],
)
def test_what_frozen_cannot_be_is_said_when_a_plan_is_loaded(value: object, token: str) -> None:
    with pytest.raises(PlanError, match=token):
        bp.Plan.from_dict(plan({"match": "*", "frozen": value}))


def test_a_plan_with_frozen_round_trips() -> None:
    document = bp.Plan.from_dict(plan(NF4, {"match": "a", "frozen": {"format": "int4", "block": 32, "scale": "block"}}))
    assert bp.Plan.from_yaml(document.to_yaml()) == document
    assert document.frozen_at("a", "linear")[0] == FrozenSpec("int4", "block", 32)
    assert document.frozen_at("b", "linear") == (FrozenSpec("nf4"), 0)
    with pytest.raises(PlanError, match="select"):
        bp.Plan.from_dict(plan({"select": "gate", "frozen": "nf4"}))
    with pytest.raises(PlanError, match="keep"):
        bp.Plan.from_dict(plan({"match": "*", "keep": True, "frozen": "nf4"}))
