"""Estimates the memory of a training step on fake tensors: nothing is computed or allocated."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from bitplan.analysis.memory.fakes import (
    Fakes,
    allocated_bytes,
    components,
    report_data_dependence,
    round_two_chunks,
    storage_bytes,
)
from bitplan.analysis.memory.lifetimes import extra_bytes
from bitplan.analysis.memory.measure import measure_memory
from bitplan.analysis.memory.step import (
    Loss,
    Memory,
    OptimizerChoice,
    Phase,
    RunMemory,
    TrainingStep,
    plan_for,
    split_call,
)
from bitplan.analysis.memory.workspaces import RETURNED_WORKSPACES, TEMPORARY_BYTES
from bitplan.compiler import torch_private
from bitplan.compiler.backends import compile_packed
from bitplan.compiler.torch_private import FakeTensor, TorchDispatchMode, tree_leaves, unset_fake_temporarily
from bitplan.compiler.tracing import raise_recompile_limit
from bitplan.errors import MemoryEstimateError
from bitplan.plans.execution import ExecutionOptions
from bitplan.plans.loading import PlanSource
from bitplan.runtime.attach import Attachment, attach

# --- Tracking of storages on fake tensors


class MemoryTracker:
    """Tracks the storages of the tensors that operations return, from allocation to release.

    Of kernel workspaces only those in :mod:`bitplan.analysis.memory.workspaces` are counted.
    """

    def __init__(self) -> None:
        #: Bytes that are allocated now, and their maximum.
        self.live = self.peak = 0
        self.notes: dict[Phase, int] = {}
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, int] = {}
        self._is_tracking = False
        self._is_paused = False

    @contextmanager
    def track(self) -> Iterator[None]:
        """Track all operations inside."""
        self._is_tracking = True
        self._mode = self.make_mode()
        try:
            with self._mode:
                yield
        finally:
            self._is_tracking = False

    def make_mode(self) -> OperationMode:
        """The dispatch mode that passes operations to this tracker."""
        return OperationMode(self)

    def note(self, phase: Phase) -> None:
        """Record the allocated bytes; the last record of a phase counts."""
        self.notes[phase] = self.live

    def add_permanent(self, size: int) -> None:
        """Count bytes that stay allocated."""
        self.live += size
        self.peak = max(self.peak, self.live)

    def add_temporary(self, extra: int) -> None:
        """Count bytes that are allocated for a moment in addition to the current ones."""
        if self._is_tracking and not self._is_paused:
            self.peak = max(self.peak, self.live + extra)

    def add_tensors(self, values: Iterable[object]) -> None:
        """Count the storages of the tensors among these values until they are released."""
        if not self._is_tracking or self._is_paused:
            return
        for value in values:
            # The size of a fake sparse tensor is unknown; those of the batch are counted at the start.
            if isinstance(value, Tensor) and value.layout == torch.strided:
                for part in components(value):
                    self._add_storage(part.untyped_storage(), part.device)

    def _add_storage(self, storage: torch.UntypedStorage, device: torch.device) -> None:
        key = storage._cdata
        if key in self._storages:
            return
        size = allocated_bytes(storage.nbytes(), device)
        self._storages[key] = weakref.ref(storage, lambda _: self.on_release(key))
        self._sizes[key] = size
        self.add_permanent(size)

    def on_release(self, key: int) -> None:
        """Stop counting a storage that was released."""
        del self._storages[key]
        self.live -= self._sizes.pop(key)

    @contextmanager
    def pause(self, extra: int) -> Iterator[None]:
        """Do not track inside: at most `extra` bytes are allocated in addition to the current ones."""
        self.add_temporary(extra)
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    @contextmanager
    def leave_mode(self) -> Iterator[None]:
        """Leave the dispatch mode for a call of compiled code: under a mode, torch.compile gives up on it for good."""
        if not self._is_tracking:
            yield
            return
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self._mode.__enter__()  # type: ignore[no-untyped-call]


class OperationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes the results of all operations to a tracker."""

    def __init__(self, tracker: MemoryTracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracker = tracker

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in RETURNED_WORKSPACES:
            result = RETURNED_WORKSPACES[func](result, *args, **(kwargs or {}))
        self.tracker.add_tensors(tree_leaves(result))
        if func in TEMPORARY_BYTES:
            self.tracker.add_temporary(TEMPORARY_BYTES[func](result, *args, **(kwargs or {})))
        return result


# --- Compiled models on fake tensors: saved tensors are those of the partitioned graph


def compile_on_fakes(model: nn.Module, run: Attachment | None, tracker: MemoryTracker) -> Callable[..., Any]:
    """Compile the model without its kernels; `tracker` gets the memory that the kernels would need."""

    @wraps(compile_packed)  # packed execution recognizes its backend by this name
    def backend(graph: GraphModule, example_inputs: Sequence[Any]) -> Any:
        partitioner = None if run is None else run.partitioner()
        settings = None if partitioner is None else {"custom_partitioner_fn": partitioner}
        return torch_private.compile_fx(
            graph, list(example_inputs), inner_compile=_make_inner_compile(tracker), config_patches=settings
        )

    forward = torch.compile(model, backend=backend, fullgraph=True)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            with raise_recompile_limit(), tracker.leave_mode():
                return forward(*args, **kwargs)
        except torch_private.Unsupported as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise MemoryEstimateError(
                f"the model does not compile into one graph ({reason}), which the estimate needs: estimate it "
                f"uncompiled, or measure."
            ) from error

    return call


def _make_inner_compile(tracker: MemoryTracker) -> Callable[..., Any]:
    def inner_compile(graph: GraphModule, example_inputs: Sequence[Any], **settings: Any) -> Callable[..., Any]:
        extra = extra_bytes(graph, releases_inputs=bool(settings.get("is_backward")))

        def run_on_fakes(inputs: list[Any]) -> Any:
            arguments = list(inputs)
            inputs.clear()  # the caller's list keeps the saved tensors of a backward pass alive
            with tracker.pause(extra):
                outputs = graph(*arguments)
            tracker.add_tensors(tree_leaves(outputs))
            return outputs

        run_on_fakes._boxed_call = True  # type: ignore[attr-defined]
        return run_on_fakes

    return inner_compile


#: The first step creates the optimizer state; the second starts with it.
_STEPS = 2

#: Temporary bytes per element of a parameter in torchao's compiled optimizer step, measured by the allocator on a CPU
#: with torch 2.13. For int8 and int4 the search in the lookup table produces 64-bit codes.
_OPTIMIZER_STEP_BYTES = {"int8": 8.0, "int4": 26.0, "e4m3": 8 / 256}


def estimate_memory(
    model: nn.Module,
    batch: Any,
    loss: Loss | None = None,
    optimizer: OptimizerChoice = "default",
    plan: PlanSource | None = None,
    execution: str | ExecutionOptions | None = None,
    compile: bool = False,
    *,
    autocast: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Memory:
    """Estimate the bytes of a training step of `model` on `batch` without running it.

    A copy of the model runs two steps on fake tensors with the plan attached. Each storage is tracked from allocation
    to release. The model may be larger than the memory, or on the ``meta`` device. For compiled models the saved
    tensors are those of the partitioned graph, and the peak is less exact.

    :param batch: the model's input, or (inputs, target) for a loss that takes a target.
    :param optimizer: ``"sgd"`` (with momentum), ``"adamw"``, ``"none"``, or a function that makes one for the model; by
        default SGD, or AdamW if the plan has a rule for optimizer state.
    :param execution: as in :func:`bitplan.attach`; by default that of the plan.
    :param autocast: the dtype of autocast; None: no autocast.
    :param device: the device of the step; by default that of the model.
    """
    fakes = Fakes(None if device is None else torch.device(device))
    options = (loss, optimizer, plan, execution, compile, autocast)
    return run_on_fakes(fakes, MemoryTracker(), model, batch, *options)


def run_on_fakes(
    fakes: Fakes,
    tracker: MemoryTracker,
    model: nn.Module,
    batch: Any,
    loss: Loss | None,
    optimizer: OptimizerChoice,
    plan: PlanSource | None,
    execution: str | ExecutionOptions | None,
    compile: bool,
    autocast: torch.dtype | None,
    prepare: Callable[[nn.Module], None] = lambda model: None,
) -> Memory:
    """Track training steps on fake tensors; see :func:`estimate_memory` for the parameters.

    :param prepare: called with the planned model before its optimizer is made, such as to shard it.
    """
    replica = fakes.model(model)
    args, kwargs, expected = fakes.all(split_call(batch, loss))
    sparse = storage_bytes(leaf for leaf in tree_leaves(batch) if _is_sparse(leaf))
    run: Attachment | None = None
    with report_data_dependence(), round_two_chunks(), fakes.mode, ExitStack() as stack:
        if (planned := plan_for(plan, optimizer)) is not None:
            inputs = fakes.inputs(args, kwargs)
            with unset_fake_temporarily():
                run = stack.enter_context(attach(replica, planned, example=inputs, execution=execution))
        forward: Callable[..., Any] | None = compile_on_fakes(replica, run, tracker) if compile else None
        planned_loss = loss
        if loss is not None and run is not None:
            with unset_fake_temporarily():
                planned_loss = run.loss(loss)
        with unset_fake_temporarily():
            prepare(replica)
        step = TrainingStep(replica, (args, kwargs, expected), planned_loss, optimizer, run, forward, autocast)
        step.around_run = unset_fake_temporarily
        if step.compiles_optimizer():
            step.around_optimizer = lambda: _run_optimizer_uncompiled(step, tracker)
        if compile:
            step(lambda phase: None)  # compiles, which is not tracked
        with tracker.track():
            tracker.add_tensors(
                [*step.weights(), *step.frozen_weights(), *step.batch(), *_parts(step.optimizer_state())]
            )
            tracker.add_permanent(sparse)
            gradients = 0

            def note(phase: Any) -> None:
                nonlocal gradients
                tracker.note(phase)
                if phase == "backward":
                    gradients = storage_bytes(step.gradients())

            for _ in range(_STEPS):
                step(note)
        return Memory.of(
            weights=storage_bytes(step.weights()),
            frozen=storage_bytes(step.frozen_weights()),
            gradients=gradients,
            activations=tracker.notes["forward"] - tracker.notes["start"],
            optimizer=storage_bytes(step.optimizer_state()),
            peak=tracker.peak,
        )


@contextmanager
def _run_optimizer_uncompiled(step: TrainingStep, tracker: MemoryTracker) -> Iterator[None]:
    """Run an optimizer that compiles its step, which does not work on fake tensors, uncompiled. Its operations then
    take far more memory; that of the compiled step is known.
    """
    assert step.run is not None
    assert step.run.plan.optimizer_rule is not None
    largest = max((parameter.numel() for parameter in step.model.parameters() if parameter.requires_grad), default=0)
    extra = int(largest * _OPTIMIZER_STEP_BYTES[step.run.plan.optimizer_rule.state])
    with torch.compiler.set_stance("force_eager"), tracker.pause(extra):
        yield
    tracker.add_tensors(_parts(step.optimizer_state()))


def _parts(tensors: list[Tensor]) -> list[Tensor]:
    return [part for tensor in tensors for part in components(tensor)]


def _is_sparse(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout != torch.strided and not isinstance(value, FakeTensor)


# --- The memory of an attached model


def estimate_run_memory(
    run: Attachment,
    batch: Any = None,
    loss: Loss | None = None,
    optimizer: OptimizerChoice = "default",
    compile: bool = False,
) -> RunMemory:
    """The memory of a training step with the attached plan.

    Estimated from the shapes of `batch`, or of the first batch of the run. With a `batch` it is also measured, on a
    copy of the model.
    """
    example = run._cost_tracker.inputs if batch is None else batch
    if example is None:
        raise MemoryEstimateError("bitplan has not recorded a batch yet: give one, or run the model once uncompiled.")
    options = (loss, optimizer, run.plan, run.execution, compile)
    measured = None if batch is None else measure_memory(run.model, batch, *options)
    return RunMemory(estimate_memory(run.model, example, *options), measured)
