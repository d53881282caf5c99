"""An alarm for training: the first operand whose numbers have become hard to represent, before the loss shows it.

Every operand has a figure of its own, the backward error of its product with this operand alone in INT8 and one scale
for the tensor. Nothing feels a single outlier sooner: it stretches the scale, and everything else falls between two
steps. What matters is how the figure stands against its own past, because operands differ by orders of magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import Tensor, nn

from bitplan.analysis.measure.candidate import Candidate
from bitplan.analysis.measure.figures import OperandFigures
from bitplan.analysis.measure.measure import measure
from bitplan.analysis.measure.result import Measurement, Row
from bitplan.errors import MetricError

#: The candidate that is watched.
WATCHED = "int8 tensor"
#: An operand is bad if its figure is so many times the median of its past, and its largest magnitude, too (where that
#: has not grown, the rest has shrunk, which happens as samples are learned) ...
FACTOR = 8.0
#: ... over the last so many looks, of which there must be at least so many ...
PAST, LEAST_PAST = 16, 2
#: ... and above this: a Gaussian operand has about 0.01.
FLOOR = 0.1


@dataclass(frozen=True)
class Alarm:
    """An operand that has gone bad."""

    #: Steps made when it was seen.
    step: int
    #: As sites are called: ``layer1/linear.0:dgrad.dy``.
    site: str
    #: The figure over what it was before; infinite where it is no number any more.
    times: float
    #: The largest magnitude over what it was before.
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


class Watchman:
    """Remembers every operand's figures, and tells of the first that goes bad."""

    def __init__(self) -> None:
        self._past: dict[str, list[tuple[float, float]]] = {}
        self._bad: set[str] = set()

    def look(self, step: int, seen: Iterable[tuple[str, float, float]]) -> Alarm | None:
        """The first operand that has become bad since the last look.

        :param seen: (site, figure, largest magnitude) in the order in which a step makes them: what went bad first has
            made the others bad.
        """
        alarm: Alarm | None = None
        for site, figure, amax in seen:
            past = self._past.setdefault(site, [])
            usual = median(record[0] for record in past) if past else 0.0
            largest = median(record[1] for record in past) if past else 0.0
            broken = not (math.isfinite(figure) and math.isfinite(amax))
            has_grown = figure > max(FLOOR, FACTOR * usual) and amax > FACTOR * largest
            is_bad = broken or (len(past) >= LEAST_PAST and has_grown)
            if not is_bad:
                self._bad.discard(site)
                past.append((figure, amax))
                del past[:-PAST]
                continue
            if site not in self._bad and alarm is None:
                times = math.inf if broken or not usual else figure / usual
                alarm = Alarm(step, site, times, amax / largest if largest and not broken else math.inf)
            self._bad.add(site)
        return alarm


def watched_figures(rows: Iterable[Row]) -> list[tuple[str, float, float]]:
    """What a watchman looks at, in the order of a step: products forward, then backward from the last."""
    own = [row for row in rows if row.candidate == WATCHED]
    order = {name: number for number, name in enumerate(dict.fromkeys(row.product for row in own))}
    forward = [row for row in own if row.pass_ == "fprop"]
    backward = sorted((row for row in own if row.pass_ != "fprop"), key=lambda row: -order[row.product])
    return [
        (f"{row.product}:{side.slot}", figure_of(row, side), side.amax)
        for row in (*forward, *backward)
        for side in (row.left, row.right)
    ]


def figure_of(row: Row, side: OperandFigures) -> float:
    """The median error with that operand alone quantised, times the root of the sums' length."""
    return side.median * math.sqrt(max(row.nonzero, 1.0))


def alarm_from(content: Mapping[str, Any]) -> Alarm:
    """What :meth:`Alarm.to_dict` gave, after it was JSON."""
    return Alarm(int(content["step"]), str(content["site"]), float(content["times"]), float(content["amax_times"]))


# --- A watch for training loops of your own: figures at a cadence, and the alarm of
# :mod:`bitplan.analysis.measure.watch`


class Watch:
    """Looks at every product of a model before every so many steps, on a copy, so that the training stays as it is.

    >>> import torch
    >>> model = nn.Linear(16, 4)
    >>> watch = Watch(model, every=2)
    >>> for _ in range(6):
    ...     alarm = watch.step(torch.randn(32, 16))  # then forward, backward and the optimizer as ever
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
        """`model`, `loss`, `candidates` and options as :func:`bitplan.measure` takes them."""
        if every < 1:
            raise MetricError(f"every is {every}; it must be at least 1.")
        self.model = model
        self.loss = loss
        self.every = every
        self.candidates = tuple(dict.fromkeys((Candidate.of(WATCHED), *map(Candidate.of, candidates))))
        self.options = options
        #: The last look; None before the first.
        self.measurement: Measurement | None = None
        self.alarms: list[Alarm] = []
        self._steps = 0
        self._watchman = Watchman()

    def step(self, batch: Any) -> Alarm | None:
        """Tell of the step about to be made on `batch`; an alarm if a look was due and something has gone bad."""
        step = self._steps
        self._steps += 1
        if step % self.every:
            return None
        self.measurement = measure(
            self.model, [batch], self.loss, self.candidates, stage="live", step=step, **self.options
        )
        alarm = self._watchman.look(step, watched_figures(self.measurement.rows))
        if alarm is not None:
            self.alarms.append(alarm)
        return alarm
