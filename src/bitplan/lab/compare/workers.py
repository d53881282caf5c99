"""Several processes that make runs side by side and share the cores between them.

Each has a pipe to this process: jobs go one way, updates the other. A worker whose pipe is broken (this process was
killed) ends at its next update, and its run can be gone on with.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from bitplan.analysis.targets import in_words, named_file
from bitplan.errors import BitplanError, RunError, TaskError
from bitplan.lab.tasks.registry import find_task
from bitplan.lab.tasks.task import Task
from bitplan.lab.train import Progress, Summary, train
from bitplan.plans import Plan

# --- One run of a comparison, as a process that makes it is told of it


@dataclass(frozen=True)
class Job:
    """A run to make, or to go on with."""

    #: Of its plan.
    label: str
    plan: Plan | None
    #: What names the plan on the command line.
    plan_source: str | None
    seed: int
    folder: Path
    #: What it changes in the task's recipe, as ``key=value``.
    settings: tuple[str, ...] = ()

    @property
    def graphs(self) -> str:
        """What the compiled graphs of the run depend on: the plan, but for its schedules and for who follows which."""
        if self.plan is None:
            return ""
        content = self.plan.flattened().to_dict()
        rules: list[dict[str, Any]] = []
        for rule in _without_followed(content.get("rules", [])):
            repeats = bool(rules) and rules[-1]["match"] == "*" and {**rule, "match": "*"} == rules[-1]
            if not repeats:  # some modules follow another schedule than the rest, and that is all
                rules.append(rule)
        return json.dumps([rules, _without_followed(content.get("quantizers")), content.get("optimizer")])


def _without_followed(content: Any) -> Any:
    """Part of a plan's content, with any schedule for the one that gives a quantizer its bits."""
    if isinstance(content, list):
        return [_without_followed(each) for each in content]
    if not isinstance(content, dict):
        return content
    return {
        key: "any" if key == "bits" and isinstance(value, str) else _without_followed(value)
        for key, value in content.items()
    }


@dataclass(frozen=True)
class Setting:
    """What all runs of a comparison share."""

    #: As the command line names it.
    task: str
    settings: tuple[str, ...] = ()
    execution: str = "emulate"
    device: str = "cpu"
    compile: bool = False


@dataclass(frozen=True)
class Update:
    """What became of a job since the last update."""

    job: Job
    progress: Progress | None = None
    #: At its end.
    summary: Summary | None = None


class Trainer:
    """Makes runs one after the other in this process, and keeps for the next what the next can use.

    Tasks are kept by seed, with the data they have read. A compiled graph serves all seeds of a plan, and plans that
    differ in their schedules only; other plans make other graphs, and those of the last one are dropped before torch
    counts too many.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._tasks: dict[tuple[int, tuple[str, ...]], tuple[Task, dict[str, float]]] = {}
        self._last: str | None = None

    def run(self, job: Job, on_progress: Callable[[Progress], None], stop: Callable[[], bool]) -> Summary:
        """What came of the job; a run that is over already is only read."""
        graphs = job.graphs
        if self.setting.compile and self._last not in (None, graphs):
            torch.compiler.reset()
        self._last = graphs
        try:
            return train(
                self.task(job.seed, job.settings),
                job.plan,
                folder=job.folder,
                execution=self.setting.execution,
                device=self.setting.device,
                compile=self.setting.compile,
                task_source=self.setting.task,
                plan_source=job.plan_source,
                on_progress=on_progress,
                stop=stop,
            )
        except BitplanError:
            raise
        except Exception as error:
            named = named_file(self.setting.task)
            if named is None:
                raise
            words = in_words(error, named[0])
            raise TaskError(f"{self.setting.task} failed under {job.label}, seed {job.seed}: {words}") from error

    def task(self, seed: int, settings: tuple[str, ...] = ()) -> Task:
        """The task with that seed, and with more settings than all runs share, as if it were fresh."""
        key = (seed, settings)
        if key not in self._tasks:
            task = find_task(self.setting.task, (*self.setting.settings, *settings), seed)
            self._tasks[key] = task, copy.deepcopy(task.memory)
        task, memory = self._tasks[key]
        task.memory = copy.deepcopy(memory)
        return task


#: Seconds between two updates of one job, and between two looks at the request to stop.
_PAUSE = 0.1
#: Seconds that workers get to end after their last job.
_PATIENCE = 5.0


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_of(workers: int) -> int:
    """Of each worker, so that together they use every core once."""
    return max(1, cores() // workers)


def run_in_workers(
    setting: Setting,
    jobs: Sequence[Job],
    workers: int,
    on_update: Callable[[Update], None],
    stop: Callable[[], bool],
) -> list[Summary]:
    """Make all runs; once `stop` is true, those at work are stopped and the others are not begun."""
    pending, summaries = list(jobs), []
    with _started(setting, min(workers, len(jobs))) as (connections, stopped):
        busy: dict[Connection, Job] = {}
        last: dict[Connection, str] = {}
        idle = list(connections)
        while busy or (pending and not stopped.is_set()):
            if stop():
                stopped.set()
            while idle and pending and not stopped.is_set():
                connection = idle.pop()
                job = pending[0]
                if setting.compile:
                    job = _next_job(pending, last.get(connection), {each.graphs for each in busy.values()})
                pending.remove(job)
                busy[connection], last[connection] = job, job.graphs
                connection.send(job)
            for ready in wait(list(busy), _PAUSE):
                connection = next(each for each in busy if each is ready)
                update = _received(connection, busy[connection])
                on_update(update)
                if update.summary is not None:
                    summaries.append(update.summary)
                    del busy[connection]
                    idle.append(connection)
    return summaries


def _next_job(pending: Sequence[Job], own: str | None, others: Container[str]) -> Job:
    """The next whose compiled graphs the worker has; else one whose graphs no other worker makes; else the next."""
    known = (job for job in pending if own is not None and job.graphs == own)
    new = (job for job in pending if job.graphs not in others)
    return next(known, None) or next(new, pending[0])


def _received(connection: Connection, job: Job) -> Update:
    try:
        message = connection.recv()
    except EOFError:
        raise RunError(
            f"the process that trained {job.label}, seed {job.seed} was killed (out of memory, perhaps): "
            f"the same command goes on, with fewer --jobs if memory is short."
        ) from None
    if isinstance(message, BitplanError):
        raise message
    if isinstance(message, str):
        raise RuntimeError(f"{job.label}, seed {job.seed} failed:\n{message}")
    return Update(job, *message)


@contextmanager
def _started(setting: Setting, count: int) -> Iterator[tuple[list[Connection], Any]]:
    """Workers that wait for jobs, and the event that stops them; none is left at the end."""
    context = multiprocessing.get_context("spawn")
    stopped = context.Event()
    connections: list[Connection] = []
    processes = []
    threads = threads_of(count)
    try:
        with _threads_in_environment(threads):
            for _ in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, stopped, setting, threads), daemon=True)
                process.start()
                theirs.close()
                connections.append(ours)
                processes.append(process)
        yield connections, stopped
        for connection in connections:
            connection.send(None)
        for process in processes:
            process.join(_PATIENCE)
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
            process.join()
        for connection in connections:
            connection.close()


@contextmanager
def _threads_in_environment(threads: int) -> Iterator[None]:
    """What a process reads when it starts; a number that the user chose stays."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]


def _work(connection: Connection, stopped: Any, setting: Setting, threads: int) -> None:
    """A worker's life: jobs come, updates go, None ends it."""
    # Ctrl-C reaches the whole group of processes: the one that was asked decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    torch.set_num_threads(min(threads, torch.get_num_threads()))
    trainer = Trainer(setting)
    try:
        while (job := connection.recv()) is not None:
            connection.send(_done(trainer, job, _Pacer(connection), stopped.is_set))
    except (EOFError, BrokenPipeError):
        pass  # nobody is there any more


def _done(trainer: Trainer, job: Job, pacer: _Pacer, stop: Callable[[], bool]) -> Any:
    try:
        return None, trainer.run(job, pacer, stop)
    except BrokenPipeError:
        raise
    except BitplanError as error:
        return error
    except Exception:
        return traceback.format_exc()


class _Pacer:
    """Sends progress, but not every step of it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sent = 0.0

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._sent >= _PAUSE:
            self._sent = now
            self._connection.send((progress, None))
