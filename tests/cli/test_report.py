from __future__ import annotations

import csv
import json
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitplan.cli.runs import is_complete, runs_state

Bitplan = Callable[..., Any]
WriteRun = Callable[..., Path]


@pytest.fixture
def runs(write_run: WriteRun, tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    for seed in range(2):
        write_run(folder / f"fp32-{seed}", seed=seed, value=0.9)
        write_run(folder / f"a-{seed}", plan="a", seed=seed, value=0.9 + 0.0001 * seed, cost=0.1)
    write_run(folder / "lost", plan="lost", value=None, status="diverged", losses=(2.0, float("nan")))
    return folder


def test_report_writes_a_page_and_prints_the_table_and_the_answer(bitplan: Bitplan, runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "new" / "page.html"
    ran = bitplan("report", runs, "-o", page)
    assert (ran.code, ran.err) == (0, "")
    assert page.read_text().startswith("<!doctype html>")
    assert "a keeps the accuracy of fp32 (90.0 % against 90.0 %)" in ran.out
    assert "lost fails (diverged in 1 of 1 run)" in ran.out
    assert ran.out.endswith(f"The page: {page}\n")


def test_the_page_lies_beside_the_user_by_default(
    bitplan: Bitplan, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bitplan("report", runs / "a-0", runs / "fp32-1").code == 0
    assert (tmp_path / "report.html").exists()


def test_report_as_json(bitplan: Bitplan, runs: Path, write_run: WriteRun, tmp_path: Path) -> None:
    for seed in range(2):
        write_run(runs / f"equal-{seed}", plan="equal", seed=seed, value=0.9, cost=0.2)
    ran = bitplan("report", runs, "-o", tmp_path / "page.html", "--json")
    (experiment,) = ran.json["experiments"]
    assert ran.json["answer"] == experiment["answer"]
    assert [(plan["plan"], plan["runs"], plan["verdict"]) for plan in experiment["plans"]] == [
        ("a", 2, "keeps"),
        ("equal", 2, "undecided"),
        ("fp32", 2, "reference"),
        ("lost", 1, "fails"),
    ]
    plan, equal, reference = experiment["plans"][:3]
    p_value = 2 * (0.5 + math.atan((-0.00005 - 0.009) / 0.00005) / math.pi)  # two plans, one degree of freedom
    assert (plan["margin"], plan["p_value"]) == (pytest.approx(0.009), pytest.approx(p_value, rel=1e-6))
    # Equal with both seeds, which a coarse metric often is.
    assert equal["loss"] == {"mean": 0.0, "low": "-Infinity", "high": "Infinity", "pairs": 2}
    assert (equal["why"], equal["p_value"]) == (
        "equal with every seed, which says nothing about others, margin 1.0 % of fp32",
        0.25,
    )
    assert (reference["loss"], reference["margin"], reference["p_value"]) == (None, None, None)
    assert experiment["runs"][-1]["loss"] == "NaN"
    assert ran.json["page"] == str(tmp_path / "page.html")
    assert ran.err == ""


def test_the_margin_is_an_option(bitplan: Bitplan, runs: Path, write_run: WriteRun, tmp_path: Path) -> None:
    for seed, value in enumerate((0.88, 0.8801)):
        write_run(runs / f"b-{seed}", plan="b", seed=seed, value=value)

    def verdict(*options: object) -> str:
        document = bitplan("report", runs, "-o", tmp_path / "page.html", "--json", *options).json
        (verdict,) = (plan["verdict"] for plan in document["experiments"][0]["plans"] if plan["plan"] == "b")
        return str(verdict)

    assert (verdict(), verdict("--margin", 0.05)) == ("loses", "keeps")
    assert "5.0 % of the reference's accuracy" in (tmp_path / "page.html").read_text().replace("&#39;", "'")
    ran = bitplan("report", runs, "--margin", 2)
    assert (ran.code, ran.err) == (2, "bitplan: the margin is 2; it must be a share between 0 and 1, such as 0.01.\n")


def test_report_as_csv(bitplan: Bitplan, runs: Path, tmp_path: Path) -> None:
    ran = bitplan("report", runs, "-o", tmp_path / "page.html", "--csv", tmp_path / "runs.csv")
    assert ran.err == f"bitplan: wrote {tmp_path / 'runs.csv'}\n"
    with (tmp_path / "runs.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["plan"], line["seed"], line["status"]) for line in lines] == [
        *(("a", "0", "finished"), ("a", "1", "finished")),
        *(("fp32", "0", "finished"), ("fp32", "1", "finished")),
        ("lost", "0", "diverged"),
    ]
    assert lines[0]["command"] == "bitplan train digits --plan a --seed 0"


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda runs: None, "bitplan: there is no folder"),
        (lambda runs: (runs / "a-0" / "run.json").write_text("{"), "run.json is damaged"),
        (lambda runs: (runs / "a-0" / "run.json").write_text('{"bitplan_run": 2}'), "version 2"),
    ],
)
def test_what_cannot_be_reported_is_one_sentence(
    bitplan: Bitplan, runs: Path, tmp_path: Path, prepare: Callable[[Path], Any], message: str
) -> None:
    requests = runs if prepare(runs) else tmp_path / "missing"
    ran = bitplan("report", requests, "-o", tmp_path / "page.html")
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
    assert ran.err.count("\n") == 1
    assert not (tmp_path / "page.html").exists()


def test_a_page_that_cannot_be_written(bitplan: Bitplan, runs: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    ran = bitplan("report", runs, "-o", tmp_path / "taken" / "page.html")
    assert ran.code == 2
    assert ran.err.startswith("bitplan: cannot make the folder")


def test_an_old_page_stays_where_the_runs_cannot_be_read(bitplan: Bitplan, runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("old")
    (runs / "a-0" / "summary.json").write_text(json.dumps({"status": "odd"}))
    assert bitplan("report", runs, "-o", page).code == 2
    assert page.read_text() == "old"


def test_a_page_is_written_anew_while_runs_go_on(bitplan: Bitplan, runs: Path, write_run: WriteRun) -> None:
    run = write_run(runs / "new", plan="new", status="unfinished", value=None)
    page = runs.parent / "page.html"
    seen: list[str] = []

    def train() -> None:
        while not page.exists():
            time.sleep(0.02)
        seen.append(page.read_text())
        (run / "summary.json").write_text((runs / "a-0" / "summary.json").read_text())
        time.sleep(0.8)  # all runs are over for a moment, as between two runs of a script
        write_run(runs / "later", plan="later")

    training = threading.Thread(target=train)
    training.start()
    ran = bitplan("report", runs, "--watch", "--every", "0.5", "-o", page)
    training.join()
    assert ran.code == 0
    assert str(page) in ran.err
    assert 'data-refresh="0.5"' in seen[0]
    assert "1 of 6 runs is not finished" in seen[0]
    assert "later" in page.read_text()
    assert "data-refresh=" not in page.read_text()
    assert "not finished" not in page.read_text()


def test_a_comparison_is_watched_to_its_last_run(write_run: WriteRun, runs: Path) -> None:
    assert is_complete(runs)
    comparison = {"bitplan_compare": 1, "task": "digits", "settings": [], "seeds": [0], "command": ""}
    plans = [{"label": "a", "plan": "a", "runs": ["a-0", "a-1", "a-2"]}]
    (runs / "compare.json").write_text(json.dumps(comparison | {"plans": plans}))
    assert not is_complete(runs)
    write_run(runs / "a-2", plan="a", seed=2)
    assert is_complete(runs)
    assert runs_state(runs) == runs_state(runs)
