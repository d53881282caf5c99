"""Targets: a model with a batch and a loss, which is what sites, plans and costs are asked about."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from bitplan.errors import BitplanError, TargetError, nearest_names
from bitplan.user_code import in_words, named_file, public_name, run_file

if TYPE_CHECKING:
    from bitplan.tasks.task import Task

#: The function that a file is asked for where the target names none.
DEFAULT_FUNCTION = "make"


@dataclass(frozen=True)
class Target:
    """What is trained: a model, a batch as :func:`bitplan.sites` takes it, and the loss."""

    model: nn.Module
    #: What the model takes, or (inputs, target) where the loss wants both.
    batch: Any
    #: Of the model's output and, if it wants one, the batch's target; None: the output alone matters.
    loss: Callable[..., Tensor] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise TargetError(f"a target's model is a torch.nn.Module, not {type(self.model).__name__}.")
        if self.loss is not None and not callable(self.loss):
            raise TargetError(f"a target's loss is a function or None, not {type(self.loss).__name__}.")


def load_target(text: str, *, shapes_only: bool = False, settings: Sequence[str] = ()) -> Target:
    """The target that `text` names: a built-in model, a task's first training step, or ``file.py:make``.

    The file is Python code and is **run**; then its function ``make`` (or whatever is named behind the colon) is
    called and returns a model, a batch and a loss; a task's class may be named as well. So name only files that you
    trust.

    :param shapes_only: make models on the ``meta`` device: large ones then cost nothing, and everything but running
        them works. A file decides for itself.
    :param settings: of a task, what differs from its recipe, as ``key=value``.
    """
    # Tasks are a later room of the house; a target that is one is made there.
    from bitplan.models.built_in import BUILT_IN
    from bitplan.tasks.registry import find_task, task_names

    named = named_file(text)
    if named is not None:
        return _from_file(*named, settings)
    if text in task_names():
        return _of_task(find_task(text, settings), shapes_only)
    text = next((name for name in BUILT_IN if name == text.replace("_", "-")), text)  # mobilenet_v2 is found, too
    if text not in BUILT_IN:
        raise TargetError(
            f"there is no built-in model or task {text!r}; {nearest_names(text, (*BUILT_IN, *task_names()))} "
            f"(A model of your own is named as file.py:make.)"
        )
    _require_no_settings(text, settings)
    with torch.device("meta") if shapes_only else nullcontext():
        return BUILT_IN[text]()


def _require_no_settings(text: str, settings: Sequence[str]) -> None:
    if settings:
        raise TargetError(f"{text} is a model as it is, and only tasks have settings: drop --set {settings[0]}.")


@contextmanager
def running(text: str) -> Iterator[None]:
    """While the target that `text` names is at work: what goes wrong in a file's model is said in one sentence.

    A built-in model that fails is a bug, which is not for the user to mend, and keeps its traceback.
    """
    try:
        yield
    except BitplanError:
        raise
    except Exception as error:
        named = named_file(text)
        if named is None:
            raise
        raise TargetError(f"{text} does not run on its batch: {in_words(error, named[0])}") from error


def _of_task(task: Task, shapes_only: bool) -> Target:
    if not shapes_only:
        return task.target()
    batch = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), task.example())
    with torch.device("meta"):
        return Target(task.model(), batch, task.loss)


def _from_file(path: Path, name: str, settings: Sequence[str]) -> Target:
    from bitplan.tasks.registry import own_task
    from bitplan.tasks.task import Task

    if not path.is_file():
        raise TargetError(f"there is no file {path}: a target is a built-in model's name or file.py:make.")
    function = name or DEFAULT_FUNCTION
    make = public_name(run_file(path, TargetError), path, function, "function", TargetError)
    try:
        if isinstance(make, type) and issubclass(make, Task):
            return _of_task(own_task(make, path, settings), shapes_only=False)
        _require_no_settings(f"{path}:{function}", settings)
        made = make()
    except BitplanError:
        raise
    except Exception as error:
        raise TargetError(f"{path}:{function} failed: {in_words(error, path)}") from error
    if isinstance(made, Target):
        return made
    if not isinstance(made, (tuple, list)) or len(made) != 3:
        count = f" of {len(made)}" if isinstance(made, (tuple, list)) else ""
        raise TargetError(
            f"{path}:{function} must return three things, model, batch and loss, not {type(made).__name__}{count}."
        )
    return Target(*made)
