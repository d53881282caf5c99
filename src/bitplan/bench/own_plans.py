"""The plans that come with the benchmarks, in the folder ``plans`` beside this file."""

from __future__ import annotations

from importlib.resources import files

from bitplan.plans import Plan
from bitplan.plans.loading import find_plan


def own_plan(name: str) -> Plan:
    """A benchmark's plan by its name, or whatever plan the name stands for."""
    known = {file.name: file for file in files("bitplan.bench").joinpath("plans").iterdir()}
    file = known.get(f"{name}.yaml")
    return find_plan(name) if file is None else Plan.from_yaml(file.read_text(encoding="utf-8"), file.name)
