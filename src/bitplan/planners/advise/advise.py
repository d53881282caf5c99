"""Advice: a plan with reasons, from what was measured (after Rasquinha & Tabak 2023, arXiv 2408.02897).

For each pass of each product: the cheapest pair of formats whose backward error stays under tau. Errors are compared
after multiplying by the root of the sums' length, so that short and long sums are held to one level. tau is, unless
given, the level of a configuration that is known to train: E4M3 everywhere, with a scale per tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from bitplan.errors import PlanError
from bitplan.measure import DEFAULT_CANDIDATES, Candidate, Measurement, measure
from bitplan.plan import Plan
from bitplan.plan.find import find_plan
from bitplan.planners.advise.choice import SlotAdvice, chosen, place_words, summary_counts
from bitplan.planners.advise.prices import CostKind, checked_cost
from bitplan.planners.advise.rules import plan_of
from bitplan.planners.advise.slots import REFERENCE, default_tau, pairs_of
from bitplan.schedules import Schedule

#: What the advice is blind to, in words.
UNSEEN = (
    "bias against variance: stochastic rounding looks about 1.4 times worse than nearest, and may train better",
    "propagation: errors are those of single products, not of what the layers behind them make of them",
    "the optimizer: Adam divides by small numbers, and small errors of small gradients may count",
    "everything that is no product: norms, softmax, residual sums, the weights' update",
)


@dataclass(frozen=True)
class Advice:
    """A plan, and why it is so."""

    plan: Plan
    slots: tuple[SlotAdvice, ...]
    #: The level (error times the root of the sums' length) that every product stays under.
    tau: float
    #: Where tau comes from, in words.
    tau_from: str
    cost: CostKind
    measurement: Measurement

    @property
    def reasons(self) -> list[str]:
        return [str(each) for each in self.slots]

    @property
    def counts(self) -> dict[str, int]:
        """How many slots get each quantizer."""
        return summary_counts(self.slots)

    def to_dict(self) -> dict[str, Any]:
        return {
            "tau": self.tau,
            "tau_from": self.tau_from,
            "cost": self.cost,
            "slots": [
                {
                    "product": each.product,
                    "slot": each.slot,
                    "quantizer": str(each.spec),
                    "level": each.level,
                    "why": each.why,
                }
                for each in self.slots
            ],
            "counts": self.counts,
            "skipped": dict(self.measurement.skipped),
            "unseen": list(UNSEEN),
            "plan": self.plan.to_dict(),
        }


def advise(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Callable[..., Tensor] | None = None,
    candidates: Iterable[str | Candidate] | None = None,
    *,
    tau: float | None = None,
    cost: str = "bitops",
    base: Plan | str | None = None,
    schedule: Schedule | None = None,
    **options: Any,
) -> Advice:
    """Measure `model` as it is, and advise on a format for each operand of each product.

    :param batches, loss, candidates: as :func:`bitplan.measure` takes them, whose other options may follow.
    :param tau, cost, base, schedule: as :func:`advise_on` takes them.
    """
    wanted = with_reference(candidates)
    found = measure(model, batches, loss, wanted, **options)
    return advise_on(found, tau=tau, cost=cost, base=base, schedule=schedule)


def with_reference(candidates: Iterable[str | Candidate] | None) -> tuple[Candidate, ...]:
    """The candidates, and the one that tau follows from."""
    asked = DEFAULT_CANDIDATES if candidates is None else tuple(map(Candidate.of, candidates))
    return tuple(dict.fromkeys((*asked, REFERENCE)))


def advise_on(
    measurement: Measurement,
    *,
    tau: float | None = None,
    cost: str = "bitops",
    base: Plan | str | None = None,
    schedule: Schedule | None = None,
) -> Advice:
    """The advice that follows from a measurement, of one stage of training or of several.

    :param tau: the most that a product's median backward error, times the root of its sums' length, may be.
    :param cost: what is to be small: ``bitops``, ``memory`` or ``time``.
    :param base: a plan that the advice is added to, such as an assignment under a budget of memory: its rules stay,
        operands that it keeps in as few bits are left to it, and fused operations that it does not open stay closed,
        because opened ones keep more tensors.
    :param schedule: what the bits of integer slots follow, such as ``bitplan.schedule("CR", low=4, high=8)``.
    """
    kind = checked_cost(cost)
    if not measurement.rows:
        raise PlanError("nothing was measured, so that there is nothing to advise on.")
    if tau is not None and not tau > 0:
        raise PlanError(f"tau is {tau:g}; it must be above 0.")
    limit = default_tau(measurement) if tau is None else tau
    words = f"the level of {REFERENCE} in nine of ten products" if tau is None else "as given"
    slots = tuple(each for pair in pairs_of(measurement) for each in chosen(pair, limit, kind))
    made_by = {
        "planner": "advise",
        **({} if measurement.target is None else {"target": measurement.target}),
        **({} if measurement.command is None else {"measured_by": measurement.command}),
        "tau": round(limit, 6),
        "tau_from": words,
        "cost": kind,
        "unseen": list(UNSEEN),
        "why": _by_place(slots),
    }
    found = None if base is None else find_plan(base)
    return Advice(plan_of(slots, made_by, found, schedule), slots, limit, words, kind, measurement)


def _by_place(slots: tuple[SlotAdvice, ...]) -> dict[str, dict[str, str]]:
    """Reasons as a plan's file holds them: product, slot, sentence."""
    found: dict[str, dict[str, str]] = {}
    for each in slots:
        found.setdefault(place_words(each.product), {})[each.slot] = f"{each.spec}: {each.why}"
    return found
