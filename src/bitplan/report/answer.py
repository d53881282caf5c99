"""The answer in one sentence: which plan is cheapest without a loss, and which fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitplan.report.words import counted, listed, percent_words

if TYPE_CHECKING:
    from bitplan.report.summaries import Experiment, PlanSummary


def answer(experiment: Experiment) -> str:
    """What an experiment shows, in one sentence that names the plans that fail, and runs that are not there yet."""
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
    """The cheapest plan that keeps the reference's metric; if none does, the one that comes closest."""
    keeping = [plan for plan in experiment.plans if plan.verdict == "keeps"]
    if keeping:
        return min(keeping, key=_price)
    sign = -1.0 if experiment.metric.better == "higher" else 1.0
    others = [plan for plan in experiment.plans if plan.verdict in ("loses", "alone") and plan.value is not None]
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
    standard = experiment.metric_words(reference.value.mean)
    best = best_plan(experiment)
    if best is not None and best.verdict == "keeps":
        return (
            f"{best.label} keeps the {metric} of {reference.label} ({_value(experiment, best)} against {standard})"
            f"{_savings(best, reference)}"
        )
    if best is not None:
        return (
            f"no plan keeps the {metric} of {reference.label} ({standard}): {best.label} comes closest with "
            f"{_value(experiment, best)}{_savings(best, reference)}"
        )
    if all(plan.verdict == "unfinished" for plan in experiment.plans if plan is not reference):
        return f"{reference.label} reaches {metric} {standard}, and nothing else has finished yet"
    return f"no plan keeps the {metric} of {reference.label} ({standard})"


def _without_reference(experiment: Experiment) -> str:
    metric = experiment.metric
    best = best_plan(experiment)
    if best is not None:
        words = f"{best.label} reaches {metric.name} {_value(experiment, best)}"
        if best.cost is not None:
            words += f" with {percent_words(best.cost)} of FP32's bit operations"
        words += f", and the trivial predictor gets {experiment.metric_words(metric.trivial)}"
        return words
    if any(plan.verdict == "fails" for plan in experiment.plans):
        return "nothing works"
    return "nothing has finished yet"


def _value(experiment: Experiment, plan: PlanSummary) -> str:
    return "nothing" if plan.value is None else experiment.metric_words(plan.value.mean)


def _price(plan: PlanSummary) -> tuple[float, float]:
    infinite = float("inf")
    return (infinite if plan.cost is None else plan.cost, infinite if plan.memory is None else plan.memory)


def _savings(plan: PlanSummary, reference: PlanSummary) -> str:
    parts = []
    if plan.cost is not None and reference.cost:
        parts.append(f"{percent_words(plan.cost / reference.cost)} of its bit operations")
    if plan.memory is not None and reference.memory:
        parts.append(f"{percent_words(plan.memory / reference.memory)} of its tensors' bytes")
    # What is emulated is counted, not saved.
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
