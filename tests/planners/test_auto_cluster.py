"""Candidates of a search as actors of a Ray cluster that is started here, with two CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_ray import local_ray

import bitplan as bp
from bitplan.cli.auto import load_problem
from bitplan.cluster import Cluster
from bitplan.planners.auto import LocalTrials
from bitplan.planners.auto.cluster_trials import ClusterTrials
from bitplan.planners.auto.trials import Failure, Trial

TARGET = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 8))
    return model, (torch.randn(1024, 64), torch.randint(8, (1024,))), nn.functional.cross_entropy
"""
PLAN = bp.Plan.from_dict(
    {"version": 1, "execution": "packed", "rules": [{"match": "0", "op": "linear", "activation": "e4m3"}]}
)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with local_ray():
        yield


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    (tmp_path / "own.py").write_text(TARGET)
    monkeypatch.chdir(tmp_path)  # the target's file is named from here, on the cluster, too
    monkeypatch.setenv("BITPLAN_CACHE", str(tmp_path / "cache"))
    return ("own.py:make", (), "cpu", None, "sgd", False, None)


def test_a_cluster_measures_the_peaks_and_losses_of_this_process(arguments: tuple[Any, ...]) -> None:
    here = LocalTrials(load_problem(*arguments))
    trials = ClusterTrials(load_problem, arguments, Cluster())
    try:
        assert trials.most == 2
        # Three candidates: the third waits for the CPU of another one.
        there = trials.measure([None, PLAN, bp.Plan.from_dict({"version": 1, "execution": "packed", "rules": []})])
        losses = [trials.final_losses(plan, 3, 2) for plan in (None, PLAN, None)]
    finally:
        trials.close()
    outcomes = here.measure([None, PLAN])
    assert all(isinstance(trial, Trial) for trial in (*there, *outcomes))
    assert [trial.peak for trial in there[:2]] == [trial.peak for trial in outcomes]  # type: ignore[union-attr]
    assert losses == [here.final_losses(plan, 3, 2) for plan in (None, PLAN, None)]
    assert losses[0] != losses[1]


def test_a_candidate_that_fails_or_is_killed_has_a_reason(arguments: tuple[Any, ...]) -> None:
    broken = bp.Plan.from_dict({"version": 1, "rules": [{"match": "nowhere", "activation": "e4m3"}]})
    trials = ClusterTrials(load_problem, arguments, Cluster())
    (outcome,) = trials.measure([broken])
    assert isinstance(outcome, Failure)
    assert "nowhere" in outcome.reason
    Path("own.py").write_text(TARGET + "\nimport os\nif 'RAY_RAYLET_PID' in os.environ: os.kill(os.getpid(), 9)\n")
    (outcome,) = trials.measure([None])
    assert isinstance(outcome, Failure)
    assert "was killed" in outcome.reason
    trials.close()
