"""Rule coverage: which rules of a plan had an effect on the operations that ran or were recorded."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch

from bitplan.analysis.explain import lacking_message
from bitplan.analysis.sites import sites_of
from bitplan.capture.ops import PRODUCTS
from bitplan.capture.recording import Operation
from bitplan.capture.scopes import Scope, state_of
from bitplan.errors import BitplanWarning, PlanError
from bitplan.numerics.wire_format import LOSS_PATH, op_site
from bitplan.plans import KEYS, SLOTS, Plan, Rule, compile_match, unmatched_message
from bitplan.runtime.dispatch import contains_weight


class RuleCoverage:
    """Collects operations, and says which rules had no effect on any of them."""

    def __init__(self, plan: Plan, unseen: Iterable[str] = ()) -> None:
        """`unseen`: paths of scripted modules, whose operations cannot be intercepted."""
        self.plan = plan
        self.unseen = tuple(unseen)
        #: Path and operation -> the roles that it has.
        self.roles: dict[tuple[str, str], set[str]] = {}

    def note(self, scope: Scope, op: str, index: int, given: Any) -> None:
        """An operation that runs, with the roles :func:`bitplan.list_sites` would list for it."""
        roles = {"activation"}
        if contains_weight(given):
            roles |= {"weight", "grad_weight"}
        if op in PRODUCTS and (op != "einsum" or len(given[0]) == 3):
            roles |= set(SLOTS)
        if torch.is_grad_enabled():
            roles.add("grad_activation")
        self._add(state_of(scope.module).path, op_site(op, index), scope.inside, roles)

    def note_all(self, operations: list[Operation]) -> None:
        """Operations that were recorded."""
        inside = {operation.label: operation.inside for operation in operations}
        for site in sites_of(operations):
            self._add(site.module, site.op, inside[f"{site.module}/{site.op}"], {site.role})

    def _add(self, path: str, op: str, inside: str | None, roles: set[str]) -> None:
        for name in (op, inside):
            if name is not None:
                self.roles.setdefault((path, name), set()).update(roles)

    def waits_for_loss(self, rule: Rule) -> bool:
        """Whether a rule may still match operations of a loss that is attached later."""
        matches = compile_match(rule)
        return matches.matches_module(LOSS_PATH) and not any(matches(*name) for name in self.roles)

    def is_for_unseen_modules(self, rule: Rule) -> bool:
        """Whether a rule matches a module whose operations cannot be intercepted."""
        return any(map(compile_match(rule).matches_module, self.unseen))

    def require_answers(self) -> None:
        """Raise (or, for rules with ``strict: false``, warn) where a rule had no effect."""
        for index, rule in enumerate(self.plan.all_rules):
            message = self._useless(rule, index)
            if message is not None and rule.strict:
                raise PlanError(message)
            if message is not None:
                warnings.warn(message, BitplanWarning, stacklevel=5)

    def _useless(self, rule: Rule, index: int) -> str | None:
        """What is wrong with a rule that had no effect on anything that ran; None where it had one."""
        matches = compile_match(rule)
        meant = {name: roles for name, roles in self.roles.items() if matches(*name)}
        if not meant and self.is_for_unseen_modules(rule):
            return None
        if not meant:
            operations = {op.split(".")[0] for _, op in self.roles}
            return unmatched_message(rule, sorted({path for path, _ in self.roles}), sorted(operations))
        roles = set().union(*meant.values())
        for key, _ in rule.quantizers:
            if not roles.intersection(KEYS[key]):
                return lacking_message(rule, index, key, [op for _, op in meant], roles)
        return None
