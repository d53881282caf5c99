"""Arguments and options that several commands share, with their shell completion."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer

from bitplan.lab.models.built_in import BUILT_IN
from bitplan.lab.tasks.registry import task_names
from bitplan.plans import preset_names


def complete_target(incomplete: str) -> list[str]:
    return _complete_from((*BUILT_IN, *task_names()), incomplete)


def _complete_from(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def complete_task(incomplete: str) -> list[str]:
    return _complete_from(task_names(), incomplete)


def complete_plan(incomplete: str) -> list[str]:
    return _complete_from(preset_names(), incomplete)


TARGET_HELP = (
    "A built-in model such as resnet20, a task such as digits, or file.py:make where make() returns model, batch and "
    "loss. The file is executed: name only files that you trust."
)

TargetArgument = Annotated[
    str, typer.Argument(metavar="TARGET", help=TARGET_HELP, autocompletion=complete_target, show_default=False)
]
OptionalTargetArgument = Annotated[
    str | None,
    typer.Argument(metavar="[TARGET]", help=TARGET_HELP, autocompletion=complete_target, show_default=False),
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
_TASK_HELP = "A task such as digits, or my_task.py:MyTask, a file that is executed: name only files that you trust."

TaskArgument = Annotated[
    str, typer.Argument(metavar="TASK", help=_TASK_HELP, autocompletion=complete_task, show_default=False)
]
OptionalTaskArgument = Annotated[
    str | None, typer.Argument(metavar="TASK", help=_TASK_HELP, autocompletion=complete_task, show_default=False)
]
ExecutionOption = Annotated[
    str | None,
    typer.Option(help="emulate, packed or native (default: as the plan says, else emulate).", show_default=False),
]
TaskSettingsOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the task's recipe; repeatable.")
]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Where TARGET is a task, change its recipe; repeatable."),
]
