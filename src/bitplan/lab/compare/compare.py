"""Comparisons: every plan with every seed in one folder; the same call resumes after an interruption."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from bitplan.analysis.explain import explain
from bitplan.cluster import Cluster
from bitplan.errors import PlanError, RunError
from bitplan.files import json_text
from bitplan.lab.compare.cluster import run_on_cluster
from bitplan.lab.compare.folder import COMPARE_FILE, Choice, Comparison, PlanEntry, read_comparison
from bitplan.lab.compare.workers import Job, Setting, Trainer, Update, run_in_workers
from bitplan.lab.tasks.registry import task_class
from bitplan.lab.train import RunFolder, Summary
from bitplan.lab.train.folder import make_folder, write_durably
from bitplan.plans import Plan
from bitplan.plans.loading import find_plan

#: Plans that are neither files nor presets are written here, so that commands can name them.
PLANS_FOLDER = "plans"


def compare(
    task: str,
    choices: Sequence[Choice],
    *,
    folder: str | os.PathLike[str],
    seeds: Iterable[int] = (0,),
    settings: Sequence[str] = (),
    jobs: int = 1,
    execution: str | None = None,
    device: str = "cpu",
    compile: bool = False,
    cluster: Cluster | None = None,
    command: str = "",
    on_update: Callable[[Update], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> list[Summary]:
    """Train `task` under every plan with every seed, each run in a subfolder of `folder`.

    Runs that have ended are kept and interrupted ones are resumed, so that the same call after an interruption does the
    rest. More plans and seeds may be added to a comparison later.

    :param task: as the command line names it: ``digits``, or ``my_task.py:MyTask``.
    :param settings: changes to the task's recipe, as ``key=value``.
    :param jobs: parallel processes; 1 trains in this process.
    :param cluster: train on this Ray cluster instead of in processes of this machine.
    :param execution: as :func:`bitplan.lab.train.train` takes it.
    :param command: the command that reproduces the comparison, for its record.
    :param on_update: called with the progress and the end of every run.
    :param stop: polled; once it is true, running jobs are stopped, no other is started, and the summaries are returned.
    """
    if jobs < 1:
        raise RunError(f"jobs is {jobs}; it must be at least 1.")
    if cluster is not None and jobs > 1:
        raise RunError("on a cluster as many runs are trained at a time as it has room for: drop --jobs or --cluster.")
    place = Path(folder)
    setting = Setting(task, tuple(settings), execution, device, compile)
    task_class(task)  # raises at once where there is no such task
    planned = planned_jobs(choices, tuple(seeds), place, plan_major=compile)
    trainer = Trainer(setting)
    _require_effect(trainer, planned)
    write_record(place, task, planned, tuple(settings), command)
    on_update, stop = on_update or (lambda update: None), stop or (lambda: False)
    # Runs that have ended are only read: that needs no worker, and is done after a request to stop, too.
    over = [job for job in planned if is_over(job)]
    left = [job for job in planned if job not in over]
    summaries = _run_here(trainer, over, on_update, lambda: False)
    if cluster is not None and left:
        return summaries + run_on_cluster(setting, left, cluster, on_update, stop)
    if jobs > 1 and len(left) > 1:
        return summaries + run_in_workers(setting, left, jobs, on_update, stop)
    return summaries + _run_here(trainer, left, on_update, stop)


def planned_jobs(choices: Sequence[Choice], seeds: Sequence[int], folder: Path, plan_major: bool = False) -> list[Job]:
    """All jobs in order: seed by seed, so that plans can be compared after an early end; or plan by plan."""
    if not choices:
        raise RunError("name at least one plan to compare, or a suite.")
    if any(len(set(own)) != len(own) for own in (seeds, *(choice.seeds or () for choice in choices))) or not seeds:
        raise RunError("name at least one seed, and each only once.")
    by_stem: dict[str, tuple[Job, Sequence[int]]] = {}
    for choice in choices:
        plan = None if choice.plan is None else find_plan(choice.plan)
        source = choice.plan if isinstance(choice.plan, str) else _source_of(plan, choice.label, folder)
        stem = slug(choice.label)
        if stem in by_stem:
            raise RunError(f"two plans are called {choice.label}: give them different names.")
        own = seeds if choice.seeds is None else choice.seeds
        by_stem[stem] = Job(choice.label, plan, source, 0, folder / stem, choice.settings), own
    by_plan = [
        replace(job, seed=seed, folder=folder / f"{stem}-s{seed}")
        for stem, (job, own) in by_stem.items()
        for seed in own
    ]
    return by_plan if plan_major else sorted(by_plan, key=lambda job: [*seeds, job.seed].index(job.seed))


def choices_of(plans: Sequence[str]) -> list[Choice]:
    """Choices from plans as typed by a user: labelled by their names, or by the typed text where names are equal."""
    names = [_name_of(plan) for plan in plans]
    return [
        Choice(name if names.count(name) == 1 else plan, None if plan.lower() == "fp32" else plan)
        for name, plan in zip(names, plans, strict=True)
    ]


def slug(label: str) -> str:
    """A label as the name of a folder.

    >>> slug("8 bits"), slug("plans/a.yaml")
    ('8-bits', 'plans-a.yaml')
    """
    return re.sub(r"[^\w.+=-]+", "-", label).strip("-.").lower() or "plan"


def _name_of(plan: str) -> str:
    if plan.lower() == "fp32":
        return "fp32"
    return find_plan(plan).name or Path(plan).stem


def _source_of(plan: Plan | None, label: str, folder: Path) -> str | None:
    """The name of a plan on the command line; one without a file is written to one."""
    if plan is None:
        return None
    if plan.origin is not None and plan.origin.is_file():
        return str(plan.origin)
    make_folder(folder / PLANS_FOLDER)
    file = folder / PLANS_FOLDER / f"{slug(label)}.yaml"
    write_durably(file, plan.flattened().to_yaml())
    return str(file)


def write_record(folder: Path, task: str, jobs: Sequence[Job], settings: tuple[str, ...], command: str) -> None:
    """Write the comparison's record, together with the runs of earlier calls."""
    recorded = read_comparison(folder)
    if recorded is not None and recorded.task != task:
        raise RunError(f"{folder} holds a comparison on {recorded.task}: name another folder for one on {task}.")
    entries = {} if recorded is None else {entry.label: entry for entry in recorded.plans}
    for job in jobs:
        entry = entries.setdefault(job.label, PlanEntry(job.label, job.plan_source))
        runs = tuple(dict.fromkeys((*entry.runs, job.folder.name)))
        entries[job.label] = replace(entry, plan=job.plan_source, runs=runs)
    seeds = tuple(sorted({job.seed for job in jobs} | set(() if recorded is None else recorded.seeds)))
    comparison = Comparison(task, tuple(entries.values()), seeds, command, settings)
    make_folder(folder)
    write_durably(folder / COMPARE_FILE, json_text(comparison.to_dict()) + "\n")


def _require_effect(trainer: Trainer, jobs: Sequence[Job]) -> None:
    """Raise before training where a plan does not fit the task; plans with existing runs are not checked again."""
    fresh = {job.label: job for job in jobs if job.plan is not None and not RunFolder(job.folder).is_run}
    if not fresh:
        return
    target = trainer.task(jobs[0].seed).target()
    for job in fresh.values():
        assert job.plan is not None
        try:
            explain(target.model, job.plan, target.batch, target.loss)
        except PlanError as error:
            raise PlanError(f"{job.label} does not fit {trainer.setting.task}: {error}") from error


def is_over(job: Job) -> bool:
    """Whether the run of the job has ended, and is not to be continued."""
    place = RunFolder(job.folder)
    return place.is_run and place.status() in ("finished", "diverged")


def _run_here(
    trainer: Trainer, jobs: Sequence[Job], on_update: Callable[[Update], None], stop: Callable[[], bool]
) -> list[Summary]:
    summaries = []
    for job in jobs:
        if stop():
            break
        summary = trainer.run(job, lambda progress, job=job: on_update(Update(job, progress)), stop)  # type: ignore[misc]
        on_update(Update(job, summary=summary))
        summaries.append(summary)
    return summaries
