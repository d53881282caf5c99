"""Which fused operations a plan wants written out, and what its rules then say of the operations inside.

An operation such as ``lstm`` or ``scaled_dot_product_attention`` hides its products. It is opened (see
:mod:`bitplan.seeing.opened`) where a rule asks for something inside it, and only there:

* a rule gives it operand slots: then all products inside get those slots, or
* a rule for its module names an operation that exists only inside it: ``matmul`` or ``softmax`` in attention,
  ``linear`` in recurrent layers, ``log_softmax`` or ``nll_loss`` in a cross-entropy.
"""

from __future__ import annotations

from collections.abc import Callable

from bitplan.plan import SLOTS, Decision, Plan, Rule, compile_match
from bitplan.seeing.opened import OPENED
from bitplan.seeing.ops import PRODUCTS

_INSIDE = {
    "scaled_dot_product_attention": ("matmul", "softmax"),
    "cross_entropy": ("log_softmax", "nll_loss"),
}


def is_opened(plan: Plan, module: str, op: str) -> bool:
    """Whether the plan asks for something inside the fused operation `op` of the module at that path."""
    if op not in OPENED:
        return False
    return has_slots(plan.decide(module, op)) or any(_asks_inside(rule, module, op) for rule in plan.all_rules)


def inner_operations(op: str) -> tuple[str, ...]:
    """The operations inside the fused one that rules can ask for."""
    return _INSIDE.get(op, ("linear",))


def _asks_inside(rule: Rule, module: str, op: str) -> bool:
    matches = compile_match(rule)
    if rule.keep or not rule.op or matches.matches_operation(op) or not matches.matches_module(module):
        return False
    return any(matches.matches_operation(inner) or _numbered(rule, inner) for inner in inner_operations(op))


def _numbered(rule: Rule, inner: str) -> bool:
    """Whether the rule means one of several, as in ``matmul.1``."""
    return any(pattern.split(".")[0] == inner for pattern in rule.op)


def has_slots(decision: Decision) -> bool:
    return any(decision[slot].quantizer is not None for slot in SLOTS)


def decision_for(decide: Callable[[str, str], Decision], module: str, op: str, inside: str | None = None) -> Decision:
    """What a plan (its ``decide``) says of an operation, which may lie `inside` an opened one.

    `op` may carry its number, as in ``relu.1``.
    """
    if inside is not None and op.split(".")[0] in PRODUCTS:
        around = decide(module, inside)
        if has_slots(around):
            return around
    return decide(module, op)
