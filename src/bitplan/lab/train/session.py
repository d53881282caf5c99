"""A model in training: its optimizer, its attached plan, and single steps.

Torch's generator is seeded before every step from the run's seed and the step. The random numbers of a step, such as
those of dropout, therefore do not depend on evaluations or on resuming.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from bitplan.analysis.fault import first_not_finite
from bitplan.analysis.measure.measure import probe_step
from bitplan.analysis.measure.probe import Probe
from bitplan.analysis.memory.fakes import copy_without_plan
from bitplan.capture.decompositions import is_decomposed
from bitplan.capture.recording import call_arguments
from bitplan.compiler.torch_private import tree_map_only
from bitplan.errors import RunError, TaskError
from bitplan.executions.native.execution import NativeWithCrossover, native_terms
from bitplan.executions.native.paths import NativeTerms
from bitplan.lab.tasks.task import Task
from bitplan.lab.train.processes import SINGLE, Processes
from bitplan.numerics.noise import key_of, preserve_rng_state
from bitplan.numerics.wire_format import EVALUATION, TRAINING
from bitplan.plans import Plan
from bitplan.plans.execution import ExecutionOptions, Native, execution_options
from bitplan.runtime.attach import Attachment, attach
from bitplan.runtime.dispatch import value_before_rounding
from bitplan.runtime.optimizers import load_plain_state, plain_state, set_rate

# --- Memory formats of images and convolution weights


def layout_for(model: nn.Module, device: str, execution: str = "emulate") -> torch.memory_format:
    """The memory format of a model's four-dimensional tensors; GPUs and native execution use channels last.

    >>> layout_for(nn.Conv2d(3, 8, 3), "cuda"), layout_for(nn.Conv2d(3, 8, 3), "cpu"), layout_for(nn.GELU(), "cuda")
    (torch.channels_last, torch.contiguous_format, torch.contiguous_format)
    """
    dimensions = {tensor.dim() for tensor in (*model.parameters(), *model.buffers())}
    # Five-dimensional tensors would need channels_last_3d.
    has_images = any(parameter.dim() == 4 for parameter in model.parameters()) and 5 not in dimensions
    wants_them = device == "cuda" or execution == "native"
    return torch.channels_last if wants_them and has_images else torch.contiguous_format


def lay_out(model: nn.Module, layout: torch.memory_format) -> nn.Module:
    """Convert the parameters and buffers of a model to a memory format."""
    if layout == torch.contiguous_format:
        return model
    return model.to(memory_format=layout)  # type: ignore[call-overload, no-any-return]


def laid_out(tensor: Tensor, layout: torch.memory_format) -> Tensor:
    """A tensor of a batch in a memory format, if it holds images."""
    is_images = tensor.dim() == 4 and tensor.layout == torch.strided and tensor.is_floating_point()
    return tensor.contiguous(memory_format=layout) if is_images and layout != torch.contiguous_format else tensor


# --- Copies of batches to a GPU


class Copies:
    """``copies(batch)`` is the batch with every tensor copied.

    Tensors that were in the last batch, such as a whole graph in every step, are not copied again.
    """

    def __init__(self, copy: Callable[[Tensor], Tensor]) -> None:
        self._copy = copy
        #: The last batch: id of each tensor -> the tensor, its version, and its copy.
        self._last: dict[int, tuple[Tensor, int, Tensor]] = {}

    def __call__(self, batch: Any) -> Any:
        before, self._last = self._last, {}

        def copied(tensor: Tensor) -> Tensor:
            kept = before.get(id(tensor))
            if kept is None or kept[0] is not tensor or kept[1] != tensor._version:
                kept = tensor, tensor._version, self._copy(tensor)
            self._last[id(tensor)] = kept
            return kept[2]

        return tree_map_only(Tensor, copied, batch)


def pinned(tensor: Tensor) -> Tensor:
    """A tensor in pinned memory: copies from other memory wait for all earlier work of the GPU."""
    is_plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
    return tensor.pin_memory() if is_plain and not tensor.is_pinned() else tensor


# --- Prefetching: while a GPU computes a step, another thread makes the batch of the next


class Ahead:
    """``ahead(step)`` returns ``batch(step)`` and prefetches the batch of the next step, if that is before `end`."""

    def __init__(self, batch: Callable[[int], Any], end: int) -> None:
        self._batch = batch
        self._end = end
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._next: tuple[int, Future[Any]] | None = None

    def __call__(self, step: int) -> Any:
        coming, self._next = self._next, None
        if coming is not None and coming[0] == step:
            batch = coming[1].result()
        else:
            if coming is not None:
                coming[1].cancel()
            batch = self._thread.submit(self._batch, step).result()  # never two at a time, since tasks may cache
        if step + 1 < self._end:
            self._next = step + 1, self._thread.submit(self._batch, step + 1)
        return batch

    def close(self) -> None:
        """Stop prefetching; a batch that is being made is waited for."""
        self._thread.shutdown(cancel_futures=True)


# --- Loss scaling

#: A scale that was halved down to this has met no finite gradients for dozens of steps.
_LOST = 2.0**-40


class LossScale:
    """Dynamic loss scaling, with which small gradients fit formats without a scale; a start of 0 disables it."""

    def __init__(self, device: torch.device, start: float, window: int) -> None:
        """
        :param start: the first scale; 0: none.
        :param window: clean steps in a row after which it is doubled.
        """
        self._scaler = GradScaler(
            device.type, init_scale=start or 1.0, growth_interval=max(window, 1), enabled=start > 0
        )

    @property
    def is_used(self) -> bool:
        return self._scaler.is_enabled()

    @property
    def value(self) -> float:
        """The current scale; waits for the device."""
        return float(self._scaler.get_scale())

    @property
    def is_lost(self) -> bool:
        """Whether all recent steps were skipped, so that the run no longer learns."""
        return self.is_used and self.value <= _LOST

    def of(self, loss: Tensor) -> Tensor:
        """The scaled loss."""
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def undone(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale."""
        if self.is_used:
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """Make the optimizer's step, unless a gradient is not finite, and update the scale."""
        self._scaler.step(optimizer)
        self._scaler.update()

    def state(self) -> dict[str, Any]:
        """Plain values."""
        return dict(self._scaler.state_dict())

    def load(self, state: dict[str, Any]) -> None:
        """Restore the :meth:`state`."""
        if self.is_used:
            self._scaler.load_state_dict(state)


class Session:
    """The model, plan and optimizer of a run, at some step."""

    def __init__(
        self,
        task: Task,
        plan: Plan,
        *,
        execution: str | ExecutionOptions,
        device: torch.device,
        compile: bool,
        crossover: NativeTerms | None = None,
        processes: Processes = SINGLE,
    ) -> None:
        """
        :param crossover: the measured sizes from which on GEMMs run natively; None: those of this machine.
        :param processes: those that train the model together, each on its part of every batch.
        """
        execution = execution_options(execution)
        self.task = task
        self.device = device
        self.processes = processes
        self._first_memory = dict(task.memory)
        #: Steps made.
        self.step = 0
        #: The learning rate, relative to the task's.
        self.rate = 1.0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        torch.manual_seed(task.seed)
        plain = task.model().to(device)
        layout = layout_for(plain, device.type, execution.kind)
        self.model: nn.Module = lay_out(plain, layout)
        self._there = Copies(lambda tensor: laid_out(tensor.to(device, non_blocking=True), layout))
        #: The measured sizes from which on GEMMs run natively; None where nothing was measured.
        self.crossover: NativeTerms | None = None
        if isinstance(execution, Native) and execution.min_macs is None:
            self.crossover = crossover or processes.share(partial(native_terms, execution, self.model))
            execution = NativeWithCrossover.of(execution, self.crossover)
        self._execution = execution
        self.run: Attachment = attach(
            self.model,
            plan,
            steps=task.settings.all_steps,
            example=self.moved(processes.part(task.batch(0))[0]),
            seed=task.seed,
            execution=execution,
        )
        if processes.count > 1:
            self.run.cost()  # records the operations, on the model as it is before it is split
        trained = processes.apply(self.model)
        #: Cached, since iterating over the modules of a deep model takes as long as its optimizer's step.
        self._parameters = list(self.model.parameters())
        self.optimizer = self._new_optimizer()
        self.scale = self._new_scale()
        self.loss = self.run.loss(task.loss)
        # Masks may hold infinities from the start.
        self._finite = {
            name for name, tensor in _tensors_in(self.model.state_dict()) if first_not_finite([(name, tensor)]) is None
        }
        # torch.compile cannot trace fused recurrent layers; those that a plan decomposes are plain operations.
        recurrent = [(path, module) for path, module in self.model.named_modules() if isinstance(module, nn.RNNBase)]
        whole = all(is_decomposed(self.run.plan, path, layer.mode.lower()) for path, layer in recurrent)
        # CUDA graphs save the launches that bound small models, but hold memory that packed execution should free, and
        # do not work with graph breaks.
        mode = "reduce-overhead" if device.type == "cuda" and execution.kind == "emulate" and whole else None
        self._called: nn.Module = self.run.compile(fullgraph=whole, mode=mode) if compile else trained
        self._choose_updates()
        #: For evaluations.
        self._evaluated = self._called if compile and task.evaluates_compiled and whole else self.model
        ready = Copies(pinned)
        is_ahead = device.type == "cuda" and not task.batches_need_model
        self._batches_ahead = (
            Ahead(lambda step: ready(self._batch(step)), task.settings.all_steps) if is_ahead else None
        )

    def _new_optimizer(self) -> Optimizer:
        """The task's optimizer, with its state in the plan's formats."""
        plain = self.task.optimizer(self.model)
        learned = self.run.quantizer_parameters()
        if learned:  # of quantizers of the user's own, which no decay should pull to zero
            plain.add_param_group(
                {"params": learned, **({"weight_decay": 0.0} if "weight_decay" in plain.defaults else {})}
            )
        # Before the optimizer is replaced by one that holds its rates in float32.
        self._peaks = [float(group["lr"]) for group in plain.param_groups]
        return self.run.optimizer(plain)

    def _new_scale(self) -> LossScale:
        recipe = self.task.settings
        return LossScale(self.device, recipe.loss_scale, recipe.scale_window or self.task.epoch())

    def _choose_updates(self) -> None:
        """Where the plan does not hold in updates, make them in modules without it that share the model's tensors."""
        if not self.task.rounds_updates:
            shared: dict[int, Any] = {id(own): own for own in (*self.model.parameters(), *self.model.buffers())}
            self._called, self.loss = copy_without_plan(self.model, shared), self.task.loss

    def close(self) -> None:
        """Detach the plan and stop prefetching."""
        if self._batches_ahead is not None:
            self._batches_ahead.close()
        self.run.detach()

    # --- a step ---

    def forward_backward(self) -> float:
        """Compute the gradients of the next step and return its loss."""
        _seed(self.task.seed, self.step, TRAINING, self.device, self.processes.data_part)
        inputs, target = self.next_batch()
        self.optimizer.zero_grad(set_to_none=True)
        args, kwargs = call_arguments(inputs)
        loss: Tensor = self.loss(self._called(*args, **kwargs), target)
        reading = _Reading(value_before_rounding(loss))
        self.scale.of(loss).backward()  # type: ignore[no-untyped-call]
        return self.processes.mean(reading.value())

    def apply(self) -> float:
        """Make the optimizer's step and return the learning rate."""
        held = self.task.settings.hold
        factor = 1.0 if self.step < held else self.task.learning_rate(self.step - held)
        groups = self.optimizer.param_groups
        for group, peak in zip(groups, self._peaks, strict=True):
            set_rate(group, peak * factor * self.rate)
        self.scale.undone(self.optimizer)
        if self.task.settings.clip > 0:
            nn.utils.clip_grad_norm_(self._parameters, self.task.settings.clip)
        self.scale.step(self.optimizer)
        self.run.step()
        self.step += 1
        return self._peaks[0] * factor * self.rate

    def evaluate(self, last: bool = False) -> dict[str, float]:
        """The task's metrics now, which the task receives in :meth:`Task.after_evaluation`, too.

        :param last: also compute those of the end of a run.
        """
        _seed(self.task.seed, self.step, EVALUATION, self.device)
        self.processes.share_buffers(self.model)
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad():
                values = self.task.evaluate(self._evaluated)
                if last:
                    values = {**values, **self.task.final_figures(self._evaluated)}
                figures = {name: float(value) for name, value in values.items()}
        finally:
            for module, training in modes:
                module.training = training
            self.processes.reshard(self.model)
        figures = self.processes.share(lambda: figures)
        metric_name = self.task.metric.name
        if metric_name not in figures:
            raise TaskError(
                f"the task {self.task.name} is judged by {metric_name}, but its evaluate() returned "
                f"{', '.join(figures) or 'nothing'}: let it return {metric_name}, too."
            )
        held = self.task.settings.hold
        if not held or self.step > held:  # the recipe begins after the hold: it waits for no plateau before
            self.task.after_evaluation(dict(figures))
        return figures

    def next_batch(self) -> Any:
        """The inputs and the target of the next step, on the model's device."""
        return self.moved((self._batch if self._batches_ahead is None else self._batches_ahead)(self.step))

    def _batch(self, step: int) -> Any:
        return self.processes.part(self.task.batch_of(self.model, step))

    def moved(self, batch: Any) -> Any:
        """A batch on the model's device."""
        return batch if self.device.type == "cpu" else self._there(batch)

    def look(self, probe: Probe) -> None:
        """Run the passes of the next step on a copy of the model under `probe`, in the task's own precision."""
        with preserve_rng_state():
            _seed(self.task.seed, self.step, TRAINING, self.device)
            probe_step(self.model, self.next_batch(), self.task.loss, probe)

    # --- state ---

    def state(self) -> dict[str, Any]:
        """Everything that a resumed run needs, as tensors and plain values; all processes call this."""
        self.processes.share_buffers(self.model)
        return {
            "model": self.model_state(),
            "optimizer": self.processes.whole(plain_state(self.optimizer)),
            "attachment": self.processes.whole(self.run.state_dict()),
            "memory": dict(self.task.memory),
            "loss_scale": self.scale.state(),
        }

    def model_state(self) -> dict[str, Tensor]:
        """The model's ``state_dict()``, of whole tensors; all processes call this."""
        state: dict[str, Tensor] = self.processes.whole(self.model.state_dict())
        return state

    def load(self, step: int, state: dict[str, Any]) -> None:
        """Restore the :meth:`state` of step `step`."""
        self.load_training(step, state)
        self.run.load_state_dict(state["attachment"])

    def load_training(self, step: int, state: dict[str, Any]) -> None:
        """Restore the :meth:`state` of step `step`, except for the attachment's."""
        try:
            self.model.load_state_dict(self.processes.split(self.model, state["model"]))
            load_plain_state(self.optimizer, self.processes.split_optimizer(self.optimizer, state["optimizer"]))
        except (RuntimeError, ValueError, KeyError) as error:
            reason = (str(error).strip().splitlines() or [""])[-1].strip().removesuffix(".")
            raise RunError(
                f"the checkpoint of step {step} does not fit the task's model and optimizer ({reason}): the task has "
                f"changed since, so train it anew in another folder."
            ) from error
        self.task.memory = dict(state["memory"])
        self.scale.load(state.get("loss_scale", {}))
        self.step = step

    def restart(self) -> None:
        """Return to the state before the first step."""
        torch.manual_seed(self.task.seed)
        self.model.load_state_dict(self.task.model().state_dict())
        self.optimizer = self._new_optimizer()
        self.scale = self._new_scale()
        self.task.memory = dict(self._first_memory)
        self.run.load_state_dict({**self.run.state_dict(), "step": 0})
        self.step = 0

    def observe(self) -> None:
        """From now on run uncompiled, and collect rounding statistics at every site."""
        state = self.run.state_dict()
        self.attach_uncompiled(self.run.plan, stats=True)
        self.run.load_state_dict(state)

    def attach_uncompiled(self, plan: Plan, stats: bool = False) -> None:
        """Attach another plan, or the same one again, from its first step on; the model runs uncompiled from now on."""
        self.run = self.run.attach_again(plan, stats=stats)
        self.loss = self.run.loss(self.task.loss)
        self._called = self._evaluated = self.model
        self._choose_updates()

    def broken_weight(self) -> str | None:
        """The first parameter or buffer that is no longer finite; None where all are, in all processes."""
        broken = self._broken_weight_in(self.model.state_dict())
        return broken or ("of another process" if self.processes.any(broken is not None) else None)

    def _broken_weight_in(self, state: Mapping[str, Any]) -> str | None:
        return first_not_finite((name, tensor) for name, tensor in _tensors_in(state) if name in self._finite)

    def broken_in(self, state: Mapping[str, Any]) -> str | None:
        """The first weight or optimizer moment of a :meth:`state` that is not finite; None where all are."""
        broken = self._broken_weight_in(state.get("model", {}))
        return broken or first_not_finite(self._moments_in(state.get("optimizer", {})))

    def broken_state(self) -> str | None:
        """The first weight or optimizer moment that is no longer finite; None where all are."""
        return self.broken_in(self.state())

    def _moments_in(self, state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """The moments in the state of the optimizer; counters of steps are left out."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for number, moments in state.get("state", {}).items():
            name = names.get(id(parameters[number])) if number in range(len(parameters)) else number
            for moment, tensor in _tensors_in(moments):
                if tensor.dim():
                    yield f"the optimizer's {moment} of {name}", tensor

    def broken_gradient(self) -> str | None:
        """The first parameter whose gradient is not finite."""
        return first_not_finite(_tensors_in({name: p.grad for name, p in self.model.named_parameters()}))

    def peak(self) -> int:
        """The most bytes held so far."""
        return peak_bytes(self.device)


def peak_bytes(device: torch.device) -> int:
    """The most bytes held so far: on a GPU by torch's allocator, else by the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if os.uname().sysname == "Darwin" else most * 1024


def _tensors_in(state: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of nested mappings, with their names; of distributed ones this process's part."""
    if isinstance(state, Tensor):
        yield name, state.to_local() if hasattr(state, "to_local") else state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from _tensors_in(value, f"{name}.{key}" if name else str(key))


class _Reading:
    """An asynchronous copy of the loss to the host: on a GPU the backward pass is launched meanwhile."""

    def __init__(self, loss: Tensor) -> None:
        self._loss = loss.detach()
        if loss.is_cuda:
            self._host = torch.empty((), dtype=loss.dtype, pin_memory=True)
            self._host.copy_(self._loss.reshape(()), non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(loss.device))

    def value(self) -> float:
        if not self._loss.is_cuda:
            return float(self._loss)
        self._arrived.synchronize()
        return float(self._host)


def _seed(seed: int, step: int, purpose: int, device: torch.device, data_part: int = 0) -> None:
    low, high = key_of(seed, step, purpose)
    number = ((high % 2**32) << 32 | low % 2**32) + data_part & 2**64 - 1
    torch.default_generator.manual_seed(number)  # torch.manual_seed also seeds other devices: 0.1 ms
    if device.type == "cuda":
        torch.cuda.default_generators[_index(device)].manual_seed(number)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Within this context equal steps give equal bits; generators and settings are restored at the end."""
    devices = [_index(device)] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        if device.type != "cuda":
            yield
            return
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        memory: Any = torch.utils.deterministic
        fills = memory.fill_uninitialized_memory
        cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
        torch.use_deterministic_algorithms(True, warn_only=True)
        memory.fill_uninitialized_memory = False  # it is never read
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            memory.fill_uninitialized_memory = fills
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
