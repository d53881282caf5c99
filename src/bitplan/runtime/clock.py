"""Where a run stands in time, and what a plan that changes over time is there.

Two things move. *Bits* move within a kind: they lie in rows of the modules' tables
(:mod:`bitplan.runtime.module_state`), and
one compiled graph serves them all. A *whole quantizer* that changes makes another plan: the cases that are at work, one
of each switch, are the plan's *phase*, and each phase has actions, rows and compiled graphs of its own.
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
from bitplan.plans.schedules import Function, Moment, Position, Schedule

#: The optimizer steps of the whole run, or the word for a run whose loop tells its progress as a share.
Total = int | Literal["progress"]

#: At so many steps of a run it is looked which phases there are.
_SAMPLES = 10_000
#: Bits are looked up for so many steps at once: one takes as long as a hundred, and a step of a small model is short.
_STRETCH = 256


class ScheduleClock:
    """One run's way through its plan."""

    def __init__(self, plan: Plan, steps: Total | None, fixed: bool) -> None:
        """`fixed`: bits are constants of a phase, too, because compiled graphs depend on them."""
        self.plan = plan
        self.steps = steps
        self.fixed = fixed
        self.moves = plan.moves
        self._plans: dict[Phase, Plan] = {}
        #: Of each schedule, the number of the stretch that was last looked up, and the bits of its steps.
        self._ahead: dict[Schedule, tuple[int, list[int]]] = {}
        self._warned = False
        if self.moves:
            self._check()
        self.position = Position(0, steps if isinstance(steps, int) and self.moves else 1)

    def _check(self) -> None:
        if self.steps is None:
            raise PlanError(
                f"this plan changes over time ({', '.join(self._words())}): give attach() steps=, the number of "
                f'optimizer steps of the whole run, or steps="progress", and tell run.progress(share) as it goes.'
            )
        if isinstance(self.steps, str) and self.steps != "progress":
            raise PlanError(f'steps is a number or "progress", not {self.steps!r}.')
        if not isinstance(self.steps, str) and self.steps < 1:
            raise PlanError(f"steps is {self.steps}; a run has at least 1.")
        counted = next((moment for moment in self._moments() if moment.step), None)
        if self.steps == "progress" and counted is not None:
            raise PlanError(
                f"the plan names {counted}, and this run counts no steps: write a share such as 90%, or give steps=."
            )

    def _moments(self) -> Iterator[Moment]:
        for switch in self.plan.switches:
            yield from switch.moments()
        for schedule in self.plan.followed.values():
            yield from schedule.moments()

    def _words(self) -> list[str]:
        return [str(schedule) for schedule in self.plan.followed.values()] or ["until, then"]

    # --- moving ---

    def after(self, step: int) -> None:
        """So many steps are made."""
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

    def tell(self, share: float) -> None:
        """That share of the run is done."""
        if self.steps != "progress":
            raise PlanError('this run counts its steps itself: attach with steps="progress" to tell its progress.')
        self.position = Position.of_progress(share)

    def restore(self, step: int, position: list[int] | None) -> None:
        """Go back, or on, to where a run was."""
        if self.moves and position is not None and self.steps == "progress":
            self.position = Position(*position)
        elif self.moves and isinstance(self.steps, int):
            self.position = Position(step, self.steps)

    # --- what is there ---

    @property
    def phase(self) -> Phase:
        """Which case of each switch is at work (and, fixed, the bits of each schedule)."""
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
        # A user's own function may look at the run: it is asked when its step has come.
        if isinstance(schedule, Function) or not isinstance(self.steps, int) or not 0 <= step < total:
            return schedule.bits(step, total)
        number, place = divmod(step, _STRETCH)
        known = self._ahead.get(schedule)
        if known is None or known[0] != number:
            steps = np.arange(number * _STRETCH, min((number + 1) * _STRETCH, total), dtype=np.int64)
            known = self._ahead[schedule] = number, schedule.at(steps, total).tolist()
        return known[1][place]
