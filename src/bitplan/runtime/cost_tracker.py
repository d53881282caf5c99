"""Cost of a run: which formats applied for how many steps, and what these steps cost.

Formats are recorded step by step. Promotions are decided on the device, with the step they apply from, and are read
when the cost is asked for.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch import nn

from bitplan.capture.decompositions import is_decomposed
from bitplan.capture.recording import FakeInputs, Operation, record
from bitplan.errors import BitplanError, PlanError
from bitplan.numerics.formats import get_format
from bitplan.plans import Decision, Plan
from bitplan.plans.document import Phase
from bitplan.plans.spec import QuantizerSpec
from bitplan.runtime.clock import ScheduleClock
from bitplan.runtime.module_state import ModuleTables
from bitplan.runtime.rounding_op import Promoted

if TYPE_CHECKING:
    from bitplan.analysis.cost import Cost
    from bitplan.analysis.explain import Explanation

log = logging.getLogger("bitplan")

#: The names of all formats that may change, in the order of modules and rows.
Formats = tuple[str, ...]
#: The plan's phase, and the formats that held.
Period = tuple[Phase, Formats]
#: What a plan decides of an operation of a module.
Decide = Callable[[str, str], Decision]
#: Index of a rule and place, which share a row of a module's table.
RowKey = tuple[int | None, str]


class CostTracker:
    """Counts steps, and prices them when asked: what a step costs follows from the formats it was made with."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        tables: Sequence[ModuleTables],
        clock: ScheduleClock,
        promotions: Callable[[], list[Promoted]],
    ) -> None:
        self.model = model
        self.plan = plan
        self.tables = tables
        self.clock = clock
        self.promotions = promotions
        #: What the model was first called with: shapes only.
        self.inputs: FakeInputs | None = None
        self._operations: list[Operation] | None = None
        self._is_unrecordable = False
        #: What held, and for how many steps, in the order of time.
        self._periods: list[tuple[Period, int]] = []
        self._now: Period | None = None
        #: What a step with such formats and promotions costs: pricing one takes as long as a small training step.
        self._prices: dict[tuple[Period, frozenset[str]], Cost] = {}

    def count_step(self) -> None:
        if self._now is None:
            self._now = self._period()
        if self._periods and self._periods[-1][0] == self._now:
            self._periods[-1] = self._now, self._periods[-1][1] + 1
        else:
            self._periods.append((self._now, 1))

    def _period(self) -> Period:
        return self.clock.phase, tuple(row.format.name for tables in self.tables for row in tables.formats)

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
            opens = partial(is_decomposed, self.plan) if self.plan.all_rules else None
            self._operations = record(self.model, self.inputs, opens=opens)
        return self._operations

    def knows_operations(self) -> bool:
        """Whether :meth:`operations` returns any; a model that cannot be recorded is not tried twice."""
        if self._operations is None and self.inputs is not None and not self._is_unrecordable:
            try:
                self.operations()
            except (BitplanError, RuntimeError) as error:
                self._is_unrecordable = True
                log.info("the model cannot be recorded, so scalars have no costs: %s", error)
        return self._operations is not None

    def table(self, step: int | None = None) -> list[Explanation]:
        """What every tensor gets; what was promoted tells both its quantizers.

        :param step: only what it gets, or got, at that training step.
        """
        from bitplan.analysis.explain import explain_operations

        promoted = {promotion.site: promotion for promotion in self.promotions()}
        decide = None if step is None else self._decide_at(step)
        rows = explain_operations(self.plan, self.operations(), decide)
        return [_promoted_row(row, promoted.get(row.site.name.partition("[")[0]), step) for row in rows]

    def _decide_at(self, step: int) -> Decide:
        """The decisions at a training step: as recorded if it was made, and as planned if it was not."""
        from bitplan.analysis.explain import plan_at

        if self.clock.steps == "progress" and self.plan.moves:
            raise PlanError(
                'this run reports its progress as a share (steps="progress") and counts no steps: ask for the table '
                "without a step, or attach with the number of steps."
            )
        plan = plan_at(self.plan, step, self.clock.steps if isinstance(self.clock.steps, int) else None)
        first = 0
        for (phase, formats), steps in self._periods:
            if step < first + steps:
                return self._decide_in(phase, formats)
            first += steps
        # Formats that were set by hand stay as they are.
        changed = {
            tables.path: {
                key: row.format.name
                for key, row in zip(tables.rows_by_rule, tables.formats, strict=True)
                if row.spec.moved_by is None and row.format is not row.spec.target
            }
            for tables in self.tables
        }
        return _with_formats(plan, changed)

    def cost(self) -> Cost:
        """Of all steps so far; of one step where none was made yet."""
        from bitplan.analysis.cost import Cost

        promotions = self.promotions()
        held: Counter[tuple[Period, frozenset[str]]] = Counter()
        first = 0
        for period, steps in self._periods or [(self._period(), 1)]:
            changes = {promotion.step for promotion in promotions if first < promotion.step < first + steps}
            for start, end in pairwise(sorted({first, first + steps} | changes)):
                sites = frozenset(promotion.site for promotion in promotions if promotion.step <= start)
                held[period, sites] += end - start
            first += steps
        targets = {promotion.site: promotion.target for promotion in promotions}
        costs = (self._step_cost(period, sites, targets).times(steps) for (period, sites), steps in held.items())
        return sum(costs, Cost())

    @property
    def has_steps(self) -> bool:
        """Whether any step was counted."""
        return bool(self._periods)

    def last_step_cost(self) -> Cost:
        """Of the last step; of the first one where none was made yet."""
        targets = {promotion.site: promotion.target for promotion in self.promotions()}
        period = self._periods[-1][0] if self._periods else self._period()
        return self._step_cost(period, frozenset(targets), targets)

    def _step_cost(self, period: Period, sites: frozenset[str], targets: Mapping[str, QuantizerSpec | None]) -> Cost:
        if (period, sites) not in self._prices:
            self._prices[period, sites] = self._priced(*period, {site: targets[site] for site in sites})
        return self._prices[period, sites]

    def _priced(self, phase: Phase, formats: Formats, promoted: Mapping[str, QuantizerSpec | None]) -> Cost:
        from bitplan.analysis.cost import step_cost

        return step_cost(self.operations(), self._decide_in(phase, formats), promoted)

    def _decide_in(self, phase: Phase, formats: Formats) -> Decide:
        """The decisions of a period."""
        names = iter(formats)
        held = {tables.path: {key: next(names) for key in tables.rows_in(phase)[1]} for tables in self.tables}
        return _with_formats(self.clock.plan_in(phase), held)

    def state(self) -> list[list[Any]]:
        """Plain values, in the order of time: formats, the steps that were made with them, and the plan's phase."""
        return [[list(formats), steps, list(phase)] for (phase, formats), steps in self._periods]

    def load(self, state: list[list[Any]]) -> None:
        self._periods = [((tuple(phase), tuple(formats)), int(steps)) for formats, steps, phase in state]
        self._now = None


def _with_formats(plan: Plan, formats: Mapping[str, Mapping[RowKey, str]]) -> Decide:
    """The decisions of a plan, with the formats that rows of the modules' tables hold."""

    def decide(path: str, op: str) -> Decision:
        decision = plan.decide(path, op)
        choices = dict(decision.choices)
        for place, choice in choices.items():
            name = formats.get(path, {}).get((choice.rule, place))
            if name is not None and choice.quantizer is not None:
                choices[place] = replace(choice, quantizer=choice.quantizer.with_target(get_format(name)))
        return replace(decision, choices=choices)

    return decide


def _promoted_row(row: Explanation, promoted: Promoted | None, step: int | None) -> Explanation:
    if promoted is None or row.quantizer is None or (step is not None and step < promoted.step):
        return row
    if step is not None:
        words = f"{promoted.to} (promoted at step {promoted.step})"
        return replace(row, quantizer=promoted.target, over_time=words)
    low = row.over_time or str(replace(row.quantizer, promote=None))
    words = f"{low} until step {promoted.step}, then {promoted.to}"
    return replace(row, quantizer=promoted.target, over_time=words)
