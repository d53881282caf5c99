from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from bitplan.errors import PlanError
from bitplan.numerics.quantizer import make_quantizer
from bitplan.plans import KEYS, OPERANDS, PLACES, SLOTS, Plan, QuantizerSpec, Rule
from bitplan.plans.match import CONFLICTS


def plan_of(*rules: dict[str, object], **more: object) -> Plan:
    return Plan.from_dict({"version": 1, "rules": list(rules), **more})


def format_at(plan: Plan, place: str, module: str = "a.b", op: str = "linear") -> str | None:
    quantizer = plan.decide(module, op)[place].quantizer
    return None if quantizer is None else quantizer.format


@pytest.mark.parametrize(
    ("written", "printed"), [("E4M3", "e4m3"), (" bf16 ", "bf16"), ("e8m7", "bf16"), ("mxfp8e4m3", "mxfp8")]
)
def test_a_format_is_kept_by_its_canonical_name(written: str, printed: str) -> None:
    assert QuantizerSpec(written).format == printed
    assert QuantizerSpec(written) == QuantizerSpec(printed)


@pytest.mark.parametrize(
    ("spec", "target"),
    [
        (QuantizerSpec("int", bits=5), "int5"),
        (QuantizerSpec("INT", bits=5), "int5"),
        (QuantizerSpec("float", bits=16), "bf16"),
        (QuantizerSpec("float", bits=32), "fp32"),
        (QuantizerSpec("float", bits=8, exponent_bits=4), "e4m3"),
        (QuantizerSpec("float", bits=16, exponent_bits=5), "fp16"),
    ],
)
def test_a_family_gets_its_width_from_bits(spec: QuantizerSpec, target: str) -> None:
    assert spec.target.name == target


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ({"format": "int"}, "format: int needs bits"),
        ({"format": "float", "bits": 8}, "8 exponent bits has 9 to 32 bits, not 8"),
        ({"format": "int", "bits": 17}, "2 to 16 bits, not 17"),
        ({"format": "int", "bits": 8, "exponent_bits": 4}, "exponent_bits belong to format: float"),
        ({"format": "int8", "bits": 8}, "'int8' fixes its bits"),
        ({"format": "e4m3", "range": "minmax"}, "give scale= too"),
        ({"format": "e4m3", "range": "minmax", "scale": "tensor"}, "min-max range serves integer formats"),
        ({"format": "e4m3", "scale": "tensor", "axis": 0}, "one scale and no axis"),
        ({"format": "e4m3", "scale": "block"}, "needs block="),
        ({"format": "e4m3", "block": (2, 2)}, "give scale="),
        ({"format": "e4m3", "scale": "block", "block": (2, 0)}, "needs block="),
        ({"format": "e4m3", "scale": "block", "block": (2, 2), "axis": 0}, "drop axis"),
        ({"format": "mxfp8", "block": 16}, "drop block="),
        ({"format": "mxfp8", "scale": "tensor"}, "brings its own block scales"),
        ({"format": "int8", "overflow": "special"}, "no special codes"),
        ({"format": "uint8"}, "steps above a minimum"),
        ({"format": "e4m3", "axis": 1}, "axis= goes with a scale"),
        ({"format": "e4m3", "eval": "ema"}, "needs scale: tensor"),
        ({"format": "e4m3", "scale": "channel", "eval": "ema"}, "needs scale: tensor"),
        ({"format": "e4m3", "scale": "vector", "eval": "ema"}, "needs scale: tensor"),
        ({"format": "e4m3", "eval": "never"}, "there is no eval 'never'"),
        ({"format": "e4m3", "rounding": "up"}, "there is no rounding 'up'"),
        ({"format": 8}, "given by its name"),
        ({"format": "e" + "9" * 5000 + "m3"}, "digits"),
    ],
)
def test_an_impossible_quantizer_is_refused_when_it_is_made(arguments: dict[str, object], advice: str) -> None:
    with pytest.raises(PlanError, match=advice):
        QuantizerSpec(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "meaning"),
    [
        (QuantizerSpec("int8", scale="channel"), "kept"),
        (QuantizerSpec("int8", scale="vector"), "summed"),
        (QuantizerSpec("int8", scale="block", block=32), "summed"),
        (QuantizerSpec("mxfp8"), "summed"),
        (QuantizerSpec("int8", scale="channel", axis=1), None),
        (QuantizerSpec("mxfp8", axis=1), None),
        (QuantizerSpec("int8", scale="tensor"), None),
        (QuantizerSpec("bf16"), None),
    ],
)
def test_the_role_chooses_the_axis_only_where_the_plan_left_it_open(spec: QuantizerSpec, meaning: str | None) -> None:
    assert spec.axis_meaning == meaning
    chosen = 2 if meaning else spec.axis
    expected = make_quantizer(spec.format, scale=spec.scale, axis=chosen, block=spec.block)
    assert spec.resolve(axis_default=2) == expected


def test_a_channel_scale_without_any_axis_says_so() -> None:
    with pytest.raises(ValueError, match="needs axis="):
        QuantizerSpec("int8", scale="channel").resolve()


def test_every_option_reaches_the_quantizer() -> None:
    spec = QuantizerSpec(
        "int8", scale="tensor", range="minmax", power_of_two=True, rounding="stochastic", overflow="saturate"
    )
    made = spec.resolve()
    assert made.scaling is not None
    assert (made.rounding, made.overflow) == ("stochastic", "saturate")
    assert (made.scaling.range, made.scaling.power_of_two) == ("minmax", True)


def test_a_quantizer_prints_what_is_not_default() -> None:
    assert QuantizerSpec("e4m3").to_data() == "e4m3"
    assert QuantizerSpec("int", bits=8).to_data() == {"format": "int", "bits": 8}
    spec = QuantizerSpec("int8", scale="tensor", range="minmax", rounding="stochastic", eval="ema")
    assert str(spec) == "int8 tensor minmax stochastic eval=ema"


def test_rules_made_in_python_are_checked_as_those_in_files() -> None:
    e4m3 = QuantizerSpec("e4m3")
    with pytest.raises(PlanError, match="match is empty"):
        Rule((), quantizers=(("x", e4m3),))
    with pytest.raises(PlanError, match="there is no place 'wieght' to round; did you mean weight"):
        Rule(("*",), quantizers=(("wieght", e4m3),))
    with pytest.raises(PlanError, match="given twice"):
        Rule(("*",), quantizers=(("x", e4m3), ("x", e4m3)))
    with pytest.raises(PlanError, match="not a regular expression"):
        Rule(("re:(",), keep=True)
    with pytest.raises(PlanError, match=r"rules\[0\].x: there is no quantizer or number format 'low'"):
        Plan(rules=(Rule(("*",), quantizers=(("x", "low"),)),))
    with pytest.raises(PlanError, match="give both or neither"):
        Plan(extends="fp8-linear")
    with pytest.raises(PlanError, match="version 1, not 2"):
        Plan(version=2)
    with pytest.raises(PlanError, match="mappings, lists, texts and numbers"):
        Plan(made_by={"by": object()})


@pytest.mark.parametrize(("first", "second"), CONFLICTS)
def test_two_keys_for_one_place_are_an_error(first: str, second: str) -> None:
    assert set(KEYS[first]) & set(KEYS[second])
    with pytest.raises(PlanError, match=r"both say what .* gets: drop one of them"):
        plan_of({"match": "*", first: "e4m3", second: "bf16"})


def test_every_overlap_of_the_shorthands_is_known() -> None:
    # Each of x, w, dy meets two passes and two slots; each pass two slots.
    assert len(CONFLICTS) == 3 * 2 + 3 * 2 + 3 * 2


def test_an_operand_is_shared_and_a_pass_is_not() -> None:
    shared = plan_of({"match": "*", "x": "e4m3", "w": "e4m3", "dy": "e5m2"}).decide("a", "linear")
    for operand, slots in OPERANDS.items():
        assert {shared[slot].share for slot in slots} == {f"{operand} of rules[0]"}
    apart = plan_of({"match": "*", "fprop": "e4m3", "dgrad": "e4m3", "wgrad": "bf16"}).decide("a", "linear")
    assert {apart[slot].share for slot in SLOTS} == {None}
    assert [apart[slot].quantizer.format for slot in ("fprop.x", "dgrad.w", "wgrad.x")] == ["e4m3", "e4m3", "bf16"]


def test_a_later_slot_overrides_only_that_slot_of_a_shorthand_and_ends_the_sharing() -> None:
    decision = plan_of({"match": "*", "x": "e4m3"}, {"match": "a", "fprop.x": "bf16"}).decide("a", "linear")
    assert (decision["fprop.x"].quantizer.format, decision["fprop.x"].rule) == ("bf16", 1)
    assert (decision["wgrad.x"].quantizer.format, decision["wgrad.x"].rule) == ("e4m3", 0)
    assert decision["wgrad.x"].share is None


def test_later_rules_override_place_by_place() -> None:
    plan = plan_of({"match": "*", "weight": "bf16", "activation": "bf16"}, {"match": "a", "weight": "e4m3"})
    assert (format_at(plan, "weight"), format_at(plan, "activation")) == ("e4m3", "bf16")
    assert format_at(plan, "weight", "other") == "bf16"


def test_keep_leaves_everything_alone_and_a_later_rule_may_speak_again() -> None:
    plan = plan_of({"match": "*", "weight": "bf16", "x": "e4m3"}, {"match": "a", "keep": True})
    decision = plan.decide("a.b", "linear")
    assert decision.changes_nothing
    assert {decision[place].rule for place in PLACES} == {1}
    again = plan_of({"match": "*", "weight": "bf16"}, {"match": "a", "keep": True}, {"match": "a.b", "weight": "e4m3"})
    assert format_at(again, "weight") == "e4m3"


def test_the_word_keep_leaves_one_place_alone() -> None:
    plan = plan_of({"match": "*", "weight": "bf16", "x": "e4m3"}, {"match": "a", "weight": "keep", "fprop.x": "keep"})
    decision = plan.decide("a", "linear")
    assert decision["weight"].quantizer is None
    assert decision["weight"].rule == 1
    assert decision["fprop.x"].quantizer is None
    assert decision["wgrad.x"].quantizer.format == "e4m3"


def test_where_no_rule_speaks_there_is_no_rule_to_name() -> None:
    decision = Plan().decide("a", "linear")
    assert decision.changes_nothing
    assert {decision[place].rule for place in PLACES} == {None}
    assert set(decision.choices) == set(PLACES)


def test_grad_at_follows_the_rule_that_set_grad_activation() -> None:
    plan = plan_of(
        {"match": "*", "grad_activation": "e5m2", "grad_at": "consumer"},
        {"match": "a", "grad_activation": "bf16"},
        {"match": "b", "weight": "bf16"},
    )
    assert plan.decide("a", "add").grad_at == "producer"
    assert plan.decide("b", "add").grad_at == "consumer"


def test_the_nested_form_of_grad_at_is_the_same_rule() -> None:
    nested = plan_of({"match": "*", "grad_activation": {"format": "e5m2", "at": "consumer"}})
    assert nested == plan_of({"match": "*", "grad_activation": "e5m2", "grad_at": "consumer"})
    default = plan_of({"match": "*", "grad_activation": {"format": "e5m2", "at": "producer"}})
    assert default == plan_of({"match": "*", "grad_activation": "e5m2"})
    with pytest.raises(PlanError, match="both say where"):
        plan_of({"match": "*", "grad_activation": {"format": "e5m2", "at": "consumer"}, "grad_at": "consumer"})


def test_names_stand_for_quantizers_wherever_one_is_expected() -> None:
    names = {"high": "bf16", "low": {"format": "e4m3", "scale": "tensor"}, "other": "low"}
    plan = plan_of({"match": "*", "weight": "high", "x": "other"}, quantizers=names)
    assert format_at(plan, "weight") == "bf16"
    assert plan.decide("a", "linear")["fprop.x"].quantizer == QuantizerSpec("e4m3", scale="tensor")
    assert plan.to_dict()["quantizers"] == names


def test_the_order_of_keys_does_not_matter() -> None:
    one = plan_of({"match": "*", "weight": "bf16", "x": "e4m3"})
    assert one == plan_of({"x": "e4m3", "weight": "bf16", "match": ["*"]})


def test_a_plan_can_be_copied_and_pickled_also_after_use() -> None:
    plan = Plan.preset("int8-minmax")
    plan.decide("a", "linear")
    assert copy.deepcopy(plan) == plan
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan
    assert again.decide("a", "linear") == plan.decide("a", "linear")


def test_a_rule_with_selectors_needs_no_match_and_is_written_without_it() -> None:
    data = {"select": ["saved", "not gate"], "min_elements": 4, "activation": "e4m3", "strict": False}
    (rule,) = Plan.from_dict({"version": 1, "rules": [data]}).rules
    assert rule.match == ("*",)
    assert rule.has_selectors
    assert rule.selection == "saved, not gate, min_elements: 4"
    assert rule.to_data() == data
    assert Rule(("fc",), select=("gate",), keep=True).to_data() == {"match": "fc", "select": "gate", "keep": True}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"select": ("gates",)}, "did you mean gate"),
        ({"select": ("gate", "not gate")}, "both 'gate' and 'not gate'"),
        ({"min_elements": 2, "max_elements": 1}, "swap them"),
    ],
)
def test_selectors_that_nothing_can_fulfil_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Rule(("*",), keep=True, **options)
