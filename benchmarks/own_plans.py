"""The benchmarks' own plans, in the folder ``plans`` beside this file, and those that ``benchmarks/auto.py`` found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from bitplan.errors import BitplanError
from bitplan.plans import Plan
from bitplan.plans.loading import find_plan

PLANS = Path(__file__).parent / "plans"
#: The plans that a search chose, by model, or model and memory limit.
SEARCHES = Path(__file__).parent / "results" / "auto-h200.json"
#: The name of a plan that was found for a shape begins so.
AUTO = "auto"


def found_plans(shape: str) -> Sequence[str]:
    """The names of the plans that searches found for a shape: without limits, and with each memory limit."""
    searches = json.loads(SEARCHES.read_text(encoding="utf-8"))["searches"]
    found = [name for name, row in searches.items() if name.partition(":")[0] == shape and row.get("plan")]
    if not found:
        raise BitplanError(f"no search for {shape} has a plan in {SEARCHES.name}: search with benchmarks/auto.py.")
    return [f"{AUTO} {name}" for name in found]


def own_plan(name: str) -> Plan:
    """A benchmark's plan by its name, or any other plan."""
    if name.startswith(f"{AUTO} "):
        searches = json.loads(SEARCHES.read_text(encoding="utf-8"))["searches"]
        return Plan.from_dict(searches[name.removeprefix(f"{AUTO} ")]["plan"])
    file = PLANS / f"{name}.yaml"
    return Plan.from_yaml(file.read_text(encoding="utf-8"), file.name) if file.is_file() else find_plan(name)
