"""The tables of docs/results/assignments.md say what their JSON files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bitplan.lab.targets import load_target
from bitplan.planners.assign import AssignRequest, make_assignment
from bitplan.planners.assign.levels import PAPER

RESULTS = Path(__file__).parents[1] / "docs" / "results"
TEXT = (RESULTS / "assignments.md").read_text()
NETWORKS = {"SqueezeNet, %": "squeezenet", "ResNet-18, %": "resnet18", "GPT, perplexity": "gpt"}
ORDERS = {
    "largest first": "",
    "the same, no promotion": ", no promotion",
    "by sensitivity": ", sensitivity",
    "random": ", random",
    "smallest first": ", smallest",
}


def plans_of(study: str) -> dict[str, dict[str, Any]]:
    (result,) = json.loads((RESULTS / f"assignments-{study}.json").read_text())["studies"]
    return {plan["plan"]: plan for plan in result["plans"]}


def table(header: str) -> list[dict[str, str]]:
    """Column -> cell, of every row of the table whose header line contains these words."""
    lines = [line.strip() for line in TEXT.splitlines()]
    start = next(at for at, line in enumerate(lines) if line.startswith("|") and header in line)
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    names, _, *cells = rows
    # The column after a network's belongs to it: "ratio" and "peak" stand there several times.
    columns = [f"{names[at - 1]}: {name}" if names.count(name) > 1 else name for at, name in enumerate(names)]
    return [dict(zip(columns, row, strict=True)) for row in cells]


def figure(plan: dict[str, Any], scale: float) -> str:
    return f"{scale * plan['metric']:.2f} ± {scale * plan['deviation']:.2f}"


def is_close(cell: str, expected: str) -> bool:
    """Up to one in the last place: means of two seeds are often ties, which floats round either way."""
    reported, recorded = ([float(part) for part in text.split(" ± ")] for text in (cell, expected))
    return all(abs(first - second) < 0.0101 for first, second in zip(reported, recorded, strict=True))


@pytest.mark.parametrize(("column", "study"), NETWORKS.items())
def test_accuracies_and_ratios(column: str, study: str) -> None:
    plans, scale = plans_of(study), 1 if study == "gpt" else 100
    rows = [row for row in table("| ratio | ResNet-18, % |") if row[column]]
    assert {row[""] for row in rows} == {name for name in plans if "," not in name}
    for row in rows:
        plan = plans[row[""]]
        assert is_close(row[column], figure(plan, scale)), row
        assert len(plan["values"]) == 2, "two seeds, as the text says"
        reported = row[f"{column}: ratio"]
        assert reported == ("" if row[""] == "FP32" else f"{plan['ratio']:.3f}"), row


@pytest.mark.parametrize(("column", "study"), NETWORKS.items())
def test_peaks(column: str, study: str) -> None:
    plans = plans_of(study)
    for row in table("| peak | ResNet-18, % |"):
        if row[column]:
            assert row[f"{column}: peak"] == f"{plans[row['']]['packed_peak'] / 2**20:.0f}", row


def test_the_long_study() -> None:
    plans, rows = plans_of("resnet18-long"), table("20,000 iterations")
    assert [row["20,000 iterations"] for row in rows] == list(plans)
    for row in rows:
        plan = plans[row["20,000 iterations"]]
        assert is_close(row["accuracy, %"], figure(plan, 100)), row
        assert row["by seed"] == ", ".join(f"{100 * value:.2f}" for value in plan["values"].values()), row
        assert row["ratio"] == ("" if row["20,000 iterations"] == "FP32" else f"{plan['ratio']:.3f}"), row
        assert row["packed peak, MiB"] == f"{plan['packed_peak'] / 2**20:.0f}", row
    kept, operator = plans["r = 0.7"], plans["operator"]
    assert f"at {kept['ratio'] / operator['ratio']:.1f} times the operator baseline's ratio" in TEXT


@pytest.mark.parametrize("ratio", ["r = 0.5", "r = 0.9"])
def test_orders(ratio: str) -> None:
    plans, rows = plans_of("squeezenet"), table("| r = 0.5 | groups |")
    assert [row[""] for row in rows] == list(ORDERS)
    for row in rows:
        assert is_close(row[ratio], figure(plans[ratio + ORDERS[row[""]]], 100)), row


@pytest.mark.parametrize("ratio", ["r = 0.5", "r = 0.9"])
@pytest.mark.parametrize("order", ["largest", "smallest", "random"])
def test_groups_that_an_order_makes_low(ratio: str, order: str) -> None:
    """Sensitivity's, which a probe on a GPU decides, cannot be counted here."""
    target = load_target("squeezenet")
    requests = AssignRequest(ratio=float(ratio.removeprefix("r = ")), order=order)
    result = make_assignment(target.model, target.batch, target.loss, requests, PAPER)
    (reported,) = [row for row in table("| r = 0.5 | groups |") if row[""].removesuffix(" first") == order]
    assert reported[f"{ratio}: groups"] == str(result.demoted)
