"""Selectors: rules that choose tensors by what they are in a model's graph, not by what a layer is called.

:class:`OperationGraph` knows, of recorded operations, which results are products, halves of a gate, residual sums and
so on (:data:`bitplan.plans.match.SELECTORS` lists the names). :func:`expand_selectors` replaces every rule that has
``select`` by plain rules with exact module paths and numbered operations, so that nothing else knows of selectors.

A selector sees the forward pass of the model, without the loss that a training loop computes outside of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn

from bitplan.capture.constants import CONSTANT, MASK
from bitplan.capture.decompositions import DECOMPOSITIONS, is_decomposed
from bitplan.capture.ops import (
    FUSED,
    LINEAR_POINTWISE,
    NORMS,
    POINTWISE,
    SAVES_FACTORS,
    SAVES_INPUT,
    SAVES_OUTPUT,
)
from bitplan.capture.recording import FakeInputs, Operation, Part, Read, record, split_batch
from bitplan.errors import PlanError
from bitplan.numerics.wire_format import op_site
from bitplan.plans import KEYS, PLACES, SLOTS, Plan, Rule, compile_match
from bitplan.plans.match import NOT, exact_pattern
from bitplan.plans.quantizer_use import leaves

# --- What the tensors of a model are


#: Operations that make one number of many.
_REDUCTIONS = frozenset("mean sum var std var_mean std_mean norm linalg_vector_norm".split())  # noqa: SIM905
#: Of these, the ones that square their input themselves.
_SQUARING_REDUCTIONS = _REDUCTIONS - {"mean", "sum"}


_SOFTMAXES = frozenset({"softmax", "log_softmax"})


class OperationGraph:
    """The operations of one forward pass, and what may be said of the tensors that they return."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = operations
        #: Number of an operation -> numbers of those that read its result, through views and casts, too.
        self.readers: list[list[int]] = [[] for _ in operations]
        for number, operation in enumerate(operations):
            for source in dict.fromkeys(read.source for read in operation.reads if read.source >= 0):
                self.readers[source].append(number)

    def numbers(self, selector: str) -> set[int]:
        """The operations whose results the selector names."""
        return _PREDICATES[selector](self)

    # --- products ---

    @cached_property
    def products(self) -> set[int]:
        return {number for number, operation in enumerate(self.operations) if operation.operands is not None}

    @cached_property
    def made_of_weights(self) -> set[int]:
        """Operations that compute a weight from parameters: no activation goes into them."""
        numbers: set[int] = set()
        for number, operation in enumerate(self.operations):
            sources = [read.source for read in operation.reads]
            is_fixed = all(n in numbers or (n >= 0 and self.operations[n].kind == CONSTANT) for n in sources)
            if is_fixed and (operation.parameters or any(n in numbers for n in sources)):
                numbers.add(number)
        return numbers

    @cached_property
    def weight_products(self) -> set[int]:
        return {number for number in self.products - self.made_of_weights if self._has_weight(self.operations[number])}

    def _has_weight(self, operation: Operation) -> bool:
        parameters = {id(tensor) for _, tensor in operation.parameters}
        return any(
            id(tensor) in parameters or operation.origins.get(id(tensor)) in self.made_of_weights
            for tensor in operation.operands or ()
        )

    @cached_property
    def first_products(self) -> set[int]:
        below: set[int] = set()
        for number, operation in enumerate(self.operations):
            if any(read.source in below or read.source in self.weight_products for read in operation.reads):
                below.add(number)
        return self.weight_products - below

    @cached_property
    def last_products(self) -> set[int]:
        above: set[int] = set()
        reaching: set[int] = set()
        for number in reversed(range(len(self.operations))):
            readers = self.readers[number]
            if any(reader in above or reader in self.weight_products for reader in readers):
                above.add(number)
            if self.operations[number].is_output or any(reader in reaching for reader in readers):
                reaching.add(number)
        last = self.weight_products - above
        # Where functions out of sight separate products from the model's output, the last one that ran.
        return last & reaching or set(sorted(last)[-1:])

    @cached_property
    def widening_products(self) -> set[int]:
        widening = {
            number
            for number in self.weight_products
            if self.operations[number].outputs[0].numel() > self._activation_operand(self.operations[number]).numel()
        }
        return widening | {number for number, product in self.adapted.items() if product in widening}

    @cached_property
    def adapted(self) -> dict[int, int]:
        """Sums of a product and its adapter, ``base(x) + B(A(x))``, by number -> the product."""
        sums: dict[int, int] = {}
        for number, operation in enumerate(self.operations):
            sources = [read.source for read in self.activations(number)]
            if operation.op == "add" and len(sources) == 2:
                for product, adapter in (sources, sources[::-1]):
                    if product in self.weight_products and self._adapts(adapter, product):
                        sums[number] = product
        return sums

    def _adapts(self, adapter: int, product: int) -> bool:
        """Whether an adapter is two products in a row of what another product reads."""
        last = self._without(adapter, LINEAR_POINTWISE)
        middle = self._only_activation(last) if last in self.weight_products else None
        first = -1 if middle is None else self._without(middle, LINEAR_POINTWISE)
        number = self._only_activation(first) if first in self.weight_products else None
        source = self._only_activation(product)
        while number is not None and number != source and number >= 0 and self.operations[number].op == "dropout":
            number = self._only_activation(number)
        return number is not None and number == source

    def _activation_operand(self, operation: Operation) -> Tensor:
        assert operation.operands is not None
        x, w = operation.operands
        return w if any(x is tensor for _, tensor in operation.parameters) else x

    @cached_property
    def routers(self) -> set[int]:
        """Products whose values, perhaps normalised by a softmax, the model ranks."""
        stack = [number for number, operation in enumerate(self.operations) if operation.is_ranked]
        seen: set[int] = set()
        while stack:
            number = stack.pop()
            if number not in seen and number >= 0:
                seen.add(number)
                if self.operations[number].op in POINTWISE | _SOFTMAXES:
                    stack += [read.source for read in self.activations(number)]
        return seen & self.weight_products

    # --- activations ---

    def activations(self, number: int) -> list[Read]:
        """What an operation reads, without constants and weights."""
        return [
            read
            for read in self.operations[number].reads
            if read.source < 0
            or (self.operations[read.source].kind != CONSTANT and read.source not in self.made_of_weights)
        ]

    def _only_activation(self, number: int) -> int | None:
        """The one tensor that an operation reads; None where it reads several, or none."""
        sources = {read.source for read in self.activations(number)}
        return sources.pop() if len(sources) == 1 else None

    @cached_property
    def pointwise_roots(self) -> list[tuple[int, Part]]:
        """Number of an operation -> what its result is a pointwise function of, if that is one tensor; else itself."""
        roots: list[tuple[int, Part]] = []
        for number, operation in enumerate(self.operations):
            sources = {self._root_of(read, roots) for read in self.activations(number)}
            is_function = operation.op in POINTWISE and operation.op != "glu" and len(sources) == 1
            roots.append(sources.pop() if is_function else (number, ()))
        return roots

    def _root_of(self, read: Read, roots: list[tuple[int, Part]]) -> tuple[int, Part]:
        return roots[read.source] if read.source >= 0 and not read.part else (read.source, read.part)

    @cached_property
    def gates(self) -> set[int]:
        halves: set[int] = set()
        for number, operation in enumerate(self.operations):
            if operation.op == "glu":
                halves |= {read.source for read in operation.reads} & self.products
            elif operation.op == "mul":
                roots = list(dict.fromkeys(self._root_of(r, self.pointwise_roots) for r in self.activations(number)))
                if len(roots) == 2 and self._are_halves(*roots):
                    halves |= {source for source, _ in roots}
        return halves

    def _are_halves(self, first: tuple[int, Part], second: tuple[int, Part]) -> bool:
        products = [self.adapted.get(number, number) for number, _ in (first, second)]
        if not set(products) <= self.products:
            return False
        if first[0] == second[0]:
            return bool(first[1] and second[1])  # two parts of it: a function of the whole and a part is no gate
        return self.activations(products[0]) == self.activations(products[1])

    @cached_property
    def residual_sums(self) -> set[int]:
        sums: set[int] = set()
        for number, operation in enumerate(self.operations):
            sources = [read.source for read in self.activations(number)]
            if operation.op == "add" and operation.kind != MASK and len(set(sources)) == 2 == len(sources):
                first, second = sources
                if self._is_shortcut(first, second) or self._is_shortcut(second, first):
                    sums.add(number)
        return sums

    def _is_shortcut(self, shortcut: int, branch: int) -> bool:
        """Whether `branch` was computed from `shortcut`, or from what a single product projects into it."""
        unscaled = self._without(shortcut, LINEAR_POINTWISE)
        if any(is_mixing for is_mixing, _ in self._paths(branch, unscaled)):
            return True
        projection = self._without(unscaled, LINEAR_POINTWISE | NORMS)
        if projection not in self.weight_products:
            return False
        source = self._only_activation(projection)
        source = None if source is None else self._without(source, frozenset(("avg_pool2d", "max_pool2d")))
        return source is not None and any(map(all, self._paths(branch, source, projection)))

    def _without(self, number: int, ops: frozenset[str]) -> int:
        """The tensor before a chain of such operations with one input."""
        while number >= 0 and self.operations[number].op in ops:
            source = self._only_activation(number)
            if source is None:
                break
            number = source
        return number

    def _paths(self, end: int, start: int, avoided: int | None = None) -> set[tuple[bool, bool]]:
        """Of the ways from one tensor to another: whether positions are mixed on it, and whether it is nonlinear."""
        ways: set[tuple[bool, bool]] = set()
        seen: set[tuple[int, bool, bool]] = set()
        stack = [(end, False, False)]
        while stack:
            step = stack.pop()
            number, is_mixing, is_nonlinear = step
            if number == start:
                ways.add((is_mixing, is_nonlinear))
            if step in seen or number < 0 or number <= start or number == avoided:
                continue
            seen.add(step)
            op = self.operations[number].op
            is_mixing = is_mixing or number in self.products or op in FUSED or "pool" in op or "fft" in op
            is_nonlinear = is_nonlinear or op in FUSED or (op in POINTWISE and op not in LINEAR_POINTWISE)
            stack += [(read.source, is_mixing, is_nonlinear) for read in self.operations[number].reads]
        return ways

    # --- readers ---

    @cached_property
    def normed(self) -> set[int]:
        """What a norm reads."""
        normed = {r.source for operation in self.operations if operation.op in NORMS for r in operation.reads}
        written_out = (self._normed_by(n) for n, op in enumerate(self.operations) if op.op in ("rsqrt", "sqrt"))
        return {source for source in (*normed, *written_out) if source is not None and source >= 0}

    def _normed_by(self, root: int) -> int | None:
        """What is normed by the root of its mean square or variance; None where the root is of something else."""
        number: int | None = root
        while number is not None and number >= 0 and self.operations[number].op not in _REDUCTIONS:
            if number != root and self.operations[number].op not in POINTWISE:
                return None
            number = self._only_activation(number)
        if number is None or number < 0:
            return None
        source = self._only_activation(number)
        if self.operations[number].op in _SQUARING_REDUCTIONS or source is None or source < 0:
            return source
        if self.operations[source].op not in ("pow", "square", "mul"):
            return None
        source = self._only_activation(source)
        if source is not None and source >= 0 and self.operations[source].op == "sub":
            roots = {self._without(read.source, frozenset(("mean",))) for read in self.activations(source)}
            return roots.pop() if len(roots) == 1 else source
        return source

    @cached_property
    def read_pointwise(self) -> set[int]:
        return {
            number
            for number, readers in enumerate(self.readers)
            if readers and number not in self.normed and all(self.operations[r].op in POINTWISE for r in readers)
        }

    @cached_property
    def read_nonlinearly(self) -> set[int]:
        """What a nonlinear function reads, perhaps after linear ones: ``sigmoid(1.702 * x)``."""
        sources: set[int] = set()
        for number, operation in enumerate(self.operations):
            if operation.op in POINTWISE and operation.op not in LINEAR_POINTWISE:
                sources |= {self._root_of(read, self.pointwise_roots)[0] for read in self.activations(number)}
        return {number for number in sources if number >= 0}

    @cached_property
    def saved(self) -> set[int]:
        saved = {n for n, operation in enumerate(self.operations) if operation.op in SAVES_OUTPUT}
        saved = {number for number in saved if self.operations[number].needs_grad}
        for number, operation in enumerate(self.operations):
            if not operation.needs_grad:
                continue
            if operation.op in SAVES_INPUT:
                saved |= {read.source for read in operation.reads}
            elif operation.op in SAVES_FACTORS or number in self.products:
                saved |= self._saved_factors(operation)
        return {number for number in saved if number >= 0}

    def _saved_factors(self, operation: Operation) -> set[int]:
        """The factors that the gradient of another factor needs."""
        has_trained_parameter = any(
            tensor.requires_grad and (operation.operands is None or any(tensor is t for t in operation.operands))
            for _, tensor in operation.parameters
        )
        needing = [read.source >= 0 and self.operations[read.source].needs_grad for read in operation.reads]
        return {
            read.source
            for position, read in enumerate(operation.reads)
            if has_trained_parameter or any(needing[:position] + needing[position + 1 :])
        }


_PREDICATES: dict[str, Callable[[OperationGraph], set[int]]] = {
    "product": lambda graph: graph.products,
    "weight-product": lambda graph: graph.weight_products,
    "first-product": lambda graph: graph.first_products,
    "last-product": lambda graph: graph.last_products,
    "gate": lambda graph: graph.gates,
    "widening": lambda graph: graph.widening_products,
    "router": lambda graph: graph.routers,
    "residual": lambda graph: graph.residual_sums,
    "saved": lambda graph: graph.saved,
    "pointwise-readers": lambda graph: graph.read_pointwise,
    "nonlinear-readers": lambda graph: graph.read_nonlinearly,
    "norm-readers": lambda graph: graph.normed,
}
#: Selectors that a module that is called several times fulfils in every call, not in any.
_IN_EVERY_CALL = frozenset({"pointwise-readers"})


# --- Which tensors a rule chooses, and the plain rules that choose the same


@dataclass(frozen=True)
class Selection:
    """The tensors that a rule with selectors chooses."""

    #: Index in ``plan.all_rules``.
    rule: int
    #: File, line and field of the rule, or ``rules[0]``.
    where: str
    #: What the tensors must be: ``weight-product, not last-product``.
    selection: str
    #: Their operations: ``layers.0.mlp.up/linear.0``.
    sites: tuple[str, ...]

    @property
    def folded(self) -> list[str]:
        """The sites with numbers in module paths as ``*``, and how many of them there are.

        >>> Selection(0, "", "gate", ("layers.0.up/linear.0", "layers.1.up/linear.0")).folded
        ['layers.*.up/linear.0 (2)']
        """
        return fold_sites(self.sites)

    def to_dict(self) -> dict[str, Any]:
        return {"rule": self.rule, "where": self.where, "select": self.selection, "sites": list(self.sites)}


def fold_sites(sites: Iterable[str]) -> list[str]:
    """Sites that differ in the numbers of their layers only, together: ``layers.*.up/linear.0 (2)``."""
    counts: dict[str, list[str]] = {}
    for site in sites:
        module, slash, op = site.rpartition("/")
        counts.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", module) + slash + op, []).append(site)
    return [f"{name} ({len(same)})" if len(same) > 1 else same[0] for name, same in counts.items()]


def find_selections(plan: Plan, operations: Sequence[Operation]) -> list[Selection]:
    """What each rule with selectors chooses among the operations of a model; see :func:`expand_selectors`."""
    chosen = _choose(plan, operations)
    return [
        Selection(index, _where(plan, index), plan.all_rules[index].selection, tuple(call[0].label for call in calls))
        for index, calls in chosen.items()
    ]


def _where(plan: Plan, index: int) -> str:
    return plan.all_rules[index].where or f"rules[{index}]"


#: All calls of one operation of a module.
_Calls = list[Operation]


def _choose(plan: Plan, operations: Sequence[Operation]) -> dict[int, list[_Calls]]:
    """Index of a rule with selectors -> the operations that it chooses."""
    graph = OperationGraph(operations)
    numbers: dict[str, list[int]] = {}
    for number, operation in enumerate(operations):
        if operation.outputs:
            numbers.setdefault(operation.label, []).append(number)
    calls = {label: [operations[number] for number in same] for label, same in numbers.items()}
    return {
        index: [calls[label] for label, same in numbers.items() if _is_chosen(rule, graph, same)]
        for index, rule in enumerate(plan.all_rules)
        if rule.has_selectors
    }


def _is_chosen(rule: Rule, graph: OperationGraph, calls: list[int]) -> bool:
    first = graph.operations[calls[0]]
    if not compile_match(rule)(first.module, op_site(first.op, first.index)):
        return False
    if first.kind == CONSTANT and not rule.constants:
        return False
    if first.kind == MASK and all(key == "activation" for key, _ in rule.quantizers) and not rule.keep:
        return False
    elements = max(tensor.numel() for number in calls for tensor in graph.operations[number].outputs)
    if not (rule.min_elements or 0) <= elements <= (rule.max_elements or elements):
        return False
    for selector in rule.select:
        name = selector.removeprefix(NOT)
        holds = (number in graph.numbers(name) for number in calls)
        if (all(holds) if name in _IN_EVERY_CALL else any(holds)) == selector.startswith(NOT):
            return False
    return True


def expand_selectors(plan: Plan, operations: Sequence[Operation]) -> Plan:
    """The plan with plain rules in the place of those with selectors.

    A rule becomes one for each numbered operation that it chooses (``linear.0``), with a list of exact module paths.
    Operations for which later rules override all of it are left out. A rule that chooses nothing raises; with
    ``strict: false`` it is dropped.

    :param operations: those of the model, see :func:`bitplan.capture.recording.record`; without the loss.
    """
    if not plan.has_selectors:
        return plan
    chosen = _choose(plan, operations)
    expanded: list[Rule] = []
    for index, rule in reversed(list(enumerate(plan.all_rules))):
        expanded[:0] = _plain_rules(plan, index, chosen, expanded) if index in chosen else [rule]
    if not expanded:
        asked = "; ".join(f"{_where(plan, i)}: {rule.selection}" for i, rule in enumerate(plan.all_rules))
        raise PlanError(f"no tensor of the model is what a rule of the plan asks for ({asked}): use another plan.")
    return replace(plan.flattened(), rules=tuple(expanded))


def _plain_rules(plan: Plan, index: int, chosen: dict[int, list[_Calls]], later: Sequence[Rule]) -> list[Rule]:
    """The plain rules of a rule with selectors; `later` are all rules that come after it."""
    rule = plan.all_rules[index]
    where = _where(plan, index)
    if not chosen[index]:
        if rule.strict:
            raise PlanError(
                f"{where}: no tensor of the model is {rule.selection}: drop the rule, or give it strict: false."
            )
        return []
    effective = [calls for calls in chosen[index] if _has_effect(plan, index, calls, later, chosen)]
    if not effective:
        if rule.strict:
            raise PlanError(
                f"{where}: the rule has no effect, because later rules override it for every tensor that is "
                f"{rule.selection}, or the tensors have no {' or '.join(key for key, _ in rule.quantizers)}: drop it."
            )
        return []
    missing = [key for key, _ in rule.quantizers if not any(_places(calls) & set(KEYS[key]) for calls in effective)]
    if missing:
        raise PlanError(f"{where}: no tensor that is {rule.selection} belongs to an operation with {missing[0]!r}.")
    paths: dict[tuple[str, frozenset[str]], list[str]] = {}
    for calls in effective:
        keys = frozenset(key for key, _ in rule.quantizers if _places(calls) & set(KEYS[key]))
        paths.setdefault((op_site(calls[0].op, calls[0].index), keys), []).append(calls[0].module)
    return [
        replace(
            rule,
            match=tuple(map(exact_pattern, modules)),
            op=(op,),
            quantizers=tuple((key, use) for key, use in rule.quantizers if key in keys),
            grad_at=rule.grad_at if "grad_activation" in keys else None,
            select=(),
            min_elements=None,
            max_elements=None,
            where=where,
        )
        for (op, keys), modules in paths.items()
    ]


def _places(calls: _Calls) -> set[str]:
    """Where an operation can be rounded."""
    weights = {"weight", "grad_weight"} if any(operation.parameters for operation in calls) else set()
    slots = set(SLOTS) if any(operation.operands is not None for operation in calls) else set()
    return {"activation", "grad_activation"} | weights | slots


def _has_effect(plan: Plan, index: int, calls: _Calls, later: Sequence[Rule], chosen: dict[int, list[_Calls]]) -> bool:
    """Whether a rule does anything to an operation that later rules do not undo."""
    rule = plan.all_rules[index]
    left = _spoken(rule) & _places(calls)
    if rule.constants:
        return bool(left)
    site = calls[0].module, op_site(calls[0].op, calls[0].index)
    for other in later:
        if left and compile_match(other)(*site):
            left -= _spoken(other)
    if left != {"activation"} or rule.strict or rule.keep:
        return bool(left)
    # The residual sums of a bf16 model are bf16 already: an optional rule leaves them alone without a warning.
    earlier = ((i, other) for i, other in enumerate(plan.all_rules[:index]) if "activation" in _spoken(other))
    if any(
        any(calls is same for same in chosen[i]) if i in chosen else compile_match(other)(*site) for i, other in earlier
    ):
        return True
    specs = list(leaves(dict(rule.quantizers)["activation"], plan.names))
    dtypes = {tensor.dtype for operation in calls for tensor in operation.outputs}
    return not all(spec is not None and spec.holds_every_value_of(dtype) for spec in specs for dtype in dtypes)


def _spoken(rule: Rule) -> set[str]:
    """The places that a rule decides, where an operation has them."""
    return set(PLACES) if rule.keep else {place for key, _ in rule.quantizers for place in KEYS[key]}


def expand_plan(
    plan: Plan, model: nn.Module, batch: Any, loss: Callable[..., Any] | None = None
) -> tuple[Plan, list[Operation]]:
    """:func:`expand_selectors` for a model and a batch, and the operations of its forward pass under that plan.

    :param batch: as in :func:`bitplan.list_sites`, with the target if `loss` takes one.
    """
    inputs = batch if isinstance(batch, FakeInputs) else split_batch(batch, loss)[0]
    opened = replace(plan.flattened(), rules=tuple(rule for rule in plan.all_rules if not rule.has_selectors))
    for _ in range(3):
        operations = record(model, inputs, opens=partial(is_decomposed, opened))
        expanded = expand_selectors(plan, operations)
        fused = {(operation.module, operation.op) for operation in operations if operation.op in DECOMPOSITIONS}
        if not any(is_decomposed(expanded, module, op) for module, op in fused):
            break
        opened = expanded  # a product beside attention is matmul.0, which asks for the products inside it, too
    return expanded, operations


def plan_for_model(plan: Plan, model: nn.Module, batch: Any, loss: Callable[..., Any] | None = None) -> Plan:
    """The plan as it is attached to `model`: expanded, where it has selectors."""
    return expand_plan(plan, model, batch, loss)[0] if plan.has_selectors else plan
