"""Suites: lists of plans that belong together, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bitplan.compare.assign_suite import assign_choices
from bitplan.compare.choice import Choice
from bitplan.compare.time_suites import cpt_choices, deficit_choices
from bitplan.errors import RunError, nearest_names
from bitplan.tasks.task import Task


@dataclass(frozen=True)
class Suite:
    """Plans that are worth comparing."""

    name: str
    description: str
    #: Those of every task alike.
    choices: tuple[Choice, ...] = ()
    #: What makes those that follow from a task's model and steps.
    make: Callable[[Task], tuple[Choice, ...]] | None = None

    def choices_for(self, task: Callable[[], Task]) -> list[Choice]:
        """The plans for a task, which is made only if they depend on it."""
        return [*self.choices, *(() if self.make is None else self.make(task()))]


SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite(
            "static",
            "FP32, BF16, and every tensor in 8, 6, 4 and 2 bits; on small tasks 2 bits fail",
            (
                Choice("FP32", None),
                Choice("BF16", "bf16-all"),
                Choice("8 bits", "int8-all"),
                Choice("6 bits", "int6-all"),
                Choice("4 bits", "int4-all"),
                Choice("2 bits", "int2-all"),
            ),
        ),
        Suite(
            "cpt",
            "cyclic precision training at 3-8 bits: FP32, static 8, 6 and one at equal cost, and all ten schedules",
            make=cpt_choices,
        ),
        Suite(
            "deficits",
            "critical learning periods: 3 bits for a while, early or later, of all or of one rounding, and 8 otherwise",
            make=deficit_choices,
        ),
        Suite(
            "assign",
            "assignments of low precision: FP32, operator, uniform low, and 0.3 to 1.0 of all values with promotion",
            make=assign_choices,
        ),
    )
}


def find_suite(name: str) -> Suite:
    """The suite of that name."""
    if name not in SUITES:
        raise RunError(f"there is no suite {name!r}; {nearest_names(name, SUITES)}.")
    return SUITES[name]
