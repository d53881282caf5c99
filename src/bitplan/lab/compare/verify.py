"""Checking advice by training: the advised plan beside all-E4M3, all-INT8 and the task's own precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bitplan.lab.compare.compare import compare, slug
from bitplan.lab.compare.folder import Choice
from bitplan.lab.compare.workers import Update
from bitplan.lab.train import RunFolder, Summary
from bitplan.planners.advise import Advice, make_plan
from bitplan.plans import Plan, QuantizerSpec

#: Default number of steps of each run.
STEPS = 100
#: The last share of a run whose mean training loss counts, since the losses of single batches vary.
_END = 0.25

HIGH, ADVICE = "high precision", "advice"
#: Baselines: one format for every operand that the advice covers, with a scale per tensor.
RIVALS = {"all E4M3": "e4m3", "all INT8": "int8"}


@dataclass(frozen=True)
class Verified:
    """The result of one plan, mean over seeds."""

    label: str
    #: Mean training loss of the last quarter of the steps.
    loss: float
    #: Loss above that of high precision.
    gap: float
    #: The task's metric after the last step.
    metric: float
    #: Bit operations as a share of FP32's.
    cost: float
    diverged: int

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__}


def verify(
    task: str,
    advice: Advice,
    folder: Path,
    *,
    settings: Sequence[str] = (),
    steps: int = STEPS,
    seeds: Iterable[int] = (0,),
    device: str = "cpu",
    on_update: Callable[[Update], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> list[Verified]:
    """Train `task` for `steps` steps under the advice, its rivals and no plan, and return the final losses.

    :param task: as the command line names it.
    :param folder: where the runs are kept: a comparison, as :func:`bitplan.lab.compare.compare` makes it.
    """
    numbers = tuple(seeds)
    choices = [Choice(HIGH, None), Choice(ADVICE, advice.plan)]
    choices += [Choice(label, uniform_plan(advice, name)) for label, name in RIVALS.items()]
    summaries = compare(
        *(task, choices),
        folder=folder,
        seeds=numbers,
        settings=(*settings, f"steps={steps}"),
        device=device,
        on_update=on_update,
        stop=stop,
    )
    by_folder = {summary.folder: summary for summary in summaries}
    by_label = {
        choice.label: [
            by_folder[place] for seed in numbers if (place := folder / f"{slug(choice.label)}-s{seed}") in by_folder
        ]
        for choice in choices
    }
    high = _mean([final_loss(summary) for summary in by_label[HIGH]])
    return [_verified(label, own, high) for label, own in by_label.items() if own]


def uniform_plan(advice: Advice, name: str) -> Plan:
    """Every operand that the advice covers in one format, with a scale per tensor."""
    spec = QuantizerSpec(name, scale="tensor")
    return make_plan([replace(slot, spec=spec) for slot in advice.slots], {"planner": "advise", "uniform": name})


def final_loss(summary: Summary) -> float:
    """The mean training loss of a run's last quarter; not finite where it diverged."""
    if summary.status == "diverged":
        return math.inf
    lines = [line for line in RunFolder(summary.folder).metrics() if "loss" in line and "lr" in line]
    end = [float(line["loss"]) for line in lines if line["step"] > (1 - _END) * summary.step]
    return _mean(end)


def _verified(label: str, summaries: Sequence[Summary], high: float) -> Verified:
    loss = _mean([final_loss(summary) for summary in summaries])
    metrics = [next(iter(summary.metrics.values()), math.nan) for summary in summaries]
    return Verified(
        label,
        loss,
        loss - high,
        _mean(metrics),
        _mean([summary.cost.get("relative_to_fp32", math.nan) for summary in summaries]),
        sum(summary.status == "diverged" for summary in summaries),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
