from __future__ import annotations

import os
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from bitplan.errors import RunError, TaskError
from bitplan.lab.compare import Choice, Update, compare
from bitplan.lab.compare.workers import Job, _next_job, _Worker, threads_per_worker
from bitplan.lab.train import RunFolder
from bitplan.machine import cores
from bitplan.plans import Plan

CHOICES = [Choice("FP32", None), Choice("8 bits", "int8-all")]


def metrics(folder: Path) -> dict[str, bytes]:
    return {file.parent.name: file.read_bytes() for file in sorted(folder.glob("*/metrics.jsonl"))}


def test_workers_make_the_runs_that_one_process_makes(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as many as each worker gets: sums of many threads are added in another order
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    try:
        compare(tiny, CHOICES, folder=tmp_path / "one", seeds=range(2))
    finally:
        torch.set_num_threads(before)
    ended: list[Update] = []
    summaries = compare(
        tiny, CHOICES, folder=tmp_path / "two", seeds=range(2), jobs=2, on_update=lambda u: ended.append(u)
    )
    assert len(summaries) == 4
    assert [update.summary for update in ended if update.summary is not None] == summaries
    assert metrics(tmp_path / "two") == metrics(tmp_path / "one")
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_a_worker_goes_on_with_the_graphs_it_has_and_else_makes_those_that_no_other_makes() -> None:
    plain, eight, six = None, Plan.preset("int8-all"), Plan.preset("int6-all")
    jobs = [Job(str(seed), plan, None, seed, Path()) for plan in (plain, eight, six) for seed in range(2)]
    graphs = [job.graphs for job in jobs]
    assert len(set(graphs)) == 3
    assert _next_job(jobs, None, ()) is jobs[0]
    assert _next_job(jobs[1:], None, {graphs[0]}) is jobs[2]  # not the first's other seed, for which another compiles
    assert _next_job(jobs[1:], graphs[4], {graphs[0]}) is jobs[4]
    assert _next_job(jobs[1:2], None, {graphs[0]}) is jobs[1]  # nothing else is left


def test_workers_share_the_cores_stop_when_asked_and_go_on(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    updates: list[Update] = []
    slow = ["steps=100000", "evaluate_every=100000"]
    stopped = compare(
        *(tiny, CHOICES),
        folder=tmp_path,
        seeds=range(2),
        settings=slow,
        jobs=2,
        on_update=updates.append,
        stop=lambda: len({update.job.label for update in updates}) == 2,
    )
    assert [summary.status for summary in stopped] == ["stopped", "stopped"]
    assert len(list(tmp_path.glob("*/run.json"))) == 2  # the other two were not begun
    assert "OMP_NUM_THREADS" not in os.environ
    for summary in stopped:
        place = RunFolder(summary.folder)
        assert not place.is_locked()
        assert place.config().machine["threads"] == threads_per_worker(2)


def test_a_sentence_of_a_worker_is_the_sentence_here(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "train" / "tiny_task.py").read_text()
    own = tmp_path / "own.py"
    own.write_text(text.replace("right = model", "raise ValueError('no figures')\n        right = model"))
    with pytest.raises(TaskError, match=r"failed under .*: ValueError: no figures"):
        compare(f"{own}:Tiny", CHOICES, folder=tmp_path / "runs", settings=["steps=2"], jobs=2)


def test_a_worker_that_is_killed_is_told_in_a_sentence(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINY_DIES_AT", "3")
    with pytest.raises(RunError, match=r"was killed .*: run the same command again"):
        compare(tiny, CHOICES, folder=tmp_path, jobs=2)
    monkeypatch.delenv("TINY_DIES_AT")
    summaries = compare(tiny, CHOICES, folder=tmp_path)
    assert {summary.status for summary in summaries} == {"finished"}


class KilledProcess:
    """The connection and the executor of a worker whose process was killed."""

    def poll(self) -> bool:
        return True

    def recv(self) -> None:
        raise ConnectionResetError

    def submit(self, *arguments: object) -> None:
        raise BrokenProcessPool


def test_a_killed_process_breaks_neither_the_progress_nor_the_next_job(tmp_path: Path) -> None:
    worker = object.__new__(_Worker)
    worker.connection = worker.executor = KilledProcess()  # type: ignore[assignment]
    worker._threads = 1
    assert list(worker.new_progress()) == []
    with pytest.raises(RunError, match=r"8 bits, seed 0 was killed"):
        worker.submit(Job("8 bits", None, None, 0, tmp_path))


def test_threads_are_shared_and_never_none() -> None:
    assert threads_per_worker(1) == cores()
    assert threads_per_worker(10**6) == 1
