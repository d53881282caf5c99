from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from bitplan.lab.models.built_in import BUILT_IN
from bitplan.plans import Plan, plan_schema, preset_names, preset_text

Bitplan = Callable[..., Any]

OWN = """
version: 1
extends: bf16-all
rules:
- {match: head, keep: true}
- {match: blocks.0, op: linear, x: e4m3}
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text(OWN)
    return "own.yaml"


def test_list_names_every_preset_and_says_what_it_does(bitplan: Bitplan) -> None:
    listed = bitplan("plan", "list", "--json").json
    assert [item["name"] for item in listed] == preset_names()
    assert all(item["description"] for item in listed)
    out = bitplan("plan", "list").out
    assert all(name in out for name in preset_names())


def test_show_prints_a_preset_with_its_reasons(bitplan: Bitplan) -> None:
    assert bitplan("plan", "show", "fp8-linear").out == preset_text("fp8-linear")


def test_show_prints_a_file_as_a_plan_that_can_be_read_again(bitplan: Bitplan, own: str) -> None:
    assert Plan.from_yaml(bitplan("plan", "show", own).out) == Plan.load(own)
    flat = bitplan("plan", "show", own, "--flat").out
    assert "extends" not in flat
    assert Plan.from_yaml(flat).all_rules == Plan.load(own).all_rules


def test_show_as_json_is_what_the_plan_says(bitplan: Bitplan, own: str) -> None:
    assert bitplan("plan", "show", own, "--json").json == yaml.safe_load(OWN)


def test_schema_is_the_published_one_and_fits_the_example(bitplan: Bitplan) -> None:
    schema = json.loads(bitplan("plan", "schema").out)
    assert schema == json.loads(json.dumps(plan_schema()))
    jsonschema.validate(yaml.safe_load(OWN), schema)


def test_check_without_a_target_reads_the_plan_only(bitplan: Bitplan, own: str) -> None:
    assert bitplan("plan", "check", own).out == "own.yaml is fine: 3 rules.\n"


def test_check_with_a_target_also_looks_for_rules_about_nothing(bitplan: Bitplan, own: str) -> None:
    ran = bitplan("plan", "check", own, "gpt-tiny", "--json")
    assert ran.code == 0
    assert (ran.json["ok"], ran.json["rules"], ran.json["target"]) == (True, 3, "gpt-tiny")
    assert 0 < ran.json["rounded"] < ran.json["sites"]
    failed = bitplan("plan", "check", own, "resnet20")
    assert failed.code == 2
    assert failed.err.startswith("bitplan: own.yaml:5: rules[0]: the rule matches nothing: no module fits 'head'")


def test_explain_as_json_lists_every_site_with_quantizer_and_rule(bitplan: Bitplan, own: str) -> None:
    sites = {site["name"]: site for site in bitplan("plan", "explain", own, "gpt-tiny", "--json").json}
    keys = {"name", "module", "op", "role", "shape", "dtype", "bytes", "producer", "consumers", "quantizer", "rule"}
    assert all(keys <= site.keys() for site in sites.values())
    said = {name: (site["quantizer"], site["rule"], site["where"]) for name, site in sites.items()}
    assert said["blocks.1.up/linear.0:weight"] == ("bf16", 0, "preset bf16-all:5: rules[0]")
    assert said["blocks.0.up/linear.0:fprop.x"] == ("e4m3", 2, "own.yaml:6: rules[1]")
    assert said["head/linear.0:activation"] == (None, 1, "own.yaml:5: rules[0]")
    assert said["blocks.1.up/linear.0:fprop.x"] == (None, None, None)


def test_explain_for_people_leaves_out_slots_that_no_rule_speaks_of(bitplan: Bitplan, own: str) -> None:
    out = bitplan("plan", "explain", own, "gpt-tiny").out
    (row,) = [line for line in out.splitlines() if "blocks.0.up/linear.0:fprop.x" in line]
    assert row.split() == ["blocks.0.up/linear.0:fprop.x", "8x64x64", "e4m3", "rules[1]"]
    assert "rules[1]: own.yaml:6" in out
    assert "blocks.1.up/linear.0:fprop.x" not in out
    (kept,) = [line for line in out.splitlines() if "head/linear.0:activation" in line]
    assert kept.split()[2] == "-"


def test_explain_warns_where_a_reader_cancels_a_saving(bitplan: Bitplan, own: str) -> None:
    rules = '- {match: "*", activation: e4m3}\n- {match: blocks.1.down, wgrad.x: bf16}\n'
    Path(own).write_text(f"version: 1\noptimizer: {{state: int8}}\nrules:\n{rules}")
    sites = bitplan("plan", "explain", own, "gpt-tiny", "--json").json
    (warned,) = [site for site in sites if site["warning"] is not None]
    assert warned["consumers"] == ["blocks.1.down/linear.0:activation"]
    assert "keeps 16 bits of each value, not 8: 16 as wgrad.x of blocks.1.down/linear.0 (bf16)" in warned["warning"]
    lines = bitplan("plan", "explain", own, "gpt-tiny").out.splitlines()
    assert f"{warned['name']}: {warned['warning']}" in lines
    assert "optimizer state: int8 (own.yaml:2: optimizer)" in lines


def test_a_rule_that_is_not_strict_is_a_remark_on_stderr(bitplan: Bitplan, own: str) -> None:
    Path(own).write_text(OWN + "- {match: hed, weight: e3m2, strict: false}\n")
    ran = bitplan("plan", "explain", own, "gpt-tiny", "--json")
    assert ran.code == 0
    assert ran.json
    assert ran.err == (
        "bitplan: own.yaml:7: rules[2]: the rule matches nothing: no module fits 'hed'; the closest are head.\n"
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["explain", "fp8-liner", "gpt-tiny"], "there is no preset and no file 'fp8-liner'; did you mean fp8-linear"),
        (["explain", "bf16-all", "gpt-huge"], "there is no built-in model or task 'gpt-huge'; did you mean"),
        (["explain", "int8-minmax", "absent.py:make"], "there is no file absent.py"),
        (["check", "bad.yaml"], "bad.yaml:2: rules[0]: there is no key 'wieght' here; did you mean weight"),
        (["show", "absent.yaml"], "there is no file absent.yaml: name a plan's file"),
    ],
)
def test_a_mistake_is_one_sentence_on_stderr(bitplan: Bitplan, own: str, arguments: list[str], sentence: str) -> None:
    Path("bad.yaml").write_text("version: 1\nrules: [{match: fc, wieght: e3m2}]\n")
    ran = bitplan("plan", *arguments, "--json")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"bitplan: {sentence}")
    assert ran.err.count("\n") == 1


def test_a_plan_of_cyclic_precision_training(bitplan: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    ran = bitplan("plan", "cpt", "resnet20", "--schedule", "RTH", "--bits", "4-8", "--cycles", 2, "-o", file)
    assert ran.code == 0
    assert "fc stays as it is" in ran.err
    shown = bitplan("plan", "explain", file, "resnet20").out
    assert "int RTH 4-8 x2 channel minmax" in shown
    assert bitplan("plan", "cpt", "resnet20", "--json").json["schedules"] == {
        "cpt": {"name": "CR", "low": 3, "high": 8, "cycles": 8}
    }
    assert bitplan("plan", "check", file, "resnet20").code == 0
    cost = bitplan("cost", "resnet20", "--plan", file, "--steps", 100, "--json").json
    assert cost["steps"] == 100
    assert "number of steps" in bitplan("cost", "resnet20", "--plan", file).err
    wrong = bitplan("plan", "cpt", "resnet20", "--bits", "nine")
    assert (wrong.code, len(wrong.err.splitlines())) == (2, 1)


def test_a_plan_for_a_task_with_other_settings(bitplan: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    ran = bitplan("plan", "cpt", "graph", "--set", "model=sage", "--q-agg", "-o", file)
    assert "what neighbour sums are of" in ran.err
    assert "layers.0.others" in bitplan("plan", "explain", file, "graph", "--set", "model=sage").out
    assert bitplan("plan", "explain", file, "graph").code == 2  # the other network has no such layer
    wrong = bitplan("plan", "cpt", "gcn", "--set", "model=sage")
    assert (wrong.code, wrong.err) == (
        2,
        "bitplan: gcn is a model as it is, and only tasks have settings: drop --set model=sage.\n",
    )


SELECTING = """\
version: 1
rules:
- {select: [weight-product, not last-product], x: e4m3}
- {select: gate, activation: e4m3, strict: false}
"""


def test_explain_shows_what_each_selector_found(bitplan: Bitplan, own: str) -> None:
    Path("select.yaml").write_text(SELECTING)
    out = bitplan("plan", "explain", "select.yaml", "gpt-tiny").out
    lines = [line for line in out.replace("\n  ", " ").splitlines() if line.startswith("select.yaml:")]
    assert "(weight-product, not last-product): blocks.*.attention.qkv/linear.0 (2)," in " ".join(lines)
    assert "select.yaml:4: rules[1] (gate): nothing" in out
    sites = bitplan("plan", "explain", "select.yaml", "gpt-tiny", "--json").json
    by = {site["name"]: site["selected_by"] for site in sites if site["role"] == "fprop.x"}
    assert by["blocks.0.up/linear.0:fprop.x"] == ["select.yaml:3: rules[0]"]
    assert by["head/linear.0:fprop.x"] == []
    assert bitplan("plan", "explain", own, "gpt-tiny", "--json").json[0]["selected_by"] == []


def test_check_cost_and_memory_take_a_plan_with_selectors(bitplan: Bitplan, own: str) -> None:
    Path("select.yaml").write_text(SELECTING)
    assert bitplan("plan", "check", "select.yaml").code == 0
    assert bitplan("plan", "check", "select.yaml", "gpt-tiny", "--json").json["rounded"] == 16  # x in two products
    assert bitplan("cost", "gpt-tiny", "--plan", "select.yaml").code == 0
    assert bitplan("memory", "gpt-tiny", "--plan", "select.yaml", "--estimate-only").code == 0
    Path("wrong.yaml").write_text(SELECTING.replace("gate,", "gates,"))
    assert "did you mean gate" in bitplan("plan", "check", "wrong.yaml").err


def test_one_order_of_arguments_holds_for_all_commands(bitplan: Bitplan, own: str) -> None:
    first, second = (
        bitplan("plan", "explain", *order, "--json") for order in ((own, "gpt-tiny"), ("gpt-tiny", "-p", own))
    )
    assert first.out == second.out != ""
    assert bitplan("plan", "check", "gpt-tiny", "--plan", own).code == 0
    for arguments, advice in (
        (("plan", "explain", "gpt-tiny", "fp8-linear"), "plan explain gpt-tiny --plan fp8-linear"),
        (("plan", "check", "gpt-tiny"), "plan check gpt-tiny --plan PLAN"),
        (("plan", "explain", "fp8-linear"), "plan explain TARGET --plan fp8-linear"),
        (("plan", "explain", "fp8-linear", "gpt-tiny", "--plan", "int8-all"), "the plan is given twice"),
        (("cost", "fp8-linear", "--plan", "gpt-tiny"), "fp8-linear is a plan"),
    ):
        ran = bitplan(*arguments)
        assert ran.code == 2
        assert advice in ran.err


def test_rounded_and_match_choose_rows(bitplan: Bitplan, own: str) -> None:
    rows = json.loads(bitplan("plan", "explain", "gpt-tiny", "-p", "fp8-linear", "--rounded", "--json").out)
    assert len(rows) == 54
    assert all(row["quantizer"] for row in rows)
    some = json.loads(
        bitplan("plan", "explain", "gpt-tiny", "-p", "fp8-linear", "--rounded", "--match", "blocks.0", "--json").out
    )
    assert {row["module"].partition(".")[0] for row in some} == {"blocks"}
    assert 0 < len(some) < len(rows)
    sites = json.loads(
        bitplan("sites", "gpt-tiny", "--plan", "fp8-linear", "--rounded", "--match", "blocks.0", "--json").out
    )
    assert [site["name"] for site in sites] == [row["name"] for row in some]
    for arguments, token in (
        (("sites", "gpt-tiny", "--rounded"), "--plan"),
        (("sites", "gpt-tiny", "--match", "*.upp"), "the closest are"),
    ):
        ran = bitplan(*arguments)
        assert ran.code == 2
        assert token in ran.err


def test_models_are_listed(bitplan: Bitplan) -> None:
    records = {record["name"]: record for record in json.loads(bitplan("models", "--json").out)}
    assert set(records) == set(BUILT_IN)
    assert records["resnet20"] == {
        "name": "resnet20",
        "kind": "ResNet",
        "parameters": 272_474,
        "batch": "float32 128x3x32x32",
    }
