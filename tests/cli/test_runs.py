from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Bitplan = Callable[..., Any]


def test_runs_are_listed_with_what_came_of_them(bitplan: Bitplan, tmp_path: Path, write_run: Any) -> None:
    write_run(tmp_path / "a", value=0.91)
    write_run(tmp_path / "b", plan="e4m3-all", seed=2, status="unfinished", value=None)
    write_run(tmp_path / "c" / "d", status="diverged", value=float("nan"))
    listed = bitplan("runs", tmp_path, "--json").json
    assert [(Path(run["folder"]).name, run["status"]) for run in listed] == [
        ("a", "finished"),
        ("b", "unfinished"),
        ("d", "diverged"),
    ]
    first, second, third = listed
    assert (first["task"], first["plan"], first["seed"], first["metric"]) == ("digits", None, 0, "accuracy")
    assert (first["value"], first["step"], first["steps"]) == (0.91, 30, 30)
    assert (second["plan"], second["seed"], second["value"], second["step"]) == ("e4m3-all", 2, None, 30)
    assert third["why"] == "it diverged at step 30."
    table = bitplan("runs", tmp_path).out
    assert [line.split()[1:5] for line in table.splitlines() if line.strip().startswith(str(tmp_path))] == [
        ["digits", "-", "0", "finished"],
        ["digits", "e4m3-all", "2", "unfinished"],
        ["digits", "-", "0", "diverged"],
    ]


def test_a_run_that_cannot_be_read_hides_no_other(bitplan: Bitplan, tmp_path: Path, write_run: Any) -> None:
    write_run(tmp_path / "good")
    write_run(tmp_path / "new", bitplan_run=2)
    (write_run(tmp_path / "torn") / "summary.json").write_text("{")
    ran = bitplan("runs", tmp_path)
    assert ran.code == 0
    assert ran.out.count("digits") == 1
    assert "new is a run folder of version 2" in ran.err
    assert "summary.json is damaged" in ran.err
    statuses = {Path(run["folder"]).name: run["status"] for run in bitplan("runs", tmp_path, "--json").json}
    assert statuses == {"good": "finished", "new": "unreadable", "torn": "unreadable"}


def test_no_runs_and_no_folder(bitplan: Bitplan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran = bitplan("runs")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "bitplan: there is no folder runs: name a run folder, or one that holds runs.\n"
    Path("runs").mkdir()
    assert bitplan("runs").out == "runs holds no runs: bitplan train and bitplan.record() make them.\n"
    assert json.loads(bitplan("runs", "--json").out) == []
