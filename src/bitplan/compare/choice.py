"""What a comparison compares."""

from __future__ import annotations

from dataclasses import dataclass

from bitplan.plan import Plan


@dataclass(frozen=True)
class Choice:
    """One plan of a comparison, and what tables and charts call it."""

    label: str
    #: A preset's name, a file, or a plan itself; None: no plan, which is the task in its own precision.
    plan: Plan | str | None
    #: What this plan's runs change in the task's recipe, as ``key=value``.
    settings: tuple[str, ...] = ()
    #: Its own seeds; None: those of the comparison.
    seeds: tuple[int, ...] | None = None
