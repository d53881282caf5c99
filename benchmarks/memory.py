"""``python benchmarks/run.py memory``: memory and speed of packed training against variants of BF16 training.

Every variant has a process of its own. All are compiled first, then their memory is measured, then they take turns for
their speed, and last each trains from the same weights on the same real data, to detect a loss of accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.contenders import VARIANTS, Variant, optimizer_for
from benchmarks.curves import final, thinned
from benchmarks.losses import Trial, beside, load_contender
from benchmarks.own_plans import own_plan
from benchmarks.peers import has_torchao
from benchmarks.processes import ContenderError, call_all, contenders, require_all
from benchmarks.real_data import stream_for
from benchmarks.timing import take_turns
from bitplan.analysis.memory.step import Memory
from bitplan.analysis.targets import batch_size, move_target
from bitplan.errors import BitplanError, nearest_names
from bitplan.lab.targets import load_target
from bitplan.lab.train.loop import chosen_device
from bitplan.machine import describe_machine

#: The benchmark's own plans, and the plan of each model; other models use the first.
OWN_PLANS = ("packed", "packed-cnn", "packed-gpt")
_PLAN_OF = {
    "resnet50": "packed-cnn",
    "mobilenet-v2-imagenet": "packed-cnn",
    "gpt-1024": "packed-gpt",
    "gpt-1024-bytes": "packed-gpt",
}


@dataclass(frozen=True)
class Aim:
    """The target of packed training on one H200, for one model and batch."""

    #: The largest peak in bytes.
    peak: int | None = None
    #: The least number of samples per second.
    samples_per_second: float | None = None
    #: The least ratio of compiled BF16's memory to ours, and the least share of its speed.
    times_smaller: float | None = None
    times_as_fast: float | None = None


#: (model, batch) -> the target.
AIMS = {
    ("resnet50", 256): Aim(peak=round(4.5 * 2**30), samples_per_second=6400),
    ("mobilenet-v2-imagenet", 256): Aim(peak=round(2.5 * 2**30), samples_per_second=9400),
    ("gpt-1024", 32): Aim(times_smaller=1.8, times_as_fast=0.95),
    ("gpt-1024-bytes", 32): Aim(times_smaller=1.8, times_as_fast=0.95),
}


@dataclass(frozen=True)
class Row:
    """One variant."""

    variant: str
    #: Whether a bitplan plan is attached.
    ours: bool
    #: Bytes: the peak, the saved tensors, and all classes.
    peak: int
    kept: int
    memory: dict[str, int]
    milliseconds: float
    #: Interquartile range of the turns over their median.
    spread: float
    samples_per_second: float
    #: Seconds of the first steps, compilation included.
    first_seconds: float
    #: Mean loss of the last steps on real data, and its difference from compiled BF16's; None if not trained.
    loss: float | None = None
    loss_gap: float | None = None


def chosen_variants(names: Sequence[str] | None, optimizer: str) -> dict[str, Variant]:
    """The named variants; by default all compiled ones that apply to the model."""
    for name in names or ():
        if name not in VARIANTS:
            raise BitplanError(f"there is no variant {name!r}; {nearest_names(name, VARIANTS)}")
        if VARIANTS[name].small_optimizer and not has_torchao():
            raise BitplanError(f"{name} needs torchao, which is not installed: pip install torchao.")
    if names:
        return {name: VARIANTS[name] for name in dict.fromkeys(names)}
    wants_small = optimizer == "adamw" and has_torchao()
    return {
        name: variant
        for name, variant in VARIANTS.items()
        if variant.compiled and (wants_small or not variant.small_optimizer)
    }


def bench_memory(
    model: str = "resnet20",
    variants: Sequence[str] | None = None,
    plan: str | None = None,
    device: str = "cpu",
    batch: int | None = None,
    optimizer: str | None = None,
    autocast: bool = True,
    turns: int = 5,
    loss_steps: int | None = None,
    loss_batch: int | None = None,
    loss_jobs: int = 0,
    seed: int = 0,
    jobs: int | None = None,
    in_processes: bool = True,
    on_news: Callable[[str], None] = lambda sentence: None,
) -> dict[str, Any]:
    """Measure everything; returns a document with machine, versions, settings and one entry per row.

    :param model: a target, see :func:`bitplan.lab.targets.load_target`.
    :param plan: one of :data:`OWN_PLANS`, a preset or a file; by default the benchmark's plan of the model.
    :param optimizer: ``sgd`` or ``adamw``; by default AdamW if the model reads tokens.
    :param loss_steps: steps on real data; by default 1,000 on a GPU and none on a CPU.
    :param loss_batch: samples per step; by default `batch`.
    :param loss_jobs: further processes that make these steps while variants compile; 0: each variant makes them at the
        end, or one process if their batch is a different one.
    :param jobs: variants that compile at the same time; by default four on a GPU and one on a CPU.
    :param in_processes: every variant has a process of its own.
    """
    where = chosen_device(device)
    target = move_target(load_target(model), torch.device("cpu"), batch)
    stream = stream_for(target, seed)
    reads_tokens = stream is not None and "bytes" in stream.description
    by_name = optimizer or ("adamw" if reads_tokens else "sgd")
    steps = (1000 if where.type == "cuda" else 0) if loss_steps is None else loss_steps
    if steps and stream is None:
        raise BitplanError(f"there is no real data in the shape of {model}'s batch: run with --loss-steps 0.")
    precision = own_plan(plan or _PLAN_OF.get(model, OWN_PLANS[0]))
    samples = batch_size(target.batch)

    chosen = chosen_variants(variants, by_name)
    for variant in chosen.values():
        optimizer_for(by_name, variant)
    apart = loss_jobs or int(loss_batch not in (None, samples))
    trials = {name: Trial(model, name, precision.to_dict(), device, batch, by_name, autocast, seed) for name in chosen}
    learning = [replace(trial, batch=loss_batch or batch) for trial in trials.values()] if steps and apart else []
    rows: list[Row] = []
    failed: dict[str, str] = {}
    curves: dict[str, list[float]] = {}

    def succeeded(name: str, result: Any) -> bool:
        """Note a failure: a variant that fails must not waste the GPU time of the others."""
        if isinstance(result, ContenderError):
            failed[name] = str(result)
            on_news(f"{name} failed: {result}")
        return not isinstance(result, ContenderError)

    def learnt(name: str, losses: list[float]) -> None:
        curves[name] = losses
        on_news(f"{name}: loss {final(losses):.4f} after {steps} steps")

    arguments = {name: (trial,) for name, trial in trials.items()}
    compiling = (4 if where.type == "cuda" else 1) if jobs is None else jobs
    with contenders(load_contender, arguments, in_processes) as started:
        first: dict[str, float] = {}
        with beside(learning, steps, apart or 1) as pending:
            for name, seconds in call_all(started, "first_steps", jobs=compiling):
                if succeeded(name, seconds):
                    first[name] = seconds
                    on_news(f"{name}: ready after {seconds:.1f} s")
            for name, losses in pending.items():
                try:
                    learnt(name, losses.result())
                except Exception as error:
                    succeeded(f"{name}, losses", ContenderError.of(error))
        if not first:
            raise BitplanError(f"no variant could be made: {'; '.join(failed.values())}")
        ready = {name: started[name] for name in first}
        held: dict[str, Memory] = require_all(call_all(ready, "memory"))
        times = take_turns({name: partial(each.call, "seconds_per_step") for name, each in ready.items()}, turns)
        for name, account in held.items():
            time, speed = times[name], samples / times[name].best
            parts = (account.peak, account.activations, account.to_dict())
            rows.append(Row(name, chosen[name].is_ours, *parts, time.best * 1e3, time.spread, speed, first[name]))
            on_news(f"{name}: {account.peak / 2**30:.2f} GiB, {speed:.0f} samples a second")
        if steps and not apart:
            for name, losses in call_all(ready, "learn", steps, seed):
                if succeeded(f"{name}, losses", losses):
                    learnt(name, losses)
    rows = [_with_loss(row, curves) for row in rows]
    return {
        "benchmark": "memory",
        "machine": describe_machine(where),
        "threads": torch.get_num_threads(),
        "processes": "one per row" if in_processes else "one for all rows",
        "device": device,
        "model": model,
        "batch": samples,
        "optimizer": by_name,
        "autocast": "bfloat16" if autocast else None,
        "seed": seed,
        "plan": precision.to_dict(),
        "loss_steps": steps,
        "loss_batch": (loss_batch or samples) if steps else None,
        "loss_data": stream.description if steps and stream is not None else None,
        "rows": [asdict(row) for row in rows],
        "failed": failed,
        "curves": {name: thinned(losses) for name, losses in curves.items()},
        "headline": headline(rows),
        "aim": aim_reached(AIMS.get((model, samples)), rows, where),
    }


def _with_loss(row: Row, curves: dict[str, list[float]]) -> Row:
    if row.variant not in curves:
        return row
    loss = final(curves[row.variant])
    return replace(row, loss=loss, loss_gap=loss - final(curves["bf16"]) if "bf16" in curves else None)


def headline(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Our smallest row against the others: against the smallest in memory, against the fastest in speed."""
    ours = [row for row in rows if row.ours]
    others = [row for row in rows if not row.ours]
    if not ours or not others:
        return None
    own = min(ours, key=lambda row: row.peak)
    smallest = min(others, key=lambda row: row.peak)
    fastest = max(others, key=lambda row: row.samples_per_second)
    return {
        "ours": own.variant,
        "smallest": smallest.variant,
        "times_smaller": smallest.peak / own.peak,
        "times_as_fast_as_smallest": own.samples_per_second / smallest.samples_per_second,
        "fastest": fastest.variant,
        "times_smaller_than_fastest": fastest.peak / own.peak,
        "times_as_fast": own.samples_per_second / fastest.samples_per_second,
    }


def aim_reached(aim: Aim | None, rows: Sequence[Row], device: torch.device) -> dict[str, Any] | None:
    """The target with the rows of ours that reach it; None if there is no target, as on a CPU."""
    by_name = {row.variant: row for row in rows}
    if aim is None or device.type != "cuda":
        return None
    plain = by_name.get("bf16")

    def reaches(row: Row) -> bool:
        checks = [
            aim.peak is None or row.peak <= aim.peak,
            aim.samples_per_second is None or row.samples_per_second >= aim.samples_per_second,
        ]
        if aim.times_smaller is not None and aim.times_as_fast is not None:
            checks.append(plain is not None and plain.peak >= aim.times_smaller * row.peak)
            checks.append(plain is not None and row.samples_per_second >= aim.times_as_fast * plain.samples_per_second)
        return all(checks)

    reached = [row.variant for row in rows if row.ours and reaches(row)]
    return {**{key: value for key, value in asdict(aim).items() if value is not None}, "reached_by": reached}
