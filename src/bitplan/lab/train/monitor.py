"""Looking at a run while it goes on: figures of every product at a cadence, and an alarm.

Before every so many steps a copy of the model makes that very step's passes, and what it sees goes into
``measurements.jsonl``: the backward errors of INT8 and E4M3 and of the plan's own formats. The run's numbers stay what
they are, to the bit. What is written is a pure function of the run, too, so that a resumed run writes the same again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from bitplan.analysis.measure.candidate import PLANNED, Candidate
from bitplan.analysis.measure.probe import Probe
from bitplan.analysis.measure.result import Row, averaged
from bitplan.analysis.measure.watch import Alarm, Watchman, alarm_from, watched_figures
from bitplan.gemm.sampling import Sampling
from bitplan.lab.train.folder import Journal, read_lines
from bitplan.lab.train.session import Session
from bitplan.lab.train.summary import Events
from bitplan.plans.schedules import Position

#: What every product is tried in; the plan's own formats come on top.
CANDIDATES = (Candidate.of("int8 tensor"), Candidate.of("e4m3 tensor"))
_FIGURES = ("median", "mean", "p99", "sqnr", "underflow", "overflow")
_OPERAND = ("slot", "quantizer", "median", "sqnr", "underflow", "overflow", "kurtosis", "dynamic_range", "amax")


class Monitor:
    """Looks before every `every`-th step."""

    def __init__(self, session: Session, every: int, file: Path, events: Events) -> None:
        self.session = session
        self.every = every
        self.events = events
        self.journal = Journal(file, session.step)
        self.watchman = Watchman()
        #: The last alarm, and the worst error of the run's own formats (or E4M3's) at the last look.
        self.alarm: Alarm | None = None
        self.worst: float | None = None
        self._last = -1
        for line in read_lines(file):  # of a run that was stopped, with all that it had seen
            self._remember(line)

    def before_step(self) -> None:
        """Look, if it is time to."""
        step = self.session.step
        if step % self.every or step <= self._last:
            return
        plan = self.session.run.plan
        now = plan.at(Position(step, self.session.task.settings.all_steps), fixed=True) if plan.all_rules else None
        probe = Probe(CANDIDATES, Sampling(seed=self.session.task.seed), "live", step, now)
        self.session.look(probe)
        rows = averaged(probe.rows)
        seen = watched_figures(rows)
        alarm = self.watchman.look(step, seen)
        line = {
            "step": step,
            "alarm": None if alarm is None else alarm.to_dict(),
            "watched": [list(each) for each in seen],
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
            self.alarm = alarm_from(line["alarm"])

    def _note(self, step: int, rows: Iterable[Row], alarm: Alarm | None) -> None:
        self._last = step
        self.alarm = alarm or self.alarm
        known = list(rows)
        own = [row.median for row in known if row.candidate == PLANNED]
        shown = own or [row.median for row in known if row.candidate == str(CANDIDATES[1])]
        self.worst = max((value for value in shown if math.isfinite(value)), default=None)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.journal.__exit__(kind, error, trace)


def _compact(row: Row) -> dict[str, Any]:
    """A row without what every line would repeat."""
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
    """What TensorBoard shows: an error for each product, pass and candidate, and whether there was an alarm."""
    found = {f"backward_error/{row.candidate}/{row.product}/{row.pass_}": row.median for row in rows}
    return {**found, "alarm": float(alarm is not None)}
