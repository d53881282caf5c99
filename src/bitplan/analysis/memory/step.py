"""A training step in phases, for measurement and for estimation, and the memory of its tensor classes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bitplan.capture.recording import FakeInputs, call_arguments, call_loss, require_tensors, split_batch
from bitplan.compiler.torch_private import tree_leaves
from bitplan.errors import MemoryEstimateError, nearest_names
from bitplan.files import byte_text
from bitplan.plans import KEEP, Plan
from bitplan.plans.loading import PlanSource, find_plan
from bitplan.plans.spec import OptimizerRule
from bitplan.runtime.attach import Attachment
from bitplan.runtime.frozen import frozen_buffers
from bitplan.tables import html_table, plain_table

# --- Memory by class of tensors


#: The meaning of each class, in the order of the table.
MEANINGS = {
    "weights": "parameters and buffers",
    "frozen": "parameters that are not trained, as they are stored",
    "optimizer": "optimizer state",
    "activations": "saved for backward, at the end of forward",
    "gradients": "of the parameters, at the end of backward",
    "other": "at the peak: batch, temporaries, workspaces",
    "gathered": "part of other: weights and buffers of FSDP, at most",
    "peak": "the most at any moment of a step",
}

#: Classes that few models have.
_OPTIONAL = ("frozen", "gathered")


@dataclass(frozen=True)
class Memory:
    """Bytes of a training step: forward, loss, backward, optimizer.

    Weights, frozen weights and optimizer state are always allocated. Activations are released while gradients are
    allocated: ``peak = weights + frozen + optimizer + max(activations, gradients) + other``.
    """

    weights: int
    gradients: int
    activations: int
    optimizer: int
    other: int
    peak: int
    #: Parameters that are not trained; listed where a model has any.
    frozen: int = 0
    #: Weights that FSDP has gathered, and its buffers, at their most; listed where there are any.
    gathered: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or value < 0:
                raise MemoryEstimateError(f"{field.name} are bytes, a whole number from 0, not {value!r}.")
        always = self.weights + self.frozen + self.optimizer
        if self.peak != always + max(self.activations, self.gradients) + self.other:
            raise MemoryEstimateError("the classes do not add up to the peak: use Memory.of, which computes other.")

    @classmethod
    def of(cls, weights: int, gradients: int, activations: int, optimizer: int, peak: int, frozen: int = 0) -> Memory:
        """Compute ``other`` from the peak. Sizes from graphs with dynamic shapes are symbolic and become integers."""
        parts: tuple[Any, ...] = (weights, gradients, activations, optimizer, peak, frozen)
        weights, gradients, activations, optimizer, peak, frozen = (
            int(size) if isinstance(size, torch.SymInt) else size for size in parts
        )
        accounted = weights + frozen + optimizer + max(activations, gradients)
        # The allocator may report a few bytes less than the sum over tensors.
        peak = max(peak, accounted)
        return cls(weights, gradients, activations, optimizer, peak - accounted, peak, frozen)

    def to_dict(self) -> dict[str, int]:
        """Bytes by class, and the peak."""
        return {name: count for name, count in asdict(self).items() if name not in _OPTIONAL or count}

    def rows(self) -> list[tuple[str, int, str]]:
        """(class, bytes, meaning), the peak last."""
        classes = [(name, getattr(self, name), meaning) for name, meaning in MEANINGS.items()]
        return [row for row in classes if row[0] not in _OPTIONAL or row[1]]

    def __str__(self) -> str:
        return "\n".join(f"{name:<12}{byte_text(count):>12}  {meaning}" for name, count, meaning in self.rows())

    def _repr_html_(self) -> str:
        names, counts, meanings = zip(*self.rows(), strict=True)
        return html_table({"class": names, "size": [byte_text(count) for count in counts], "meaning": meanings})


@dataclass(frozen=True)
class RunMemory:
    """The memory of a run's training step: estimated on fake tensors and, with a batch, measured."""

    estimated: Memory
    measured: Memory | None = None

    def to_dict(self) -> dict[str, dict[str, int] | None]:
        """Bytes by class."""
        return {
            "estimated": self.estimated.to_dict(),
            "measured": None if self.measured is None else self.measured.to_dict(),
        }

    def _columns(self) -> dict[str, list[str]]:
        names = [name for name, _, _ in self.estimated.rows()]
        columns = {"class": names}
        for name, memory in (("estimated", self.estimated), ("measured", self.measured)):
            if memory is not None:
                columns[name] = [byte_text(count) for _, count, _ in memory.rows()]
        return {**columns, "meaning": [MEANINGS[name] for name in names]}

    def __str__(self) -> str:
        return plain_table(self._columns())

    def _repr_html_(self) -> str:
        return html_table(self._columns())


#: The phase that has just ended: none, forward pass with loss, backward pass, optimizer step.
Phase = Literal["start", "forward", "backward", "end"]

OnPhase = Callable[[Phase], None]

Loss = Callable[..., Tensor]

#: An optimizer by name, a function that makes one for a model, or None: forward and backward only. ``"default"`` is
#: SGD with momentum, or AdamW if the plan has a rule for optimizer state, for which there is no SGD.
OptimizerChoice = str | Callable[[nn.Module], Optimizer] | None

#: Learning rates do not matter for memory.
_OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(_trainable(model), lr=1e-3, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(_trainable(model), lr=1e-4),
}

OPTIMIZER_NAMES = (*_OPTIMIZERS, "none")


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def resolve_optimizer(choice: OptimizerChoice, *plans: Plan | None) -> OptimizerChoice:
    """The optimizer that ``"default"`` means with these plans; other choices are returned unchanged."""
    if choice != "default":
        return choice
    return "adamw" if any(plan is not None and plan.optimizer_rule is not None for plan in plans) else "sgd"


def plan_for(plan: PlanSource | None, choice: OptimizerChoice) -> Plan | None:
    """The plan to attach; its rule for optimizer state is dropped if the step has no optimizer."""
    resolved = None if plan is None else find_plan(plan)
    if resolved is None or resolved.optimizer_rule is None or not (choice is None or choice == "none"):
        return resolved
    return replace(resolved, optimizer=OptimizerRule(KEEP))


def make_optimizer(choice: OptimizerChoice, model: nn.Module, run: Attachment | None = None) -> Optimizer | None:
    """Make the chosen optimizer, with low-bit state if the attached plan has a rule for it; None for no optimizer."""
    plain = _plain_optimizer(resolve_optimizer(choice, None if run is None else run.plan), model)
    return plain if plain is None or run is None else run.optimizer(plain)


def _plain_optimizer(choice: OptimizerChoice, model: nn.Module) -> Optimizer | None:
    if choice is None or choice == "none":
        return None
    if isinstance(choice, str):
        if choice not in _OPTIMIZERS:
            raise MemoryEstimateError(
                f"there is no optimizer {choice!r} here; {nearest_names(choice, OPTIMIZER_NAMES)}"
            )
        return _OPTIMIZERS[choice](model)
    return choice(model)


def split_call(batch: Any, loss: Loss | None) -> tuple[Any, dict[str, Any], Any]:
    """Arguments and keyword arguments of the model's call, and the target of the loss."""
    if isinstance(batch, FakeInputs):
        return batch.args, batch.kwargs, None
    require_tensors(batch)
    inputs, expected = split_batch(batch, loss)
    args, kwargs = call_arguments(inputs)
    return args, kwargs, expected


class TrainingStep:
    """A model with its batch, loss and optimizer; calling it runs a training step.

    At the end of the forward pass only the loss is referenced, so the allocated activations are the saved tensors.
    """

    def __init__(
        self,
        model: nn.Module,
        call: tuple[Any, dict[str, Any], Any],
        loss: Loss | None,
        optimizer: OptimizerChoice,
        run: Attachment | None = None,
        forward: Callable[..., Any] | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        """
        :param call: arguments of the model and target of the loss, see :func:`split_call`.
        :param run: the plan attached to the model.
        :param forward: called instead of the model, such as the compiled model.
        """
        self.model = model
        #: Listed once: traversing the modules takes as long as launching some kernels.
        self._parameters = list(model.parameters())
        self.args, self.kwargs, self.expected = call
        self.loss = loss
        self.optimizer = make_optimizer(optimizer, model, run)
        self.run = run
        self.forward: Callable[..., Any] = model if forward is None else forward
        self.autocast = autocast
        #: Called with the loss of every step.
        self.on_loss: Callable[[Tensor], None] | None = None
        #: Entered around ``run.step()``, which works on real tensors.
        self.around_run: Callable[[], AbstractContextManager[Any]] = nullcontext
        #: Entered around every step of the optimizer.
        self.around_optimizer: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __call__(self, on_phase: OnPhase) -> None:
        on_phase("start")
        loss = self.loss_of_batch()
        on_phase("forward")
        if self.on_loss is not None:
            self.on_loss(loss.detach())
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
        on_phase("backward")
        if self.optimizer is not None:
            with self.around_optimizer():
                self.optimizer.step()
        if self.run is not None:
            with self.around_run():
                self.run.step()
        self.forget_gradients()
        on_phase("end")

    def loss_of_batch(self) -> Tensor:
        """The forward pass with the loss."""
        with self._autocast():
            output = self.forward(*self.args, **self.kwargs)
            return _mean_square(output) if self.loss is None else call_loss(self.loss, output, self.expected)

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.autocast is None else torch.autocast(self.device.type, self.autocast)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters(), torch.empty(0)).device

    def forget_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    # --- tensors by class ---

    def weights(self) -> list[Tensor]:
        """Parameters that are trained, and buffers."""
        frozen = {id(tensor) for tensor in self.frozen_weights()}
        return [tensor for tensor in (*self.model.parameters(), *self.model.buffers()) if id(tensor) not in frozen]

    def frozen_weights(self) -> list[Tensor]:
        """Parameters that are not trained, or the codes and scales that stand for them."""
        plain = [parameter for parameter in self.model.parameters() if not parameter.requires_grad]
        return [*plain, *(tensor for module in self.model.modules() for tensor in frozen_buffers(module))]

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def optimizer_state(self) -> list[Tensor]:
        states = {} if self.optimizer is None else dict(self.optimizer.state)
        return [tensor for state in states.values() for tensor in tree_leaves(state) if isinstance(tensor, Tensor)]

    def compiles_optimizer(self) -> bool:
        """Whether the optimizer compiles its step, as those with low-bit state do."""
        return self.run is not None and self.run.plan.optimizer_rule is not None and self.optimizer is not None

    def batch(self) -> list[Tensor]:
        leaves = tree_leaves((self.args, self.kwargs, self.expected))
        return [tensor for tensor in leaves if isinstance(tensor, Tensor)]


def _mean_square(output: Any) -> Tensor:
    """A scalar that depends on every output, for models without a loss."""
    floats = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not floats:
        raise MemoryEstimateError("no output of the model depends on its parameters: give a loss.")
    return torch.stack([tensor.float().square().mean() for tensor in floats]).sum()
