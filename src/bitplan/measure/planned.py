"""The formats that a plan gives a product, as one more candidate."""

from __future__ import annotations

from dataclasses import dataclass

from bitplan.plan import Plan
from bitplan.plan.places import PASSES
from bitplan.plan.spec import QuantizerSpec
from bitplan.seeing.openings import decision_for

#: How rows call it.
PLANNED = "plan"
#: What changes nothing.
_AS_IT_IS = QuantizerSpec("fp32")
#: The role whose quantizer an operand without one of its own has when it arrives.
_ROLES = {"w": "weight", "dy": "grad_activation"}


@dataclass(frozen=True)
class Planned:
    """What a plan decides for the slots of one product; a weight or a gradient that is rounded before counts, too."""

    #: Slot -> quantizer, of those that have one.
    slots: tuple[tuple[str, QuantizerSpec], ...]

    @classmethod
    def of(cls, plan: Plan, module: str, op: str, inside: str | None) -> Planned | None:
        """None where the plan leaves the product alone. `op` carries its number."""
        decision = decision_for(plan.decide, module, op, inside)
        found = []
        for slot in (slot for pair in PASSES.values() for slot in pair):
            spec = decision[slot].quantizer
            role = _ROLES.get(slot.split(".")[1])
            if spec is None and role is not None:
                spec = decision[role].quantizer
            if spec is not None:
                found.append((slot, spec))
        return cls(tuple(found)) if found else None

    def specs(self, pass_: str) -> tuple[QuantizerSpec, QuantizerSpec]:
        known = dict(self.slots)
        left, right = PASSES[pass_]
        return known.get(left, _AS_IT_IS), known.get(right, _AS_IT_IS)

    def is_of_its_own(self, pass_: str) -> bool:
        return any(slot in PASSES[pass_] for slot, _ in self.slots)

    def __str__(self) -> str:
        return PLANNED
