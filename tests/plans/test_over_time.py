"""Plans whose quantizers change during a run: reading, checking, printing, and what they are at some moment."""

from __future__ import annotations

import pytest

from bitplan.errors import PlanError
from bitplan.plans import Choosing, Plan, QuantizerSpec, Rule, Switch
from bitplan.plans.schedules import Position, RunPoint, schedule

#: The examples of those who asked for plans.
CYCLIC = """
version: 1
schedules: {cpt: {name: CR, low: 3, high: 8, cycles: 8}}
rules:
- match: "*"
  op: [conv2d, linear]
  w:  {format: int, bits: cpt, scale: channel, range: minmax}
  x:  {format: int, bits: cpt, scale: tensor, range: minmax, eval: ema}
  dy: {format: int8, scale: tensor, range: minmax, rounding: stochastic}
- {match: fc, keep: true}
"""
LATE = """
version: 1
quantizers:
  f8: {until: 90%, use: {format: e4m3, scale: vector}, then: bf16}
  g8: {until: 90%, use: {format: e5m2, scale: vector}, then: bf16}
rules:
- {match: "*", op: linear, fprop: f8, dgrad.dy: g8, dgrad.w: f8, wgrad: bf16}
- {match: lm_head, keep: true}
"""
CHOOSING = """
version: 1
schedules: {steps: {name: steps, bits: [4, 8, 16], at: [50%, 900]}}
quantizers: {high: bf16}
rules:
- {match: "*", weight: {by: steps, choose: {4: mxfp4, 8: {format: e4m3, scale: tensor}, 16: high}}}
"""


@pytest.mark.parametrize("text", [CYCLIC, LATE, CHOOSING])
def test_plans_go_round(text: str) -> None:
    plan = Plan.from_yaml(text)
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_dict(plan.to_dict()).to_yaml() == plan.to_yaml()
    assert plan.moves


def test_a_plan_without_time_does_not_move() -> None:
    assert not Plan.preset("fp8-linear").moves
    unused = Plan.from_dict({"version": 1, "schedules": {"a": {"name": "CR", "low": 3, "high": 8}}})
    assert not unused.moves


def test_bits_that_a_schedule_moves() -> None:
    plan = Plan.from_yaml(CYCLIC)
    choice = plan.decide("conv1", "conv2d")["fprop.w"]
    assert choice.quantizer is not None
    assert choice.quantizer.moved_by == schedule("CR", low=3, high=8)
    assert choice.quantizer.target.name == "int8"
    assert choice.words == "int CR 3-8 x8 channel minmax"
    assert choice.quantizer.with_bits(3).target.name == "int3"
    fixed = plan.at(Position(0, 64000), fixed=True).decide("conv1", "conv2d")
    assert [str(fixed[slot].quantizer) for slot in ("fprop.w", "wgrad.x", "wgrad.dy")] == [
        "int3 channel minmax",
        "int3 tensor minmax eval=ema",
        "int8 tensor minmax stochastic",
    ]
    assert fixed["fprop.w"].share == "w of rules[0]"


def test_floats_move_their_mantissa() -> None:
    text = "version: 1\nschedules: {s: {name: LR, low: 4, high: 8}}\nrules: [{match: '*', w: {format: float, bits: s"
    plan = Plan.from_yaml(f"{text}, exponent_bits: 3}}}}]")
    spec = plan.decide("a", "linear")["fprop.w"].quantizer
    assert spec is not None
    assert [spec.with_bits(bits).target.name for bits in (4, 6, 8)] == ["e3m0", "e3m2", "e3m4"]
    assert str(spec) == "e3 float LR 4-8 x8"
    with pytest.raises(PlanError, match=r"a float with 8 exponent bits has 9 to 32 bits, not 4"):
        Plan.from_yaml(f"{text}}}}}]")


def test_whole_quantizers_switch() -> None:
    plan = Plan.from_yaml(LATE)
    choice = plan.decide("mlp", "linear")["fprop.x"]
    assert str(choice.quantizer) == "e4m3 vector"
    assert choice.words == "e4m3 vector until 90%, then bf16"
    assert choice.name == "f8"
    for step, words in [(0, "e4m3 vector"), (899, "e4m3 vector"), (900, "bf16"), (999, "bf16")]:
        at = plan.at(Position(step, 1000))
        assert not at.moves
        assert str(at.decide("mlp", "linear")["fprop.x"].quantizer) == words
        assert at.decide("mlp", "linear")["fprop.x"].name == "f8"
        assert at.decide("lm_head", "linear").changes_nothing


def test_a_schedule_chooses_whole_quantizers() -> None:
    plan = Plan.from_yaml(CHOOSING)
    result = [str(plan.at(Position(step, 1000)).decide("a", "linear")["weight"].quantizer) for step in (0, 500, 900)]
    assert result == ["mxfp4", "e4m3 tensor", "bf16"]
    assert plan.decide("a", "linear")["weight"].words == (
        "by steps 4-8-16 (from 4: mxfp4; from 8: e4m3 tensor; from 16: bf16)"
    )


def test_a_plan_at_its_widest() -> None:
    def words(text: str) -> str | None:
        widest = Plan.from_yaml(text).widest()
        assert not widest.moves
        return widest.decide("a", "linear")["weight"].words or widest.decide("a", "linear")["fprop.w"].words

    assert words(CYCLIC) == "int8 channel minmax"
    assert words(LATE) == "bf16"
    assert words(CHOOSING) == "bf16"
    assert words("version: 1\nrules: [{match: '*', weight: {until: 10, use: keep, then: int8}}]") is None


def test_keep_may_be_a_side() -> None:
    plan = Plan.from_yaml("version: 1\nrules: [{match: '*', weight: {until: 10, use: keep, then: int8}}]")
    assert plan.decide("a", "linear")["weight"].words == "left alone until step 10, then int8"
    assert not plan.decide("a", "linear").changes_nothing
    assert plan.at(Position(9, 20)).decide("a", "linear").changes_nothing
    assert not plan.at(Position(10, 20)).decide("a", "linear").changes_nothing


def test_plans_made_in_python() -> None:
    mine = schedule(lambda step, total: 3 + step % 2, low=3, high=4)
    spec = QuantizerSpec("int", bits="mine", scale="tensor")
    plan = Plan((Rule(("*",), quantizers=(("weight", spec),)),), schedules={"mine": mine})
    assert plan.moves
    assert plan.to_dict()["schedules"]["mine"]["name"] == "function"
    with pytest.raises(PlanError, match="keep this plan in Python"):
        plan.save("/nowhere/plan.yaml")
    with pytest.raises(PlanError, match="allow_code"):  # which a lambda cannot be imported for, either
        Plan.from_dict(plan.to_dict()).require_code()
    assert Switch("90%", "a", "b").until == RunPoint.of("90%")  # type: ignore[arg-type]


def test_an_extending_plan_replaces_schedules() -> None:
    base = Plan.from_yaml(CYCLIC)
    own = Plan(extends="base.yaml", base=base, schedules={"cpt": schedule("RR", low=4, high=6)})
    assert own.decide("conv1", "conv2d")["fprop.w"].words == "int RR 4-6 x8 channel minmax"
    assert own.flattened().schedules == own.all_schedules


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "version: 1\nrules:\n- match: '*'\n  w: {format: int, bits: cpt}",
            "p.yaml:4: rules[0].w: there is no schedule 'cpt': add it to the plan's schedules.",
        ),
        (
            "version: 1\nschedules: {cpt2: {name: CR, low: 3, high: 8}}\nquantizers:\n  q: {format: int, bits: cpt}",
            "p.yaml:4: quantizers.q: there is no schedule 'cpt'; did you mean cpt2?",
        ),
        (
            "version: 1\nschedules:\n  cpt: {name: CR, low: 8, high: 3}",
            "p.yaml:3: schedules.cpt: low is 8 and high is 3: exchange them.",
        ),
        (
            "version: 1\nschedules:\n  cpt: {name: CQ, low: 8, high: 3}",
            "p.yaml:3: schedules.cpt.name: there is no 'CQ'",
        ),
        ("version: 1\nschedules:\n  cpt: {low: 8, high: 3}", "p.yaml:3: schedules.cpt: the key 'name' is missing"),
        ("version: 1\nschedules:\n  cpt: {name: CR, high: 3}", "p.yaml:3: schedules.cpt: the key 'low' is missing"),
        (
            "version: 1\nschedules:\n  cpt:\n    name: late\n    low: 3\n    high: 8\n    last: most",
            "p.yaml:7: schedules.cpt.last: 'most' is no moment of a run",
        ),
        (
            "version: 1\nschedules: {s: {name: CR, low: 1, high: 8}}\nrules:\n"
            "- match: '*'\n  w: {format: int, bits: s}",
            "p.yaml:5: rules[0].w: ",
        ),
        ("version: 1\nquantizers:\n  q: {until: 90%, use: e4m3}", "p.yaml:3: quantizers.q: the key 'then' is missing"),
        (
            "version: 1\nquantizers:\n  q: {until: 90%, use: e4m3, then: q}",
            "p.yaml:3: quantizers.q: the name 'q' stands, in the end, for itself",
        ),
        (
            "version: 1\nschedules: {s: {name: CR, low: 3, high: 8}}\nquantizers:\n  q: {by: s, choose: {4: e4m3}}",
            "p.yaml:4: quantizers.q: s goes down to 3 bits, and choose begins at 4: add a quantizer for 3.",
        ),
        ("version: 1\nquantizers:\n  q: {format: e4m3, bits: cpt}", "p.yaml:3: quantizers.q: 'e4m3' fixes its bits"),
        ("version: 1\nschedules: {f: {name: function}}", "p.yaml:2: schedules.f: the key 'function' is missing"),
    ],
)
def test_a_mistake_is_one_sentence_with_file_line_and_field(text: str, message: str) -> None:
    with pytest.raises(PlanError) as raised:
        Plan.from_yaml(text, "p.yaml")
    assert str(raised.value).startswith(message)


def test_choosing_checks_itself() -> None:
    with pytest.raises(PlanError, match="choose is empty"):
        Choosing("s", ())
    with pytest.raises(PlanError, match="twice"):
        Choosing("s", ((4, "a"), (4, "b")))
    assert Choosing("s", ((8, "b"), (4, "a"))).cases == ("a", "b")
