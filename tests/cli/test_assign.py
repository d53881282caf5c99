"""``bitplan assign``, and ``bitplan train --assign``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitplan.lab.task_planners import AssignOptions
from bitplan.plans import Plan

Run = Callable[..., Any]


@pytest.mark.parametrize(
    ("target", "figures"),
    [
        ("resnet18", {"parameters": 11_220_132, "tensors": 264, "groups": 22, "demoted": 5}),
        ("squeezenet", {"parameters": 781_156, "tensors": 370, "groups": 27, "demoted": 4}),
        ("mobilenet_v2", {"parameters": 2_412_212, "groups": 59}),
        ("shufflenet_v2", {"parameters": 1_356_104, "groups": 58}),
    ],
)
def test_the_paper_s_figures(bitplan: Run, target: str, figures: dict[str, int]) -> None:
    sized = ("--classes", 100, "--width", 1.0, "--batch", 128)
    result = bitplan("assign", target, *sized, "--ratio", 0.5, "--json").json
    assert {key: result[key] for key in figures} == figures
    assert result["selection_ratio"] >= 0.5
    assert 0.5 < result["reported_ratio"] <= result["selection_ratio"]


def test_a_baseline_and_a_width(bitplan: Run) -> None:
    result = bitplan("assign", "resnet18", "--width", 0.1, "--baseline", "operator", "--json").json
    assert result["reported_ratio"] == pytest.approx(0.266, abs=0.0005)
    prime = bitplan("assign", "resnet18", "--baseline", "operator-prime", "--explain")
    assert "our reading" in prime.out


def test_a_split_has_two_precisions(bitplan: Run) -> None:
    sized = ("--classes", 100, "--width", 1.0, "--batch", 128, "--baseline")
    result = bitplan("assign", "shufflenet_v2", *sized, "operator", "--json").json
    assert round(result["reported_ratio"], 3) == 0.269
    assert "remark" not in result["plan"]["made_by"]
    prime = bitplan("assign", "shufflenet_v2", *sized, "operator-prime", "--json").json
    assert round(prime["reported_ratio"], 3) == 0.535
    assert "gradients of split parts" in prime["plan"]["made_by"]["remark"]


def test_the_plan_is_written_and_holds(bitplan: Run, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    ran = bitplan("assign", "gpt-tiny", "--ratio", 0.7, "--order", "random", "--seed", 3, "-o", file)
    assert ran.code == 0
    made_by = Plan.load(file).made_by
    assert isinstance(made_by, dict)
    assert (made_by["order"], made_by["seed"], made_by["promotion"]) == ("random", 3, 0.01)
    assert bitplan("plan", "check", file, "gpt-tiny").code == 0


def test_explain_shows_groups_order_and_the_cut(bitplan: Run) -> None:
    shown = bitplan("assign", "resnet18", "--ratio", 0.3, "--explain").out
    rows = [line.split() for line in shown.splitlines()]
    order = [row[0] for row in rows if len(row) > 4 and row[0].isdigit()]
    assert order[:3] == ["5", "3", "1"]
    assert "3 of 22 groups" in shown
    record = bitplan("assign", "resnet18", "--ratio", 0.3, "--explain", "--json").json
    assert [row["is_low"] for row in record["order_of_groups"]] == [True] * 3 + [False] * 19


def test_budgets_that_can_and_cannot_be_met(bitplan: Run, tmp_path: Path) -> None:
    file = tmp_path / "small.py"
    file.write_text(
        "import torch\n"
        "def make():\n"
        "    layers = [torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64)]\n"
        "    return torch.nn.Sequential(*layers), torch.randn(2000, 64), lambda y: y.square().mean()\n"
    )
    ran = bitplan("assign", f"{file}:make", "--budget", "10KiB")
    assert ran.code == 2
    assert "the least is" in ran.err
    plan = tmp_path / "a.yaml"
    result = bitplan("assign", f"{file}:make", "--budget", "130%", "-o", plan, "--json").json
    assert result["peak_predicted"] <= result["budget_bytes"] == int(1.3 * result["peak_today"])
    held = bitplan("memory", f"{file}:make", "--plan", plan, "--execution", "packed", "--json").json
    assert held["measured"]["peak"] <= result["budget_bytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpt-tiny",), "give one of ratio, budget and baseline"),
        (("gpt-tiny", "--ratio", 0.5, "--width", 0.5), "not of gpt-tiny"),
        (("shufflenet_v2", "--ratio", 0.5, "--width", 0.3), "has the widths"),
        (("gpt-tiny", "--ratio", 0.5, "--optimizer", "lion"), "no optimizer"),
        (("gpt-tiny", "--baseline", "operator", "--order", "random"), "has no order: drop random."),
    ],
)
def test_mistakes_are_sentences(bitplan: Run, arguments: tuple[Any, ...], message: str) -> None:
    ran = bitplan("assign", *arguments)
    assert ran.code == 2
    assert message in ran.err


def test_what_does_not_run_is_one_sentence_without_a_traceback_of_torchs(tmp_path: Path) -> None:
    """In a process of its own: torch's log has the stderr with which a process began."""
    own = tmp_path / "own.py"
    model = "torch.nn.Linear(4, 4), (torch.randn(2, 5), torch.randn(2, 4)), torch.nn.functional.mse_loss"
    own.write_text(f"import torch\n\ndef bad():\n    return {model}\n")
    text = [sys.executable, "-m", "bitplan", "assign", f"{own}:bad", "--ratio", "0.5"]
    ran = subprocess.run(text, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    (said,) = ran.stderr.splitlines()
    assert "does not run on its batch" in said


TINY = ("--set", "steps=4", "--set", "batch=8", "--set", "width=0.25", "--set", "evaluate_every=2")


def test_a_task_is_trained_under_an_assignment_and_gone_on_with(bitplan: Run, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ran = bitplan("train", "digits", "--assign", "0.9", *TINY, "--out", out, "--json")
    assert ran.code == 0
    command = ran.json["command"]
    assert "--assign 0.9" in command
    assert "--set loss_scale=65536" in command
    assert ran.json["plan"] == "assign-r0.9"
    plan = (out / "plan.yaml").read_text()
    again = bitplan(*command.split()[1:], "--out", out, "--json")
    assert again.json["metrics"] == ran.json["metrics"]
    assert "nothing was trained" in again.err
    assert (out / "plan.yaml").read_text() == plan
    other = bitplan("train", "digits", "--assign", "0.5", *TINY, "--out", out)
    assert other.code == 2


def test_a_loss_scale_is_said_once(bitplan: Run) -> None:
    twice = bitplan("train", "digits", "--loss-scale", 8, "--set", "loss_scale=4", "--dry-run")
    assert twice.code == 2
    assert "twice" in twice.err
    output = bitplan("train", "digits", "--assign", "operator", "--loss-scale", 0, *TINY, "--dry-run", "--json").json
    assert output["settings"]["loss_scale"] == 0
    assert bitplan("train", "digits", "--assign", "0.5", "--plan", "fp8-all").code == 2


@pytest.mark.parametrize("message", [("0.9",), ("70%", "smallest", "bf16/mxfp8"), ("operator", "largest", None, 0.0)])
def test_what_a_record_says_of_an_assignment_is_read_back(message: tuple[Any, ...]) -> None:
    arguments = AssignOptions(*message)
    assert AssignOptions.of_source(arguments.source) == arguments
    assert AssignOptions.of_source("plans/a.yaml") is None
