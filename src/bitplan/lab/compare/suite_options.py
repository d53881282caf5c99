"""Options of suites: bit ranges, cycles and static levels of cyclic precision, ratios and orders of assignments.

With them, one command runs each of the papers' tables. An option that a suite does not have is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, get_args

from bitplan.errors import RunError, nearest_names
from bitplan.planners.assign.levels import ORDERS
from bitplan.plans.schedules import TEN
from bitplan.plans.schedules.base import check_bits, check_range
from bitplan.plans.schedules.cyclic import Period

#: The word for the ratios 0, 0.1, ... 1.
TENTHS = "tenths"


@dataclass(frozen=True)
class SuiteOptions:
    """What the plans of a suite differ in from its own; None leaves it as it is."""

    #: The lowest and the highest bits.
    bits: tuple[int, int] | None = None
    #: Cycles of each schedule.
    cycles: int | None = None
    #: Widths of static controls.
    static: tuple[int, ...] | None = None
    #: Bits of gradients; by default the highest bits of the plan.
    gradient_bits: int | None = None
    #: The length of a cycle, see :class:`bitplan.plans.schedules.Cyclic`.
    period: Period | None = None
    #: Which of the ten schedules.
    schedules: tuple[str, ...] | None = None
    #: Of graph networks: round what neighbour sums are of, too.
    quantized_aggregation: bool | None = None
    #: Round what the authors' code rounds beyond products, see :func:`bitplan.planners.cpt.make_plan`.
    as_published: bool | None = None
    #: Shares of values in low precision.
    ratios: tuple[float, ...] | None = None
    #: Orders in which groups go down.
    orders: tuple[str, ...] | None = None
    #: Shares of overflowing values at which a tensor is promoted; 0: never.
    promotions: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.bits is not None:
            check_range(*self.bits)
        for width in (*(self.static or ()), *([] if self.gradient_bits is None else [self.gradient_bits])):
            check_bits(bits=width)
        if self.period is not None and self.period not in get_args(Period):
            raise RunError(f"there is no period {self.period!r}; {nearest_names(self.period, get_args(Period))}")
        for what, names, choices in (("schedule", self.schedules, tuple(TEN)), ("order", self.orders, ORDERS)):
            for name in names or ():
                if name not in choices:
                    raise RunError(f"there is no {what} {name!r} in a suite; {nearest_names(name, choices)}")
        for name in ("ratios", "promotions"):
            for share in getattr(self, name) or ():
                if not 0 <= share <= 1:
                    raise RunError(f"{name} are shares of 0 to 1, not {share:g}.")

    @property
    def chosen(self) -> dict[str, Any]:
        """The options that are not the suite's own."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None and value is not False}

    def require(self, suite: str, allowed: tuple[str, ...]) -> dict[str, Any]:
        """The chosen options; raises if the suite does not have one of them."""
        for name in self.chosen:
            if name not in allowed:
                have = ", ".join(map(flag, allowed)) or "none"
                raise RunError(f"the suite {suite} has no option {flag(name)}: it has {have}.")
        return self.chosen

    @property
    def arguments(self) -> list[str]:
        """The arguments of ``bitplan compare`` that say the same."""
        words: list[str] = []
        for name, value in self.chosen.items():
            words += [flag(name)] if value is True else [flag(name), _text(name, value)]
        return words

    @property
    def labels(self) -> list[str]:
        """Parts of a folder's name.

        >>> SuiteOptions(bits=(3, 6), cycles=4).labels
        ['bits=3-6', 'cycles=4']
        """
        return [
            flag(name).removeprefix("--") + ("" if value is True else f"={_text(name, value)}")
            for name, value in self.chosen.items()
        ]


def flag(name: str) -> str:
    """The command-line option of a field."""
    return "--q-agg" if name == "quantized_aggregation" else f"--{name.replace('_', '-')}"


def _text(name: str, value: Any) -> str:
    if name == "bits":
        return f"{value[0]}-{value[1]}"
    if isinstance(value, tuple):
        return ",".join(f"{item:g}" if isinstance(item, float) else str(item) for item in value)
    return str(value)


# --- Lists on the command line


def read_widths(text: str | None) -> tuple[int, ...] | None:
    """The widths in ``8,6``."""
    return _read(text, int, "whole numbers such as 8,6")


def read_shares(text: str | None) -> tuple[float, ...] | None:
    """The shares in ``0.3,0.5``, or in the word ``tenths``.

    >>> read_shares("0,0.5,1")
    (0.0, 0.5, 1.0)
    """
    if text == TENTHS:
        return tuple(tenth / 10 for tenth in range(11))
    return _read(text, float, f"shares such as 0.3,0.5, or {TENTHS}")


def read_names(text: str | None) -> tuple[str, ...] | None:
    """The names in ``CR,RR``."""
    return _read(text, str, "names such as CR,RR")


def _read(text: str | None, convert: Callable[[str], Any], example: str) -> tuple[Any, ...] | None:
    if text is None:
        return None
    try:
        items = tuple(convert(part.strip()) for part in re.split(",", text))
    except ValueError:
        items = ()
    if not items or any(item == "" for item in items):
        raise RunError(f"{text!r} is no list: write {example}.")
    return tuple(dict.fromkeys(items))
