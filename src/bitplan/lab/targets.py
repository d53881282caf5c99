"""Targets by name: the built-in models, the first training step of a task, and a user's own ``file.py:make``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from bitplan.analysis.targets import DEFAULT_FUNCTION, Target, make_target, parse_file_name, target_function
from bitplan.compiler.torch_private import tree_map_only
from bitplan.errors import TargetError, nearest_names
from bitplan.lab.models.built_in import BUILT_IN
from bitplan.lab.tasks.registry import find_task, own_task, task_names
from bitplan.lab.tasks.task import Task
from bitplan.plans import preset_names


def load_target(source: str, *, shapes_only: bool = False, settings: Sequence[str] = ()) -> Target:
    """The target that `source` names: a built-in model, a task's first training step, or ``file.py:make``.

    A file is **run**, as :func:`bitplan.analysis.targets.load_target` says; it may name a task's class as well.

    :param shapes_only: make models on the ``meta`` device: large ones then cost nothing, and everything but running
        them works. A file decides for itself.
    :param settings: of a task, what differs from its recipe, as ``key=value``.
    """
    return load_target_and_task(source, shapes_only=shapes_only, settings=settings)[0]


def load_target_and_task(
    source: str, *, shapes_only: bool = False, settings: Sequence[str] = (), seed: int = 0
) -> tuple[Target, Task | None]:
    """The target that `source` names, and the task that it is the first training step of; None for a model.

    Parameters as of :func:`load_target`; a file is run once.

    :param seed: of the task.
    """
    file = parse_file_name(source)
    if file is not None:
        path, name = file
        function = target_function(path, name)
        if isinstance(function, type) and issubclass(function, Task):
            task = own_task(function, path, settings, seed)
            return make_target(task.target, path, name), task
        _require_no_settings(f"{path}:{name or DEFAULT_FUNCTION}", settings)
        return make_target(function, path, name), None
    if source in task_names():
        task = find_task(source, settings, seed)
        return _task_target(task, shapes_only), task
    model_name = source.replace("_", "-")  # mobilenet_v2 is accepted for mobilenet-v2
    if model_name not in BUILT_IN and source in preset_names():
        raise TargetError(f"{source} is a plan: name a model or a task first, as in resnet20 --plan {source}.")
    if model_name not in BUILT_IN:
        raise TargetError(
            f"there is no built-in model or task {source!r}; {nearest_names(source, (*BUILT_IN, *task_names()))} "
            f"(A model of your own is named as file.py:make.)"
        )
    _require_no_settings(model_name, settings)
    with torch.device("meta") if shapes_only else nullcontext():
        return BUILT_IN[model_name](), None


def _task_target(task: Task, shapes_only: bool) -> Target:
    if not shapes_only:
        return task.target()
    batch = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), task.example())
    with torch.device("meta"):
        return Target(task.model(), batch, task.loss)


def _require_no_settings(source: str, settings: Sequence[str]) -> None:
    if settings:
        raise TargetError(f"{source} is a model as it is, and only tasks have settings: drop --set {settings[0]}.")
