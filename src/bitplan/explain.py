"""What every tensor of a model gets under a plan, and which rule said so.

A rule that does nothing is a mistake that would otherwise go unnoticed, so :func:`explain` also looks for these: rules
that match no operation, and rules that name a role or slot that nothing under them has.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from bitplan.errors import BitplanWarning, PlanError
from bitplan.plan import KEYS, PLACES, Choice, Plan, Rule, compile_match, unmatched_message
from bitplan.plan.find import find_plan
from bitplan.plan.spec import QuantizerSpec
from bitplan.seeing.kept_forms import cancelled_savings
from bitplan.seeing.openings import decision_for, is_opened
from bitplan.seeing.ops import PRODUCTS
from bitplan.seeing.recording import Operation, record
from bitplan.seeing.unseen import unseen_modules
from bitplan.sites import Site, sites_of


@dataclass(frozen=True)
class Explanation:
    """One site, and what the plan does with it."""

    site: Site
    #: None: the tensor is left alone. Where the whole quantizer changes over time: the first that is not None.
    quantizer: QuantizerSpec | None
    #: The index in ``plan.all_rules`` of the rule that spoke last, also where it said to keep; None where none spoke.
    rule: int | None
    #: File, line and field of that rule.
    where: str = ""
    #: Where the whole quantizer changes over time: the whole story in words.
    over_time: str | None = None
    #: Why packed execution keeps more bits of the tensor than the plan seems to say; None where it does not.
    warning: str | None = None

    @property
    def words(self) -> str | None:
        """What the tensor gets, in one line; None where it is left alone."""
        return self.over_time or (None if self.quantizer is None else str(self.quantizer))

    def __str__(self) -> str:
        by = "no rule" if self.rule is None else self.where or f"rules[{self.rule}]"
        return f"{self.site.name}: {self.words or 'left alone'} ({by}){f'; {self.warning}' if self.warning else ''}"


def explain(
    model: nn.Module, plan: Plan | str, batch: Any, loss: Callable[..., Tensor] | None = None
) -> list[Explanation]:
    """What each site of one training step gets; `batch` and `loss` as :func:`bitplan.sites` takes them.

    Fused operations that the plan wants opened are listed by what is inside them.
    """
    found = find_plan(plan)
    require_seen(found, model)
    operations = record(model, batch, loss, opens=partial(is_opened, found))
    unseen = unseen_modules(model)
    require_effect(found, operations, waiting=lambda rule: any(map(compile_match(rule).matches_module, unseen)))
    return explained(found, operations)


def explained(plan: Plan, operations: Sequence[Operation]) -> list[Explanation]:
    """:func:`explain` for operations that were recorded already."""
    inside = {operation.label: operation.inside for operation in operations}
    warned = cancelled_savings(plan, operations)
    rows = []
    for site in sites_of(list(operations)):
        label = f"{site.module}/{site.op}"
        row = _explained(plan, site, inside[label])
        rows.append(replace(row, warning=warned.get(label)) if site.role == "activation" else row)
    return rows


def _explained(plan: Plan, site: Site, inside: str | None) -> Explanation:
    choice: Choice = decision_for(plan.decide, site.module, site.op, inside)[site.role]
    where = "" if choice.rule is None else plan.all_rules[choice.rule].where
    return Explanation(site, choice.quantizer, choice.rule, where, choice.over_time)


def require_seen(plan: Plan, model: nn.Module) -> None:
    """Raise where a rule covers a scripted module, inside which nothing can be rounded."""
    for path in unseen_modules(model):
        speaking = [rule for rule in plan.all_rules if compile_match(rule).matches_module(path)]
        if speaking and not speaking[-1].keep:
            raise PlanError(
                f"{path or 'the model'} is scripted, so that its operations cannot be seen, and the rule that matches "
                f"{', '.join(speaking[-1].match)} covers it: use the plan before scripting, or add "
                f"{{match: {path!r}, keep: true}} as the last rule."
            )


def require_effect(
    plan: Plan, operations: Sequence[Operation], waiting: Callable[[Rule], bool] = lambda rule: False
) -> None:
    """Raise (or, for rules with ``strict: false``, warn) where a rule says something about nothing.

    :param waiting: rules that may yet find their place.
    """
    sites = sites_of(list(operations))
    inside = {operation.label: operation.inside for operation in operations}
    for index, rule in enumerate(plan.all_rules):
        message = _useless(rule, index, operations, sites, inside)
        if message is None or waiting(rule):
            continue
        if rule.strict:
            raise PlanError(message)
        warnings.warn(message, BitplanWarning, stacklevel=3)


def _useless(
    rule: Rule, index: int, operations: Sequence[Operation], sites: Sequence[Site], inside: dict[str, str | None]
) -> str | None:
    """What is wrong with a rule that has no effect; None where it has one."""
    matches = compile_match(rule)
    # A fused operation that was opened is still there to be named.
    seen = {(operation.module, f"{operation.op}.{operation.index}") for operation in operations}
    seen |= {(operation.module, operation.inside) for operation in operations if operation.inside is not None}
    if not any(matches(module, op) for module, op in seen):
        ops = {op.split(".")[0] for _, op in seen}
        return unmatched_message(rule, sorted({module for module, _ in seen}), sorted(ops))

    def is_meant(site: Site) -> bool:
        around = inside[f"{site.module}/{site.op}"]
        passed_on = around is not None and site.op.split(".")[0] in PRODUCTS and matches(site.module, around)
        return passed_on or matches(site.module, site.op)

    meant = [site for site in sites if is_meant(site)]
    roles = {site.role for site in meant}
    # A parameter is listed with the operation that uses it first, but others that use it round it too.
    for operation in operations:
        if operation.parameters and matches(operation.module, f"{operation.op}.{operation.index}"):
            is_trained = any(tensor.requires_grad for _, tensor in operation.parameters)
            roles |= {"weight", "grad_weight"} if is_trained else {"weight"}
    for key, _ in rule.quantizers:
        if not roles.intersection(KEYS[key]):
            return lacking_message(rule, index, key, [site.op for site in meant], roles)
    return None


def lacking_message(rule: Rule, index: int, key: str, operations: Sequence[str], roles: set[str]) -> str:
    """Why a rule's quantizer has no effect: nothing that it matches has such a tensor."""
    names = ", ".join(dict.fromkeys(op.split(".")[0] for op in operations))
    have = ", ".join(place for place in PLACES if place in roles)
    place = rule.where or f"rules[{index}]"
    return f"{place}: nothing under the rule has {key!r}; its operations ({names}) have {have}."
