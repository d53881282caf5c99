"""Measuring candidates for real: peak memory, time and final loss of training steps under a plan.

A trial trains a copy of the model. :class:`LocalTrials` runs one trial after the other in this process.
:class:`ProcessTrials` gives each a process of its own, where the problem can be loaded by name: the processes compile
side by side, then each is measured while the others wait, so that no trial disturbs the time of another, and stays
ready to be trained.
"""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor

from bitplan.analysis.memory.fakes import copy_without_plan
from bitplan.analysis.memory.measure import measure_step
from bitplan.analysis.memory.step import OptimizerChoice, TrainingStep, make_optimizer, plan_for, split_call
from bitplan.analysis.targets import Target
from bitplan.capture.recording import split_batch
from bitplan.compiler import torch_private
from bitplan.compiler.torch_private import tree_map_only
from bitplan.compiler.tracing import raise_recompile_limit
from bitplan.errors import BitplanError, BitplanWarning, PlanError
from bitplan.executions.native.crossover import cache_file
from bitplan.files import byte_text, locked
from bitplan.plans import Plan
from bitplan.runtime.attach import Attachment, attach

#: Steps before anything is measured: the first compiles, the second may compile its last graph, delayed scales settle.
_WARM_UP = 3
#: Groups of steps whose mean times are compared, and the seconds that each takes at least.
_TURNS, _TURN_SECONDS = 7, 0.25
#: Further measurements at most, where times spread: other processes make a step before they are measured.
_MOST_REPEATS = 6
#: A spread of times (interquartile range over median) above this says that the machine is busy.
WIDEST_SPREAD = 0.05
#: The share of the steps, at the end, whose mean is the final loss.
_FINAL_SHARE = 0.25

#: Batches by step: a function of the step, or batches to go through.
Batches = Callable[[int], Any] | Iterable[Any]


@dataclass(frozen=True)
class Problem:
    """A training step, and the data to train on."""

    target: Target
    #: None: a step is the forward and backward pass.
    optimizer: OptimizerChoice = None
    #: None: the target's batch, again and again.
    data: Batches | None = None
    compile: bool = False
    autocast: torch.dtype | None = None
    #: Trains the verification of a step without an optimizer.
    verified_with: OptimizerChoice = "adamw"

    @property
    def device(self) -> torch.device:
        return next(self.target.model.parameters(), torch.empty(0)).device


@dataclass(frozen=True)
class Trial:
    """The measured training step of a candidate."""

    #: Peak and saved tensors at the end of the forward pass, in bytes.
    peak: int
    saved: int
    milliseconds: float
    #: Interquartile range of the times over their median.
    spread: float
    #: Seconds of the first steps, compilation included.
    first_seconds: float

    @property
    def is_quiet(self) -> bool:
        """Whether repeated times agree, so that they may be remembered."""
        return self.spread <= WIDEST_SPREAD

    def to_dict(self) -> dict[str, float]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{byte_text(self.peak)}, {self.milliseconds:.2f} ms a step"


@dataclass(frozen=True)
class Failure:
    """Why a candidate could not be measured."""

    reason: str

    def __str__(self) -> str:
        return self.reason


Outcome = Trial | Failure
OUT_OF_MEMORY = Failure("out of memory")
#: How libraries other than torch's allocator say so.
_OUT_OF_MEMORY_SIGNS = ("out of memory", "ALLOC_FAILED", "CUDNN_STATUS_INTERNAL_ERROR")


def failure_of(error: Exception) -> Failure:
    """An error in one line; running out of memory is expected of large candidates."""
    causes = list(_causes(error))
    if any(_is_out_of_memory(cause) for cause in causes):
        return OUT_OF_MEMORY
    if isinstance(error, BitplanError):
        return Failure(_first_line(error))
    root = causes[-1]  # transformers says of any error in a module of its own that it could not import it
    why = "" if root is error else f" ({type(root).__name__}: {_first_line(root)})"
    return Failure(f"{type(error).__name__}: {_first_line(error)}{why}")


def _causes(error: BaseException | None) -> Iterator[Exception]:
    """An error, and those that led to it."""
    while isinstance(error, Exception):
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _is_out_of_memory(error: Exception) -> bool:
    signs = (sign in _first_line(error) for sign in _OUT_OF_MEMORY_SIGNS)
    return isinstance(error, torch.OutOfMemoryError) or any(signs)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


@contextmanager
def device_alone(device: torch.device) -> Iterator[None]:
    """Use a GPU while no other trial of this user is measured or trained on it; others may compile meanwhile."""
    if device.type != "cuda":
        yield
        return
    with ExitStack() as stack:
        with suppress(OSError):  # a cache that cannot be written: other trials are not waited for
            stack.enter_context(locked(cache_file().with_name(f"gpu{device.index or 0}.lock")))
        yield


def compiling_backward_early() -> AbstractContextManager[Any]:
    """Compile the backward pass together with the forward pass, where torch has the option.

    Otherwise the first step's saved tensors are in memory while its backward pass compiles: tens of seconds, in which
    other candidates need the memory.
    """
    option = "force_non_lazy_backward_lowering"
    config: Any = torch_private.functorch_config
    return config.patch({option: True}) if hasattr(config, option) else nullcontext()


class CandidateStep:
    """A model under a plan, ready to make training steps."""

    def __init__(self, problem: Problem, plan: Plan | None, *, copies: bool = True) -> None:
        """
        :param copies: the steps change a copy of the problem's model, not the model itself.
        """
        began = time.perf_counter()
        target = problem.target
        self.problem = problem
        self.model = copy_without_plan(target.model) if copies else target.model
        self._weights = {name: value.detach().to("cpu", copy=True) for name, value in self.model.state_dict().items()}
        self.run: Attachment | None = None
        planned = plan_for(plan, problem.optimizer)
        if planned is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", BitplanWarning)  # of fallbacks: the time says whether they matter
                self.run = attach(self.model, planned, example=split_batch(target.batch, target.loss)[0])
        self._run_state = None if self.run is None else self.run.state_dict()
        forward: Callable[..., Any] | None = None
        if problem.compile:
            is_plain = self.run is None or self.run.execution.kind == "emulate"
            forward = torch.compile(self.model) if is_plain or self.run is None else self.run.compile(fullgraph=False)
        loss = target.loss if target.loss is None or self.run is None else self.run.loss(target.loss)
        call = split_call(target.batch, target.loss)
        self.step = TrainingStep(self.model, call, loss, problem.optimizer, self.run, forward, problem.autocast)
        with compiling_backward_early():
            for _ in range(_WARM_UP):
                self.step(lambda phase: None)
        self.release_cache()
        self.first_seconds = time.perf_counter() - began

    def measure(self) -> Trial:
        """Peak and time of a step."""
        with device_alone(self.problem.device):
            memory = measure_step(self.step, 2, warm_up=False)
            median, spread = self._time()
            for _ in range(_MOST_REPEATS):
                if spread <= WIDEST_SPREAD:
                    break
                median, spread = min((median, spread), self._time(), key=lambda time: time[1])
            self.release_cache()
        return Trial(memory.peak, memory.activations, 1e3 * median, spread, self.first_seconds)

    def _time(self) -> tuple[float, float]:
        """The median of seconds per step, and their spread."""
        steps = max(1, min(50, round(_TURN_SECONDS / max(self._seconds(1), 1e-4))))
        times = [self._seconds(steps) for _ in range(_TURNS)]
        quarters, median = statistics.quantiles(times, n=4), statistics.median(times)
        return median, (quarters[2] - quarters[0]) / median

    def _seconds(self, steps: int) -> float:
        self._synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            self.step(lambda phase: None)
        self._synchronize()
        return (time.perf_counter() - began) / steps

    def _synchronize(self) -> None:
        if self.step.device.type == "cuda":
            torch.cuda.synchronize(self.step.device)

    def release_cache(self) -> None:
        """Return cached memory to the device, where other processes may need it."""
        gc.collect()
        if self.step.device.type == "cuda":
            torch.cuda.synchronize(self.step.device)
            torch.cuda.empty_cache()

    def final_loss(self, steps: int, seed: int) -> float:
        """The mean loss of the last of `steps` steps on the problem's data, from the weights it began with."""
        torch.manual_seed(seed)
        self.model.load_state_dict(self._weights)
        if self.run is not None and self._run_state is not None:
            self.run.load_state_dict(self._run_state)
        choice = self.problem.optimizer
        optimizer = (
            self.problem.verified_with if choice in (None, "none") else choice
        )  # a step without one learns nothing
        self.step.optimizer = make_optimizer(optimizer, self.model, self.run)
        losses: list[Tensor] = []
        self.step.on_loss = losses.append
        batch_at, loss = _batches(self.problem, steps, seed), self.problem.target.loss
        with device_alone(self.problem.device):
            for number in range(steps):
                self.step.args, self.step.kwargs, self.step.expected = split_call(batch_at(number), loss)
                self.step(lambda phase: None)
        self.step.on_loss = None
        return statistics.fmean(map(float, losses[-max(1, round(steps * _FINAL_SHARE)) :]))


def _batches(problem: Problem, steps: int, seed: int) -> Callable[[int], Any]:
    """Step -> batch, on the model's device; every seed has other batches, or another order of them."""
    data, device = problem.data, problem.device

    def moved(batch: Any) -> Any:
        return tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)

    if data is None:
        return lambda step: problem.target.batch
    if callable(data):
        return lambda step: moved(data(seed * steps + step))
    batches = list(islice(iter(data), steps))
    if not batches:
        raise PlanError("data= has no batches: give batches as the model and its loss take them.")
    order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(seed)).tolist()
    return lambda step: moved(batches[order[step % len(batches)]])


# --- Trials in this process, and in processes of their own


class Trials(ABC):
    """Measures and trains candidates of one problem."""

    #: Whether they run on this machine, for which times and peaks are remembered.
    are_here = True

    @abstractmethod
    def measure_each(self, plans: Sequence[Plan | None]) -> Iterator[tuple[int, Outcome]]:
        """Peak and time under each plan with its place in `plans`, as soon as they are known."""

    def measure(self, plans: Sequence[Plan | None]) -> list[Outcome]:
        """Peak and time under each plan."""
        return [outcome for _, outcome in sorted(self.measure_each(plans), key=lambda found: found[0])]

    @abstractmethod
    def final_losses(self, plan: Plan | None, steps: int, seeds: int) -> list[float]:
        """The final loss of each seed."""

    def close(self) -> None:  # noqa: B027 - there is nothing to end in this process
        """End what is still running."""


class LocalTrials(Trials):
    """One trial after the other, in this process."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def measure_each(self, plans: Sequence[Plan | None]) -> Iterator[tuple[int, Outcome]]:
        for number, plan in enumerate(plans):
            yield number, self._measure(plan)

    def _measure(self, plan: Plan | None) -> Outcome:
        try:
            return self._candidate(plan).measure()
        except Exception as error:
            return failure_of(error)

    def _candidate(self, plan: Plan | None) -> CandidateStep:
        gc.collect()
        if self.problem.compile:
            torch.compiler.reset()  # graphs of the trial before
        with raise_recompile_limit(), torch.random.fork_rng(range(torch.cuda.device_count())):
            return CandidateStep(self.problem, plan)

    def final_losses(self, plan: Plan | None, steps: int, seeds: int) -> list[float]:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            candidate = self._candidate(plan)
            return [candidate.final_loss(steps, seed) for seed in range(seeds)]


class Child(ABC):
    """A process that prepares one candidate, measures it and trains it."""

    @abstractmethod
    def send(self, *request: Any) -> None:
        """Ask for something, without waiting for the answer."""

    @abstractmethod
    def receive(self) -> Any:
        """The answer to the oldest request; a failure if the process is gone."""

    @abstractmethod
    def is_alive(self) -> bool: ...

    @abstractmethod
    def stop(self) -> None: ...

    def ask(self, *request: Any) -> Any:
        self.send(*request)
        return self.receive()


@dataclass
class _LocalChild(Child):
    process: BaseProcess
    connection: Connection

    def send(self, *request: Any) -> None:
        with suppress(OSError):  # the answer says that it is gone
            self.connection.send(request)

    def receive(self) -> Any:
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return Failure("its process was killed, for example because memory ran out")

    def is_alive(self) -> bool:
        return self.process.is_alive()

    def stop(self) -> None:
        self.connection.close()
        self.process.terminate()
        self.process.join()


class ProcessTrials(Trials):
    """A process for each candidate; `most` of them prepare their step at a time."""

    def __init__(self, load: Callable[..., Problem], arguments: tuple[Any, ...], most: int) -> None:
        """
        :param load: loads the problem in every process: a function of an importable module.
        """
        self.load, self.arguments, self.most = load, arguments, most
        self._children: dict[str, Child] = {}

    def measure_each(self, plans: Sequence[Plan | None]) -> Iterator[tuple[int, Outcome]]:
        without_room: list[int] = []
        for first in range(0, len(plans), self.most):
            group = range(first, min(first + self.most, len(plans)))
            for number, outcome in zip(group, self._measure_group([plans[number] for number in group]), strict=True):
                if outcome == OUT_OF_MEMORY and len(plans) > 1:  # perhaps because of the others
                    without_room.append(number)
                else:
                    yield number, outcome
        for number in without_room:
            self._stop_children()
            for outcome in self._measure_group([plans[number]]):
                yield number, outcome

    def _measure_group(self, plans: Sequence[Plan | None]) -> Iterator[Outcome]:
        """Prepare all, then measure one after the other."""
        children = [self._start(plan) for plan in plans]
        for child in children:
            child.send("prepare")
        ready = [child.receive() for child in children]
        for child, news in zip(children, ready, strict=True):
            yield news if isinstance(news, Failure) else child.ask("measure")

    def _start(self, plan: Plan | None) -> Child:
        previous = self._children.pop(_key(plan), None)
        if previous is not None:
            previous.stop()
        child = self._children[_key(plan)] = self._new_child(None if plan is None else plan.to_dict())
        return child

    def _new_child(self, plan: dict[str, Any] | None) -> Child:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(self.load, self.arguments, plan, theirs), daemon=True)
        process.start()
        theirs.close()
        return _LocalChild(process, ours)

    def final_losses(self, plan: Plan | None, steps: int, seeds: int) -> list[float]:
        child = self._children.get(_key(plan))
        if child is None or not child.is_alive():
            child = self._start(plan)
            news = child.ask("prepare")
            if isinstance(news, Failure):
                raise PlanError(f"the candidate cannot be trained: {news.reason}.")
        losses = child.ask("train", steps, seeds)
        if isinstance(losses, Failure):
            raise PlanError(f"the candidate cannot be trained: {losses.reason}.")
        return list(losses)

    def close(self) -> None:
        self._stop_children()

    def _stop_children(self) -> None:
        for child in self._children.values():
            child.stop()
        self._children.clear()


def _key(plan: Plan | None) -> str:
    return "" if plan is None else plan.to_json()


class CandidateServer:
    """Answers requests about one candidate, in a process of its own."""

    def __init__(
        self, load: Callable[..., Problem], arguments: tuple[Any, ...], plan: Mapping[str, Any] | None
    ) -> None:
        self.load, self.arguments, self.plan = load, arguments, plan
        self.candidate: CandidateStep | None = None

    def answer(self, request: str, *options: int) -> Any:
        """
        :param request: ``prepare``; then ``measure``, or ``train`` with the numbers of steps and seeds.
        """
        try:
            if request == "prepare":
                plan = None if self.plan is None else Plan.from_dict(self.plan)
                self.candidate = CandidateStep(self.load(*self.arguments), plan, copies=False)
                return "ready"
            assert self.candidate is not None
            if request == "measure":
                return self.candidate.measure()
            steps, seeds = options
            losses = [self.candidate.final_loss(steps, seed) for seed in range(seeds)]
            self.candidate.release_cache()
            return losses
        except Exception as error:
            return failure_of(error)


def _serve(
    load: Callable[..., Problem], arguments: tuple[Any, ...], plan: dict[str, Any] | None, connection: Connection
) -> None:
    """The life of a child: answers requests until the parent closes the connection."""
    server = CandidateServer(load, arguments, plan)
    while True:
        try:
            request = connection.recv()
        except (EOFError, OSError):
            return
        connection.send(server.answer(*request))
