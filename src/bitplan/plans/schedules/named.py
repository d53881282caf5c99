"""Schedules by name: the ten, and the others, from Python and from a plan's plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from bitplan.errors import ScheduleError, nearest_names
from bitplan.plans.schedules.base import RunPoint, Schedule, ScheduleSummary
from bitplan.plans.schedules.cyclic import DEFAULT_CYCLES, TEN, Cyclic, Ramp
from bitplan.plans.schedules.piecewise import Deficit, Function, LateSwitch, Piecewise, Static, StepList


def schedule(name: str | Callable[[int, int], int], **options: Any) -> Schedule:
    """The schedule of that name, or of a function (step, total) -> bits.

    =====================  ===================================================================================
    one of the ten         ``low``, ``high``, ``cycles`` (8)
    ``cyclic``             the same and ``profile`` (C, L, E, R), ``shape`` (repeated, triangular), ``reflection``
    ``growth``, ``decay``  ``low``, ``high``, ``profile`` (L): one growth or fall over the whole run
    ``static``             ``bits``
    ``steps``              ``bits``, a list, and ``at``, when each but the first begins
    ``late``               ``low``, ``high``, ``last`` (10%): how much of the run is high
    ``deficit``            ``low``, ``high``, ``start``, ``end``: low inside the window
    ``pieces``             ``pieces``, a list of schedules, and ``at``, when each but the first begins
    a function             ``low`` and ``high``, between which its bits lie
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
    if name == "function":
        raise ScheduleError("a function cannot be read from a file: give bitplan.schedule() the function in Python.")
    names = (*TEN, *_OTHERS)
    if not isinstance(name, str) or (name not in _OTHERS and name.upper() not in TEN):
        raise ScheduleError(f"there is no schedule {name!r}; {nearest_names(str(name), names)}.")
    if name in _OTHERS:
        make, needed, optional = _OTHERS[name]
        return make(_taken(name, options, needed, optional))
    profile, shape, reflection = TEN[name.upper()]
    arguments = _taken(name, options, ("low", "high"), ("cycles",))
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


def _listed(key: str, value: Any) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise ScheduleError(f"{key} is a list, not {value!r}.")
    return list(value)


_Make = Callable[[dict[str, Any]], Schedule]
#: Name -> what makes it, the options it needs, and those it may have.
_OTHERS: dict[str, tuple[_Make, tuple[str, ...], tuple[str, ...]]] = {
    "cyclic": (_cyclic, ("profile", "low", "high"), ("cycles", "shape", "reflection")),
    "growth": (_ramp(falls=False), ("low", "high"), ("profile",)),
    "decay": (_ramp(falls=True), ("low", "high"), ("profile", "reflection")),
    "static": (lambda given: Static(given["bits"]), ("bits",), ()),
    "steps": (_steps, ("bits", "at"), ()),
    "late": (_late, ("low", "high"), ("last",)),
    "deficit": (_deficit, ("low", "high", "start", "end"), ()),
    "pieces": (_pieces, ("pieces", "at"), ()),
}

#: Every name that :func:`schedule` knows.
SCHEDULE_NAMES: tuple[str, ...] = (*TEN, *_OTHERS)
#: Name -> its options.
SCHEDULE_OPTIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(TEN, ("low", "high", "cycles")),
    **{name: (*needed, *optional) for name, (_, needed, optional) in _OTHERS.items()},
}

SCHEDULE_NEEDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(TEN, ("low", "high")),
    **{name: needed for name, (_, needed, _) in _OTHERS.items()},
}


# --- The ten in three groups by what they save, and which one to take for a saving that is asked for


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


@dataclass(frozen=True)
class Recommendation:
    """A schedule for a saving, and why that one."""

    summary: ScheduleSummary
    reason: str

    @property
    def saving(self) -> float:
        return 1 - self.summary.relative_cost


def recommend(saving: float, low: int, high: int, total: int = 64_000, cycles: int = DEFAULT_CYCLES) -> Recommendation:
    """The schedule that keeps the most precision and still saves that share of the bit operations of static `high`.

    Two findings decide: accuracy goes with cost, so no more is saved than was asked for; and low precision early does
    lasting damage, so that of schedules in one group those are taken that begin at the top, and of these the one that
    spends the most steps there.

    >>> recommend(0.35, 3, 8).summary.name, recommend(0.5, 3, 8).summary.name
    ('RTV', 'RTH')
    """
    if not 0 <= saving < 1:
        raise ScheduleError(f"a saving of {saving:g} does not exist: give a share of 0 to 1, such as 0.4.")
    summaries = {
        name: schedule(name, low=low, high=high, cycles=cycles).summary(total)
        for names in GROUPS.values()
        for name in names
    }
    able = [name for name, summary in summaries.items() if 1 - summary.relative_cost >= saving]
    if not able:
        best = max(summaries.values(), key=lambda summary: 1 - summary.relative_cost)
        raise ScheduleError(
            f"no schedule of {low}-{high} bits saves {saving:.0%}: {best.name} saves most, "
            f"{1 - best.relative_cost:.0%}; lower the lowest bits, if a range test allows."
        )
    group = next(group for group in reversed(GROUPS) if any(name in able for name in GROUPS[group]))
    members = [name for name in GROUPS[group] if name in able]
    first = [name for name in members if summaries[name].first == high] or members
    chosen = max(first, key=lambda name: summaries[name].share_at_max)
    return Recommendation(summaries[chosen], _reason(saving, group, summaries[chosen], summaries, high))


def _reason(
    saving: float, group: Group, chosen: ScheduleSummary, summaries: dict[str, ScheduleSummary], high: int
) -> str:
    sentences = [
        f"{chosen.name} saves {1 - chosen.relative_cost:.0%} of the bit operations of static {high} bits",
        f"of the groups that save {saving:.0%} or more the {group} one saves least, and accuracy goes with cost",
    ]
    if chosen.first == high:
        sentences.append("it begins at the top, and low precision early does lasting damage")
    sentence = f"{sentences[0]}: {'; '.join(sentences[1:])}."
    below = [name for names in GROUPS.values() for name in names if 1 - summaries[name].relative_cost < saving]
    if below:
        near = max(below, key=lambda name: 1 - summaries[name].relative_cost)
        sentence += f" Just short of that, {near} saves {1 - summaries[near].relative_cost:.0%}."
    return sentence
