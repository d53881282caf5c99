"""The jobs of a comparison as tasks of a Ray cluster; run folders are on storage that all of its machines share."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from bitplan.cluster import Cluster, connected
from bitplan.errors import BitplanError, RunError
from bitplan.lab.compare.workers import Job, Setting, Trainer, Update
from bitplan.lab.train import Progress, RunFolder, Summary
from bitplan.lab.train.loop import stop_on_signals

#: Seconds between two looks at the cluster and at the files of running jobs.
_PAUSE = 0.5


def run_on_cluster(
    setting: Setting,
    jobs: Sequence[Job],
    cluster: Cluster,
    on_update: Callable[[Update], None],
    stop: Callable[[], bool],
) -> list[Summary]:
    """Train all jobs as Ray tasks, as many at a time as the cluster has room for.

    Once `stop` is true, running jobs are stopped after their current step and no other is started.
    """
    summaries = []
    with connected(cluster) as ray:
        task = ray.remote(num_cpus=1, num_gpus=cluster.gpus_per_run, max_retries=0)(train_on_cluster)
        jobs = [replace(job, folder=job.folder.absolute()) for job in jobs]
        running = {task.remote(setting, job, os.getcwd()): job for job in jobs}
        try:
            is_stopping = False
            while running:
                if not is_stopping and stop():
                    is_stopping = True
                    for reference in running:
                        ray.cancel(reference)  # an interrupt, which the task takes as a request to stop
                ended, _ = ray.wait([*running], timeout=_PAUSE)
                for reference in ended:
                    job = running.pop(reference)
                    summary = _result(ray, reference, job)
                    if summary is not None:
                        summaries.append(summary)
                        on_update(Update(job, summary=summary))
                for job in running.values():
                    progress = _progress(RunFolder(job.folder))
                    if progress is not None:
                        on_update(Update(job, progress))
        finally:
            for reference in running:
                ray.cancel(reference, force=True)
    return summaries


def _result(ray: Any, reference: Any, job: Job) -> Summary | None:
    """The summary of a task that has ended; None where it was stopped before it began."""
    try:
        outcome = ray.get(reference)
    except ray.exceptions.TaskCancelledError:
        folder = RunFolder(job.folder)
        return folder.summary() if folder.is_run else None
    except ray.exceptions.RayTaskError:  # an error in the task, with its traceback
        raise
    except ray.exceptions.RayError as error:
        raise RunError(
            f"the process that trained {job.label}, seed {job.seed} was killed, or its machine was lost: run the same "
            f"command again to continue."
        ) from error
    if isinstance(outcome, BitplanError):
        raise outcome
    summary: Summary = outcome
    return summary


def _progress(folder: RunFolder) -> Progress | None:
    """The progress of a running job, as its files tell."""
    lines = [line for line in folder.metrics() if "lr" in line] if folder.is_run else []
    if not lines:
        return None
    settings, last = folder.config().settings, lines[-1]
    steps = settings["steps"] + settings.get("hold", 0)
    figures = {name: last[name] for name in ("step", "loss", "bits", "cost")}
    return Progress(steps=steps, phase="training", metric=None, peak=0, seconds=0.0, **figures)


# --- in the tasks


def train_on_cluster(setting: Setting, job: Job, directory: str) -> Summary | BitplanError:
    """Train a job in a worker of the cluster; errors of users are returned, since Ray adds tracebacks to those raised.

    :param directory: the driver's working directory, which names of files are relative to.
    """
    os.chdir(directory)
    torch.set_num_threads(1)  # the task's share, and the same on every machine
    with stop_on_signals(repeated=True) as stop:  # Ray repeats its interrupt
        try:
            return _trainer(setting).run(job, lambda progress: None, stop)
        except BitplanError as error:
            return error


@lru_cache(maxsize=1)
def _trainer(setting: Setting) -> Trainer:
    """The trainer of this worker, which Ray gives further tasks of the comparison."""
    return Trainer(setting)
