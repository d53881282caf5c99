"""What stands where a quantizer is expected: the quantizer, the name of one, ``keep``, or several over time.

Over time a place may change its whole quantizer, scale included: ``until: 90%, use: ..., then: ...`` (a
:class:`Switch`), or ``by: cpt, choose: {3: ..., 8: ...}`` (a :class:`Choosing`), where a schedule's bits choose one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from bitplan.errors import PlanError, nearest_names
from bitplan.extensions import QUANTIZERS
from bitplan.numerics.formats import NAMED, SEVERAL_FORMATS, get_format
from bitplan.plans.schedules import Position, RunPoint, Schedule
from bitplan.plans.schedules.base import Whole
from bitplan.plans.spec import KEEP, LIKE_A_FORMAT, QuantizerSpec, check_name, is_family, is_format


@dataclass(frozen=True)
class Switch:
    """One quantizer until some moment of the run, then another."""

    until: RunPoint
    use: Use
    then: Use

    def __post_init__(self) -> None:
        object.__setattr__(self, "until", RunPoint.of(self.until))

    @property
    def cases(self) -> tuple[Use, ...]:
        return (self.use, self.then)

    def case_at(self, position: Position, schedules: Mapping[str, Schedule]) -> int:
        """Which of the cases is at work."""
        return int(position.step >= self.until.first_step(position.total))

    def cases_in(self, total: int, schedules: Mapping[str, Schedule]) -> Whole:
        """The case of every step of a run."""
        return (np.arange(total) >= self.until.first_step(total)).astype(np.int64)

    def run_points(self) -> Iterator[RunPoint]:
        yield self.until

    def to_data(self) -> dict[str, Any]:
        return {"until": self.until.to_data(), "use": use_data(self.use), "then": use_data(self.then)}


@dataclass(frozen=True)
class Choosing:
    """The quantizer that a schedule's bits choose: of those at or below the bits, the highest."""

    by: str
    #: (bits from which it is chosen, quantizer), rising.
    choose: tuple[tuple[int, Use], ...]

    def __post_init__(self) -> None:
        check_name(self.by)
        if not self.choose:
            raise PlanError("choose is empty: give quantizers by bits, such as {4: low, 8: high}.")
        object.__setattr__(self, "choose", tuple(sorted(self.choose, key=lambda case: case[0])))
        levels = [level for level, _ in self.choose]
        if len(set(levels)) != len(levels):
            raise PlanError("choose has the same bits twice.")

    @property
    def cases(self) -> tuple[Use, ...]:
        return tuple(use for _, use in self.choose)

    def case_at(self, position: Position, schedules: Mapping[str, Schedule]) -> int:
        bits = _schedule(self.by, schedules).bits(position.step, position.total)
        return max(sum(level <= bits for level, _ in self.choose) - 1, 0)

    def cases_in(self, total: int, schedules: Mapping[str, Schedule]) -> Whole:
        """The case of every step of a run."""
        levels = np.array([level for level, _ in self.choose])
        cases: Whole = np.searchsorted(levels, _schedule(self.by, schedules).table(total), side="right") - 1
        return np.maximum(cases, 0)

    def run_points(self) -> Iterator[RunPoint]:
        yield from ()

    def check(self, schedules: Mapping[str, Schedule]) -> None:
        """Raise where the schedule is unknown or asks for fewer bits than any case has."""
        schedule = _schedule(self.by, schedules)
        if schedule.lowest < self.choose[0][0]:
            raise PlanError(
                f"{self.by} goes down to {schedule.lowest} bits, and choose begins at {self.choose[0][0]}: "
                f"add a quantizer for {schedule.lowest}."
            )

    def to_data(self) -> dict[str, Any]:
        return {"by": self.by, "choose": {str(level): use_data(use) for level, use in self.choose}}


OverTime = Switch | Choosing
#: What stands where a quantizer is expected; a text is a name or :data:`KEEP`.
Use = QuantizerSpec | Switch | Choosing | str


@dataclass(frozen=True)
class Names:
    """What the names of a plan stand for."""

    quantizers: Mapping[str, Use] = field(default_factory=dict)
    schedules: Mapping[str, Schedule] = field(default_factory=dict)
    #: Name -> how many quantizers it stands for over time, and how long its longest chain of names is.
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict, compare=False, repr=False)


def use_data(use: Use) -> Any:
    """As a plan writes it."""
    return use if isinstance(use, str) else use.to_data()


def use_from_text(text: str) -> Use:
    """A text in the place of a quantizer: a format's name becomes its quantizer, every other text is a name."""
    if is_family(text):
        raise PlanError(f"{text!r} alone has no width: write {{format: {text}, bits: 8}}, or a format such as {text}8.")
    try:
        return QuantizerSpec(text)
    except PlanError:
        if is_format(text):  # it exists, but needs more than its name: uint8 needs a scale
            raise
        return text


#: Names for names, and cases over time by way of names, multiply: a short plan could stand for 2^1000 quantizers.
MOST_CASES, LONGEST_CHAIN = 1024, 64


def leaves(use: Use, names: Names) -> Iterator[QuantizerSpec | None]:
    """Every quantizer that `use` may ever stand for, in the order of the run; None for ``keep``."""
    _size(use, names, ())
    yield from _leaves(use, names, ())


def _size(use: Use, names: Names, passed: tuple[str, ...]) -> tuple[int, int]:
    """How many quantizers `use` stands for over time, and the length of its longest chain of names; both limited."""
    if isinstance(use, (Switch, Choosing)):
        sizes = [_size(case, names, passed) for case in use.cases]
        count, chain = sum(count for count, _ in sizes), max(chain for _, chain in sizes)
    elif isinstance(use, QuantizerSpec) or use == KEEP:
        return 1, 0
    elif use in names.sizes:
        count, chain = names.sizes[use]
    else:
        named = _named(use, names, passed)
        _require_short(len(passed) + 1, use)
        count, chain = _size(named, names, (*passed, use))
        chain += 1
        _require_short(chain, use)
        names.sizes[use] = count, chain
    if count > MOST_CASES:
        raise PlanError(f"this stands for more than {MOST_CASES} quantizers over time: nest fewer switches.")
    return count, chain


def _require_short(chain: int, name: str) -> None:
    if chain > LONGEST_CHAIN:
        raise PlanError(f"{name!r} is in a chain of more than {LONGEST_CHAIN} names: name a format instead.")


def _leaves(use: Use, names: Names, passed: tuple[str, ...]) -> Iterator[QuantizerSpec | None]:
    if isinstance(use, QuantizerSpec):
        yield looked_up(use, names, passed)
    elif isinstance(use, (Switch, Choosing)):
        if isinstance(use, Choosing):
            use.check(names.schedules)
        for case in use.cases:
            yield from _leaves(case, names, passed)
    elif use == KEEP:
        yield None
    else:
        yield from _leaves(_named(use, names, passed), names, (*passed, use))


def over_time(use: Use, names: Names) -> str | None:
    """The whole story in words, where the quantizer itself changes; None where it does not."""
    while isinstance(use, str) and use != KEEP:
        use = names.quantizers[use]
    return words(use, names) if isinstance(use, (Switch, Choosing)) else None


def words(use: Use, names: Names) -> str:
    """``e4m3 vector until 90%, then bf16``."""
    if isinstance(use, QuantizerSpec):
        return str(looked_up(use, names))
    if isinstance(use, Switch):
        return f"{words(use.use, names)} until {use.until}, then {words(use.then, names)}"
    if isinstance(use, Choosing):
        cases = "; ".join(f"from {level}: {words(case, names)}" for level, case in use.choose)
        return f"by {_schedule(use.by, names.schedules)} ({cases})"
    return "left alone" if use == KEEP else words(names.quantizers[use], names)


def switches(use: Use) -> Iterator[OverTime]:
    """What changes as a whole within `use` itself, outermost first; names are not followed."""
    if isinstance(use, (Switch, Choosing)):
        yield use
        for case in use.cases:
            yield from switches(case)


def written_quantizers(use: Use) -> Iterator[QuantizerSpec]:
    """The quantizers that are spelled out within `use` itself, those of promotions included; names are not followed."""
    if isinstance(use, (Switch, Choosing)):
        for case in use.cases:
            yield from written_quantizers(case)
    elif isinstance(use, QuantizerSpec):
        yield use
        if use.promote is not None:
            yield from written_quantizers(use.promote.to)


def map_quantizers(use: Use, change: Callable[[QuantizerSpec], QuantizerSpec]) -> Use:
    """`use` with every quantizer that it spells out changed."""
    if isinstance(use, Switch):
        return replace(use, use=map_quantizers(use.use, change), then=map_quantizers(use.then, change))
    if isinstance(use, Choosing):
        return replace(use, choose=tuple((level, map_quantizers(case, change)) for level, case in use.choose))
    return change(use) if isinstance(use, QuantizerSpec) else use


def with_imported_function(spec: QuantizerSpec) -> QuantizerSpec:
    """The quantizer with its function imported."""
    return spec if spec.function is None else replace(spec, function=spec.function.imported(QUANTIZERS))


def looked_up(spec: QuantizerSpec, names: Names, passed: tuple[str, ...] = ()) -> QuantizerSpec:
    """The quantizer with everything that it names: the schedule of its bits, and what it is promoted to."""
    scheduled = with_schedule(spec, names.schedules)
    return (
        scheduled
        if scheduled.promote is None
        else _promoting(scheduled, _promoted_to(scheduled.promote.to, names, passed))
    )


def _promoted_to(to: Use, names: Names, passed: tuple[str, ...]) -> QuantizerSpec | None:
    while isinstance(to, str) and to != KEEP:
        passed, to = (*passed, to), _named(to, names, passed)
    if isinstance(to, (Switch, Choosing)):
        raise PlanError("a promoted tensor keeps its format: promote to a quantizer that does not change over time.")
    return None if isinstance(to, str) else to


def _promote(spec: QuantizerSpec, target: QuantizerSpec | None) -> QuantizerSpec:
    assert spec.promote is not None
    return replace(spec, promote=spec.promote.looked_up(spec, target))


def with_schedule(spec: QuantizerSpec, schedules: Mapping[str, Schedule]) -> QuantizerSpec:
    """The quantizer with the schedule that its bits name."""
    return _following(spec, _schedule(spec.bits, schedules)) if isinstance(spec.bits, str) else spec


#: Cached: called for every operation of every module, and checking all widths is slow.
_following = lru_cache(maxsize=1024)(QuantizerSpec.follows)
_promoting = lru_cache(maxsize=1024)(_promote)


def _schedule(name: str, schedules: Mapping[str, Schedule]) -> Schedule:
    if name not in schedules:
        suggestion = f"; {nearest_names(name, schedules)}" if schedules else ": add it to the plan's schedules"
        raise PlanError(f"there is no schedule {name!r}{suggestion}.")
    return schedules[name]


def _named(name: str, names: Names, passed: Iterable[str]) -> Use:
    if name in passed:
        raise PlanError(f"the name {name!r} stands, in the end, for itself: give it a format.")
    if name not in names.quantizers:
        raise PlanError(_unknown_name(name, names.quantizers))
    return names.quantizers[name]


def _unknown_name(text: str, names: Iterable[str]) -> str:
    if re.fullmatch(LIKE_A_FORMAT, text.strip(), re.IGNORECASE):
        try:
            get_format(text)
        except ValueError as error:
            return str(error)
    if (several := SEVERAL_FORMATS.get(text.strip().lower())) is not None:
        return f"there is no quantizer or number format {text!r}, because there are several of this width: {several}."
    candidates = [*names, KEEP, *NAMED]
    return f"there is no quantizer or number format {text!r}; {nearest_names(text, candidates)}"
