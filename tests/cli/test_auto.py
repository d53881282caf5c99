"""``bitplan auto``: the plan file, the JSON and the exit status."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

import bitplan as bp
from bitplan.cli.app import app

MODEL = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3)]
    return nn.Sequential(*layers), (torch.randn(256, 32), torch.randn(256, 32)), nn.functional.mse_loss
"""


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Searches for the same model measure its candidates once, however busy this machine is."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def target(tmp_path: Path, shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("BITPLAN_CACHE", str(shared_cache))
    monkeypatch.setattr(import_module("bitplan.planners.auto.trials"), "WIDEST_SPREAD", 1e9)
    (tmp_path / "model.py").write_text(MODEL)
    return f"{tmp_path / 'model.py'}:make"


@pytest.mark.parametrize("options", [[], ["--cluster", "auto"]], ids=["here", "cluster"])
def test_a_plan_is_written_and_the_document_says_what_was_tried(
    target: str, options: list[str], tmp_path: Path
) -> None:
    if options:
        pytest.importorskip("ray", reason="needs the extra ray")
    out = tmp_path / "plan.yaml"
    command = ["auto", target, "--memory", "80%", "--steps", "3", "--seeds", "2", "-o", str(out), "--json"]
    ended = CliRunner().invoke(app, [*command, *options])
    assert ended.exit_code == 0, ended.output
    document = json.loads(ended.stdout)
    assert document["meets_limits"]
    assert bp.Plan.load(out).to_dict() == document["plan"]
    (chosen,) = (row for row in document["candidates"] if row["verdict"] == "chosen")
    assert chosen["trial"]["peak"] <= document["memory_limit"]
    assert document["candidates"][0]["name"] == "no plan"
    memory = CliRunner().invoke(app, ["memory", target, "--plan", str(out), "--optimizer", "none", "--json"])
    assert memory.exit_code == 0, memory.output


def test_an_impossible_budget_ends_with_1_and_the_nearest_plan(target: str, tmp_path: Path) -> None:
    out = tmp_path / "plan.yaml"
    ended = CliRunner().invoke(app, ["auto", target, "--memory", "1KiB", "--steps", "0", "-o", str(out)])
    assert ended.exit_code == 1
    assert "nearest" in ended.output
    assert out.exists()


@pytest.mark.parametrize(
    "options",
    [
        ["--memory", "many"],
        ["--optimizer", "adam"],
        ["--autocast", "fp8"],
        ["--gpus-per-run", "1"],
        ["--cluster", "auto", "--jobs", "2"],
    ],
)
def test_wrong_options_are_one_sentence(target: str, options: list[str]) -> None:
    ended = CliRunner().invoke(app, ["auto", target, *options])
    assert ended.exit_code != 0
    assert "Traceback" not in ended.output
