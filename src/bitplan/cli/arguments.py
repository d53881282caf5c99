"""The arguments that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from bitplan.lab.models.built_in import BUILT_IN
from bitplan.lab.tasks.registry import task_names
from bitplan.plans import preset_names


def _complete_target(incomplete: str) -> list[str]:
    return [name for name in (*BUILT_IN, *task_names()) if name.startswith(incomplete)]


def complete_task(incomplete: str) -> list[str]:
    return [name for name in task_names() if name.startswith(incomplete)]


def complete_plan(incomplete: str) -> list[str]:
    return [name for name in preset_names() if name.startswith(incomplete)]


_TARGET_HELP = (
    "A built-in model such as resnet20, a task such as digits, or file.py:make where make() returns model, batch "
    "and loss. "
    "The file is run, so name only files that you trust."
)

TargetArgument = Annotated[
    str, typer.Argument(metavar="TARGET", help=_TARGET_HELP, autocompletion=_complete_target, show_default=False)
]
OptionalTargetArgument = Annotated[
    str | None,
    typer.Argument(metavar="[TARGET]", help=_TARGET_HELP, autocompletion=_complete_target, show_default=False),
]
PlanArgument = Annotated[
    str,
    typer.Argument(
        metavar="PLAN",
        help="A plan's file, or the name of a preset.",
        autocompletion=complete_plan,
        show_default=False,
    ),
]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Where TARGET is a task, change its recipe; repeatable."),
]
