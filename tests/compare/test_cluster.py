"""Comparisons as tasks of a Ray cluster that is started here, with two CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_ray import local_ray

from bitplan.cluster import Cluster
from bitplan.errors import BitplanError, RunError, TaskError
from bitplan.lab.compare import Choice, Update, compare
from bitplan.lab.train import RunFolder

CHOICES = [Choice("FP32", None), Choice("8 bits", "int8-all")]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Cluster]:
    with local_ray():
        yield Cluster()


def contents(folder: Path) -> dict[str, bytes]:
    """Everything that does not depend on the time or on the folder's name."""
    names = ("metrics.jsonl", "model.safetensors", "plan.yaml")
    return {str(file.relative_to(folder)): file.read_bytes() for name in names for file in folder.glob(f"*/{name}")}


def test_a_cluster_makes_the_runs_that_one_process_makes(tiny: str, tmp_path: Path, cluster: Cluster) -> None:
    compare(tiny, CHOICES, folder=tmp_path / "here", seeds=range(2))
    updates: list[Update] = []
    summaries = compare(
        tiny, CHOICES, folder=tmp_path / "there", seeds=range(2), cluster=cluster, on_update=updates.append
    )
    assert {summary.status for summary in summaries} == {"finished"}
    assert [update.summary for update in updates if update.summary is not None] == summaries
    here = contents(tmp_path / "here")
    assert len(here) == 10  # four runs, two of them with a plan
    assert contents(tmp_path / "there") == here


def test_running_jobs_stop_when_asked_and_go_on(tiny: str, tmp_path: Path, cluster: Cluster) -> None:
    slow = ["steps=100000", "evaluate_every=100000"]
    updates: list[Update] = []
    stopped = compare(
        *(tiny, CHOICES),
        folder=tmp_path,
        seeds=range(2),
        settings=slow,
        cluster=cluster,
        on_update=updates.append,
        stop=lambda: len({update.job.label for update in updates}) == 2,
    )
    assert [summary.status for summary in stopped] == ["stopped", "stopped"]
    assert all(update.progress.step > 0 for update in updates if update.progress is not None)
    assert len(list(tmp_path.glob("*/run.json"))) == 2  # the other two were not begun
    for summary in stopped:
        assert [*RunFolder(summary.folder).checkpoints.glob("*.json")]
        assert not RunFolder(summary.folder).is_locked()


def test_a_sentence_of_a_task_is_the_sentence_here(tmp_path: Path, cluster: Cluster) -> None:
    text = (Path(__file__).parents[1] / "train" / "tiny_task.py").read_text()
    own = tmp_path / "own.py"
    own.write_text(text.replace("right = model", "raise ValueError('no figures')\n        right = model"))
    with pytest.raises(TaskError, match=r"failed under .*: ValueError: no figures"):
        compare(f"{own}:Tiny", CHOICES, folder=tmp_path / "runs", settings=["steps=2"], cluster=cluster)


def test_a_worker_that_is_killed_is_told_in_a_sentence(tmp_path: Path, cluster: Cluster) -> None:
    text = (Path(__file__).parents[1] / "train" / "tiny_task.py").read_text()
    own = tmp_path / "own.py"
    kill = "os.kill(os.getpid(), 9) if os.environ.get('RAY_RAYLET_PID') else None"
    own.write_text(text.replace("right = model", f"import os\n        {kill}\n        right = model"))
    with pytest.raises(RunError, match=r"was killed.*run the same command again"):
        compare(f"{own}:Tiny", CHOICES, folder=tmp_path / "runs", cluster=cluster)


@pytest.mark.parametrize(
    ("options", "token"),
    [({"jobs": 2, "cluster": Cluster()}, "--jobs"), ({"cluster": Cluster(gpus_per_run=9)}, "9: lower --gpus-per-run")],
)
def test_a_cluster_that_does_not_fit_is_one_sentence(
    options: dict[str, Any], token: str, tiny: str, tmp_path: Path
) -> None:
    with pytest.raises(BitplanError, match=token):
        compare(tiny, CHOICES, folder=tmp_path / "runs", **options)


def test_fewer_gpus_than_none_are_refused() -> None:
    with pytest.raises(RunError, match="-1"):
        Cluster(gpus_per_run=-1.0)
