"""Changes to torch itself, which hold while a plan is attached to some model and are undone after the last one.

A model may be detached, or dropped without that, and a copy of it follows the same plan. So every attachment registers
an owner, an object that the model and its copies refer to, and counts until it releases its hold or the owner is
garbage-collected.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

Undo = Callable[[], None]

_holds: set[int] = set()
_hold_ids = itertools.count()
#: The patches that are applied now, each with the function that undoes it.
_applied: dict[Callable[[], Undo], Undo] = {}


def hold(owner: object) -> Callable[[], object]:
    """Keep patches applied until the returned function is called or `owner` is gone."""
    hold_id = next(_hold_ids)
    _holds.add(hold_id)
    release = weakref.finalize(owner, _release, hold_id)
    release.atexit = False
    return release


def apply(patch: Callable[[], Undo]) -> None:
    """Apply a patch, unless it is applied already or no plan is attached; `patch` returns what undoes it."""
    if _holds and patch not in _applied:
        _applied[patch] = patch()


def replace_attribute(owner: Any, name: str, value: Any) -> Undo:
    """Set an attribute; undoing leaves it alone where somebody else has set it since."""
    original = getattr(owner, name)
    setattr(owner, name, value)

    def undo() -> None:
        if getattr(owner, name) is value:
            setattr(owner, name, original)

    return undo


def _release(hold_id: int) -> None:
    _holds.discard(hold_id)
    while _applied and not _holds:
        _applied.popitem()[1]()
