"""Planners applied to tasks: assignments (``--assign 0.9``, ``70%`` or ``operator``) and the range test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bitplan.compiler.torch_private import tree_map_only
from bitplan.errors import PlanError
from bitplan.numerics.noise import preserve_rng_state
from bitplan.planners.assign.assign import Asked, assignment, chosen_formats
from bitplan.planners.assign.assignment import BASELINES, Assignment
from bitplan.planners.assign.levels import Formats
from bitplan.planners.assign.probe import BATCHES, WARM
from bitplan.planners.range_test import RangeTest, range_test

if TYPE_CHECKING:
    from bitplan.lab.tasks.task import Task

#: What a run's record calls a plan that was made for it.
_LEAD = "assign:"


@dataclass(frozen=True)
class AssignWords:
    """What stands on the command line of a run whose plan is made for it."""

    #: A ratio, a budget (``70%``, ``6GiB``) or a baseline.
    what: str
    order: str = "largest"
    formats: str | None = None
    #: None: as suits the formats; 0: none.
    promotion: float | None = None

    def __post_init__(self) -> None:
        self.asked(0)

    def asked(self, seed: int) -> Asked:
        """The same as the planner takes it."""
        promotion: float | bool = True if self.promotion is None else self.promotion or False
        ratio = _number(self.what)
        if ratio is not None and ratio <= 1:
            return Asked(ratio=ratio, order=self.order, seed=seed, promotion=promotion)
        if self.what in BASELINES:
            return Asked(baseline=self.what, order=self.order, seed=seed)
        if not self.what[:1].isdigit():
            raise PlanError(
                f"{self.what!r} is no assignment: give a ratio such as 0.9, a budget such as 70% or 6GiB, or one of "
                f"{', '.join(BASELINES)}."
            )
        return Asked(budget=self.what, order=self.order, seed=seed, promotion=promotion)

    def chosen_formats(self) -> Formats:
        return chosen_formats(self.asked(0), self.formats)

    @property
    def source(self) -> str:
        """For a run's record.

        >>> AssignWords("0.9", formats="bf16/mxfp8").source
        'assign:0.9 formats=bf16/mxfp8'
        """
        told = {"order": None if self.order == "largest" else self.order, "formats": self.formats}
        told["promotion"] = None if self.promotion is None else f"{self.promotion:g}"
        return " ".join([f"{_LEAD}{self.what}", *(f"{key}={value}" for key, value in told.items() if value)])

    @classmethod
    def of_source(cls, text: str | None) -> AssignWords | None:
        """What :attr:`source` says; None where the text names a plan."""
        if text is None or not text.startswith(_LEAD):
            return None
        what, *rest = text.removeprefix(_LEAD).split(" ")
        told = dict(word.split("=", 1) for word in rest)
        promotion = float(told["promotion"]) if "promotion" in told else None
        return cls(what, told.get("order", "largest"), told.get("formats"), promotion)

    def command(self) -> list[str]:
        """As ``bitplan train`` takes it."""
        words = ["--assign", self.what]
        words += [] if self.order == "largest" else ["--order", self.order]
        words += [] if self.formats is None else ["--formats", self.formats]
        words += [] if self.promotion is None else ["--promotion", f"{self.promotion:g}"]
        return words


def assign_task(
    task: Task,
    asked: Asked,
    formats: Formats,
    *,
    compile: bool = False,
    device: torch.device | str = "cpu",
    tell: Callable[[str], None] | None = None,
) -> Assignment:
    """The assignment for a task's training step, with its own optimizer.

    :param device: where the step is to run, and where sensitivity is measured.
    """
    if asked.order == "sensitivity" and asked.baseline is None:
        with torch.random.fork_rng([]):
            torch.manual_seed(task.seed)
            model = task.model().to(device)
        drawn = [task.batch(step) for step in range(WARM + BATCHES)]
        batches = [tree_map_only(Tensor, lambda tensor: tensor.to(device), each) for each in drawn]
        batch = batches[0]
    else:
        with torch.device("meta"):
            model = task.model()
        batches, batch = None, tree_map_only(Tensor, lambda tensor: tensor.to("meta"), task.example())
    return assignment(
        *(model, batch, task.loss, asked, formats),
        optimizer=task.optimizer,
        compile=compile,
        device=device,
        batches=batches,
        tell=tell,
    )


def range_test_of_task(task: Task, **options: Any) -> RangeTest:
    """The range test of a task with its own recipe at the peak learning rate; options as of :func:`range_test`."""
    with preserve_rng_state():
        torch.manual_seed(task.seed)
        model = task.model()
        optimizer = task.optimizer(model)
        return range_test(model, optimizer, _TaskBatches(task), task.loss, seed=task.seed, **options)


class _TaskBatches:
    """A task's batches, without an end."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __iter__(self) -> Iterator[Any]:
        return map(self.task.batch, count())


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
