"""The scalars of a run as one flat dictionary, and the loggers that take them.

:func:`run_scalars` computes what :meth:`bitplan.Attachment.scalars` returns. :func:`scalar_writer` finds out how a
logger is called: TensorBoard's ``add_scalar``, ``log_metrics`` of MLflow and of Lightning's loggers, ``log`` of Weights
& Biases and of Accelerate, or any function of a dictionary and a step. None of these packages is imported.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bitplan.errors import PlanError
from bitplan.runtime.clock import ScheduleClock
from bitplan.runtime.cost_tracker import CostTracker
from bitplan.runtime.run_tables import RunTables
from bitplan.runtime.statistics import latest_amax, statistics

#: All names begin with this, so that they do not collide with those of a trainer.
PREFIX = "bitplan/"

ScalarWriter = Callable[[Mapping[str, float], int], None]


@dataclass(frozen=True)
class ScalarSink:
    """A logger, and how often it is written to."""

    write: ScalarWriter
    every: int

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise PlanError(f"every is {self.every!r}: give the number of steps between two logs, at least 1.")


class StepTimer:
    """The mean time between steps. A clock is read after each step; the device is not waited for."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._seconds = 0.0
        self._steps = 0

    def count_step(self) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self._seconds += now - self._last
            self._steps += 1
        self._last = now

    def seconds_per_step(self) -> float | None:
        """Of the steps since the last call; None where there were none."""
        mean = self._seconds / self._steps if self._steps else None
        self._seconds, self._steps = 0.0, 0
        return mean


def scalar_writer(logger: Any) -> ScalarWriter:
    """The function that writes scalars to `logger`, by the methods that it has."""
    if isinstance(logger, logging.Logger):
        pass
    elif callable(getattr(logger, "add_scalar", None)):  # TensorBoard's SummaryWriter

        def add_each(scalars: Mapping[str, float], step: int) -> None:
            for name, value in scalars.items():
                logger.add_scalar(name, value, step)

        return add_each
    elif callable(getattr(logger, "log_metrics", None)):  # MLflow, Lightning's loggers
        return lambda scalars, step: logger.log_metrics(dict(scalars), step=step)
    elif callable(getattr(logger, "log", None)):  # Weights & Biases, Accelerate
        return lambda scalars, step: logger.log(dict(scalars), step=step)
    elif callable(logger):
        return lambda scalars, step: logger(dict(scalars), step)
    raise PlanError(
        f"a {type(logger).__name__} takes no scalars: give an object with log(dict, step=), log_metrics(dict, step=) "
        f"or add_scalar(name, value, step), or a function of a dictionary and a step."
    )


def run_scalars(
    step: int, tables: RunTables, costs: CostTracker, clock: ScheduleClock, seconds_per_step: float | None
) -> dict[str, float]:
    """The scalars of a run after `step` steps."""
    scalars: dict[str, float] = {"step": float(step)}
    if costs.knows_operations():
        scalars |= cost_scalars(costs)
    scalars |= {f"bits/{name}": float(clock.bits_of(schedule)) for name, schedule in clock.plan.followed.items()}
    scalars |= record_scalars(tables)
    if seconds_per_step is not None:
        scalars["seconds_per_step"] = seconds_per_step
    return {PREFIX + name: value for name, value in scalars.items()}


def cost_scalars(costs: CostTracker) -> dict[str, float]:
    """Bits of the last step, and bit operations of all steps so far."""
    last, total = costs.last_step_cost(), costs.cost()
    return {
        "bits": math.sqrt(last.bit_operations / last.training_macs) if last.training_macs else 0.0,
        "mean_bits": last.mean_bits,
        "gbitops": total.gbitops if costs.has_steps else 0.0,
        "cost": total.relative,
    }


def record_scalars(tables: RunTables) -> dict[str, float]:
    """What the records of all tensors say, read at once."""
    scalars: dict[str, float] = {}
    found = tables.records()
    rows = torch.cat([record for _, record in found]).tolist() if found else []
    if tables.promotes:
        scalars["promotions"] = float(len(tables.promotions()))
    watched = [seen for seen in map(statistics, rows) if seen.steps] if tables.watched.rounding else []
    for name in ("overflow", "underflow", "error"):
        values = [getattr(seen, name) for seen in watched]
        if values:
            scalars |= {name: sum(values) / len(values), f"{name}_max": max(values)}
    amaxes = [seen.amax for seen in watched] or ([latest_amax(row) for row in rows] if tables.delays else [])
    amaxes = [amax for amax in amaxes if amax > 0]
    if amaxes:
        scalars |= {"amax_min": min(amaxes), "amax_max": max(amaxes)}
    return scalars
