"""The runners of ``python benchmarks/run.py speed``: a model in one variant, compiled."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from benchmarks.contenders import WithLoss, with_own_code
from benchmarks.curves import Call, losses_of, mean_loss
from benchmarks.real_data import TextStream
from benchmarks.speed_variants import SpeedVariant
from benchmarks.timing import seconds_per_turn, wait_for
from bitplan.analysis.memory.fakes import storage_bytes
from bitplan.analysis.memory.step import TrainingStep, split_call
from bitplan.analysis.targets import Target
from bitplan.capture.recording import split_batch
from bitplan.runtime.attach import Attachment

#: Evaluation batches of a trained model, and the bytes at the end of the text that are held out for them.
_JUDGED_BY = 16
_HELD_OUT = 150_000
_RATE = 3e-4


class Runner(ABC):
    """A runner makes steps, whose time and memory are measured."""

    run: Attachment | None
    device: torch.device
    #: The peak in bytes on a GPU, of this runner alone; None on a CPU, or before it is measured.
    peak: int | None = None

    @abstractmethod
    def step(self) -> None: ...

    @abstractmethod
    def holds(self) -> Iterable[Tensor]:
        """The tensors that it holds between two steps."""

    def seconds(self, steps: int) -> float:
        return seconds_per_turn(self.step, steps, self.device)

    def measure_peak(self) -> None:
        """Measure the peak of a step above the memory before it, plus what this runner holds; others do not count."""
        if self.device.type != "cuda":
            return
        gc.collect()
        wait_for(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.step()
        wait_for(self.device)
        taken = torch.cuda.max_memory_allocated(self.device) - before
        self.peak = taken + storage_bytes(tensor for tensor in self.holds() if tensor.device.type == "cuda")


class ForwardAndBackward(Runner):
    """A model in bfloat16 with random inputs and output gradients; it does not learn."""

    def __init__(self, model: nn.Module, x: Tensor, variant: SpeedVariant) -> None:
        self.device = x.device
        self.model = model
        self.x = x.detach().clone().requires_grad_()
        self.dy = torch.randn_like(x[..., :1]).expand_as(x).contiguous()
        self.run = variant.change(self.model, self.x)
        self.called = torch.compile(self.model) if self.run is None else self.run.compile(regional=variant.regional)

    def step(self) -> None:
        self.called(self.x).backward(self.dy)
        self.x.grad = None
        self.model.zero_grad(set_to_none=True)
        if self.run is not None:
            self.run.step()

    def holds(self) -> Iterable[Tensor]:
        return [*self.model.parameters(), *self.model.buffers(), self.x, self.dy]


class ForeignStep(Runner):
    """Forward and backward pass of a model of another library, with its own loss."""

    def __init__(self, target: Target, variant: SpeedVariant) -> None:
        self.run = variant.change(target.model, split_batch(target.batch, target.loss)[0])
        called = torch.compile(target.model)
        if self.run is not None:
            called = self.run.compile(fullgraph=variant.regional, regional=variant.regional)
        loss = target.loss if target.loss is None or self.run is None else self.run.loss(target.loss)
        call = split_call(target.batch, target.loss)
        self.training = TrainingStep(target.model, call, loss, None, self.run, called)
        self.device = self.training.device

    def step(self) -> None:
        self.training(lambda phase: None)

    def holds(self) -> Iterable[Tensor]:
        return [*self.training.weights(), *self.training.batch()]


class FullStep(Runner):
    """A full training step of a model of tokens: weights in float32, BF16 autocast, AdamW.

    That is how BF16 training is usually done: weights with 8 bits of precision would lose the updates of a small
    learning rate. All variants have the same weights and the same autocast.
    """

    def __init__(self, target: Target, variant: SpeedVariant) -> None:
        model = target.model
        tokens, expected = target.batch
        self.device = tokens.device
        # The plan, or the peer, is applied to the layers between embedding and head if these are not part of the shape.
        body, states = (model.body, model.embedding(tokens)) if isinstance(model, Bytes) else (model, tokens)
        self.run = variant.change(body, states.detach())
        self.module: nn.Module = with_own_code(WithLoss)(model, target.loss)
        called = torch.compile(self.module)
        if self.run is not None:
            called = self.run.compile(self.module, regional=variant.regional)
        call: tuple[Any, dict[str, Any], Any] = ((expected, tokens), {}, None)
        optimizer = small_adamw if variant.small_optimizer else adamw
        self.training = TrainingStep(self.module, call, _itself, optimizer, self.run, called, autocast=torch.bfloat16)

    def step(self) -> None:
        self.training(lambda phase: None)

    def holds(self) -> Iterable[Tensor]:
        return [*self.training.weights(), *self.training.optimizer_state(), *self.training.batch()]

    def learn(self, steps: int, seed: int) -> tuple[list[float], float]:
        """The losses of a number of steps on real text, and the loss on held-out text."""
        learnt, judged = texts(self.training.args[1], seed)
        curve = losses_of(self.training, _calls(learnt), steps)
        return curve, mean_loss(self.training, _calls(judged), _JUDGED_BY)


def texts(tokens: Tensor, seed: int) -> tuple[TextStream, TextStream]:
    """Training text in the shape of these tokens, in an order that depends on the seed, and evaluation text."""
    return TextStream(tokens, seed, slice(-_HELD_OUT)), TextStream(tokens, 0, slice(-_HELD_OUT, None))


def _calls(stream: TextStream) -> Callable[[int], Call]:
    def call_at(number: int) -> Call:
        tokens, following = stream.batch(number)
        return (following, tokens), {}

    return call_at


def adamw(model: nn.Module) -> Optimizer:
    """torch's AdamW, in one kernel on a GPU."""
    on_gpu = next(model.parameters()).is_cuda
    return AdamW(model.parameters(), lr=_RATE, fused=True if on_gpu else None)


def small_adamw(model: nn.Module) -> Optimizer:
    """torchao's AdamW with 8-bit state. It compiles its step, one call per parameter."""
    from torchao.optim import AdamW8bit

    made: Optimizer = AdamW8bit(model.parameters(), lr=_RATE)
    return made


class Bytes(nn.Module):
    """A byte-level language model around blocks of any width: plans do not cover embedding and head."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.body = body
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.body(self.embedding(tokens))))
        return logits


def _itself(loss: Tensor) -> Tensor:
    return loss
