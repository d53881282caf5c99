"""Why a run in a folder went wrong: :func:`diagnose_run`.

The run is replayed in memory from its newest good checkpoint before the trouble, or from its first step; see
:mod:`bitplan.planners.diagnose`. If it diverges from there without rounding, too, the state was bad already, and an
earlier one is tried. Nothing is written into the folder, and nothing in it is executed.
"""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any

import torch

from bitplan.capture.decompositions import is_decomposed
from bitplan.capture.recording import record
from bitplan.errors import BitplanWarning, RunError
from bitplan.executions.native.paths import NativeTerms
from bitplan.lab.tasks.task import Task
from bitplan.lab.train.checkpoint import newest_whole
from bitplan.lab.train.config import first_difference, resolve_execution
from bitplan.lab.train.fault import repeat_evaluation
from bitplan.lab.train.folder import RunFolder
from bitplan.lab.train.loop import chosen_device
from bitplan.lab.train.session import Session, repeatable
from bitplan.planners.diagnose import (
    FULL_RATE,
    MOST_REPLAYS,
    TOLERANCE,
    Diagnosis,
    Window,
    continue_run,
    diagnose,
    is_broken,
    rounded_tensors,
)
from bitplan.plans import Plan

#: Steps that are replayed, unless the newest good state is nearer to the trouble or none is as near.
STEPS = 60
#: Steps after the one that shows the trouble, which a remedy has to survive.
_AFTERWARDS = 4
#: A logged loss is a spike at this many times the median of the lines before, if it also rises by this share of the
#: first loss.
_SPIKE, _SPIKE_SHARE = 2.0, 0.25
#: Logged losses that are compared with those before or with another run's: one alone may differ by chance.
_LINES = 5


def diagnose_run(
    task: Task,
    folder: str | os.PathLike[str],
    *,
    reference: str | os.PathLike[str] | None = None,
    at: int | None = None,
    steps: int = STEPS,
    tolerance: float = TOLERANCE,
    most_replays: int = MOST_REPLAYS,
    device: str | torch.device | None = None,
    report: Callable[[str], None] | None = None,
) -> Diagnosis:
    """Find the tensors whose rounding made a run diverge, jump or fall behind, and a plan that mends it.

    :param task: the run's, with its settings and seed.
    :param reference: the folder of a run of the same task that the run falls behind.
    :param at: a step at which the trouble shows; by default that of the divergence, of the first spike of the logged
        loss, or where the run falls behind its reference.
    :param steps: about how many steps are replayed.
    :param tolerance: the share by which the loss may exceed that without rounding.
    :param device: by default the run's own.
    :param report: called with a sentence after each replay.
    """
    place = RunFolder(folder)
    config = place.config()
    if place.status() == "running":
        raise RunError(f"a process trains in {place}: stop it first, or wait until it has ended.")
    if steps < 1:
        raise RunError(f"steps is {steps}; a replay has at least 1.")
    symptom = find_symptom(place, reference, at, steps, tolerance)
    if symptom is None:
        return Diagnosis("none", f"{place} does not fall behind {reference} by more than {tolerance:.0%}.")
    plan = place.plan() or Plan()
    crossover = None if config.crossover is None else NativeTerms.from_crossover_record(config.crossover)
    chosen = chosen_device(config.device if device is None else device)
    with repeatable(chosen):
        session = Session(
            task,
            plan,
            execution=resolve_execution(plan, config.execution),
            device=chosen,
            compile=False,
            crossover=crossover,
        )
        try:
            replays = _Replays(session, place, config.identity(place.plan_text()))
            replays.end = min(symptom.step + _AFTERWARDS, task.settings.all_steps)
            losses = replays.find_good_start(symptom, steps)
            return diagnose(
                *(replays, replays.plan, replays.tensors(), Window(replays.start, symptom.sentence)),
                tolerance=tolerance,
                most_replays=most_replays,
                reference=losses,
                report=report,
            )
        finally:
            session.close()


# --- What is wrong with a run


@dataclass(frozen=True)
class Symptom:
    """Where trouble shows in a run."""

    #: The steps made when it shows.
    step: int
    sentence: str
    #: Whether it began shortly before, so that the newest checkpoint may be good.
    is_sudden: bool = True


def find_symptom(
    place: RunFolder,
    reference: str | os.PathLike[str] | None = None,
    at: int | None = None,
    steps: int = STEPS,
    tolerance: float = TOLERANCE,
) -> Symptom | None:
    """The trouble of a run, from its summary and its logged losses; None if it does not fall behind its reference."""
    losses, summary = _logged_losses(place), place.summary()
    last = max(losses, default=0)
    if summary is not None:
        last = summary.step + (summary.status == "diverged")
    if at is not None:
        if not 1 <= at <= last:
            raise RunError(f"{place} has no step {at}: it made {last} steps, counted from 1.")
        return Symptom(at, f"Step {at} is looked at.")
    if summary is not None and summary.status == "diverged":
        first = f" at {summary.site}, the first tensor that was not finite" if summary.site else ""
        return Symptom(summary.step + 1, f"The run diverged in step {summary.step + 1}{first}.")
    if reference is not None:
        other = RunFolder(reference)
        _require_same_task(place, other)
        return _where_behind(losses, _logged_losses(other), tolerance, other)
    if not losses:
        raise RunError(f"{place} has no logged losses: train it for a few steps first.")
    values = list(losses.items())
    for number, (step, loss) in enumerate(values):
        usual = median(value for _, value in values[max(0, number - _LINES) : number]) if number else loss
        if loss > _SPIKE * usual and loss - usual > _SPIKE_SHARE * abs(values[0][1]):
            return Symptom(step, f"The loss jumps from about {usual:.3g} to {loss:.3g} at step {step}.")
    return Symptom(min(steps, last), "No loss of the run jumps: its first steps are looked at.", is_sudden=False)


def _logged_losses(place: RunFolder) -> dict[int, float]:
    lines = (line for line in place.metrics() if not line.get("evaluation") and not line.get("diverged"))
    return {line["step"]: float(line["loss"]) for line in lines if isinstance(line.get("loss"), (int, float))}


def _require_same_task(place: RunFolder, other: RunFolder) -> None:
    mine, theirs = (
        {"task": config.task, "seed": config.seed, "settings": config.settings}
        for config in (place.config(), other.config())
    )
    difference = first_difference(mine, theirs)
    if difference is not None:
        raise RunError(f"{other} is no reference for {place}, which has {difference}: name a run of the same task.")


def _where_behind(
    losses: dict[int, float], reference: dict[int, float], tolerance: float, other: RunFolder
) -> Symptom | None:
    """The first logged step from which on the loss is above the reference's, on average over several lines."""
    shared = sorted(losses.keys() & reference.keys())
    if not shared:
        raise RunError(f"{other} has no logged loss of the same step: name a run of the same task.")
    for number in range(len(shared)):
        steps = shared[max(0, number - _LINES + 1) : number + 1]
        level = fmean(reference[step] for step in steps)
        behind = fmean(losses[step] for step in steps) - level
        if behind > tolerance * abs(level) and number >= min(_LINES, len(shared)) - 1:
            sentence = f"At step {steps[-1]} the loss is {behind:.3g} above that of {other} ({level:.3g})."
            return Symptom(steps[-1], sentence, is_sudden=False)
    return None


# --- Replays


class _Replays:
    """Replays of a run from one of its states."""

    def __init__(self, session: Session, place: RunFolder, identity: dict[str, Any]) -> None:
        self.session, self.place, self.identity = session, place, identity
        #: Without selectors.
        self.plan = session.run.plan
        #: Steps made at the start and at the end of a replay.
        self.start = self.end = 0
        self._state: dict[str, Any] = {}

    def find_good_start(self, symptom: Symptom, steps: int) -> list[float]:
        """Choose the start; returns the losses from there without rounding."""
        start = max(0, self.end - steps)
        if symptom.is_sudden:
            newest = self._checkpoint(min(symptom.step, self.end) - 1)
            start = max(start, 0 if newest is None else newest[0])
        while True:
            self._go_to(start)
            losses = self(Plan())
            if start == 0 or not is_broken(losses):
                return losses
            start = max(0, self.end - 2 * (self.end - start))

    def _checkpoint(self, last: int) -> tuple[int, dict[str, Any]] | None:
        broken = self.session.broken_in
        return newest_whole(self.place.checkpoints, self.identity, broken=broken, last=last)

    def _go_to(self, start: int) -> None:
        """Repeat the run up to a step, from the checkpoint before it."""
        checkpoint, session = self._checkpoint(start), self.session
        session.attach_uncompiled(self.plan)
        if checkpoint is None:
            session.restart()
        else:
            session.load(*checkpoint)
        while session.step < start:
            if not math.isfinite(session.forward_backward()):
                break
            self._apply()
        self.start, self._state = session.step, copy.deepcopy(session.state())

    def _apply(self) -> None:
        self.session.apply()
        repeat_evaluation(self.session)

    def __call__(self, plan: Plan, rate: float = FULL_RATE) -> list[float]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BitplanWarning)  # rules that lose their effect are expected here
            self.session.attach_uncompiled(plan)
            self.session.load_training(self.start, self._state)
            continue_run(self.session.run, self._state["attachment"])
            return self._losses(rate)

    def _losses(self, rate: float) -> list[float]:
        session, losses = self.session, list[float]()
        session.rate = rate
        while session.step < self.end:
            losses.append(session.forward_backward())
            if not math.isfinite(losses[-1]):
                break
            self._apply()
        session.rate = FULL_RATE
        if session.broken_weight() is not None or session.scale.is_lost:
            losses[-1] = math.nan
        return losses

    def tensors(self) -> Sequence[Any]:
        """The tensors that the plan rounds."""
        session = self.session
        session.attach_uncompiled(Plan())
        batch = session.moved(session.task.batch(0))
        operations = record(session.model, batch, session.task.loss, opens=partial(is_decomposed, self.plan))
        return rounded_tensors(self.plan, operations)
