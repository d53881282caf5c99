"""Which plans of an experiment had low precision for a while, and when: what charts of critical periods are made from.

Everything is read from the runs' plans and settings, so that plans of a user's own count as those of the suite do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bitplan.errors import BitplanError
from bitplan.lab.report.runs import Run
from bitplan.lab.report.summaries import Experiment, PlanSummary
from bitplan.plans import Plan, QuantizerSpec
from bitplan.plans.schedules import Deficit, Schedule, Static

#: What is rounded, and how plans call it.
_PARTS = {
    "weights": {"w", "weight", "fprop.w", "dgrad.w"},
    "activations": {"x", "activation", "fprop.x", "wgrad.x"},
    "gradients": {"dy", "grad_activation", "grad_weight", "dgrad.dy", "wgrad.dy"},
}
#: Places that stand for both operands of a product.
_BOTH = {"fprop"}


@dataclass(frozen=True)
class Window:
    """When a plan had low precision, in steps: from `start` on, and no more at `end`."""

    start: int
    end: int
    low: int
    high: int
    #: Steps of the recipe, without those that are held before it.
    budget: int
    #: What had the low precision: weights, activations, gradients.
    parts: tuple[str, ...]

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def is_of_forward(self) -> bool:
        """Whether weights and activations had it, both."""
        return {"weights", "activations"} <= set(self.parts)


@dataclass(frozen=True)
class Course:
    """A plan of the experiment, with its window if it has one."""

    plan: PlanSummary
    #: Its place in the experiment.
    number: int
    window: Window | None
    #: Steps before its recipe begins.
    hold: int
    budget: int
    #: The one width of all that it rounds; None where there are several, or no plan at all.
    width: int | None

    @property
    def is_early(self) -> bool:
        """Whether its window comes first, and a full budget after it."""
        return self.window is not None and self.window.start == 0 and 0 < self.window.end == self.hold

    @property
    def recovers_from(self) -> int:
        """The step at which low precision ends; without any, that at which the recipe begins."""
        return self.hold if self.window is None else self.window.end


def courses_of(experiment: Experiment) -> list[Course]:
    """Every plan of the experiment; none where no plan has a window."""
    found = [_course(plan, number) for number, plan in enumerate(experiment.plans)]
    return found if any(course.window is not None for course in found) else []


def without_deficit(courses: Sequence[Course]) -> Course | None:
    """The plan that has the high precision of the others throughout, and no step more."""
    high = next((course.window.high for course in courses if course.window is not None), None)
    plain = [course for course in courses if course.window is None and course.hold == 0 and course.width == high]
    return plain[0] if plain and high is not None else None


def early_windows(courses: Sequence[Course]) -> list[tuple[Window, Course]]:
    """Windows that come first and are followed by a full budget, the shortest first."""
    found = [(course.window, course) for course in courses if course.window is not None and course.is_early]
    return sorted(found, key=lambda pair: pair[0].length)


def sliding_windows(courses: Sequence[Course]) -> list[tuple[Window, Course]]:
    """Windows within the budget, the earliest first."""
    found = [(course.window, course) for course in courses if course.window is not None and course.hold == 0]
    return sorted(found, key=lambda pair: pair[0].start)


def recovering(courses: Sequence[Course]) -> list[Course]:
    """Plans whose forward pass had low precision for a while, and those that had the high one throughout."""
    high = {course.window.high for course in courses if course.window is not None}
    return [
        course
        for course in courses
        if (course.window.is_of_forward if course.window is not None else course.width in high)
    ]


def _course(plan: PlanSummary, number: int) -> Course:
    run = plan.runs[0]
    hold, budget = _whole(run, "hold"), _whole(run, "steps")
    read = _read(run)
    window = None if read is None else _window(read, hold, budget)
    return Course(plan, number, window, hold, budget, None if read is None or window is not None else _width(read))


def _read(run: Run) -> Plan | None:
    if run.plan_text is None:
        return None
    try:
        return Plan.from_yaml(run.plan_text)
    except BitplanError:  # made by another version, perhaps: its row is there all the same
        return None


def _window(plan: Plan, hold: int, budget: int) -> Window | None:
    total = hold + budget
    for name, schedule in plan.all_schedules.items():
        if not isinstance(schedule, Deficit) or budget < 1:
            continue
        start, end = (min(moment.first_step(total), total) for moment in (schedule.start, schedule.end))
        followed = {place for place, spec in _specs(plan) if spec.bits == name}
        if followed & _BOTH:
            followed |= {"w", "x"}
        parts = tuple(words for words, places in _PARTS.items() if places & followed)
        return Window(start, end, schedule.low, schedule.high, budget, parts)
    return None


def _specs(plan: Plan) -> Iterator[tuple[str, QuantizerSpec]]:
    """Where the plan's rules round, and by what; quantizers that change as a whole are no deficits."""
    named = plan.all_quantizers
    for rule in plan.all_rules:
        for place, use in rule.quantizers:
            spec = named.get(use) if isinstance(use, str) else use
            if isinstance(spec, QuantizerSpec):
                yield place, spec


def _width(plan: Plan) -> int | None:
    widths = {_constant_width(spec, plan.all_schedules) for _, spec in _specs(plan)}
    return widths.pop() if len(widths) == 1 else None


def _constant_width(spec: QuantizerSpec, schedules: Mapping[str, Schedule]) -> int | None:
    """Of integers that have one width throughout, as their format's name or a schedule that stays says."""
    if spec.format == "int":
        followed = schedules.get(spec.bits) if isinstance(spec.bits, str) else spec.bits
        return followed.width if isinstance(followed, Static) else followed if isinstance(followed, int) else None
    digits = spec.format.removeprefix("int")
    return int(digits) if digits.isdigit() else None


def _whole(run: Run, name: str) -> int:
    value = run.settings.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
