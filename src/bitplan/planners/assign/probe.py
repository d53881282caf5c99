"""Measured sensitivity: the error that rounding a group adds to the gradient of the parameters.

A copy of the model computes the gradient of all parameters on a few batches: once with all tensors at the highest
level, and once for every move, with only that group at that level. The sensitivity of a move is the squared distance of
the two gradients relative to the squared norm of the first, averaged over the batches. So the rounding of forward and
backward tensors is compared in the same unit.

**Cost.** For G groups, L levels and B batches: B (1 + G (L - 1)) forward and backward passes after the warm-up steps.
ResNet-18 with two levels and two batches: 46 passes, about the time of 46 training steps.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bitplan.capture.recording import call_arguments, call_loss, split_batch
from bitplan.errors import PlanError
from bitplan.planners.assign.levels import Move
from bitplan.plans import Plan
from bitplan.runtime.attach import attach

#: Batches on which sensitivity is measured, and training steps before.
BATCHES, WARMUP_STEPS = 2, 8


@dataclass(frozen=True)
class Probe:
    """The sensitivity of every move, and the cost of the measurement."""

    sensitivities: dict[Move, float]
    passes: int
    warmup_steps: int


def probe(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Callable[..., Tensor],
    plan_for: Callable[[Sequence[Move]], Plan],
    moves: Sequence[Move],
    *,
    optimizer: Callable[[nn.Module], Optimizer] | None = None,
    loss_scale: float = 1.0,
    seed: int = 0,
) -> Probe:
    """Measure the sensitivity of every move on a copy of the model.

    :param batches: as in :func:`bitplan.list_sites`: first :data:`WARMUP_STEPS` batches for training at the highest
        level, then :data:`BATCHES` for the measurement. If there are fewer, they are repeated.
    :param plan_for: the plan in which only these moves are made.
    :param optimizer: makes the optimizer of the warm-up; None: no warm-up.
    :param loss_scale: the loss is multiplied by it, and the gradients are divided by it.
    """
    batch_list = list(batches)
    if not batch_list:
        raise PlanError("there is no batch to measure sensitivity on.")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise PlanError("the order sensitivity runs the model: give one with real weights.")
    warmup_steps = 0 if optimizer is None else WARMUP_STEPS
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        replica = copy.deepcopy(model)
        high = plan_for(())
        if optimizer is not None:
            warmup = [batch_list[step % len(batch_list)] for step in range(warmup_steps)]
            _train(replica, warmup, loss, high, optimizer, loss_scale, seed)
        sensitivities = dict.fromkeys(moves, 0.0)
        for number in range(BATCHES):
            batch = batch_list[(warmup_steps + number) % len(batch_list)]
            reference = _compute_gradient(replica, batch, loss, high, loss_scale, seed)
            squared_norm = float(reference.square().sum())
            for move in moves:
                rounded = _compute_gradient(replica, batch, loss, plan_for([move]), loss_scale, seed)
                error = float((rounded - reference).square().sum()) / max(squared_norm, 1e-30)
                # Moves with a gradient that is not finite come last.
                sensitivities[move] += float("inf") if math.isnan(error) else error
    averages = {move: total / BATCHES for move, total in sensitivities.items()}
    return Probe(averages, BATCHES * (1 + len(moves)), warmup_steps)


def _compute_gradient(
    model: nn.Module, batch: Any, loss: Callable[..., Tensor], plan: Plan, scale: float, seed: int
) -> Tensor:
    """The gradients of all parameters as a vector; dropout draws the same numbers in every call."""
    torch.manual_seed(seed)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.zero_grad(set_to_none=True)
    with attach(model, plan, example=split_batch(batch, loss)[0], seed=seed) as run:
        _backward(model, split_batch(batch, loss), run.loss(loss), scale)
    gradients = [parameter.grad.flatten() / scale for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    with torch.no_grad():  # undo the update of running statistics
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    return torch.cat(gradients).double()


def _backward(model: nn.Module, pair: tuple[Any, Any], loss: Callable[..., Tensor], scale: float) -> None:
    inputs, target = pair
    args, kwargs = call_arguments(inputs)
    value = call_loss(loss, model(*args, **kwargs), target)
    (value * scale).backward()


def _train(
    model: nn.Module,
    batches: Sequence[Any],
    loss: Callable[..., Tensor],
    plan: Plan,
    make_optimizer: Callable[[nn.Module], Optimizer],
    scale: float,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    optimizer = make_optimizer(model)
    with attach(model, plan, example=split_batch(batches[0], loss)[0], seed=seed) as run:
        rounded_loss = run.loss(loss)
        for batch in batches:
            optimizer.zero_grad(set_to_none=True)
            _backward(model, split_batch(batch, loss), rounded_loss, scale)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= scale
            optimizer.step()
            run.step()
