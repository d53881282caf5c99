"""Coverage: which rules of a plan have an effect on the operations of a model, and which products the plan rounds.

A rule without effect is a mistake that would otherwise go unnoticed. It matches no operation, names a tensor that no
operation under it has, is overridden by later rules for all of its tensors, or rounds tensors to a format that holds
all values of their dtype. It raises, or for rules with ``strict: false`` it warns.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bitplan.capture.constants import CONSTANT, MASK, STATISTIC
from bitplan.capture.decompositions import decision_for, has_slots
from bitplan.capture.ops import PRODUCTS
from bitplan.capture.recording import Operation, scripted_modules
from bitplan.capture.scopes import Scope, state_of
from bitplan.compiler.torch_private import tree_leaves
from bitplan.errors import BitplanWarning, CostError, PlanError
from bitplan.gemm.macs import Multiplication, multiplications
from bitplan.gemm.operand_quantizers import (
    Decide,
    OperandQuantizers,
    decisions_for,
    operand_quantizers,
    training_passes,
)
from bitplan.numerics.wire_format import FPROP, LOSS_PATH, OPERAND_OF_SLOT, op_site
from bitplan.plans import KEYS, PLACES, SLOTS, Decision, Plan, Rule, compile_match, unmatched_message
from bitplan.plans.frozen import KEEP as FROZEN_KEEP
from bitplan.plans.match import is_pattern
from bitplan.plans.quantizer_use import leaves
from bitplan.runtime.decisions import known_operations
from bitplan.runtime.weights import contains_weight

# --- Rules without effect


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

    def __init__(self, plan: Plan, scripted: Iterable[str] = (), formats_are_fixed: bool = True) -> None:
        """
        :param scripted: paths of scripted modules, whose operations cannot be intercepted.
        :param formats_are_fixed: formats do not change during the run and are not there for statistics, so that one
            that holds all values of a dtype is of no use.
        """
        self.plan = plan
        self.scripted = tuple(scripted)
        self.formats_are_fixed = formats_are_fixed
        self.places: dict[CoveredOp, set[str]] = {}
        #: The floating-point dtypes that each operation works with.
        self.dtypes: dict[CoveredOp, set[torch.dtype]] = {}
        self._warned: set[int] = set()

    def note_call(self, scope: Scope, op: str, index: int, kind: str, arguments: Any) -> None:
        """Add an operation that is running."""
        places = set() if kind in (MASK, STATISTIC) else {"activation"}
        if contains_weight(arguments):
            places |= {"weight", "grad_weight"}
        if op in PRODUCTS and (op != "einsum" or len(arguments[0]) == 3):
            places |= set(SLOTS)
        if torch.is_grad_enabled() and kind != STATISTIC:
            places.add("grad_activation")
        tensors = [tensor for tensor in tree_leaves(arguments) if isinstance(tensor, Tensor)]
        self._add(CoveredOp(state_of(scope.module).path, op_site(op, index), scope.inside), places, tensors)

    def note_products(self, scope: Scope, op: str, aten_products: Sequence[str]) -> None:
        """Raise where an operation that is running multiplies operands that rules round, but cannot reach."""
        if aten_products:
            raise unreachable_operands(state_of(scope.module).path, op, aten_products)

    def note_recorded(self, operations: Sequence[Operation]) -> None:
        """Add operations that were recorded."""
        for operation in operations:
            if operation.kind == CONSTANT and not self._rounds_constants(operation):
                continue
            places = {"activation"} if operation.outputs and operation.kind not in (MASK, STATISTIC) else set()
            if operation.outputs and operation.needs_grad and operation.kind != STATISTIC:
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
            tensors = [*parameters, *operation.outputs, *(operation.operands or ())]
            self._add(CoveredOp(operation.module, site, operation.inside), places, tensors)

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

    def _add(self, op: CoveredOp, places: set[str], tensors: Iterable[Tensor]) -> None:
        self.places.setdefault(op, set()).update(places)
        dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        self.dtypes.setdefault(op, set()).update(dtypes)

    def waits_for_loss(self, rule: Rule) -> bool:
        """Whether a rule may still match operations of a loss that is attached later."""
        return compile_match(rule).matches_module(LOSS_PATH) and not any(op.is_matched_by(rule) for op in self.places)

    def require_known_operations(self, rules: Iterable[Rule]) -> None:
        """Raise where all operations that a rule names are unknown to torch and nearly one that it has."""
        known = known_operations()
        for rule in rules:
            names = [re.sub(r"\.[0-9]+$", "", text) for text in rule.op]
            if not names or any(is_pattern(name) or name in known for name in names):
                continue
            last = names[0].rpartition(".")[2].lower()
            meant = [name for name in known if name == last] or [name for name in known if name.startswith(last)]
            if meant:
                raise PlanError(
                    f"{rule.where or 'a rule'}: there is no operation {rule.op[0]!r}; did you mean "
                    f"{' or '.join(meant[:3])}?"
                )

    def covers_scripted_module(self, rule: Rule) -> bool:
        """Whether a rule matches a module whose operations cannot be intercepted."""
        return any(map(compile_match(rule).matches_module, self.scripted))

    def require_modules(self, paths: Sequence[str]) -> None:
        """Raise (or warn) where a rule matches none of a model's modules, whatever operations run in them."""
        for index, rule in enumerate(self.plan.all_rules):
            if rule.frozen == FROZEN_KEEP and not rule.quantizers:
                continue  # an exception need not apply
            if not any(map(compile_match(rule).matches_module, (*paths, LOSS_PATH))):
                self._report(rule, index, unmatched_message(rule, paths, ()))

    def require_effect(self, waits: Callable[[Rule], bool] = lambda rule: False) -> None:
        """Raise (or, for rules with ``strict: false``, warn) where a rule has no effect.

        :param waits: whether a rule may still match operations that are not known yet.
        """
        decisions = {op: self._decisions(op) for op in self.places}
        for index, rule in enumerate(self.plan.all_rules):
            message = None if waits(rule) else self._why_without_effect(rule, index, decisions)
            if message is not None:
                self._report(rule, index, message)

    def products_not_run(self, expected: RuleCoverage) -> list[str]:
        """The products that the plan rounds among the expected operations and that are not among those of this one."""
        return [
            f"{op.path}/{op.op}"
            for op in expected.places
            if op not in self.places
            and op.op.split(".")[0] in PRODUCTS
            and any(
                choice.quantizer is not None for decision in self._decisions(op) for choice in decision.choices.values()
            )
        ]

    def _only_infers(self) -> bool:
        """Whether nothing has a gradient, as in inference, where the plan's other rules apply all the same."""
        keys = (key for rule in self.plan.all_rules for key, _ in rule.quantizers)
        has_gradients = any("grad_activation" in places for places in self.places.values())
        return not has_gradients and not all(_GRADIENTS.issuperset(KEYS[key]) for key in keys)

    def _report(self, rule: Rule, index: int, message: str) -> None:
        if rule.strict:
            raise PlanError(message)
        if index not in self._warned:
            self._warned.add(index)
            warnings.warn(message, BitplanWarning, stacklevel=6)

    def _decisions(self, op: CoveredOp, plan: Plan | None = None) -> list[Decision]:
        """What a plan says of an operation, and of the fused operation that it is a part of."""
        decide = (self.plan if plan is None else plan).decide
        return [decide(op.path, name) for name in (op.op, op.inside) if name is not None]

    def _why_without_effect(self, rule: Rule, index: int, decisions: dict[CoveredOp, list[Decision]]) -> str | None:
        matches = compile_match(rule)
        if rule.frozen is not None and not rule.quantizers:
            return None  # what frozen has an effect on is known without operations
        # A fused operation that is decomposed may still be named by a rule.
        names = {(op.path, op.op) for op in self.places}
        names |= {(op.path, op.inside) for op in self.places if op.inside is not None}
        if not any(matches(path, op) for path, op in names):
            if self.covers_scripted_module(rule):
                return None
            ops = {op.split(".")[0] for _, op in names}
            return unmatched_message(rule, sorted({path for path, _ in names}), sorted(ops))
        covered = {op: places for op, places in self.places.items() if op.is_matched_by(rule)}
        if not covered:
            return None  # a decomposed operation that is only named
        places = set().union(*covered.values())
        where = rule.where or f"rules[{index}]"
        ops_text = ", ".join(dict.fromkeys(op.op.split(".")[0] for op in covered))
        for key, _ in rule.quantizers:
            if not places.intersection(KEYS[key]) and not (self._only_infers() and _GRADIENTS.issuperset(KEYS[key])):
                have = ", ".join(place for place in PLACES if place in places)
                return f"{where}: nothing under the rule has {key!r}; its operations ({ops_text}) have {have}."
        # The tensors that the rule speaks of; for keep: true, all.
        spoken = set(PLACES) if rule.keep else {place for key, _ in rule.quantizers for place in KEYS[key]}
        last = {decision[place].rule for op in covered for decision in decisions[op] for place in spoken & covered[op]}
        if last and index not in last:
            later = ", ".join(f"rules[{number}]" for number in sorted(n for n in last if n is not None))
            return (
                f"{where}: the rule has no effect, because {later} override it for every operation that it covers "
                f"({ops_text}): drop it, or narrow what follows it."
            )
        if self._changes_nothing(rule, index, covered):
            dtypes = sorted({str(dtype) for op in covered for dtype in self.dtypes[op]})
            return (
                f"{where}: the rule changes nothing, because the tensors are {' and '.join(dtypes)} already: "
                f"drop it, or write keep: true to leave them alone."
            )
        return None

    def _changes_nothing(self, rule: Rule, index: int, covered: dict[CoveredOp, set[str]]) -> bool:
        """Whether all formats of the rule hold every value of the tensors' dtypes, and it replaces no other format."""
        specs = [spec for _, use in rule.quantizers for spec in leaves(use, self.plan.names) if spec is not None]
        if not specs or not self.formats_are_fixed:
            return False
        if not all(spec.holds_every_value_of(dtype) for spec in specs for op in covered for dtype in self.dtypes[op]):
            return False
        before = replace(self.plan.flattened(), rules=self.plan.all_rules[:index])
        spoken = {place for key, _ in rule.quantizers for place in KEYS[key]}
        return all(
            decision[place].quantizer is None
            for op in covered
            for decision in self._decisions(op, before)
            for place in spoken & covered[op]
        )


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


# --- Products whose operands a plan rounds


@dataclass(frozen=True)
class ProductCoverage:
    """How many of a model's products have operands that the plan rounds, at any time of the run.

    A product counts if any operand of its forward or backward products is rounded: by its slot, or as a weight,
    activation or gradient. Multiplications are those of all passes of a training step, as costs count them.
    """

    products: int = 0
    rounded_products: int = 0
    #: Multiply-accumulates of a training step.
    macs: int = 0
    rounded_macs: int = 0
    #: Sites of products whose operands the plan leaves alone, such as ``head/linear.0``.
    unrounded: tuple[str, ...] = ()
    #: Sites of operations that multiply in a way that bitplan cannot count.
    uncounted: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """The share of multiply-accumulates with a rounded operand, 0 to 1."""
        return self.rounded_macs / self.macs if self.macs else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "share": self.share}

    def __str__(self) -> str:
        percent = 100 * self.share  # 99.9 must not read as all of it, nor 0.1 as nothing
        shown = "under 1" if 0 < percent < 1 else "over 99" if 99 < percent < 100 else f"{percent:.0f}"
        text = (
            f"plan rounds operands of {self.rounded_products} of {self.products} products, {shown} % of multiplications"
        )
        if self.unrounded:
            text += f"; not of {_shortened(self.unrounded)}"
        if self.uncounted:
            text += f"; not counted: {_shortened(self.uncounted)}"
        return text


def _shortened(sites: Sequence[str], most: int = 4) -> str:
    return ", ".join(sites[:most]) + (f" and {len(sites) - most} more" if len(sites) > most else "")


def rounded_slots(operands: OperandQuantizers, product: Multiplication) -> set[str]:
    """The operands of a product, by slot, that are rounded to a coarser grid than their dtype's."""
    slots = {slot for gemm_pass in training_passes(operands.operation, product) for slot in gemm_pass}
    quantizers = {slot: operands.of(slot, product) for slot in slots}
    return {
        slot
        for slot, spec in quantizers.items()
        if spec is not None and not spec.holds_every_value_of(operands.tensor(slot, product).dtype)
    }


def counted_products(operation: Operation) -> list[Multiplication] | None:
    """The products of an operation; None where bitplan cannot count them."""
    try:
        return multiplications(operation)
    except CostError:
        return None


def product_coverage(operations: Sequence[Operation], decide: Decide) -> ProductCoverage:
    """Which of the recorded products have operands that a plan (its ``decide``) rounds."""
    products = rounded_products = macs = rounded_macs = 0
    unrounded: list[str] = []
    uncounted: list[str] = []
    for operation, operands in operand_quantizers(operations, decisions_for(operations, decide)):
        counted = counted_products(operation)
        if counted is None:
            uncounted.append(operation.label)
        for product in counted or ():
            slots = rounded_slots(operands, product)
            passes = training_passes(operation, product)
            products += 1
            macs += product.macs * len(passes)
            rounded_products += bool(slots)
            rounded_macs += product.macs * sum(not slots.isdisjoint(gemm_pass) for gemm_pass in passes)
            if not slots:
                unrounded.append(operation.label)
    sites = tuple(dict.fromkeys(unrounded))
    return ProductCoverage(products, rounded_products, macs, rounded_macs, sites, tuple(uncounted))
