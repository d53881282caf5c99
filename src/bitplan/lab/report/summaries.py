"""Experiments: plans with mean and spread over seeds, judged against a reference.

A **plan's row** holds the runs that differ in nothing but the seed. An **experiment** holds the plans of one task on
one network and its data. The **reference** is the row without a plan, or else the most expensive that finished.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bitplan.errors import RunError
from bitplan.lab.report.answer import counted, number_text, percent_text
from bitplan.lab.report.runs import Run, SiteRecord, read_runs
from bitplan.lab.tasks.task import Metric
from bitplan.significance import Difference, Judgement, judge_all
from bitplan.tables import Table

if TYPE_CHECKING:
    import pandas

#: The margin of verdicts, as a share of the reference's mean metric: a plan that loses less keeps the metric.
MARGIN = 0.01
#: A plan fails if it loses more than this share of what the reference gains over the trivial predictor.
FAILING_LOSS = 0.5
#: Settings of the network and of the data: runs that differ in one of them are not compared with each other.
#: Those of the recipe (steps, lr, loss_scale, ...) are absent, since plans may differ in them on purpose.
OF_THE_NETWORK = (
    "data",
    "size",
    "length",
    "vocabulary",
    "level",
    "model",
    "width",
    "layers",
    "heads",
    "features",
    "levels",
    "head",
    "norm",
)

Verdict = Literal["reference", "keeps", "loses", "undecided", "fails", "unfinished", "alone"]


@dataclass(frozen=True)
class Spread:
    """Mean and spread of a value over several runs."""

    mean: float
    #: The sample standard deviation; 0 for a single run.
    deviation: float
    low: float
    high: float
    count: int

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.mean)


def spread(values: Iterable[float | None]) -> Spread | None:
    """The spread of the values that are not None; None where all are.

    >>> spread([0.25, 0.75, None])
    Spread(mean=0.5, deviation=0.3535533905932738, low=0.25, high=0.75, count=2)
    >>> spread([None]) is None
    True
    """
    numbers = [value for value in values if value is not None]
    if not numbers:
        return None
    if not all(map(math.isfinite, numbers)):
        return Spread(math.nan, math.nan, math.nan, math.nan, len(numbers))
    deviation = statistics.stdev(numbers) if len(numbers) > 1 else 0.0
    return Spread(statistics.fmean(numbers), deviation, min(numbers), max(numbers), len(numbers))


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = spread(values)
    return None if numbers is None else numbers.mean


@dataclass(frozen=True)
class PlanSummary:
    """The runs of one plan that differ in the seed only, with mean and spread."""

    label: str
    runs: tuple[Run, ...]
    verdict: Verdict = "alone"
    #: The reason for the verdict.
    why: str = ""
    #: The comparison with the reference over seeds; None for the reference and for plans that fail or are unfinished.
    judgement: Judgement | None = None
    #: Whether no other plan that works is both cheaper (in bit operations; in bytes) and better.
    on_cost_front: bool = False
    on_memory_front: bool = False

    @property
    def metric(self) -> Metric:
        return self.runs[0].metric

    @property
    def is_better(self) -> bool:
        """Whether it is surely better than the reference."""
        return self.judgement is not None and self.judgement.is_better

    @property
    def is_near(self) -> bool:
        """Whether its mean is within the margin, though runs do not decide whether it keeps the metric."""
        return self.verdict == "undecided" and self.judgement is not None and self.judgement.is_near

    @property
    def by_seed(self) -> dict[int, float]:
        """The metric of each seed with a value; the last run of a seed counts."""
        return {run.seed: run.value for run in self.judged if run.value is not None}

    @property
    def has_plan(self) -> bool:
        return self.runs[0].plan is not None

    @cached_property
    def judged(self) -> tuple[Run, ...]:
        """The finished runs, or all where none has finished: those whose values count."""
        return tuple(run for run in self.runs if run.is_finished) or self.runs

    @cached_property
    def value(self) -> Spread | None:
        """The metric after the last step."""
        return spread(run.value for run in self.judged)

    @property
    def has_value(self) -> bool:
        return self.value is not None and self.value.is_finite

    @cached_property
    def cost(self) -> float | None:
        """Bit operations of a whole run as a share of what FP32 needs for the reference's run."""
        return _mean(run.total_cost for run in self.judged)

    @cached_property
    def memory(self) -> float | None:
        """Bytes of all classes of tensors."""
        return _mean(run.total_memory for run in self.judged)

    @cached_property
    def memory_classes(self) -> dict[str, float]:
        """Bytes of each class of tensors, mean over runs."""
        names = dict.fromkeys(name for run in self.judged for name in run.memory)
        means = {name: _mean(run.memory.get(name) for run in self.judged) for name in names}
        return {name: mean for name, mean in means.items() if mean is not None}

    @cached_property
    def mean_bits(self) -> float | None:
        return _mean(run.mean_bits for run in self.judged)

    @cached_property
    def seconds(self) -> float | None:
        return _mean(run.seconds for run in self.judged)

    @cached_property
    def step_seconds(self) -> float | None:
        """The measured time of a step."""
        return _mean(run.step_seconds for run in self.judged)

    @cached_property
    def peak(self) -> float | None:
        """The largest measured peak of its runs, in bytes."""
        return max((run.peak for run in self.judged if run.peak), default=None)

    def count(self, status: str) -> int:
        """How many of its runs have that status."""
        return sum(run.status == status for run in self.runs)

    @property
    def status_text(self) -> str:
        """How many runs did not finish; empty where all did."""
        statuses = ("diverged", "stopped", "running", "unfinished")
        odd = [(status, self.count(status)) for status in statuses if self.count(status)]
        return ", ".join(f"{count} of {len(self.runs)} {status}" for status, count in odd)

    @cached_property
    def sites(self) -> list[SiteRecord]:
        """The format of every tensor, with errors as means over runs."""
        gathered: dict[tuple[str, str], list[SiteRecord]] = {}
        for run in self.runs:
            for site in run.sites:
                gathered.setdefault((site.site, site.role), []).append(site)
        return [_mean_site(records) for records in gathered.values()]


@dataclass(frozen=True)
class Experiment:
    """All plans of one task, on one network."""

    task: str
    metric: Metric
    plans: tuple[PlanSummary, ...]
    #: How it differs from other experiments of its task in the report, such as ``model resnet20``; often empty.
    variant: str = ""
    #: The share of the reference's metric that a plan may lose and still keeps it.
    margin: float = MARGIN

    @property
    def name(self) -> str:
        """Its title."""
        return f"{self.task}, {self.variant}" if self.variant else self.task

    @property
    def runs(self) -> list[Run]:
        return [run for plan in self.plans for run in plan.runs]

    @property
    def reference(self) -> PlanSummary | None:
        return next((plan for plan in self.plans if plan.verdict == "reference"), None)

    @property
    def seeds(self) -> list[int]:
        return sorted({run.seed for run in self.runs})

    @cached_property
    def metric_is_share(self) -> bool:
        """Whether its metric is a share such as accuracy, which is shown in per cent."""
        values = [self.metric.trivial, *(run.value for run in self.runs if run.value is not None)]
        return "accuracy" in self.metric.name and all(0 <= value <= 1 for value in values if math.isfinite(value))

    @property
    def metric_scale(self) -> int:
        """What charts multiply the metric with: 100 for per cent."""
        return 100 if self.metric_is_share else 1

    def metric_text(self, value: float) -> str:
        """A value of the metric."""
        return percent_text(value) if self.metric_is_share else number_text(value)

    def deviation_text(self, value: float) -> str:
        """A spread of the metric."""
        if not self.metric_is_share or not math.isfinite(value):
            return number_text(value)
        return f"{100 * value:.1f}" if value >= 0.0005 else f"{100 * value:.2f}"

    def spread_text(self, plan: PlanSummary) -> str:
        """Mean and, over several runs, spread of a plan's metric."""
        if plan.value is None:
            return "-"
        mean = self.metric_text(plan.value.mean)
        if plan.value.count < 2 or not plan.value.is_finite:
            return mean
        if self.metric_is_share:
            return f"{mean.removesuffix(' %')} ± {self.deviation_text(plan.value.deviation)} %"
        return f"{mean} ± {self.deviation_text(plan.value.deviation)}"

    @property
    def answer(self) -> str:
        """What its runs show, in one sentence."""
        from bitplan.lab.report.answer import answer

        return answer(self)

    def _repr_html_(self) -> str:
        from bitplan.lab.report.page import summary_html

        return summary_html(self)

    @property
    def changes_bytes(self) -> bool:
        """Whether its plans differ in the bytes of a step's tensors: plans of operands alone change none."""
        sizes = [plan.memory for plan in self.plans if plan.memory]
        return bool(sizes) and max(sizes) > 1.001 * min(sizes)

    @property
    def working(self) -> list[PlanSummary]:
        """The plans that have a value and do not fail."""
        return [plan for plan in self.plans if plan.has_value and plan.verdict != "fails"]

    @property
    def has_lengths(self) -> bool:
        """Whether its runs differ in length, so that costs are not those of one iteration."""
        return any(run.length != 1 for run in self.runs)

    @property
    def cost_unit(self) -> str:
        """What costs are shares of."""
        return "FP32 in a run as long as the reference's" if self.has_lengths else "FP32"

    @property
    def shared_settings(self) -> dict[str, Any]:
        """The settings that all its runs have in common."""
        runs = self.runs
        first = runs[0].settings
        return {key: value for key, value in first.items() if all(run.settings.get(key) == value for run in runs)}


@dataclass(frozen=True)
class Report:
    """All experiments in some folders."""

    experiments: tuple[Experiment, ...]

    @classmethod
    def of(cls, paths: Iterable[str | Path], margin: float = MARGIN) -> Report:
        """The report on all runs in these folders.

        :param margin: the share of the reference's metric that a plan may lose and still keeps it.
        """
        return _report(read_runs(Path(path) for path in paths), checked_margin(margin))

    @property
    def runs(self) -> list[Run]:
        return [run for experiment in self.experiments for run in experiment.runs]

    @property
    def answer(self) -> str:
        """One sentence for each task."""
        return " ".join(experiment.answer for experiment in self.experiments)

    def to_pandas(self) -> pandas.DataFrame:
        """One line per run, with the columns of ``bitplan report --csv``."""
        from bitplan.lab.report.tables import run_record

        records = [run_record(run) for run in self.runs]
        columns = {name: (lambda record, name=name: record[name]) for name in records[0]}
        return Table(records, columns).to_pandas()

    def __repr__(self) -> str:
        return f"<Report: {self.answer}>"

    def _repr_html_(self) -> str:
        return "".join(experiment._repr_html_() for experiment in self.experiments)


def checked_margin(margin: float) -> float:
    """The margin; raises an error where it is no share."""
    if not 0 < margin < 1:
        raise RunError(f"the margin is {margin:g}; it must be a share between 0 and 1, such as {MARGIN}.")
    return margin


def _report(runs: Sequence[Run], margin: float) -> Report:
    """The report on these runs."""
    by_task: dict[tuple[str, Metric], dict[str, list[Run]]] = {}
    for run in runs:
        # A trivial predictor may depend on the settings; the name and the direction make a metric.
        networks = by_task.setdefault((run.task, replace(run.metric, trivial=0.0)), {})
        networks.setdefault(json.dumps(_network(run), default=str), []).append(run)
    return Report(
        tuple(
            _experiment(task, own, variant, margin)
            for (task, _), networks in by_task.items()
            for own, variant in zip(networks.values(), _variants(list(networks.values())), strict=True)
        )
    )


def _network(run: Run) -> dict[str, Any]:
    """The settings of its network and its data; of a path only the name, since copies of data have several paths."""
    settings = {key: run.settings.get(key) for key in OF_THE_NETWORK}
    return settings | {"data": Path(str(settings["data"])).name} if settings["data"] else settings


def _variants(groups: list[list[Run]]) -> list[str]:
    """How the networks of one task differ, as text."""
    networks = [_network(group[0]) for group in groups]
    odd = [key for key in OF_THE_NETWORK if any(network[key] != networks[0][key] for network in networks)]
    return [", ".join(f"{key} {network[key]}" for key in odd if network[key] is not None) for network in networks]


def _experiment(task: str, runs: list[Run], variant: str, margin: float) -> Experiment:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(_identity(run), []).append(run)
    labels = _labels(list(groups.values()))
    plans = [
        PlanSummary(label, tuple(sorted(own, key=lambda run: run.seed)))
        for label, own in zip(labels, groups.values(), strict=True)
    ]
    reference = _reference(plans)
    if reference is not None:
        number = plans.index(reference)
        plans = [_with_lengths(plan, reference) for plan in plans]
        reference = plans[number]
    judged = _judged(plans, reference, margin)
    return Experiment(task, runs[0].metric, tuple(_with_fronts(judged)), variant, margin)


def _identity(run: Run) -> str:
    """Everything that defines a run except its seed."""
    facts = [run.label, run.plan_text, run.execution, run.device, run.compiled, dict(run.settings)]
    return json.dumps(facts, sort_keys=True, default=str)


def _labels(groups: list[list[Run]]) -> list[str]:
    """The label of each group; equal labels are followed by the differences."""
    labels = []
    for group in groups:
        run = group[0]
        twins = [other[0] for other in groups if other[0].label == run.label]
        labels.append(run.label + (f" ({_difference(run, twins)})" if len(twins) > 1 else ""))
    repeated = {label for label in labels if labels.count(label) > 1}
    return [
        f"{label}, {group[0].folder.name}" if label in repeated else label
        for label, group in zip(labels, groups, strict=True)
    ]


def _difference(run: Run, twins: list[Run]) -> str:
    def facts(other: Run) -> Mapping[str, Any]:
        return {"execution": other.execution, "device": other.device, "compile": other.compiled, **other.settings}

    mine = facts(run)
    odd = [key for key in mine if any(facts(twin).get(key) != mine[key] for twin in twins)]
    return ", ".join(f"{key}={mine[key]}" for key in odd) or run.folder.name


def _reference(plans: Sequence[PlanSummary]) -> PlanSummary | None:
    """The plan that the others are judged against; a plan alone has none.

    It is the one that runs name. If none does, of several rows without a plan it is the longest, and of these the best:
    short ones are left from trials.
    """
    usable = [plan for plan in plans if plan.value is not None and plan.count("finished")]
    if len(plans) < 2 or not usable:
        return None
    folders = {run.reference.resolve() for plan in plans for run in plan.runs if run.reference is not None}
    named = [plan for plan in usable if any(run.folder.resolve() in folders for run in plan.runs)]
    plain = named or [plan for plan in usable if not plan.has_plan]
    if not plain:
        return max(usable, key=lambda plan: plan.cost or 0.0)
    sign = 1.0 if plain[0].metric.better == "higher" else -1.0

    def length_and_value(plan: PlanSummary) -> tuple[int, bool, float]:
        assert plan.value is not None
        return max(run.step for run in plan.judged), plan.value.is_finite, sign * plan.value.mean

    return max(plain, key=length_and_value)


def _with_lengths(plan: PlanSummary, reference: PlanSummary) -> PlanSummary:
    """The plan with the lengths of its runs relative to the reference's."""
    return replace(plan, runs=tuple(replace(run, length=_length(run, reference.judged[0])) for run in plan.runs))


def _length(run: Run, reference: Run) -> float:
    """By FP32's bit operations, which count batches of different sizes, too; by steps where a run recorded none."""
    pairs = (run.fp32_operations, reference.fp32_operations), (run.planned_steps, reference.planned_steps)
    length = next((own / whole for own, whole in pairs if own and whole), 1.0)
    return 1.0 if math.isclose(length, 1.0, rel_tol=1e-6) else length


def _judged(plans: Sequence[PlanSummary], reference: PlanSummary | None, margin: float) -> list[PlanSummary]:
    """The plans with their verdicts; those that are compared with the reference are a family of hypotheses."""
    judged, compared = [*plans], dict[int, Mapping[int, float]]()
    for number, plan in enumerate(plans):
        verdict = _without_comparison(plan, reference)
        if verdict is None:
            compared[number] = plan.by_seed
        else:
            judged[number] = replace(plan, verdict=verdict[0], why=verdict[1])
    if not compared:
        return judged
    assert reference is not None
    assert reference.value is not None
    allowed = margin * abs(reference.value.mean)
    judgements = judge_all(compared, reference.by_seed, allowed, reference.metric.better)
    for number, judgement in judgements.items():
        judged[number] = _compared(plans[number], reference, judgement, margin)
    return judged


def _compared(plan: PlanSummary, reference: PlanSummary, judgement: Judgement, margin: float) -> PlanSummary:
    assert plan.value is not None
    assert reference.value is not None
    gain, metric = abs(reference.value.mean - plan.metric.trivial), plan.metric
    lost = reference.value.mean - plan.value.mean
    lost = lost if metric.better == "higher" else -lost
    is_working = math.isfinite(gain) and metric.is_better(reference.value.mean, metric.trivial)
    if is_working and lost > FAILING_LOSS * gain:
        why = f"loses more than half of what {reference.label} gains over the trivial predictor"
        return replace(plan, verdict="fails", why=why)
    return replace(plan, verdict=judgement.verdict, why=_reason(judgement, reference, margin), judgement=judgement)


def _without_comparison(plan: PlanSummary, reference: PlanSummary | None) -> tuple[Verdict, str] | None:
    """The verdict on a plan that needs no other plan, with its reason; None where it is to be compared."""
    value, metric = plan.value, plan.metric
    if diverged := plan.count("diverged"):
        return "fails", f"diverged in {diverged} of {counted(len(plan.runs), 'run')}"
    if not plan.count("finished"):
        return "unfinished", plan.runs[0].why.strip().rstrip(".") or "not finished"
    if value is None:
        return "fails", f"no {metric.name} was measured"
    if not value.is_finite:
        return "fails", f"its {metric.name} is not a number"
    if math.isfinite(metric.trivial) and not metric.is_better(value.mean, metric.trivial):
        return "fails", "no better than the trivial predictor"
    if plan is reference:
        return "reference", "what the others are judged by"
    if reference is None or reference.value is None or not reference.value.is_finite:
        return "alone", "there is nothing to compare it with"
    return None


def _reason(judgement: Judgement, reference: PlanSummary, margin: float) -> str:
    loss = judgement.loss
    if loss is None:
        return f"no seed in common with {reference.label}"
    if loss.pairs < 2:
        return "one seed decides nothing"
    share = f"margin {percent_text(margin)} of {reference.label}"
    if math.isinf(loss.half_width):
        return f"{_worse_text(loss)} with every seed, which says nothing about others, {share}"
    several = f"; undecided as one of {judgement.compared} plans" if judgement.is_decided_alone else ""
    return f"{_worse_text(loss)} over {loss.pairs} seeds, {share}{several}"


def _worse_text(loss: Difference) -> str:
    """How much worse or better a plan is, with the interval of 95 %."""
    if loss.mean == 0 and math.isinf(loss.half_width):
        return "equal"
    word, sign = ("better", -1) if loss.mean < 0 else ("worse", 1)
    text = f"{word} by {number_text(abs(loss.mean))}"
    if math.isinf(loss.half_width):
        return text
    low, high = sorted((sign * loss.low, sign * loss.high))
    return f"{text} ({number_text(low)} to {number_text(high)})"


def pareto_front(points: Sequence[tuple[float, float]], better: Literal["higher", "lower"]) -> list[int]:
    """The indexes of the points (price, result) on the Pareto front, from cheap to expensive.

    No other point has a lower price and a result that is no worse, or a better result at the same price. Equal points
    are on the front together, and points with a NaN are not on it.

    >>> pareto_front([(1.0, 0.9), (2.0, 0.8), (3.0, 0.95)], "higher")
    [0, 2]
    """
    sign = 1.0 if better == "higher" else -1.0
    valid = [i for i, point in enumerate(points) if not any(map(math.isnan, point))]
    order = sorted(valid, key=lambda i: (points[i][0], -sign * points[i][1]))
    front: list[int] = []
    for i in order:
        price, result = points[i]
        if not front or sign * result > sign * points[front[-1]][1] or points[front[-1]] == (price, result):
            front.append(i)
    return front


def _with_fronts(plans: list[PlanSummary]) -> list[PlanSummary]:
    """Mark the plans on the Pareto fronts; those that fail or have not finished are on none."""

    def front(price_of: Any) -> set[int]:
        able = [
            (number, price_of(plan), plan.value.mean)
            for number, plan in enumerate(plans)
            if plan.verdict not in ("fails", "unfinished") and plan.value is not None and price_of(plan) is not None
        ]
        if not able:
            return set()
        chosen = pareto_front([(price, value) for _, price, value in able], plans[0].metric.better)
        return {able[index][0] for index in chosen}

    cheap, small = front(lambda plan: plan.cost), front(lambda plan: plan.memory)
    return [
        replace(plan, on_cost_front=number in cheap, on_memory_front=number in small)
        for number, plan in enumerate(plans)
    ]


def _mean_site(records: list[SiteRecord]) -> SiteRecord:
    return replace(
        records[0],
        overflow=_mean(record.overflow for record in records),
        underflow=_mean(record.underflow for record in records),
        error=_mean(record.error for record in records),
    )
