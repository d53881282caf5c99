"""The precision range test: which is the lowest width at which a model still learns?

One short run, whose bits rise from window to window, on copies: the user's model, optimizer and random state stay as
they are. A width is enough if the training loss falls, in its window, by more than a threshold below the lowest level
that was reached before. The lowest width has one window more, which is not judged: in it the model learns what takes no
precision, such as how frequent classes are.

Fu et al. 2021 (arXiv 2101.09868) watch the change of the training accuracy, averaged over a window; how long the window
and how high the threshold were is not in their code, so both are parameters here.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bitplan.capture.recording import call_arguments
from bitplan.errors import PlanError
from bitplan.numerics.noise import preserve_rng_state
from bitplan.planners.cpt import cpt_plan
from bitplan.plans import Plan
from bitplan.plans.schedules import RunPoint, Schedule, StepList
from bitplan.runtime.attach import attach

#: Steps of a window.
WINDOW = 40
#: The share by which the loss has to fall.
THRESHOLD = 0.1
#: The share of a window, at its end, whose mean loss is its level.
_LEVEL = 0.5


@dataclass(frozen=True)
class WidthResult:
    """One width's window."""

    bits: int
    #: Mean training loss of the window's second half.
    level: float
    #: The lowest level of the windows before it.
    before: float
    #: Whether it fell by more than the threshold, and by more than chance.
    learns: bool

    @property
    def change(self) -> float:
        """The share by which the loss fell below the lowest level before; negative where it rose."""
        return (self.before - self.level) / self.before if self.before else 0.0


@dataclass(frozen=True)
class RangeTest:
    """What a range test found."""

    #: The lowest width at which the model learns; None where it learns at none.
    low: int | None
    #: The highest width that was tried: what a schedule's upper end should be, unless a baseline says otherwise.
    high: int
    reason: str
    widths: tuple[WidthResult, ...]
    #: The training loss of every step.
    losses: tuple[float, ...]
    window: int
    threshold: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "low": self.low,
            "high": self.high,
            "reason": self.reason,
            "window": self.window,
            "threshold": self.threshold,
            "widths": [
                {"bits": result.bits, "level": result.level, "change": result.change, "learns": result.learns}
                for result in self.widths
            ],
            "losses": list(self.losses),
        }


def range_test(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Any],
    loss: Callable[..., Tensor],
    *,
    plan: Plan | None = None,
    low: int = 2,
    high: int = 8,
    window: int = WINDOW,
    threshold: float = THRESHOLD,
    seed: int = 0,
    on_step: Callable[[int, int], None] | None = None,
) -> RangeTest:
    """Try the widths `low` to `high` on copies of `model` and `optimizer`.

    :param batches: (inputs, target), gone through again from the beginning where they are too few.
    :param loss: of the model's output and the target.
    :param plan: one whose bits follow a schedule; the test's own stands in for it. By default the plan of cyclic
        precision training (:func:`bitplan.planners.cpt_plan`).
    :param window: steps for each width.
    :param threshold: the share by which the training loss has to fall in a window.
    :param on_step: told (steps made, all steps).
    """
    _check(low, high, window, threshold)
    if isinstance(batches, Iterator):
        raise PlanError("batches that can be gone through only once would be used up: give a list or a DataLoader.")
    rising = rising_schedule(low, high, window)
    total = window * (high - low + 2)
    with preserve_rng_state():
        # One copy of both, so that the optimizer's parameters are those of the model.
        model, optimizer = copy.deepcopy((model, optimizer))
        torch.manual_seed(seed)
        source = _again_and_again(batches)
        first = next(source)
        inputs = first[0]
        chosen = _with_schedule(plan, rising) if plan is not None else cpt_plan(model, first, loss, schedule=rising)
        with attach(model, chosen, steps=total, example=inputs, seed=seed) as run:
            losses = []
            model.train()
            for step in range(total):
                inputs, target = first if step == 0 else next(source)
                optimizer.zero_grad(set_to_none=True)
                args, kwargs = call_arguments(inputs)
                value = loss(model(*args, **kwargs), target)
                losses.append(float(value.detach()))
                if math.isfinite(losses[-1]):
                    value.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                run.step()
                if on_step is not None:
                    on_step(step + 1, total)
    return judged(losses, low, high, window, threshold)


def rising_schedule(low: int, high: int, window: int) -> Schedule:
    """Two windows at the lowest width, then one for each."""
    widths = range(low, high + 1)
    return StepList(tuple(widths), tuple(RunPoint(step=window * (2 + number)) for number in range(len(widths) - 1)))


def judged(losses: list[float], low: int, high: int, window: int, threshold: float) -> RangeTest:
    """What the training losses of a run over rising widths say."""
    parts = [losses[start : start + window] for start in range(0, len(losses), window)]
    levels = [_level(part) for part in parts]
    reached, spread = levels[0]
    results: list[WidthResult] = []
    for bits, (level, error) in zip(range(low, high + 1), levels[1:], strict=True):
        fell = reached - level
        # By more than the threshold, and by more than two standard errors: batches differ.
        learns = fell > threshold * reached and fell > 2 * math.hypot(spread, error)
        results.append(WidthResult(bits, level, reached, learns))
        if level < reached:
            reached, spread = level, error
    chosen = next((result for result in results if result.learns), None)
    return RangeTest(
        None if chosen is None else chosen.bits,
        high,
        _reason(chosen, results, window, threshold),
        tuple(results),
        tuple(losses),
        window,
        threshold,
    )


def _reason(chosen: WidthResult | None, results: list[WidthResult], window: int, threshold: float) -> str:
    if chosen is None:
        return (
            f"at no width up to {results[-1].bits} bits did the training loss fall by {threshold:.0%} "
            f"within {window} steps: lengthen the window, or see whether the recipe learns at all."
        )
    below = [result.bits for result in results if result.bits < chosen.bits]
    lower = f"; with {', '.join(map(str, below))} it did not" if below else ""
    return (
        f"{chosen.bits} bits: there the training loss first fell by more than {threshold:.0%} within {window} steps, "
        f"from {chosen.before:.3g} to {chosen.level:.3g}{lower}."
    )


def _level(part: list[float]) -> tuple[float, float]:
    """Mean loss of the end of a window, and its standard error; what is not finite counts as no level at all."""
    end = np.array(part[-max(2, round(len(part) * _LEVEL)) :], dtype=np.float64)
    if not np.isfinite(end).all():
        return math.inf, 0.0
    return float(end.mean()), float(end.std(ddof=1) / math.sqrt(len(end)))


def _check(low: int, high: int, window: int, threshold: float) -> None:
    if not 2 <= low <= high <= 16:
        raise PlanError(f"widths go from {low} to {high}: give 2 to 16 bits, the lowest first.")
    if window < 4:
        raise PlanError(f"window is {window}; it must be at least 4 steps.")
    if not 0 < threshold < 1:
        raise PlanError(f"threshold is {threshold:g}; it must be a share between 0 and 1, such as {THRESHOLD}.")


def _with_schedule(plan: Plan, schedule: Schedule) -> Plan:
    if not plan.followed or plan.switches:
        raise PlanError("the plan has no bits that follow a schedule, which the test could move: name one as bits.")
    return replace(plan.flattened(), schedules=dict.fromkeys(plan.all_schedules, schedule))


def _again_and_again(batches: Iterable[Any]) -> Iterator[Any]:
    while True:
        is_empty = True
        for batch in batches:
            is_empty = False
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                raise PlanError("a batch of the range test is (inputs, target).")
            yield batch
        if is_empty:
            raise PlanError("there is no batch to test with.")
