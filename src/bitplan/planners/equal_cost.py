"""A static plan that costs what a plan over time costs: the control that asks whether *moving* precision helps.

A static width has steps of whole bits, and costs between two of them are met by giving some layers one bit more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bitplan.cost import step_cost
from bitplan.errors import PlanError
from bitplan.plan import Plan, QuantizerSpec, Rule
from bitplan.plan.uses import Use
from bitplan.planners.cpt import Widths, exempt, kind_of, plan_of
from bitplan.schedules import Static
from bitplan.seeing.macs import multiplications
from bitplan.seeing.recording import Operation

#: The schedule, which stays, of the layers with one bit more.
RAISED = "raised"


def mean_bit_operations(operations: Sequence[Operation], plan: Plan, steps: int) -> float:
    """What a step of a run of `steps` costs on average, in bit operations."""
    periods = plan.periods(steps).items()
    total = sum(step_cost(operations, plan.in_phase(phase).decide).bit_operations * count for phase, count in periods)
    return total / steps


def equal_cost_plan(
    operations: Sequence[Operation],
    bit_operations: float,
    backward: int,
    *,
    name: str | None = None,
    quantized_aggregation: bool = False,
) -> Plan:
    """The papers' quantiser with constant widths, at most two that are neighbours, at the price given.

    :param bit_operations: of a step.
    :param backward: bits of gradients.
    :param quantized_aggregation: of graph networks, round what is summed over neighbours, too, at the lower width.
    """

    def static(bits: int) -> Plan:
        widths = Widths(Static(bits), Static(bits), Static(backward))
        return plan_of(operations, widths, name=name, quantized_aggregation=quantized_aggregation)

    def price(plan: Plan) -> int:
        return step_cost(operations, plan.decide).bit_operations

    width = max((bits for bits in range(2, backward + 1) if price(static(bits)) <= bit_operations), default=None)
    if width is None:
        raise PlanError("no static width is as cheap as that: raise the schedule's lowest bits.")
    plan = static(width)
    if width == backward:
        return plan
    raised: list[str] = []
    budget = bit_operations - price(plan)
    macs = _macs_by_module(operations, plan)
    for module in sorted(macs, key=lambda module: macs[module], reverse=True):
        # q^2 + 2 q q_backward, from one width to the next.
        more = macs[module] * (2 * width + 1 + 2 * backward)
        if more <= budget:
            raised.append(module)
            budget -= more
    if not raised:
        return plan
    first = plan.rules[0]
    places = tuple(module for module in macs if module in raised)
    higher = tuple((place, _raised(use) if place in ("w", "x") else use) for place, use in first.quantizers)
    schedules = {**plan.schedules, RAISED: Static(width + 1)}
    return replace(plan, rules=(first, Rule(places, first.op, higher), *plan.rules[1:]), schedules=schedules)


def _raised(use: Use) -> Use:
    assert isinstance(use, QuantizerSpec)
    return replace(use, bits=RAISED)


def _macs_by_module(operations: Sequence[Operation], plan: Plan) -> dict[str, int]:
    """MACs of the forward products that the plan's first rule quantises, which are not left alone."""
    kept = exempt(operations, kind_of(operations))
    found: dict[str, int] = {}
    for operation in operations:
        if operation.op in plan.rules[0].op and operation.module and operation.module not in kept:
            macs = sum(product.macs for product in multiplications(operation))
            found[operation.module] = found.get(operation.module, 0) + macs
    return found
