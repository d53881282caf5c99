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
from bitplan.planners.assign.assign import AssignRequest, choose_formats, make_assignment
from bitplan.planners.assign.assignment import BASELINES, Assignment
from bitplan.planners.assign.levels import Formats
from bitplan.planners.assign.probe import BATCHES, WARMUP_STEPS
from bitplan.planners.range_test import RangeTest, range_test

if TYPE_CHECKING:
    from bitplan.lab.tasks.task import Task

#: The prefix of an assigned plan in a run's record.
_LEAD = "assign:"


@dataclass(frozen=True)
class AssignOptions:
    """The command-line options of a run whose plan is assigned."""

    #: A ratio, a budget (``70%``, ``6GiB``) or a baseline.
    what: str
    order: str = "largest"
    formats: str | None = None
    #: None: the default of the formats; 0: none.
    promotion: float | None = None

    def __post_init__(self) -> None:
        self.request(0)

    def request(self, seed: int) -> AssignRequest:
        """The request to the planner."""
        promotion: float | bool = True if self.promotion is None else self.promotion or False
        ratio = _number(self.what)
        if ratio is not None and ratio <= 1:
            return AssignRequest(ratio=ratio, order=self.order, seed=seed, promotion=promotion)
        if self.what in BASELINES:
            return AssignRequest(baseline=self.what, order=self.order, seed=seed)
        if not self.what[:1].isdigit():
            raise PlanError(
                f"{self.what!r} is no assignment: give a ratio such as 0.9, a budget such as 70% or 6GiB, or one of "
                f"{', '.join(BASELINES)}."
            )
        return AssignRequest(budget=self.what, order=self.order, seed=seed, promotion=promotion)

    def choose_formats(self) -> Formats:
        return choose_formats(self.request(0), self.formats)

    @property
    def source(self) -> str:
        """The plan's source in a run's record.

        >>> AssignOptions("0.9", formats="bf16/mxfp8").source
        'assign:0.9 formats=bf16/mxfp8'
        """
        options = {"order": None if self.order == "largest" else self.order, "formats": self.formats}
        options["promotion"] = None if self.promotion is None else f"{self.promotion:g}"
        return " ".join([f"{_LEAD}{self.what}", *(f"{key}={value}" for key, value in options.items() if value)])

    @classmethod
    def of_source(cls, text: str | None) -> AssignOptions | None:
        """The options of a :attr:`source`; None if the text names a plan."""
        if text is None or not text.startswith(_LEAD):
            return None
        what, *rest = text.removeprefix(_LEAD).split(" ")
        options = dict(word.split("=", 1) for word in rest)
        promotion = float(options["promotion"]) if "promotion" in options else None
        return cls(what, options.get("order", "largest"), options.get("formats"), promotion)

    def command(self) -> list[str]:
        """The arguments of ``bitplan train``."""
        arguments = ["--assign", self.what]
        arguments += [] if self.order == "largest" else ["--order", self.order]
        arguments += [] if self.formats is None else ["--formats", self.formats]
        arguments += [] if self.promotion is None else ["--promotion", f"{self.promotion:g}"]
        return arguments


def assign_task(
    task: Task,
    request: AssignRequest,
    formats: Formats,
    *,
    compile: bool = False,
    device: torch.device | str = "cpu",
    report: Callable[[str], None] | None = None,
) -> Assignment:
    """The assignment for a task's training step, with its own optimizer.

    :param device: where the step is to run, and where sensitivity is measured.
    """
    if request.order == "sensitivity" and request.baseline is None:
        with torch.random.fork_rng([]):
            torch.manual_seed(task.seed)
            model = task.model().to(device)
        drawn = [task.batch(step) for step in range(WARMUP_STEPS + BATCHES)]
        batches = [tree_map_only(Tensor, lambda tensor: tensor.to(device), drawn_batch) for drawn_batch in drawn]
        batch = batches[0]
    else:
        with torch.device("meta"):
            model = task.model()
        batches, batch = None, tree_map_only(Tensor, lambda tensor: tensor.to("meta"), task.example())
    return make_assignment(
        *(model, batch, task.loss, request, formats),
        optimizer=task.optimizer,
        compile=compile,
        device=device,
        batches=batches,
        report=report,
    )


def range_test_of_task(task: Task, *, device: torch.device | str = "cpu", **options: Any) -> RangeTest:
    """The range test of a task with its own recipe at the peak learning rate; options as of :func:`range_test`."""
    with preserve_rng_state():
        torch.manual_seed(task.seed)
        model = task.model().to(device)
        optimizer = task.optimizer(model)
        return range_test(model, optimizer, _TaskBatches(task, device), task.loss, seed=task.seed, **options)


class _TaskBatches:
    """A task's batches, without an end."""

    def __init__(self, task: Task, device: torch.device | str) -> None:
        self.task, self.device = task, device

    def __iter__(self) -> Iterator[Any]:
        for step in count():
            yield tree_map_only(Tensor, lambda tensor: tensor.to(self.device), self.task.batch(step))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
