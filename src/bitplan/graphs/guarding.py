"""What compiled code has to check of a plan: one word a module.

Tracing reads dozens of attributes of every module's actions, and torch guards each of them, for every module, before
every call: for a network of a hundred layers that takes as long as launching many of its kernels. Nothing of it changes
without our doing, so all of it is summed up in a word, the module's *version*, which is another one whenever something
changes that a graph depends on, and the same one for the same state, so that equal blocks share a graph. It lies in the
module's own dictionary, which torch checks as a whole. :meth:`bitplan.at_work.attachment.Attachment.compile` lets torch
guard that word in place of all the rest.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import Any

from bitplan.tracing import constant_when_traced

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
