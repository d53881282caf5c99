from __future__ import annotations

from pathlib import Path

import pytest

from bitplan.errors import PlanError
from bitplan.plans import Plan
from bitplan.plans.loading import find_plan


def test_a_plan_is_itself() -> None:
    plan = Plan.preset("bf16-all")
    assert find_plan(plan) is plan


def test_a_presets_name_is_that_preset() -> None:
    assert find_plan("fp8-all") == Plan.preset("fp8-all")


@pytest.mark.parametrize("name", ["own.yaml", "own.json", "own"])
def test_anything_else_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plan = Plan.from_dict({"version": 1, "rules": [{"match": "fc", "weight": "e3m2"}]})
    plan.save(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert find_plan(name) == plan


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("fp8-al", r"there is no preset and no file 'fp8-al'; did you mean .*fp8-all"),
        ("absent.yaml", r"absent\.yaml"),
    ],
)
def test_what_is_neither_is_told(name: str, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        find_plan(name)
