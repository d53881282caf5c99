"""The books of a run: which formats held for how many steps, and what that cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from bitplan.cost import Cost, step_cost
from bitplan.errors import PlanError
from bitplan.explain import Explanation, explained
from bitplan.names import format as format_of
from bitplan.openings import is_opened
from bitplan.plan import Decision, Plan
from bitplan.plan.document import Phase
from bitplan.sites import FakeInputs, Operation, record
from bitplan.tables import ModuleTables
from bitplan.timeline import Timeline

#: The names of all formats that may change, in the order of modules and rows.
Formats = tuple[str, ...]
#: The plan's phase, and the formats that held.
Period = tuple[Phase, Formats]


class Ledger:
    """Counts steps, and prices them when asked: what a step costs follows from the formats it was made with."""

    def __init__(self, model: nn.Module, plan: Plan, tables: Sequence[ModuleTables], timeline: Timeline) -> None:
        self.model = model
        self.plan = plan
        self.tables = tables
        self.timeline = timeline
        #: What the model was first called with: shapes only.
        self.inputs: FakeInputs | None = None
        self._operations: list[Operation] | None = None
        self._steps: dict[Period, int] = {}
        self._now: Period | None = None
        #: What a step with such formats costs: pricing one takes as long as a small model's training step.
        self._prices: dict[Period, Cost] = {}

    def count_step(self) -> None:
        if self._now is None:
            self._now = self._period()
        self._steps[self._now] = self._steps.get(self._now, 0) + 1

    def _period(self) -> Period:
        return self.timeline.phase, tuple(row.format.name for tables in self.tables for row in tables.formats)

    def formats_changed(self) -> None:
        self._now = None

    def use(self, operations: list[Operation]) -> None:
        """Operations that were recorded already."""
        self._operations = operations
        self._prices.clear()

    def operations(self) -> list[Operation]:
        """The operations of one forward pass, recorded on fake tensors."""
        if self._operations is None:
            if self.inputs is None:
                raise PlanError(
                    "bitplan has not seen a batch yet: give attach() an example=, or run the model once uncompiled."
                )
            opens = partial(is_opened, self.plan) if self.plan.all_rules else None
            self._operations = record(self.model, self.inputs, opens=opens)
        return self._operations

    def table(self) -> list[Explanation]:
        return explained(self.plan, self.operations())

    def cost(self) -> Cost:
        """Of all steps so far; of one step where none was made yet."""
        periods = self._steps or {self._period(): 1}
        costs = (self._step_cost(period).times(steps) for period, steps in periods.items())
        return sum(costs, Cost())

    def _step_cost(self, period: Period) -> Cost:
        if period not in self._prices:
            self._prices[period] = self._priced(*period)
        return self._prices[period]

    def _priced(self, phase: Phase, formats: Formats) -> Cost:
        names, plan = iter(formats), self.timeline.plan_in(phase)
        held = {tables.path: {key: next(names) for key in tables.rows_in(phase)[1]} for tables in self.tables}

        def decide(path: str, op: str) -> Decision:
            decision = plan.decide(path, op)
            choices = dict(decision.choices)
            for place, choice in choices.items():
                name = held.get(path, {}).get((choice.rule, place))
                if name is not None and choice.quantizer is not None:
                    choices[place] = replace(choice, quantizer=choice.quantizer.with_target(format_of(name)))
            return replace(decision, choices=choices)

        return step_cost(self.operations(), decide)

    def state(self) -> list[list[Any]]:
        """Plain values: a list of formats, the steps that were made with them, and the plan's phase."""
        return [[list(formats), steps, list(phase)] for (phase, formats), steps in self._steps.items()]

    def load(self, state: list[list[Any]]) -> None:
        self._steps = {(tuple(phase), tuple(formats)): int(steps) for formats, steps, phase in state}
        self._now = None
