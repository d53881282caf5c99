"""Verifying a candidate: it is trained beside the model without a plan, from the same weights on the same batches."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bitplan.planners.auto.trials import Trials
from bitplan.plans import Plan
from bitplan.significance import Difference


@dataclass(frozen=True)
class LossGap:
    """The mean loss at the end of training under a plan, less that without a plan, paired by seed."""

    gap: float
    #: The 95 % interval over seeds; infinite with one seed.
    low: float
    high: float
    #: Mean loss without a plan, and its standard deviation over seeds (0 with one).
    baseline_loss: float
    baseline_spread: float
    steps: int
    seeds: int
    #: Whether there was no data but the one batch.
    on_one_batch: bool

    @classmethod
    def of(cls, plain: Sequence[float], planned: Sequence[float], steps: int, on_one_batch: bool) -> LossGap:
        """The gap of final losses, one of each for each seed.

        >>> LossGap.of([1.0, 2.0], [1.5, 2.5], 10, False).gap
        0.5
        """
        gap = Difference.of(planned, plain)
        spread = statistics.stdev(plain) if gap.pairs > 1 else 0.0
        return cls(gap.mean, gap.low, gap.high, statistics.fmean(plain), spread, steps, gap.pairs, on_one_batch)

    def is_within(self, limit: float | None) -> bool:
        """Whether the gap is at most `limit`; by default, what seeds alone change or 1 % of the loss."""
        allowed = max(2 * self.baseline_spread, 0.01 * abs(self.baseline_loss)) if limit is None else limit
        return math.isfinite(self.gap) and self.gap <= allowed

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        interval = f" ({self.low:+.4f} to {self.high:+.4f})" if math.isfinite(self.low) else ""
        return f"{self.gap:+.4f}{interval}"


def measure_loss_gap(
    trials: Trials,
    plan: Plan,
    *,
    steps: int,
    seeds: int,
    plain_losses: list[float],
    on_one_batch: bool,
    report: Callable[[str], None] = lambda sentence: None,
) -> LossGap:
    """Train under the plan and without, from the same weights on the same batches, and compare the losses at the end.

    :param plain_losses: final losses without a plan by seed; filled here, and used again for the next plan.
    """
    if len(plain_losses) != seeds:
        report(f"training without a plan: {seeds} x {steps} steps")
        plain_losses[:] = trials.final_losses(None, steps, seeds)
    report(f"training under the plan: {seeds} x {steps} steps")
    return LossGap.of(plain_losses, trials.final_losses(plan, steps, seeds), steps, on_one_batch)
