"""One run of a comparison, as a process that makes it is told of it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bitplan.errors import BitplanError, TaskError
from bitplan.plan import Plan
from bitplan.tasks.registry import find_task
from bitplan.tasks.task import Task
from bitplan.train import Progress, Summary, train
from bitplan.user_code import in_words, named_file


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
