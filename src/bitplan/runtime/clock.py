"""The position of a run in its schedule, and the plan that applies there.

Two things change over time. The *bits* of a format change in rows of the modules' tables
(:mod:`bitplan.runtime.module_state`), and one compiled graph serves all of them. If a *whole quantizer* changes, the
plan is another one: the active case of each switch is the plan's *phase*, and each phase has rounding ops, rows and
compiled graphs of its own.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Literal

import numpy as np

from bitplan.errors import BitplanWarning, PlanError
from bitplan.plans import Plan
from bitplan.plans.document import Phase
from bitplan.plans.schedules import Function, Position, RunPoint, Schedule

#: The optimizer steps of the whole run; "progress" if the loop reports its progress as a fraction; "later" if a trainer
#: learns the number of steps after the plan was attached.
Total = int | Literal["progress", "later"]

#: The number of steps at which phases are sampled to count them.
_SAMPLES = 10_000
#: Bits are computed for this many steps at once: one step takes as long as a hundred.
_CACHED_STEPS = 256


class ScheduleClock:
    """Follows a run through the schedules and switches of its plan."""

    def __init__(self, plan: Plan, steps: Total | None, fixed: bool) -> None:
        """`fixed`: bits are constants of a phase, too, because compiled graphs depend on them."""
        self.plan = plan
        self.steps = steps
        self.fixed = fixed
        self.moves = plan.moves
        self._plans: dict[Phase, Plan] = {}
        #: Schedule -> the number of the steps that were computed last, in units of _CACHED_STEPS, and their bits.
        self._cached_bits: dict[Schedule, tuple[int, list[int]]] = {}
        self._warned = False
        self._check_steps()
        if self.moves:
            self._check()
        self.position = Position(0, steps if isinstance(steps, int) and self.moves else 1)

    def _check(self) -> None:
        if self.steps is None:
            raise PlanError(
                f"this plan changes over time ({', '.join(self._descriptions())}): give attach() steps=, the number of "
                f'optimizer steps of the whole run, or steps="progress", and call run.progress(share) in the loop.'
            )
        counted = next((point for point in self._run_points() if point.step), None)
        if self.steps == "progress" and counted is not None:
            raise PlanError(
                f"the plan names {counted}, and this run counts no steps: write a share such as 90%, or give steps=."
            )

    def _check_steps(self) -> None:
        if self.steps in (None, "progress", "later"):
            return
        if isinstance(self.steps, (str, bool)) or self.steps != int(self.steps):
            raise PlanError(f'steps is a whole number, "progress" or "later", not {self.steps!r}.')
        if self.steps < 1:
            raise PlanError(f"steps is {self.steps}; a run has at least 1.")

    def _run_points(self) -> Iterator[RunPoint]:
        for switch in self.plan.switches:
            yield from switch.run_points()
        for schedule in self.plan.followed.values():
            yield from schedule.run_points()

    def _descriptions(self) -> list[str]:
        return [str(schedule) for schedule in self.plan.followed.values()] or ["until, then"]

    # --- Moving ---

    def set_total(self, steps: int) -> None:
        """The number of steps of a run that began with ``steps="later"``."""
        before = self.steps
        if before != "later" and before != steps:
            raise PlanError(
                f"this run was attached with steps={before!r}, so its total is known: attach with "
                f'steps="later" to set the number of steps afterwards.'
            )
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise PlanError(f"steps is {steps!r}; the number of steps is a whole number of at least 1.")
        self.steps = steps
        self._cached_bits.clear()
        if self.moves:
            self.position = Position(0, steps)

    def require_total(self) -> None:
        """Raise where schedules need a total that nobody has given yet."""
        if self.moves and self.steps == "later":
            raise PlanError(
                f"this plan changes over time ({', '.join(self._descriptions())}), and the number of steps is not "
                f"known yet: call run.set_total_steps(n) before the first optimizer step."
            )

    def advance(self, step: int) -> None:
        """Move to the position after that many steps."""
        if not self.moves or not isinstance(self.steps, int):
            return
        if step > self.steps + max(1, self.steps // 100) and not self._warned:
            self._warned = True
            warnings.warn(
                f"the run goes on after its {self.steps} steps, and its schedules stay where they ended: "
                f"give attach() the steps of the whole run.",
                BitplanWarning,
                stacklevel=4,
            )
        self.position = Position(step, self.steps)

    def set_progress(self, share: float) -> None:
        """Move to that fraction of the run."""
        if self.steps != "progress":
            raise PlanError('this run counts its steps itself: attach with steps="progress" to report progress.')
        self.position = Position.of_progress(share)

    def restore(self, step: int, position: list[int] | None) -> None:
        """Move to the position of a saved run."""
        if self.moves and position is not None and self.steps == "progress":
            self.position = Position(*position)
        elif self.moves and isinstance(self.steps, int):
            self.position = Position(step, self.steps)

    # --- What applies at the position ---

    @property
    def phase(self) -> Phase:
        """The active case of each switch, and if :attr:`fixed` the bits of each schedule."""
        return self.plan.phase_at(self.position, fixed=self.fixed) if self.moves else ()

    def plan_in(self, phase: Phase) -> Plan:
        """The plan of a phase, in which no quantizer changes as a whole."""
        if not phase:
            return self.plan
        if phase not in self._plans:
            self._plans[phase] = self.plan.in_phase(phase)
        return self._plans[phase]

    def count_phases(self) -> int:
        """How many phases the run has."""
        if not self.moves:
            return 1
        total = self.steps if isinstance(self.steps, int) else _SAMPLES
        steps = np.unique(np.linspace(0, total - 1, min(total, _SAMPLES)).round().astype(np.int64))
        widths = [schedule.at(steps, total) for schedule in self.plan.followed.values()] if self.fixed else []
        combined = len(np.unique(np.stack(widths), axis=1).T) if widths else 1
        return combined * math.prod(len(switch.cases) for switch in self.plan.switches)

    def bits_of(self, schedule: Schedule) -> int:
        step, total = self.position.step, self.position.total
        # A user's own function may depend on the state of the run, so it is called at its step and not before.
        if isinstance(schedule, Function) or not isinstance(self.steps, int) or not 0 <= step < total:
            return schedule.bits(step, total)
        number, index = divmod(step, _CACHED_STEPS)
        cached = self._cached_bits.get(schedule)
        if cached is None or cached[0] != number:
            steps = np.arange(number * _CACHED_STEPS, min((number + 1) * _CACHED_STEPS, total), dtype=np.int64)
            cached = self._cached_bits[schedule] = number, schedule.at(steps, total).tolist()
        return cached[1][index]
