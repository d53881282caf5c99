"""Suites: lists of plans that belong together, by name."""

from __future__ import annotations

from dataclasses import dataclass

from bitplan.errors import RunError, nearest_names
from bitplan.plan import Plan


@dataclass(frozen=True)
class Choice:
    """One plan of a comparison, and what tables and charts call it."""

    label: str
    #: A preset's name, a file, or a plan itself; None: no plan, which is the task in its own precision.
    plan: Plan | str | None


@dataclass(frozen=True)
class Suite:
    """Plans that are worth comparing."""

    name: str
    description: str
    choices: tuple[Choice, ...]


SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite(
            "static",
            "FP32, BF16, and every tensor in 8, 6, 4 and 2 bits; on small tasks 2 bits fail",
            (
                Choice("FP32", None),
                Choice("BF16", "bf16-all"),
                Choice("8 bits", "int8-all"),
                Choice("6 bits", "int6-all"),
                Choice("4 bits", "int4-all"),
                Choice("2 bits", "int2-all"),
            ),
        ),
    )
}


def find_suite(name: str) -> Suite:
    """The suite of that name."""
    if name not in SUITES:
        raise RunError(f"there is no suite {name!r}; {nearest_names(name, SUITES)}.")
    return SUITES[name]
