"""The suite of assignments: how much low precision a task bears, against the baselines of the paper."""

from __future__ import annotations

from bitplan.compare.choice import Choice
from bitplan.planners.assign.assign import LOSS_SCALE, Asked
from bitplan.planners.assign.levels import PAPER, Formats
from bitplan.planners.assign.of_task import assign_task
from bitplan.tasks.task import Task

#: Of low values.
RATIOS = (0.3, 0.5, 0.7, 0.9, 1.0)
_BASELINES = {"operator": "operator", "uniform low": "uniform-low"}


def assign_choices(task: Task, ratios: tuple[float, ...] = RATIOS, formats: Formats = PAPER) -> tuple[Choice, ...]:
    """FP32, the operator baseline, everything low without promotion, and assignments with promotion."""
    scale = (f"loss_scale={LOSS_SCALE:g}",) if formats.wants_loss_scale else ()
    asked = {label: Asked(baseline=name) for label, name in _BASELINES.items()}
    asked |= {f"r = {ratio:g}": Asked(ratio=ratio) for ratio in ratios}
    made = {label: assign_task(task, each, formats).plan for label, each in asked.items()}
    return (Choice("FP32", None), *(Choice(label, plan, scale) for label, plan in made.items()))
