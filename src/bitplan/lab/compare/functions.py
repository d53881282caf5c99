"""Comparisons of a training function of your own: :func:`compare` calls ``train(plan, seed)`` under every plan.

Every call is a run in a process of its own, recorded as :func:`bitplan.record` does. A function has no checkpoints, so
that a run which was killed begins anew; runs that have ended are kept.
"""

from __future__ import annotations

import ast
import inspect
import math
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bitplan.analysis.targets import describe_error, file_sha256, find_callable, import_file, parse_file_name
from bitplan.errors import BitplanError, RunError, TaskError
from bitplan.lab.compare.compare import choices_of, is_over, planned_jobs, slug, write_record
from bitplan.lab.compare.folder import Choice
from bitplan.lab.compare.workers import Job, Update, run_in_workers
from bitplan.lab.tasks.registry import is_training_function, not_a_task
from bitplan.lab.tasks.task import Metric
from bitplan.lab.train.folder import DEFAULT_PARENT, RunFolder
from bitplan.lab.train.record import Recorder, RunNames, as_number, compared_run, metric_named
from bitplan.lab.train.summary import Progress, Summary
from bitplan.plans import Plan
from bitplan.progress import leave_unsaid
from bitplan.runtime.attach import EMULATED

if TYPE_CHECKING:
    from bitplan.lab.report.summaries import Report

#: What a training function is called with, and what it returns.
TrainFunction = Callable[[Plan, int], Mapping[str, float] | float]

#: The function that is called where a file alone is named.
DEFAULT_FUNCTION = "train"


def compare(
    train: TrainFunction | str,
    plans: Sequence[str | Plan | None],
    seeds: int | Iterable[int] = 1,
    *,
    folder: str | os.PathLike[str] | None = None,
    metric: str | None = None,
    better: str | None = None,
    trivial: float = math.nan,
    jobs: int = 1,
    on_update: Callable[[Update], None] | None = None,
) -> Report:
    """Call ``train(plan, seed)`` under every plan with every seed, each in a process of its own, and report on it.

    The function attaches the plan (one without rules for ``"fp32"``), trains, and returns its figures on held-out data:
    ``{"accuracy": 0.97}``, or a number. The first figure is the metric, unless `metric` names another. What
    :func:`bitplan.attach` and :func:`bitplan.record` see inside the function goes into the run's folder. The same call
    after an interruption keeps the runs that have ended and makes the others.

    :param train: a function at the top level of a file, or its name as ``file.py:train``. The file is **executed** in
        each process, so a script guards its own calls with ``if __name__ == "__main__":``.
    :param plans: presets, files or plans; ``"fp32"`` or None for no plan.
    :param seeds: how many, from 0 on, or which.
    :param folder: by default one in ``runs/``, the same for the same file and plans.
    :param metric: as :func:`bitplan.record` takes it; so are `better` and `trivial`.
    :param jobs: processes side by side.
    :param on_update: called with the progress and the end of every run.
    """
    from bitplan.lab.report.summaries import Report

    if isinstance(plans, (str, Plan, Mapping)):
        raise RunError("plans is a list of plans, such as ['fp32', 'int8-all']: put a single one into a list.")
    source = train if isinstance(train, str) else function_source(train)
    choices = _choices(plans)
    place = default_folder(source, [choice.label for choice in choices]) if folder is None else Path(folder)
    compare_function(
        source,
        choices,
        folder=place,
        seeds=tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds),
        metric=None if metric is None else metric_named(metric, better, trivial),
        jobs=jobs,
        on_update=on_update,
    )
    return Report.of([place])


def compare_function(
    source: str,
    choices: Sequence[Choice],
    *,
    folder: Path,
    seeds: Sequence[int],
    metric: Metric | None = None,
    jobs: int = 1,
    command: str = "",
    on_update: Callable[[Update], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> list[Summary]:
    """The runs of the function that `source` names as ``file.py:train``; as :func:`compare`, with labelled plans.

    :param metric: None: the first figure that the function returns.
    :param stop: polled; once it is true, running processes are ended, and the summaries of the others returned.
    """
    if jobs < 1:
        raise RunError(f"jobs is {jobs}; it must be at least 1.")
    path, name = _file_and_name(source)
    source = f"{path}:{name}"
    load_function(source)  # raises before a process is started
    sha256 = file_sha256(path)
    planned = planned_jobs(choices, seeds, folder)
    over = [job for job in planned if is_over(job)]
    for job in planned:
        if RunFolder(job.folder).is_run:
            RunFolder(job.folder).require_task_file(source, sha256)
    write_record(folder, source, planned, (), command)
    on_update = on_update or (lambda update: None)
    summaries = [summary for job in over if (summary := RunFolder(job.folder).summary()) is not None]
    for job, summary in zip(over, summaries, strict=True):
        on_update(Update(job, summary=summary))
    if metric is None and over:
        metric = _metric_of(RunFolder(over[0].folder))
    left = [job for job in planned if job not in over]
    speaker = next((job.folder for job in left if job.plan is not None), None)
    setting = FunctionSetting(source, sha256, folder, metric, speaker=speaker)
    return summaries + run_in_workers(setting, left, jobs, on_update, stop or (lambda: False))


@dataclass(frozen=True)
class FunctionSetting:
    """What all runs of a comparison of a function share."""

    #: As ``file.py:train``.
    source: str
    sha256: str
    #: Of the comparison.
    folder: Path
    #: None: the first figure that the function returns.
    metric: Metric | None = None
    #: The function compiles what it likes.
    compile: bool = False
    #: Seeds, peaks of memory and compiled graphs of one run are nothing to the next one, which has a new process.
    has_one_job: bool = True
    #: The run whose process says that plans are emulated, once for the comparison.
    speaker: Path | None = None

    def trainer(self) -> FunctionTrainer:
        return FunctionTrainer(self)


class FunctionTrainer:
    """Calls a training function in this process."""

    def __init__(self, setting: FunctionSetting) -> None:
        self.setting = setting

    def run(self, job: Job, on_progress: Callable[[Progress], None], stop: Callable[[], bool]) -> Summary:
        """Call the function for the job, and return the summary of its run."""
        path, name = _file_and_name(self.setting.source)
        where = f"{self.setting.source} failed under {job.label}, seed {job.seed}"
        train = load_function(self.setting.source)
        plan_words = [] if job.plan_source is None else [job.plan_source]
        command = ["bitplan", "compare", self.setting.source, "--plans", *(plan_words or ["fp32"])]
        names = RunNames(
            task=f"{path.stem}:{name}" if name != DEFAULT_FUNCTION else path.stem,
            source=self.setting.source,
            seed=job.seed,
            metric=self.setting.metric,
            plan_source=job.plan_source,
            command=shlex.join([*command, "--seeds", str(job.seed + 1)]),
            sha256=self.setting.sha256,
        )
        recorder = Recorder(job.folder, names, on_progress=on_progress)
        if job.folder != self.setting.speaker:
            leave_unsaid(EMULATED)
        torch.manual_seed(job.seed)
        with recorder.opened():
            current = compared_run.set(recorder)
            try:
                figures = train(Plan() if job.plan is None else job.plan, job.seed)
            except BitplanError as error:
                raise type(error)(f"{where}: {error}") from error
            except Exception as error:
                raise TaskError(f"{where}: {describe_error(error, path)}") from error
            finally:
                compared_run.reset(current)
            recorder.judge(*_judged(figures, recorder.names.metric, where))
        assert recorder.summary is not None
        return recorder.summary


def _judged(figures: Any, metric: Metric | None, where: str) -> tuple[dict[str, float], Metric]:
    """The figures that a function returned, and the metric among them."""
    if isinstance(figures, (int, float, torch.Tensor)):
        figures = {metric.name if metric is not None else "metric": figures}
    try:
        returned = figures.items() if isinstance(figures, Mapping) else ()
        values = {str(name): as_number(str(name), value) for name, value in returned}
    except RunError as error:
        raise TaskError(f"{where}: {error}") from error
    if not values:
        raise TaskError(
            f'{where}: it returned {type(figures).__name__}, and no figures: return a dictionary such as {{"accuracy": '
            f"0.97}}, or a number."
        )
    if metric is not None and metric.name not in values:
        raise TaskError(f"{where}: it returned {', '.join(values)}, and is judged by {metric.name}: return that, too.")
    return values, metric or metric_named(next(iter(values)))


def load_function(source: str) -> TrainFunction:
    """The training function that ``file.py:train`` names; the file is **executed**."""
    path, name = _file_and_name(source)
    function: TrainFunction = find_callable(import_file(path, TaskError), path, name, "function", TaskError)
    if not is_training_function(function):
        raise TaskError(not_a_task(function, path, name))
    return function


def function_source(train: TrainFunction) -> str:
    """The name ``file.py:train`` of a function, which processes of their own import it by."""
    if isinstance(train, type) or not callable(train):
        raise RunError("compare() calls a function of a plan and a seed, train(plan, seed), which returns its metrics.")
    name, file = getattr(train, "__qualname__", ""), None
    with suppress(TypeError):  # a function without Python source
        file = inspect.getsourcefile(train)
    is_at_top = "." not in name and name.isidentifier()
    if file is None or not Path(file).is_file() or not is_at_top:
        raise RunError(
            f"{name or train!r} cannot be imported by the processes that train: define it with def at the top of a "
            f"file (in a notebook, a cell that begins with %%writefile train.py), and import it or name it as "
            f"train.py:{name if is_at_top else 'train'}."
        )
    return f"{os.path.relpath(file)}:{name}"


def names_function(source: str) -> bool:
    """Whether ``file.py:train`` names a function rather than a task; the file is read, and not executed."""
    file = parse_file_name(source)
    if file is None or not file[0].is_file():
        return False
    try:
        statements = ast.parse(file[0].read_bytes()).body
    except (SyntaxError, ValueError):
        return False  # executing it says where
    functions = {statement.name for statement in statements if isinstance(statement, ast.FunctionDef)}
    has_classes = any(isinstance(statement, ast.ClassDef) for statement in statements)
    return file[1] in functions if file[1] else DEFAULT_FUNCTION in functions and not has_classes


def default_folder(source: str, labels: Sequence[str]) -> Path:
    """The folder of a comparison: the same for the same file and plans, whatever the number of seeds."""
    path, name = _file_and_name(source)
    task = path.stem if name == DEFAULT_FUNCTION else f"{path.stem}-{name}"
    return DEFAULT_PARENT / "-".join(["compare", task, "-".join(map(slug, labels))[:60]])


def _file_and_name(source: str) -> tuple[Path, str]:
    file = parse_file_name(source)
    if file is None or not file[0].is_file():
        raise RunError(f"{source} names no function in a file: write it as file.py:train.")
    return file[0], file[1] or DEFAULT_FUNCTION


def _choices(plans: Sequence[str | Plan | None]) -> list[Choice]:
    named = iter(choices_of([plan for plan in plans if isinstance(plan, str)]))
    choices = []
    for number, plan in enumerate(plans):
        if isinstance(plan, str):
            choices.append(next(named))
        elif plan is None or not plan.all_rules:
            choices.append(Choice("fp32", None))
        else:
            choices.append(Choice(plan.name or f"plan {number}", plan))
    return choices


def _metric_of(run: RunFolder) -> Metric:
    content = run.config().metric
    return Metric(str(content["name"]), content["better"], float(content["trivial"]))
