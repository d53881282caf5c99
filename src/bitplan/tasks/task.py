"""What a task is: a model, data, a recipe and a metric behind one small interface.

A task is a class; an object of it is one experiment with its settings and its seed. To add one, derive from
:class:`Task`, give it a :class:`Settings` class of its own, and name it as ``my_task.py:MyTask``.

Everything random is a pure function of the seed and the step, and nothing is remembered between two calls of
:meth:`Task.batch`: a run that was killed goes on with exactly the data that it would have seen. What must be remembered
is in three places that checkpoints hold: the model with its buffers, the optimizer, and :attr:`Task.memory`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from bitplan.errors import TaskError
from bitplan.targets import Target


@dataclass(frozen=True)
class Metric:
    """The figure that a task is judged by."""

    name: str
    better: Literal["higher", "lower"]
    #: What the trivial predictor gets (the commonest class, say), so that a number can be read.
    trivial: float

    def is_better(self, a: float, b: float) -> bool:
        """Whether `a` is strictly better than `b`."""
        return a > b if self.better == "higher" else a < b


@dataclass(frozen=True)
class Settings:
    """The recipe: what ``--set key=value`` may change. A task's own settings derive from this and add fields."""

    #: Optimizer steps of the recipe, which are those of the whole run unless it is told to hold.
    steps: int = 400
    #: Samples in a batch.
    batch: int = 128
    #: Evaluate after so many steps (and always after the last).
    evaluate_every: int = 100
    #: The peak learning rate.
    lr: float = 0.1
    #: Clip the gradients' norm to this; 0 does not clip.
    clip: float = 0.0
    #: Steps at the peak learning rate before the recipe begins, on top of `steps`: low precision for a while, and then
    #: the whole budget.
    hold: int = 0
    #: Multiply the loss by this, to begin with, so that small gradients reach low formats (65536 in many papers). It is
    #: halved, and the step skipped, where a gradient is not finite. 0 does not scale.
    loss_scale: float = 0.0
    #: Double the loss scale after so many clean steps in a row; 0: after an epoch.
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
        if not 0 <= self.loss_scale < float("inf"):
            raise TaskError(f"loss_scale is {self.loss_scale}; it must be at least 0 (which does not scale).")
        if self.scale_window < 0:
            raise TaskError(f"scale_window is {self.scale_window}; it must be at least 0 (which is an epoch).")

    @property
    def all_steps(self) -> int:
        """The steps of the whole run."""
        return self.hold + self.steps


class Task(ABC):
    """One experiment; see the module's words."""

    #: How the command line calls it.
    name: ClassVar[str]
    #: One line of ``bitplan tasks``.
    summary: ClassVar[str]
    #: The class of its settings, whose defaults are the recipe.
    settings_class: ClassVar[type[Settings]] = Settings
    #: Whether a compiled run evaluates with compiled code, too: worth its compilation where evaluations are many small
    #: operations, all of one shape. Figures then differ in their last bits from those of uncompiled code.
    evaluates_compiled: ClassVar[bool] = False
    #: The SHA-256 of the user's file that the task was made from; None: not made from a file by its name.
    source_sha256: str | None = None

    def __init__(self, settings: Settings | None = None, seed: int = 0) -> None:
        self.settings: Any = self.settings_class() if settings is None else settings
        self.seed = seed
        #: What the task remembers of a run beside the model and the optimizer, such as the best figure so far of a rule
        #: that waits for a plateau. Training saves it in every checkpoint, as JSON, and puts it back on resuming.
        self.memory: dict[str, float] = {}

    @property
    @abstractmethod
    def metric(self) -> Metric:
        """What it is judged by."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A fresh model; torch's generator has been seeded with the run's seed."""

    @abstractmethod
    def batch(self, step: int) -> tuple[Any, Any]:
        """The inputs and the target of training step `step`, on the CPU: a pure function of seed and step."""

    @abstractmethod
    def loss(self, output: Any, target: Any) -> Tensor:
        """The training loss of the model's output."""

    @abstractmethod
    def optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer at the peak learning rate."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Figures on held-out data, the metric's among them. The model is in evaluation mode, without gradients."""

    def final_figures(self, model: nn.Module) -> dict[str, float]:
        """Figures that are wanted once, after the last step, beside those of its evaluation: on a test set, say."""
        return {}

    def learning_rate(self, step: int) -> float:
        """The factor of the peak learning rate at training step `step`: a function of the step and of the memory."""
        return 1.0

    def epoch(self) -> int:
        """Steps of an epoch; by default, the steps between two evaluations."""
        return int(self.settings.evaluate_every)

    def after_evaluation(self, figures: dict[str, float]) -> None:  # noqa: B027 - most tasks remember nothing
        """Told the figures of each evaluation during training, right after it: the place to change the memory."""

    def example(self) -> tuple[Any, Any]:
        """A batch of the right shapes and types, for those who ask before anything runs.

        The first one, unless a task knows its shapes without its data.
        """
        return self.batch(0)

    def target(self) -> Target:
        """The first training step, as sites, plans and costs take it."""
        return Target(self.model(), self.batch(0), self.loss)
