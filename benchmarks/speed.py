"""``python benchmarks/run.py speed``: training on low-precision hardware units, against BF16 and torchao.

Some shapes are forward and backward of a model in bfloat16, others a full training step. All variants are created first
and then take turns, so that a machine that gets hot or busy slows all of them; the best turn of each counts. Then each
trains on real text from the same weights, to detect a loss of accuracy.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from benchmarks.curves import thinned
from benchmarks.own_plans import own_plan
from benchmarks.real_data import TextStream
from benchmarks.runners import Bytes, ForwardAndBackward, FullStep, Runner
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
from benchmarks.timing import best_turns
from bitplan.analysis.targets import Target, resize_batch
from bitplan.compiler.tracing import raise_recompile_limit
from bitplan.errors import BitplanError, nearest_names
from bitplan.executions.native import crossover
from bitplan.lab.models.language_models import GPT, LlamaBlocks, next_token_loss, random_states
from bitplan.lab.train.loop import chosen_device
from bitplan.machine import describe_machine

log = logging.getLogger(__name__)
Made = TypeVar("Made")


@dataclass(frozen=True)
class Aim:
    """The target of some row of ours, and its machine."""

    on: str
    milliseconds: float | None = None
    #: The largest peak in bytes.
    peak: int | None = None
    #: Faster, and where memory is measured smaller, than every other row.
    beats_all: bool = False


@dataclass(frozen=True)
class Shape:
    """A model whose training is measured."""

    #: Makes the model and its input; for a full step, its tokens.
    make: Callable[[], tuple[nn.Module, Tensor]]
    #: Whether it is a training step with loss and optimizer, rather than forward and backward.
    full_step: bool = False
    aim: Aim | None = None

    def target(self, device: torch.device, batch: int | None = None) -> Target | None:
        """The shape as a byte-level language model, to be trained on real text; None if it is no model of sequences.

        :param batch: sequences per batch, if not the shape's own.
        """
        model, inputs = self.make()
        if inputs.dim() < 2 or (inputs.dim() == 2 and inputs.is_floating_point()):
            return None
        if inputs.is_floating_point():
            model, inputs = Bytes(model, inputs.shape[-1]), torch.zeros(inputs.shape[:2], dtype=torch.int64)
        tokens = inputs if batch is None else resize_batch(inputs, batch)
        tokens = tokens.to(device)
        return Target(model.to(device), (tokens, tokens.clone()), next_token_loss)


def _gpt(tokens: int, length: int, layers: int, heads: int, features: int, batch: int) -> tuple[nn.Module, Tensor]:
    return GPT(tokens, length, layers, heads, features), torch.randint(tokens, (batch, length))


def _gib(count: float) -> int:
    return round(count * 2**30)


SHAPES: dict[str, Shape] = {
    "linear-1024": Shape(
        lambda: (nn.Linear(1024, 1024, bias=False), torch.randn(1024, 1024)), aim=Aim("2 CPU cores", 26.0)
    ),
    "llama-tiny": Shape(lambda: (LlamaBlocks(256, 2, 512), random_states(2, 128, 256))),
    "llama-4096": Shape(
        lambda: (LlamaBlocks(4096, 4, 14336), random_states(4, 4096, 4096)), aim=Aim("one H200", 104.0, _gib(8.5))
    ),
    "llama-2048": Shape(
        lambda: (LlamaBlocks(2048, 8, 8192), random_states(8, 2048, 2048)), aim=Aim("one H200", 67.0, _gib(7.5))
    ),
    # 1.03e9 parameters, 16,384 tokens per step.
    "gpt-1b": Shape(
        lambda: _gpt(32768, 1024, layers=15, heads=18, features=2304, batch=16),
        full_step=True,
        aim=Aim("one H200", beats_all=True),
    ),
    "gpt-1b-tiny": Shape(lambda: _gpt(256, 16, layers=1, heads=2, features=32, batch=2), full_step=True),
}


@dataclass(frozen=True)
class Row:
    """One variant of one shape."""

    variant: str
    #: Whether a bitplan plan is attached.
    ours: bool
    #: What native execution recomputed in the backward pass.
    recompute: str
    milliseconds: float
    #: Relative to BF16.
    ratio: float
    #: The peak in bytes on a GPU, weights, gradients and optimizer state included; None on a CPU.
    peak: int | None
    #: Products, or passes of them, that were emulated.
    fallbacks: int
    #: Seconds of the first step, compilation included.
    first_seconds: float
    #: On held-out text after training, and its difference from BF16's; None if not trained. Rows of one plan that
    #: differ in recomputation share it: they compute the same.
    loss: float | None = None
    loss_gap: float | None = None


def bench_speed(
    shapes: Sequence[str] = ("linear-1024",),
    plans: Sequence[str] = (),
    device: str = "cpu",
    turns: int = 8,
    seed: int = 0,
    recompute: bool = False,
    fast_accumulation: bool = False,
    loss_steps: int | None = None,
    loss_batch: int = 1,
    switches: bool = True,
    peers: bool = True,
    on_news: Callable[[str], None] = lambda sentence: None,
) -> dict[str, Any]:
    """Measure everything; returns a document with machine, versions, the crossover table and one entry per row.

    :param recompute: also measure every plan with each kind of recomputation.
    :param fast_accumulation: also measure FP8 plans with fast accumulation, in the forward pass and in all passes.
    :param loss_steps: steps on real text; by default 1,000 on a GPU and none on a CPU.
    :param loss_batch: sequences per batch of these steps.
    :param peers: also measure other packages.
    :param switches: also measure changes of formats in the middle of a run.
    """
    where = chosen_device(device)
    steps = (1000 if where.type == "cuda" else 0) if loss_steps is None else loss_steps
    measured: dict[str, Any] = {}
    chosen: dict[str, Sequence[str]] = {}
    for name in shapes:
        if name not in SHAPES:
            raise BitplanError(f"there is no shape {name!r}; {nearest_names(name, SHAPES)}")
        own = OWN_PLANS[:2] if where.type == "cpu" else OWN_PLANS
        chosen[name] = plans or (OWN_FULL_PLANS if SHAPES[name].full_step else own)
    for name in shapes:
        torch.manual_seed(seed)
        variants = variants_of(chosen[name], where, recompute, fast_accumulation, SHAPES[name].full_step)
        raced = [variant for variant in variants if peers or not variant.is_peer]
        made = _Measured(SHAPES[name], chosen[name], raced, where, partial(_prefixed, on_news, name))
        with raise_recompile_limit():  # all variants of a shape share their code
            made.take_turns(turns)
        if steps:
            made.learn(steps, loss_batch, seed)
        measured[name] = made
    used = dict.fromkeys(plan for names in chosen.values() for plan in names)
    aims = {name: reached(SHAPES[name].aim, measured[name].rows, where) for name in shapes}
    return {
        "benchmark": "speed",
        "machine": describe_machine(where),
        "threads": torch.get_num_threads(),
        "device": device,
        "dtype": "bfloat16",
        "full_steps": "weights in float32, BF16 autocast, AdamW",
        "seed": seed,
        "plans": {name: own_plan(name).to_dict() for name in used},
        "aims": {name: aim for name, aim in aims.items() if aim is not None},
        "crossover": [asdict(row) for row in crossover.measure_crossover(where, torch.bfloat16).fastest],
        "rows": {name: [asdict(row) for row in made.rows] for name, made in measured.items()},
        "failed": {name: made.failed for name, made in measured.items() if made.failed},
        "loss_steps": steps,
        "loss_data": TextStream.description if steps else None,
        "losses": {name: made.losses for name, made in measured.items() if made.losses is not None},
        **(measure_switches(where) if switches else {"switches": [], "switching": None}),
    }


def _prefixed(on_news: Callable[[str], None], shape: str, sentence: str) -> None:
    on_news(f"{shape}, {sentence}")


class _Measured:
    """All results of one shape."""

    def __init__(
        self,
        shape: Shape,
        plans: Sequence[str],
        variants: Sequence[SpeedVariant],
        device: torch.device,
        on_news: Callable[[str], None],
    ) -> None:
        self.shape, self.plans, self.variants, self.device, self.on_news = shape, plans, variants, device, on_news
        self.rows: list[Row] = []
        self.failed: dict[str, str] = {}
        self.losses: dict[str, Any] | None = None

    def take_turns(self, turns: int) -> None:
        """Create all variants and measure their time and memory."""
        make = self._maker()
        runners: dict[str, Runner] = {}
        first: dict[str, float] = {}
        torch.compiler.reset()
        for variant in self.variants:

            def make_runner(variant: SpeedVariant = variant) -> Runner:
                runner = make(variant)
                first[variant.name] = runner.seconds(1)
                runner.step()  # delayed scales and the optimizer's state exist from now on
                runner.measure_peak()
                return runner

            runner = self._try(variant, make_runner)
            if runner is not None:
                runners[variant.name] = runner
        best = best_turns({name: runner.seconds for name, runner in runners.items()}, turns)
        for variant in self.variants:
            if variant.name not in runners:
                continue
            runner, seconds = runners[variant.name], best[variant.name]
            count = 0 if runner.run is None else len(runner.run.fallbacks())
            identity = (variant.name, variant.is_ours, variant.recompute)
            times = (seconds * 1e3, seconds / best[PLAIN])
            self.rows.append(Row(*identity, *times, runner.peak, count, first[variant.name]))
            peak = "" if runner.peak is None else f", {runner.peak / 2**30:.2f} GiB"
            self.on_news(f"{variant.name}: {seconds * 1e3:.2f} ms, {seconds / best[PLAIN]:.3f}x{peak}")

    def _maker(self) -> Callable[[SpeedVariant], Runner]:
        if self.shape.full_step:
            target = self.shape.target(self.device)
            assert target is not None
            return partial(FullStep, target)
        model, x = self.shape.make()
        model, x = model.to(self.device, torch.bfloat16), x.to(self.device, torch.bfloat16)
        return partial(ForwardAndBackward, model, x)

    def _try(self, variant: SpeedVariant, make: Callable[[], Made]) -> Made | None:
        """The result of `make`; a variant that fails is reported, and does not waste the GPU time of the others."""
        try:
            return make()
        except Exception as error:
            if variant.name == PLAIN:  # the reference of all others
                raise
            self.failed[variant.name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            log.info("%s failed", variant.name, exc_info=True)
            self.on_news(f"{variant.name} failed: {self.failed[variant.name]}")
            return None

    def learn(self, steps: int, batch: int, seed: int) -> None:
        """Train every variant that has a row, the last plan emulated, and BF16 on text in another order."""
        torch.manual_seed(seed)
        gc.collect()  # frees the timed runners
        target = self.shape.target(self.device, batch)
        if target is None:
            return
        names = {row.variant for row in self.rows}
        last = emulated(self.plans[-1])
        again = SpeedVariant(f"{PLAIN}, other order", unchanged)
        losses: dict[str, float] = {}
        curves: dict[str, list[float]] = {}
        learning = [v for v in self.variants if v.name in names and v.learns_as in ("", v.name)]
        for variant in [*learning, last, again]:

            def train(variant: SpeedVariant = variant) -> tuple[list[float], float]:
                torch.compiler.reset()
                torch.manual_seed(seed)
                return FullStep(target, variant).learn(steps, seed + (variant is again))

            ended = self._try(variant, train)
            if ended is not None:
                curves[variant.name], losses[variant.name] = ended
                self.on_news(f"{variant.name}: loss {ended[1]:.4f} after {steps} steps")
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
