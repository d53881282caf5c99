"""The jobs of a comparison: trained one after the other in this process, or in several that share the cores.

Every worker is a ``ProcessPoolExecutor`` of one process. A single executor for all of them could neither give a job to
the worker that has compiled its graphs nor say which job a killed process was training.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Protocol

import torch

from bitplan.analysis.targets import describe_error, parse_file_name
from bitplan.errors import BitplanError, RunError, TaskError
from bitplan.lab.tasks.registry import find_task
from bitplan.lab.tasks.task import Task
from bitplan.lab.train import Progress, Summary, train
from bitplan.machine import cores
from bitplan.plans import Plan


@dataclass(frozen=True)
class Job:
    """A run to train, or to continue."""

    #: The label of its plan in the comparison.
    label: str
    plan: Plan | None
    #: The plan's name on the command line.
    plan_source: str | None
    seed: int
    folder: Path
    #: Changes to the task's recipe, as ``key=value``.
    settings: tuple[str, ...] = ()

    @property
    def graphs(self) -> str:
        """What the compiled graphs of the run depend on: its plan without schedules and which rule follows which."""
        if self.plan is None:
            return ""
        content = self.plan.flattened().to_dict()
        rules: list[dict[str, Any]] = []
        for rule in _without_schedules(content.get("rules", [])):
            repeats = bool(rules) and rules[-1]["match"] == "*" and {**rule, "match": "*"} == rules[-1]
            if not repeats:  # it only lets some modules follow another schedule than the rest
                rules.append(rule)
        return json.dumps([rules, _without_schedules(content.get("quantizers")), content.get("optimizer")])


def _without_schedules(content: Any) -> Any:
    """Part of a plan's content, with the names of the schedules that set bits replaced by ``any``."""
    if isinstance(content, list):
        return [_without_schedules(item) for item in content]
    if not isinstance(content, dict):
        return content
    return {
        key: "any" if key == "bits" and isinstance(value, str) else _without_schedules(value)
        for key, value in content.items()
    }


@dataclass(frozen=True)
class Setting:
    """What all runs of a comparison share."""

    #: As the command line names it.
    task: str
    settings: tuple[str, ...] = ()
    execution: str | None = None
    device: str = "cpu"
    compile: bool = False
    #: A worker keeps its process, with the data and graphs it has, for its next job.
    has_one_job: bool = False

    def trainer(self) -> Trainer:
        return Trainer(self)


class JobTrainer(Protocol):
    """Trains jobs in the process of a worker."""

    def run(self, job: Job, on_progress: Callable[[Progress], None], stop: Callable[[], bool]) -> Summary: ...


class JobSetting(Protocol):
    """What all jobs of a comparison share, as workers receive it."""

    @property
    def compile(self) -> bool: ...

    @property
    def has_one_job(self) -> bool:
        """Whether every job has a process of its own, which ends once a stop is requested."""

    def trainer(self) -> JobTrainer: ...


@dataclass(frozen=True)
class Update:
    """News of a job: progress, or the summary when it has ended."""

    job: Job
    progress: Progress | None = None
    summary: Summary | None = None


class Trainer:
    """Trains jobs one after the other in this process, and reuses tasks and compiled graphs.

    Tasks are cached by seed, with the data they have read. All seeds of a plan, and plans that differ only in their
    schedules, share compiled graphs. Other plans need other graphs: those of the last plan are dropped first, so that
    torch's recompile limit is not reached.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._tasks: dict[tuple[int, tuple[str, ...]], tuple[Task, dict[str, Any]]] = {}
        self._last: str | None = None

    def run(self, job: Job, on_progress: Callable[[Progress], None], stop: Callable[[], bool]) -> Summary:
        """Train the job and return its summary; a run that has ended already is only read."""
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
            task_file = parse_file_name(self.setting.task)
            if task_file is None:
                raise
            message = describe_error(error, task_file[0])
            raise TaskError(f"{self.setting.task} failed under {job.label}, seed {job.seed}: {message}") from error

    def task(self, seed: int, settings: tuple[str, ...] = ()) -> Task:
        """The task with that seed and further settings, in its initial state."""
        key = (seed, settings)
        if key not in self._tasks:
            task = find_task(self.setting.task, (*self.setting.settings, *settings), seed)
            self._tasks[key] = task, copy.deepcopy(task.memory)
        task, memory = self._tasks[key]
        task.memory = copy.deepcopy(memory)
        return task


#: Seconds between two progress updates of a job, and between two checks of the request to stop.
_PAUSE = 0.1


def threads_per_worker(workers: int) -> int:
    """The number of threads of each worker, so that together they use every core once."""
    return max(1, cores() // workers)


def run_in_workers(
    setting: JobSetting,
    jobs: Sequence[Job],
    count: int,
    on_update: Callable[[Update], None],
    stop: Callable[[], bool],
) -> list[Summary]:
    """Train all jobs in `count` processes; once `stop` is true, running jobs are stopped and no other is started."""
    pending = list(jobs)
    summaries: list[Summary] = []
    with _workers(setting, min(count, len(jobs))) as (workers, stopped):
        while any(worker.job for worker in workers) or (pending and not stopped.is_set()):
            if stop():
                stopped.set()
                if setting.has_one_job:
                    for worker in workers:
                        worker.connection.close()  # which ends its process
                    return summaries
            for worker in workers:
                if worker.job is None and pending and not stopped.is_set():
                    running = {other.job.graphs for other in workers if other.job is not None}
                    job = _next_job(pending, worker.graphs, running) if setting.compile else pending[0]
                    pending.remove(job)
                    worker.submit(job)
            ended, _ = wait([worker.future for worker in workers if worker.job is not None], _PAUSE, FIRST_COMPLETED)
            for worker in list(workers):
                if worker.job is None:
                    continue
                for progress in worker.new_progress():
                    on_update(Update(worker.job, progress))
                if worker.future in ended:
                    job, worker.job = worker.job, None
                    summaries.append(worker.summary(job))
                    on_update(Update(job, summary=summaries[-1]))
                    if setting.has_one_job:
                        worker.close()
                        workers[workers.index(worker)] = _Worker(setting, threads_per_worker(len(workers)), stopped)
    return summaries


def _next_job(pending: Sequence[Job], own: str | None, others: Container[str]) -> Job:
    """The next job whose graphs the worker has compiled, or else one whose graphs no other worker compiles."""
    same = (job for job in pending if own is not None and job.graphs == own)
    new = (job for job in pending if job.graphs not in others)
    return next(same, None) or next(new, pending[0])


class _Worker:
    """One process. Its connection carries progress; the process ends at once when this end is closed."""

    future: Future[Summary]

    def __init__(self, setting: JobSetting, threads: int, stopped: Event) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.connection, self._process_end = spawn.Pipe()
        self._threads = threads
        self.executor = ProcessPoolExecutor(
            1, mp_context=spawn, initializer=_start_worker, initargs=(self._process_end, setting, threads, stopped)
        )
        #: None while it is idle.
        self.job: Job | None = None
        #: Those that its process has compiled last.
        self.graphs: str | None = None

    def submit(self, job: Job) -> None:
        self.job, self.graphs = job, job.graphs
        with _threads_in_environment(self._threads), _reported_kill(job):  # the first job starts the process
            self.future = self.executor.submit(_train_in_worker, job)
        self._process_end.close()

    def new_progress(self) -> Iterator[Progress]:
        with suppress(EOFError, OSError):  # the process was killed: its future says so
            while self.connection.poll():
                yield self.connection.recv()

    def close(self) -> None:
        self.executor.shutdown()
        self.connection.close()

    def summary(self, job: Job) -> Summary:
        with _reported_kill(job):
            return self.future.result()


@contextmanager
def _reported_kill(job: Job) -> Iterator[None]:
    """Report in a sentence that the process of a worker has gone."""
    try:
        yield
    except BrokenProcessPool:
        raise RunError(
            f"the process that trained {job.label}, seed {job.seed} was killed (perhaps out of memory): run the same "
            f"command again to continue, with fewer --jobs if memory is short."
        ) from None


@contextmanager
def _workers(setting: JobSetting, count: int) -> Iterator[tuple[list[_Worker], Event]]:
    """Idle workers and the event that stops their jobs; no process is left at the end."""
    stopped = multiprocessing.get_context("spawn").Event()
    workers = [_Worker(setting, threads_per_worker(count), stopped) for _ in range(count)]
    try:
        yield workers, stopped
    except BaseException:
        for worker in workers:
            worker.connection.close()
        raise
    finally:
        for worker in workers:
            worker.close()


@contextmanager
def _threads_in_environment(threads: int) -> Iterator[None]:
    """Set OpenMP's number of threads for processes started meanwhile, unless the user has set it."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]


# --- In the processes

_train: Callable[[Job], Summary]


def _start_worker(connection: Connection, setting: JobSetting, threads: int, stopped: Event) -> None:
    """Prepare a worker process for its jobs."""
    # Ctrl-C reaches the whole group of processes: the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(connection,), daemon=True).start()
    torch.set_num_threads(min(threads, torch.get_num_threads()))
    trainer, sent = setting.trainer(), 0.0

    def send(progress: Progress) -> None:
        nonlocal sent
        if (now := time.monotonic()) - sent >= _PAUSE:
            sent = now
            connection.send(progress)

    global _train
    _train = partial(trainer.run, on_progress=send, stop=stopped.is_set)


def _exit_with_parent(connection: Connection) -> None:
    """End this process when the parent has closed its end, or was killed: runs can be continued after any step."""
    with suppress(EOFError, OSError):
        connection.recv()
    os._exit(1)


def _train_in_worker(job: Job) -> Summary:
    try:
        return _train(job)
    except BitplanError:
        raise
    except Exception:  # as text, since not every exception can be pickled
        raise RuntimeError(f"{job.label}, seed {job.seed} failed:\n{traceback.format_exc()}") from None
