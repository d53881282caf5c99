"""Cost of a run: which formats applied for how many steps, and what these steps cost.

Formats are recorded step by step. Promotions are decided on the device, with the step they apply from, and are read
when the cost is asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch import nn

from bitplan.capture.decompositions import is_decomposed
from bitplan.capture.recording import FakeInputs, Operation, record
from bitplan.errors import PlanError
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

#: The names of all formats that may change, in the order of modules and rows.
Formats = tuple[str, ...]
#: The plan's phase, and the formats that held.
Period = tuple[Phase, Formats]


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

    def table(self) -> list[Explanation]:
        """What every tensor gets; what was promoted tells both its quantizers."""
        from bitplan.analysis.explain import explain_operations

        promoted = {promotion.site: promotion for promotion in self.promotions()}
        rows = explain_operations(self.plan, self.operations())
        return [_promoted_row(row, promoted.get(row.site.name.partition("[")[0])) for row in rows]

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

    def _step_cost(self, period: Period, sites: frozenset[str], targets: Mapping[str, QuantizerSpec | None]) -> Cost:
        if (period, sites) not in self._prices:
            self._prices[period, sites] = self._priced(*period, {site: targets[site] for site in sites})
        return self._prices[period, sites]

    def _priced(self, phase: Phase, formats: Formats, promoted: Mapping[str, QuantizerSpec | None]) -> Cost:
        from bitplan.analysis.cost import step_cost

        names, plan = iter(formats), self.clock.plan_in(phase)
        held = {tables.path: {key: next(names) for key in tables.rows_in(phase)[1]} for tables in self.tables}

        def decide(path: str, op: str) -> Decision:
            decision = plan.decide(path, op)
            choices = dict(decision.choices)
            for place, choice in choices.items():
                name = held.get(path, {}).get((choice.rule, place))
                if name is not None and choice.quantizer is not None:
                    choices[place] = replace(choice, quantizer=choice.quantizer.with_target(get_format(name)))
            return replace(decision, choices=choices)

        return step_cost(self.operations(), decide, promoted)

    def state(self) -> list[list[Any]]:
        """Plain values, in the order of time: formats, the steps that were made with them, and the plan's phase."""
        return [[list(formats), steps, list(phase)] for (phase, formats), steps in self._periods]

    def load(self, state: list[list[Any]]) -> None:
        self._periods = [((tuple(phase), tuple(formats)), int(steps)) for formats, steps, phase in state]
        self._now = None


def _promoted_row(row: Explanation, promoted: Promoted | None) -> Explanation:
    if promoted is None or row.quantizer is None:
        return row
    low = row.over_time or str(replace(row.quantizer, promote=None))
    words = f"{low} until step {promoted.step}, then {promoted.to}"
    return replace(row, quantizer=promoted.target, over_time=words)
