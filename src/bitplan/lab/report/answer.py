"""What an experiment shows, in one sentence: which plan is cheapest without a loss of the metric, and which fail.

Also how numbers and lists are written wherever results are shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bitplan.lab.report.summaries import Experiment, PlanSummary


def answer(experiment: Experiment) -> str:
    """What an experiment shows, with the plans that fail and the runs that have not finished."""
    clauses = [f"On {experiment.name} ({_extent(experiment)}), {_finding(experiment)}"]
    failing = [plan for plan in experiment.plans if plan.verdict == "fails"]
    if failing:
        clauses.append(_failure(experiment, failing))
    missing = [run for run in experiment.runs if run.is_under_way]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        clauses.append(f"{len(missing)} of {counted(len(experiment.runs), 'run')} {verb} not finished")
    return f"{'; '.join(clauses)}."


def best_plan(experiment: Experiment) -> PlanSummary | None:
    """The cheapest plan that keeps the reference's metric.

    If none does, the cheapest whose mean is within the margin though the runs do not decide it; then the closest.
    """
    keeping = [plan for plan in experiment.plans if plan.verdict == "keeps"]
    if able := keeping or [plan for plan in experiment.plans if plan.is_near]:
        return min(able, key=_price)
    sign = -1.0 if experiment.metric.better == "higher" else 1.0
    compared = ("loses", "undecided", "alone")
    others = [plan for plan in experiment.plans if plan.verdict in compared and plan.value is not None]
    return min(others, key=lambda plan: sign * plan.value.mean if plan.value else 0.0, default=None)


def _extent(experiment: Experiment) -> str:
    parts = [counted(len(experiment.seeds), "seed")]
    if (steps := experiment.shared_settings.get("steps")) is not None:
        parts.append(counted(int(steps), "step"))
    return ", ".join(parts)


def _finding(experiment: Experiment) -> str:
    metric, reference = experiment.metric.name, experiment.reference
    if reference is None:
        return _without_reference(experiment)
    assert reference.value is not None
    standard = experiment.metric_text(reference.value.mean)
    best = best_plan(experiment)
    if best is not None and best.verdict == "keeps":
        keeps = "improves on" if best.is_better else "keeps"
        return (
            f"{best.label} {keeps} the {metric} of {reference.label} ({_value(experiment, best)} against {standard})"
            f"{_savings(best, reference)}"
        )
    if best is not None and best.is_near and best.judgement is not None and best.judgement.loss is not None:
        most = "no" if best.judgement.loss.mean <= 0 else f"at most {percent_text(experiment.margin)}"
        return (
            f"the mean {metric} of {best.label} is {most} worse than that of {reference.label} "
            f"({_value(experiment, best)} against {standard}){_savings(best, reference)}, but {_why_undecided(best)}"
        )
    if best is not None:
        keeps = "is within the margin of" if best.verdict == "undecided" else "keeps"
        return (
            f"no plan {keeps} the {metric} of {reference.label} ({standard}): {best.label} comes closest with "
            f"{_value(experiment, best)}{_savings(best, reference)}"
        )
    if all(plan.verdict == "unfinished" for plan in experiment.plans if plan is not reference):
        return f"{reference.label} reaches {metric} {standard}, and nothing else has finished yet"
    return f"no plan keeps the {metric} of {reference.label} ({standard})"


def _why_undecided(plan: PlanSummary) -> str:
    pairs = 0 if plan.judgement is None or plan.judgement.loss is None else plan.judgement.loss.pairs
    if pairs < 2:
        return "one seed decides nothing" if pairs else "they have no seed in common"
    return f"{pairs} seeds do not decide this"


def _without_reference(experiment: Experiment) -> str:
    metric = experiment.metric
    best = best_plan(experiment)
    if best is not None:
        cost = "" if best.cost is None else f" with {percent_text(best.cost)} of FP32's bit operations"
        trivial = ""
        if math.isfinite(metric.trivial):
            trivial = f", and the trivial predictor gets {experiment.metric_text(metric.trivial)}"
        return f"{best.label} reaches {metric.name} {_value(experiment, best)}{cost}{trivial}"
    if any(plan.verdict == "fails" for plan in experiment.plans):
        return "nothing works"
    return "nothing has finished yet"


def _value(experiment: Experiment, plan: PlanSummary) -> str:
    return "nothing" if plan.value is None else experiment.metric_text(plan.value.mean)


def _price(plan: PlanSummary) -> tuple[float, float]:
    infinite = float("inf")
    return (infinite if plan.cost is None else plan.cost, infinite if plan.memory is None else plan.memory)


def _savings(plan: PlanSummary, reference: PlanSummary) -> str:
    parts = []
    if plan.cost is not None and reference.cost:
        parts.append(f"{percent_text(plan.cost / reference.cost)} of its bit operations")
    if plan.memory is not None and reference.memory and not math.isclose(plan.memory, reference.memory, rel_tol=1e-3):
        parts.append(f"{percent_text(plan.memory / reference.memory)} of its tensors' bytes")
    # Emulation counts savings and makes none.
    verb = "would need" if plan.runs[0].execution == "emulate" else "needs"
    return f" and {verb} {' and '.join(parts)}" if parts else ""


def _failure(experiment: Experiment, failing: list[PlanSummary]) -> str:
    if len(failing) > 3:
        return f"{len(failing)} plans fail ({listed([plan.label for plan in failing])})"
    described = []
    for plan in failing:
        measured = plan.value is not None and plan.value.is_finite
        value = f"{experiment.metric.name} {_value(experiment, plan)}, " if measured else ""
        described.append(f"{plan.label} fails ({value}{plan.why})")
    return " and ".join(described)


# --- Numbers and names in text, the same on the page, in the terminal and in a sentence


def percent_text(share: float) -> str:
    """A share in per cent, with two or three significant digits.

    >>> percent_text(1.0), percent_text(0.0625), percent_text(0.00391), percent_text(0.9833)
    ('100 %', '6.2 %', '0.39 %', '98.3 %')
    """
    percent = 100 * share
    if not math.isfinite(percent):
        return number_text(share)
    digits = 0 if abs(percent) >= 99.95 else 1 if abs(percent) >= 1 else 2
    return f"{percent:.{digits}f} %"


def number_text(value: float) -> str:
    """A number with four significant digits.

    >>> number_text(2.302585), number_text(0.00012), number_text(float("nan")), number_text(123456.0)
    ('2.303', '0.00012', 'NaN', '123,456')
    """
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinite"
    if 1000 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def duration_text(seconds: float) -> str:
    """A time.

    >>> duration_text(3.21), duration_text(75.2), duration_text(7300)
    ('3.2 s', '1 min 15 s', '2 h 01 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def listed(names: Sequence[str], most: int = 4) -> str:
    """Names joined for a sentence; a long list is cut.

    >>> listed(["a"]), listed(["a", "b", "c"]), listed(list("abcdefg"))
    ('a', 'a, b and c', 'a, b, c and 4 more')
    """
    if len(names) > most:
        names = [*names[: most - 1], f"{len(names) - most + 1} more"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def counted(count: int, noun: str) -> str:
    """A count with its noun.

    >>> counted(1, "seed"), counted(3, "seed")
    ('1 seed', '3 seeds')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"
