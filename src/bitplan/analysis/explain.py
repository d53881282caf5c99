"""The quantizer of every tensor of a model under a plan, and the rule that set it.

:func:`explain` also raises if a rule has no effect (:mod:`bitplan.runtime.coverage`), and warns where packed execution
saves more bits of a tensor than the plan promises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from bitplan.analysis.cost import stored_bits
from bitplan.analysis.sites import Site, sites_of_operations
from bitplan.capture.constants import ACTIVATION
from bitplan.capture.decompositions import decision_for, is_decomposed
from bitplan.capture.ops import SAVES_FACTORS, SAVES_INPUT
from bitplan.capture.recording import Operation, record, scripted_modules
from bitplan.capture.selectors import Selection, expand_plan, find_selections, plan_for_model
from bitplan.errors import PlanError
from bitplan.executions.packed.recompute import RECOMPUTED
from bitplan.numerics.packing import is_smaller
from bitplan.plans import OPERANDS, SLOTS, Choice, Decision, Plan
from bitplan.plans.frozen import FrozenSpec
from bitplan.plans.loading import PlanSource, find_plan
from bitplan.plans.schedules import Position
from bitplan.plans.spec import QuantizerSpec
from bitplan.runtime.coverage import RuleCoverage, require_interceptable
from bitplan.runtime.frozen import find_frozen_weights, is_frozen_weight
from bitplan.tables import Table

# --- Copies of a tensor that packed execution saves, and readers that cancel the plan's saving


#: What a plan decides of an operation of a module.
Decide = Callable[[str, str], Decision]

#: Operations, other than products, that save their input for the backward pass in packed execution.
_SAVES_INPUT = RECOMPUTED | SAVES_INPUT


@dataclass
class _SavedForms:
    """The forms in which a tensor is saved for the backward pass."""

    #: Bits of a value in the tensor's dtype.
    plain: float
    #: Bits of a value after the activation's quantizer.
    own: float
    #: The fewest bits that the plan gives to the activation or to an operand made from it.
    promised: float
    #: Operations that save the activation without rounding it again.
    unrounded_readers: list[str] = field(default_factory=list)
    #: (slot, reader, format, bits) of the copies that readers round separately.
    copies: list[tuple[str, str, str, float]] = field(default_factory=list)

    @property
    def total(self) -> float:
        return self.own * bool(self.unrounded_readers) + sum(copy[3] for copy in self.copies)

    @property
    def widest(self) -> float:
        return max([self.own * bool(self.unrounded_readers), *(copy[3] for copy in self.copies)])

    def warning(self) -> str | None:
        """The lost saving and its remedy; None if the promised bits are saved."""
        is_wide = self.widest > self.promised
        if self.promised >= self.plain or self.total < 2 * self.promised or not (is_wide or self.total >= self.plain):
            return None
        parts = [f"{_bits_text(bits)} as {slot} of {reader} ({name})" for slot, reader, name, bits in self.copies]
        if self.unrounded_readers:
            parts.append(f"{_bits_text(self.own)} as it is, for {', '.join(dict.fromkeys(self.unrounded_readers))}")
        return (
            f"packed execution keeps {_bits_text(self.total)} bits of each value, not {_bits_text(self.promised)}: "
            f"{' and '.join(parts)}; {self._advice(is_wide)}."
        )

    def _advice(self, is_wide: bool) -> str:
        if not is_wide:
            return "round the activation instead of each operand, and one copy serves all"
        wide = next((copy for copy in self.copies if copy[3] > self.promised), None)
        if wide is not None:
            return f"give {wide[0]} of {wide[1]} {_bits_text(self.promised)} bits, too"
        return f"round the activation to {_bits_text(self.promised)} bits, or wgrad.x of its readers"


def find_cancelled_savings(decide: Decide, operations: Sequence[Operation]) -> dict[str, str]:
    """Label of an operation -> why its output is saved with more bits than the plan promises."""
    forms_by_operation: dict[int, _SavedForms] = {}
    decisions = [decision_for(decide, op.module, f"{op.op}.{op.index}", op.inside, op.kind) for op in operations]
    for number, (operation, decision) in enumerate(zip(operations, decisions, strict=True)):
        if len(operation.outputs) == 1:
            plain = 8.0 * operation.outputs[0].dtype.itemsize
            own = _bits(decision["activation"].quantizer, operation)
            forms_by_operation[number] = _SavedForms(plain, own, own)
    for operation, decision in zip(operations, decisions, strict=True):
        if not operation.needs_grad:
            continue
        if operation.operands is not None:
            _add_product_forms(operation, decision, operations, decisions, forms_by_operation)
        elif operation.op in _SAVES_INPUT or (
            operation.op in SAVES_FACTORS and len(operation.inputs) + len(operation.parameters) > 1
        ):
            for source in operation.inputs:
                if source in forms_by_operation:
                    forms_by_operation[source].unrounded_readers.append(operation.label)
    warnings = {operations[number].label: forms.warning() for number, forms in forms_by_operation.items()}
    return {label: warning for label, warning in warnings.items() if warning is not None}


def _add_product_forms(
    operation: Operation,
    decision: Decision,
    operations: Sequence[Operation],
    decisions: Sequence[Decision],
    forms_by_operation: dict[int, _SavedForms],
) -> None:
    assert operation.operands is not None
    has_separate_slots = any(decision[slot].quantizer is not None and decision[slot].share is None for slot in SLOTS)
    x, w = operation.operands
    # With separate slots, x is saved as rounded for wgrad and w as it came in; otherwise both as rounded for fprop.
    saved_slots = {
        "x": ("wgrad.x" if has_separate_slots else "fprop.x", w),
        "w": (None if has_separate_slots else "fprop.w", x),
    }
    for operand, tensor in (("x", x), ("w", w)):
        source = operation.origins.get(id(tensor))
        if source is None or source not in forms_by_operation:
            continue  # data and parameters stay in memory anyway
        forms, producer = forms_by_operation[source], operations[source]
        for slot in OPERANDS[operand]:
            forms.promised = min(forms.promised, _bits(decision[slot].quantizer, producer))
        saved_slot, other = saved_slots[operand]
        if not has_separate_slots and not other.requires_grad:
            continue  # no gradient needs it
        spec = None if saved_slot is None else decision[saved_slot].quantizer
        if spec is None or saved_slot is None or _is_same_grid(spec, decisions[source]["activation"].quantizer):
            forms.unrounded_readers.append(operation.label)
        else:
            forms.copies.append((saved_slot, operation.label, str(spec), _bits(spec, producer)))


def _bits(spec: QuantizerSpec | None, producer: Operation) -> float:
    """Bits of a saved value after rounding by `spec`."""
    dtype = producer.outputs[0].dtype
    is_packed = spec is not None and is_smaller(spec.target, dtype)
    return stored_bits(spec) if spec is not None and is_packed else 8.0 * dtype.itemsize


def _is_same_grid(spec: QuantizerSpec, activation: QuantizerSpec | None) -> bool:
    """Whether the activation is already on the operand's grid, so that it is not rounded again."""
    if activation is None or spec.rotate is not None:
        return False
    return spec.scale is activation.scale is None and spec.target == activation.target


def _bits_text(bits: float) -> str:
    return f"{bits:g}"


@dataclass(frozen=True)
class Explanation:
    """A site and its quantizer under a plan."""

    site: Site
    #: None: the tensor is not rounded. If the quantizer changes over time: the first that is not None.
    quantizer: QuantizerSpec | None
    #: Index in ``plan.all_rules`` of the last rule that matched, also one with ``keep``; None if none matched.
    rule: int | None
    #: File, line and field of that rule.
    where: str = ""
    #: Description of a quantizer that changes over time.
    over_time: str | None = None
    #: Why packed execution saves more bits of the tensor than the plan promises; None if it does not.
    warning: str | None = None
    #: Why a rule that matches leaves the tensor alone: it is a ``constant``, a ``mask`` or a ``statistic``.
    reason: str | None = None
    #: What the weight is stored in, if it is not trained and a rule says so.
    frozen: FrozenSpec | None = None

    @property
    def treatment(self) -> str:
        """The quantizer, or that the tensor is left alone, and why."""
        return self.words or ("left alone" if self.reason is None else f"left alone ({self.reason})")

    @property
    def words(self) -> str | None:
        """The quantizer on one line; None if the tensor is not rounded."""
        rounded = self.over_time or (None if self.quantizer is None else str(self.quantizer))
        parts = [None if self.frozen is None else f"frozen in {self.frozen}", rounded]
        return ", ".join(part for part in parts if part is not None) or None

    def __str__(self) -> str:
        rule = "no rule" if self.rule is None else self.where or f"rules[{self.rule}]"
        return f"{self.site.name}: {self.treatment} ({rule}){f'; {self.warning}' if self.warning else ''}"


#: Columns of the table; a rule is named by file, line and field if it has them.
EXPLANATION_COLUMNS: dict[str, Callable[[Explanation], Any]] = {
    "site": lambda row: row.site.name,
    "quantizer": lambda row: row.treatment,
    "rule": lambda row: "no rule" if row.rule is None else row.where or f"rules[{row.rule}]",
    "warning": lambda row: row.warning,
}


def explanation_table(rows: Sequence[Explanation]) -> Table[Explanation]:
    """The rows as a table, with a column for warnings if there are any."""
    columns = {
        name: value
        for name, value in EXPLANATION_COLUMNS.items()
        if name != "warning" or any(row.warning for row in rows)
    }
    return Table(rows, columns, empty="no sites: the model runs no operation")


def explain(
    model: nn.Module,
    plan: PlanSource,
    batch: Any,
    loss: Callable[..., Tensor] | None = None,
    *,
    step: int | None = None,
    steps: int | None = None,
) -> Table[Explanation]:
    """The quantizer of each site of a training step; `batch` and `loss` are as in :func:`bitplan.list_sites`.

    Fused operations that the plan decomposes are listed by their parts.

    :param step: a training step, from 0: the quantizers of that step. By default those of the whole run.
    :param steps: the optimizer steps of the whole run, which a plan that changes over time needs for `step`.
    """
    resolved = plan_for_model(find_plan(plan), model, batch, loss)
    require_interceptable(resolved, model)
    operations = record(model, batch, loss, opens=partial(is_decomposed, resolved))
    coverage = RuleCoverage(resolved, scripted_modules(model))
    coverage.note_recorded(operations)
    coverage.require_effect(waits=coverage.covers_scripted_module)
    find_frozen_weights(resolved, model.named_modules(), model)
    decide = None if step is None else plan_at(resolved, step, steps).decide
    return explanation_table(explain_operations(resolved, operations, decide))


def plan_at(plan: Plan, step: int, steps: int | None) -> Plan:
    """The plan as it stands at a training step of a run of `steps` steps, with nothing left that changes."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise PlanError(f"a run has no step {step!r}: steps are whole numbers from 0.")
    if not plan.moves:
        return plan
    if steps is None:
        schedules = ", ".join(map(str, plan.followed.values())) or "until, then"
        raise PlanError(
            f"this plan changes over time ({schedules}), so that step {step} depends on the length of the run: give "
            f"steps (--steps), the optimizer steps of the whole run."
        )
    if step >= steps:
        raise PlanError(f"a run of {steps} steps has no step {step}: its steps are 0 to {steps - 1}.")
    return plan.at(Position(step, steps), fixed=True)


def explain_selections(
    model: nn.Module, plan: PlanSource, batch: Any, loss: Callable[..., Tensor] | None = None
) -> list[Selection]:
    """The tensors that each rule with ``select`` chooses; arguments as in :func:`explain`."""
    resolved = find_plan(plan)
    if not resolved.has_selectors:
        return []
    return find_selections(resolved, expand_plan(resolved, model, batch, loss)[1])


def explain_operations(plan: Plan, operations: Sequence[Operation], decide: Decide | None = None) -> list[Explanation]:
    """:func:`explain` for recorded operations.

    :param decide: in the place of the plan's own decisions, those of one moment of a run.
    """
    decide = decide or plan.decide
    by_label = {operation.label: operation for operation in operations}
    warnings = find_cancelled_savings(decide, operations)
    rows = []
    for site in sites_of_operations(list(operations)):
        label = f"{site.module}/{site.op}"
        row = _explain_site(plan, decide, site, by_label[label])
        rows.append(replace(row, warning=warnings.get(label)) if site.role == "activation" else row)
    return rows


def _explain_site(plan: Plan, decide: Decide, site: Site, operation: Operation) -> Explanation:
    kind = operation.kind
    choice: Choice = decision_for(decide, site.module, site.op, operation.inside, kind)[site.role]
    where = "" if choice.rule is None else plan.all_rules[choice.rule].where
    is_left_alone = choice.rule is not None and choice.quantizer is None and choice.over_time is None
    reason = kind if is_left_alone and kind != ACTIVATION and site.role not in ("weight", "grad_weight") else None
    row = Explanation(site, choice.quantizer, choice.rule, where, choice.over_time, reason=reason)
    if site.role != "weight" or not is_frozen_weight(site.op.split(".")[0], site.parameter, operation.parameters):
        return row
    frozen, rule = plan.frozen_at(site.module, site.op)
    if frozen is None or rule is None:
        return row
    last = rule if choice.rule is None else max(rule, choice.rule)
    return replace(row, frozen=frozen, rule=last, where=plan.all_rules[last].where, reason=None)
