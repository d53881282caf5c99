"""Memory budgets: the fewest moves that keep the peak memory of a packed training step within a budget.

A ratio is a sum over all tensors of a step, which are not all alive at once. A budget in bytes limits the *peak*:
master weights, optimizer state, gradients, saved tensors and temporaries, as :func:`bitplan.estimate_memory` predicts
it for the plan on fake tensors. The peak falls with every move, so the number of moves is found by bisection.

A share is one of the peak without a plan. That peak is measured where the model can run; otherwise it is estimated.
Where the two differ by more than the reserve, estimates for this model are unreliable, and the plan is measured, too.
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
from bitplan.analysis.memory.fit import free_memory
from bitplan.analysis.memory.step import OptimizerChoice
from bitplan.compiler.torch_private import FakeTensor, tree_leaves
from bitplan.errors import PlanError
from bitplan.files import byte_text, read_bytes
from bitplan.plans import Plan

#: Estimated peaks were up to 1 % below the allocator's, because of kernel workspaces; this share of the budget is
#: reserved for them.
_RESERVED_SHARE = 0.02
#: A peak is measured where this many times its estimate is free: the step trains a copy of the model.
_COPIES = 3
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
    #: The peak without a plan, in bytes: that which a share is of.
    baseline_peak: int
    #: Estimated peak with the plan.
    peak: int
    #: The budget.
    limit: int
    #: Measured peak with the plan; None if it was not measured.
    measured_peak: int | None = None
    #: Whether the peak without a plan was measured.
    is_baseline_measured: bool = False


@dataclass(frozen=True)
class Step:
    """The training step whose peak memory is estimated or measured."""

    model: nn.Module
    batch: Any
    loss: Callable[..., Tensor] | None = None
    optimizer: OptimizerChoice = "default"
    compile: bool = False
    device: torch.device | str | None = None
    #: Makes the model and the batch with values, where these have shapes only.
    make_values: Callable[[], tuple[nn.Module, Any]] | None = None

    def measure_peak(self, plan: Plan | None) -> int | None:
        """The peak of a step that is run, packed if there is a plan; None if the model has no values."""
        model, batch = (self.model, self.batch) if self.make_values is None else self.make_values()
        if _is_without_values(model, batch):
            return None
        execution = "emulate" if plan is None else "packed"
        return measure_memory(model, batch, self.loss, self.optimizer, plan, execution, self.compile, steps=2).peak

    def measure_plain_peak(self, estimate: int) -> int | None:
        """The peak of a step without a plan; None where it cannot be run: no values, no memory, another device."""
        if self.make_values is None:
            if _is_without_values(self.model, self.batch):
                return None
            own = next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))
        else:
            own = torch.device("cpu")
        if self.device is not None and torch.device(self.device).type != own.type:
            return None
        free = free_memory(own)
        if free is None or estimate * _COPIES > free:
            return None
        try:
            return self.measure_peak(None)
        except (RuntimeError, MemoryError):  # out of memory after all, or no kernel on this device
            return None

    def estimate_peak(self, plan: Plan | None) -> int:
        """The estimated peak, with packed execution if there is a plan."""
        execution = "emulate" if plan is None else "packed"
        return estimate_memory(
            self.model, self.batch, self.loss, self.optimizer, plan, execution, self.compile, device=self.device
        ).peak


def _is_without_values(model: nn.Module, batch: Any) -> bool:
    tensors = [*model.parameters(), *(leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))]
    return any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors)


def fit(
    budget: Budget,
    step: Step,
    plan_after: Callable[[int], Plan],
    moves: int,
    report: Callable[[str], None] | None = None,
    check_peak: bool = False,
    measure_plain: bool = True,
) -> Fit:
    """Find the smallest number of moves whose plan keeps the peak of the step within the budget.

    :param plan_after: the plan after a number of moves.
    :param report: called with a message for each estimate and measurement.
    :param check_peak: run the step as well, and demote more groups while its measured peak is above the budget.
    :param measure_plain: of a budget that is a share, measure the peak without a plan where the model can run.
    """
    report = report or (lambda message: None)
    estimated = step.estimate_peak(None)
    measured_plain = step.measure_plain_peak(estimated) if measure_plain and budget.share is not None else None
    peaks: dict[int, int] = {_NO_PLAN: estimated if measured_plain is None else measured_plain}
    source = "estimated" if measured_plain is None else f"measured ({byte_text(estimated)} estimated)"
    report(
        f"without a plan: a peak of {byte_text(peaks[_NO_PLAN])}, {source}; the budget is "
        f"{byte_text(budget.limit(peaks[_NO_PLAN]))}."
    )
    check_peak |= measured_plain is not None and abs(measured_plain / estimated - 1) > _RESERVED_SHARE
    search = _BudgetSearch(budget, step, plan_after, moves, report, peaks)
    fitted = search.fit_measured() if check_peak else search.fit_estimates(1 - _RESERVED_SHARE)
    return replace(fitted, is_baseline_measured=measured_plain is not None)


@dataclass(frozen=True)
class _BudgetSearch:
    """The search of :func:`fit` for a number of moves."""

    budget: Budget
    step: Step
    plan_after: Callable[[int], Plan]
    moves: int
    report: Callable[[str], None]
    #: Number of moves -> estimated peak.
    peaks: dict[int, int]

    def fit_measured(self) -> Fit:
        """The smallest number of moves whose measured peak is within the budget, where the step can be measured."""
        share, smallest = 1 - _RESERVED_SHARE, None
        estimate = self.fit_estimates(share)
        for _ in range(_MAX_MEASUREMENTS):
            measured = self.step.measure_peak(self.plan_after(estimate.moves_made))
            if measured is None:
                return estimate
            self.report(f"{estimate.moves_made} of {self.moves} moves: a peak of {byte_text(measured)}, measured.")
            if measured <= estimate.limit:
                return replace(estimate, measured_peak=measured)
            smallest = measured if smallest is None else min(smallest, measured)
            if estimate.moves_made == self.moves:
                break
            # Lower the target by the error of the estimate, and by one move at least.
            share = min(share * estimate.peak / measured, (estimate.peak - 1) / estimate.limit)
            try:
                estimate = self.fit_estimates(share)
            except PlanError:
                estimate = replace(estimate, moves_made=self.moves, peak=self.peaks[self.moves])
        raise PlanError(
            f"no assignment was found that keeps the measured peak within {byte_text(estimate.limit)}: the least "
            f"measured is {byte_text(smallest or 0)}. Raise the budget, choose formats without a scale per tensor, or "
            f"do not compile the model."
        )

    def fit_estimates(self, share: float) -> Fit:
        """The smallest number of moves whose estimated peak is within a share of the budget."""
        baseline_peak = self.peaks[_NO_PLAN]
        limit = self.budget.limit(baseline_peak)
        allowed = int(limit * share)
        low, high = 0, self.moves
        if self._peak(0) <= allowed:
            return Fit(0, baseline_peak, self._peak(0), limit)
        if self._peak(self.moves) > allowed:
            candidates = range(self.moves - 1, max(self.moves - 1 - _EXTRA_CANDIDATES, 0), -1)
            fitting = [moves_made for moves_made in candidates if self._peak(moves_made) <= allowed]
            if not fitting:
                planned_peaks = {number: estimate for number, estimate in self.peaks.items() if number != _NO_PLAN}
                raise PlanError(_no_fit_message(limit, share, baseline_peak, planned_peaks, self.moves))
            high = fitting[-1]
        while high - low > 1:
            middle = (low + high) // 2
            if self._peak(middle) <= allowed:
                high = middle
            else:
                low = middle
        return Fit(high, baseline_peak, self._peak(high), limit)

    def _peak(self, moves_made: int) -> int:
        if moves_made not in self.peaks:
            self.peaks[moves_made] = self.step.estimate_peak(self.plan_after(moves_made))
            peak = byte_text(self.peaks[moves_made])
            self.report(f"{moves_made} of {self.moves} moves: a peak of {peak}, estimated.")
        return self.peaks[moves_made]


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
