"""Memory budgets: the fewest moves that keep the peak memory of a packed training step within a budget.

A ratio is a sum over all tensors of a step, which are not all alive at once. A budget in bytes limits the *peak*:
master weights, optimizer state, gradients, saved tensors and temporaries, as :func:`bitplan.estimate_memory` predicts
it for the plan on fake tensors. The peak falls with every move, so the number of moves is found by bisection.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.analysis.memory import estimate_memory, measure_memory
from bitplan.analysis.memory.step import OptimizerChoice
from bitplan.errors import PlanError
from bitplan.files import byte_text, read_bytes
from bitplan.plans import Plan

#: Estimated peaks were up to 1 % below the allocator's, because of kernel workspaces; this share of the budget is
#: reserved for them.
_RESERVED_SHARE = 0.02
#: Attempts to measure a plan and to demote more groups.
_MAX_MEASUREMENTS = 3
#: Key of the peak without a plan.
_NO_PLAN = -1
#: Bisection assumes that the peak falls with every move. If the last plan does not fit, this many before it are tried.
_EXTRA_CANDIDATES = 2


@dataclass(frozen=True)
class Budget:
    """A number of bytes, or a share of the peak without a plan."""

    bytes: int | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        if (self.bytes is None) == (self.share is None):
            raise PlanError("a budget is either bytes or a share of the peak without a plan.")
        if self.share is not None and self.share <= 0:
            raise PlanError("a share of the peak without a plan must be above 0%: write it as 70%.")

    @classmethod
    def parse(cls, value: str | int | Budget) -> Budget:
        """Parse ``6GiB``, ``70%`` or a number of bytes.

        >>> Budget.parse("70%").share, Budget.parse("1KiB").bytes
        (0.7, 1024)
        """
        if isinstance(value, Budget):
            return value
        if isinstance(value, str) and (percent := re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*%\s*", value)):
            return cls(share=float(percent[1]) / 100)
        return cls(bytes=read_bytes(str(value)))

    def limit(self, baseline_peak: int) -> int:
        """The budget in bytes."""
        return self.bytes if self.bytes is not None else int(baseline_peak * (self.share or 0))

    def __str__(self) -> str:
        return byte_text(self.bytes).replace(" ", "") if self.bytes is not None else f"{100 * (self.share or 0):g}%"


@dataclass(frozen=True)
class Fit:
    """A number of moves whose plan is within the budget."""

    moves_made: int
    #: Estimated peak without a plan, in bytes.
    baseline_peak: int
    #: Estimated peak with the plan.
    peak: int
    #: The budget.
    limit: int
    #: Measured peak with the plan; None if it was not measured.
    measured_peak: int | None = None


@dataclass(frozen=True)
class Step:
    """The training step whose peak memory is estimated or measured."""

    model: nn.Module
    batch: Any
    loss: Callable[..., Tensor] | None = None
    optimizer: OptimizerChoice = "default"
    compile: bool = False
    device: torch.device | str | None = None

    def measure_peak(self, plan: Plan) -> int | None:
        """The peak of a packed step that is run; None if the model is on the meta device."""
        if any(parameter.is_meta for parameter in self.model.parameters()):
            return None
        return measure_memory(
            self.model, self.batch, self.loss, self.optimizer, plan, "packed", self.compile, steps=2
        ).peak

    def estimate_peak(self, plan: Plan | None) -> int:
        """The estimated peak, with packed execution if there is a plan."""
        execution = "emulate" if plan is None else "packed"
        return estimate_memory(
            self.model, self.batch, self.loss, self.optimizer, plan, execution, self.compile, device=self.device
        ).peak


def fit(
    budget: Budget,
    step: Step,
    plan_after: Callable[[int], Plan],
    moves: int,
    report: Callable[[str], None] | None = None,
    check_peak: bool = False,
) -> Fit:
    """Find the smallest number of moves whose plan keeps the peak of the step within the budget.

    :param plan_after: the plan after a number of moves.
    :param report: called with a message for each estimate and measurement.
    :param check_peak: run the step as well, and demote more groups while its measured peak is above the budget.
    """
    report = report or (lambda message: None)
    peaks: dict[int, int] = {}
    share, smallest = 1 - _RESERVED_SHARE, None
    estimate = _fit_estimates(budget, step, plan_after, moves, report, peaks, share)
    if not check_peak:
        return estimate
    for _ in range(_MAX_MEASUREMENTS):
        measured = step.measure_peak(plan_after(estimate.moves_made))
        if measured is None:
            return estimate
        report(f"{estimate.moves_made} of {moves} moves: a peak of {byte_text(measured)}, measured.")
        if measured <= estimate.limit:
            return replace(estimate, measured_peak=measured)
        smallest = measured if smallest is None else min(smallest, measured)
        if estimate.moves_made == moves:
            break
        # Lower the target by the error of the estimate, and by one move at least.
        share = min(share * estimate.peak / measured, (estimate.peak - 1) / estimate.limit)
        try:
            estimate = _fit_estimates(budget, step, plan_after, moves, report, peaks, share)
        except PlanError:
            estimate = replace(estimate, moves_made=moves, peak=peaks[moves])
    raise PlanError(
        f"no assignment was found that keeps the measured peak within {byte_text(estimate.limit)}: the least measured "
        f"is {byte_text(smallest or 0)}. Raise the budget, choose formats without a scale per tensor, or do not "
        f"compile the model."
    )


def _fit_estimates(
    budget: Budget,
    step: Step,
    plan_after: Callable[[int], Plan],
    moves: int,
    report: Callable[[str], None],
    peaks: dict[int, int],
    share: float,
) -> Fit:
    """The smallest number of moves whose estimated peak is within a share of the budget; `peaks` caches estimates."""
    if _NO_PLAN not in peaks:
        peaks[_NO_PLAN] = step.estimate_peak(None)
    baseline_peak = peaks[_NO_PLAN]
    limit = budget.limit(baseline_peak)
    if len(peaks) == 1:
        report(f"without a plan: a peak of {byte_text(baseline_peak)}, estimated; the budget is {byte_text(limit)}.")

    def peak(moves_made: int) -> int:
        if moves_made not in peaks:
            peaks[moves_made] = step.estimate_peak(plan_after(moves_made))
            report(f"{moves_made} of {moves} moves: a peak of {byte_text(peaks[moves_made])}, estimated.")
        return peaks[moves_made]

    allowed = int(limit * share)
    low, high = 0, moves
    if peak(0) <= allowed:
        return Fit(0, baseline_peak, peak(0), limit)
    if peak(moves) > allowed:
        candidates = range(moves - 1, max(moves - 1 - _EXTRA_CANDIDATES, 0), -1)
        fitting = [moves_made for moves_made in candidates if peak(moves_made) <= allowed]
        if not fitting:
            planned_peaks = {number: estimate for number, estimate in peaks.items() if number != _NO_PLAN}
            raise PlanError(_no_fit_message(limit, share, baseline_peak, planned_peaks, moves))
        high = fitting[-1]
    while high - low > 1:
        middle = (low + high) // 2
        if peak(middle) <= allowed:
            high = middle
        else:
            low = middle
    return Fit(high, baseline_peak, peak(high), limit)


def _no_fit_message(limit: int, share: float, baseline_peak: int, peaks: dict[int, int], moves: int) -> str:
    best = min(peaks, key=lambda moves_made: (peaks[moves_made], moves_made))
    needed = math.ceil(peaks[best] / share) + 1
    reserve = f", and {1 - share:.0%} of the budget is reserved for kernel workspaces" if peaks[best] <= limit else ""
    condition = "with every group at the lowest level" if best == moves else f"after {best} of {moves} moves"
    without_plan = (
        f"; without a plan the peak is {byte_text(baseline_peak)}, which fits" if baseline_peak <= limit else ""
    )
    return (
        f"no assignment keeps the peak within {byte_text(limit)}: the least is {byte_text(peaks[best])}, "
        f"{condition}{reserve}{without_plan}. Give a budget of {needed} bytes or more, add a lower level, or "
        f"reduce the batch size."
    )
