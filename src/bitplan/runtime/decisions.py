"""From a plan to the actions of one module: every operation that may happen in it, looked up once and for all.

Compiled code must not search rules while it is traced, so the names that patterns stand for are spelled out here.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.overrides

from bitplan.capture.decompositions import DECOMPOSITIONS, has_slots, is_decomposed
from bitplan.capture.ops import PRODUCTS, name_of
from bitplan.numerics.formats import BlockFormat, CodebookFormat
from bitplan.numerics.mutable_format import MutableFormat
from bitplan.numerics.wire_format import op_site
from bitplan.plans import Choice, Decision, Plan, compile_match
from bitplan.plans.match import is_pattern
from bitplan.plans.spec import QuantizerSpec
from bitplan.runtime.execution import Execution
from bitplan.runtime.frozen import frozen_spec, with_stored_weight
from bitplan.runtime.module_state import ModuleTables, QuantizerModules
from bitplan.runtime.rounding_op import OpRounding, RoundingOp

#: Stands for every operation that no rule names.
ANY = "any other"
#: A pattern over numbered operations, such as ``relu.[02]``, is spelled out up to this number.
_HIGHEST_NUMBER = 64


def inner_key(fused: str, op: str) -> str:
    """Under what name a product inside an opened operation finds its action."""
    return f"{op} in {fused}"


def rounding_of(actions: Mapping[str, Any], op: str, index: int, inside: str | None = None) -> OpRounding | None:
    """Of a module's actions that of the operation of that number, which may lie inside an opened one."""
    if inside is not None:
        inner: OpRounding | None = actions.get(inner_key(inside, op))
        if inner is not None:
            return inner
    numbered = op_site(op, index)
    if numbered in actions:
        return actions[numbered]  # type: ignore[no-any-return]
    return actions[op if op in actions else ANY]  # type: ignore[no-any-return]


@lru_cache(maxsize=1)
def known_operations() -> tuple[str, ...]:
    """The names of all operations that torch lets a mode see."""
    named = {name_of(func) for funcs in torch.overrides.get_overridable_functions().values() for func in funcs}
    return tuple(sorted(name for name in named if name))


def named_operations(plan: Plan) -> tuple[str, ...]:
    """Every operation that the rules name, by name or by pattern, with its number where they give one."""
    found: dict[str, None] = {}
    for rule in plan.all_rules:
        if not rule.op:
            continue
        matches = compile_match(rule).matches_operation
        for text in rule.op:
            if not is_pattern(text):
                found[text] = None
        if any(map(is_pattern, rule.op)):
            found |= dict.fromkeys(op for op in known_operations() if matches(op))
            if any("." in text for text in rule.op):
                numbered = (f"{op}.{number}" for op in known_operations() for number in range(_HIGHEST_NUMBER))
                found |= dict.fromkeys(op for op in numbered if matches(op) and not matches(op.split(".")[0]))
    return tuple(found)


class Decider:
    """Makes the actions of modules, and the rows of their tables on the way."""

    def __init__(
        self,
        plan: Plan,
        mutable_formats: bool,
        watched: bool,
        execution: Execution,
        whole: Decider | None = None,
    ) -> None:
        """
        :param mutable_formats: every float and integer format may change; otherwise only those whose ``bits`` the plan
            leaves open.
        :param watched: statistics are gathered.
        :param whole: the decider of the plan that this one is a phase of.
        """
        self.plan = plan
        self.whole = self if whole is None else whole
        self.mutable_formats = mutable_formats
        self.watched = watched
        self.execution = execution
        self._named = named_operations(plan)
        self._mutable_formats: dict[QuantizerSpec, MutableFormat] = {} if whole is None else whole._mutable_formats
        self._rounding_ops: dict[Hashable, RoundingOp] = {} if whole is None else whole._rounding_ops
        #: Objects of the user's own classes that round, by site.
        self.quantizer_modules: QuantizerModules = QuantizerModules() if whole is None else whole.quantizer_modules

    def in_phase(self, plan: Plan) -> Decider:
        """The decider of a phase of the plan."""
        return Decider(plan, self.mutable_formats, self.watched, self.execution, whole=self)

    def actions(self, tables: ModuleTables) -> dict[str, Any]:
        """Operation -> action; under :data:`ANY` what every operation gets that is not named."""
        path, decide = tables.path, self.plan.decide
        #: By decision and operation: products inside different fused operations mostly follow the same rules.
        made: dict[tuple[int, str], OpRounding | None] = {}

        def action(decision: Decision, op: str) -> OpRounding | None:
            key = (id(decision), op)
            if key not in made:
                made[key] = self._action(decision, op, tables)
            return made[key]

        if self.whole.plan is not self.plan:
            for op in PRODUCTS:  # raises where the operands of a product are rotated differently later in the run
                self.whole.plan.decide(path, op)
        actions: dict[str, Any] = {}
        for op in dict.fromkeys([*PRODUCTS, *DECOMPOSITIONS, *self._named]):
            actions[op] = action(decide(path, op), op.split(".")[0])
        for fused in DECOMPOSITIONS:
            # What is opened in any phase is opened in all, so that sites keep their names.
            actions[f"open {fused}"] = is_decomposed(self.whole.plan, path, fused)
            around = decide(path, fused)
            if actions[f"open {fused}"] and has_slots(around):
                actions |= {inner_key(fused, op): action(around, op) for op in PRODUCTS}
        actions[ANY] = action(decide(path, ""), "")
        return actions

    def _action(self, decision: Decision, op: str, tables: ModuleTables) -> OpRounding | None:
        if decision.changes_nothing:
            return None
        places = {
            place: self._rounding_op(choice, place, op, tables)
            for place, choice in decision.choices.items()
            if choice.quantizer is not None
        }
        frozen = frozen_spec(self.plan, tables.path, tables.module, op)
        prepared = self.execution.prepare(decision if frozen is None else with_stored_weight(decision, frozen), op)
        rounding = OpRounding(decision, op, places, prepared, self.quantizer_modules)
        tables.needs_keys |= rounding.needs_key
        return rounding

    def _rounding_op(self, choice: Choice, place: str, op: str, tables: ModuleTables) -> RoundingOp:
        spec = choice.quantizer
        assert spec is not None
        live, row, stored_format = self._mutable_format(spec), 0, None
        if live is not None:
            row = tables.format_row(choice.rule, place, live, spec, choice.name)
            stored_format = tables.row_at(row).stored() if self.execution.packs_saved_tensors else None
        is_fixed = live is None and spec.promote is None
        key = (spec, place, op, live, row, stored_format)
        if key not in self._rounding_ops:  # equal ones serve all modules
            self._rounding_ops[key] = RoundingOp(
                spec,
                place,
                op,
                mutable_format=live,
                row=row,
                watched=self.watched,
                is_packed=self.execution.packs_saved_tensors,
                keeps_codes=self.execution.saves_activation_codes and place == "activation" and is_fixed,
                stored_format=stored_format,
            )
        return self._rounding_ops[key]

    def _mutable_format(self, spec: QuantizerSpec) -> MutableFormat | None:
        if isinstance(spec.target, (BlockFormat, CodebookFormat)) or not (
            self.mutable_formats or spec.bits is not None
        ):
            return None
        # Modules share what is the same in all of them, so that compiled code can be shared, too.
        if spec not in self._mutable_formats:
            self._mutable_formats[spec] = spec.live()
        return self._mutable_formats[spec]
