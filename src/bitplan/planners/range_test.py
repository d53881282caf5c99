"""The precision range test: the lowest width at which a model still learns.

A short run raises the bits from window to window, on copies of the model and the optimizer. A width is sufficient if
the training loss falls, in its window, by more than a threshold below the lowest level so far. The lowest width has an
additional window that is not evaluated: in it the model learns what needs no precision, such as class frequencies.

Fu et al. 2021 (arXiv 2101.09868) use the change of the training accuracy, averaged over a window. Their code has
neither the window nor the threshold, so both are parameters here.
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
#: Required relative decrease of the loss.
THRESHOLD = 0.1
#: The level of a window is the mean loss of this share at its end.
_EVALUATED_SHARE = 0.5


@dataclass(frozen=True)
class WidthResult:
    """The window of a width."""

    bits: int
    #: Mean training loss of the window's second half.
    level: float
    #: The lowest level of the windows before.
    before: float
    #: Whether it fell by more than the threshold, and by more than chance.
    learns: bool

    @property
    def change(self) -> float:
        """The relative decrease from the lowest level before; negative if the loss rose."""
        return (self.before - self.level) / self.before if self.before else 0.0


@dataclass(frozen=True)
class RangeTest:
    """The result of a range test."""

    #: The lowest width at which the model learns; None if there is none.
    low: int | None
    #: The highest width of the test, a default for the upper end of a schedule.
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
    """Test the widths `low` to `high` on copies of `model` and `optimizer`.

    :param batches: (inputs, target) pairs, repeated if there are too few.
    :param loss: a function of the model's output and the target.
    :param plan: a plan with scheduled bits; the test replaces the schedule. By default the plan of cyclic precision
        training (:func:`bitplan.planners.cpt_plan`).
    :param window: steps for each width.
    :param threshold: the relative decrease of the training loss that counts as learning.
    :param on_step: called with (steps done, total steps).
    """
    _check(low, high, window, threshold)
    if isinstance(batches, Iterator):
        raise PlanError("batches is an iterator, which can be read only once: give a list or a DataLoader.")
    rising = rising_schedule(low, high, window)
    total = window * (high - low + 2)
    with preserve_rng_state():
        # One copy of both, so that the optimizer's parameters are those of the model.
        model, optimizer = copy.deepcopy((model, optimizer))
        torch.manual_seed(seed)
        source = _repeat(batches)
        first = next(source)
        test_plan = _with_schedule(plan, rising) if plan is not None else cpt_plan(model, first, loss, schedule=rising)
        with attach(model, test_plan, steps=total, example=first[0], seed=seed) as run:
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
    return evaluate_losses(losses, low, high, window, threshold)


def rising_schedule(low: int, high: int, window: int) -> Schedule:
    """Two windows at the lowest width, then one for each further width."""
    widths = range(low, high + 1)
    return StepList(tuple(widths), tuple(RunPoint(step=window * (2 + number)) for number in range(len(widths) - 1)))


def evaluate_losses(losses: list[float], low: int, high: int, window: int, threshold: float) -> RangeTest:
    """Evaluate the training losses of a run with a rising schedule."""
    windows = [losses[start : start + window] for start in range(0, len(losses), window)]
    levels = [_mean_level(losses) for losses in windows]
    reached, spread = levels[0]
    results: list[WidthResult] = []
    for bits, (level, error) in zip(range(low, high + 1), levels[1:], strict=True):
        decrease = reached - level
        # Two standard errors exclude differences between batches.
        learns = decrease > threshold * reached and decrease > 2 * math.hypot(spread, error)
        results.append(WidthResult(bits, level, reached, learns))
        if level < reached:
            reached, spread = level, error
    lowest = next((result for result in results if result.learns), None)
    return RangeTest(
        None if lowest is None else lowest.bits,
        high,
        _explain(lowest, results, window, threshold),
        tuple(results),
        tuple(losses),
        window,
        threshold,
    )


def _explain(lowest: WidthResult | None, results: list[WidthResult], window: int, threshold: float) -> str:
    if lowest is None:
        return (
            f"at no width up to {results[-1].bits} bits did the training loss fall by {threshold:.0%} "
            f"within {window} steps: lengthen the window, or check that the recipe learns without a plan."
        )
    below = [result.bits for result in results if result.bits < lowest.bits]
    lower = f"; with {', '.join(map(str, below))} it did not" if below else ""
    return (
        f"{lowest.bits} bits: there the training loss first fell by more than {threshold:.0%} within {window} steps, "
        f"from {lowest.before:.3g} to {lowest.level:.3g}{lower}."
    )


def _mean_level(losses: list[float]) -> tuple[float, float]:
    """Mean loss at the end of a window, and its standard error; infinity if a loss is not finite."""
    end = np.array(losses[-max(2, round(len(losses) * _EVALUATED_SHARE)) :], dtype=np.float64)
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
        raise PlanError(
            "the plan has no bits that follow a schedule: set bits of a quantizer to the name of a schedule."
        )
    return replace(plan.flattened(), schedules=dict.fromkeys(plan.all_schedules, schedule))


def _repeat(batches: Iterable[Any]) -> Iterator[Any]:
    while True:
        is_empty = True
        for batch in batches:
            is_empty = False
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                raise PlanError("a batch of the range test is (inputs, target).")
            yield batch
        if is_empty:
            raise PlanError("there is no batch to test with.")
