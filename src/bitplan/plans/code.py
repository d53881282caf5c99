"""``module:name`` in plans: functions and classes of the user's own, which reading a plan never imports.

A plan holds a :class:`CodeReference`. Its module is imported by :meth:`bitplan.Plan.with_code`, where the user allows
it: ``attach(..., allow_code=True)``, or ``bitplan --allow-code`` on the command line. A reference that was made from a
function or class in Python has it already.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from bitplan.errors import PlanError, nearest_names
from bitplan.extensions import entry_point_names, find_entry_point

_WORD = r"[A-Za-z_][A-Za-z0-9_]*"
#: ``module:name``, or the name of an entry point.
REFERENCE_PATTERN = rf"^({_WORD}(\.{_WORD})*:{_WORD}(\.{_WORD})*|[A-Za-z_][A-Za-z0-9_.-]*)$"

_is_allowed: ContextVar[bool] = ContextVar("bitplan_allows_code", default=False)


@contextmanager
def code_allowed(allowed: bool = True) -> Iterator[None]:
    """Inside, plans that are read may import the code that they name."""
    token = _is_allowed.set(allowed)
    try:
        yield
    finally:
        _is_allowed.reset(token)


def is_code_allowed() -> bool:
    return _is_allowed.get()


@dataclass(frozen=True)
class CodeReference:
    """A function or class of the user's own.

    >>> CodeReference("my_quantizers:hadamard").target is None
    True
    """

    #: ``module:name``, or the name of an entry point.
    name: str
    #: The object itself; None where it has not been imported.
    target: Callable[..., Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_reference(self.name)

    @classmethod
    def of(cls, value: CodeReference | str | Callable[..., Any]) -> CodeReference:
        """A reference by its name, or to an object that Python code brings along."""
        if isinstance(value, CodeReference):
            return value
        if isinstance(value, str):
            return cls(value)
        if not callable(value):
            raise PlanError(f"a function is module:name, or the function itself, not {value!r}.")
        name = f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', type(value).__name__)}"
        # Such as a lambda: tables can name it, and no plan file can.
        return cls(name if re.fullmatch(REFERENCE_PATTERN, name) else _UNNAMED, value)

    @property
    def can_be_imported(self) -> bool:
        """Whether a plan file that holds the name leads back to the object."""
        module, colon, path = self.name.partition(":")
        if self.target is None or not colon:
            return self.name != _UNNAMED
        found: Any = sys.modules.get(module)
        for part in path.split("."):
            found = getattr(found, part, None)
        return found is self.target

    def imported(self, group: str) -> CodeReference:
        """The same with its target. `group`: that of the entry point, where the name has no module."""
        if self.target is not None:
            return self
        module, colon, path = self.name.partition(":")
        target: Any = _import(module, self.name) if colon else find_entry_point(group, self.name)
        if not colon and target is None:
            names = entry_point_names(group)
            advice = nearest_names(self.name, names) if names else "write module:name."
            raise PlanError(f"no installed package has {self.name!r} among its entry points {group}: {advice}")
        for part in path.split(".") if colon else ():
            target = getattr(target, part, None)
        if not callable(target):
            raise PlanError(f"{self.name!r} is no function or class: there is none of that name in {module}.")
        return CodeReference(self.name, target)

    def __str__(self) -> str:
        return self.name


#: The name of an object that no module holds.
_UNNAMED = "a_function"


def check_reference(name: str) -> None:
    """Raise unless the text is ``module:name`` or the name of an entry point."""
    if not isinstance(name, str) or not re.fullmatch(REFERENCE_PATTERN, name):
        raise PlanError(f"{name!r} names no function: write module:name, such as my_quantizers:hadamard.")


def not_allowed(names: str) -> PlanError:
    """The error for a plan whose code the user has not allowed."""
    return PlanError(
        f"the plan runs code of its own, {names}: if you trust it, give attach(..., allow_code=True) or the plan's "
        f"with_code(), or run bitplan --allow-code COMMAND."
    )


def _import(module: str, name: str) -> Any:
    try:
        return sys.modules.get(module) or import_module(module)
    except Exception as error:
        raise PlanError(f"{name!r} cannot be imported ({type(error).__name__}: {error}): check the module.") from error
