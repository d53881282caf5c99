"""The losses of the variants of ``python benchmarks/run.py memory`` on real data, each in a process of its own.

Losses need no idle machine, unlike times; so they are computed during the compilation of the timed variants, and at a
batch of their own, since a thousand steps of every variant at the full batch would take a GPU a quarter of an hour.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.contenders import VARIANTS, Contender, optimizer_for
from bitplan.analysis.targets import move_target
from bitplan.lab.targets import load_target
from bitplan.plans import Plan


@dataclass(frozen=True)
class Trial:
    """Everything that a process needs to create one variant. Equal seeds give all variants of a model equal weights."""

    model: str
    variant: str
    plan: Mapping[str, Any]
    device: str
    batch: int | None
    optimizer: str
    autocast: bool
    seed: int


def load_contender(trial: Trial) -> Contender:
    """The variant, not compiled yet."""
    torch.compiler.reset()
    torch.manual_seed(trial.seed)
    target = move_target(load_target(trial.model), torch.device(trial.device), trial.batch)
    variant = VARIANTS[trial.variant]
    plan = Plan.from_dict(dict(trial.plan))
    return Contender(target, variant, plan, trial.autocast, optimizer_for(trial.optimizer, variant))


def losses_of_trial(trial: Trial, steps: int) -> list[float]:
    """The loss of every step."""
    contender = load_contender(trial)
    contender.first_steps()
    return contender.learn(steps, trial.seed)


@contextmanager
def beside(trials: Sequence[Trial], steps: int, jobs: int) -> Iterator[dict[str, Future[list[float]]]]:
    """Start all trials, `jobs` at a time, in processes that run during the ``with`` block; by variant.

    They are ended if the block fails or is interrupted.
    """
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=_ignore_interrupts, max_tasks_per_child=1) as pool:
        pending = {trial.variant: pool.submit(losses_of_trial, trial, steps) for trial in trials}
        try:
            yield pending
        except BaseException:
            # Not by shutdown(cancel_futures=True): where a process serves one task, it waits forever for tasks that
            # were already submitted and have no process yet. But one process that dies fails all of them.
            while wait(pending.values(), timeout=0.05).not_done:
                for process in set(multiprocessing.active_children()) - others:
                    process.terminate()
            raise


def _ignore_interrupts() -> None:
    """Ignore Ctrl-C, which reaches the whole process group: the parent process handles it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
