"""The examples of docs/compare.md and docs/report.md run, and their pages name what exists."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitplan.lab.compare import SUITES

DOCS = Path(__file__).parents[2] / "docs"
WriteRun = Callable[..., Path]


def example(page: str) -> str:
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)
    return str(block)


def test_the_example_of_comparing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(example("compare.md"), names)
    assert capsys.readouterr().out.startswith("On digits (2 seeds, 20 steps), ")
    assert "<table>" in names["report"]._repr_html_()


def test_the_example_of_reporting(
    write_run: WriteRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "a", value=0.75)
    exec(example("report.md"), {})
    assert "fp32 alone Spread(mean=0.75" in capsys.readouterr().out


def test_every_suite_is_described() -> None:
    text = (DOCS / "compare.md").read_text()
    assert all(f"| `{name}` |" in text for name in SUITES)


def test_the_picture_is_there_and_small() -> None:
    picture = DOCS / "images" / "report.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size < 250_000
