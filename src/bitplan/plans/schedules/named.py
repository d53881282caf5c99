"""Schedules by name: the ten, and the others, from Python and from a plan's plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from bitplan.errors import ScheduleError, nearest_names
from bitplan.plans.schedules.base import RunPoint, Schedule
from bitplan.plans.schedules.cyclic import DEFAULT_CYCLES, TEN, Cyclic, Ramp
from bitplan.plans.schedules.piecewise import AtLeast, Deficit, Function, LateSwitch, Piecewise, Static, StepList


def schedule(name: str | Callable[[int, int], int], **options: Any) -> Schedule:
    """The schedule of that name, or of a function (step, total) -> bits.

    =====================  ===================================================================================
    one of the ten         ``low``, ``high``, ``cycles`` (8), ``period`` (exact, published, truncated)
    ``cyclic``             the same and ``profile`` (C, L, E, R), ``shape`` (repeated, triangular), ``reflection``
    ``growth``, ``decay``  ``low``, ``high``, ``profile`` (L): one growth or fall over the whole run
    ``static``             ``bits``
    ``steps``              ``bits``, a list, and ``at``, when each but the first begins
    ``late``               ``low``, ``high``, ``last`` (10%): how much of the run is high
    ``deficit``            ``low``, ``high``, ``start``, ``end``: low inside the window
    ``pieces``             ``pieces``, a list of schedules, and ``at``, when each but the first begins
    ``at-least``           ``schedule``, another one, and ``least``: the bits that it never falls below
    a function             ``low`` and ``high``, between which its bits lie; a plan has ``function: module:name``
    =====================  ===================================================================================

    Moments are steps (5000) or shares ("90%").

    >>> schedule("CR", low=3, high=8, cycles=8).bits(0, 64000)
    3
    """
    if callable(name):
        return Function(name, **_taken("function", options, ("low", "high")))
    return schedule_from_data({"name": name, **options})


def schedule_from_data(data: Mapping[str, Any]) -> Schedule:
    """What :meth:`Schedule.to_data` gave."""
    options = dict(data)
    name = options.pop("name", None)
    names = (*TEN, *_OTHERS)
    if not isinstance(name, str) or (name not in _OTHERS and name.upper() not in TEN):
        raise ScheduleError(f"there is no schedule {name!r}; {nearest_names(str(name), names)}")
    if name in _OTHERS:
        make, needed, optional = _OTHERS[name]
        return make(_taken(name, options, needed, optional))
    profile, shape, reflection = TEN[name.upper()]
    arguments = _taken(name, options, ("low", "high"), ("cycles", "period"))
    return Cyclic(profile, shape=shape, reflection=reflection, **arguments)


def _taken(
    name: str, options: Mapping[str, Any], needed: tuple[str, ...], optional: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The options, all that are needed and none that are unknown."""
    for key in options:
        if key not in (*needed, *optional):
            raise ScheduleError(f"{name} has no {key!r}; it has {', '.join((*needed, *optional))}.")
    for key in needed:
        if key not in options:
            raise ScheduleError(f"{name} needs {key}: add it.")
    return dict(options)


def _cyclic(arguments: dict[str, Any]) -> Schedule:
    return Cyclic(
        arguments["profile"],
        arguments["low"],
        arguments["high"],
        arguments.get("cycles", DEFAULT_CYCLES),
        arguments.get("shape", "repeated"),
        arguments.get("reflection"),
        arguments.get("period", "exact"),
    )


def _ramp(falls: bool) -> Callable[[dict[str, Any]], Schedule]:
    return lambda arguments: Ramp(
        arguments.get("profile", "L"), arguments["low"], arguments["high"], falls, arguments.get("reflection")
    )


def _late(arguments: dict[str, Any]) -> Schedule:
    return LateSwitch(arguments["low"], arguments["high"], RunPoint.of(arguments.get("last", "10%")))


def _deficit(arguments: dict[str, Any]) -> Schedule:
    return Deficit(arguments["low"], arguments["high"], RunPoint.of(arguments["start"]), RunPoint.of(arguments["end"]))


def _steps(arguments: dict[str, Any]) -> Schedule:
    return StepList(tuple(_listed("bits", arguments["bits"])), tuple(map(RunPoint.of, _listed("at", arguments["at"]))))


def _pieces(arguments: dict[str, Any]) -> Schedule:
    pieces = (
        piece if isinstance(piece, Schedule) else schedule_from_data(piece)
        for piece in _listed("pieces", arguments["pieces"])
    )
    return Piecewise(tuple(pieces), tuple(map(RunPoint.of, _listed("at", arguments["at"]))))


def _at_least(arguments: dict[str, Any]) -> Schedule:
    inner = arguments["schedule"]
    return AtLeast(arguments["least"], inner if isinstance(inner, Schedule) else schedule_from_data(inner))


def _listed(key: str, value: Any) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise ScheduleError(f"{key} is a list, not {value!r}.")
    return list(value)


_Make = Callable[[dict[str, Any]], Schedule]
#: Name -> what makes it, the options it needs, and those it may have.
_OTHERS: dict[str, tuple[_Make, tuple[str, ...], tuple[str, ...]]] = {
    "cyclic": (_cyclic, ("profile", "low", "high"), ("cycles", "shape", "reflection", "period")),
    "growth": (_ramp(falls=False), ("low", "high"), ("profile",)),
    "decay": (_ramp(falls=True), ("low", "high"), ("profile", "reflection")),
    "static": (lambda given: Static(given["bits"]), ("bits",), ()),
    "steps": (_steps, ("bits", "at"), ()),
    "late": (_late, ("low", "high"), ("last",)),
    "deficit": (_deficit, ("low", "high", "start", "end"), ()),
    "pieces": (_pieces, ("pieces", "at"), ()),
    "at-least": (_at_least, ("schedule", "least"), ()),
    "function": (
        lambda given: Function(given["function"], given["low"], given["high"]),
        ("function", "low", "high"),
        (),
    ),
}

#: Every name that :func:`schedule` knows.
SCHEDULE_NAMES: tuple[str, ...] = (*TEN, *_OTHERS)
#: Name -> its options.
SCHEDULE_OPTIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(TEN, ("low", "high", "cycles", "period")),
    **{name: (*needed, *optional) for name, (_, needed, optional) in _OTHERS.items()},
}

SCHEDULE_NEEDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(TEN, ("low", "high")),
    **{name: needed for name, (_, needed, _) in _OTHERS.items()},
}


# --- The ten in three groups by what they save


Group = Literal["high-saving", "balanced", "low-saving"]

#: Group -> its schedules, those first that fall before they grow.
GROUPS: dict[Group, tuple[str, ...]] = {
    "high-saving": ("RTH", "RR"),
    "balanced": ("CT", "LT", "ETV", "RTV", "CR", "LR"),
    "low-saving": ("ETH", "ER"),
}
#: Group -> the word of Wolfe & Kyrillidis.
PAPERS_WORDS: dict[Group, str] = {"high-saving": "Large", "balanced": "Medium", "low-saving": "Small"}

GROUPS_EXPLAINED = (
    "high-saving, balanced and low-saving are the papers' Large, Medium and Small, which mean the size of the saving "
    "(not of the cost, as some summaries have it)."
)


def group_of(name: str) -> Group | None:
    """The group of one of the ten; None for any other schedule."""
    return next((group for group, names in GROUPS.items() if name in names), None)
