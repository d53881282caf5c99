"""What a training step really holds in memory, as torch's allocator tells it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.attach import Attachment, attach
from bitplan.errors import AccountError
from bitplan.graphs.allowances import many_graphs
from bitplan.memory.account import Memory
from bitplan.memory.allocator import allocator_of
from bitplan.memory.fakes import plain_copy
from bitplan.memory.step import Loss, OptimizerChoice, Phase, TrainingStep, call_of, plan_for
from bitplan.memory.storages import held, parts_of, storage_bytes
from bitplan.plan import Plan
from bitplan.seeing.batches import split_batch


def measure_memory(
    model: nn.Module,
    batch: Any,
    loss: Loss | None = None,
    optimizer: OptimizerChoice = "default",
    plan: Plan | str | None = None,
    execution: str = "emulate",
    compile: bool = False,
    steps: int = 3,
    *,
    autocast: torch.dtype | None = None,
) -> Memory:
    """The bytes of a training step of `model` on `batch`, measured while it runs; see :func:`predict_memory`.

    A copy of the model is trained, so the model itself stays as it is. Weights, gradients and optimizer state are
    counted tensor by tensor; what is kept for the backward pass and the peak are the allocator's own figures.

    :param steps: how many steps are watched. Where something is compiled, one more comes first and is not: it compiles.
    """
    if steps < 2:
        raise AccountError(f"{steps} steps do not show what lives from one to the next: measure at least 2.")
    twin = plain_copy(model)
    call = call_of(batch, loss)
    run: Attachment | None = None
    if (planned := plan_for(plan, optimizer)) is not None:
        run = attach(twin, planned, example=split_batch(batch, loss)[0], execution=execution)
    forward = compiled(twin, run) if compile else None
    planned_loss = loss if loss is None or run is None else run.loss(loss)
    step = TrainingStep(twin, call, planned_loss, optimizer, run, forward, autocast)
    with many_graphs():  # the model itself, and copies under other plans, may have been compiled before
        return measure_step(step, steps, warm_up=compile or step.compiles_optimizer())


def compiled(model: nn.Module, run: Attachment | None) -> Callable[..., Any]:
    """The model as torch.compile makes it; under packed execution as the attachment does."""
    return torch.compile(model) if run is None or run.execution == "emulate" else run.compile()


def measure_step(step: TrainingStep, steps: int, warm_up: bool) -> Memory:
    """Watch the allocator while so many steps are made."""
    if warm_up:
        step(lambda phase: None)
    gradients = 0
    before = storage_bytes(step.weights()) + _dense_bytes(step.batch()) + storage_bytes(step.optimizer_state())
    allocator = allocator_of(step.device)

    def note(phase: Phase) -> None:
        nonlocal gradients
        allocator.note(phase)
        if phase == "backward":
            gradients = storage_bytes(step.gradients())

    with allocator:
        for _ in range(steps):
            step(note)
    return Memory.of(
        weights=storage_bytes(step.weights()),
        gradients=gradients,
        activations=allocator.last("forward") - allocator.last("start"),
        optimizer=storage_bytes(step.optimizer_state()),
        peak=before + allocator.peak,
    )


def _dense_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the tensors themselves; a batch may be a part of something far larger."""
    parts = {id(part): part for tensor in tensors for part in parts_of(tensor)}
    return sum(held(part.numel() * part.element_size(), part.device) for part in parts.values())
