"""Measurements during training, with an alarm.

Before every N-th step a copy of the model runs that step's passes, and the backward errors of INT8, of E4M3 and of the
plan's formats go into ``measurements.jsonl``. The run itself is unchanged to the bit, and a resumed run writes the same
lines again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from bitplan.analysis.measure.candidate import PLANNED, Candidate
from bitplan.analysis.measure.probe import Probe
from bitplan.analysis.measure.result import Row, average_rows
from bitplan.analysis.measure.watch import Alarm, AlarmMonitor, alarm_from_dict, select_watched
from bitplan.gemm.sampling import Sampling
from bitplan.lab.train.folder import Journal, read_lines
from bitplan.lab.train.session import Session
from bitplan.lab.train.summary import Events
from bitplan.plans.schedules import Position

#: Formats measured for every product, besides those of the plan.
CANDIDATES = (Candidate.of("int8 tensor"), Candidate.of("e4m3 tensor"))
_FIGURES = ("median", "mean", "p99", "sqnr", "underflow", "overflow")
_OPERAND = ("slot", "quantizer", "median", "sqnr", "underflow", "overflow", "kurtosis", "dynamic_range", "amax")


class Monitor:
    """Measures before every `every`-th step."""

    def __init__(self, session: Session, every: int, file: Path, events: Events) -> None:
        self.session = session
        self.every = every
        self.events = events
        self.journal = Journal(file, session.step)
        self.watchman = AlarmMonitor()
        #: The last alarm, and the worst error of the plan's formats (without a plan: of E4M3) in the last measurement.
        self.alarm: Alarm | None = None
        self.worst: float | None = None
        self._last = -1
        for line in read_lines(file):  # those that a stopped run has written
            self._remember(line)

    def before_step(self) -> None:
        """Measure, if this step is due."""
        step = self.session.step
        if step % self.every or step <= self._last:
            return
        plan = self.session.run.plan
        now = plan.at(Position(step, self.session.task.settings.all_steps), fixed=True) if plan.all_rules else None
        probe = Probe(CANDIDATES, Sampling(seed=self.session.task.seed), "live", step, now)
        self.session.look(probe)
        rows = average_rows(probe.rows)
        seen = select_watched(rows)
        alarm = self.watchman.look(step, seen)
        line = {
            "step": step,
            "alarm": None if alarm is None else alarm.to_dict(),
            "watched": [list(figures) for figures in seen],
            "rows": [_compact(row) for row in rows],
        }
        self.journal.add(line)
        self._note(step, rows, alarm)
        self.events.scalars(step, _scalars(rows, alarm))

    def _remember(self, line: Mapping[str, Any]) -> None:
        step = int(line["step"])
        self.watchman.look(step, [(site, float(figure), float(amax)) for site, figure, amax in line["watched"]])
        self._last = step
        if line["alarm"] is not None:
            self.alarm = alarm_from_dict(line["alarm"])

    def _note(self, step: int, rows: Iterable[Row], alarm: Alarm | None) -> None:
        self._last = step
        self.alarm = alarm or self.alarm
        measured = list(rows)
        own = [row.median for row in measured if row.candidate == PLANNED]
        shown = own or [row.median for row in measured if row.candidate == str(CANDIDATES[1])]
        self.worst = max((value for value in shown if math.isfinite(value)), default=None)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.journal.__exit__(kind, error, trace)


def _compact(row: Row) -> dict[str, Any]:
    """A row without the values that are equal in all lines."""
    return {
        "product": row.product,
        "pass": row.pass_,
        "candidate": row.candidate,
        "k": row.k,
        "nonzero": row.nonzero,
        **{name: getattr(row, name) for name in _FIGURES},
        **{side: {name: getattr(getattr(row, side), name) for name in _OPERAND} for side in ("left", "right")},
    }


def _scalars(rows: Iterable[Row], alarm: Alarm | None) -> dict[str, float]:
    """Scalars for TensorBoard: the error of each product, pass and candidate, and whether there was an alarm."""
    errors = {f"backward_error/{row.candidate}/{row.product}/{row.pass_}": row.median for row in rows}
    return {**errors, "alarm": float(alarm is not None)}
