"""Formats, schedules and budgets in one plan: how advice follows a schedule and joins a base plan.

Each decision keeps what the others need. A slot's bits follow the schedule, but never below those that its error
allows. A base plan that was made for a memory budget keeps that budget. Where both cannot hold, one sentence says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bitplan.analysis.measure import Candidate
from bitplan.errors import BitplanWarning, PlanError
from bitplan.files import byte_text
from bitplan.numerics.formats import IntFormat, get_format
from bitplan.planners.assign.budget import Step
from bitplan.plans import Plan, QuantizerSpec
from bitplan.plans.quantizer_use import leaves
from bitplan.plans.schedules import AtLeast, Schedule

#: The name of a schedule in the plan; further ones have a number behind it.
SCHEDULE = "advised"

#: Entries of a base's ``made_by`` that describe its budget.
_BUDGET = ("budget", "budget_bytes", "peak_predicted")
#: Long texts of a base's ``made_by`` that say nothing of the plan that is made from it.
_LONG = ("why", "unseen", "below_need")


# --- Schedules


def widths_to_measure(candidates: Iterable[Candidate], schedule: Schedule | None) -> tuple[Candidate, ...]:
    """The candidates, with those of integers also in the other widths of the schedule.

    >>> from bitplan.plans.schedules import schedule
    >>> [str(one) for one in widths_to_measure([Candidate.of("int8 tensor")], schedule("CR", low=6, high=8))]
    ['int8 tensor', 'int6 tensor', 'int7 tensor']
    """
    measured = list(candidates)
    widths = () if schedule is None else range(max(schedule.lowest, 2), schedule.highest + 1)
    for candidate in list(measured):
        if all(isinstance(get_format(name), IntFormat) for name in (candidate.left, candidate.right)):
            measured += [replace(candidate, left=f"int{bits}", right=f"int{bits}") for bits in widths]
    return tuple(dict.fromkeys(measured))


@dataclass(frozen=True)
class SlotNeed:
    """The fewest integer bits of an advised slot."""

    where: str
    bits: int


class ScheduledSlots:
    """The quantizers of advised slots under a schedule, and the schedules that the plan needs for them."""

    def __init__(self, schedule: Schedule, needs: Sequence[SlotNeed], taken: Iterable[str] = ()) -> None:
        """
        :param needs: of all slots with integers.
        :param taken: names that schedules of the base plan have.
        """
        self.schedule = schedule
        names = set(taken)
        numbers = (SCHEDULE, *(f"{SCHEDULE}{number}" for number in range(2, len(names) + 3)))
        self.name = next(name for name in numbers if name not in names)
        #: The schedules that quantizers follow, by name.
        self.used: dict[str, Schedule] = {}
        self._require_feasible(needs)

    def _require_feasible(self, needs: Sequence[SlotNeed]) -> None:
        highest = self.schedule.highest
        above = [need for need in needs if need.bits > highest]
        if above:
            first = max(above, key=lambda need: need.bits)
            raise PlanError(
                f"{len(above)} of {len(needs)} integer slots need more bits than {self.schedule} ever has "
                f"({first.where} needs {first.bits}): raise the schedule's highest bits to {first.bits}, or tau."
            )
        if not needs:
            raise PlanError(
                f"{self.schedule} would move nothing: no slot is an integer; drop the schedule, or raise tau."
            )
        if all(need.bits == highest for need in needs) and self.schedule.lowest < highest:
            raise PlanError(
                f"{self.schedule} would move nothing: all {len(needs)} integer slots need its {highest} bits; raise "
                f"the schedule's highest bits, or tau, or drop the schedule."
            )

    def follow(self, spec: QuantizerSpec, need: int | None) -> QuantizerSpec:
        """The quantizer with the bits of the schedule, and at least those that the slot needs."""
        if not isinstance(spec.target, IntFormat):
            return spec
        least = spec.target.bits if need is None else need
        if least >= self.schedule.highest:
            return QuantizerSpec(f"int{least}", scale=spec.scale, rounding=spec.rounding)
        is_below = least > self.schedule.lowest
        name = f"{self.name}-least{least}" if is_below else self.name
        self.used[name] = AtLeast(least, self.schedule) if is_below else self.schedule
        return QuantizerSpec("int", bits=name, scale=spec.scale, rounding=spec.rounding)


# --- Base plans


def fewest_bits(base: Plan, module: str, op: str, role: str) -> float | None:
    """The fewest bits that the base ever gives to the tensor; None if it does not round it."""
    choice = base.decide(module, op)[role]
    if choice.quantizer is None or choice.rule is None:
        return None
    uses = [use for key, use in base.all_rules[choice.rule].quantizers if key == role]
    specs = [spec for use in uses for spec in leaves(use, base.names) if spec is not None]
    return min((spec.target.bits if spec.moved_by is None else spec.moved_by.lowest for spec in specs), default=None)


def origin_of(base: Plan) -> dict[str, Any]:
    """Entries of ``made_by`` that keep what the base was made for: its own, and the budget in plain sight."""
    made_by = base.made_by
    if not isinstance(made_by, Mapping):
        return {"base": made_by or base.name or "a plan without a name"}
    own = {key: value for key, value in made_by.items() if key not in _LONG}
    return {"base": own, **{key: made_by[key] for key in _BUDGET if key in made_by}}


def has_budget(plan: Plan) -> bool:
    """Whether the plan was made for a memory budget."""
    return isinstance(plan.made_by, Mapping) and {"budget_bytes", "peak_predicted"} <= set(plan.made_by)


def keep_budget(plan: Plan, base: Plan, step: Step) -> Plan:
    """`plan`, which extends `base`, with its predicted peak in ``made_by``; raises if the base's budget is exceeded.

    The peak is the one that was predicted for the base, and what the plan adds to it in the same step: the base may
    have been made for another optimizer. A base without a budget returns the plan as it is.
    """
    made_by = base.made_by
    if not isinstance(made_by, Mapping) or not has_budget(base):
        return plan
    step = replace(step, compile=bool(made_by.get("compile", step.compile)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BitplanWarning)  # the advice overrides rules of the base, which is no mistake
        added = step.estimate_peak(plan.widest()) - step.estimate_peak(base.widest())
    peak, limit = int(made_by["peak_predicted"]) + added, int(made_by["budget_bytes"])
    if peak > limit:
        raise PlanError(
            f"the advice does not fit into the budget of its base: the peak would be {byte_text(peak)}, and the budget "
            f"is {byte_text(limit)}; make the base for {byte_text(max(limit - added, 0))}, or advise with cost memory."
        )
    own = plan.made_by if isinstance(plan.made_by, Mapping) else {}
    return replace(plan, made_by={**own, "peak_predicted": peak})
