"""What the benchmark of losses under found plans writes down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks import auto_losses, foreign_models, own_plans
from bitplan.analysis.targets import Target
from bitplan.errors import BitplanError


def tiny() -> Target:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 10))
    return Target(model, (torch.randn(8, 3, 8, 8), torch.zeros(8, dtype=torch.int64)), F.cross_entropy)


@pytest.fixture(autouse=True)
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches for a tiny model: two limits gave one plan, a third BF16 with recomputation."""

    def plan(bits: str, peak: int) -> dict[str, Any]:
        made_by = {"planner": "bitplan auto", "peak_bytes": peak, "plain_peak_bytes": 900}
        rules = [{"match": "*", "op": "linear", "activation": bits}]
        return {"plan": {"version": 1, "name": bits, "made_by": made_by, "rules": rules}}

    recompute = {"plan": {"version": 1, "rules": [], "execution": {"kind": "native", "recompute": "activations"}}}
    searches = {"tiny": plan("e4m3", 700), "tiny:80%": plan("e4m3", 700), "tiny:60%": plan("e2m1", 500)}
    file = tmp_path / "searches.json"
    file.write_text(json.dumps({"searches": {**searches, "tiny:90%": recompute, "other": plan("e3m4", 1)}}))
    monkeypatch.setattr(own_plans, "SEARCHES", file)
    monkeypatch.setitem(foreign_models.MODELS, "tiny", tiny)
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)


def test_every_plan_that_differs_has_one_row_paired_by_seed() -> None:
    plain, wide, narrow = auto_losses.measure("tiny", 4, steps=12, seeds=2, jobs=1, in_processes=False)
    assert (plain.plan, plain.peak, plain.gap) == (auto_losses.PLAIN, 900, None)
    assert (wide.plan, wide.searches, wide.peak) == ("e4m3", ("", "80%"), 700)
    assert (narrow.plan, narrow.searches, narrow.peak) == ("e2m1", ("60%",), 500)
    assert plain.losses[0] != plain.losses[1]
    for row in (wide, narrow):
        assert row.losses != plain.losses
        assert row.gap == pytest.approx(sum(row.losses) / 2 - sum(plain.losses) / 2)
    assert abs(wide.gap or 0) < abs(narrow.gap or 0)


def test_batches_have_as_many_samples_as_asked_for() -> None:
    problem = auto_losses.small_problem("tiny", 3)
    images, labels = problem.target.batch
    assert (len(images), len(labels)) == (3, 3)
    assert callable(problem.data)
    assert [len(part) for part in problem.data(0)] == [3, 3]


def test_a_model_without_a_search_is_a_sentence() -> None:
    with pytest.raises(BitplanError, match="no search for resnet50 has a plan"):
        auto_losses.measure("resnet50", 1, steps=1, seeds=1, jobs=1, in_processes=False)
