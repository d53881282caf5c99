"""``bitplan plan export`` and ``bitplan plan import``."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from bitplan.integrations.export import EXPORT_FORMATS
from bitplan.plans import Plan

Bitplan = Callable[..., Any]
LLAMA = "examples/hf_llama.py:make"


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])


def test_the_exported_torchao_file_runs_one_step_and_prints_its_layers(
    bitplan: Bitplan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.py"
    ran = bitplan("plan", "export", "fp8-linear", "--to", "torchao", "--model", LLAMA, "-o", str(out), "--strict")
    assert "torchao 0.18, 15 layers" in ran.err
    assert ran.out == ""
    assert "not exported" not in ran.err
    runpy.run_path(str(out), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 16
    assert lines[0].startswith("model.layers.0.self_attn.q_proj: ")
    assert "i:dyn_ten_e4m3,w:dyn_ten_e4m3,go:dyn_ten_e5m2" in lines[0]
    assert lines[-1].startswith("one step: loss ")


@pytest.mark.parametrize("to", ["megatron", "te-debug", "modelopt"])
def test_yaml_is_printed_on_stdout_and_what_is_left_out_on_stderr(bitplan: Bitplan, to: str) -> None:
    ran = bitplan("plan", "export", "fp8-train", "--to", to, "--model", LLAMA)
    assert isinstance(yaml.safe_load(ran.out), dict)
    assert ran.out.startswith("# Written by bitplan ")
    assert f"{LLAMA}, for {to} {EXPORT_FORMATS[to].versions[-1]}" in ran.out
    left_out = [line for line in ran.err.splitlines() if "not exported: " in line]
    assert any("mlp.gate_proj/linear.0:activation" in line for line in left_out)
    assert any("16 past steps" in line for line in left_out)


def test_json_has_the_text_and_every_omission(bitplan: Bitplan, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    record = bitplan(
        "plan", "export", "fp8-train", "--to", "compressed-tensors", "--model", LLAMA, "-o", str(out), "--json"
    ).json
    assert json.loads(record["text"]) == json.loads(out.read_text())
    assert record["layers"] == 14
    assert record["file"] == str(out)
    assert len(record["omissions"]) == 4 + 28
    assert set(record["omissions"][0]) == {"site", "reason"}


def test_weights_are_written_beside_the_config(bitplan: Bitplan, tmp_path: Path) -> None:
    ran = bitplan(
        "plan",
        "export",
        "int8-linear",
        "--to",
        "compressed-tensors",
        "--model",
        LLAMA,
        "--weights",
        str(tmp_path / "s"),
    )
    assert sorted(file.name for file in (tmp_path / "s").iterdir()) == ["config.json", "model.safetensors"]
    assert "the weights of 15 layers rounded" in ran.err


@pytest.mark.parametrize(
    ("arguments", "token"),
    [
        (["fp8-linear", "--to", "torch", "--model", LLAMA], "torchao"),
        (["fp8-linear", "--to", "torchao", "--model", LLAMA, "--target-version", "0.5"], "0.18"),
        (["packed-fp8", "--to", "torchao", "--model", LLAMA], "nothing that torchao can do"),
        (["fp8-train", "--to", "torchao", "--model", LLAMA, "--strict"], "strict"),
        (["fp8-linear", "--to", "torchao", "--model", LLAMA, "--steps", "3"], "--step"),
        (["fp8-linear", "--to", "torchao", "--model", LLAMA, "-o", "/nowhere/out.py"], "/nowhere/out.py"),
        (["fp8-linear", "--to", "megatron", "--model", LLAMA, "--weights", "folder"], "--weights"),
    ],
)
def test_mistakes_are_one_sentence_and_leave_no_file(bitplan: Bitplan, arguments: list[str], token: str) -> None:
    ran = bitplan("plan", "export", *arguments)
    assert ran.code == 2
    assert token in ran.err
    assert ran.err.strip().count("\n") == 0
    assert ran.out == ""


def test_a_plan_whose_names_are_those_of_another_model_is_refused(bitplan: Bitplan, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("{version: 1, rules: [{match: decoder.layers, op: linear, x: e4m3, w: e4m3}]}")
    ran = bitplan("plan", "export", str(plan), "--to", "torchao", "--model", LLAMA)
    assert ran.code == 2
    assert "decoder.layers" in ran.err
    assert "model.layers" in ran.err


def test_an_imported_plan_is_printed_as_yaml_and_measured(bitplan: Bitplan, tmp_path: Path) -> None:
    ran = bitplan("plan", "import", "rowwise", "--from", "torchao")
    plan = Plan.from_yaml(ran.out)
    assert str(plan.decide("any", "linear")["wgrad.dy"].quantizer) == "e4m3 vector power-of-two"
    assert "module_filter_fn" in ran.err
    out = tmp_path / "plan.yaml"
    bitplan("plan", "import", "rowwise", "--from", "torchao", "-o", str(out))
    assert Plan.load(out) == plan
    assert bitplan("plan", "check", str(out), LLAMA, "--json").json["rounded"] == 6 * 15
    assert bitplan("plan", "import", "rowwise", "--from", "torchao", "--json").json == plan.to_dict()


@pytest.mark.parametrize(
    ("arguments", "token"),
    [(["x.json", "--from", "json"], "compressed-tensors"), (["x.yaml", "--from", "megatron"], "x.yaml")],
)
def test_configs_that_cannot_be_imported_are_one_sentence(bitplan: Bitplan, arguments: list[str], token: str) -> None:
    ran = bitplan("plan", "import", *arguments)
    assert ran.code == 2
    assert token in ran.err
    assert ran.err.strip().count("\n") == 0
