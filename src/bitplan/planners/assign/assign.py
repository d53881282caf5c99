"""Assignments under a budget: which tensors get a low precision, so that memory is saved where it costs least.

Lee, Sharma & Aiken 2023 (arXiv 2301.13464): the tensors of a step lie in groups, cut at products; groups go down to the
low precision one after the other, the largest first, until the ratio of low values is reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.analysis.memory.step import OptimizerChoice
from bitplan.errors import PlanError
from bitplan.numerics.formats import BlockFormat
from bitplan.planners.assign.assignment import Assignment, cut_for_ratio
from bitplan.planners.assign.assignment import baseline as baseline_of
from bitplan.planners.assign.budget import Budget, Step, fit
from bitplan.planners.assign.groups import Account, account_of
from bitplan.planners.assign.levels import Formats, Level, Move, formats_of, moves_by_damage, moves_of, require_order
from bitplan.planners.assign.probe import BATCHES, WARM, Probe, probe
from bitplan.plans import Plan
from bitplan.plans.spec import DEFAULT_OVERFLOW

#: What a budget in bytes is met with, where no formats are named: types that memory and hardware have.
BUDGET_FORMATS = "bf16/e4m3+e5m2"
#: The share of values that become zero, from which on a tensor with a scale is promoted.
PROMOTED_UNDERFLOW = 0.05
#: The loss scale that the paper's runs begin with.
LOSS_SCALE = 65536.0


@dataclass(frozen=True)
class AssignRequest:
    """What an assignment is to be. One of ratio, budget and baseline is given."""

    ratio: float | None = None
    #: ``6GiB``, a number of bytes, or a share of today's peak such as ``70%``.
    budget: str | int | Budget | None = None
    baseline: str | None = None
    order: str = "largest"
    #: Of the order random, and of what a probe draws.
    seed: int = 0
    #: The share from which on a tensor is promoted; True: the default of the request, see :meth:`share`.
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

    def share(self, formats: Formats) -> float | None:
        """The share from which on a tensor is promoted: where scales leave nothing to overflow, one that becomes zero.

        Under a budget nothing is promoted unless that is asked for: a promoted tensor takes more memory.
        """
        if not isinstance(self.promotion, bool):
            return self.promotion
        if not self.promotion or self.budget is not None or self.baseline is not None:
            return None
        low = formats.levels[-1].activation
        is_scaled = low is not None and (low.scale is not None or isinstance(low.target, BlockFormat))
        return PROMOTED_UNDERFLOW if is_scaled else DEFAULT_OVERFLOW

    def story(self, formats: Formats) -> dict[str, Any]:
        """For the plan's ``made_by``."""
        story: dict[str, Any] = {"formats": formats.name, "order": self.order}
        if self.order == "random":
            story["seed"] = self.seed
        if self.ratio is not None:
            story["ratio"] = self.ratio
        if (share := self.share(formats)) is not None:
            story["promotion"] = share
        return story


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
    """A plan that gives `model` a low precision where a ratio or a budget asks for it.

    Nothing is run, but for the order ``sensitivity``; a model on the ``meta`` device can be planned. `batch` and `loss`
    as :func:`bitplan.list_sites` takes them.

    :param ratio: the share of all values of a step that are to be low, 0 to 1.
    :param budget: what the peak of a packed step may be: ``"6GiB"``, bytes, or a share of the peak without a plan,
        ``"70%"``. Weights, optimizer state and all else that lives is counted in.
    :param baseline: in place of both, one of :data:`bitplan.planners.assign.assignment.BASELINES`.
    :param formats: ``paper`` (the default with a ratio), ``bf16/e4m3+e5m2`` (the default with a budget),
        ``bf16/mxfp8``, or levels of your own as in ``bf16/8/4``.
    :param levels: the same as a list; or `low` and `high`, the two ends.
    :param order: which groups go down first: ``largest``, ``smallest``, ``random`` (by `seed`), or ``sensitivity``,
        which measures the damage of each group's rounding per byte that it saves.
    :param optimizer: for a budget, as :func:`bitplan.estimate_memory` takes it; for the order ``sensitivity`` a
        function that makes one, with which a copy is warmed up before anything is measured.
    :param compile: the budget is for the model compiled.
    :param batches: what sensitivity is measured on; by default `batch` alone.
    :param promotion: from which share of values on that overflow (with a scale: that become zero) a low tensor gets the
        highest level for the rest of the run. By default 0.01 (0.05) with a ratio, and never with a budget.

    >>> net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> assign(net, torch.randn(4, 8), ratio=0.5).made_by["demoted"]
    1
    """
    request = AssignRequest(ratio, budget, baseline, order, seed, promotion)
    return assignment(
        *(model, batch, loss, request, chosen_formats(request, formats, levels, low, high)),
        optimizer=optimizer,
        compile=compile,
        device=device,
        batches=batches,
    ).plan


def chosen_formats(
    request: AssignRequest,
    formats: str | Formats | None = None,
    levels: Sequence[str | Level] | None = None,
    low: str | Level | None = None,
    high: str | Level | None = None,
) -> Formats:
    """The named formats, or the defaults of the request."""
    if request.budget is not None and formats is None and levels is None and low is None and high is None:
        formats = BUDGET_FORMATS
    return formats_of(formats, levels, low, high)


def assignment(
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
    tell: Callable[[str], None] | None = None,
    checks: bool | None = None,
) -> Assignment:
    """:func:`assign` with the groups, their order and the figures beside the plan.

    :param tell: told in sentences what is found on the way.
    :param checks: measure what a budget promises, and go further down where it does not hold; by default where the
        model is compiled, for whose peak there is an estimate only, and has weights.
    """
    account = account_of(model, batch, loss, opens_loss=formats.opens_loss)
    if request.baseline is not None:
        return baseline_of(request.baseline, account, formats)
    story = request.story(formats)
    if request.order == "sensitivity":
        damage = _probed(
            model, [batch] if batches is None else batches, loss, account, formats, optimizer, request.seed
        )
        moves = moves_by_damage(damage.damages, _savings(account, formats))
        story |= {"probe": {"passes": damage.passes, "warm_steps": damage.warm}}
        if tell is not None:
            tell(f"sensitivity was measured by {damage.passes} forward and backward passes after {damage.warm} steps.")
    else:
        moves = moves_of(request.order, account.groups, formats.low, request.seed)

    def after(made: int) -> Assignment:
        return Assignment.after(account, formats, moves, made, story, request.share(formats))

    if request.budget is None:
        assert request.ratio is not None
        return after(cut_for_ratio(account, formats, moves, request.ratio))
    budget = Budget.of(request.budget)
    step = Step(model, batch, loss, optimizer, compile, device)
    fitted = fit(budget, step, lambda made: after(made).plan, len(moves), tell, compile if checks is None else checks)
    story |= {
        "budget": str(budget),
        "budget_bytes": fitted.limit,
        "peak_today": fitted.today,
        "peak_predicted": fitted.peak,
        "compile": compile,
        **({} if fitted.measured is None else {"peak_measured": fitted.measured}),
    }
    return after(fitted.made)


def _probed(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Callable[..., Tensor] | None,
    account: Account,
    formats: Formats,
    optimizer: OptimizerChoice,
    seed: int,
) -> Probe:
    if loss is None:
        raise PlanError("damage is measured in gradients: give a loss.")
    moves = moves_of("largest", account.groups, formats.low)
    return probe(
        *(model, batches, loss),
        lambda made: Assignment.after(account, formats, made, len(made), {}).plan,
        moves,
        optimizer=optimizer if callable(optimizer) else None,
        measured=BATCHES,
        warm=WARM,
        loss_scale=LOSS_SCALE if formats.wants_loss_scale else 1.0,
        seed=seed,
    )


def _savings(account: Account, formats: Formats) -> dict[Move, float]:
    """Bytes that each move saves of all tensors of its group."""
    savings: dict[Move, float] = {}
    for tensor in account.tensors:
        for level in range(1, formats.low + 1):
            before, now = (formats.levels[number].bits(tensor.role) for number in (level - 1, level))
            move = Move(tensor.group, level)
            savings[move] = savings.get(move, 0.0) + tensor.elements * (before - now) / 8
    return savings
