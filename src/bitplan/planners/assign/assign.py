"""Assignments: which tensors of a training step are stored in low precision, for a ratio or a memory budget.

Lee, Sharma & Aiken 2023 (arXiv 2301.13464): the tensors of a step are partitioned into groups that begin at products.
Groups are demoted to the low precision one after the other, the largest first, until the ratio of low values is
reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.analysis.memory.step import OptimizerChoice
from bitplan.errors import PlanError
from bitplan.planners.assign.assignment import Assignment, count_moves_for_ratio, make_baseline
from bitplan.planners.assign.budget import Budget, Step, fit
from bitplan.planners.assign.groups import StepTensors, count_tensors
from bitplan.planners.assign.levels import (
    Formats,
    Level,
    Move,
    is_scaled,
    order_moves,
    order_moves_by_sensitivity,
    require_order,
    resolve_formats,
)
from bitplan.planners.assign.probe import Probe, probe
from bitplan.plans import Plan
from bitplan.plans.spec import DEFAULT_OVERFLOW

#: Default formats for a memory budget: dtypes that hardware supports.
BUDGET_FORMATS = "bf16/e4m3+e5m2"
#: A scaled tensor is promoted when at least this share of its values underflows to zero.
PROMOTED_UNDERFLOW = 0.05
#: Initial loss scale of the paper's runs.
LOSS_SCALE = 65536.0


@dataclass(frozen=True)
class AssignRequest:
    """The options of an assignment. Exactly one of ratio, budget and baseline is set."""

    ratio: float | None = None
    #: ``6GiB``, a number of bytes, or a share of the peak without a plan such as ``70%``.
    budget: str | int | Budget | None = None
    baseline: str | None = None
    order: str = "largest"
    #: Seed of the random order and of the sensitivity measurement.
    seed: int = 0
    #: Promotion threshold; True: the default of the request, see :meth:`promotion_threshold`.
    promotion: float | bool = True

    def __post_init__(self) -> None:
        chosen = [name for name in ("ratio", "budget", "baseline") if getattr(self, name) is not None]
        if len(chosen) != 1:
            raise PlanError(f"give one of ratio, budget and baseline, not {' and '.join(chosen) or 'none'}.")
        if self.ratio is not None and not 0 <= self.ratio <= 1:
            raise PlanError(f"ratio is {self.ratio:g}; it must be a share from 0 to 1.")
        require_order(self.order)
        if self.baseline is not None and self.order != "largest":
            raise PlanError(f"the baseline {self.baseline} has no order: drop {self.order}.")
        if not isinstance(self.promotion, bool) and not 0 < self.promotion <= 1:
            raise PlanError(f"promotion is {self.promotion:g}; it must be a share above 0, at most 1, or False.")

    def promotion_threshold(self, formats: Formats) -> float | None:
        """The share of values that overflow (scaled formats: underflow) at which a tensor is promoted; None: never.

        Under a budget the default is never, because a promoted tensor takes more memory.
        """
        if not isinstance(self.promotion, bool):
            return self.promotion
        if not self.promotion or self.budget is not None or self.baseline is not None:
            return None
        low = formats.levels[-1].activation
        return PROMOTED_UNDERFLOW if low is not None and is_scaled(low) else DEFAULT_OVERFLOW

    def provenance(self, formats: Formats) -> dict[str, Any]:
        """Entries of the plan's ``made_by``."""
        provenance: dict[str, Any] = {"formats": formats.name, "order": self.order}
        if self.order == "random":
            provenance["seed"] = self.seed
        if self.ratio is not None:
            provenance["ratio"] = self.ratio
        if (threshold := self.promotion_threshold(formats)) is not None:
            provenance["promotion"] = threshold
        return provenance


def assign(
    model: nn.Module,
    batch: Any,
    loss: Callable[..., Tensor] | None = None,
    *,
    ratio: float | None = None,
    budget: str | int | None = None,
    baseline: str | None = None,
    formats: str | Formats | None = None,
    levels: Sequence[str | Level] | None = None,
    low: str | Level | None = None,
    high: str | Level | None = None,
    order: str = "largest",
    seed: int = 0,
    optimizer: OptimizerChoice = "default",
    compile: bool = False,
    device: torch.device | str | None = None,
    batches: Iterable[Any] | None = None,
    promotion: float | bool = True,
) -> Plan:
    """Choose the tensors of a training step that are stored in low precision, for a ratio or a memory budget.

    Only the order ``sensitivity`` needs to run the model; for the others it may be on the ``meta`` device. A budget
    that is a share also runs a copy of it, if it has values and fits. `batch` and `loss` are as in
    :func:`bitplan.list_sites`.

    :param ratio: the share of a step's values that are low, 0 to 1.
    :param budget: the peak memory of a packed step: ``"6GiB"``, bytes, or a share of the peak without a plan,
        ``"70%"``, which is measured if the model can run here. Weights, gradients and optimizer state are included.
    :param baseline: instead of both, one of :data:`bitplan.planners.assign.assignment.BASELINES`.
    :param formats: ``paper`` (the default with a ratio), ``bf16/e4m3+e5m2`` (the default with a budget),
        ``bf16/mxfp8``, or levels of your own as in ``bf16/8/4``.
    :param levels: the same as a list; or the lowest and the highest as `low` and `high`.
    :param order: which groups are demoted first: ``largest``, ``smallest``, ``random`` (by `seed`), or ``sensitivity``,
        which measures the gradient error of each group's rounding for each byte saved.
    :param optimizer: for a budget, as in :func:`bitplan.estimate_memory`; for the order ``sensitivity`` a function
        that makes the optimizer of the warm-up steps.
    :param compile: the budget is that of the compiled model.
    :param batches: for the warm-up and the measurement of sensitivity; by default only `batch`.
    :param promotion: a low tensor is promoted to the highest level for the rest of the run when this share of its
        values overflows (scaled formats: underflows to zero). By default 0.01 (0.05) with a ratio, never with a budget.

    >>> net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> assign(net, torch.randn(4, 8), ratio=0.5).made_by["demoted"]
    1
    """
    request = AssignRequest(ratio, budget, baseline, order, seed, promotion)
    return make_assignment(
        model,
        batch,
        loss,
        request,
        choose_formats(request, formats, levels, low, high),
        optimizer=optimizer,
        compile=compile,
        device=device,
        batches=batches,
    ).plan


def choose_formats(
    request: AssignRequest,
    formats: str | Formats | None = None,
    levels: Sequence[str | Level] | None = None,
    low: str | Level | None = None,
    high: str | Level | None = None,
) -> Formats:
    """The formats that were passed, or the default of the request."""
    if request.budget is not None and formats is None and levels is None and low is None and high is None:
        formats = BUDGET_FORMATS
    return resolve_formats(formats, levels, low, high)


def make_assignment(
    model: nn.Module,
    batch: Any,
    loss: Callable[..., Tensor] | None,
    request: AssignRequest,
    formats: Formats,
    *,
    optimizer: OptimizerChoice = "default",
    compile: bool = False,
    device: torch.device | str | None = None,
    batches: Iterable[Any] | None = None,
    report: Callable[[str], None] | None = None,
    check_peak: bool | None = None,
    make_values: Callable[[], tuple[nn.Module, Any]] | None = None,
) -> Assignment:
    """Like :func:`assign`; returns the groups, their order and the statistics with the plan.

    :param report: called with progress messages.
    :param check_peak: measure the peak of a step and demote more groups while it exceeds the budget. By default only
        for compiled models, whose estimates are less exact, and where the peak without a plan was measured and its
        estimate is off. Without real weights nothing is measured.
    :param make_values: makes the model and the batch with values for these measurements, where `model` and `batch` have
        shapes only.
    """
    step_tensors = count_tensors(model, batch, loss, decompose_loss=formats.decompose_loss)
    if request.baseline is not None:
        return make_baseline(request.baseline, step_tensors, formats)
    provenance = request.provenance(formats)
    if request.order == "sensitivity":
        probe_result = _measure_sensitivity(
            model, [batch] if batches is None else batches, loss, step_tensors, formats, optimizer, request.seed
        )
        moves = order_moves_by_sensitivity(probe_result.sensitivities, _bytes_saved(step_tensors, formats))
        provenance |= {"probe": {"passes": probe_result.passes, "warm_steps": probe_result.warmup_steps}}
        if report is not None:
            report(
                f"sensitivity was measured by {probe_result.passes} forward and backward passes after "
                f"{probe_result.warmup_steps} steps."
            )
    else:
        moves = order_moves(request.order, step_tensors.groups, formats.low, request.seed)

    def after(moves_made: int) -> Assignment:
        threshold = request.promotion_threshold(formats)
        return Assignment.after(step_tensors, formats, moves, moves_made, provenance, threshold)

    if request.budget is None:
        assert request.ratio is not None
        return after(count_moves_for_ratio(step_tensors, formats, moves, request.ratio))
    budget = Budget.parse(request.budget)
    step = Step(model, batch, loss, optimizer, compile, device, make_values)
    fitted = fit(
        budget,
        step,
        lambda moves_made: after(moves_made).plan,
        len(moves),
        report,
        compile if check_peak is None else check_peak,
        # A compiled step takes minutes: it is run where the plan's is, too.
        measure_plain=not compile or check_peak is not False,
    )
    provenance |= {
        "budget": str(budget),
        "budget_bytes": fitted.limit,
        "peak_today": fitted.baseline_peak,
        "peak_today_from": "measured" if fitted.is_baseline_measured else "estimated",
        "peak_predicted": fitted.peak,
        "compile": compile,
        **({} if fitted.measured_peak is None else {"peak_measured": fitted.measured_peak}),
    }
    return after(fitted.moves_made)


def _measure_sensitivity(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Callable[..., Tensor] | None,
    step_tensors: StepTensors,
    formats: Formats,
    optimizer: OptimizerChoice,
    seed: int,
) -> Probe:
    if loss is None:
        raise PlanError("sensitivity is measured on gradients: give a loss.")
    moves = order_moves("largest", step_tensors.groups, formats.low)
    return probe(
        model,
        batches,
        loss,
        lambda demoted: Assignment.after(step_tensors, formats, demoted, len(demoted), {}).plan,
        moves,
        optimizer=optimizer if callable(optimizer) else None,
        loss_scale=LOSS_SCALE if formats.needs_loss_scale else 1.0,
        seed=seed,
    )


def _bytes_saved(step_tensors: StepTensors, formats: Formats) -> dict[Move, float]:
    """The bytes that each move saves over all tensors of its group."""
    savings: dict[Move, float] = {}
    for tensor in step_tensors.tensors:
        for level in range(1, formats.low + 1):
            bits_saved = formats.levels[level - 1].bits(tensor.role) - formats.levels[level].bits(tensor.role)
            move = Move(tensor.group, level)
            savings[move] = savings.get(move, 0.0) + tensor.elements * bits_saved / 8
    return savings
