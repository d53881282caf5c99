"""What the ways to train of ``python benchmarks/run.py memory`` lose on real data, each in a process of its own.

Losses need no quiet machine, other than times; so they are made beside the compilation of what is timed, and at a batch
of their own, since a thousand steps of every way at the size at which memory matters would take a GPU's quarter hour.
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
from benchmarks.real_data import stream_for
from bitplan.analysis.targets import placed
from bitplan.errors import BitplanError
from bitplan.lab.targets import load_target
from bitplan.plans import Plan


@dataclass(frozen=True)
class Trial:
    """All that a process must know to train one contender."""

    model: str
    variant: str
    plan: Mapping[str, Any]
    device: str
    batch: int | None
    optimizer: str
    autocast: bool
    steps: int
    seed: int


def losses_of_trial(trial: Trial) -> list[float]:
    """The loss of every step. Equal seeds give all contenders of a model the same weights and the same batches."""
    torch.manual_seed(trial.seed)
    target = placed(load_target(trial.model), torch.device(trial.device), trial.batch)
    stream = stream_for(target, trial.seed)
    if stream is None:
        raise BitplanError(f"there is no real data in the shape of {trial.model}'s batch: run with --loss-steps 0.")
    variant = VARIANTS[trial.variant]
    plan = Plan.from_dict(dict(trial.plan))
    contender = Contender(target, variant, plan, trial.autocast, optimizer_for(trial.optimizer, variant))
    contender.first_steps()
    return contender.losses(stream.batch, trial.steps)


@contextmanager
def beside(trials: Sequence[Trial], jobs: int) -> Iterator[dict[str, Future[list[float]]]]:
    """Start all trials, `jobs` at a time, in processes that go on while the block does; by variant.

    A block that fails or is interrupted ends them.
    """
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=_ignore_interrupts, max_tasks_per_child=1) as pool:
        pending = {trial.variant: pool.submit(losses_of_trial, trial) for trial in trials}
        try:
            yield pending
        except BaseException:
            # Not by shutdown(cancel_futures=True): where a process serves one task, it waits forever for tasks that
            # were handed out already and have no process yet. One process that dies, however, fails all of them.
            while wait(pending.values(), timeout=0.05).not_done:
                for process in set(multiprocessing.active_children()) - others:
                    process.terminate()
            raise


def _ignore_interrupts() -> None:
    """Ctrl-C reaches the whole group of processes: the one that was asked decides what it means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
