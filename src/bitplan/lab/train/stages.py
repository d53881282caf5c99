"""Measurements of a task early, in the middle and late in a short training run without a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from bitplan.analysis.measure import Candidate, Measurement, measure
from bitplan.analysis.measure.pass_metrics import Metric
from bitplan.errors import MetricError, nearest_names
from bitplan.gemm.sampling import Sampling
from bitplan.lab.tasks.task import Task
from bitplan.lab.train.loop import chosen_device
from bitplan.lab.train.session import Session, repeatable
from bitplan.plans import Plan

#: Stage -> the share of the steps made before it.
STAGES = {"early": 0.1, "middle": 0.5, "late": 1.0}
#: Default number of training steps, at most.
STEPS = 60


def measure_task(
    task: Task,
    candidates: Iterable[str | Candidate] | None = None,
    *,
    plan: Plan | str | None = None,
    stages: Sequence[str] = tuple(STAGES),
    steps: int | None = None,
    rows: int = Sampling.rows,
    terms: int = Sampling.terms,
    seed: int = 0,
    metrics: Mapping[str, Metric] | Iterable[str] = (),
    device: str | torch.device = "cpu",
    on_step: Callable[[int, int], None] | None = None,
) -> Measurement:
    """Train `task` for `steps` steps and measure it at some stages, each on the next batch.

    :param stages: early (after a tenth of the steps), middle, late (after all of them).
    :param steps: by default 60, or all steps of the task if these are fewer.
    :param plan, rows, terms, seed, metrics: as :func:`bitplan.measure` takes them.
    :param on_step: called with (steps made, steps to make).
    """
    for stage in stages:
        if stage not in STAGES:
            raise MetricError(f"there is no stage {stage!r}; {nearest_names(stage, STAGES)}")
    if not stages:
        raise MetricError(f"name at least one stage: {', '.join(STAGES)}.")
    total = min(task.settings.all_steps, STEPS) if steps is None else steps
    if not 1 <= total <= task.settings.all_steps:
        raise MetricError(f"steps is {total}; the task has 1 to {task.settings.all_steps}.")
    stage_steps = {stage: max(1, round(STAGES[stage] * total)) for stage in STAGES if stage in stages}
    chosen = chosen_device(device)
    measurement = Measurement((), target=task.name)
    chosen_candidates = None if candidates is None else tuple(candidates)
    last = max(stage_steps.values())
    with repeatable(chosen):
        session = Session(task, Plan(), execution="emulate", device=chosen, compile=False)
        try:
            while session.step < last:
                session.forward_backward()
                session.apply()
                if on_step is not None:
                    on_step(session.step, last)
                for stage, stage_step in stage_steps.items():
                    if stage_step == session.step:
                        measurement += measure(
                            *(session.model, [session.next_batch()], task.loss, chosen_candidates),
                            plan=plan,
                            rows=rows,
                            terms=terms,
                            seed=seed,
                            stage=stage,
                            step=session.step,
                            target=task.name,
                            metrics=metrics,
                        )
        finally:
            session.close()
    return measurement
