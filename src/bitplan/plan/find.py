"""A plan by whatever names it: itself, a preset, a file."""

from __future__ import annotations

from pathlib import Path

from bitplan.errors import PlanError, nearest_names
from bitplan.plan.document import Plan
from bitplan.plan.presets import is_preset_name, preset_names


def find_plan(plan: Plan | str) -> Plan:
    """The plan itself, the preset of that name, or what lies in that file.

    >>> find_plan("bf16-all").all_rules[0].match
    ('*',)
    """
    if isinstance(plan, Plan):
        return plan
    presets = preset_names()
    if plan in presets:
        return Plan.preset(plan)
    if is_preset_name(plan) and not Path(plan).exists():
        raise PlanError(f"there is no preset and no file {plan!r}; {nearest_names(plan, presets)}")
    return Plan.load(plan)
