"""An alarm for training: the first operand whose values have become hard to represent, before the loss shows it.

The watched metric of an operand is the backward error of its product with only this operand in INT8, with a scale per
tensor. It is the most sensitive to a single outlier, which stretches the scale so that all other values are rounded
coarsely. It is compared with the operand's own past, because operands differ by orders of magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import Tensor, nn

from bitplan.analysis.measure.candidate import Candidate
from bitplan.analysis.measure.measure import measure
from bitplan.analysis.measure.pass_metrics import OperandMetrics
from bitplan.analysis.measure.result import Measurement, Row
from bitplan.errors import MetricError

#: The candidate that is watched.
WATCHED = "int8 tensor"
#: An alarm is raised if both the error and the amax of an operand are this many times the median of their past (if only
#: the error has grown, the other values have shrunk, which happens as samples are learned) ...
FACTOR = 8.0
#: ... over this many measurements, with a minimum ...
PAST, MIN_PAST = 16, 2
#: ... and the error is above this: a Gaussian operand has about 0.01.
FLOOR = 0.1


@dataclass(frozen=True)
class Alarm:
    """An operand whose error has grown suddenly."""

    #: Steps before the measurement.
    step: int
    #: Such as ``layer1/linear.0:dgrad.dy``.
    site: str
    #: The error relative to its past; infinite if it is no longer finite.
    times: float
    #: The amax relative to its past.
    amax_times: float

    def __str__(self) -> str:
        if math.isinf(self.times):
            return f"after step {self.step}, {self.site} is no longer finite: look there before the loss follows."
        return (
            f"after step {self.step}, {self.site} has gone bad: its error in INT8 is {self.times:.0f} times what it "
            f"was, its largest magnitude {self.amax_times:.3g} times."
        )

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "sentence": str(self)}


class AlarmMonitor:
    """Keeps the past errors of every operand and raises an alarm for the first that grows."""

    def __init__(self) -> None:
        self._past: dict[str, list[tuple[float, float]]] = {}
        self._bad: set[str] = set()

    def look(self, step: int, measured: Iterable[tuple[str, float, float]]) -> Alarm | None:
        """The first operand that has become bad since the last call.

        :param measured: (site, error, amax) in execution order: the first bad operand has made the others bad.
        """
        alarm: Alarm | None = None
        for site, error, amax in measured:
            past = self._past.setdefault(site, [])
            usual_error = median(record[0] for record in past) if past else 0.0
            usual_amax = median(record[1] for record in past) if past else 0.0
            is_broken = not (math.isfinite(error) and math.isfinite(amax))
            has_grown = error > max(FLOOR, FACTOR * usual_error) and amax > FACTOR * usual_amax
            is_bad = is_broken or (len(past) >= MIN_PAST and has_grown)
            if not is_bad:
                self._bad.discard(site)
                past.append((error, amax))
                del past[:-PAST]
                continue
            if site not in self._bad and alarm is None:
                times = math.inf if is_broken or not usual_error else error / usual_error
                amax_times = amax / usual_amax if usual_amax and not is_broken else math.inf
                alarm = Alarm(step, site, times, amax_times)
            self._bad.add(site)
        return alarm


def select_watched(rows: Iterable[Row]) -> list[tuple[str, float, float]]:
    """The input of :meth:`AlarmMonitor.look`: forward products in execution order, then backward products."""
    watched = [row for row in rows if row.candidate == WATCHED]
    order = {name: number for number, name in enumerate(dict.fromkeys(row.product for row in watched))}
    forward = [row for row in watched if row.pass_ == "fprop"]
    backward = sorted((row for row in watched if row.pass_ != "fprop"), key=lambda row: -order[row.product])
    return [
        (f"{row.product}:{side.slot}", error_level(row, side), side.amax)
        for row in (*forward, *backward)
        for side in (row.left, row.right)
    ]


def error_level(row: Row, side: OperandMetrics) -> float:
    """The median error with only this operand quantised, times the square root of the reduction length."""
    return side.median * math.sqrt(max(row.nonzero, 1.0))


def alarm_from_dict(content: Mapping[str, Any]) -> Alarm:
    """The inverse of :meth:`Alarm.to_dict`."""
    return Alarm(int(content["step"]), str(content["site"]), float(content["times"]), float(content["amax_times"]))


class Watch:
    """Measures every product of a model at regular steps, on a copy, for a training loop of your own.

    >>> import torch
    >>> model = nn.Linear(16, 4)
    >>> watch = Watch(model, every=2)
    >>> for _ in range(6):
    ...     alarm = watch.step(torch.randn(32, 16))  # then forward, backward and optimizer step
    >>> alarm, watch.measurement.rows[0].step
    (None, 4)
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor] | None = None,
        every: int = 100,
        candidates: Iterable[str | Candidate] = ("e4m3 tensor",),
        **options: Any,
    ) -> None:
        """`model`, `loss`, `candidates` and options are those of :func:`bitplan.measure`."""
        if every < 1:
            raise MetricError(f"every is {every}; it must be at least 1.")
        self.model = model
        self.loss = loss
        self.every = every
        self.candidates = tuple(dict.fromkeys((Candidate.of(WATCHED), *map(Candidate.of, candidates))))
        self.options = options
        #: The last measurement; None before the first.
        self.measurement: Measurement | None = None
        self.alarms: list[Alarm] = []
        self._steps = 0
        self._monitor = AlarmMonitor()

    def step(self, batch: Any) -> Alarm | None:
        """Call before each training step on `batch`; returns an alarm if a measurement was due and found one."""
        step = self._steps
        self._steps += 1
        if step % self.every:
            return None
        self.measurement = measure(
            self.model, [batch], self.loss, self.candidates, stage="live", step=step, **self.options
        )
        alarm = self._monitor.look(step, select_watched(self.measurement.rows))
        if alarm is not None:
            self.alarms.append(alarm)
        return alarm
