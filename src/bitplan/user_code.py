"""Python files that a user names, such as ``file.py:make`` or ``my_task.py:MyTask``.

Such a file is code and is **run**, so only a file that the user names on the command line or in a call may get here:
never one that a run folder, a plan or a checkpoint names. Whatever goes wrong in it is told in one sentence that names
the file and the line.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Any

from bitplan.errors import BitplanError, nearest_names

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
    found = getattr(module, name, None) if name else None
    if not callable(found):
        known = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        hint = f"; {nearest_names(name, known)}" if known else " nor any other."
        raise error(f"{path} has no {kind} {name!r}{hint}")
    return found


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
