"""What users and installed packages add to bitplan: formats, quantizers, schedules, planners and error metrics.

A :class:`Registry` holds what a program registers. A package names its object in ``pyproject.toml``, as in
``[project.entry-points."bitplan.formats"]``; it is imported only when a name is asked for that bitplan does not know.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar, cast

from bitplan.errors import BitplanError, nearest_names

FORMATS = "bitplan.formats"
QUANTIZERS = "bitplan.quantizers"
SCHEDULES = "bitplan.schedules"
PLANNERS = "bitplan.planners"
METRICS = "bitplan.metrics"

T = TypeVar("T")


class Registry(Generic[T]):
    """Functions of users under names that commands and arguments know."""

    def __init__(self, group: str, kind: str) -> None:
        """`group`: of entry points. `kind`: what one is called in messages, such as ``planner``."""
        self.group = group
        self.kind = kind
        self._functions: dict[str, T] = {}

    def register(self, name: str, function: T) -> T:
        """Make `function` known as `name`; registering a name again replaces it."""
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", name):
            raise BitplanError(f"{name!r} cannot name a {self.kind}: use letters, digits, - and _.")
        if not callable(function):
            raise BitplanError(f"a {self.kind} is a function, not {type(function).__name__}.")
        self._functions[name] = function
        return function

    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self._functions, *entry_point_names(self.group)]))

    def find(self, name: str) -> T:
        """The function of that name, which the program has registered or an installed package offers."""
        function = self._functions.get(name) or find_entry_point(self.group, name)
        if function is None:
            advice = nearest_names(name, self.names()) if self.names() else "none is registered."
            raise BitplanError(f"there is no {self.kind} {name!r}; {advice}")
        return cast("T", function)


def find_entry_point(group: str, name: str) -> Any | None:
    """The object that an installed package offers under that name; None where none does."""
    entry = _entries(group).get(name)
    if entry is None:
        return None
    try:
        return entry.load()
    except Exception as error:
        package = entry.dist.name if entry.dist is not None else "a package"
        raise BitplanError(
            f"{name!r} of {package} cannot be imported ({type(error).__name__}: {error}): repair or remove {package}."
        ) from error


def entry_point_names(group: str) -> tuple[str, ...]:
    """The names that installed packages offer."""
    return tuple(_entries(group))


@cache
def _entries(group: str) -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=group)}
