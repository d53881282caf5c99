"""What every tensor of a model gets under a plan, and which rule said so.

:func:`explain` also raises where a rule has no effect (:mod:`bitplan.runtime.coverage`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from bitplan.analysis.sites import Site, sites_of
from bitplan.capture.constants import ACTIVATION
from bitplan.capture.decompositions import decision_for, is_decomposed
from bitplan.capture.recording import Operation, record, scripted_modules
from bitplan.executions.packed.recompute import RECOMPUTED
from bitplan.numerics.packing import is_smaller
from bitplan.plans import OPERANDS, SLOTS, Choice, Decision, Plan
from bitplan.plans.loading import find_plan
from bitplan.plans.spec import QuantizerSpec
from bitplan.runtime.coverage import RuleCoverage, require_interceptable
from bitplan.tables import Table

# --- In how many forms packed execution keeps a tensor, and where one reader cancels what the plan saves


#: Beside products: operations that keep their input for the backward pass.
_KEEPS_INPUT = RECOMPUTED | frozenset(
    """
    gelu silu mish softplus hardswish leaky_relu prelu layer_norm rms_norm group_norm batch_norm instance_norm
    square log
    """.split()  # noqa: SIM905 - a paragraph of names reads better than a page of quotes
)
#: Operations that keep an input where another one needs a gradient.
_KEEPS_FACTORS = frozenset(("mul", "div"))


@dataclass
class _Forms:
    """How one tensor is kept."""

    #: Bits of a value in the tensor's own type, and as the plan has rounded the tensor itself.
    plain: float
    own: float
    #: The fewest bits that the plan gives to the tensor or to an operand it becomes.
    promised: float
    #: Who keeps the tensor as it is.
    as_it_is: list[str] = field(default_factory=list)
    #: (slot, reader, format, bits) of the copies that readers round for themselves.
    copies: list[tuple[str, str, str, float]] = field(default_factory=list)

    @property
    def total(self) -> float:
        return self.own * bool(self.as_it_is) + sum(copy[3] for copy in self.copies)

    @property
    def widest(self) -> float:
        return max([self.own * bool(self.as_it_is), *(copy[3] for copy in self.copies)])

    def warning(self) -> str | None:
        """What is lost, and what to do; None where the plan's bits are what is kept."""
        is_wide = self.widest > self.promised
        if self.promised >= self.plain or self.total < 2 * self.promised or not (is_wide or self.total >= self.plain):
            return None
        parts = [f"{_number(bits)} as {slot} of {reader} ({name})" for slot, reader, name, bits in self.copies]
        if self.as_it_is:
            parts.append(f"{_number(self.own)} as it is, for {', '.join(dict.fromkeys(self.as_it_is))}")
        return (
            f"packed execution keeps {_number(self.total)} bits of each value, not {_number(self.promised)}: "
            f"{' and '.join(parts)}; {self._advice(is_wide)}."
        )

    def _advice(self, is_wide: bool) -> str:
        if not is_wide:
            return "round the activation instead of each operand, and one copy serves all"
        wide = next((copy for copy in self.copies if copy[3] > self.promised), None)
        if wide is not None:
            return f"give {wide[0]} of {wide[1]} {_number(self.promised)} bits, too"
        return f"round the activation to {_number(self.promised)} bits, or wgrad.x of its readers"


def cancelled_savings(plan: Plan, operations: Sequence[Operation]) -> dict[str, str]:
    """Operation's label -> why what it returns is not kept in as few bits as the plan seems to say."""
    found: dict[int, _Forms] = {}
    decisions = [
        decision_for(
            plan.decide, operation.module, f"{operation.op}.{operation.index}", operation.inside, operation.kind
        )
        for operation in operations
    ]
    for number, (operation, decision) in enumerate(zip(operations, decisions, strict=True)):
        if len(operation.outputs) == 1:
            plain = 8.0 * operation.outputs[0].dtype.itemsize
            own = _bits(decision["activation"].quantizer, operation)
            found[number] = _Forms(plain, own, own)
    for operation, decision in zip(operations, decisions, strict=True):
        if not operation.needs_grad:
            continue
        if operation.operands is not None:
            _read_by_product(operation, decision, operations, decisions, found)
        elif operation.op in _KEEPS_INPUT or (
            operation.op in _KEEPS_FACTORS and len(operation.inputs) + len(operation.parameters) > 1
        ):
            for source in operation.inputs:
                if source in found:
                    found[source].as_it_is.append(operation.label)
    warnings = {operations[number].label: forms.warning() for number, forms in found.items()}
    return {label: warning for label, warning in warnings.items() if warning is not None}


def _read_by_product(
    operation: Operation,
    decision: Decision,
    operations: Sequence[Operation],
    decisions: Sequence[Decision],
    found: dict[int, _Forms],
) -> None:
    assert operation.operands is not None
    apart = any(decision[slot].quantizer is not None and decision[slot].share is None for slot in SLOTS)
    x, w = operation.operands
    # With the slots apart, x is kept as the weight's gradient wants it and w as it came; else both as they were used.
    kept = {"x": ("wgrad.x" if apart else "fprop.x", w), "w": (None if apart else "fprop.w", x)}
    for operand, tensor in (("x", x), ("w", w)):
        source = operation.origins.get(id(tensor))
        if source is None or source not in found:
            continue  # data and parameters live anyway
        forms, made = found[source], operations[source]
        for slot in OPERANDS[operand]:
            forms.promised = min(forms.promised, _bits(decision[slot].quantizer, made))
        slot_kept, other = kept[operand]
        if not apart and not other.requires_grad:
            continue  # no gradient wants it
        spec = None if slot_kept is None else decision[slot_kept].quantizer
        if spec is None or slot_kept is None or _is_same_grid(spec, decisions[source]["activation"].quantizer):
            forms.as_it_is.append(operation.label)
        else:
            forms.copies.append((slot_kept, operation.label, str(spec), _bits(spec, made)))


def _bits(spec: QuantizerSpec | None, made: Operation) -> float:
    """Bits of a value that `spec` has rounded, as it is kept."""
    dtype = made.outputs[0].dtype
    is_packed = spec is not None and is_smaller(spec.target, dtype)
    return spec.target.bits_per_value if spec is not None and is_packed else 8.0 * dtype.itemsize


def _is_same_grid(spec: QuantizerSpec, activation: QuantizerSpec | None) -> bool:
    """Whether the operand is the activation itself: it lies on the grid already, and nothing is rounded again."""
    return activation is not None and spec.scale is activation.scale is None and spec.target == activation.target


def _number(bits: float) -> str:
    return f"{bits:g}"


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
    #: Why a rule that matches leaves the tensor alone: it is a ``constant`` or a ``mask``.
    reason: str | None = None

    @property
    def treatment(self) -> str:
        """The quantizer, or that the tensor is left alone, and why."""
        return self.words or ("left alone" if self.reason is None else f"left alone ({self.reason})")

    @property
    def words(self) -> str | None:
        """What the tensor gets, in one line; None where it is left alone."""
        return self.over_time or (None if self.quantizer is None else str(self.quantizer))

    def __str__(self) -> str:
        by = "no rule" if self.rule is None else self.where or f"rules[{self.rule}]"
        return f"{self.site.name}: {self.treatment} ({by}){f'; {self.warning}' if self.warning else ''}"


#: Columns of a table of what a plan does; a rule is named by file, line and field where it has them.
EXPLANATION_COLUMNS: dict[str, Callable[[Explanation], Any]] = {
    "site": lambda row: row.site.name,
    "quantizer": lambda row: row.treatment,
    "rule": lambda row: "no rule" if row.rule is None else row.where or f"rules[{row.rule}]",
    "warning": lambda row: row.warning,
}


def explanation_table(rows: Sequence[Explanation]) -> Table[Explanation]:
    """The rows as a table, whose last column is for warnings where there is any."""
    shown = {
        name: value
        for name, value in EXPLANATION_COLUMNS.items()
        if name != "warning" or any(row.warning for row in rows)
    }
    return Table(rows, shown, empty="no sites: the model runs no operation")


def explain(
    model: nn.Module, plan: Plan | str, batch: Any, loss: Callable[..., Tensor] | None = None
) -> Table[Explanation]:
    """What each site of one training step gets; `batch` and `loss` as :func:`bitplan.list_sites` takes them.

    Fused operations that the plan wants opened are listed by what is inside them.
    """
    resolved = find_plan(plan)
    require_interceptable(resolved, model)
    operations = record(model, batch, loss, opens=partial(is_decomposed, resolved))
    coverage = RuleCoverage(resolved, scripted_modules(model))
    coverage.note_recorded(operations)
    coverage.require_effect(waits=coverage.covers_scripted_module)
    return explanation_table(explained(resolved, operations))


def explained(plan: Plan, operations: Sequence[Operation]) -> list[Explanation]:
    """:func:`explain` for operations that were recorded already."""
    by_label = {operation.label: operation for operation in operations}
    warned = cancelled_savings(plan, operations)
    rows = []
    for site in sites_of(list(operations)):
        label = f"{site.module}/{site.op}"
        row = _explained(plan, site, by_label[label])
        rows.append(replace(row, warning=warned.get(label)) if site.role == "activation" else row)
    return rows


def _explained(plan: Plan, site: Site, operation: Operation) -> Explanation:
    decide, kind = plan.decide, operation.kind
    choice: Choice = decision_for(decide, site.module, site.op, operation.inside, kind)[site.role]
    where = "" if choice.rule is None else plan.all_rules[choice.rule].where
    is_left_alone = choice.rule is not None and choice.quantizer is None and choice.over_time is None
    reason = kind if is_left_alone and kind != ACTIVATION and site.role not in ("weight", "grad_weight") else None
    return Explanation(site, choice.quantizer, choice.rule, where, choice.over_time, reason=reason)
