from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Bitplan = Callable[..., Any]
QUICK = ("--seeds", 1, "--set", "steps=8", "--set", "model=resnet8", "--set", "width=0.25", "--set", "batch=16")


def test_the_demo_trains_all_plans_and_ends_with_the_answer_and_the_page(
    bitplan: Bitplan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, as on a single core: a process for each core takes seconds to start."""
    monkeypatch.setattr("bitplan.cli.compare.cores", lambda: 1)
    folder = tmp_path / "new" / "folder"
    ran = bitplan("demo", "-o", folder, *QUICK)
    assert ran.code == 0
    *_, answer, place = ran.out.splitlines()
    assert answer.startswith("On digits (1 seed, 8 steps), ")
    page = folder / "report.html"
    assert place == f"Open this page to see it: {page}"
    text = page.read_text()
    for label in ("FP32", "BF16", "8 bits", "6 bits", "4 bits", "2 bits"):
        assert f"[{label}" not in text
        assert label in text
        assert f"{label}, seed 0: " in ran.out
    again = bitplan("demo", "-o", folder, *QUICK, "--json")
    assert again.json["page"] == str(page)
    assert len(again.json["experiments"][0]["runs"]) == 6


def test_a_demo_into_a_place_that_cannot_be_a_folder(bitplan: Bitplan, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    ran = bitplan("demo", "-o", tmp_path / "taken")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("bitplan: cannot make the folder")


def test_without_plotly_nothing_is_trained_in_vain(
    bitplan: Bitplan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bitplan.errors import RunError

    def missing() -> None:
        raise RunError("no plotly here.")

    monkeypatch.setattr("bitplan.cli.compare.plotly", missing)
    ran = bitplan("demo", "-o", tmp_path / "demo")
    assert (ran.code, ran.err) == (2, "bitplan: no plotly here.\n")
    assert not (tmp_path / "demo").exists()
