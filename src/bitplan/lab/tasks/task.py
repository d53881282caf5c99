"""The interface of a task: a model, data, a recipe and a metric.

A task is a class; an object of it is one experiment with its settings and its seed. To add one, derive from
:class:`Task`, give it a :class:`Settings` class, and name it as ``my_task.py:MyTask``.

Everything random is a pure function of the seed and the step, and :meth:`Task.batch` keeps no state between calls: a
run that was killed continues with the data that it would have seen. State is in three places that checkpoints hold: the
model with its buffers, the optimizer, and :attr:`Task.memory`.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bitplan.analysis.targets import Target
from bitplan.errors import TaskError
from bitplan.numerics.wire_format import ORDER

# --- Random data, as a pure function of the seed and a label


def generator(*where: int | str) -> torch.Generator:
    """A new CPU generator seeded by `where`, such as ``("crop", seed, step)``."""
    digest = hashlib.blake2b(repr(where).encode(), digest_size=8).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)


def shuffled(step: int, batch: int, count: int, seed: int) -> Tensor:
    """The indices of the batch of `step`, out of `count` samples.

    Every epoch is a new order of all samples; a batch may span two epochs.
    """
    places = torch.arange(step * batch, (step + 1) * batch)
    epochs = places // count
    chosen = torch.empty_like(places)
    for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
        here = epochs == epoch
        chosen[here] = _order(count, seed, epoch)[places[here] % count]
    return chosen


@lru_cache(maxsize=4)
def _order(count: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(count, generator=generator(ORDER, seed, epoch))


# --- Schedules of the learning rate: factors of its peak, as functions of the step


#: Names of the decays.
DECAYS = ("constant", "steps", "cosine", "linear")


def decayed(decay: str, step: int, steps: int, warmup: int = 0) -> float:
    """The factor at `step` of `steps`: a linear warm-up over the first `warmup` steps, then the decay.

    ``steps`` divides by ten at 50 % and again at 75 % of the run; ``cosine`` and ``linear`` decay to zero.

    >>> [decayed("steps", step, 100) for step in (0, 50, 75)]
    [1.0, 0.1, 0.01]
    >>> decayed("cosine", 50, 100)
    0.5
    >>> [decayed("constant", step, 100, warmup=2) for step in (0, 1, 2)]
    [0.5, 1.0, 1.0]
    """
    if step < warmup:
        return (step + 1) / warmup
    if decay == "constant":
        return 1.0
    if decay == "steps":
        return (1.0, 0.1, 0.01)[(step >= steps * 0.5) + (step >= steps * 0.75)]
    gone = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 1 - gone if decay == "linear" else (1 + math.cos(math.pi * gone)) / 2


# --- Implementations of torch's optimizers


def fused_for(parameters: Iterable[Tensor]) -> bool | None:
    """``fused=`` of an optimizer of these parameters: on a GPU all of them in one launch; elsewhere torch decides.

    >>> import torch
    >>> fused_for([torch.zeros(2)]) is None
    True
    """
    parameter_list = list(parameters)
    is_on_gpu = all(parameter.is_cuda and parameter.is_floating_point() for parameter in parameter_list)
    return True if parameter_list and is_on_gpu else None


@dataclass(frozen=True)
class Metric:
    """The metric of a task."""

    name: str
    better: Literal["higher", "lower"]
    #: The value of the trivial predictor (the most common class, say), for comparison.
    trivial: float

    def is_better(self, a: float, b: float) -> bool:
        """Whether `a` is strictly better than `b`."""
        return a > b if self.better == "higher" else a < b


@dataclass(frozen=True)
class Settings:
    """The recipe, which ``--set key=value`` changes. A task's own settings derive from this and add fields."""

    #: Optimizer steps of the recipe: those of the whole run, unless `hold` adds some.
    steps: int = 400
    #: Samples per batch.
    batch: int = 128
    #: Steps between evaluations (the last step is always evaluated).
    evaluate_every: int = 100
    #: The peak learning rate.
    lr: float = 0.1
    #: Clip the norm of the gradients to this; 0 does not clip.
    clip: float = 0.0
    #: Steps at the peak learning rate before the recipe begins, in addition to `steps`: for low precision in the
    #: beginning, followed by the whole budget.
    hold: int = 0
    #: The initial loss scale, so that small gradients are representable in low formats (65536 in many papers). It is
    #: halved, and the step skipped, if a gradient is not finite. 0 does not scale.
    loss_scale: float = 0.0
    #: Double the loss scale after this many finite steps in a row; 0: after an epoch.
    scale_window: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "evaluate_every"):
            if getattr(self, name) < 1:
                raise TaskError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if not self.lr > 0:
            raise TaskError(f"lr is {self.lr}; it must be above 0.")
        if not self.clip >= 0:
            raise TaskError(f"clip is {self.clip}; it must be at least 0 (which does not clip).")
        if self.hold < 0:
            raise TaskError(f"hold is {self.hold}; it must be at least 0.")
        if not 0 <= self.loss_scale <= torch.finfo(torch.float32).max:
            raise TaskError(
                f"loss_scale is {self.loss_scale:g}; it must be at least 0 (which does not scale), and a float32."
            )
        if self.scale_window < 0:
            raise TaskError(f"scale_window is {self.scale_window}; it must be at least 0 (which is an epoch).")

    @property
    def all_steps(self) -> int:
        """The steps of the whole run."""
        return self.hold + self.steps


class Task(ABC):
    """One experiment; see the module's docstring."""

    #: The name on the command line.
    name: ClassVar[str]
    #: Its line in ``bitplan tasks``.
    summary: ClassVar[str]
    #: The class of its settings, whose defaults are the recipe.
    settings_class: ClassVar[type[Settings]] = Settings
    #: Whether a compiled run also evaluates with compiled code: worth the compilation if evaluations are many small
    #: operations of one shape. Metrics then differ in their last bits from those of uncompiled code.
    evaluates_compiled: ClassVar[bool] = False
    #: Whether training batches come from the model, by :meth:`batch_of`, so that none can be made ahead of its step.
    batches_need_model: ClassVar[bool] = False
    #: The SHA-256 of the user's file that the task comes from; None: not from a file.
    source_sha256: str | None = None

    def __init__(self, settings: Settings | None = None, seed: int = 0) -> None:
        if not -(2**63) <= seed < 2**63:
            raise TaskError(f"the seed is {seed}; it must be a whole number of 64 bits.")
        self.settings: Any = self.settings_class() if settings is None else settings
        self.seed = seed
        #: The state of a run besides model and optimizer, such as the best metric so far of a schedule that waits for a
        #: plateau: tensors and plain values. Training saves it in every checkpoint, and restores it on resuming.
        self.memory: dict[str, Any] = {}

    @property
    @abstractmethod
    def metric(self) -> Metric:
        """The metric that runs are judged by."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model; torch's generator has been seeded with the run's seed."""

    @abstractmethod
    def batch(self, step: int) -> tuple[Any, Any]:
        """The inputs and the target of training step `step`, on the CPU: a pure function of seed and step."""

    def batch_of(self, model: nn.Module, step: int) -> tuple[Any, Any]:
        """The batch of training step `step` of `model`, which has its plan: a function of seed, step, model and memory.

        A task whose data come from the model overrides it and sets :attr:`batches_need_model`; :meth:`batch` then
        serves planners, which need batches of the same shapes.
        """
        return self.batch(step)

    @property
    def rounds_updates(self) -> bool:
        """Whether the plan holds in the passes that are trained, or only where the task itself calls the model."""
        return True

    @abstractmethod
    def loss(self, output: Any, target: Any) -> Tensor:
        """The training loss of the model's output."""

    @abstractmethod
    def optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer at the peak learning rate."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Metrics on held-out data, :attr:`metric` among them. The model is in evaluation mode, without gradients."""

    def final_figures(self, model: nn.Module) -> dict[str, float]:
        """Further metrics after the last step only: on a test set, say."""
        return {}

    def learning_rate(self, step: int) -> float:
        """The factor of the peak learning rate at training step `step`: a function of the step and of the memory."""
        return 1.0

    def epoch(self) -> int:
        """Steps per epoch; by default, the steps between two evaluations."""
        return int(self.settings.evaluate_every)

    def after_evaluation(self, figures: dict[str, float]) -> None:  # noqa: B027 - most tasks remember nothing
        """Called with the metrics after each evaluation during training; may change the memory."""

    def example(self) -> tuple[Any, Any]:
        """A batch of the right shapes and dtypes, without training.

        By default the first one; a task that knows its shapes without its data overrides this.
        """
        return self.batch(0)

    def target(self) -> Target:
        """The first training step, as the target of sites, plans and costs."""
        return Target(self.model(), self.batch(0), self.loss)


class DecayedRate:
    """A part of tasks whose settings have a `decay` of the learning rate and its `warmup`."""

    settings: Any

    def learning_rate(self, step: int) -> float:
        recipe = self.settings
        return decayed(recipe.decay, step, recipe.steps, recipe.warmup)


# --- Tasks with a data set, which is loaded at its first use


Data = TypeVar("Data")


class LoadingTask(Task, Generic[Data]):
    """A task with a data set; a subclass says how it is loaded."""

    @abstractmethod
    def load(self) -> Data:
        """The data set."""

    @cached_property
    def data(self) -> Data:
        with torch.device("cpu"):  # under a fake device, models are created on another device
            return self.load()
