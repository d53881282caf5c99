"""What a training step will hold in memory, found on fake tensors: nothing is computed, nothing is allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_leaves

from bitplan.attach import Attachment, attach
from bitplan.memory.account import Memory
from bitplan.memory.fakes import Fakes, rounding_in_two_parts, told_of_missing_values
from bitplan.memory.partitioned import compiled_on_fakes
from bitplan.memory.step import Loss, OptimizerChoice, TrainingStep, call_of, plan_for
from bitplan.memory.storages import parts_of, storage_bytes
from bitplan.memory.walk import Walk
from bitplan.plan import Plan

#: The first step makes the optimizer's state, the second has it from its start.
_STEPS = 2

#: Bytes for every value of a parameter that torchao's compiled step takes while it is at work on it, as the allocator
#: counts them on a CPU with torch 2.13: for int8 and int4 the search in the lookup table leaves codes of 64 bits.
_TAKEN_BY_STEP = {"int8": 8.0, "int4": 26.0, "e4m3": 8 / 256}


def predict_memory(
    model: nn.Module,
    batch: Any,
    loss: Loss | None = None,
    optimizer: OptimizerChoice = "default",
    plan: Plan | str | None = None,
    execution: str = "emulate",
    compile: bool = False,
    *,
    autocast: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Memory:
    """The bytes of a training step of `model` on `batch`, without running it.

    A copy of the model makes two steps on fake tensors, with the plan attached as it would be; each piece of memory is
    followed from the operation that makes it until nothing holds it any more. So a model that does not fit can be
    asked, also one made on the ``meta`` device. Compiled, what is kept for the backward pass is read from the
    partitioned graph, and the peak is an estimate.

    :param batch: what the model takes, or (inputs, target) where the loss wants both.
    :param optimizer: ``"sgd"`` (with momentum), ``"adamw"``, ``"none"``, or a function that makes one for the model; by
        default SGD, and AdamW where the plan says what optimizer state is kept in.
    :param autocast: the type that autocast computes in; None is without autocast.
    :param device: where the step is to run; by default where the model is.
    """
    fakes = Fakes(None if device is None else torch.device(device))
    twin = fakes.model(model)
    args, kwargs, expected = fakes.all(call_of(batch, loss))
    sparse = storage_bytes(leaf for leaf in tree_leaves(batch) if _is_sparse(leaf))
    walk = Walk()
    run: Attachment | None = None
    with told_of_missing_values(), rounding_in_two_parts(), fakes.mode, ExitStack() as at_the_end:
        if (planned := plan_for(plan, optimizer)) is not None:
            inputs = fakes.inputs(args, kwargs)
            with unset_fake_temporarily():
                run = at_the_end.enter_context(attach(twin, planned, example=inputs, execution=execution))
        forward: Callable[..., Any] | None = compiled_on_fakes(twin, run, walk) if compile else None
        planned_loss = loss
        if loss is not None and run is not None:
            with unset_fake_temporarily():
                planned_loss = run.loss(loss)
        step = TrainingStep(twin, (args, kwargs, expected), planned_loss, optimizer, run, forward, autocast)
        step.around_run = unset_fake_temporarily
        if step.compiles_optimizer():
            step.around_optimizer = lambda: _uncompiled(step, walk)
        if compile:
            step(lambda phase: None)  # compiles, which is not to be watched
        with walk.watching():
            walk.see([*step.weights(), *step.batch(), *_parts(step.optimizer_state())])
            walk.hold(sparse)
            gradients = 0

            def note(phase: Any) -> None:
                nonlocal gradients
                walk.note(phase)
                if phase == "backward":
                    gradients = storage_bytes(step.gradients())

            for _ in range(_STEPS):
                step(note)
        return Memory.of(
            weights=storage_bytes(step.weights()),
            gradients=gradients,
            activations=walk.notes["forward"] - walk.notes["start"],
            optimizer=storage_bytes(step.optimizer_state()),
            peak=walk.peak,
        )


@contextmanager
def _uncompiled(step: TrainingStep, walk: Walk) -> Iterator[None]:
    """While an optimizer steps that compiles itself, which fake tensors cannot go through: uncompiled, its operations
    take far more, and what the compiled ones take is known.
    """
    assert step.run is not None
    assert step.run.plan.optimizer_rule is not None
    largest = max((parameter.numel() for parameter in step.model.parameters() if parameter.requires_grad), default=0)
    extra = int(largest * _TAKEN_BY_STEP[step.run.plan.optimizer_rule.state])
    with torch.compiler.set_stance("force_eager"), walk.looking_away(extra):
        yield
    walk.see(_parts(step.optimizer_state()))


def _parts(tensors: list[Tensor]) -> list[Tensor]:
    return [part for tensor in tensors for part in parts_of(tensor)]


def _is_sparse(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout != torch.strided and not isinstance(value, FakeTensor)
