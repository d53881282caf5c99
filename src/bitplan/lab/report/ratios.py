"""Plans that ``bitplan assign`` made, with the ratios of their runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bitplan.errors import PlanError
from bitplan.lab.report.summaries import Experiment, PlanSummary
from bitplan.plans import Plan

_PLANNER = "bitplan assign"


@dataclass(frozen=True)
class Assigned:
    """One plan of a comparison that is an assignment, or a baseline of one."""

    #: Its place among the comparison's plans.
    number: int
    plan: PlanSummary
    #: 2 (bits all high - bits now) / bits all high, mean over the steps of its runs: promotion lowers it.
    ratio: float
    #: What was asked for; None for baselines.
    asked: float | None
    #: Which groups went down first; None for baselines.
    order: str | None
    #: Tensors that were promoted, mean over its runs.
    promoted: float


def assigned_plans(experiment: Experiment) -> list[Assigned]:
    """Those of a comparison, in its order; none where no plan is an assignment."""
    found = []
    for number, plan in enumerate(experiment.plans):
        made_by = _made_by(plan)
        ratios = [run.low_precision_ratio for run in plan.judged if run.low_precision_ratio is not None]
        if made_by is None or not ratios:
            continue
        promoted = sum(len(run.promotions) for run in plan.judged) / len(plan.judged)
        order = None if "baseline" in made_by else str(made_by.get("order", "largest"))
        asked = made_by.get("ratio")
        found.append(
            Assigned(number, plan, sum(ratios) / len(ratios), asked if order is not None else None, order, promoted)
        )
    return found


def _made_by(plan: PlanSummary) -> Mapping[str, Any] | None:
    text = plan.judged[0].plan_text
    if text is None or _PLANNER not in text:
        return None
    try:
        made_by = Plan.from_yaml(text).made_by
    except PlanError:
        return None
    return made_by if isinstance(made_by, dict) and made_by.get("planner") == _PLANNER else None
