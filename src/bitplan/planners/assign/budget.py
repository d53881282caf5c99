"""Keeping the peak of a training step under a budget: the real one of packed execution, everything counted in.

A ratio is an aggregate over all tensors of a step, which do not all live at once. A budget in bytes is about the *most*
that lives at any moment: master weights, optimizer state, gradients, what is kept for the backward pass and what is on
its way, as :func:`bitplan.estimate_memory` foresees it for the very plan, on tensors without data. Down the list of
moves the peak falls, so the least cut under the budget is found by halving.
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

#: An estimated peak has been up to a hundredth below what the allocator then counted, for kernels take memory of their
#: own; a promise should hold, so this share of the budget is spared.
_SPARE = 0.02
#: So often a cut is measured, and a lower one tried.
_CHECKS = 3
#: Among known peaks: the one without a plan.
_TODAY = -1
#: Halving trusts that the peak falls from cut to cut; where it does not, so many neighbours are looked at as well.
_NEIGHBOURS = 2


@dataclass(frozen=True)
class Budget:
    """A number of bytes, or a share of the peak without a plan."""

    bytes: int | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        if (self.bytes is None) == (self.share is None):
            raise PlanError("a budget is either bytes or a share of today's peak.")
        if self.share is not None and self.share <= 0:
            raise PlanError("a share of today's peak is more than 0%: write it as 70%.")

    @classmethod
    def of(cls, value: str | int | Budget) -> Budget:
        """What ``6GiB``, ``70%`` or a number of bytes means.

        >>> Budget.of("70%").share, Budget.of("1KiB").bytes
        (0.7, 1024)
        """
        if isinstance(value, Budget):
            return value
        if isinstance(value, str) and (percent := re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*%\s*", value)):
            return cls(share=float(percent[1]) / 100)
        return cls(bytes=read_bytes(str(value)))

    def limit(self, today: int) -> int:
        """Bytes."""
        return self.bytes if self.bytes is not None else int(today * (self.share or 0))

    def __str__(self) -> str:
        return byte_text(self.bytes).replace(" ", "") if self.bytes is not None else f"{100 * (self.share or 0):g}%"


@dataclass(frozen=True)
class Fit:
    """A cut whose peak lies within the budget."""

    made: int
    #: Estimated bytes: without a plan, and with the plan of the cut; and what the budget allows.
    today: int
    peak: int
    limit: int
    #: What was measured with the plan of the cut; None where nothing was.
    measured: int | None = None


@dataclass(frozen=True)
class Step:
    """The training step whose memory is asked about."""

    model: nn.Module
    batch: Any
    loss: Callable[..., Tensor] | None = None
    optimizer: OptimizerChoice = "default"
    compile: bool = False
    device: torch.device | str | None = None

    def measured(self, plan: Plan) -> int | None:
        """The peak of a packed step that is really made; None where the model has no weights here."""
        if any(parameter.is_meta for parameter in self.model.parameters()):
            return None
        return measure_memory(
            *(self.model, self.batch, self.loss, self.optimizer, plan, "packed", self.compile), steps=2
        ).peak

    def peak(self, plan: Plan | None) -> int:
        """The estimated peak: packed under a plan, and as it is without one."""
        execution = "emulate" if plan is None else "packed"
        return estimate_memory(
            *(self.model, self.batch, self.loss, self.optimizer, plan, execution, self.compile), device=self.device
        ).peak


def fit(
    budget: Budget,
    step: Step,
    plan_after: Callable[[int], Plan],
    moves: int,
    tell: Callable[[str], None] | None = None,
    checks: bool = False,
) -> Fit:
    """The smallest cut whose plan keeps the step's peak within the budget.

    :param plan_after: the plan after so many moves.
    :param tell: told of each estimate in a sentence.
    :param checks: make the step as well, and go further down where its measured peak lies above the budget.
    """
    say = tell or (lambda sentence: None)
    peaks: dict[int, int] = {}
    cut = _estimated_fit(budget, step, plan_after, moves, say, peaks, 1 - _SPARE)
    if not checks:
        return cut
    share, least = 1 - _SPARE, None
    for _ in range(_CHECKS):
        measured = step.measured(plan_after(cut.made))
        if measured is None:
            return cut
        say(f"{cut.made} of {moves} moves: a peak of {byte_text(measured)}, measured.")
        if measured <= cut.limit:
            return replace(cut, measured=measured)
        least = measured if least is None else min(least, measured)
        if cut.made == moves:
            break
        # As much lower as the estimate was too low, and one move further at least.
        share = min(share * cut.peak / measured, (cut.peak - 1) / cut.limit)
        try:
            cut = _estimated_fit(budget, step, plan_after, moves, say, peaks, share)
        except PlanError:
            cut = replace(cut, made=moves, peak=peaks[moves])
    raise PlanError(
        f"no assignment was found that keeps the measured peak within {byte_text(cut.limit)}: the least measured is "
        f"{byte_text(least or 0)}. Raise the budget, choose formats without a scale per tensor, or leave the model "
        f"uncompiled."
    )


def _estimated_fit(
    budget: Budget,
    step: Step,
    plan_after: Callable[[int], Plan],
    moves: int,
    say: Callable[[str], None],
    known: dict[int, int],
    share: float,
) -> Fit:
    """The smallest cut whose estimated peak lies within a share of the budget; `known` are peaks estimated so far."""
    if _TODAY not in known:
        known[_TODAY] = step.peak(None)
    today = known[_TODAY]
    limit = budget.limit(today)
    if len(known) == 1:
        say(f"without a plan: a peak of {byte_text(today)}, estimated; the budget is {byte_text(limit)}.")

    def peak(made: int) -> int:
        if made not in known:
            known[made] = step.peak(plan_after(made))
            say(f"{made} of {moves} moves: a peak of {byte_text(known[made])}, estimated.")
        return known[made]

    allowed = int(limit * share)
    low, high = 0, moves
    if peak(0) <= allowed:
        return Fit(0, today, peak(0), limit)
    if peak(moves) > allowed:
        fitting = [made for made in range(moves - 1, max(moves - 1 - _NEIGHBOURS, 0), -1) if peak(made) <= allowed]
        if not fitting:
            peaks = {made: bytes_ for made, bytes_ in known.items() if made != _TODAY}
            raise PlanError(_impossible(limit, share, today, peaks, moves))
        high = fitting[-1]
    while high - low > 1:
        middle = (low + high) // 2
        if peak(middle) <= allowed:
            high = middle
        else:
            low = middle
    return Fit(high, today, peak(high), limit)


def _impossible(limit: int, share: float, today: int, peaks: dict[int, int], moves: int) -> str:
    best = min(peaks, key=lambda made: (peaks[made], made))
    needed = math.ceil(peaks[best] / share) + 1
    spared = (
        f", and {1 - share:.0%} of a budget is spared for what an estimate may miss" if peaks[best] <= limit else ""
    )
    how = "with every group at the lowest level" if best == moves else f"after {best} of {moves} moves"
    beside = f"; without a plan the peak is {byte_text(today)}, which fits" if today <= limit else ""
    return (
        f"no assignment keeps the peak within {byte_text(limit)}: the least is {byte_text(peaks[best])}, "
        f"{how}{spared}{beside}. Give a budget of {needed} bytes or more, add a lower level, or make the batch smaller."
    )
