"""A watch for training loops of your own: figures at a cadence, and the alarm of :mod:`bitplan.measure.alarm`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from bitplan.errors import MetricError
from bitplan.measure.alarm import WATCHED, Alarm, Watchman, watched_figures
from bitplan.measure.candidate import Candidate
from bitplan.measure.measure import measure
from bitplan.measure.result import Measurement


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
