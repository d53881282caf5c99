"""Measures the memory of a training step with torch's allocators: the bytes at each phase, and the peak.

On a CPU every allocation and release is an event of ``torch.profiler``, including workspaces that kernels take from
torch's allocator. On a GPU the caching allocator has statistics.
"""

from __future__ import annotations

import gc
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from bitplan.analysis.memory.fakes import allocated_bytes, components, copy_without_plan, storage_bytes
from bitplan.analysis.memory.step import Loss, Memory, OptimizerChoice, Phase, TrainingStep, plan_for, split_call
from bitplan.capture.recording import split_batch
from bitplan.compiler.torch_private import ProfilerEventType, is_profiler_enabled
from bitplan.compiler.tracing import raise_recompile_limit
from bitplan.errors import MemoryEstimateError
from bitplan.plans.execution import ExecutionOptions
from bitplan.plans.loading import PlanSource
from bitplan.runtime.attach import Attachment, attach

_EVENT_PREFIX = "bitplan:"


class Allocator(ABC):
    """Records the allocations of a device inside a ``with`` block, in bytes beyond those at its start."""

    #: (phase, allocated bytes) in the order of the phases.
    notes: list[tuple[Phase, int]]
    #: The largest number of allocated bytes.
    peak: int

    def __enter__(self) -> Allocator:
        gc.collect()  # garbage must not be released inside the block
        self.notes, self.peak = [], 0
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @abstractmethod
    def _begin(self) -> None: ...

    @abstractmethod
    def _end(self) -> None: ...

    @abstractmethod
    def note(self, phase: Phase) -> None:
        """Record the allocated bytes."""

    def last(self, phase: Phase) -> int:
        """The allocated bytes at the last record of `phase`."""
        return next(live for noted, live in reversed(self.notes) if noted == phase)


class HostAllocator(Allocator):
    """The CPU's allocator, by profiler events."""

    def _begin(self) -> None:
        if is_profiler_enabled():
            raise MemoryEstimateError(
                "torch's profiler is already running, and memory on a CPU is measured by it: measure outside of it."
            )
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with _quiet_profiler():
            self._profile.__enter__()  # type: ignore[no-untyped-call]

    def note(self, phase: Phase) -> None:
        with record_function(_EVENT_PREFIX + phase):
            pass

    def _end(self) -> None:
        with _quiet_profiler():
            self._profile.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        results = self._profile.profiler
        assert results is not None
        assert results.kineto_results is not None
        live = 0
        for _, size, phase in sorted(_events(results.kineto_results.experimental_event_tree()), key=lambda e: e[0]):
            live += size
            self.peak = max(self.peak, live)
            if phase is not None:
                self.notes.append((phase, live))


def _events(tree: list[Any]) -> Iterator[tuple[int, int, Phase | None]]:
    """(time, bytes allocated or (negative) released, phase of a recorded event)."""
    for event in tree:
        if event.tag == ProfilerEventType.Allocation:
            if event.extra_fields.device.type == "cpu":
                yield event.start_time_ns, event.extra_fields.alloc_size, None
        elif event.name.startswith(_EVENT_PREFIX):
            yield event.start_time_ns, 0, event.name.removeprefix(_EVENT_PREFIX)
        yield from _events(event.children)


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Kineto reports each start and stop on stderr, unless this variable is set at its first use.

    torch.profiler warns that its events are not kept between two uses. Keeping them (``acc_events``) takes as long as
    the step, and only the allocator's events are read here.
    """
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = before or "99"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*clears events")
            yield
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]


class CudaAllocator(Allocator):
    """A GPU's allocator, by its statistics."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def _begin(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self._before = torch.cuda.memory_allocated(self.device)

    def note(self, phase: Phase) -> None:
        self.notes.append((phase, torch.cuda.memory_allocated(self.device) - self._before))

    def _end(self) -> None:
        torch.cuda.synchronize(self.device)
        self.peak = torch.cuda.max_memory_allocated(self.device) - self._before


def make_allocator(device: torch.device) -> Allocator:
    """The recorder for the allocator of a device."""
    if device.type == "cpu":
        return HostAllocator()
    if device.type == "cuda":
        return CudaAllocator(device)
    raise MemoryEstimateError(f"memory is measured on cpu and cuda, not on {device.type}: move the model there.")


def measure_memory(
    model: nn.Module,
    batch: Any,
    loss: Loss | None = None,
    optimizer: OptimizerChoice = "default",
    plan: PlanSource | None = None,
    execution: str | ExecutionOptions | None = None,
    compile: bool = False,
    steps: int = 3,
    *,
    autocast: torch.dtype | None = None,
) -> Memory:
    """Measure the bytes of a training step of `model` on `batch`; see :func:`estimate_memory` for the parameters.

    A copy of the model is trained. Weights, gradients and optimizer state are summed over tensors; saved tensors and
    the peak are the allocator's values.

    :param steps: number of measured steps. If anything is compiled, another step runs before them.
    """
    if steps < 2:
        raise MemoryEstimateError(f"steps is {steps}; memory that lives from step to step needs at least 2.")
    replica = copy_without_plan(model)
    call = split_call(batch, loss)
    run: Attachment | None = None
    if (planned := plan_for(plan, optimizer)) is not None:
        run = attach(replica, planned, example=split_batch(batch, loss)[0], execution=execution)
    forward = compile_model(replica, run) if compile else None
    planned_loss = loss if loss is None or run is None else run.loss(loss)
    step = TrainingStep(replica, call, planned_loss, optimizer, run, forward, autocast)
    with raise_recompile_limit():  # the model, or copies under other plans, may have been compiled before
        return measure_step(step, steps, warm_up=compile or step.compiles_optimizer())


def compile_model(model: nn.Module, run: Attachment | None) -> Callable[..., Any]:
    """Compile by torch.compile, or by the attachment for packed and native execution."""
    return torch.compile(model) if run is None or run.execution.kind == "emulate" else run.compile()


def measure_step(step: TrainingStep, steps: int, warm_up: bool) -> Memory:
    """Record the allocator during `steps` steps."""
    if warm_up:
        step(lambda phase: None)
    gradients = 0
    always = storage_bytes([*step.weights(), *step.frozen_weights()])
    before = always + _dense_bytes(step.batch()) + storage_bytes(step.optimizer_state())
    allocator = make_allocator(step.device)

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
        frozen=storage_bytes(step.frozen_weights()),
        gradients=gradients,
        activations=allocator.last("forward") - allocator.last("start"),
        optimizer=storage_bytes(step.optimizer_state()),
        peak=before + allocator.peak,
    )


def _dense_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the tensors' elements; the storage of a batch may be far larger."""
    parts = {id(part): part for tensor in tensors for part in components(tensor)}
    return sum(allocated_bytes(part.numel() * part.element_size(), part.device) for part in parts.values())
