"""What a search found: the chosen plan, and a table of everything that was tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from bitplan.errors import PlanError
from bitplan.files import byte_text
from bitplan.planners.auto.trials import Failure, Outcome, Trial
from bitplan.planners.auto.verify import LossGap
from bitplan.plans import Plan
from bitplan.runtime.attach import Attachment, attach
from bitplan.tables import Table


@dataclass(frozen=True)
class TriedPlan:
    """A candidate, what was predicted and measured of it, and what became of it."""

    name: str
    #: None: the model as it is.
    plan: Plan | None
    family: str
    predicted_peak: int | None
    damage: float
    #: None: not measured.
    outcome: Outcome | None = None
    loss_gap: LossGap | None = None
    #: ``chosen``, or why not.
    verdict: str = ""

    @property
    def trial(self) -> Trial | None:
        return self.outcome if isinstance(self.outcome, Trial) else None

    def to_dict(self) -> dict[str, Any]:
        trial = self.trial
        return {
            "name": self.name,
            "family": self.family,
            "predicted_peak": self.predicted_peak,
            "damage": self.damage,
            "trial": None if trial is None else trial.to_dict(),
            "failure": self.outcome.reason if isinstance(self.outcome, Failure) else None,
            "loss_gap": None if self.loss_gap is None else self.loss_gap.to_dict(),
            "verdict": self.verdict,
            "plan": None if self.plan is None else self.plan.to_dict(),
        }


#: Columns of the table.
COLUMNS: dict[str, Callable[[TriedPlan], Any]] = {
    "candidate": lambda row: row.name,
    "predicted": lambda row: None if row.predicted_peak is None else byte_text(row.predicted_peak),
    "peak": lambda row: None if row.trial is None else byte_text(row.trial.peak),
    "ms/step": lambda row: None if row.trial is None else f"{row.trial.milliseconds:.2f}",
    "loss gap": lambda row: None if row.loss_gap is None else str(row.loss_gap),
    "verdict": lambda row: row.verdict,
}


@dataclass(frozen=True)
class AutoResult:
    """The answer of :func:`bitplan.auto`."""

    #: The chosen plan, with its execution; a plan without rules where nothing helps.
    plan: Plan
    #: The name of the chosen candidate.
    chosen: str
    #: Whether the plan meets every limit that was given.
    meets_limits: bool
    #: The answer in a few sentences.
    summary: str
    rows: tuple[TriedPlan, ...]
    #: ``fastest``, ``smallest`` and ``balanced`` -> name of a candidate.
    picks: dict[str, str]
    #: What the search took, in seconds.
    seconds: float
    #: Whether the search was interrupted and this is the best so far.
    is_interrupted: bool = False
    #: Facts about the search: limits, device, versions, products.
    facts: dict[str, Any] = field(default_factory=dict)

    def attach(self, model: nn.Module, **options: Any) -> Attachment:
        """Attach the chosen plan to `model`; `options` as of :func:`bitplan.attach`."""
        return attach(model, self.plan, **options)

    def table(self) -> Table[TriedPlan]:
        """Everything that was tried, one row for each candidate."""
        return Table(self.rows, COLUMNS, empty="nothing was tried")

    def plan_of(self, name: str) -> Plan:
        """The plan of a candidate, or of a pick such as ``smallest``."""
        wanted = self.picks.get(name, name)
        for row in self.rows:
            if row.name == wanted:
                return row.plan or no_plan()
        raise PlanError(f"no candidate is called {name!r}: there are {', '.join(row.name for row in self.rows)}.")

    def save(self, path: str | Path) -> None:
        """Write the chosen plan."""
        self.plan.save(Path(path))

    def to_dict(self) -> dict[str, Any]:
        return {
            "chosen": self.chosen,
            "meets_limits": self.meets_limits,
            "summary": self.summary,
            "picks": self.picks,
            "seconds": self.seconds,
            "is_interrupted": self.is_interrupted,
            **self.facts,
            "candidates": [row.to_dict() for row in self.rows],
            "plan": self.plan.to_dict(),
        }

    def __str__(self) -> str:
        return f"{self.table()}\n{self.summary}"

    def _repr_html_(self) -> str:
        return f"{self.table()._repr_html_()}<p>{self.summary}</p>"


def no_plan() -> Plan:
    """A plan that changes nothing."""
    return Plan.from_dict({"version": 1, "rules": []})
