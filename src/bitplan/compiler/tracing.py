"""Settings of torch.compile that planned models need: held while one of them lives, then put back.

Several models may be planned at once and need the same setting, so that none may put it back on its own: the setting is
the largest that is needed now, and what it was before anyone needed it in the end. A model that is thrown away without
being detached needs nothing any more.
"""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from bitplan.compiler import torch_private
from bitplan.compiler.torch_private import TracingContext

# --- Where Python code runs: eagerly, or while torch.compile makes a graph of it


F = TypeVar("F", bound=Callable[..., Any])

#: Functions for torch.compiler.allow_in_graph, until :func:`allow_functions_in_graph`. The decorators here do not
#: import ``torch._dynamo``, which takes more than a second and which eager code never needs.
_not_allowed_yet: list[Callable[..., Any]] = []


def is_traced() -> bool:
    """Whether a graph is being made: by torch.compile, or beneath it of the functions that it took as they are."""
    return torch.compiler.is_compiling() or TracingContext.try_get() is not None


def constant_when_traced(function: F) -> F:
    """Under torch.compile call `function` while tracing and keep its result as a constant."""
    setattr(function, torch_private.CONSTANT_MARK, True)
    return function


def taken_whole(function: F) -> F:
    """Under torch.compile do not follow `function`: run it as it is when the graph of tensors is made.

    Its arguments are tensors and plain constants. It holds from the next :func:`allow_functions_in_graph` on.
    """
    _not_allowed_yet.append(function)
    return function


def allow_functions_in_graph() -> None:
    """Tell torch.compile of the functions that it does not follow; to be called before anything is compiled."""
    while _not_allowed_yet:
        torch.compiler.allow_in_graph(_not_allowed_yet.pop())  # type: ignore[no-untyped-call]


# --- What compiled code has to check of a plan: one word a module


#: Under what name a module holds its version.
VERSION = "_bitplan_version"

#: What the version stands for (a module's state, ``_bitplan``), and what never changes: our own code, and the classes
#: beneath an exchanged one, which is guarded itself. Names as torch's guards spell them.
_NEEDLESS = re.compile(
    r"_bitplan(?!\w)|^G\['__import_bitplan_dot_|\.__mro__\[\d+\]\.forward(\.__code__)?$|\.__mro__\[1\]\.__dict__"
)

_known: dict[Hashable, str] = {}


def version_of(state: Hashable) -> str:
    """The word for a state: the same for equal ones, within a process."""
    return _known.setdefault(state, f"version {len(_known)}")


@constant_when_traced
def depend_on(version: str) -> None:
    """Let the graph that is being made hold for this version only."""


def guarded_by_version(guards: Sequence[Any]) -> Sequence[bool]:
    """Of torch's guards those that stay (``guard_filter_fn``)."""
    return [_NEEDLESS.search(guard.name) is None for guard in guards]


_needs: dict[str, dict[int, int]] = {}

_before: dict[str, int] = {}
#: What was last written here: another value is somebody else's, and is left alone.
_written: dict[str, int] = {}

_numbers = itertools.count()
#: Graphs of one piece of code, where copies of a model are compiled one after the other.
_MANY = 256


class Allowance:
    """A setting of torch.compile's tracer that is at least `value` until removed or until its owner is gone."""

    def __init__(self, name: str, value: int, owner: object) -> None:
        needs = _needs.setdefault(name, {})
        if not needs:
            _before[name] = _written[name] = getattr(torch_private.dynamo_config, name)
        number = next(_numbers)
        needs[number] = value
        _settle(name)
        self.remove: Callable[[], None] = weakref.finalize(owner, _give_up, name, number)


def _give_up(name: str, number: int) -> None:
    del _needs[name][number]
    _settle(name)


def _settle(name: str) -> None:
    kind = type(_before[name])
    wanted = kind(max([_before[name], *_needs[name].values()]))
    if getattr(torch_private.dynamo_config, name) == _written[name]:
        setattr(torch_private.dynamo_config, name, wanted)
    _written[name] = wanted


def many_graphs() -> AbstractContextManager[None]:
    """While one piece of code is compiled for many copies of a model: torch counts graphs by code, and would take these
    for recompilations that never end."""
    patched: AbstractContextManager[None] = torch_private.dynamo_config.patch(recompile_limit=_MANY)
    return patched
