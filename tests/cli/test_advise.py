"""``bitplan advise``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bitplan.plans import Plan

TINY = f"{Path(__file__).parents[1] / 'train' / 'tiny_task.py'}:Tiny"
MASSIVE = f"{Path(__file__).parents[1] / 'train' / 'massive_task.py'}:Massive"


def test_a_plan_with_reasons_that_train_accepts(bitplan: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    ran = bitplan("advise", TINY, "--steps", 6, "-o", file)
    assert ran.code == 0
    for text in ("fprop.w of 0", "x worse than", "tau ", "What it does not see: bias against variance"):
        assert text in ran.out
    assert f"bitplan train {TINY} --plan {file}" in ran.err
    made_by = Plan.load(file).made_by
    assert isinstance(made_by, dict)
    assert made_by["measured_by"] == f"bitplan measure {TINY} --stages --steps 6"
    trained = bitplan("train", TINY, "--plan", file, "--out", tmp_path / "run", "--json")
    assert trained.json["status"] == "finished"
    assert trained.json["cost"]["relative_to_fp32"] < 0.5


def test_json_and_a_measurement_made_before(bitplan: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "m.json"
    assert bitplan("measure", TINY, "--stages", "--steps", 6, "-o", file).code == 0
    options = ("--cost", "time", "--tau", 0.1, "--json")
    result = bitplan("advise", TINY, "--measurement", file, *options).json
    assert result == bitplan("advise", TINY, "--steps", 6, *options).json
    assert (result["tau"], result["tau_from"], result["cost"]) == (0.1, "as given", "time")
    assert {item["slot"] for item in result["slots"]} >= {"fprop.x", "fprop.w", "wgrad.dy"}
    assert result["plan"]["rules"]


def test_verification_trains_four_ways(bitplan: Callable[..., Any], tmp_path: Path) -> None:
    result = bitplan(
        *("advise", TINY, "--early", "--steps", 4, "--verify", "--verify-steps", 20, "--verify-seeds", 2),
        *("--verify-out", tmp_path / "runs", "--json"),
    ).json
    rows = {row["label"]: row for row in result["verified"]}
    assert list(rows) == ["high precision", "advice", "all E4M3", "all INT8"]
    assert rows["high precision"]["gap"] == 0
    assert rows["high precision"]["cost"] == 1
    assert rows["advice"]["cost"] <= rows["all E4M3"]["cost"] < 0.5
    assert len({row["loss"] for row in rows.values()}) == 4
    assert bitplan("report", tmp_path / "runs", "-o", tmp_path / "page.html").code == 0


def test_verification_draws_the_conclusion(bitplan: Callable[..., Any], tmp_path: Path) -> None:
    """A massive channel: all-E4M3 does not train, which is said with the layer, and the advice does."""
    ran = bitplan("advise", MASSIVE, "--early", "--steps", 4, "--verify", "--verify-steps", 40, "--json")
    rows = {row["label"]: row["trains"] for row in ran.json["verified"]}
    assert (rows["high precision"], rows["advice"], rows["all E4M3"]) == (True, True, False)
    assert ran.json["tau"] == 0.06
    assert "The advice trains." in ran.json["conclusion"]
    assert "all E4M3 does not train here: its error is above tau in 0 (" in ran.json["conclusion"]


def test_advice_that_does_not_train_is_made_again(bitplan: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    options = ("--early", "--steps", 4, "--tau", 4.0, "--verify", "--verify-steps", 40)
    ran = bitplan("advise", MASSIVE, *options, "-o", file, "--json")
    first, last = 4.0, ran.json["tau"]
    assert last < first
    assert "does not train with tau 4" in ran.err
    made_by = Plan.load(file).made_by
    assert isinstance(made_by, dict)
    assert made_by["tau"] == last  # the plan that was written is the one that was checked last
    assert made_by["verified"] == ran.json["conclusion"]


def test_a_plan_that_does_not_train_says_so(bitplan: Callable[..., Any], tmp_path: Path) -> None:
    """Every tau that is tried is too high."""
    file = tmp_path / "plan.yaml"
    options = ("--early", "--steps", 4, "--tau", 1e6, "--verify", "--verify-steps", 40)
    ran = bitplan("advise", MASSIVE, *options, "-o", file)
    assert ran.code == 0
    made_by = Plan.load(file).made_by
    assert isinstance(made_by, dict)
    assert "does not train, even with tau 2.5e+05" in made_by["verified"]
    assert made_by["verified"] in " ".join(ran.out.split())
    assert "which does not train" in ran.err
    assert "bitplan train" not in ran.err


def test_mistakes_are_one_sentence(bitplan: Callable[..., Any]) -> None:
    for arguments, sentence in (
        (["gpt-tiny", "--verify"], "needs a task"),
        ([TINY, "--cost", "money", "--steps", 2], "there is no cost"),
        ([TINY, "--measurement", "missing.json"], "cannot read missing.json"),
        ([TINY, "--base", "missing.yaml"], "missing.yaml"),
    ):
        ran = bitplan("advise", *arguments)
        assert ran.code == 2
        assert sentence in ran.err
        assert len(ran.err.strip().splitlines()) == 1
