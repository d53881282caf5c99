"""``bitplan schedules``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitplan.plans.schedules import TEN, schedule
from bitplan.plans.schedules.evidence import CIFAR


def test_the_figures_of_one_as_json(bitplan: Callable[..., Any]) -> None:
    ran = bitplan("schedules", "RTH", "--bits", "3-8", "--steps", 64000, "--cycles", 8, "--json")
    assert ran.code == 0
    assert list(ran.json) == ["name", "first", "last", "mean_bits", "share_at_max", "relative_cost"]
    assert (ran.json["name"], ran.json["first"], ran.json["last"]) == ("RTH", 8, 8)
    assert round(ran.json["relative_cost"], 3) == 0.399
    other = bitplan("schedules", "cr", "--bits", "5-8", "--steps", 1000, "--cycles", 2, "--json").json
    assert other["mean_bits"] == schedule("CR", low=5, high=8, cycles=2).table(1000).mean()


def test_all_ten_side_by_side_in_their_groups(bitplan: Callable[..., Any]) -> None:
    shown = bitplan("schedules")
    assert shown.code == 0
    for name in TEN:
        assert f"\n{name} " in shown.out
    order = [
        shown.out.index(word) for word in ("high-saving (", "\nRR ", "balanced (", "\nCR ", "low-saving (", "\nER ")
    ]
    assert order == sorted(order)
    assert shown.out.count("size of the saving") == 1
    records = bitplan("schedules", "--json").json
    assert {record["name"]: record["group"] for record in records}["ETH"] == "low-saving"


def test_the_groups_follow_from_the_costs() -> None:
    from bitplan.plans.schedules.named import GROUPS

    costs = {name: schedule(name, low=3, high=8).summary(64000).relative_cost for name in TEN}
    ordered = sorted(costs, key=costs.__getitem__)
    assert set(ordered[:2]) == set(GROUPS["high-saving"])
    assert set(ordered[2:8]) == set(GROUPS["balanced"])
    assert set(ordered[8:]) == set(GROUPS["low-saving"])


def test_a_drawing_has_a_line_for_every_width(bitplan: Callable[..., Any]) -> None:
    lines = bitplan("schedules", "LR", "--bits", "3-8", "--cycles", 1).out.splitlines()
    bars = [line.split("|")[1] for line in lines if "|" in line]
    assert len(bars) == 6
    filled = [bar.count("█") for bar in bars]
    assert filled == sorted(filled)
    assert filled[-1] == 72
    assert [bar.rstrip()[-1] for bar in bars] == ["█"] * 6


@pytest.mark.parametrize(("saving", "bits"), [(0.1, 7), (0.2, 6), (0.35, 5), (0.4, 5)])
def test_a_static_plan_is_recommended_where_it_was_the_best(
    bitplan: Callable[..., Any], saving: float, bits: int
) -> None:
    result = bitplan("schedules", "--saving", saving, "--json").json
    assert (result["name"], result["first"], result["last"]) == ("static", bits, bits)
    assert 1 - result["relative_cost"] == pytest.approx(saving)
    difference = result["difference"]
    assert difference["low"] <= difference["mean"] <= difference["high"]
    assert f"--saving {saving:g}" in result["reason"]
    shown = bitplan("schedules", "--saving", saving).out
    assert shown.count("Not known: ") == len(result["unknown"]) >= 3


def test_the_recommendation_says_how_schedules_compare(bitplan: Callable[..., Any]) -> None:
    """The balanced schedules are worse than a static plan of their cost; nothing of lasting damage is claimed."""
    reason = bitplan("schedules", "--saving", 0.35, "--json").json["reason"]
    assert "The 6 schedules that save as much are worse: -0.45 points (-0.65 to -0.25)" in reason
    assert "damage" not in reason


def test_where_no_static_plan_was_trained_that_is_said(bitplan: Callable[..., Any]) -> None:
    result = bitplan("schedules", "--saving", 0.5, "--json").json
    assert result["name"] == "RTH"
    assert 1 - result["relative_cost"] == pytest.approx(0.601, abs=0.001)
    assert result["difference"]["mean"] == pytest.approx(-1.2, abs=0.01)
    assert "not surely better than RR" in result["reason"]
    assert "a static plan of 4 bits, and 5 in some layers, which saves as much" in result["unknown"][0]


def test_the_static_plan_of_a_saving(bitplan: Callable[..., Any], tmp_path: Path) -> None:
    """It can be made by the command that the recommendation names, and saves what was asked for, and little more."""
    file, eight = tmp_path / "static.yaml", tmp_path / "eight.yaml"
    assert bitplan("plan", "cpt", "resnet20", "--saving", 0.35, "-o", file).code == 0
    assert bitplan("plan", "cpt", "resnet20", "--saving", 0, "-o", eight).code == 0
    cost, whole = (
        bitplan("cost", "resnet20", "--plan", plan, "--steps", 9, "--json").json["gbitops"] for plan in (file, eight)
    )
    assert 0.35 <= 1 - cost / whole < 0.36
    assert bitplan("plan", "cpt", "resnet20", "--saving", 1.5).code == 2


def test_other_ranges_have_no_evidence(bitplan: Callable[..., Any]) -> None:
    result = bitplan("schedules", "--saving", 0.2, "--bits", "5-8", "--json").json
    assert (result["name"], result["difference"]) == ("static", None)
    assert "no plan of this range" in result["unknown"][0]


def test_the_evidence_is_that_of_the_stored_study() -> None:
    file = Path(__file__).parents[2] / "docs" / "results" / "cifar.json"
    study = json.loads(file.read_text())["studies"][0]
    plans = {plan["plan"]: plan for plan in study["plans"]}
    assert study["bits"] == [CIFAR.low, CIFAR.high]
    base = plans.pop("static 8")
    assert CIFAR.base.values == pytest.approx([100 * value for value in base["values"].values()], abs=0.005)
    known = {**CIFAR.static, **CIFAR.schedules}
    assert set(known) == set(plans) - {"FP32"}
    for name, trained in known.items():
        assert trained.values == pytest.approx([100 * value for value in plans[name]["values"].values()], abs=0.005)
        saving = 1 - plans[name]["relative_to_fp32"] / base["relative_to_fp32"]
        assert trained.saving == pytest.approx(saving, abs=0.001)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["XX"], "there is no schedule 'XX'"),
        (["CR", "--bits", "8"], "no range of bits"),
        (["CR", "--bits", "8-3"], "exchange them"),
        (["--saving", "0.9"], "the most is 70%"),
        (["--saving", "2"], "a share of 0 to 1"),
        (["CR", "--saving", "0.3"], "drop CR"),
        (["deficit"], "write it in a plan"),
    ],
)
def test_mistakes_are_one_sentence(bitplan: Callable[..., Any], arguments: list[str], sentence: str) -> None:
    ran = bitplan("schedules", *arguments)
    assert ran.code == 2
    assert sentence in ran.err
    assert len(ran.err.strip().splitlines()) == 1


def test_a_page_is_written_beside_the_figures(bitplan: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page = tmp_path / "new" / "rth.html"
    ran = bitplan("schedules", "RTH", "--steps", 640, "--plot", page, "--json")
    assert (ran.code, ran.json["name"]) == (0, "RTH")
    assert ran.err == f"bitplan: wrote {page}\n"
    assert "RTH 3-8 x8" in page.read_text()
    assert bitplan("schedules", "--steps", 640, "--plot", tmp_path / "ten.html").code == 0
    assert all(f"{name} 3-8 x8" in (tmp_path / "ten.html").read_text() for name in TEN)
    assert bitplan("schedules", "--saving", 0.5, "--steps", 640, "--plot", tmp_path / "saving.html").code == 0
    assert "RTH 3-8 x8" in (tmp_path / "saving.html").read_text()


def test_a_page_needs_plotly(bitplan: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("plotly", "plotly.graph_objects"):
        monkeypatch.setitem(sys.modules, module, None)
    ran = bitplan("schedules", "CR", "--plot", tmp_path / "cr.html")
    assert ran.code == 2
    assert ran.err == "bitplan: drawing a schedule needs plotly, which is not installed: run 'pip install plotly'.\n"
    assert not (tmp_path / "cr.html").exists()
    assert bitplan("schedules", "CR").code == 0  # the terminal needs nothing
