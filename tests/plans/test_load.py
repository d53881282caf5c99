from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from bitplan.errors import PlanError
from bitplan.plans import Plan, QuantizerSpec
from bitplan.plans.tree import MAX_CHARACTERS

EXAMPLE: dict[str, Any] = {
    "version": 1,
    "rules": [{"match": "*", "weight": "e3m2", "activation": {"format": "int8", "scale": "tensor"}}],
}
EXAMPLE_YAML = """
version: 1
rules:
- match: "*"
  weight: e3m2
  activation: {format: int8, scale: tensor}
"""

CPT_AT_8_BITS = """
version: 1
rules:
- match: "*"
  op: [conv2d, linear]
  w:  {format: int, bits: 8, scale: channel, range: minmax}
  x:  {format: int, bits: 8, scale: tensor, range: minmax, eval: ema}
  dy: {format: int8, scale: tensor, range: minmax, rounding: stochastic}
- {match: fc, keep: true}
"""

ASSIGNMENT = """
version: 1
quantizers:
  high: bf16
  low:  {format: e4m3, scale: tensor}
  lowg: {format: e5m2, scale: tensor}
rules:
- {match: "*", weight: high, activation: high, grad_activation: high, grad_weight: high}
- {match: [conv1, layer1], weight: low, activation: low, grad_activation: lowg}
"""

FP8_LINEAR = """
version: 1
quantizers:
  f8: {format: e4m3, scale: vector}
  g8: {format: e5m2, scale: vector}
rules:
- {match: "*", op: linear, fprop: f8, dgrad.dy: g8, dgrad.w: f8, wgrad: bf16}
- {match: lm_head, keep: true}
"""


def message_of(text: str, syntax: str = "yaml") -> str:
    read = Plan.from_json if syntax == "json" else Plan.from_yaml
    with pytest.raises(PlanError) as caught:
        read(text, source=f"p.{syntax}")
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_example_is_the_same_plan_as_a_mapping_in_yaml_and_in_json() -> None:
    plan = Plan.from_dict(EXAMPLE)
    assert plan == Plan.from_yaml(EXAMPLE_YAML)
    assert plan == Plan.from_json(json.dumps(EXAMPLE))
    assert plan.to_dict() == EXAMPLE
    decision = plan.decide("any", "linear")
    assert decision["weight"].quantizer == QuantizerSpec("e3m2")
    assert decision["activation"].quantizer == QuantizerSpec("int8", scale="tensor")


@pytest.mark.parametrize("text", [EXAMPLE_YAML, CPT_AT_8_BITS, ASSIGNMENT, FP8_LINEAR, "version: 1"])
def test_plans_as_their_users_write_them_round_trip(text: str, tmp_path: Path) -> None:
    plan = Plan.from_yaml(text)
    assert Plan.from_dict(plan.to_dict()) == plan
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert Plan.from_json(plan.to_json()) == plan
    for name in ("plan.yaml", "plan.json"):
        plan.save(tmp_path / name)
        assert Plan.load(tmp_path / name) == plan
        assert Plan.load(str(tmp_path / name)).to_dict() == plan.to_dict()


def test_the_examples_mean_what_they_say() -> None:
    cpt = Plan.from_yaml(CPT_AT_8_BITS)
    assert cpt.decide("layer1.conv", "conv2d")["fprop.x"].quantizer.eval == "ema"
    assert cpt.decide("layer1.bn", "batch_norm").changes_nothing
    assert cpt.decide("fc", "linear").changes_nothing
    assignment = Plan.from_yaml(ASSIGNMENT)
    assert assignment.decide("layer1.0", "relu")["activation"].quantizer.format == "e4m3"
    assert assignment.decide("layer1.0", "relu")["grad_weight"].quantizer.format == "bf16"
    fp8 = Plan.from_yaml(FP8_LINEAR).decide("h.0.mlp", "linear")
    slots = ("fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x")
    assert [fp8[slot].quantizer.format for slot in slots] == ["e4m3", "e4m3", "e5m2", "e4m3", "bf16", "bf16"]


def test_an_empty_plan_is_a_plan() -> None:
    assert Plan() == Plan.from_yaml("version: 1") == Plan.from_dict({"version": 1, "rules": []})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "p.yaml: the plan is empty: write at least version: 1."),
        ("- a", "p.yaml:1: this must be a mapping, not a list."),
        ("rules: []", "p.yaml:1: the key 'version' is missing: add it, as in version: 1."),
        ("version: 2", "p.yaml:1: version: this must be 1, not 2."),
        ("version: true", "p.yaml:1: version: this must be a whole number, not true."),
        ("version: 1\nrule: []", "p.yaml:2: there is no key 'rule' here; did you mean rules"),
        (
            "version: 1\nrules: []\nrules: []",
            "p.yaml:3: rules: the key 'rules' is given twice (first in line 2): drop one.",
        ),
        (
            "version: 1\nrules:\n- match: a\n  wieght: e4m3",
            "p.yaml:4: rules[0]: there is no key 'wieght' here; did you mean weight or grad_weight?",
        ),
        (
            "version: 1\nrules:\n- match: a\n  w:\n    format: e4m3\n    scale: tensr",
            "p.yaml:6: rules[0].w.scale: there is no 'tensr' here; did you mean tensor?",
        ),
        (
            "version: 1\nrules:\n- {match: a, w: e4m3}\n- {match: b,\n   w: lowe}\nquantizers:\n  lower: bf16",
            "p.yaml:5: rules[1].w: there is no quantizer or number format 'lowe'; did you mean lower?",
        ),
        (
            "version: 1\nrules:\n- {match: a, w: }",
            "p.yaml:3: rules[0].w: a quantizer is a format name, a name or a mapping",
        ),
        (
            "version: 1\nrules:\n- {match: 0, w: bf16}",
            "p.yaml:3: rules[0].match: this must be a text, not the number 0: put",
        ),
        ("version: 1\nrules:\n- {match: [], w: bf16}", "p.yaml:3: rules[0].match: this list is empty."),
        (
            "version: 1\nrules:\n- {match: [a, 're:('], keep: true}",
            "p.yaml:3: rules[0].match[1]: 're:(' is not a regular exp",
        ),
        ("version: 1\nrules:\n- {op: linear, w: bf16}", "p.yaml:3: rules[0]: the key 'match' is missing: add it."),
        ("version: 1\nrules:\n- {match: a}", "p.yaml:3: rules[0]: the rule says nothing"),
        (
            "version: 1\nrules:\n- {match: a, keep: yes}",
            "p.yaml:3: rules[0].keep: this must be true or false, not the text",
        ),
        (
            "version: 1\nrules:\n- {match: a, keep: true, w: bf16}",
            "p.yaml:3: rules[0]: keep: true leaves the place alone",
        ),
        (
            "version: 1\nrules:\n- {match: a, x: e4m3, fprop.x: bf16}",
            "p.yaml:3: rules[0]: 'x' and 'fprop.x' both say what",
        ),
        ("version: 1\nrules:\n- {match: a, w: e4m3, grad_at: consumer}", "p.yaml:3: rules[0]: grad_at says where"),
        (
            "version: 1\nrules:\n- {match: a, w: {format: e4m3, at: consumer}}",
            "p.yaml:3: rules[0].w: there is no key 'at'",
        ),
        (
            "version: 1\nrules:\n- {match: a, w: {format: int, bits: 2.5}}",
            "p.yaml:3: rules[0].w.bits: this must be a whole",
        ),
        (
            "version: 1\nrules:\n- {match: a, w: int}",
            "p.yaml:3: rules[0].w: 'int' alone has no width: write {format: int,",
        ),
        (
            "version: 1\nrules:\n- {match: a, w: e4m99}",
            "p.yaml:3: rules[0].w: a float needs 1 to 8 exponent bits and 0 to 23",
        ),
        (
            "version: 1\nquantizers:\n  bf16: e4m3",
            "p.yaml:3: quantizers.bf16: 'bf16' is the name of a number format and cann",
        ),
        (
            "version: 1\nquantizers:\n  Int9: e4m3",
            "p.yaml:3: quantizers.Int9: 'Int9' is the name of a number format and cann",
        ),
        (
            "version: 1\nquantizers:\n  keep: e4m3",
            "p.yaml:3: quantizers.keep: 'keep' is the name of something else in plan",
        ),
        ("version: 1\nquantizers:\n  a b: e4m3", "p.yaml:3: quantizers.a b: 'a b' cannot name a quantizer"),
        (
            "version: 1\nquantizers:\n  a: b\n  b: a",
            "p.yaml:3: quantizers.a: the name 'b' stands, in the end, for itself",
        ),
        ("version: 1\nmade_by: 3", "p.yaml:2: made_by: this must be a text or a mapping, not the number 3."),
        ("version: 1\nname: 3", "p.yaml:2: name: this must be a text, not the number 3: put it in quotes."),
        ("version: 1\nname: ''", "p.yaml:2: name: this text is empty."),
    ],
)
def test_a_mistake_is_one_sentence_with_file_line_and_field(text: str, message: str) -> None:
    assert message_of(text).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version: 1\nrules:\n\t- match: a", "p.yaml:3: a tab stands where YAML wants spaces"),
        ("version: 1\nrules: [", "p.yaml:2: this is not YAML: expected the node content"),
        ("version: 1\n---\nversion: 1", "p.yaml:2: a second document starts here"),
        ("version: 1\nmade_by: {a: &x [1], b: *x}", "p.yaml:2: plans have no anchors"),
        ("version: 1\nrules: *x", "p.yaml:2: plans have no anchors"),
        ("version: 1\nname: !!python/object/apply:os.system ['true']", "p.yaml:2: plans have no tags such as"),
        ("version: 1\nname: !mine x", "p.yaml:2: plans have no tags such as '!mine': drop it."),
        ("version: 1\nname: a\x07b", "p.yaml:2: the character '\\x07' is not allowed in a plan."),
        ("version: 1\nmade_by: {? [a] : b}", "p.yaml:2: made_by.?: a key must be a text."),
        ('version: 1\nname: "\\U00110000"', "p.yaml: this is not YAML"),
        ("version: " + "1" * 5000, "p.yaml:1: version: this number is too long."),
        ("version: 1e999", "p.yaml:1: version: numbers in a plan are finite."),
        ("version: 1\nmade_by: {" + "a: {" * 100 + "}" * 101, "p.yaml:2: this is nested more than 32 levels deep."),
        ("[" * 100_000, "p.yaml:1: this is nested more than 32 levels deep."),
        ("#" * (MAX_CHARACTERS + 1), "p.yaml: a plan has at most 1,000,000 characters, not 1,000,001."),
    ],
)
def test_what_plans_do_without_in_yaml_is_refused(text: str, message: str) -> None:
    assert message_of(text).startswith(message)


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['touch {path}']",
        "version: 1\nname: !!python/object/new:os.system ['touch {path}']",
        "version: 1\nmade_by: {{a: !!python/object/apply:pathlib.Path.touch ['{path}']}}",
        "version: 1\nrules: [{{match: !!python/name:os.system '', keep: true}}]",
        "!!map {{? !!python/object/apply:os.system ['touch {path}'] : x}}",
    ],
)
def test_loading_runs_no_code(text: str, tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    assert "plans have no tags" in message_of(text.format(path=planted))
    assert not planted.exists()


def test_a_bomb_of_aliases_is_refused_at_once() -> None:
    lines = ["version: 1", "made_by:", "  a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"  a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 20)]
    started = time.monotonic()
    assert "anchors" in message_of("\n".join(lines))
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "p.json:1: this is not JSON: expecting value."),
        ("{", "p.json:1: this is not JSON"),
        ('{"version": 1}\n}', "p.json:2: this is not JSON"),
        (
            '{"version": 1,\n"version": 1}',
            "p.json:2: version: the key 'version' is given twice (first in line 1): drop one.",
        ),
        ('{"version" 1}', "p.json:1: this is not JSON"),
        ('{"version": 1 "rules": []}', "p.json:1: this is not JSON"),
        ('{"version": 1,\n"rules": [1 2]}', "p.json:2: this is not JSON"),
        ('{"version": NaN}', "p.json:1: version: numbers in a plan are finite"),
        ('{"version": 1e999}', "p.json:1: version: numbers in a plan are finite."),
        ('{"version": ' + "1" * 5000 + "}", "p.json: this is not JSON: Exceeds the limit"),
        ('{"version": "\\q"}', "p.json:1: this is not JSON: invalid \\escape"),
        ('{"version": 1,}', "p.json:1: this is not JSON"),
        ("[" * 100_000, "p.json: this is nested"),
        (
            '{\n"version": 1,\n"rules": [\n{"match": "a",\n"weight": {"format": "e4m3",\n"rounding": "up"}}]}',
            "p.json:6: rules[0].weight.rounding: there is no 'up' here",
        ),
    ],
)
def test_mistakes_in_json_have_their_place_too(text: str, message: str) -> None:
    assert message_of(text, "json").startswith(message)


def test_json_may_be_indented_by_tabs_and_hold_any_character() -> None:
    plan = Plan.from_json('{\n\t"version": 1,\n\t"name": "\\ud83d\\ude00 \\u00e9\\t"\n}\n')
    assert plan.name == "\U0001f600 é\t"
    assert Plan.from_yaml(plan.to_yaml()) == plan


def test_yaml_numbers_and_words_are_those_of_yaml_1_2() -> None:
    text = (
        "version: 1\nmade_by: {a: 1e-2, b: on, c: no, d: 012, e: 1_000, f: 12:30, g: '1e-2', h: ~, i: 2024-01-01, 8: x}"
    )
    made_by = {"a": 0.01, "b": "on", "c": "no", "d": 12, "e": "1_000", "f": "12:30", "g": "1e-2", "h": None}
    plan = Plan.from_yaml(text)
    assert plan.made_by == {**made_by, "i": "2024-01-01", "8": "x"}
    assert Plan.from_yaml(plan.to_yaml()) == plan


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"version: 1\nname: caf\xe9\n")
    long = tmp_path / "long.yaml"
    long.write_bytes(b"#" * (4 * MAX_CHARACTERS + 1))
    for path, part in [
        (tmp_path / "none.yaml", "there is no file"),
        (tmp_path, "is not a file"),
        (latin, "latin.yaml:2: this is not UTF-8 text"),
        (long, "at most 1,000,000 characters"),
        (Path("a\0b"), "cannot be read"),
    ]:
        with pytest.raises(PlanError, match=part):
            Plan.load(path)
    if os.path.exists("/dev/zero"):
        with pytest.raises(PlanError, match="is not a file"):
            Plan.load("/dev/zero")
    with pytest.raises(PlanError, match="cannot be written"):
        Plan().save(tmp_path / "no" / "plan.yaml")


def test_a_byte_order_mark_is_no_part_of_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_bytes(b"\xef\xbb\xbfversion: 1\n")
    assert Plan.load(path) == Plan()
    assert Plan.from_yaml("\ufeffversion: 1") == Plan()


def test_a_rule_remembers_its_place(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("version: 1\nrules:\n- {match: a, keep: true}\n- {match: b, keep: true}\n")
    assert Plan.load(path).rules[1].where == f"{path}:4: rules[1]"


def test_extends_puts_the_rules_of_the_base_first(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "base.json").write_text(json.dumps(EXAMPLE))
    child = tmp_path / "more" / "plan.yaml"
    child.write_text("version: 1\nextends: ../base.json\nrules:\n- {match: a, weight: bf16}\n")
    plan = Plan.load(child)
    assert [rule.match for rule in plan.all_rules] == [("*",), ("a",)]
    assert plan.decide("a", "linear")["weight"].quantizer == QuantizerSpec("bf16")
    assert plan.decide("a", "linear")["weight"].rule == 1
    assert plan.to_dict()["extends"] == "../base.json"
    flat = plan.flattened()
    assert flat.extends is None
    assert flat.decide("b", "linear") == plan.decide("b", "linear")
    assert Plan.from_yaml(flat.to_yaml()) == flat


def test_a_saved_plan_still_finds_what_it_extends(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(EXAMPLE_YAML)
    (tmp_path / "plan.yaml").write_text("version: 1\nextends: ./base.yaml\n")
    plan = Plan.load(tmp_path / "plan.yaml")
    plan.save(tmp_path / "copy.yaml")
    assert Plan.load(tmp_path / "copy.yaml") == plan
    (tmp_path / "a" / "b").mkdir(parents=True)
    plan.save(tmp_path / "a" / "b" / "copy.yaml")
    moved = Plan.load(tmp_path / "a" / "b" / "copy.yaml")
    assert moved.extends == "../../base.yaml"
    assert moved.all_rules == plan.all_rules


def test_extends_a_preset_and_replaces_a_quantizer_of_it() -> None:
    plan = Plan.from_yaml(
        "version: 1\nextends: fp8-linear\nquantizers: {g8: bf16}\nrules: [{match: lm_head, w: f8, keep: false}]"
    )
    assert plan.decide("a", "linear")["dgrad.dy"].quantizer == QuantizerSpec("bf16")
    assert plan.decide("lm_head", "linear")["fprop.w"].rule == 1
    assert Plan.from_dict(plan.to_dict()) == plan


@pytest.mark.parametrize(
    ("extends", "message"),
    [
        ("fp8-liner", "plan.yaml:2: extends: there is no preset 'fp8-liner'; did you mean fp8-linear"),
        ("none.yaml", "plan.yaml:2: extends: there is no file .*none.yaml"),
        ("plan.yaml", "plan.yaml:2: extends: 'plan.yaml' extends, in the end, itself"),
        ("two.yaml", "two.yaml:2: extends: 'plan.yaml' extends, in the end, itself"),
        ("broken.yaml", "broken.yaml:1: version: this must be 1, not 7."),
        ("'a\\0b.yaml'", "plan.yaml:2: extends: "),
    ],
)
def test_a_base_that_cannot_be_had(extends: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(f"version: 1\nextends: {extends}\n")
    (tmp_path / "two.yaml").write_text("version: 1\nextends: plan.yaml\n")
    (tmp_path / "broken.yaml").write_text("version: 7\n")
    with pytest.raises(PlanError, match=message):
        Plan.load(tmp_path / "plan.yaml")


def test_a_chain_of_many_plans_ends(tmp_path: Path) -> None:
    for i in range(30):
        (tmp_path / f"{i}.yaml").write_text(f"version: 1\nextends: {i + 1}.yaml\n")
    with pytest.raises(PlanError, match="more than 16 plans extend one another"):
        Plan.load(tmp_path / "0.yaml")


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        3,
        "version: 1",
        {"version": 1, 2: 3},
        {"version": 1, "made_by": {"a": {1, 2}}},
        {"version": float("nan")},
    ],
)
def test_a_mapping_that_is_no_plan(data: Any) -> None:
    with pytest.raises(PlanError, match=r"^mine: "):
        Plan.from_dict(data, source="mine")


def test_a_mapping_that_holds_itself() -> None:
    data: dict[str, Any] = {"version": 1}
    data["made_by"] = data
    with pytest.raises(PlanError, match="nested more than"):
        Plan.from_dict(data)


@pytest.mark.parametrize("text", [None, b"version: 1", 3])
def test_what_is_no_text_is_refused(text: Any) -> None:
    for read in (Plan.from_yaml, Plan.from_json):
        with pytest.raises(PlanError, match="the plan must be a text"):
            read(text)


def nested_switches(levels: int) -> dict[str, Any]:
    names = {f"q{n}": {"until": "50%", "use": f"q{n - 1}", "then": f"q{n - 1}"} for n in range(1, levels + 1)}
    return {"q0": "e4m3", **names}


def chain_of_names(length: int) -> dict[str, Any]:
    return {"q0": "e4m3", **{f"q{n}": f"q{n - 1}" for n in range(1, length + 1)}}


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize(
    ("quantizers", "allowed", "refused", "message"),
    [
        (nested_switches, 10, 40, "more than 1024 quantizers"),
        (chain_of_names, 60, 70, "more than 64 names"),
        (chain_of_names, 60, 3000, "more than 64 names"),
    ],
)
def test_names_of_names_are_limited(
    quantizers: Any, allowed: int, refused: int, message: str, is_reversed: bool
) -> None:
    """A plan of 1 kB could stand for 2^40 quantizers, and a chain of thousands of names exhaust the stack."""

    def plan_of(size: int) -> Plan:
        names = quantizers(size)
        ordered = dict(reversed(names.items())) if is_reversed else names
        rules = [{"match": "*", "weight": f"q{size}"}]
        return Plan.from_dict({"version": 1, "quantizers": ordered, "rules": rules})

    assert plan_of(allowed).decide("fc", "linear")["weight"].quantizer == QuantizerSpec("e4m3")
    with pytest.raises(PlanError, match=message):
        plan_of(refused)


@pytest.mark.parametrize("number", [10**400, -(10**400)])
def test_a_number_that_a_file_could_not_hold_is_refused(number: int) -> None:
    with pytest.raises(PlanError, match=r"made_by\.n"):
        Plan.from_dict({"version": 1, "made_by": {"n": number}})
