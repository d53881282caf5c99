"""Comparison folders: run folders, and a ``compare.json`` that assigns them to plans and seeds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bitplan.errors import RunError
from bitplan.lab.train.folder import read_object
from bitplan.plans import Plan


@dataclass(frozen=True)
class Choice:
    """One plan of a comparison, with its label in tables and charts."""

    label: str
    #: A preset's name, a file, or a plan itself; None: no plan, which is the task in its own precision.
    plan: Plan | str | None
    #: Changes to the task's recipe in the runs of this plan, as ``key=value``.
    settings: tuple[str, ...] = ()
    #: Its own seeds; None: those of the comparison.
    seeds: tuple[int, ...] | None = None


COMPARE_FILE = "compare.json"
#: The version of comparison folders that this package reads and writes.
VERSION = 1


@dataclass(frozen=True)
class PlanEntry:
    """One plan of a comparison, as recorded."""

    #: In tables and charts.
    label: str
    #: A preset's name or a file; None: no plan.
    plan: str | None
    #: The folders of its runs, one for each seed.
    runs: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {"label": self.label, "plan": self.plan, "runs": list(self.runs)}


@dataclass(frozen=True)
class Comparison:
    """The contents of ``compare.json``."""

    task: str
    plans: tuple[PlanEntry, ...]
    seeds: tuple[int, ...]
    #: The command that resumes or reproduces it.
    command: str
    settings: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        return {
            "bitplan_compare": VERSION,
            "task": self.task,
            "settings": list(self.settings),
            "plans": [entry.to_dict() for entry in self.plans],
            "seeds": list(self.seeds),
            "command": self.command,
        }

    @property
    def labels(self) -> dict[str, str]:
        """Run folder -> the label of its plan, in order."""
        return {run: entry.label for entry in self.plans for run in entry.runs}


def read_comparison(folder: Path) -> Comparison | None:
    """The record of the comparison in a folder; None where there is none."""
    file = folder / COMPARE_FILE
    if not os.path.isfile(file):  # false where the folder may not be read
        return None
    content = read_object(file)
    if content.get("bitplan_compare") != VERSION:
        raise RunError(
            f"{folder} is a comparison of version {content.get('bitplan_compare')!r}, and this bitplan reads version "
            f"{VERSION}: use the bitplan that made it, or name another folder."
        )
    try:
        return _comparison(content)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _damaged(file) from error


def _comparison(content: Mapping[str, Any]) -> Comparison:
    return Comparison(
        task=str(content["task"]),
        plans=tuple(
            PlanEntry(
                str(entry["label"]),
                None if entry["plan"] is None else str(entry["plan"]),
                tuple(map(str, entry["runs"])),
            )
            for entry in content["plans"]
        ),
        seeds=tuple(int(seed) for seed in content["seeds"]),
        command=str(content["command"]),
        settings=tuple(map(str, content["settings"])),
    )


def _damaged(file: Path) -> RunError:
    return RunError(f"{file} is damaged: restore it, leave it out of a report, or begin anew in another folder.")
