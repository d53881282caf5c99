"""Whatever is loaded is a plan or a PlanError, and a plan survives every form that it can be written in."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bitplan.errors import PlanError
from bitplan.plans import KEYS, Plan, QuantizerSpec, Rule

WORDS = st.sampled_from(
    [
        *(
            "version",
            "rules",
            "quantizers",
            "match",
            "op",
            "keep",
            "strict",
            "grad_at",
            "format",
            "bits",
            "scale",
            "eval",
        ),
        *("extends", "made_by", "schedules", "until", "use", "then", "promote", "at", "axis", "block", "range"),
        *("e4m3", "int8", "uint8", "mxfp8", "int", "float", "low", "*", "re:(", "tensor", "channel", "consumer"),
        *KEYS,
    ]
)
SCALARS = st.one_of(WORDS, st.text(max_size=6), st.integers(-3, 40), st.floats(), st.booleans(), st.none())
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=5), max_leaves=25
)


@given(st.one_of(st.text(), st.text("-:[]{}&*!|>'\"%@?#, \n\tae1.~", max_size=60)))
@settings(max_examples=400)
def test_any_text_gives_a_plan_or_a_plan_error(text: str) -> None:
    for read in (Plan.from_yaml, Plan.from_json):
        try:
            assert isinstance(read(text), Plan)
        except PlanError as error:
            assert str(error).startswith("plan")  # noqa: PT017


@given(TREES)
@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
def test_any_mapping_gives_a_plan_or_a_plan_error(tree: Any) -> None:
    for data in (
        tree,
        {"version": 1, "rules": tree},
        {"version": 1, "rules": [tree]},
        {"version": 1, "quantizers": tree},
    ):
        try:
            plan = Plan.from_dict(data)
        except PlanError:
            continue
        assert Plan.from_dict(plan.to_dict()) == plan


QUANTIZERS = st.sampled_from(
    [
        QuantizerSpec("bf16"),
        QuantizerSpec("int", bits=5),
        QuantizerSpec("int8", scale="channel", eval="top"),
        "low",
        "keep",
    ]
)
RULES = st.builds(
    lambda match, op, places, strict: Rule(
        tuple(match),
        tuple(op),
        tuple(places.items()),
        "consumer" if "grad_activation" in places else None,
        strict=strict,
    ),
    st.lists(st.text(max_size=6).filter(lambda text: not text.startswith("re:")), min_size=1, max_size=2),
    st.lists(st.text(min_size=1, max_size=6).filter(lambda text: not text.startswith("re:")), max_size=2),
    st.dictionaries(st.sampled_from(["weight", "grad_activation", "x", "dgrad", "fprop.w"]), QUANTIZERS, min_size=1),
    st.booleans(),
)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.lists(RULES, max_size=3),
    st.none() | st.text(min_size=1),
    st.none() | st.text() | st.dictionaries(st.text(), JSON_VALUES, max_size=3),
)
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
def test_any_plan_round_trips_through_every_form(rules: list[Rule], name: str | None, made_by: Any) -> None:
    plan = Plan(tuple(rules), {"low": QuantizerSpec("e4m3", scale="tensor")}, name=name, made_by=made_by)
    assert Plan.from_dict(plan.to_dict()) == plan
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_yaml(plan.to_yaml()) == plan
