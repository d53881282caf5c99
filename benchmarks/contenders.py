"""The training variants that ``python benchmarks/run.py memory`` compares.

Model and loss are one module, compiled as a whole, so that no variant must save the logits in full precision because
the loss is outside its graph. Each variant's module has code of its own: ``torch.compile`` caches by code, and two
variants that differ only in its settings would run the same graph.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from benchmarks.curves import losses_of
from benchmarks.real_data import stream_for
from benchmarks.timing import seconds_per_step, seconds_per_turn
from bitplan.analysis.memory.measure import measure_step
from bitplan.analysis.memory.step import Memory, TrainingStep
from bitplan.analysis.targets import Target
from bitplan.capture.recording import call_arguments, call_loss, split_batch
from bitplan.errors import BitplanError
from bitplan.plans import Plan
from bitplan.runtime.attach import Attachment, attach


@dataclass(frozen=True)
class Variant:
    """One training variant."""

    compiled: bool = True
    #: Every block is recomputed in the backward pass.
    checkpointed: bool = False
    #: torch's partitioner recomputes as much as it can.
    aggressive: bool = False
    #: Packed execution of the plan; otherwise no plan.
    packed: bool = False
    #: torchao's AdamW with 8-bit state.
    small_optimizer: bool = False

    @property
    def is_ours(self) -> bool:
        return self.packed


VARIANTS: dict[str, Variant] = {
    "bf16": Variant(),
    "bf16-checkpointed": Variant(checkpointed=True),
    "bf16-aggressive": Variant(aggressive=True),
    "bf16-adamw8bit": Variant(small_optimizer=True),
    "packed": Variant(packed=True),
    "packed-adamw8bit": Variant(packed=True, small_optimizer=True),
    "bf16-eager": Variant(compiled=False),
    "packed-eager": Variant(compiled=False, packed=True),
}


def optimizer_for(name: str, variant: Variant) -> Callable[[nn.Module], Optimizer]:
    """The optimizer of a variant."""
    if variant.small_optimizer:
        if name != "adamw":
            raise BitplanError("torchao's 8-bit optimizer is an AdamW: run with --optimizer adamw.")
        from torchao.optim import AdamW8bit

        return lambda model: AdamW8bit(model.parameters(), lr=3e-4)
    if name == "adamw":
        return lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4)
    if name == "sgd":
        return lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    raise BitplanError(f"there is no optimizer {name!r} here: use sgd or adamw.")


class WithLoss(nn.Module):
    """A model and its loss as one module."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor] | None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, expected: Any, *args: Any, **kwargs: Any) -> Tensor:
        output = self.model(*args, **kwargs)
        if self.loss is None:
            return output.float().square().mean()  # type: ignore[no-any-return]
        loss: Tensor = call_loss(self.loss, output, expected)
        return loss


def with_own_code(plain: type[nn.Module]) -> type[nn.Module]:
    """A subclass with the same behaviour and code of its own."""
    forward: Any = plain.forward
    own = FunctionType(forward.__code__.replace(), forward.__globals__, "forward", None, forward.__closure__)
    return type(plain.__name__, (plain,), {"forward": own})


class Checkpointed(nn.Module):
    """A block that saves only its inputs and is recomputed in the backward pass."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False)


def checkpoint_blocks(model: nn.Module) -> int:
    """Checkpoint every block of every sequence of blocks; returns their number."""
    count = 0
    sequences = [module for module in model.modules() if isinstance(module, (nn.Sequential, nn.ModuleList))]
    for sequence in sequences:
        for name, block in list(sequence.named_children()):
            if any(True for _ in block.children()):  # a single layer is not a block
                setattr(sequence, name, Checkpointed(block))
                count += 1
    return count


class Contender:
    """A copy of the model with its optimizer, in one variant."""

    def __init__(
        self, target: Target, variant: Variant, plan: Plan, autocast: bool, optimizer: Callable[[nn.Module], Optimizer]
    ) -> None:
        self.variant = variant
        self._target = target
        model = copy.deepcopy(target.model)
        if variant.checkpointed and not checkpoint_blocks(model):
            raise BitplanError("the model has no blocks to checkpoint.")
        self.module: nn.Module = with_own_code(WithLoss)(model, target.loss)
        self.device = next(model.parameters()).device
        self._loss = target.loss
        self._first_weights = {name: tensor.detach().clone() for name, tensor in self.module.state_dict().items()}
        self.run: Attachment | None = None
        if variant.packed:
            inputs, _ = split_batch(target.batch, target.loss)
            self.run = attach(model, plan, example=inputs, execution="packed")
        forward: Callable[..., Any] | None = None
        if variant.compiled:
            forward = torch.compile(self.module, fullgraph=True) if self.run is None else self.run.compile(self.module)
        self.step = TrainingStep(
            *(self.module, (*self._call(target.batch), None), _itself, optimizer, self.run, forward),
            autocast=torch.bfloat16 if autocast else None,
        )

    def _call(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        inputs, expected = split_batch(batch, self._loss)
        args, kwargs = call_arguments(inputs)
        return (expected, *args), kwargs

    def first_steps(self, count: int = 2) -> float:
        """Make the steps that compile; returns their seconds."""
        settings: AbstractContextManager[Any] = (
            functorch_config.patch(aggressive_recomputation=True) if self.variant.aggressive else nullcontext()
        )
        with settings:
            return count * seconds_per_step(self._make_step, count, self.device)

    def seconds_per_step(self, steps: int) -> float:
        """Wall time per step over a number of steps."""
        return seconds_per_turn(self._make_step, steps, self.device)

    def _make_step(self) -> None:
        self.step(lambda phase: None)

    def memory(self) -> Memory:
        """The memory of two steps."""
        return measure_step(self.step, 2, warm_up=False)

    def learn(self, steps: int, seed: int) -> list[float]:
        """The loss of every step on real data in the shape of the batch."""
        stream = stream_for(self._target, seed)
        if stream is None:
            raise BitplanError("there is no real data in the shape of this model's batch: run with --loss-steps 0.")
        return self.losses(stream.batch, steps)

    def losses(self, batch_of: Callable[[int], Any], steps: int) -> list[float]:
        """The loss of every step, from the initial weights on; see :func:`losses_of`."""
        self.module.load_state_dict(self._first_weights)
        assert self.step.optimizer is not None
        self.step.optimizer.state.clear()
        return losses_of(self.step, lambda number: self._call(batch_of(number)), steps)


def _itself(loss: Tensor) -> Tensor:
    return loss
