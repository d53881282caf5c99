"""What torch's own allocators say: how much lives at each phase of a step, and the most that ever lived.

On a CPU every allocation and every release is an event of ``torch.profiler``; workspaces that kernels take from torch's
allocator are among them, unlike anything that is counted tensor by tensor. On a GPU the caching allocator keeps the
figures itself.
"""

from __future__ import annotations

import gc
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.profiler import ProfilerActivity, profile, record_function

from bitplan.analysis.memory.fakes import held, parts_of, plain_copy, storage_bytes
from bitplan.analysis.memory.step import Loss, Memory, OptimizerChoice, Phase, TrainingStep, call_of, plan_for
from bitplan.capture.recording import split_batch
from bitplan.compiler.torch_private import ProfilerEventType, is_profiler_enabled
from bitplan.compiler.tracing import raise_recompile_limit
from bitplan.errors import MemoryEstimateError
from bitplan.executions.packed.saved_tensors import SavedTensorPacker
from bitplan.plans import Plan
from bitplan.plans.execution import ExecutionOptions
from bitplan.runtime.attach import Attachment, attach

_MARK = "bitplan:"


class Allocator(ABC):
    """A device's allocator, watched for a while. All figures are bytes beyond what lived at the start of the watch."""

    #: (phase, what lived when the note was taken), in the order of the notes.
    notes: list[tuple[Phase, int]]
    #: The most that lived at any moment.
    peak: int

    def __enter__(self) -> Allocator:
        gc.collect()  # what only waits to be released must not be, in the middle of the watch
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
        """Note how much lives now."""

    def last(self, phase: Phase) -> int:
        """What lived when `phase` was noted last."""
        return next(live for noted, live in reversed(self.notes) if noted == phase)


class HostAllocator(Allocator):
    """The CPU's, by its events."""

    def _begin(self) -> None:
        if is_profiler_enabled():
            raise MemoryEstimateError(
                "torch's profiler is at work already, and it is what measures memory on a CPU: measure outside of it."
            )
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with _quiet_profiler():
            self._profile.__enter__()  # type: ignore[no-untyped-call]

    def note(self, phase: Phase) -> None:
        with record_function(_MARK + phase):
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
    """(time, bytes allocated or, negative, released, the phase that a mark notes)."""
    for event in tree:
        if event.tag == ProfilerEventType.Allocation:
            if event.extra_fields.device.type == "cpu":
                yield event.start_time_ns, event.extra_fields.alloc_size, None
        elif event.name.startswith(_MARK):
            yield event.start_time_ns, 0, event.name.removeprefix(_MARK)
        yield from _events(event.children)


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """The profiler's library tells of each start and stop on stderr, unless this variable is set at its first use.

    Python's part of it warns that its own events are not kept from one watch to the next. To keep them (``acc_events``)
    it would digest all of them, which takes as long as the step; what is read here are the allocator's.
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
    """A GPU's, by its own books."""

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


def allocator_of(device: torch.device) -> Allocator:
    """The allocator of a device, to be watched."""
    if device.type == "cpu":
        return HostAllocator()
    if device.type == "cuda":
        return CudaAllocator(device)
    raise MemoryEstimateError(f"memory is measured on cpu and cuda, not on {device.type}: move the model there.")


# --- What autograd keeps for the backward pass, counted at its own hooks: a second opinion beside the allocator's


def kept_bytes(
    forward: Callable[[], Tensor], living_anyway: Iterable[Tensor] = (), packer: SavedTensorPacker | None = None
) -> int:
    """Bytes that are kept for the backward pass when `forward`, which returns the loss, has ended.

    :param living_anyway: parameters, buffers and the batch, which are not kept for autograd's sake.
    :param packer: of a plan in packed execution, whose hooks are asked instead of ours.
    """
    kept: list[Any] = []
    with _hooks(kept) if packer is None else _listening(packer, kept):
        loss = forward()
    kept.extend(vars(node) for node in _nodes(loss) if hasattr(node, "__dict__"))
    known_storages = {part.untyped_storage()._cdata for tensor in living_anyway for part in parts_of(tensor)}
    sizes: dict[int, int] = {}
    for tensor in _tensors(kept, set()):
        for part in parts_of(tensor):
            storage = part.untyped_storage()
            if storage._cdata not in known_storages:
                sizes[storage._cdata] = held(storage.nbytes(), part.device)
    return sum(sizes.values())


@contextmanager
def _hooks(kept: list[Any]) -> Iterator[None]:
    def note(tensor: Tensor) -> Tensor:
        # Saved tensors refer to this hook, and it to them: with their history, the graph would never be freed.
        kept.append(tensor.detach())
        return kept[-1]  # type: ignore[no-any-return]

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield


@contextmanager
def _listening(packer: SavedTensorPacker, kept: list[Any]) -> Iterator[None]:
    """The plan's own hooks, overheard: two pairs of hooks cannot be at work at once."""
    own = packer.pack

    def noted(tensor: Tensor) -> Any:
        kept.append(own(tensor))
        return kept[-1]

    packer.pack = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        del packer.pack


def _nodes(loss: Tensor) -> Iterator[Node]:
    seen: set[Node] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting.extend(following for following, _ in node.next_functions)


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """All tensors in lists, dictionaries and bitplan's own small objects."""
    if isinstance(value, Tensor):
        yield value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, (list, tuple, set)):
        inner = value
    elif is_dataclass(value) and not isinstance(value, type):
        inner = [getattr(value, field.name) for field in fields(value)]
    elif type(value).__module__ in _MODULES_OF_SAVED_TENSORS:
        inner = [getattr(value, name, None) for name in _attributes(value)]
    for item in inner:
        yield from _tensors(item, seen)


#: Modules whose objects stand for a saved tensor in packed execution; their attributes hold the bytes.
_MODULES_OF_SAVED_TENSORS = frozenset(
    {"bitplan.executions.packed.saved_tensors", "bitplan.executions.packed.recompute", "bitplan.numerics.packing"}
)


def _attributes(value: Any) -> Iterable[str]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return (*vars(value), *slots) if hasattr(value, "__dict__") else slots


# --- What a training step really holds in memory, as torch's allocator tells it


def measure_memory(
    model: nn.Module,
    batch: Any,
    loss: Loss | None = None,
    optimizer: OptimizerChoice = "default",
    plan: Plan | str | None = None,
    execution: str | ExecutionOptions | None = None,
    compile: bool = False,
    steps: int = 3,
    *,
    autocast: torch.dtype | None = None,
) -> Memory:
    """The bytes of a training step of `model` on `batch`, measured while it runs; see :func:`estimate_memory`.

    A copy of the model is trained, so the model itself stays as it is. Weights, gradients and optimizer state are
    counted tensor by tensor; what is kept for the backward pass and the peak are the allocator's own figures.

    :param steps: how many steps are watched. Where something is compiled, one more comes first and is not: it compiles.
    """
    if steps < 2:
        raise MemoryEstimateError(f"{steps} steps do not show what lives from one to the next: measure at least 2.")
    twin = plain_copy(model)
    call = call_of(batch, loss)
    run: Attachment | None = None
    if (planned := plan_for(plan, optimizer)) is not None:
        run = attach(twin, planned, example=split_batch(batch, loss)[0], execution=execution)
    forward = compiled(twin, run) if compile else None
    planned_loss = loss if loss is None or run is None else run.loss(loss)
    step = TrainingStep(twin, call, planned_loss, optimizer, run, forward, autocast)
    with raise_recompile_limit():  # the model itself, and copies under other plans, may have been compiled before
        return measure_step(step, steps, warm_up=compile or step.compiles_optimizer())


def compiled(model: nn.Module, run: Attachment | None) -> Callable[..., Any]:
    """The model as torch.compile makes it; under packed execution as the attachment does."""
    return torch.compile(model) if run is None or run.execution.kind == "emulate" else run.compile()


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
