"""``python benchmarks/run.py fit``: a full training step of Llama 3 8B within 80 GB of one GPU.

All parameters are trained by AdamW. Every way to do so has a process of its own with the same limit of memory and of
time; one that fails is a row with its reason. The weights are random, and every step trains on the same random tokens,
so the loss falls.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from benchmarks.timing import wait_for
from bitplan.analysis.memory.fakes import storage_bytes
from bitplan.errors import BitplanError, nearest_names
from bitplan.integrations.causal_lm import compute_loss_in_chunks
from bitplan.lab.train.loop import chosen_device
from bitplan.machine import describe_machine
from bitplan.plans import Plan
from bitplan.runtime.attach import Attachment, attach
from bitplan.runtime.bf16_adamw import CHUNK, BF16AdamW
from bitplan.runtime.step_in_backward import StepInBackward

#: Bytes that a process may take from the GPU, those of them that it should leave, and tokens a second to be reached.
LIMIT = 80_000_000_000
SPARE = 2_000_000_000
TOKENS_PER_SECOND = 8_000
_RATE, _BETAS, _DECAY = 1e-4, (0.9, 0.95), 0.1
_OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class FitShape:
    """Sizes of a Llama, and of its batch."""

    layers: int
    width: int
    mlp: int
    heads: int
    kv_heads: int
    vocabulary: int
    tokens: int


SHAPES: Mapping[str, FitShape] = {
    "llama-3-8b": FitShape(32, 4096, 14336, 32, 8, 128256, 8192),
    "tiny": FitShape(2, 64, 128, 4, 2, 512, 64),
}


@dataclass(frozen=True)
class Way:
    """A way to train all parameters."""

    #: What is trained in which dtype, for the results.
    weights: str
    moments: str
    #: Sequences in a batch, if nothing else is asked for.
    batch: int = 1
    #: A plan is attached, gradients are consumed in the backward pass, and the loss is computed in chunks.
    plan: Mapping[str, Any] | None = None
    #: What BF16AdamW does with weights; None: the optimizer is the plan's, from torchao, which rounds stochastically.
    rounding: Any = None
    #: Float32 weights, and autocast.
    autocast: bool = False
    checkpointing: bool = False


#: FP8 products and saved tensors; all products run natively, so none is timed first.
_PLAN = {
    "version": 1,
    "extends": "fp8-train",
    "execution": {"kind": "native", "min_macs": 0, "recompute": "inputs", "fast_accumulation": True},
}
_FLOAT32 = "float32: bfloat16 weights, and 16 more bits of each in the optimizer's state"
_STOCHASTIC = "bfloat16, rounded stochastically"
_NEAREST = "bfloat16, rounded to nearest: loses small updates"
WAYS: Mapping[str, Way] = {
    "fp8": Way(_FLOAT32, "e4m3", plan=_PLAN, rounding="float32"),
    "fp8-stochastic": Way(_STOCHASTIC, "e4m3", batch=2, plan=_PLAN, rounding="stochastic"),
    "fp8-torchao": Way(_STOCHASTIC, "e4m3", batch=2, plan={**_PLAN, "optimizer": {"state": "e4m3"}}),
    "bf16": Way(_NEAREST, "bfloat16"),
    "bf16-checkpointed": Way(_NEAREST, "bfloat16", checkpointing=True),
    "bf16-autocast": Way("float32", "float32", autocast=True),
}


@dataclass
class Measured:
    """What is known of a way, so far."""

    #: What was going on when this was known.
    phase: str = "process started"
    #: Parameters, and the bytes of weights and optimizer state after the last step.
    parameters: int = 0
    weights: int = 0
    optimizer: int = 0
    #: The most bytes of gradients that were alive in the backward pass of the first step, and after it.
    gradients: int = 0
    gradients_after: int = 0
    #: Products, or passes of them, that were emulated.
    fallbacks: int = 0
    optimizer_note: str | None = None
    #: Seconds from the start of the process to the end of the first step, compilation included.
    seconds_to_first_step: float | None = None
    step_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    #: The most bytes on the GPU since the start: in tensors, and taken from the device.
    allocated: int | None = None
    reserved: int | None = None
    #: The most in tensors in a step after the first.
    allocated_later: int | None = None
    #: Bytes in use on the whole GPU after the last step: with CUDA's own, and with those of other processes.
    device_used: int | None = None

    def tokens_per_second(self, tokens: int) -> float | None:
        """By the median of the steps after the second: delayed scales are new in the first two."""
        later = self.step_seconds[2:] or self.step_seconds[1:]
        return tokens / median(later) if later else None


class Training:
    """A model and its optimizer, trained in one way."""

    def __init__(
        self,
        way: Way,
        shape: FitShape,
        device: torch.device,
        batch: int,
        compiled: bool,
        measured: Measured,
        note: Callable[[str], None],
    ) -> None:
        self.way, self.device, self.measured = way, device, measured
        self._reach = partial(self._note, note)
        torch.manual_seed(0)
        self.model = make_model(shape, device, torch.float32 if way.autocast else torch.bfloat16)
        parameters = list(self.model.parameters())
        self.measured.parameters = sum(parameter.numel() for parameter in parameters)
        self.measured.weights = storage_bytes(parameters)
        ids = torch.randint(shape.vocabulary, (batch, shape.tokens), device=device)
        self.batch = {"input_ids": ids, "labels": ids}
        self._reach("model made")
        self._handles = [p.register_post_accumulate_grad_hook(self._count) for p in parameters]  # type: ignore[no-untyped-call]
        self.run: Attachment | None = None
        self.optimizer: Any
        if way.plan is None:
            self._prepare_plain(compiled)
        else:
            self._prepare_planned(Plan.from_dict(way.plan), compiled)

    def _prepare_plain(self, compiled: bool) -> None:
        if self.way.checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        on_gpu = self.device.type == "cuda"
        self.optimizer = AdamW(
            self.model.parameters(), lr=_RATE, betas=_BETAS, weight_decay=_DECAY, fused=True if on_gpu else None
        )
        if compiled:
            for layer in self.model.model.layers:  # type: ignore[union-attr]
                layer.compile()

    def _prepare_planned(self, plan: Plan, compiled: bool) -> None:
        compute_loss_in_chunks(self.model, self.batch)
        self._reach("loss in chunks checked")
        self.run = attach(self.model, plan, example=self.batch)
        self.measured.fallbacks = len(self.run.fallbacks())
        self._reach(f"plan attached, {self.measured.fallbacks} fallbacks")
        compiled_step = compiled and self.way.rounding is not None and self._can_compile_optimizer()
        self.optimizer = StepInBackward(self.model, lambda p: self._adamw(p, compiled_step), self.run)
        if compiled:
            self.run.compile(regional=True)
        self._reach("optimizers made")

    def _adamw(self, parameter: nn.Parameter, compiled: bool) -> Optimizer:
        settings: Any = {"lr": _RATE, "betas": _BETAS, "weight_decay": _DECAY}
        if self.way.rounding is not None:
            return BF16AdamW([parameter], weights=self.way.rounding, compiled=compiled, **settings)
        from torchao.optim import AdamWFp8

        made: Optimizer = AdamWFp8([parameter], bf16_stochastic_round=True, **settings)
        return made

    def _can_compile_optimizer(self) -> bool:
        """Compile the optimizer's step, in this thread rather than in autograd's."""
        # As many values as are updated at once, and some more: kernels are chosen by the first size.
        largest = max(parameter.numel() for parameter in self.model.parameters())
        weight = nn.Parameter(torch.zeros(min(largest, CHUNK + 4096), dtype=torch.bfloat16, device=self.device))
        weight.grad = torch.ones_like(weight)
        try:
            self._adamw(weight, True).step()
        except Exception as error:
            self.measured.optimizer_note = f"not compiled: {_reason(error)}"
            return False
        finally:
            self._reach("optimizer's step compiled")
        return True

    def _count(self, parameter: Tensor) -> None:
        """Count the gradients that are alive, before this one is used."""
        alive = sum(p.grad.nbytes for p in self.model.parameters() if p.grad is not None)
        self.measured.gradients = max(self.measured.gradients, alive)

    def step(self) -> None:
        """A training step, and its loss."""
        begin = time.perf_counter()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.way.autocast):
            loss = self.model(**self.batch, use_cache=False).loss
        self.measured.phase = f"backward pass of step {len(self.measured.losses) + 1}"
        loss.backward()
        for handle in self._handles:  # the first backward pass is over
            handle.remove()
        self._handles = []
        self.measured.phase = f"optimizer's step {len(self.measured.losses) + 1}"
        self.optimizer.step()
        if self.run is None:
            self.measured.gradients_after = storage_bytes(p.grad for p in self.model.parameters() if p.grad is not None)
        self.optimizer.zero_grad(set_to_none=True)
        wait_for(self.device)
        self.measured.step_seconds.append(time.perf_counter() - begin)
        self.measured.losses.append(loss.item())

    def state_bytes(self) -> int:
        """The bytes of the optimizer's state."""
        optimizers = (
            self.optimizer.optimizers.values() if isinstance(self.optimizer, StepInBackward) else [self.optimizer]
        )
        values = (value for optimizer in optimizers for state in optimizer.state.values() for value in state.values())
        return storage_bytes(value for value in values if isinstance(value, Tensor) and value.dim())

    def _note(self, note: Callable[[str], None], phase: str) -> None:
        self.measured.phase = phase
        note_memory(self.measured, self.device)
        note(phase)


def make_model(shape: FitShape, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """transformers' Llama with random weights, made on the device in its dtype."""
    transformers: Any = import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=max(shape.tokens, 64),
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with default_dtype(dtype), torch.device(device):
        model: nn.Module = transformers.LlamaForCausalLM(config)
    return model.train()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New floating-point tensors have this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def note_memory(measured: Measured, device: torch.device) -> None:
    """Write the peaks since the start into the results."""
    if device.type != "cuda":
        return
    allocated = torch.cuda.max_memory_allocated(device)
    measured.allocated = max(measured.allocated or 0, allocated)
    measured.reserved = max(measured.reserved or 0, torch.cuda.max_memory_reserved(device))
    free, total = torch.cuda.mem_get_info(device)
    measured.device_used = total - free


def measure(
    way: str,
    send: Callable[[str, Any], None],
    shape: FitShape,
    device: str,
    batch: int,
    steps: int,
    limit: int | None,
    compiled: bool,
) -> None:
    """Train in one way, and send every piece of news and all that is measured so far."""
    where, begin = chosen_device(device), time.perf_counter()
    if where.type == "cuda" and limit is not None:
        total = torch.cuda.get_device_properties(where).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), where.index or 0)
    measured = Measured()

    def note(sentence: str) -> None:
        taken = "" if where.type != "cuda" else f", {torch.cuda.memory_allocated(where) / 1e9:.1f} GB"
        send("news", f"{time.perf_counter() - begin:.0f} s: {sentence}{taken}")

    try:
        training = Training(WAYS[way], shape, where, batch, compiled, measured, note)
        for number in range(steps):
            measured.phase = f"forward pass of step {number + 1}"
            training.step()
            note_memory(measured, where)
            measured.phase = f"step {number + 1} done"
            if not number:
                measured.seconds_to_first_step = time.perf_counter() - begin
                measured.optimizer = training.state_bytes()
                if where.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(where)
            elif where.type == "cuda":
                measured.allocated_later = torch.cuda.max_memory_allocated(where)
            note(f"step {number + 1}: {measured.step_seconds[-1]:.2f} s, loss {measured.losses[-1]:.4f}")
            send("measured", measured)
    except Exception as error:
        note_memory(measured, where)
        send("measured", measured)
        send("failed", f"{_reason(error)} ({measured.phase})")
    else:
        send("done", None)


def _reason(error: Exception) -> str:
    """In one line, what went wrong."""
    if isinstance(error, torch.OutOfMemoryError):
        return _OUT_OF_MEMORY
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


@dataclass(frozen=True)
class Outcome:
    """The row of a way: what was measured, and why it failed, if it did."""

    way: str
    measured: Measured
    failed: str | None

    def to_dict(self, tokens: int, limit: int | None) -> dict[str, Any]:
        measured = self.measured
        way = WAYS[self.way]
        fits = None if limit is None else self.failed is None
        spare = None if measured.reserved is None or limit is None else limit - measured.reserved
        speed = measured.tokens_per_second(tokens)
        aim = None
        if limit is not None:
            aim = self.failed is None and spare is not None and spare >= SPARE and (speed or 0.0) >= TOKENS_PER_SECOND
        return {
            "way": self.way,
            "weights_trained_in": way.weights,
            "moments": way.moments,
            "plan": None if way.plan is None else dict(way.plan),
            "batch_tokens": tokens,
            "fits": fits,
            "failed": self.failed,
            "spare": spare,
            "tokens_per_second": speed,
            "aim_reached": aim,
            **asdict(measured),
        }


def _serve(connection: Connection, way: str, *arguments: Any) -> None:
    measure(way, lambda kind, value: connection.send((kind, value)), *arguments)


@contextmanager
def _allocator_settings() -> Iterator[None]:
    """Segments that grow, for processes that start inside: little memory is taken from the GPU and not used."""
    name = "PYTORCH_ALLOC_CONF"
    if name in os.environ:
        yield
        return
    os.environ[name] = "expandable_segments:True"
    try:
        yield
    finally:
        del os.environ[name]


def measure_in_process(
    way: str, arguments: Sequence[Any], seconds: float, on_news: Callable[[str], None], target: Any = _serve
) -> Outcome:
    """Measure a way in a process of its own, which is ended after so many seconds."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, way, *arguments), daemon=True)
    with _allocator_settings():
        process.start()
    theirs.close()
    end = time.monotonic() + seconds
    measured, last = Measured(), "process started"
    failed: str | None = None
    try:
        while True:
            if not ours.poll(max(0.0, end - time.monotonic())):
                failed = f"ended after {seconds:g} s; last: {last}"
                break
            kind, value = ours.recv()
            if kind == "news":
                last = value
                on_news(f"{way}, {value}")
            elif kind == "measured":
                measured = value
            else:
                failed = value
                break
    except (EOFError, OSError):
        process.join(timeout=5)
        failed = f"its process ended with exit code {process.exitcode}; last: {last}"
    finally:
        process.terminate()
        process.join(timeout=10)
        if process.is_alive():
            process.kill()
            process.join()
        ours.close()
    return Outcome(way, measured, failed)


def bench_fit(
    ways: Sequence[str] = (),
    shape: str = "llama-3-8b",
    device: str = "cpu",
    batch: int | None = None,
    layers: int | None = None,
    tokens: int | None = None,
    steps: int = 8,
    limit: int = LIMIT,
    seconds: float = 240.0,
    compiled: bool = True,
    on_news: Callable[[str], None] = lambda sentence: None,
    on_row: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """Train in each of these ways (default: all); returns a document with a row for each.

    :param batch: sequences in a batch, if not each way's own number.
    :param layers: layers, if not the shape's own number.
    :param tokens: tokens of a sequence, if not the shape's own number.
    :param limit: bytes that a process may take from a GPU. A CPU has no limit.
    :param seconds: after which a way is ended.
    :param on_row: is given the document after every way.
    """
    for name in ways:
        if name not in WAYS:
            raise BitplanError(f"there is no way {name!r}; {nearest_names(name, WAYS)}")
    if shape not in SHAPES:
        raise BitplanError(f"there is no shape {shape!r}; {nearest_names(shape, SHAPES)}")
    where = chosen_device(device)
    sizes = asdict(SHAPES[shape])
    sizes |= {key: value for key, value in (("layers", layers), ("tokens", tokens)) if value is not None}
    own_limit = limit if where.type == "cuda" else None
    rows: list[dict[str, Any]] = []
    document = {
        "benchmark": "fit",
        "machine": describe_machine(where),
        "device": device,
        "shape": {"name": shape, **sizes},
        "limit": own_limit,
        "aim": {"spare": SPARE, "tokens_per_second": TOKENS_PER_SECOND},
        "rows": rows,
    }
    for name in ways or WAYS:
        sequences = WAYS[name].batch if batch is None else batch
        arguments = (FitShape(**sizes), device, sequences, steps, own_limit, compiled)
        outcome = measure_in_process(name, arguments, seconds, on_news)
        rows.append(outcome.to_dict(sequences * sizes["tokens"], own_limit))
        if outcome.failed is not None:
            on_news(f"{name} failed: {outcome.failed}")
        on_row(document)
    return document
