"""The damage of a low precision, measured: what a group's rounding does to the gradient that the optimizer sees.

A copy of the model computes the gradient of all parameters on some batches: once with everything at the highest level,
and once for every move, with that one group at that level. The damage of a move is the squared distance of the two
gradients over the squared length of the first, averaged over the batches. It holds the rounding of forward and backward
tensors against each other in one unit, and needs no guess about either.

**What it costs.** For G groups, L levels and B batches: B (1 + G (L - 1)) forward and backward passes, after `warm`
training steps. ResNet-18 with two levels and two batches: 46 passes, as much as 46 training steps, once.
"""

from __future__ import annotations

import copy
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

#: Batches that damage is measured on, and training steps before.
BATCHES, WARM = 2, 8


@dataclass(frozen=True)
class Probe:
    """What was measured, and what it took."""

    damages: dict[Move, float]
    passes: int
    warm: int


def probe(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Callable[..., Tensor],
    plan_for: Callable[[Sequence[Move]], Plan],
    moves: Sequence[Move],
    *,
    optimizer: Callable[[nn.Module], Optimizer] | None = None,
    measured: int = BATCHES,
    warm: int = WARM,
    loss_scale: float = 1.0,
    seed: int = 0,
    on_pass: Callable[[int, int], None] | None = None,
) -> Probe:
    """The damage of every move, on copies: the model stays as it is.

    :param batches: as :func:`bitplan.list_sites` takes them; the first `warm` are trained on, at the highest level, the
        next `measured` are what damage is measured on. Where there are fewer, they are gone through again.
    :param plan_for: the plan in which these moves alone were made.
    :param optimizer: makes the optimizer of the warm-up for the copy; without one there is no warm-up.
    :param loss_scale: the loss is multiplied by it, and the gradients divided.
    """
    batch_list = list(batches)
    if not batch_list:
        raise PlanError("there is no batch to measure damage on.")
    if loss is None:
        raise PlanError("damage is measured in gradients: give a loss.")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise PlanError("the order sensitivity runs the model: give one with real weights.")
    warm = warm if optimizer is not None else 0
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        twin = copy.deepcopy(model)
        high = plan_for(())
        if optimizer is not None:
            _train(
                twin,
                [batch_list[step % len(batch_list)] for step in range(warm)],
                loss,
                high,
                optimizer,
                loss_scale,
                seed,
            )
        chosen = [batch_list[(warm + number) % len(batch_list)] for number in range(max(measured, 1))]
        total = len(chosen) * (1 + len(moves))
        damages = dict.fromkeys(moves, 0.0)
        passes = 0
        for batch in chosen:
            exact = _gradient(twin, batch, loss, high, loss_scale, seed)
            length = float(exact.square().sum())
            passes += 1
            for move in moves:
                rough = _gradient(twin, batch, loss, plan_for([move]), loss_scale, seed)
                error = float((rough - exact).square().sum()) / max(length, 1e-30)
                # A gradient that is not finite is no gradient: it comes last.
                damages[move] += error if error == error else float("inf")
                passes += 1
                if on_pass is not None:
                    on_pass(passes, total)
    return Probe({move: damage / len(chosen) for move, damage in damages.items()}, passes, warm)


def _gradient(model: nn.Module, batch: Any, loss: Callable[..., Tensor], plan: Plan, scale: float, seed: int) -> Tensor:
    """All parameters' gradients in one row; dropout and the like draw the same numbers every time."""
    torch.manual_seed(seed)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.zero_grad(set_to_none=True)
    with attach(model, plan, example=split_batch(batch, loss)[0], seed=seed) as run:
        _backward(model, split_batch(batch, loss), run.loss(loss), scale)
    gradients = [parameter.grad.flatten() / scale for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    with torch.no_grad():  # norms have counted this batch
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
    make: Callable[[nn.Module], Optimizer],
    scale: float,
    seed: int,
) -> None:
    if not batches:
        return
    torch.manual_seed(seed)
    optimizer = make(model)
    with attach(model, plan, example=split_batch(batches[0], loss)[0], seed=seed) as run:
        planned = run.loss(loss)
        for batch in batches:
            optimizer.zero_grad(set_to_none=True)
            _backward(model, split_batch(batch, loss), planned, scale)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= scale
            optimizer.step()
            run.step()
