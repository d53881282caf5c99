"""Where a rule can round: the four roles, the six operand slots, and the shorthands that mean several of them.

Every product ``y = x w`` of a forward pass brings two more in the backward pass, so training has three products
with two operands each:

=======  ===================  ========================
pass     computes             operands (slots)
=======  ===================  ========================
fprop    y  = x w             fprop.x   fprop.w
dgrad    dx = dy w^T          dgrad.dy  dgrad.w
wgrad    dw = x^T dy          wgrad.dy  wgrad.x
=======  ===================  ========================

All of the plan's reading, printing, overriding and its JSON Schema follow the tables below.
"""

from __future__ import annotations

from itertools import combinations
from typing import Literal

#: What a tensor of training is.
ROLES: tuple[str, ...] = ("weight", "activation", "grad_activation", "grad_weight")
#: The operands of the three products.
SLOTS: tuple[str, ...] = ("fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x")
PLACES: tuple[str, ...] = (*ROLES, *SLOTS)

#: An operand in both of its products: rounded once, and the one rounded tensor is shared.
OPERANDS: dict[str, tuple[str, str]] = {
    "x": ("fprop.x", "wgrad.x"),
    "w": ("fprop.w", "dgrad.w"),
    "dy": ("dgrad.dy", "wgrad.dy"),
}
#: Both operands of one product: two different tensors, each rounded by itself.
PASSES: dict[str, tuple[str, str]] = {
    "fprop": ("fprop.x", "fprop.w"),
    "dgrad": ("dgrad.dy", "dgrad.w"),
    "wgrad": ("wgrad.dy", "wgrad.x"),
}

#: Every key of a rule that takes a quantizer, in the order rules are printed, with the places it means.
KEYS: dict[str, tuple[str, ...]] = {
    **{role: (role,) for role in ROLES},
    **OPERANDS,
    **PASSES,
    **{slot: (slot,) for slot in SLOTS},
}

#: Keys that one rule cannot both have, because a place would get two quantizers.
CONFLICTS: tuple[tuple[str, str], ...] = tuple(
    (one, other) for one, other in combinations(KEYS, 2) if set(KEYS[one]) & set(KEYS[other])
)

#: Where a gradient that flows back through a fan-out is rounded: once where it was summed up, in the module that
#: produced the activation, or each branch by itself where it leaves the consumer.
GradAt = Literal["producer", "consumer"]
