"""Suites: named lists of plans to compare, some of them made for the model of a task.

Constant widths are schedules here, too, so that all plans of a suite differ only in schedules and share one compiled
graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bitplan.capture.recording import Operation
from bitplan.errors import RunError, nearest_names
from bitplan.lab.compare.folder import Choice
from bitplan.lab.task_planners import assign_task
from bitplan.lab.tasks.task import Task
from bitplan.planners.assign.assign import LOSS_SCALE, AssignRequest
from bitplan.planners.assign.levels import PAPER, Formats
from bitplan.planners.cpt import Widths, equal_cost_plan, make_plan, mean_bit_operations, record_operations
from bitplan.plans import Plan
from bitplan.plans.schedules import TEN, Deficit, RunPoint, Schedule, Static, schedule
from bitplan.plans.schedules.cyclic import DEFAULT_CYCLES

# --- Assignments of low precision, against the baselines of the paper

#: Shares of values in low precision.
RATIOS = (0.3, 0.5, 0.7, 0.9, 1.0)

_BASELINES = {"operator": "operator", "uniform low": "uniform-low"}


def assign_choices(task: Task, ratios: tuple[float, ...] = RATIOS, formats: Formats = PAPER) -> tuple[Choice, ...]:
    """FP32, the operator baseline, everything low without promotion, and assignments with promotion."""
    scale = (f"loss_scale={LOSS_SCALE:g}",) if formats.needs_loss_scale else ()
    requests = {label: AssignRequest(baseline=name) for label, name in _BASELINES.items()}
    requests |= {f"r = {ratio:g}": AssignRequest(ratio=ratio) for ratio in ratios}
    made = {label: assign_task(task, request, formats).plan for label, request in requests.items()}
    return (Choice("FP32", None), *(Choice(label, plan, scale) for label, plan in made.items()))


# --- Cyclic precision and deficits

#: The range of bits of both suites: that of Wolfe & Kyrillidis for CIFAR and graphs.
LOW, HIGH = 3, 8
#: Early deficits, in per cent of the full budget that follows them.
EARLY = (25, 50, 100)
#: Where windows of half the budget begin, in per cent of it.
STARTS = ("0%", "12.5%", "25%", "50%")


def cpt_choices(
    task: Task,
    names: Sequence[str] = tuple(TEN),
    low: int = LOW,
    high: int = HIGH,
    static: Sequence[int] = (8, 6),
    quantized_aggregation: bool = False,
    cycles: int = DEFAULT_CYCLES,
) -> tuple[Choice, ...]:
    """FP32, static controls, and cyclic schedules with gradients at the highest bits.

    :param names: schedules; CR, or else the first, gets a static control of equal cost.
    :param static: widths of further static controls.
    :param quantized_aggregation: also round what graph networks sum over neighbours.
    :param cycles: cycles of each schedule; the papers use 2 to fine-tune for two epochs.
    """
    operations, steps = _operations(task), task.settings.all_steps
    q_agg = quantized_aggregation
    moving = {name: schedule(name, low=low, high=high, cycles=cycles) for name in names}
    cyclic = {name: _plan(operations, moving[name], name, q_agg) for name in names}
    like = "CR" if "CR" in cyclic else names[0]
    price = mean_bit_operations(operations, cyclic[like], steps)
    equal = equal_cost_plan(operations, price, high, name=f"static at the cost of {like}", quantized_aggregation=q_agg)
    return (
        Choice("FP32", None),
        *(Choice(f"static {bits}", _static(operations, bits, None, q_agg)) for bits in static),
        Choice(f"static at the cost of {like}", equal),
        *(Choice(name, plan) for name, plan in cyclic.items()),
    )


def deficit_choices(task: Task) -> tuple[Choice, ...]:
    """Early low precision before a full budget, sliding windows, single roundings, and controls."""
    operations, budget = _operations(task), int(task.settings.steps)
    choices = [Choice("FP32", None), Choice("no deficit", _static(operations, HIGH))]
    for share in EARLY:
        held = max(1, budget * share // 100)
        window = Deficit(LOW, HIGH, RunPoint(step=0), RunPoint(step=held))
        name = f"early {share}%, then a full budget"
        choices.append(Choice(name, _plan(operations, window, name), (f"hold={held}",)))
    name = f"no deficit, {EARLY[-1]}% longer"
    choices.append(Choice(name, _static(operations, HIGH, name), (f"hold={budget * EARLY[-1] // 100}",)))
    half = {start: _half(start) for start in STARTS}
    choices += [Choice(f"half from {start}", _plan(operations, half[start], f"half from {start}")) for start in STARTS]
    first = half[STARTS[0]]
    price = mean_bit_operations(operations, _plan(operations, first, ""), budget)
    choices.append(Choice("static at the cost of half", equal_cost_plan(operations, price, HIGH, name="equal cost")))
    high = Static(HIGH)
    parts = {
        "weights": Widths(first, high, high),
        "activations": Widths(high, first, high),
        "gradients": Widths(high, high, first),
    }
    choices += [
        Choice(f"half from 0%, {part} only", make_plan(operations, widths, name=f"half from 0%, {part} only"))
        for part, widths in parts.items()
    ]
    return tuple(choices)


def _half(start: str) -> Deficit:
    begin = RunPoint.of(start)
    assert begin.share is not None
    return Deficit(LOW, HIGH, begin, RunPoint(share=begin.share + RunPoint.of("50%").share))  # type: ignore[operator]


def _operations(task: Task) -> list[Operation]:
    target = task.target()
    return record_operations(target.model, target.batch, target.loss)


def _plan(operations: list[Operation], moving: Schedule, name: str, q_agg: bool = False) -> Plan:
    widths = Widths(moving, moving, Static(moving.highest))
    return make_plan(operations, widths, name=name, quantized_aggregation=q_agg)


def _static(operations: list[Operation], bits: int, name: str | None = None, q_agg: bool = False) -> Plan:
    return _plan(operations, Static(bits), name or f"static {bits}", q_agg)


# --- All suites by name


@dataclass(frozen=True)
class Suite:
    """A named list of plans."""

    name: str
    description: str
    #: Plans that are the same for every task.
    choices: tuple[Choice, ...] = ()
    #: Makes the plans that depend on a task's model and steps.
    make: Callable[[Task], tuple[Choice, ...]] | None = None

    def choices_for(self, task: Callable[[], Task]) -> list[Choice]:
        """The plans for a task; `task` is called only if they depend on it."""
        return [*self.choices, *(() if self.make is None else self.make(task()))]


SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite(
            "static",
            "FP32, BF16, and every tensor in 8, 6, 4 and 2 bits; on small tasks 2 bits fail",
            (
                Choice("FP32", None),
                Choice("BF16", "bf16-all"),
                Choice("8 bits", "int8-all"),
                Choice("6 bits", "int6-all"),
                Choice("4 bits", "int4-all"),
                Choice("2 bits", "int2-all"),
            ),
        ),
        Suite(
            "cpt",
            "cyclic precision training at 3-8 bits: FP32, static 8, 6 and one at equal cost, and all ten schedules",
            make=cpt_choices,
        ),
        Suite(
            "deficits",
            "critical learning periods: 3 bits for a while, early or later, of all or of one rounding, and 8 otherwise",
            make=deficit_choices,
        ),
        Suite(
            "assign",
            "assignments of low precision: FP32, operator, uniform low, and 0.3 to 1.0 of all values with promotion",
            make=assign_choices,
        ),
    )
}


def find_suite(name: str) -> Suite:
    """The suite of that name."""
    if name not in SUITES:
        raise RunError(f"there is no suite {name!r}; {nearest_names(name, SUITES)}.")
    return SUITES[name]
