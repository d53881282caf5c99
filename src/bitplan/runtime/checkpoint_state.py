"""The saved state of a run, in plain numbers and tensors, and the checks before another run resumes from it.

Weights and optimizer state are saved by the user. This state holds the position of the run, the mutable formats, the
records of statistics, and the steps that costs are computed from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bitplan.errors import PlanError
from bitplan.plans import Plan
from bitplan.plans.document import Phase
from bitplan.runtime.clock import ScheduleClock, Total
from bitplan.runtime.module_state import FormatRow, QuantizerModules

#: The entries that every state has, also those of older versions.
_NEEDED = frozenset({"plan", "step", "seed", "formats", "records", "steps"})


@dataclass(frozen=True)
class RunState:
    """The state of a saved run; its fields, in order, are the entries of its dictionary."""

    step: int
    seed: int
    #: The whole plan: a run resumes under the same plan only.
    plan: dict[str, Any]
    #: Path of a module -> the names of its mutable formats, in the order of its rows.
    formats: Mapping[str, list[str]]
    #: Path of a module -> the rows of its record by name, and the record.
    records: Mapping[str, tuple[dict[str, int], Tensor]]
    #: Formats and their numbers of steps, see :meth:`bitplan.runtime.cost_tracker.CostTracker.state`.
    steps: list[list[Any]]
    #: The number of steps of the whole run.
    total: Total | None = None
    phase: Phase = ()
    #: Step and total of the clock, for runs whose loop reports its progress.
    position: list[int] | None = None
    #: Site -> state of the object of the user's own class that rounds there.
    quantizers: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, state: Any) -> RunState:
        """The inverse of :meth:`to_dict`."""
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
            quantizers=state.get("quantizers", {}),
        )

    def to_dict(self) -> dict[str, Any]:
        entries = {**vars(self), "phase": list(self.phase)}
        return entries if self.quantizers else {key: value for key, value in entries.items() if key != "quantizers"}

    def load_quantizers(self, modules: QuantizerModules) -> None:
        """Give objects of the user's own classes their saved parameters, those that are made later included."""
        modules.saved = dict(self.quantizers)
        for site, module in modules.items():
            modules.restore(site, module)

    @property
    def phases(self) -> Iterator[Phase]:
        """The plan's phases that occur in the state."""
        yield self.phase
        for _, _, phase in self.steps:
            yield tuple(phase)

    def require_plan(self, plan: Plan, clock: ScheduleClock) -> None:
        """Raise if the state was saved under another plan, or if schedules depend on another length of the run."""
        if _without_execution(self.plan) != _without_execution(plan.flattened().to_dict()):
            raise PlanError("this state belongs to another plan: attach the plan it was saved with.")
        if clock.moves and self.total != clock.steps:
            raise PlanError(
                f"this state was saved in a run with steps={self.total}, with other positions in the plan's "
                f"schedules: attach with the same steps=."
            )

    def require_rows(self, rows: Mapping[str, list[FormatRow]]) -> None:
        """Raise if other formats are mutable than in these rows, by the path of their module."""
        held = {path: len(own) for path, own in rows.items() if own}
        if held != {path: len(names) for path, names in self.formats.items()}:
            raise PlanError("this state was saved with other mutable formats: attach with the same mutable_formats=.")


def _without_execution(plan: Mapping[str, Any]) -> dict[str, Any]:
    """A run may resume under another execution, which decides how a plan is computed, not what it rounds."""
    return {key: value for key, value in plan.items() if key != "execution"}
