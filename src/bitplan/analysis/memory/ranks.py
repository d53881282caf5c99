"""The memory and the traffic of one process of a sharded training step, estimated on one machine and measured on many.

The estimate runs torch's own FSDP2 and tensor parallelism, on fake tensors and in a process group that sends nothing.
So gathered weights, buffers of collectives and sharded optimizer state are allocated and released where torch does it,
and every collective is counted.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bitplan.analysis.memory.estimate import MemoryTracker, OperationMode, run_on_fakes
from bitplan.analysis.memory.fakes import Fakes, copy_without_plan, storage_bytes
from bitplan.analysis.memory.measure import measure_step
from bitplan.analysis.memory.step import Loss, Memory, OptimizerChoice, Phase, TrainingStep, plan_for, split_call
from bitplan.analysis.sharding import AXES, Sharding, shard_model
from bitplan.capture.recording import split_batch
from bitplan.compiler.torch_private import FakeStore
from bitplan.errors import MemoryEstimateError, TargetError, nearest_names
from bitplan.files import read_bytes
from bitplan.plans import Plan
from bitplan.plans.execution import ExecutionOptions
from bitplan.runtime.attach import attach

# --- Traffic


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind along one axis, in one training step."""

    #: ddp, fsdp or tp.
    axis: str
    #: all-gather, reduce-scatter, all-reduce or all-to-all.
    collective: str
    calls: int
    #: Sent by one process, by the ring algorithm: of n processes a share of (n - 1) / n, all-reduce twice that.
    bytes: int

    def to_dict(self, bandwidths: Mapping[str, int]) -> dict[str, Any]:
        """Plain values; seconds are null without a bandwidth for the axis."""
        return {
            "axis": self.axis,
            "collective": self.collective,
            "calls": self.calls,
            "bytes": self.bytes,
            "seconds": self.seconds(bandwidths),
        }

    def seconds(self, bandwidths: Mapping[str, int]) -> float | None:
        """The time on the wire at a bandwidth, in bytes a second, for every axis."""
        return self.bytes / bandwidths[self.axis] if self.axis in bandwidths else None


@dataclass(frozen=True)
class RankEstimate:
    """One process of a sharded training step."""

    memory: Memory
    traffic: tuple[Traffic, ...]


def parse_bandwidths(text: str) -> dict[str, int]:
    """Bytes a second by axis, as in ``fsdp=50GB,tp=450GB``; a single size holds for every axis.

    >>> parse_bandwidths("tp=450GB")
    {'tp': 450000000000}
    """
    if "=" not in text:
        return dict.fromkeys(AXES, read_bytes(text))
    bandwidths: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (piece.strip() for piece in part.partition("="))
        if axis not in AXES:
            raise TargetError(f"there is no axis {axis!r} in {text!r}; {nearest_names(axis, AXES)}")
        bandwidths[axis] = read_bytes(size)
    return bandwidths


#: Name of an operation -> (collective, index of the argument with all processes' bytes: None is the result, bytes sent
#: in units of (n - 1) / n of these).
_COLLECTIVES: dict[str, tuple[str, int | None, int]] = {
    "c10d::_allgather_base_": ("all-gather", 0, 1),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", 1, 1),
    "c10d::allreduce_": ("all-reduce", 0, 2),
    "_c10d_functional::all_gather_into_tensor": ("all-gather", None, 1),
    "_c10d_functional::reduce_scatter_tensor": ("reduce-scatter", 0, 1),
    "_c10d_functional::all_reduce": ("all-reduce", 0, 2),
    "_c10d_functional::all_to_all_single": ("all-to-all", 0, 1),
}
#: Of these, the buffers of FSDP are the arguments with all processes' bytes.
_FSDP_BUFFERS = ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_")


# --- Estimate


class RankTracker(MemoryTracker):
    """Also tracks storages that FSDP empties and fills again, and counts collectives."""

    def __init__(self, groups: Mapping[str, tuple[str, int]], backend: str) -> None:
        """:param groups: name of a process group -> its axis and number of processes."""
        super().__init__()
        self.groups = groups
        self.backend = backend
        #: (axis, collective) -> calls and bytes.
        self.sent: dict[tuple[str, str], tuple[int, int]] = {}
        #: Bytes of gathered weights and of FSDP's buffers that are allocated now, and their maximum.
        self.gathered = self.most_gathered = 0
        self._gathered_keys: set[int] = set()

    def make_mode(self) -> OperationMode:
        return _LocalMode(self)

    @contextmanager
    def track(self) -> Iterator[None]:
        resize = torch.UntypedStorage.resize_

        def resize_tracked(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            self.on_resize(storage)
            return result

        torch.UntypedStorage.resize_ = resize_tracked  # type: ignore[assignment, method-assign]
        try:
            with super().track():
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def note(self, phase: Phase) -> None:
        if phase == "start":
            # Only the last step counts: in the first, DTensor finds out the shapes of results on fake tensors of the
            # size of the whole tensor.
            self.sent.clear()
            self.peak, self.most_gathered = self.live, self.gathered
        super().note(phase)
        if phase == "forward":  # gathered weights are no activations
            self.notes[phase] -= self.gathered

    def on_resize(self, storage: torch.UntypedStorage) -> None:
        """Count the new size of a storage: FSDP keeps the tensors of gathered weights and resizes their storages."""
        key = storage._cdata
        if key not in self._sizes:
            return
        self._mark_gathered(key)
        growth = storage.nbytes() - self._sizes[key]
        self._sizes[key] += growth
        self._add_gathered(growth)
        self.add_permanent(growth)

    def on_collective(self, name: str, result: Any, args: Sequence[Any]) -> None:
        collective, index, factor = _COLLECTIVES[name]
        group = next((names for names in map(_group_name, reversed(args)) if names in self.groups), None)
        if group is None:
            return
        axis, processes = self.groups[group]
        value = result if index is None else args[index]
        tensors = [value] if isinstance(value, Tensor) else [*value]
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        calls, sent = self.sent.get((axis, collective), (0, 0))
        self.sent[axis, collective] = calls + 1, sent + factor * total * (processes - 1) // processes
        if name in _FSDP_BUFFERS:
            for tensor in tensors:
                self._mark_gathered(tensor.untyped_storage()._cdata)
            if self.backend == "gloo":  # which copies these, where NCCL works in place
                self.add_temporary(total)

    def _mark_gathered(self, key: int) -> None:
        if key in self._sizes and key not in self._gathered_keys:
            self._gathered_keys.add(key)
            self._add_gathered(self._sizes[key])

    def _add_gathered(self, size: int) -> None:
        self.gathered += size
        self.most_gathered = max(self.most_gathered, self.gathered)

    def on_release(self, key: int) -> None:
        if key in self._gathered_keys:
            self._gathered_keys.remove(key)
            self.gathered -= self._sizes[key]
        super().on_release(key)


class _LocalMode(OperationMode):  # type: ignore[no-untyped-call]
    """Passes the operations on this process's part of distributed tensors to a tracker."""

    tracker: RankTracker

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor runs local operations, which come here in turn
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.name().partition(".")[0] in _COLLECTIVES:
            self.tracker.on_collective(func.name().partition(".")[0], result, args)
        return result


def _group_name(argument: Any) -> str | None:
    if isinstance(argument, str):
        return argument
    if isinstance(argument, torch.ScriptObject):
        try:
            return str(torch.distributed.ProcessGroup.unbox(argument).group_name)
        except RuntimeError:  # another object, such as the kind of a reduction
            return None
    return None


@contextmanager
def _fake_process_group(processes: int) -> Iterator[None]:
    """A process group of that many processes, of which this is the first; its collectives send nothing."""
    import torch.distributed as dist

    if dist.is_initialized():
        raise MemoryEstimateError(
            "this process belongs to a process group already, and the estimate needs one of its own: estimate in a "
            "process that torchrun has not started."
        )
    dist.init_process_group("fake", rank=0, world_size=processes, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def estimate_rank(
    model: nn.Module,
    batch: Any,
    loss: Loss | None = None,
    optimizer: OptimizerChoice = "default",
    plan: Plan | str | None = None,
    execution: str | ExecutionOptions | None = None,
    *,
    sharding: Sharding,
    autocast: torch.dtype | None = None,
    backend: Literal["nccl", "gloo"] = "nccl",
) -> RankEstimate:
    """Estimate the bytes of one process of a sharded training step, and the bytes that it sends.

    The model may be on the ``meta`` device. Nothing is computed, allocated or sent. See :func:`estimate_memory` for the
    parameters that are not described here.

    :param batch: that of one process; with ``tp``, of the processes that share it.
    :param backend: the library of the collectives: gloo allocates copies of what is gathered and scattered.
    """
    fakes = Fakes(torch.device("cpu"))
    with _fake_process_group(sharding.world):
        mesh = sharding.make_mesh("cpu")
        sizes = sharding.used_axes
        groups = {str(mesh.get_group(axis).group_name): (axis, size) for axis, size in sizes.items()}
        tracker = RankTracker(groups, backend)
        buckets = 0

        def shard(replica: nn.Module) -> None:
            nonlocal buckets
            shard_model(replica, sharding, mesh)
            if sizes.keys() == {"ddp"}:
                # DistributedDataParallel is C++ code that reads its tensors, so its buckets are added.
                buckets = storage_bytes(parameter for parameter in replica.parameters() if parameter.requires_grad)
                tracker.add_permanent(buckets)

        options = (loss, optimizer, plan, execution, False, autocast)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # of those who write into it
            memory = run_on_fakes(fakes, tracker, model, batch, *options, prepare=shard)
    traffic = [Traffic(*names, *figures) for names, figures in sorted(tracker.sent.items())]
    if buckets:
        traffic.append(Traffic("ddp", "all-reduce", 1, 2 * buckets * (sharding.ddp - 1) // sharding.ddp))
    return RankEstimate(replace(memory, gathered=tracker.most_gathered), tuple(traffic))


# --- Measurement


def measure_rank(
    model: nn.Module,
    batch: Any,
    loss: Loss | None = None,
    optimizer: OptimizerChoice = "default",
    plan: Plan | str | None = None,
    execution: str | ExecutionOptions | None = None,
    *,
    sharding: Sharding,
    autocast: torch.dtype | None = None,
) -> Memory:
    """Measure the bytes of this process in a sharded training step, by its allocator.

    Called in every process of a process group with ``sharding.world`` processes, such as those that torchrun starts. A
    copy of the model is trained.
    """
    from torch.nn.parallel import DistributedDataParallel

    replica = copy_without_plan(model)
    device = next(replica.parameters(), torch.empty(0)).device
    run = None
    if (planned := plan_for(plan, optimizer)) is not None:
        run = attach(replica, planned, example=split_batch(batch, loss)[0], execution=execution)
    shard_model(replica, sharding, sharding.make_mesh(device.type))
    is_ddp = sharding.used_axes.keys() == {"ddp"}
    forward = DistributedDataParallel(replica) if is_ddp else None
    planned_loss = loss if loss is None or run is None else run.loss(loss)
    step = TrainingStep(replica, split_call(batch, loss), planned_loss, optimizer, run, forward, autocast)
    # The first step makes the optimizer's state, and before the second DDP arranges its buckets anew. Only one step is
    # measured at a time, and the smaller peak counts: gloo's threads release memory without an event.
    step(lambda phase: None)
    measured = min((measure_step(step, 1, warm_up=True) for _ in range(2)), key=lambda memory: memory.peak)
    if not is_ddp:
        return measured
    buckets = storage_bytes(parameter for parameter in replica.parameters() if parameter.requires_grad)
    return Memory.of(
        *(measured.weights, measured.gradients, measured.activations, measured.optimizer, measured.peak + buckets),
        frozen=measured.frozen,
    )
