"""Targets: a model with a batch and a loss, which is what sites, plans and costs are asked about."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.errors import BitplanError, TargetError, nearest_names

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


def load_target(text: str, *, shapes_only: bool = False) -> Target:
    """The target that `text` names: a built-in model, or ``file.py:make``.

    The file is Python code and is **run**; then its function ``make`` (or whatever is named behind the colon) is
    called and returns a model, a batch and a loss. So name only files that you trust.

    :param shapes_only: make built-in models on the ``meta`` device: large ones then cost nothing, and everything but
        running them works. A file decides for itself.
    """
    path = _path_of(text)
    if path is not None:
        return _from_file(path, text.partition(".py:")[2] if ".py:" in text else DEFAULT_FUNCTION)
    from bitplan.models.built_in import BUILT_IN

    if text not in BUILT_IN:
        raise TargetError(
            f"there is no built-in model {text!r}; {nearest_names(text, BUILT_IN)} "
            f"(A model of your own is named as file.py:make.)"
        )
    with torch.device("meta") if shapes_only else nullcontext():
        return BUILT_IN[text]()


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
        path = _path_of(text)
        if path is None:
            raise
        raise TargetError(f"{text} does not run on its batch: {_words(error, path)}") from error


def _path_of(text: str) -> Path | None:
    path, ending, _ = text.partition(".py:")
    return Path(f"{path}.py") if ending else Path(text) if text.endswith(".py") else None


def _from_file(path: Path, function: str) -> Target:
    if not path.is_file():
        raise TargetError(f"there is no file {path}: a target is a built-in model's name or file.py:make.")
    module = _run(path)
    make = getattr(module, function, None) if function else None
    if not callable(make):
        known = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        hint = f"; {nearest_names(function, known)}" if known else " nor any other."
        raise TargetError(f"{path} has no function {function!r}{hint}")
    try:
        made = make()
    except BitplanError:
        raise
    except Exception as error:
        raise TargetError(f"{path}:{function} failed: {_words(error, path)}") from error
    if isinstance(made, Target):
        return made
    if not isinstance(made, (tuple, list)) or len(made) != 3:
        count = f" of {len(made)}" if isinstance(made, (tuple, list)) else ""
        raise TargetError(
            f"{path}:{function} must return three things, model, batch and loss, not {type(made).__name__}{count}."
        )
    return Target(*made)


def _run(path: Path) -> Any:
    """The file as a module, with its own folder on the import path as if it had been started."""
    name = f"bitplan_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise TargetError(f"{path} cannot be run: {_words(error, path)}") from error
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
    return module


def _words(error: Exception, path: Path) -> str:
    """The error on one line, with the last line of the file that led to it."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).resolve() == path.resolve()
    ]
    at = f" (line {lines[-1]})" if lines else ""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}{': ' if first else ''}{first.removesuffix('.')}{at}."
