"""What a pair of quantizers costs: in bit operations, in memory, or in time on today's matrix units.

===========  =======================================================================================================
bitops       the product of both operands' bits, as :mod:`bitplan.cost` counts
memory       bits of both operands' values; a scale per vector makes a copy of its own for each of an operand's two
             products, and counts twice
time         a product of two integers or of two floats of 8 bits is one; a mixed pair, or more bits, runs in 16 bits
             and is two. 4 bits are no faster than 8 where no unit multiplies them
===========  =======================================================================================================

Between pairs of one price, scales per tensor go before scales per vector, rounding to nearest before stochastic
rounding, integers before floats ("ties go to INT8"), and then the smaller error.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

from bitplan.cost import stored_bits
from bitplan.errors import PlanError, nearest_names
from bitplan.numbers.formats import IntFormat
from bitplan.plan.spec import QuantizerSpec
from bitplan.planners.advise.slots import Option, Slot

CostKind = Literal["bitops", "memory", "time"]

#: The least bits that matrix units multiply faster than 16.
_FAST_BITS = 8


def checked_cost(kind: str) -> CostKind:
    for known in get_args(CostKind):
        if kind == known:
            return known  # type: ignore[no-any-return]
    raise PlanError(f"there is no cost {kind!r}; {nearest_names(kind, get_args(CostKind))}")


def price(kind: CostKind, slots: tuple[Slot, Slot], pair: tuple[Option, Option]) -> tuple[float, ...]:
    """What is compared, the first number first."""
    specs = [option.spec for option in pair]
    level = math.hypot(*(option.level for option in pair))
    return (
        _main_price(kind, slots, specs),
        float(sum(spec.scale == "vector" for spec in specs)),
        float(sum(spec.rounding == "stochastic" for spec in specs)),
        float(sum(not isinstance(spec.target, IntFormat) for spec in specs)),
        level,
    )


def _main_price(kind: CostKind, slots: tuple[Slot, Slot], specs: list[QuantizerSpec]) -> float:
    if kind == "bitops":
        return float(specs[0].target.bits * specs[1].target.bits)
    if kind == "memory":
        copies = [2 if spec.scale == "vector" else 1 for spec in specs]
        return sum(
            slot.elements * stored_bits(spec) * count for slot, spec, count in zip(slots, specs, copies, strict=True)
        )
    is_mixed = isinstance(specs[0].target, IntFormat) != isinstance(specs[1].target, IntFormat)
    return 2.0 if is_mixed or any(spec.target.bits > _FAST_BITS for spec in specs) else 1.0
