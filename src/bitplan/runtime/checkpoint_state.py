"""What a saved run holds, in plain numbers and tensors, and whether another run can go on from there.

Weights and the optimizer are saved by their owners. Of the plan at work, a state holds where the run stood, the formats
that may change, what was observed, and the books.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bitplan.errors import PlanError
from bitplan.plans import Plan
from bitplan.plans.document import Phase
from bitplan.runtime.clock import ScheduleClock, Total
from bitplan.runtime.module_state import LiveRow

#: What every state has, those of older versions, too.
_NEEDED = frozenset({"plan", "step", "seed", "formats", "records", "steps"})


@dataclass(frozen=True)
class RunState:
    """A run that was saved; its fields, in their order, are the entries of its dictionary."""

    step: int
    seed: int
    #: The whole plan: a state goes on under no other.
    plan: dict[str, Any]
    #: Path of a module -> the names of its formats that may change, in the order of its rows.
    formats: Mapping[str, list[str]]
    #: Path of a module -> the rows of its record by name, and the record.
    records: Mapping[str, tuple[dict[str, int], Tensor]]
    #: The books, see :meth:`bitplan.runtime.cost_tracker.CostTracker.state`.
    steps: list[list[Any]]
    #: How many steps the whole run was to have.
    total: Total | None = None
    phase: Phase = ()
    #: Step and total of the clock, which a run that is told its progress cannot count.
    position: list[int] | None = None

    @classmethod
    def from_dict(cls, state: Any) -> RunState:
        """The state that :meth:`to_dict` made a dictionary of."""
        if not isinstance(state, dict) or not set(state) >= _NEEDED:
            raise PlanError("this is not the state of an attached plan: give what run.state_dict() returned.")
        return cls(
            step=int(state["step"]),
            seed=int(state["seed"]),
            plan=state["plan"],
            formats=state["formats"],
            records=state["records"],
            steps=state["steps"],
            total=state.get("total"),
            phase=tuple(state.get("phase", ())),
            position=state.get("position"),
        )

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "phase": list(self.phase)}

    @property
    def phases(self) -> Iterator[Phase]:
        """The plan's phases that the state speaks of."""
        yield self.phase
        for _, _, phase in self.steps:
            yield tuple(phase)

    def require_plan(self, plan: Plan, clock: ScheduleClock) -> None:
        """Raise where it was saved under another plan, or in a run of another length that the plan depends on."""
        if _without_execution(self.plan) != _without_execution(plan.flattened().to_dict()):
            raise PlanError("this state belongs to another plan: attach the plan it was saved with.")
        if clock.moves and self.total != clock.steps:
            raise PlanError(
                f"this state was saved in a run with steps={self.total}, where the plan's schedules stand "
                f"elsewhere: attach with the same steps=."
            )

    def require_rows(self, rows: Mapping[str, list[LiveRow]]) -> None:
        """Raise where other formats may change than these rows hold, by the path of their module."""
        held = {path: len(own) for path, own in rows.items() if own}
        if held != {path: len(names) for path, names in self.formats.items()}:
            raise PlanError(
                "this state was saved with other formats that may change: attach with mutable_formats= as then."
            )


def _without_execution(plan: Mapping[str, Any]) -> dict[str, Any]:
    """A run may go on under another execution: it decides how a plan is computed, not what it rounds."""
    return {key: value for key, value in plan.items() if key != "execution"}
