"""Targets: a model with a batch and a loss, which is what sites, plans and costs are asked about."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.compiler.torch_private import tree_leaves
from bitplan.errors import BitplanError, TargetError, nearest_names

# --- Python files that a user names, such as ``file.py:make`` or ``my_task.py:MyTask``


#: Where a module that was made from a file holds the hash of its source.
_SHA256 = "__bitplan_sha256__"


def named_file(text: str) -> tuple[Path, str] | None:
    """The file and the name behind the colon ("" without one), or None where `text` names no Python file.

    >>> named_file("models/own.py:make")
    (PosixPath('models/own.py'), 'make')
    >>> named_file("resnet20") is None
    True
    """
    path, ending, name = text.partition(".py:")
    if ending:
        return Path(f"{path}.py"), name
    return (Path(text), "") if text.endswith(".py") else None


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's contents, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def module_sha256(module: Any) -> str:
    """The SHA-256 of the source that :func:`run_file` ran to make `module`."""
    return str(vars(module)[_SHA256])


def run_file(path: Path, error: type[BitplanError]) -> Any:
    """The file as a module, with its own folder on the import path as if it had been started."""
    name = f"bitplan_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        # Not by the loader: it would run the bytecode in __pycache__ where that claims to belong to the file, and then
        # neither the file that the user has read nor its hash would say what runs.
        source = path.read_bytes()
        vars(module)[_SHA256] = hashlib.sha256(source).hexdigest()
        exec(compile(source, str(path), "exec", dont_inherit=True), vars(module))
    except Exception as problem:
        del sys.modules[name]
        raise error(f"{path} cannot be run: {in_words(problem, path)}") from problem
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
    return module


def public_name(module: Any, path: Path, name: str, kind: str, error: type[BitplanError]) -> Any:
    """What the file calls `name`, which must be callable; `kind` is the word for it in the sentence otherwise."""
    value_found = getattr(module, name, None) if name else None
    if not callable(value_found):
        names = [
            attribute for attribute, value in vars(module).items() if callable(value) and not attribute.startswith("_")
        ]
        hint = f"; {nearest_names(name, names)}" if names else " nor any other."
        raise error(f"{path} has no {kind} {name!r}{hint}")
    return value_found


def in_words(error: Exception, path: Path) -> str:
    """The error on one line, with the last line of the file that led to it."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).resolve() == path.resolve()
    ]
    at = f" (line {lines[-1]})" if lines else ""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}{': ' if first else ''}{first.removesuffix('.')}{at}."


#: The function that a file is asked for where the target names none.
DEFAULT_FUNCTION = "make"


@dataclass(frozen=True)
class Target:
    """What is trained: a model, a batch as :func:`bitplan.list_sites` takes it, and the loss."""

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


def load_target(source: str) -> Target:
    """The target that ``file.py:make`` names.

    The file is Python code and is **run**; then its function ``make`` (or the one named behind the colon) is called and
    returns a model, a batch and a loss. So name only files that you trust. Built-in models and tasks are loaded by
    :func:`bitplan.lab.targets.load_target`.
    """
    file = named_file(source)
    if file is None:
        raise TargetError(f"{source!r} names no Python file: a target is named as file.py:make.")
    path, name = file
    return make_target(target_function(path, name), path, name)


def target_function(path: Path, name: str) -> Callable[[], Any]:
    """The function (or class) that a target's file calls `name`; running the file is how it is found."""
    if not path.is_file():
        raise TargetError(f"there is no file {path}: a target is a built-in model's name or file.py:make.")
    function: Callable[[], Any] = public_name(
        run_file(path, TargetError), path, name or DEFAULT_FUNCTION, "function", TargetError
    )
    return function


def make_target(make: Callable[[], Any], path: Path, name: str) -> Target:
    """Call a target's function; an error in it, or a result that is no target, is reported in one sentence."""
    function = name or DEFAULT_FUNCTION
    try:
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


# --- A target where it is to run, with as many samples as it is to have


def placed(target: Target, device: torch.device, batch: int | None = None) -> Target:
    """The target on `device`, where GPUs like images channels-last; what lies on ``meta`` stays there.

    :param batch: samples of the batch, which is the first dimension of its tensors.
    """
    if batch is not None:
        _require_samples(target.batch)
    layout = torch.channels_last if device.type == "cuda" else torch.preserve_format

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            fitted = value if batch is None else of_size(value, batch)
            there = fitted.device if fitted.is_meta else device
            return fitted.to(there, memory_format=layout if value.dim() == 4 else torch.preserve_format)
        if isinstance(value, (tuple, list)):
            return type(value)(moved(item) for item in value)
        if isinstance(value, dict):
            return {key: moved(item) for key, item in value.items()}
        return value

    model = target.model
    if not any(parameter.is_meta for parameter in model.parameters()):
        model = model.to(device)
    if any(parameter.dim() == 4 for parameter in model.parameters()):
        model = model.to(memory_format=layout)  # type: ignore[call-overload]
    return Target(model, moved(target.batch), target.loss)


def _require_samples(batch: Any) -> None:
    """Raise where the tensors of a batch are not of so many samples each: edges of a graph are not its nodes."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    lengths = {tensor.shape[0] for tensor in tensors if tensor.layout == torch.strided and tensor.dim() > 0}
    if len(lengths) > 1:
        listed = " and ".join(map(str, sorted(lengths)))
        raise TargetError(
            f"a batch whose tensors have {listed} rows is one whole and cannot be cut: leave its size as it is."
        )


def of_size(value: Tensor, batch: int) -> Tensor:
    """The first `batch` samples, repeated where there are fewer."""
    if value.layout != torch.strided:
        raise TargetError("a batch with a sparse tensor is one whole and cannot be cut: leave its size as it is.")
    if value.dim() == 0:
        return value
    repeats = -(-batch // value.shape[0])
    return value.repeat(repeats, *[1] * (value.dim() - 1))[:batch]


def batch_size(batch: Any) -> int:
    """Samples of a batch: the first dimension of its first tensor."""
    while not isinstance(batch, Tensor):
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return int(batch.shape[0])
