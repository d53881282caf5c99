"""The benchmarks' own plans, in the folder ``plans`` beside this file."""

from __future__ import annotations

from pathlib import Path

from bitplan.plans import Plan
from bitplan.plans.loading import find_plan

PLANS = Path(__file__).parent / "plans"


def own_plan(name: str) -> Plan:
    """A benchmark's plan by its name, or any other plan."""
    file = PLANS / f"{name}.yaml"
    return Plan.from_yaml(file.read_text(encoding="utf-8"), file.name) if file.is_file() else find_plan(name)
