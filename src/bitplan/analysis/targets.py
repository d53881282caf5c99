"""Targets: a model with a batch and a loss, built in or made by a Python file that the user names."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bitplan.compiler.torch_private import tree_leaves
from bitplan.errors import BitplanError, TargetError, nearest_names
from bitplan.extensions import Registry

T = TypeVar("T")

# --- Python files that the user names, such as ``file.py:make`` or ``my_task.py:MyTask``


#: The attribute of an imported module for the hash of its source.
_SHA256 = "__bitplan_sha256__"


def parse_file_name(text: str) -> tuple[Path, str] | None:
    """The file and the name after the colon ("" without one); None if `text` names no Python file.

    >>> parse_file_name("models/own.py:make")
    (PosixPath('models/own.py'), 'make')
    >>> parse_file_name("resnet20") is None
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
    """The SHA-256 of the source that :func:`import_file` ran to make `module`."""
    return str(vars(module)[_SHA256])


def import_file(path: Path, error: type[BitplanError]) -> Any:
    """Run the file as a module, with its directory on the import path as for a script."""
    name = f"bitplan_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look modules up there
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        # Not by the loader: it runs the bytecode in __pycache__ if that claims to belong to the file. The hash, and the
        # code that the user has read, must be those of the code that runs.
        source = path.read_bytes()
        vars(module)[_SHA256] = hashlib.sha256(source).hexdigest()
        exec(compile(source, str(path), "exec", dont_inherit=True), vars(module))
    except Exception as problem:
        del sys.modules[name]
        raise error(f"{path} cannot be run: {describe_error(problem, path)}") from problem
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
    return module


def find_callable(module: Any, path: Path, name: str, kind: str, error: type[BitplanError]) -> Any:
    """The callable `name` of the file; `kind` describes it in the error message."""
    function = getattr(module, name, None) if name else None
    if not callable(function):
        names = [
            attribute for attribute, value in vars(module).items() if callable(value) and not attribute.startswith("_")
        ]
        hint = f"; {nearest_names(name, names)}" if names else " nor any other."
        raise error(f"{path} has no {kind} {name!r}{hint}")
    return function


def find_function(name: str, registry: Registry[T]) -> T:
    """The function that a command names: one that is registered or installed, or ``file.py:name``, which is run."""
    file = parse_file_name(name)
    if file is None:
        return registry.find(name)
    path, function = file
    if not path.is_file():
        raise TargetError(f"there is no file {path}: name a {registry.kind} as file.py:function.")
    found: T = find_callable(import_file(path, TargetError), path, function, registry.kind, TargetError)
    return found


def describe_error(error: Exception, path: Path) -> str:
    """The error on one line, with the number of the last line of the file in its traceback."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).resolve() == path.resolve()
    ]
    line = f" (line {lines[-1]})" if lines else ""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}{': ' if first else ''}{first.removesuffix('.')}{line}."


#: The function that is called if the target names none.
DEFAULT_FUNCTION = "make"


@dataclass(frozen=True)
class Target:
    """A model, a batch as in :func:`bitplan.list_sites`, and the loss."""

    model: nn.Module
    #: The model's input, or (inputs, target) for a loss that takes a target.
    batch: Any
    #: A function of the model's output and, if it takes one, the target; None: the output is reduced to a scalar.
    loss: Callable[..., Tensor] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise TargetError(f"a target's model is a torch.nn.Module, not {type(self.model).__name__}.")
        if self.loss is not None and not callable(self.loss):
            raise TargetError(f"a target's loss is a function or None, not {type(self.loss).__name__}.")


def load_target(source: str) -> Target:
    """The target that ``file.py:make`` names.

    The file is Python code and is **run**; then its function ``make`` (or the one named after the colon) is called and
    returns a model, a batch and a loss. Name only files that you trust. Built-in models and tasks are loaded by
    :func:`bitplan.lab.targets.load_target`.
    """
    file = parse_file_name(source)
    if file is None:
        raise TargetError(f"{source!r} names no Python file: a target is named as file.py:make.")
    path, name = file
    return make_target(target_function(path, name), path, name)


def target_function(path: Path, name: str) -> Callable[[], Any]:
    """The function (or class) `name` of a target's file, which is run."""
    if not path.is_file():
        raise TargetError(f"there is no file {path}: a target is a built-in model's name or file.py:make.")
    function: Callable[[], Any] = find_callable(
        import_file(path, TargetError), path, name or DEFAULT_FUNCTION, "function", TargetError
    )
    return function


def make_target(make: Callable[[], Any], path: Path, name: str) -> Target:
    """Call a target's function; an error in it, or a result that is no target, is reported in one sentence."""
    function = name or DEFAULT_FUNCTION
    _require_no_parameters(make, f"{path}:{function}")
    try:
        target = make()
    except BitplanError:
        raise
    except Exception as error:
        raise TargetError(f"{path}:{function} failed: {describe_error(error, path)}") from error
    if isinstance(target, Target):
        return target
    if not isinstance(target, (tuple, list)) or len(target) != 3:
        count = f" of {len(target)}" if isinstance(target, (tuple, list)) else ""
        raise TargetError(
            f"{path}:{function} must return three things, model, batch and loss, not {type(target).__name__}{count}."
        )
    return Target(*target)


def _require_no_parameters(make: Callable[[], Any], label: str) -> None:
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):  # without a Python signature
        return
    needed = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise TargetError(
            f"{label} needs arguments ({', '.join(needed)}), and a target is a function without any: add make(), which "
            "returns model, batch and loss."
        )


@contextmanager
def target_errors(text: str) -> Iterator[None]:
    """Report an error in a model from a file as one sentence.

    An error in a built-in model is a bug of bitplan and keeps its traceback.
    """
    try:
        yield
    except BitplanError:
        raise
    except Exception as error:
        file = parse_file_name(text)
        if file is None:
            raise
        raise TargetError(f"{text} does not run on its batch: {describe_error(error, file[0])}") from error


# --- Device and batch size of a target


def move_target(target: Target, device: torch.device, batch: int | None = None) -> Target:
    """Move the target to `device`, with images in channels-last layout on a GPU; meta tensors stay on ``meta``.

    :param batch: the new batch size: the first dimension of the batch's tensors.
    """
    if batch is not None:
        _require_samples(target.batch)
    layout = torch.channels_last if device.type == "cuda" else torch.preserve_format

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            resized = value if batch is None else resize_batch(value, batch)
            destination = resized.device if resized.is_meta else device
            return resized.to(destination, memory_format=layout if value.dim() == 4 else torch.preserve_format)
        if isinstance(value, (tuple, list)):
            return type(value)(move(item) for item in value)
        if isinstance(value, dict):
            return {key: move(item) for key, item in value.items()}
        return value

    model = target.model
    if not any(parameter.is_meta for parameter in model.parameters()):
        model = model.to(device)
    if any(parameter.dim() == 4 for parameter in model.parameters()):
        model = model.to(memory_format=layout)  # type: ignore[call-overload]
    return Target(model, move(target.batch), target.loss)


def _require_samples(batch: Any) -> None:
    """Raise if the tensors of a batch differ in their first dimension, as the edges and nodes of a graph do."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    lengths = {tensor.shape[0] for tensor in tensors if tensor.layout == torch.strided and tensor.dim() > 0}
    if len(lengths) > 1:
        listed = " and ".join(map(str, sorted(lengths)))
        raise TargetError(f"a batch whose tensors have {listed} rows cannot be resized: do not set the batch size.")


def resize_batch(value: Tensor, batch: int) -> Tensor:
    """The first `batch` samples, repeated if there are fewer."""
    if value.layout != torch.strided:
        raise TargetError("a batch with a sparse tensor cannot be resized: do not set the batch size.")
    if value.dim() == 0:
        return value
    repeats = -(-batch // value.shape[0])
    return value.repeat(repeats, *[1] * (value.dim() - 1))[:batch]


def batch_size(batch: Any) -> int:
    """The first dimension of the batch's first tensor."""
    while not isinstance(batch, Tensor):
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return int(batch.shape[0])
