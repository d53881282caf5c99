"""What a training step will hold in memory, found on fake tensors: nothing is computed, nothing is allocated."""

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
    held,
    parts_of,
    rounding_in_two_parts,
    storage_bytes,
    told_of_missing_values,
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
    call_of,
    plan_for,
)
from bitplan.analysis.memory.workspaces import KEPT, PASSING
from bitplan.compiler import torch_private
from bitplan.compiler.backends import compile_packed
from bitplan.compiler.torch_private import FakeTensor, TorchDispatchMode, tree_leaves, unset_fake_temporarily
from bitplan.compiler.tracing import raise_recompile_limit
from bitplan.errors import MemoryEstimateError
from bitplan.plans import Plan
from bitplan.plans.execution import ExecutionOptions
from bitplan.runtime.attach import Attachment, attach

# --- A training step on fake tensors, with every piece of memory that it would take followed from birth to death


class Walk:
    """Sees every tensor that an operation returns, and when its memory is released.

    What kernels take for themselves is not seen, but for what :mod:`bitplan.analysis.memory.workspaces` knows.
    """

    def __init__(self) -> None:
        #: Bytes that live now, and the most that ever did.
        self.live = self.peak = 0
        self.notes: dict[Phase, int] = {}
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._is_watching = False
        self._looks_away = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See all operations inside."""
        self._is_watching = True
        self._mode = _Mode(self)
        try:
            with self._mode:
                yield
        finally:
            self._is_watching = False

    def note(self, phase: Phase) -> None:
        """Note how much lives now; the last note of a phase counts."""
        self.notes[phase] = self.live

    def hold(self, size: int) -> None:
        """Count so many bytes that live all the time."""
        self.live += size
        self.peak = max(self.peak, self.live)

    def allow(self, extra: int) -> None:
        """Count so many bytes that live for a moment beside what lives now."""
        if self._is_watching and not self._looks_away:
            self.peak = max(self.peak, self.live + extra)

    def see(self, values: Iterable[object]) -> None:
        """Count the memory beneath the tensors among these values as alive, until it is released."""
        if not self._is_watching or self._looks_away:
            return
        for value in values:
            # What a fake sparse tensor holds is not known: that of a batch is held from the start.
            if isinstance(value, Tensor) and value.layout == torch.strided:
                for part in parts_of(value):
                    self._see(part.untyped_storage(), part.device)

    def _see(self, storage: torch.UntypedStorage, device: torch.device) -> None:
        key = storage._cdata
        if key in self._storages:
            return
        size = held(storage.nbytes(), device)
        self._storages[key] = weakref.ref(storage, self._end_of(key, size))
        self.hold(size)

    def _end_of(self, key: int, size: int) -> Callable[[Any], None]:
        def end(_: Any) -> None:
            del self._storages[key]
            self.live -= size

        return end

    @contextmanager
    def looking_away(self, extra: int) -> Iterator[None]:
        """While something is at work whose own memory is known: `extra` bytes at most beyond what lives."""
        self.allow(extra)
        self._looks_away = True
        try:
            yield
        finally:
            self._looks_away = False

    @contextmanager
    def without_mode(self) -> Iterator[None]:
        """While compiled code is called: torch.compile gives up, for good, on code that a dispatch mode watches."""
        if not self._is_watching:
            yield
            return
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self._mode.__enter__()  # type: ignore[no-untyped-call]


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What shows a walk the operations."""

    def __init__(self, walk: Walk) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.walk = walk

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in KEPT:
            result = KEPT[func](result, *args, **(kwargs or {}))
        self.walk.see(tree_leaves(result))
        if func in PASSING:
            self.walk.allow(PASSING[func](result, *args, **(kwargs or {})))
        return result


# --- Compiled models on fake tensors: what is kept is what the partitioned graph says


def compiled_on_fakes(model: nn.Module, run: Attachment | None, walk: Walk) -> Callable[..., Any]:
    """The model, compiled but for its kernels; it tells `walk` what its kernels would need."""

    @wraps(compile_packed)  # by whose name a packed model knows that its graphs are in the right hands
    def backend(graph: GraphModule, example_inputs: Sequence[Any]) -> Any:
        partitioner = None if run is None else run.partitioner()
        settings = None if partitioner is None else {"custom_partitioner_fn": partitioner}
        return torch_private.compile_fx(
            graph, list(example_inputs), inner_compile=_last_stage(walk), config_patches=settings
        )

    forward = torch.compile(model, backend=backend, fullgraph=True)

    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            with raise_recompile_limit(), walk.without_mode():
                return forward(*args, **kwargs)
        except torch_private.Unsupported as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise MemoryEstimateError(
                f"the model does not compile into one graph ({reason}), from which its memory is read: estimate it "
                f"uncompiled, or measure."
            ) from error

    return called


def _last_stage(walk: Walk) -> Callable[..., Any]:
    def last_stage(graph: GraphModule, example_inputs: Sequence[Any], **settings: Any) -> Callable[..., Any]:
        extra = extra_bytes(graph, releases_inputs=bool(settings.get("is_backward")))

        def on_fakes(inputs: list[Any]) -> Any:
            arguments = list(inputs)
            inputs.clear()  # the caller's list is what keeps the tensors of a backward pass
            with walk.looking_away(extra):
                outputs = graph(*arguments)
            walk.see(tree_leaves(outputs))
            return outputs

        on_fakes._boxed_call = True  # type: ignore[attr-defined]
        return on_fakes

    return last_stage


#: The first step makes the optimizer's state, the second has it from its start.
_STEPS = 2

#: Bytes for every value of a parameter that torchao's compiled step takes while it is at work on it, as the allocator
#: counts them on a CPU with torch 2.13: for int8 and int4 the search in the lookup table leaves codes of 64 bits.
_TAKEN_BY_STEP = {"int8": 8.0, "int4": 26.0, "e4m3": 8 / 256}


def estimate_memory(
    model: nn.Module,
    batch: Any,
    loss: Loss | None = None,
    optimizer: OptimizerChoice = "default",
    plan: Plan | str | None = None,
    execution: str | ExecutionOptions | None = None,
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
    :param execution: as :func:`bitplan.attach` takes it; by default that of the plan.
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


# --- The memory of a plan at work


def of_run(
    run: Attachment,
    batch: Any = None,
    loss: Loss | None = None,
    optimizer: OptimizerChoice = "default",
    compile: bool = False,
) -> RunMemory:
    """The memory of a training step with the plan attached as it is.

    Estimated from the shapes of `batch`, or of the first batch that the attachment has seen. Measured where a batch is
    given, on a copy of the model, so that the run goes on as if nothing had been asked; else None.
    """
    example = run._cost_tracker.inputs if batch is None else batch
    if example is None:
        raise MemoryEstimateError("bitplan has not seen a batch yet: give one, or run the model once uncompiled.")
    rest: tuple[Any, ...] = (loss, optimizer, run.plan, run.execution, compile)
    measured = None if batch is None else measure_memory(run.model, batch, *rest)
    return RunMemory(estimate_memory(run.model, example, *rest), measured)
