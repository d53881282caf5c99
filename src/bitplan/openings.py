"""Which fused operations a plan wants written out, and what its rules then say of the operations inside.

An operation such as ``lstm`` or ``scaled_dot_product_attention`` hides its products. It is opened (see
:mod:`bitplan.opened`) where a rule asks for something inside it:

* a rule gives it operand slots: then all products inside get those slots, or
* a rule for its module names an operation that exists only inside, such as ``matmul``.
"""

from __future__ import annotations

from bitplan.opened import INNER_OPS, OPENED
from bitplan.ops import PRODUCTS
from bitplan.plan import SLOTS, Decision, Plan, compile_match


def is_opened(plan: Plan, module: str, op: str) -> bool:
    """Whether the plan asks for something inside the fused operation `op` of the module at that path."""
    if op not in OPENED:
        return False
    return has_slots(plan.decide(module, op)) or any(
        not rule.keep and any(name.split(".")[0] in INNER_OPS for name in rule.op) and matches.matches_module(module)
        for rule, matches in ((rule, compile_match(rule)) for rule in plan.all_rules)
    )


def has_slots(decision: Decision) -> bool:
    return any(decision[slot].quantizer is not None for slot in SLOTS)


def decision_for(plan: Plan, module: str, op: str, inside: str | None = None) -> Decision:
    """What the plan says of an operation, which may lie `inside` an opened one.

    `op` may carry its number, as in ``relu.1``.
    """
    if inside is not None and op.split(".")[0] in PRODUCTS:
        around = plan.decide(module, inside)
        if has_slots(around):
            return around
    return plan.decide(module, op)
