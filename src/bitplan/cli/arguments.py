"""Arguments and options that several commands share, with their shell completion."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

import typer

from bitplan.cluster import Cluster
from bitplan.errors import PlanError, RunError
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
PlanOption = Annotated[
    str | None,
    typer.Option("--plan", "-p", help="A plan's file or a preset.", autocompletion=complete_plan, show_default=False),
]
MatchOption = Annotated[
    str | None,
    typer.Option(
        metavar="PATTERN",
        help="Only tensors of these modules: a path and all beneath it, or a glob such as '*.attention.*'.",
        show_default=False,
    ),
]
RoundedOption = Annotated[bool, typer.Option("--rounded", help="Only tensors that the plan rounds.")]
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


def plan_and_target(first: str, second: str | None, plan: str | None, command: str) -> tuple[str, str | None]:
    """The plan and the target of ``PLAN [TARGET]`` or ``TARGET --plan PLAN``; raises where they are swapped."""
    if plan is not None:
        if second is not None:
            raise PlanError(
                f"the plan is given twice, {first} and {plan}: write bitplan {command} {second} --plan {plan}"
            )
        if is_target(plan) and is_plan(first):
            raise swapped(plan, first, command)
        return plan, first
    if is_target(first) and (second is None or is_plan(second)):
        raise swapped(first, second or "PLAN", command)
    return first, second


def swapped(target: str, plan: str, command: str) -> PlanError:
    """The error where a target stands in the place of a plan."""
    return PlanError(
        f"{target} is a model or a task and stands where the plan is expected: write bitplan {command} {target} "
        f"--plan {plan}"
    )


def require_one_argument(command: str, arguments: Sequence[str]) -> None:
    """Raise if a plan stands beside the target of a command that takes it by ``--plan``."""
    if len(arguments) < 2 or any(argument.startswith("-") for argument in arguments[:2]):
        return
    first, second = arguments[:2]
    plan, target = (first, second) if is_plan(first) else (second, first)
    if is_plan(plan):
        raise PlanError(f"a plan is given by --plan: write bitplan {command} {target} --plan {plan}")


def is_plan(name: str) -> bool:
    """Whether a text names a preset or a plan's file."""
    return name in preset_names() or name.endswith((".yaml", ".yml", ".json"))


def is_target(name: str) -> bool:
    """Whether a text names a built-in model, a task or a Python file, and no plan."""
    is_file = ".py:" in name or name.endswith(".py")
    return is_file or ((name.replace("_", "-") in BUILT_IN or name in task_names()) and name not in preset_names())


ClusterOption = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Train on a Ray cluster: its address, or auto for this machine's (started where there is none).",
        show_default=False,
    ),
]
GpusPerRunOption = Annotated[
    float | None,
    typer.Option(min=0.0, help="With --cluster (default: 1 with --device cuda, else 0).", show_default=False),
]


def chosen_cluster(address: str | None, gpus_per_run: float | None, device: str) -> Cluster | None:
    """The cluster that the two options name."""
    if address is None:
        if gpus_per_run is not None:
            raise RunError("--gpus-per-run is for runs on a cluster: give --cluster, too.")
        return None
    return Cluster(address, float(device.startswith("cuda")) if gpus_per_run is None else gpus_per_run)
