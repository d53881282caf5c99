"""Suites: named lists of plans to compare, some of them made for the model of a task.

Constant widths are schedules here, too, so that all plans of a suite differ only in schedules and share one compiled
graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bitplan.analysis.targets import find_function, parse_file_name
from bitplan.capture.recording import Operation
from bitplan.errors import RunError, nearest_names
from bitplan.lab.compare.folder import Choice
from bitplan.lab.compare.suite_options import SuiteOptions
from bitplan.lab.task_planners import assign_task
from bitplan.lab.tasks.task import Task
from bitplan.planners.assign.assign import LOSS_SCALE, AssignRequest
from bitplan.planners.assign.levels import PAPER, Formats
from bitplan.planners.cpt import Widths, equal_cost_plan, make_plan, mean_bit_operations, record_operations
from bitplan.planners.registry import Planner, planned_by, registry
from bitplan.plans import Plan
from bitplan.plans.schedules import TEN, Deficit, RunPoint, Schedule, Static, schedule
from bitplan.plans.schedules.cyclic import DEFAULT_CYCLES, Period

# --- Assignments of low precision, against the baselines of the paper

#: Shares of values in low precision.
RATIOS = (0.3, 0.5, 0.7, 0.9, 1.0)
#: Label -> baseline.
_BASELINES = {"operator": "operator", "operator prime": "operator-prime", "uniform low": "uniform-low"}
#: Seeds of the random orders, as many as the paper has.
_RANDOM_ORDERS = 3


def assign_choices(
    task: Task,
    ratios: Sequence[float] = RATIOS,
    formats: Formats = PAPER,
    *,
    baselines: Sequence[str] = ("operator", "uniform low"),
    orders: Sequence[str] = ("largest",),
    promotions: Sequence[float] | None = None,
) -> tuple[Choice, ...]:
    """FP32, the baselines without promotion, and assignments with promotion.

    :param baselines: labels, such as ``operator prime``.
    :param orders: in which groups go down; ``random`` stands for three random orders.
    :param promotions: thresholds, 0 for none; by default the formats' own.
    """
    scale = (f"loss_scale={LOSS_SCALE:g}",) if formats.needs_loss_scale else ()
    requests = {label: AssignRequest(baseline=_BASELINES[label]) for label in baselines}
    for ratio in ratios:
        for order in orders:
            for seed in range(_RANDOM_ORDERS if order == "random" else 1):
                for promotion in (None,) if promotions is None else promotions:
                    words = [f"r = {ratio:g}"]
                    words += [] if order == "largest" else [f"{order} {seed}" if order == "random" else order]
                    words += [] if promotion is None else [f"promotion {promotion:g}" if promotion else "no promotion"]
                    threshold: float | bool = True if promotion is None else promotion or False
                    request = AssignRequest(ratio=ratio, order=order, seed=seed, promotion=threshold)
                    requests[", ".join(words)] = request
    made = {label: assign_task(task, request, formats).plan for label, request in requests.items()}
    return (Choice("FP32", None), *(Choice(label, plan, scale) for label, plan in made.items()))


# --- Cyclic precision and deficits

#: The range of bits of both suites: that of Wolfe & Kyrillidis for CIFAR and graphs.
LOW, HIGH = 3, 8
#: Early deficits, in per cent of the full budget that follows them.
EARLY = (25, 50, 100)
#: Where windows of half the budget begin, in per cent of it.
STARTS = ("0%", "12.5%", "25%", "50%")


@dataclass(frozen=True)
class _Maker:
    """Makes the papers' plans for the operations of a model."""

    operations: list[Operation]
    quantized_aggregation: bool = False
    as_published: bool = False
    #: None: the highest bits of the plan.
    gradient_bits: int | None = None

    def plan(self, moving: Schedule, name: str) -> Plan:
        return self.with_widths(Widths(moving, moving, Static(self.gradient_bits or moving.highest)), name)

    def with_widths(self, widths: Widths, name: str) -> Plan:
        return make_plan(
            self.operations,
            widths,
            name=name,
            quantized_aggregation=self.quantized_aggregation,
            as_published=self.as_published,
        )

    def static(self, bits: int, name: str | None = None) -> Plan:
        return self.plan(Static(bits), name or f"static {bits}")

    def equal_cost(self, plan: Plan, steps: int, high: int, name: str) -> Plan:
        """The static plan that costs as much as `plan` in a run of `steps` steps."""
        return equal_cost_plan(
            *(self.operations, mean_bit_operations(self.operations, plan, steps), self.gradient_bits or high),
            name=name,
            quantized_aggregation=self.quantized_aggregation,
            as_published=self.as_published,
        )


def cpt_choices(
    task: Task,
    names: Sequence[str] = tuple(TEN),
    low: int = LOW,
    high: int = HIGH,
    static: Sequence[int] = (8, 6),
    quantized_aggregation: bool = False,
    cycles: int = DEFAULT_CYCLES,
    *,
    equal_to: Sequence[str] | None = None,
    gradient_bits: int | None = None,
    period: Period = "exact",
    as_published: bool = False,
) -> tuple[Choice, ...]:
    """FP32, static controls, and cyclic schedules with gradients at the highest bits.

    :param names: schedules.
    :param equal_to: the schedules that get a static control of equal cost; by default CR, or else the first.
    :param static: widths of further static controls.
    :param quantized_aggregation: also round what graph networks sum over neighbours.
    :param cycles: cycles of each schedule; the papers use 2 to fine-tune for two epochs.
    :param gradient_bits: of all plans, static ones too; by default each plan's highest bits.
    :param period: the length of a cycle.
    :param as_published: also round what the authors' code rounds beyond products.
    """
    maker = _Maker(_operations(task), quantized_aggregation, as_published, gradient_bits)
    moving = {name: schedule(name, low=low, high=high, cycles=cycles, period=period) for name in names}
    cyclic = {name: maker.plan(moving[name], name) for name in names}
    if equal_to is None:
        equal_to = ("CR" if "CR" in cyclic else names[0],)
    equal = {name: f"static at the cost of {name}" for name in equal_to}
    steps = task.settings.all_steps
    return (
        Choice("FP32", None),
        *(Choice(f"static {bits}", maker.static(bits)) for bits in static),
        *(Choice(label, maker.equal_cost(cyclic[name], steps, high, label)) for name, label in equal.items()),
        *(Choice(name, plan) for name, plan in cyclic.items()),
    )


def deficit_choices(
    task: Task,
    low: int = LOW,
    high: int = HIGH,
    *,
    gradient_bits: int | None = None,
    quantized_aggregation: bool = False,
    as_published: bool = False,
) -> tuple[Choice, ...]:
    """Early low precision before a full budget, sliding windows, single roundings, and controls."""
    maker = _Maker(_operations(task), quantized_aggregation, as_published, gradient_bits)
    budget = int(task.settings.steps)
    choices = [Choice("FP32", None), Choice("no deficit", maker.static(high))]
    for share in EARLY:
        held = max(1, budget * share // 100)
        window = Deficit(low, high, RunPoint(step=0), RunPoint(step=held))
        name = f"early {share}%, then a full budget"
        choices.append(Choice(name, maker.plan(window, name), (f"hold={held}",)))
    name = f"no deficit, {EARLY[-1]}% longer"
    choices.append(Choice(name, maker.static(high, name), (f"hold={budget * EARLY[-1] // 100}",)))
    half = {start: _half(start, low, high) for start in STARTS}
    choices += [Choice(f"half from {start}", maker.plan(half[start], f"half from {start}")) for start in STARTS]
    first = half[STARTS[0]]
    equal = maker.equal_cost(maker.plan(first, ""), budget, high, "equal cost")
    choices.append(Choice("static at the cost of half", equal))
    top = Static(high)
    gradients = Static(gradient_bits or high)
    parts = {
        "weights": Widths(first, top, gradients),
        "activations": Widths(top, first, gradients),
        "gradients": Widths(top, top, first),
    }
    choices += [
        Choice(f"half from 0%, {part} only", maker.with_widths(widths, f"half from 0%, {part} only"))
        for part, widths in parts.items()
    ]
    return tuple(choices)


def _half(start: str, low: int, high: int) -> Deficit:
    begin = RunPoint.of(start)
    assert begin.share is not None
    return Deficit(low, high, begin, RunPoint(share=begin.share + RunPoint.of("50%").share))  # type: ignore[operator]


def _operations(task: Task) -> list[Operation]:
    target = task.target()
    return record_operations(target.model, target.batch, target.loss)


# --- All suites by name


def _make_cpt(task: Task, options: dict[str, Any]) -> tuple[Choice, ...]:
    low, high = options.pop("bits", (LOW, HIGH))
    # The papers' static controls: 8 and 6 bits beside ranges up to 8, and 6 beside ranges up to 6.
    static = options.pop("static", tuple(dict.fromkeys((high, 6))))
    names = options.pop("schedules", tuple(TEN))
    return cpt_choices(task, names, low, high, static, **options)


def _make_deficits(task: Task, options: dict[str, Any]) -> tuple[Choice, ...]:
    low, high = options.pop("bits", (LOW, HIGH))
    return deficit_choices(task, low, high, **options)


def _make_assign(task: Task, options: dict[str, Any]) -> tuple[Choice, ...]:
    return assign_choices(task, options.pop("ratios", RATIOS), baselines=tuple(_BASELINES), **options)


@dataclass(frozen=True)
class Suite:
    """A named list of plans."""

    name: str
    description: str
    #: Plans that are the same for every task.
    choices: tuple[Choice, ...] = ()
    #: Makes the plans that depend on a task's model and steps, with the chosen options.
    make: Callable[[Task, dict[str, Any]], tuple[Choice, ...]] | None = None
    #: Fields of :class:`SuiteOptions` that the suite has.
    options: tuple[str, ...] = ()

    def choices_for(self, task: Callable[[], Task], options: SuiteOptions | None = None) -> list[Choice]:
        """The plans for a task; `task` is called only if they depend on it."""
        chosen = (options or SuiteOptions()).require(self.name, self.options)
        return [*self.choices, *(() if self.make is None else self.make(task(), dict(chosen)))]


#: Options of plans of cyclic precision.
_ROUNDING = ("gradient_bits", "quantized_aggregation", "as_published")

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
            make=_make_cpt,
            options=("bits", "cycles", "static", "schedules", "period", *_ROUNDING),
        ),
        Suite(
            "deficits",
            "critical learning periods: 3 bits for a while, early or later, of all or of one rounding, and 8 otherwise",
            make=_make_deficits,
            options=("bits", *_ROUNDING),
        ),
        Suite(
            "assign",
            "assignments of low precision: FP32, operator, operator prime, uniform low, and 0.3 to 1.0 of all values "
            "with promotion",
            make=_make_assign,
            options=("ratios", "orders", "promotions"),
        ),
    )
}


def find_suite(name: str) -> Suite:
    """The suite of that name, or FP32 and the plans of a planner: of a registered one, or ``file.py:function``."""
    if name in SUITES:
        return SUITES[name]
    if parse_file_name(name) is None and name not in registry.names():
        raise RunError(f"there is no suite {name!r}; {nearest_names(name, (*SUITES, *registry.names()))}")
    planner = find_function(name, registry)
    return Suite(name, "FP32, and the plans of a planner", make=lambda task, options: _planned(name, planner, task))


def _planned(name: str, planner: Planner, task: Task) -> tuple[Choice, ...]:
    target = task.target()
    plans = planned_by(planner, target.model, target.batch, target.loss)
    return (Choice("FP32", None), *(Choice(label, plan) for label, plan in plans.items()))
