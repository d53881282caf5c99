"""Settings of torch.compile that planned models need: held while one of them lives, then put back.

Several models may be planned at once and need the same setting, so that none may put it back on its own: the setting is
the largest that is needed now, and what it was before anyone needed it in the end. A model that is thrown away without
being detached needs nothing any more.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

_needs: dict[str, dict[int, int]] = {}
_before: dict[str, int] = {}
#: What was last written here: another value is somebody else's, and is left alone.
_written: dict[str, int] = {}
_numbers = itertools.count()
#: Graphs of one piece of code, where copies of a model are compiled one after the other.
_MANY = 256


class Allowance:
    """One setting of ``torch._dynamo.config`` at a value or above, until removed or until its owner is gone."""

    def __init__(self, name: str, value: int, owner: object) -> None:
        needs = _needs.setdefault(name, {})
        if not needs:
            _before[name] = _written[name] = getattr(torch._dynamo.config, name)
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
    if getattr(torch._dynamo.config, name) == _written[name]:
        setattr(torch._dynamo.config, name, wanted)
    _written[name] = wanted


def many_graphs() -> AbstractContextManager[None]:
    """While one piece of code is compiled for many copies of a model: torch counts graphs by code, and would take these
    for recompilations that never end."""
    patched: AbstractContextManager[None] = torch._dynamo.config.patch(recompile_limit=_MANY)
    return patched
