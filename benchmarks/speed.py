"""``python benchmarks/run.py speed``: training on low-precision hardware units, against BF16, torch and torchao.

Some shapes are forward and backward of a model in bfloat16, others a full training step. Every row has a process of
its own. The rows of all shapes are compiled first; those of one shape then take turns, so that a machine that gets hot
or busy slows all of them; the best turn of each counts. Then each trains on real text from the same weights, to detect
a loss of accuracy.
"""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from benchmarks.attention import SelfAttention
from benchmarks.curves import thinned
from benchmarks.experts import Experts
from benchmarks.foreign_models import MODELS
from benchmarks.own_plans import AUTO, found_plans, own_plan
from benchmarks.processes import ContenderError, ContenderHandle, call_all, contenders
from benchmarks.real_data import TextStream
from benchmarks.runners import Bytes, ForeignStep, ForwardAndBackward, FullStep, Runner
from benchmarks.speed_variants import (
    OWN_FULL_PLANS,
    OWN_PLANS,
    PLAIN,
    SpeedVariant,
    emulated,
    unchanged,
    variants_of,
)
from benchmarks.switching import measure_switches
from benchmarks.timing import seconds_per_step, take_turns
from bitplan.analysis.targets import Target, resize_batch
from bitplan.errors import BitplanError, nearest_names
from bitplan.executions.native import crossover
from bitplan.lab.models.language_models import GPT, LlamaBlocks, next_token_loss, random_states
from bitplan.lab.train.loop import chosen_device
from bitplan.machine import describe_machine
from bitplan.planners.auto.trials import compiling_backward_early

T = TypeVar("T")


@dataclass(frozen=True)
class Aim:
    """The target of some row of ours, and its machine."""

    on: str
    milliseconds: float | None = None
    #: The largest peak in bytes.
    peak: int | None = None
    #: Faster, and where memory is measured smaller, than every other row.
    beats_all: bool = False


class Shape(ABC):
    """A model whose training is measured."""

    #: Whether it is a training step with loss and optimizer, rather than forward and backward.
    full_step: bool = False
    aim: Aim | None = None
    #: Its products are those of experts.
    is_grouped: bool = False
    #: The plans that are measured by default, where these are not those of its kind.
    plans: tuple[str, ...] = ()

    @abstractmethod
    def runner(self, device: torch.device, variant: SpeedVariant) -> Runner:
        """Make the model in one variant."""

    def text_target(self, device: torch.device, batch: int | None = None) -> Target | None:
        """The shape as a byte-level language model, to be trained on real text; None if it is no model of sequences.

        :param batch: sequences per batch, if not the shape's own.
        """
        return None


@dataclass(frozen=True)
class OwnShape(Shape):
    """A model of bitplan's own."""

    #: Makes the model and its input; for a full step, its tokens.
    make: Callable[[], tuple[nn.Module, Tensor]]
    full_step: bool = False
    aim: Aim | None = None
    is_grouped: bool = False
    plans: tuple[str, ...] = ()

    def runner(self, device: torch.device, variant: SpeedVariant) -> Runner:
        if self.full_step:
            target = self.text_target(device)
            assert target is not None
            return FullStep(target, variant)
        model, x = self.make()
        return ForwardAndBackward(model.to(device, torch.bfloat16), x.to(device, torch.bfloat16), variant)

    def text_target(self, device: torch.device, batch: int | None = None) -> Target | None:
        model, inputs = self.make()
        if inputs.dim() < 2 or (inputs.dim() == 2 and inputs.is_floating_point()):
            return None
        if inputs.is_floating_point():
            model, inputs = Bytes(model, inputs.shape[-1]), torch.zeros(inputs.shape[:2], dtype=torch.int64)
        tokens = inputs if batch is None else resize_batch(inputs, batch)
        tokens = tokens.to(device)
        return Target(model.to(device), (tokens, tokens.clone()), next_token_loss)


@dataclass(frozen=True)
class ForeignShape(Shape):
    """A model of another library, in BF16, with its own loss. Its losses are compared by ``benchmarks/auto.py``."""

    load: Callable[[], Target]

    def runner(self, device: torch.device, variant: SpeedVariant) -> Runner:
        return ForeignStep(self.load(), variant)


def _gpt(tokens: int, length: int, layers: int, heads: int, features: int, batch: int) -> tuple[nn.Module, Tensor]:
    return GPT(tokens, length, layers, heads, features), torch.randint(tokens, (batch, length))


def _gib(count: float) -> int:
    return round(count * 2**30)


#: Plans for grouped products: a scale for each tensor, or for each row.
EXPERT_PLANS = ("native-fp8-experts", "native-fp8-experts-rowwise")
#: Presets for Llama-like blocks, and what searches find for such models.
LLAMA_PLANS = ("fp8-train", "fp8-train-small", "native-fp8-kept", "deepseek-v3")
SHAPES: Mapping[str, Shape] = {
    "linear-1024": OwnShape(
        lambda: (nn.Linear(1024, 1024, bias=False), torch.randn(1024, 1024)), aim=Aim("2 CPU cores", 26.0)
    ),
    "llama-tiny": OwnShape(lambda: (LlamaBlocks(256, 2, 512), random_states(2, 128, 256))),
    "llama-4096": OwnShape(
        lambda: (LlamaBlocks(4096, 4, 14336), random_states(4, 4096, 4096)),
        aim=Aim("one H200", 95.0, _gib(7)),
        plans=LLAMA_PLANS,
    ),
    "llama-2048": OwnShape(
        lambda: (LlamaBlocks(2048, 8, 8192), random_states(8, 2048, 2048)),
        aim=Aim("one H200", 60.0, _gib(6.5)),
        plans=LLAMA_PLANS,
    ),
    # One layer: 32 heads of 128.
    "attention": OwnShape(lambda: (SelfAttention(32), torch.randn(4, 4096, 4096)), plans=("fp8-attention",)),
    "attention-tiny": OwnShape(lambda: (SelfAttention(2), torch.randn(2, 64, 128)), plans=("fp8-attention",)),
    "experts": OwnShape(
        lambda: (Experts(8, 2048, 7168, 16384), torch.randn(16384, 2048)),
        is_grouped=True,
        plans=EXPERT_PLANS,
    ),
    "experts-tiny": OwnShape(
        lambda: (Experts(4, 64, 128, 320), torch.randn(320, 64)), is_grouped=True, plans=EXPERT_PLANS
    ),
    # 1.03e9 parameters, 16,384 tokens per step.
    "gpt-1b": OwnShape(
        lambda: _gpt(32768, 1024, layers=15, heads=18, features=2304, batch=16),
        full_step=True,
        aim=Aim("one H200", beats_all=True),
    ),
    "gpt-1b-tiny": OwnShape(lambda: _gpt(256, 16, layers=1, heads=2, features=32, batch=2), full_step=True),
    **{name: ForeignShape(load) for name, load in MODELS.items()},
}
#: Presets for the models of other libraries.
FOREIGN_PLANS = ("fp8-train", "fp8-train-small")


@dataclass(frozen=True)
class Row:
    """One variant of one shape."""

    variant: str
    #: Whether a bitplan plan is attached.
    ours: bool
    #: What native execution recomputed in the backward pass.
    recompute: str
    milliseconds: float
    #: Interquartile range of the turns over their median.
    spread: float
    #: Relative to BF16.
    ratio: float
    #: The peak in bytes on a GPU, weights, gradients and optimizer state included; None on a CPU.
    peak: int | None
    #: Products, or passes of them, that were emulated.
    fallbacks: int
    #: Graphs that torch.compile made: more than those of a whole model mean graph breaks.
    graphs: int
    #: Seconds of the first step, compilation included; other rows may have compiled meanwhile.
    first_seconds: float
    #: On held-out text after training, and its difference from BF16's; None if not trained. Rows of one plan that
    #: differ in recomputation share it: they compute the same.
    loss: float | None = None
    loss_gap: float | None = None


@dataclass(frozen=True)
class FirstStep:
    """What is known of a variant after its first step."""

    seconds: float
    peak: int | None
    fallbacks: int
    graphs: int


class SpeedContender:
    """One variant of one shape. Equal seeds give all variants of a shape the same weights."""

    def __init__(self, shape: str, variant: SpeedVariant, device: str, seed: int) -> None:
        self.shape, self.variant, self.seed = SHAPES[shape], variant, seed
        self.device = chosen_device(device)
        self._runner: Runner | None = None

    def first_step(self) -> FirstStep:
        """Compile, and measure the peak."""
        torch.compiler.reset()
        counters.clear()
        torch.manual_seed(self.seed)
        with self.variant.compile_options(), compiling_backward_early():
            runner = self._runner = self.shape.runner(self.device, self.variant)
            first = _with_room(partial(seconds_per_step, runner.step, 1, self.device))
            _with_room(runner.step)  # delayed scales and the optimizer's state exist from now on
            _with_room(runner.measure_peak)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # others compile and measure on the same GPU
        fallbacks = 0 if runner.run is None else len(runner.run.fallbacks())
        return FirstStep(first, runner.peak, fallbacks, counters["stats"]["unique_graphs"])

    def seconds(self, steps: int) -> float:
        assert self._runner is not None
        return self._runner.seconds(steps)

    def learn(self, steps: int, batch: int, data_seed: int) -> tuple[list[float], float]:
        """The losses of a number of steps on real text, and the loss on held-out text."""
        self._runner = None
        gc.collect()
        torch.compiler.reset()
        torch.manual_seed(self.seed)
        target = self.shape.text_target(self.device, batch)
        assert target is not None
        with self.variant.compile_options():
            return FullStep(target, self.variant).learn(steps, data_seed)


def _with_room(make: Callable[[], T]) -> T:
    """Make a step; where other rows have taken the GPU's memory for theirs, try again when they are done."""
    for seconds in (2, 5, 10, 20):
        try:
            return make()
        except torch.OutOfMemoryError:
            pass  # leaving the block frees what the traceback held
        gc.collect()
        torch.cuda.empty_cache()
        time.sleep(seconds)
    return make()


def bench_speed(
    shapes: Sequence[str] = ("linear-1024",),
    plans: Sequence[str] = (),
    device: str = "cpu",
    turns: int = 8,
    seed: int = 0,
    recompute: bool = False,
    fast_accumulation: bool = False,
    regional: bool = False,
    loss_steps: int | None = None,
    loss_batch: int = 1,
    switches: bool = True,
    sizes: bool = True,
    peers: bool = True,
    only_peers: Sequence[str] = (),
    jobs: int | None = None,
    in_processes: bool = True,
    on_news: Callable[[str], None] = lambda sentence: None,
) -> dict[str, Any]:
    """Measure everything; returns a document with machine, versions, the crossover table and one entry per row.

    :param recompute: also measure every plan with each kind of recomputation.
    :param regional: also measure every plan with equal blocks compiled once.
    :param fast_accumulation: also measure FP8 plans with fast accumulation, in the forward pass and in all passes.
    :param loss_steps: steps on real text; by default 1,000 on a GPU and none on a CPU; none for models of
        other libraries.
    :param loss_batch: sequences per batch of these steps.
    :param plans: names, or ``auto`` for those that searches have found for each shape.
    :param peers: also measure what torch itself and other packages offer.
    :param only_peers: of these only those whose name contains one of these texts.
    :param switches: also measure changes of formats in the middle of a run.
    :param sizes: also measure from which size on products pay on low-precision units.
    :param jobs: rows that compile at the same time; by default four on a GPU and one on a CPU.
    :param in_processes: every row has a process of its own.
    """
    where = chosen_device(device)
    steps = (1000 if where.type == "cuda" else 0) if loss_steps is None else loss_steps
    measured: dict[str, _Measured] = {}
    chosen: dict[str, Sequence[str]] = {}
    for name in shapes:
        if name not in SHAPES:
            raise BitplanError(f"there is no shape {name!r}; {nearest_names(name, SHAPES)}")
        wanted = plans or _plans_of(name, where)
        chosen[name] = [plan for wish in wanted for plan in (found_plans(name) if wish == AUTO else [wish])]
    jobs = (4 if where.type == "cuda" else 1) if jobs is None else jobs
    for name in chosen:
        variants = variants_of(chosen[name], where, SHAPES[name], recompute, fast_accumulation, regional)
        raced = [v for v in variants if not v.is_peer or (peers and _is_named(v, only_peers))]
        news = partial(_prefixed, on_news, name)
        measured[name] = _Measured(name, device, seed, chosen[name], raced, in_processes, news)
    _race(measured, turns, jobs)
    for name, made in measured.items():
        if steps and name not in MODELS:
            made.learn(steps, loss_batch)
    used = dict.fromkeys(plan for names in chosen.values() for plan in names)
    aims = {name: reached(SHAPES[name].aim, measured[name].rows, where) for name in shapes}
    return {
        "benchmark": "speed",
        "machine": describe_machine(where),
        "threads": torch.get_num_threads(),
        "device": device,
        "dtype": "bfloat16",
        "full_steps": "weights in float32, BF16 autocast, AdamW",
        "processes": "one per row" if in_processes else "one for all rows",
        "seed": seed,
        "plans": {name: own_plan(name).to_dict() for name in used},
        "aims": {name: aim for name, aim in aims.items() if aim is not None},
        # Plans of models of other libraries say themselves what is native.
        "crossover": [asdict(row) for row in crossover.measure_crossover(where, torch.bfloat16).fastest]
        if sizes and not set(shapes) <= set(MODELS)
        else [],
        "rows": {name: [asdict(row) for row in made.rows] for name, made in measured.items()},
        "failed": {name: made.failed for name, made in measured.items() if made.failed},
        "loss_steps": steps,
        "loss_data": TextStream.description if steps else None,
        "losses": {name: made.losses for name, made in measured.items() if made.losses is not None},
        **(measure_switches(where) if switches else {"switches": [], "switching": None}),
    }


def _is_named(variant: SpeedVariant, texts: Sequence[str]) -> bool:
    return not texts or any(text in variant.name for text in texts)


def _plans_of(shape: str, device: torch.device) -> Sequence[str]:
    if shape in MODELS:
        return FOREIGN_PLANS
    if SHAPES[shape].plans:
        return SHAPES[shape].plans
    if SHAPES[shape].full_step:
        return OWN_FULL_PLANS
    return OWN_PLANS[:2] if device.type == "cpu" else OWN_PLANS


def _prefixed(on_news: Callable[[str], None], shape: str, sentence: str) -> None:
    on_news(f"{shape}, {sentence}")


def _race(measured: Mapping[str, _Measured], turns: int, jobs: int) -> None:
    """Compile the variants of all shapes, then let those of one shape after the other take turns.

    Nothing compiles while times are taken, which would slow some rows and not others.
    """
    with ExitStack() as stack:
        started = {name: stack.enter_context(made.contenders(made.variants)) for name, made in measured.items()}
        every = {(name, variant): handle for name, own in started.items() for variant, handle in own.items()}
        first: dict[str, dict[str, Any]] = {name: {} for name in measured}
        for (name, variant), step in call_all(every, "first_step", jobs=jobs):
            first[name][variant] = step
        for name, made in measured.items():
            made.take_turns(started[name], first[name], turns)
    if not any(made.rows for made in measured.values()):
        raise ContenderError(next(iter(made.failed[PLAIN] for made in measured.values())))


class _Measured:
    """All results of one shape."""

    def __init__(
        self,
        shape: str,
        device: str,
        seed: int,
        plans: Sequence[str],
        variants: Sequence[SpeedVariant],
        in_processes: bool,
        on_news: Callable[[str], None],
    ) -> None:
        self.shape, self.device, self.seed = shape, device, seed
        self.plans, self.variants, self.in_processes, self.on_news = plans, variants, in_processes, on_news
        self.rows: list[Row] = []
        self.failed: dict[str, str] = {}
        self.losses: dict[str, Any] | None = None

    def contenders(self, variants: Sequence[SpeedVariant]) -> AbstractContextManager[dict[str, ContenderHandle]]:
        arguments = {variant.name: (self.shape, variant, self.device, self.seed) for variant in variants}
        return contenders(SpeedContender, arguments, self.in_processes)

    def take_turns(
        self, started: Mapping[str, ContenderHandle], first: Mapping[str, FirstStep | ContenderError], turns: int
    ) -> None:
        """Time all variants that have made their first step."""
        made = {
            name: step
            for name, step in first.items()
            if not self._has_failed(name, step) and isinstance(step, FirstStep)
        }
        if PLAIN not in made:  # the reference of all others
            return
        times = take_turns({name: partial(started[name].call, "seconds") for name in made}, turns)
        for variant in self.variants:
            if variant.name not in made:
                continue
            known, time = made[variant.name], times[variant.name]
            ratio = time.best / times[PLAIN].best
            self.rows.append(
                Row(
                    *(variant.name, variant.is_ours, variant.recompute, time.best * 1e3, time.spread, ratio),
                    *(known.peak, known.fallbacks, known.graphs, known.seconds),
                )
            )
            peak = "" if known.peak is None else f", {known.peak / 2**30:.2f} GiB"
            self.on_news(f"{variant.name}: {time.best * 1e3:.2f} ms, {ratio:.3f}x{peak}, first {known.seconds:.0f} s")

    def _has_failed(self, name: str, result: Any) -> bool:
        """Note a failure: a variant that fails does not waste the GPU time of the others."""
        if not isinstance(result, ContenderError):
            return False
        self.failed[name] = str(result)
        self.on_news(f"{name} failed: {result}")
        return True

    def learn(self, steps: int, batch: int) -> None:
        """Train every variant that has a row, the last plan emulated, and BF16 on text in another order."""
        target = SHAPES[self.shape].text_target(torch.device("cpu"), batch)
        if target is None:
            return
        names = {row.variant for row in self.rows}
        last = emulated(self.plans[-1])
        again = SpeedVariant(f"{PLAIN}, other order", unchanged)
        learning = [v for v in self.variants if v.name in names and v.learns_as in ("", v.name)]
        losses: dict[str, float] = {}
        curves: dict[str, list[float]] = {}
        for variant in [*learning, last, again]:
            with self.contenders([variant]) as started:
                results = dict(call_all(started, "learn", steps, batch, self.seed + (variant is again)))
            if not self._has_failed(variant.name, results[variant.name]):
                curves[variant.name], losses[variant.name] = results[variant.name]
                self.on_news(f"{variant.name}: loss {losses[variant.name]:.4f} after {steps} steps")
        gap = partial(_gap, losses, PLAIN)
        learnt_by = {variant.name: variant.learns_as or variant.name for variant in self.variants}
        by_row = [learnt_by[row.variant] for row in self.rows]
        self.rows = [
            replace(row, loss=losses.get(name), loss_gap=gap(name)) for row, name in zip(self.rows, by_row, strict=True)
        ]
        native, spread = _gap(losses, last.name, self.plans[-1]), gap(again.name)
        self.losses = {
            "batch": [batch, int(target.batch[0].shape[1])],
            "loss": losses,
            "curves": {name: thinned(curve) for name, curve in curves.items()},
            #: The change of BF16's loss with another order of the same text.
            "spread": None if spread is None else abs(spread),
            "native_less_emulated": native,
            "native_agrees": native is not None and spread is not None and abs(native) <= abs(spread),
        }


def _gap(losses: dict[str, float], other: str, name: str) -> float | None:
    return losses[name] - losses[other] if name in losses and other in losses else None


def reached(aim: Aim | None, rows: Sequence[Row], device: torch.device) -> dict[str, Any] | None:
    """The target with the rows of ours that reach it; None for another kind of machine."""
    if aim is None:
        return None
    limits = {key: value for key, value in asdict(aim).items() if value is not None}
    if device.type != ("cpu" if "CPU" in aim.on else "cuda"):
        return {**limits, "reached_by": None}
    others = [row for row in rows if not row.ours]

    def reaches(row: Row) -> bool:
        is_fast = aim.milliseconds is None or row.milliseconds <= aim.milliseconds
        is_small = aim.peak is None or (row.peak is not None and row.peak <= aim.peak)
        beats = all(row.milliseconds < other.milliseconds and _is_smaller(row, other) for other in others)
        return is_fast and is_small and (beats or not aim.beats_all)

    return {**limits, "reached_by": [row.variant for row in rows if row.ours and reaches(row)]}


def _is_smaller(row: Row, other: Row) -> bool:
    return row.peak is None or other.peak is None or row.peak < other.peak
