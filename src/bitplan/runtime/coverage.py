"""Rule coverage: which rules of a plan have an effect on the operations that ran or were recorded.

A rule without effect is a mistake that would otherwise go unnoticed: one that matches no operation, or that names a
tensor that no operation under it has. It raises, or for rules with ``strict: false`` it warns.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from bitplan.capture.constants import CONSTANT, MASK
from bitplan.capture.decompositions import decision_for, has_slots
from bitplan.capture.ops import PRODUCTS
from bitplan.capture.recording import Operation, scripted_modules
from bitplan.capture.scopes import Scope, state_of
from bitplan.errors import BitplanWarning, PlanError
from bitplan.numerics.wire_format import FPROP, LOSS_PATH, OPERAND_OF_SLOT, op_site
from bitplan.plans import KEYS, PLACES, SLOTS, Plan, Rule, compile_match, unmatched_message
from bitplan.runtime.dispatch import contains_weight


class CoveredOp(NamedTuple):
    """An operation as rules match it."""

    path: str
    #: With its number among its equals in the module: ``conv2d.0``.
    op: str
    #: The fused operation that it is a part of, whose rules its products follow.
    inside: str | None

    def is_matched_by(self, rule: Rule) -> bool:
        matches = compile_match(rule)
        if matches(self.path, self.op):
            return True
        is_product = self.op.split(".")[0] in PRODUCTS
        return self.inside is not None and is_product and matches(self.path, self.inside)


class RuleCoverage:
    """Collects operations with the roles and slots that they have, and finds rules without effect on any of them."""

    def __init__(self, plan: Plan, scripted: Iterable[str] = ()) -> None:
        """`scripted`: paths of scripted modules, whose operations cannot be intercepted."""
        self.plan = plan
        self.scripted = tuple(scripted)
        self.places: dict[CoveredOp, set[str]] = {}

    def note_call(self, scope: Scope, op: str, index: int, kind: str, arguments: Any) -> None:
        """Add an operation that is running."""
        places = set() if kind == MASK else {"activation"}
        if contains_weight(arguments):
            places |= {"weight", "grad_weight"}
        if op in PRODUCTS and (op != "einsum" or len(arguments[0]) == 3):
            places |= set(SLOTS)
        if torch.is_grad_enabled():
            places.add("grad_activation")
        self._add(CoveredOp(state_of(scope.module).path, op_site(op, index), scope.inside), places)

    def note_products(self, scope: Scope, op: str, aten_products: Sequence[str]) -> None:
        """Raise where an operation that is running multiplies operands that rules round, but cannot reach."""
        if aten_products:
            raise unreachable_operands(state_of(scope.module).path, op, aten_products)

    def note_recorded(self, operations: Sequence[Operation]) -> None:
        """Add operations that were recorded."""
        for operation in operations:
            if operation.kind == CONSTANT and not self._rounds_constants(operation):
                continue
            places = {"activation"} if operation.outputs and operation.kind != MASK else set()
            if operation.outputs and operation.needs_grad:
                places.add("grad_activation")
            parameters = [tensor for _, tensor in operation.parameters if tensor.is_floating_point()]
            if parameters:
                places.add("weight")
            if any(tensor.requires_grad for tensor in parameters):
                places.add("grad_weight")
            self._require_reachable(operation)
            if operation.operands is not None:
                places.update(s for s in SLOTS if operation.needs_grad or OPERAND_OF_SLOT[s].pass_ == FPROP)
            site = op_site(operation.op, operation.index)
            self._add(CoveredOp(operation.module, site, operation.inside), places)

    def _require_reachable(self, operation: Operation) -> None:
        """Raise where rules round operands of an operation that multiplies, but not by a product that has operands."""
        if not operation.aten_products or operation.operands is not None:
            return
        site = op_site(operation.op, operation.index)
        if has_slots(decision_for(self.plan.decide, operation.module, site, operation.inside)):
            raise unreachable_operands(operation.module, operation.op, operation.aten_products)

    def _rounds_constants(self, operation: Operation) -> bool:
        site = op_site(operation.op, operation.index)
        return decision_for(self.plan.decide, operation.module, site, operation.inside).constants

    def _add(self, op: CoveredOp, places: set[str]) -> None:
        self.places.setdefault(op, set()).update(places)

    def waits_for_loss(self, rule: Rule) -> bool:
        """Whether a rule may still match operations of a loss that is attached later."""
        return compile_match(rule).matches_module(LOSS_PATH) and not any(op.is_matched_by(rule) for op in self.places)

    def covers_scripted_module(self, rule: Rule) -> bool:
        """Whether a rule matches a module whose operations cannot be intercepted."""
        return any(map(compile_match(rule).matches_module, self.scripted))

    def require_effect(self, waits: Callable[[Rule], bool] = lambda rule: False) -> None:
        """Raise (or, for rules with ``strict: false``, warn) where a rule has no effect.

        :param waits: whether a rule may still match operations that are not known yet.
        """
        for index, rule in enumerate(self.plan.all_rules):
            message = None if waits(rule) else self._why_without_effect(rule, index)
            if message is not None and rule.strict:
                raise PlanError(message)
            if message is not None:
                warnings.warn(message, BitplanWarning, stacklevel=5)

    def _only_infers(self) -> bool:
        """Whether nothing has a gradient, as in inference, where the plan's other rules apply all the same."""
        keys = (key for rule in self.plan.all_rules for key, _ in rule.quantizers)
        has_gradients = any("grad_activation" in places for places in self.places.values())
        return not has_gradients and not all(_GRADIENTS.issuperset(KEYS[key]) for key in keys)

    def _why_without_effect(self, rule: Rule, index: int) -> str | None:
        matches = compile_match(rule)
        # A fused operation that is decomposed may still be named by a rule.
        names = {(op.path, op.op) for op in self.places}
        names |= {(op.path, op.inside) for op in self.places if op.inside is not None}
        if not any(matches(path, op) for path, op in names):
            if self.covers_scripted_module(rule):
                return None
            ops = {op.split(".")[0] for _, op in names}
            return unmatched_message(rule, sorted({path for path, _ in names}), sorted(ops))
        covered = {op: places for op, places in self.places.items() if op.is_matched_by(rule)}
        places = set().union(*covered.values())
        for key, _ in rule.quantizers:
            if not places.intersection(KEYS[key]) and not (self._only_infers() and _GRADIENTS.issuperset(KEYS[key])):
                ops_text = ", ".join(dict.fromkeys(op.op.split(".")[0] for op in covered))
                have = ", ".join(place for place in PLACES if place in places)
                where = rule.where or f"rules[{index}]"
                return f"{where}: nothing under the rule has {key!r}; its operations ({ops_text}) have {have}."
        return None


def unreachable_operands(path: str, op: str, aten_products: Iterable[str]) -> PlanError:
    """The error for an operation whose products no rule reaches."""
    names = ", ".join(dict.fromkeys(aten_products))
    return PlanError(
        f"{path or 'the model'} multiplies in {op} ({names}), where no operand can be rounded, and a rule rounds its "
        f"operands: write it with linear, matmul, convolutions or einsum, or add "
        f"{{match: {path!r}, op: {op}, keep: true}} as the last rule."
    )


#: Places that only a model that is trained has.
_GRADIENTS = frozenset(
    ("grad_activation", "grad_weight", *(slot for slot in SLOTS if OPERAND_OF_SLOT[slot].pass_ != FPROP))
)


def require_interceptable(plan: Plan, model: nn.Module) -> None:
    """Raise where a rule covers a scripted module, inside which nothing can be rounded."""
    for path in scripted_modules(model):
        covering = [rule for rule in plan.all_rules if compile_match(rule).matches_module(path)]
        if covering and not covering[-1].keep:
            raise PlanError(
                f"{path or 'the model'} is scripted, so its operations cannot be intercepted, and the rule that "
                f"matches {', '.join(covering[-1].match)} covers it: use the plan before scripting, or add "
                f"{{match: {path!r}, keep: true}} as the last rule."
            )
