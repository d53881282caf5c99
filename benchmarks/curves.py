"""Loss curves, by which the memory and the speed benchmark compare training variants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bitplan.analysis.memory.step import TrainingStep
from bitplan.lab.tasks.task import decayed
from bitplan.runtime.optimizers import set_rate

#: Positional and keyword arguments of a step.
Call = tuple[tuple[Any, ...], dict[str, Any]]
#: The share of the last steps of a run whose mean loss is compared.
_COMPARED_SHARE = 0.05


def losses_of(step: TrainingStep, call_at: Callable[[int], Call], steps: int) -> list[float]:
    """The loss of every step from the current weights on.

    The learning rate warms up for a tenth of the steps and decays to zero: at a high learning rate the loss of the last
    step is noisy, and variants cannot be compared by it.
    """
    optimizer = step.optimizer
    assert optimizer is not None
    peaks = [float(group["lr"]) for group in optimizer.param_groups]
    seen: list[Tensor] = []
    kept = step.args, step.kwargs
    step.on_loss = lambda loss: seen.append(loss.float())
    try:
        for number in range(steps):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                set_rate(group, peak * decayed("cosine", number, steps, warmup=steps // 10))
            step.args, step.kwargs = call_at(number)
            step(lambda phase: None)
    finally:
        step.args, step.kwargs = kept
        step.on_loss = None
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            set_rate(group, peak)
    return torch.stack(seen).tolist() if seen else []


def mean_loss(step: TrainingStep, call_at: Callable[[int], Call], batches: int) -> float:
    """The mean loss on held-out batches, by the compiled training graph."""
    kept = step.args, step.kwargs
    losses: list[Tensor] = []
    try:
        for number in range(batches):
            step.args, step.kwargs = call_at(number)
            losses.append(step.loss_of_batch().detach().float())
    finally:
        step.args, step.kwargs = kept
    return float(torch.stack(losses).mean())


def final(losses: list[float]) -> float:
    """The mean of the last losses."""
    last = losses[-max(1, round(len(losses) * _COMPARED_SHARE)) :]
    return sum(last) / len(last)


def thinned(losses: list[float], most: int = 100) -> list[float]:
    """The curve in at most this many points, each the mean of its segment."""
    stretch = -(-len(losses) // most)
    return [sum(part) / len(part) for part in (losses[at : at + stretch] for at in range(0, len(losses), stretch or 1))]
