"""The training loop: trains a task under a plan in a run folder, with checkpoints, and resumes runs.

``metrics.jsonl`` and the checkpoints depend only on the task, its settings, the plan and the seed, so that a run that
was killed and resumed ends with the same bytes as an uninterrupted one.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from bitplan.analysis.cost import Cost
from bitplan.analysis.targets import parse_file_name
from bitplan.errors import BitplanWarning, RunError
from bitplan.executions.native.paths import NativeTerms
from bitplan.lab.tasks.task import Task
from bitplan.lab.train.checkpoint import Checkpoint, newest_whole, remove_older, save_tensors
from bitplan.lab.train.config import LOG_EVERY, RunConfig, config_of, program, resolve_execution
from bitplan.lab.train.fault import find_fault
from bitplan.lab.train.folder import DiskError, Journal, RunFolder, is_number, make_folder, read_lines
from bitplan.lab.train.monitor import Monitor
from bitplan.lab.train.processes import SINGLE, Processes
from bitplan.lab.train.session import Session, repeatable
from bitplan.lab.train.summary import (
    Events,
    Phase,
    Progress,
    PromotionRecord,
    Status,
    Summary,
    bits_since,
    cost_figures,
    cost_sums,
    measured_sites,
    open_events,
    planned_sites,
    share_of_run,
)
from bitplan.plans import Plan
from bitplan.plans.loading import find_plan

# --- Signals: the first requests a stop, the second has its usual effect

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether a signal has arrived; ``train(stop=...)`` calls it after every step."""

    def __init__(self) -> None:
        #: The number of the signal; None before one arrives.
        self.signal: int | None = None

    def __call__(self) -> bool:
        return self.signal is not None


@contextmanager
def stop_on_signals(repeated: bool = False) -> Iterator[StopRequest]:
    """Within this context the first Ctrl-C and the first SIGTERM only set a flag.

    :param repeated: later ones, too: torchrun sends its processes the signal that they have from the terminal already.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield request
        return
    before: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        request.signal = number
        if not repeated:
            signal.signal(number, before[number])

    for number in _SIGNALS:
        before[number] = signal.getsignal(number)
        signal.signal(number, note)
    try:
        yield request
    finally:
        for number in _SIGNALS:
            signal.signal(number, before[number])


log = logging.getLogger("bitplan")

#: Attributes of the loop that checkpoints hold, under these names.
_OWN_STATE = ("loss", "metrics", "best", "told", "bits", "cost")

OnProgress = Callable[[Progress], None]


def train(
    task: Task,
    plan: Plan | str | None = None,
    *,
    folder: str | os.PathLike[str],
    execution: str | None = None,
    device: str | torch.device = "cpu",
    compile: bool = False,
    seed: int | None = None,
    checkpoint_every: int | None = None,
    log_every: int = LOG_EVERY,
    measure_every: int = 0,
    task_source: str | None = None,
    plan_source: str | None = None,
    on_progress: OnProgress | None = None,
    stop: Callable[[], bool] | None = None,
    processes: Processes = SINGLE,
) -> Summary:
    """Train `task` under `plan` in `folder`, or resume that run where the folder holds it unfinished.

    A run that has finished or diverged is not repeated: its summary is returned.

    :param plan: a plan, a preset's name or a file; None: no plan, which is the task in its own precision.
    :param folder: the run folder; created if it does not exist.
    :param execution: ``"emulate"``, ``"packed"`` or ``"native"``; by default the plan's ``execution:``, else emulation.
    :param compile: compile training steps with ``torch.compile``; evaluations stay uncompiled, unless the task compiles
        them.
    :param seed: must equal the task's seed, which decides initial weights, data and random bits.
    :param checkpoint_every: steps between checkpoints, by default those between evaluations; 0: only at the end.
    :param log_every: steps between lines of ``metrics.jsonl``.
    :param measure_every: steps between measurements of every product, with an alarm; 0: none.
    :param task_source: the task on the command line, if not its name (``my_task.py:MyTask``).
    :param plan_source: the same for the plan; by default `plan` itself, or the file it was read from.
    :param on_progress: called after every step.
    :param stop: called after every step; once it returns true, a checkpoint is written and the run is *stopped*.
    :param processes: those that train together, as of :func:`~bitplan.lab.train.processes.joined_processes`: all of
        them call this function with equal arguments, and the first one writes the folder.
    """
    if seed is not None and seed != task.seed:
        raise RunError(f"the task was made with seed {task.seed}: make it with seed {seed}.")
    if checkpoint_every is not None and checkpoint_every < 0:
        raise RunError(f"checkpoint_every is {checkpoint_every}; it must be at least 0 (only at the end).")
    if processes.count > 1 and (compile or measure_every):
        option = "--compile" if compile else "--measure-every"
        raise RunError(f"{option} works in one process only: drop it, or do not split the run.")
    resolved = None if plan is None else find_plan(plan)
    if plan_source is None:
        plan_source = plan if isinstance(plan, str) else str(resolved.origin) if resolved and resolved.origin else None
    chosen = chosen_device(device)
    config = config_of(
        *(task, resolved, plan_source, task_source),
        execution=execution,
        device=chosen,
        compile=compile,
        log_every=log_every,
        measure_every=measure_every,
        sharding=processes.sharding,
    )
    with (
        processes.losses_reported(lambda: resume_command(Path(folder), config.task_source, processes.count)),
        processes.run_folder(folder) as place,
        place.locked(),
    ):
        is_known = processes.share(lambda: place.require_room_for(config, resolved))
        summary = processes.share(lambda: place.summary() if is_known else None)
        if summary is not None and summary.status != "stopped":
            return summary
        recorded = processes.share(lambda: place.config() if is_known else config)
        if config.task_sha256 is not None and recorded.task_sha256 is None:
            warnings.warn(
                f"{place} has no SHA-256 of its task's file, so {config.task_source} cannot be compared with the file "
                f"that the run was started with; it is resumed with that file because you named it.",
                BitplanWarning,
                stacklevel=2,
            )
        with repeatable(chosen):
            options = resolve_execution(resolved, execution)
            crossover = None if recorded.crossover is None else NativeTerms.from_crossover_record(recorded.crossover)
            session = Session(
                *(task, resolved or Plan()),
                execution=options,
                device=chosen,
                compile=compile,
                crossover=crossover,
                processes=processes,
            )
            try:
                if not is_known or not processes.is_first:
                    measured = None if session.crossover is None else session.crossover.crossover_record()
                    place.begin(replace(recorded, crossover=measured), resolved)
                elif session.crossover is not None and crossover is None:
                    warnings.warn(
                        f"{place} does not record from which size on GEMMs ran natively, so this machine's crossover "
                        f"is used: if it has changed since the run was started, its last bits differ.",
                        BitplanWarning,
                        stacklevel=2,
                    )
                every = task.settings.evaluate_every if checkpoint_every is None else checkpoint_every
                return _Loop(place, place.config(), session, every, on_progress, stop).go()
            finally:
                session.close()


def chosen_device(device: str | torch.device) -> torch.device:
    """The device of that name; raises where this machine has none."""
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise RunError(f"there is no device {device!r}: use cpu or cuda.") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise RunError("this machine has no CUDA device: use the device cpu.")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise RunError(
            f"this machine has {torch.cuda.device_count()} CUDA devices, and no {chosen}: use a lower number."
        )
    if chosen.type not in ("cpu", "cuda"):
        raise RunError(f"runs are trained on cpu or cuda, not on {chosen.type}: use one of these.")
    return chosen


def resume_command(folder: Path, task_source: str, processes: int = 1) -> str:
    """The command that resumes a run of the task `task_source`; the file of a task must be named again.

    >>> resume_command(Path("runs/mine"), "my_task.py:MyTask")
    'bitplan train --resume runs/mine --task my_task.py:MyTask'
    >>> resume_command(Path("runs/mine"), "digits", processes=2)
    'torchrun --nproc-per-node 2 -m bitplan train --resume runs/mine'
    """
    task = [] if parse_file_name(task_source) is None else ["--task", task_source]
    return shlex.join([*program(processes), "train", "--resume", str(folder), *task])


class _Diverged(Exception):
    """The loss or a weight is no longer finite."""


class _Loop:
    """A run in this process, from its last checkpoint to its end."""

    def __init__(
        self,
        place: RunFolder,
        config: RunConfig,
        session: Session,
        checkpoint_every: int,
        on_progress: OnProgress | None,
        stop: Callable[[], bool] | None,
    ) -> None:
        self.place = place
        self.config = config
        #: What checkpoints of this run are known by.
        self.identity = config.identity(place.plan_text())
        self.session = session
        self.processes = session.processes
        self.steps: int = session.task.settings.all_steps
        self.checkpoint_every = checkpoint_every
        self.on_progress = on_progress
        self.stop = stop or (lambda: False)
        self.loss: float | None = None
        self.metrics: dict[str, float] = {}
        self.best: float | None = None
        #: The cost up to the last line of metrics.jsonl, as of :func:`cost_sums`.
        self.told: tuple[float, ...] = (0, 0, 0, 0)
        self.bits = self.cost = 0.0
        self.promoted = 0
        #: The step of the last line, and the cost of a step since then.
        self._logged_at, self._step_cost = 0, 0.0
        #: As of the last line, since a query of the GPU's allocator takes 0.1 ms.
        self._peak = 0
        #: The step of the newest checkpoint; -1 before the first.
        self.saved = -1
        self.monitor: Monitor | None = None
        self.began = time.perf_counter()

    # --- steps ---

    def go(self) -> Summary:
        if self.processes.is_first:
            make_folder(self.place.checkpoints)
        self._resume()
        self.processes.any(False)  # no process writes a checkpoint before all have read theirs
        if self.processes.is_first:
            self.place.sweep()
        self.place.forget_summary()
        self.place.write_sites(planned_sites(self.session.run))
        step = self.session.step
        self.journal = Journal(self.place.metrics_file, step)
        if self.processes.is_first:
            self._warn_of_gaps()
        self.times = Journal(self.place.times_file, step)
        earlier = [line["seconds"] for line in read_lines(self.place.times_file) if is_number(line.get("seconds"))]
        self.began = time.perf_counter() - (earlier[-1] if earlier else 0.0)
        self.events: Events = open_events(self.place.events, step)
        every = self.config.measure_every
        if every:
            self.monitor = Monitor(self.session, every, self.place.measurements_file, self.events)
        with self.journal, self.times, self.events, self.monitor or nullcontext():
            try:
                return self._run()
            except DiskError as error:
                raise DiskError(f"{error} {self._way_back()}") from error
            except torch.OutOfMemoryError as error:
                raise RunError(
                    f"{self.session.device} does not have enough memory for step {self.session.step + 1}: make the "
                    f"batch smaller with --set batch={max(1, self.session.task.settings.batch // 2)}."
                ) from error

    def _run(self) -> Summary:
        try:
            while self.session.step < self.steps:
                self._step()
                if self.session.step < self.steps and self.processes.any(self.stop()):
                    return self._stopped()
            return self._finished()
        except _Diverged:
            return self._diverged()

    def _step(self) -> None:
        session = self.session
        if self.monitor is not None:
            self.monitor.before_step()
        self.loss = session.forward_backward()
        if not math.isfinite(self.loss):
            raise _Diverged
        rate = session.apply()
        step = session.step
        if self._is_logged(step):
            self._log(rate)
            if session.scale.is_lost:
                raise _Diverged
        if self._is_evaluated(step):
            self._evaluate()
        if step == self.steps or (self.checkpoint_every and step % self.checkpoint_every == 0):
            self._save()
        self._report("training")

    def _is_logged(self, step: int) -> bool:
        return step == 1 or step % self.config.log_every == 0 or step == self.steps

    def _is_evaluated(self, step: int) -> bool:
        return step % self.session.task.settings.evaluate_every == 0 or step == self.steps

    def _log(self, rate: float) -> None:
        cost = self.session.run.cost()
        widths = bits_since(cost, self.told)
        self.told = cost_sums(cost)
        self.bits = widths["bits"]
        step, before = self.session.step, self.cost
        self.cost = share_of_run(cost, self.steps)
        self._step_cost = (self.cost - before) / max(step - self._logged_at, 1)
        self._logged_at = step
        line = {
            "step": step,
            "loss": self.loss,
            "lr": rate,
            **widths,
            "cost": self.cost,
            **self._promotions(cost),
        }
        if self.session.scale.is_used:
            line["loss_scale"] = self.session.scale.value
        self.journal.add(line)
        self._peak = self.session.peak()
        self.times.add({"step": step, "seconds": self._seconds(), "peak": self._peak})
        self.events.add(line)

    def _promotions(self, cost: Cost) -> dict[str, float]:
        """The number of promoted tensors and the low-precision ratio; empty where the plan promotes nothing."""
        run = self.session.run
        if not run.promotes:
            return {}
        promotions = run.promotions()
        for promotion in promotions[self.promoted :]:
            log.info("promoted: %s", promotion)
        self.promoted = len(promotions)
        return {"promoted": self.promoted, "low_precision_ratio": cost.low_precision_ratio}

    def _evaluate(self) -> None:
        self._report("evaluating")
        session = self.session
        self.metrics = session.evaluate(last=session.step == self.steps)
        value, metric = self.metrics[session.task.metric.name], session.task.metric
        if self.best is None or metric.is_better(value, self.best) or math.isnan(self.best):
            self.best = value
        line = {"step": session.step, "evaluation": True, **self.metrics}
        self.journal.add(line)
        self.events.add(line)

    # --- checkpoints ---

    def _resume(self) -> None:
        checkpoint = newest_whole(self.place.checkpoints, self.identity, broken=self.session.broken_in)
        if checkpoint is None:
            return
        step, state = checkpoint
        threads = self.config.machine.get("threads")
        if threads != torch.get_num_threads():
            warnings.warn(
                f"this run was started with {threads} threads and is resumed with {torch.get_num_threads()}: its last "
                f"bits may differ.",
                BitplanWarning,
                stacklevel=2,
            )
        self.session.load(step, state)
        own = state.get("loop", {})
        if not isinstance(own, dict) or not set(own) >= set(_OWN_STATE):
            raise RunError(f"the checkpoint of step {step} in {self.place} is incomplete: remove it to use another.")
        for name in _OWN_STATE:
            setattr(self, name, own[name])
        # The cost is that of the last line, which may be of an earlier step.
        self._logged_at = next((logged for logged in range(step, 0, -1) if self._is_logged(logged)), 0)
        self.saved = step

    def _warn_of_gaps(self) -> None:
        """Warn where lines of metrics.jsonl are lost that were written before the checkpoint."""
        present = {(line["step"], bool(line.get("evaluation"))) for line in self.place.metrics()}
        steps = range(1, self.session.step + 1)
        expected = [(step, False) for step in steps if self._is_logged(step)]
        expected += [(step, True) for step in steps if self._is_evaluated(step)]
        lost = sorted(line for line in expected if line not in present)
        if lost:
            warnings.warn(
                f"{self.place.metrics_file} has lost {len(lost)} lines from step {lost[0][0]} on, before the "
                f"checkpoint of step {self.session.step}: the run goes on, but reports show a gap unless you restore "
                f"the file.",
                BitplanWarning,
                stacklevel=2,
            )

    def _save(self) -> None:
        """Write a checkpoint, unless its state is not finite: a run can be resumed from every checkpoint on disk."""
        step = self.session.step
        if step == self.saved:
            return
        state = self.session.state()
        if self.session.broken_in(state) is not None:
            raise _Diverged
        self.journal.sync()
        if self.monitor is not None:
            self.monitor.journal.sync()
        if self.processes.is_first:
            own = {name: getattr(self, name) for name in _OWN_STATE}
            Checkpoint(self.place.checkpoints, step).save({**state, "loop": own}, self.identity)
            remove_older(self.place.checkpoints, step)
        self.saved = step

    def _way_back(self) -> str:
        if self.saved < 0:
            return "No checkpoint was written yet."
        if not Checkpoint(self.place.checkpoints, self.saved).exists():
            return f"The checkpoint of step {self.saved} is gone, too."
        return f"The checkpoint of step {self.saved} is whole; go on from it with: {self._resume_command()}"

    def _resume_command(self) -> str:
        return resume_command(self.place.path, self.config.task_source, self.processes.count)

    # --- ends ---

    def _finished(self) -> Summary:
        self._save()
        self._save_weights()
        summary = self._summary("finished", self.session.run.cost())
        if self.processes.count == 1:  # the statistics are collected by a plan that is attached anew
            self.place.write_sites(measured_sites(self.session))
        self.place.write_summary(summary)
        return summary

    def _save_weights(self) -> None:
        weights = self.session.model_state()
        if self.processes.is_first:
            save_tensors(self.place.model_file, weights)

    def _stopped(self) -> Summary:
        self._save()
        self._save_weights()
        why = f"stopped on request; go on with: {self._resume_command()}"
        summary = self._summary("stopped", self.session.run.cost(), why=why)
        self.place.write_summary(summary)
        return summary

    def _diverged(self) -> Summary:
        """Search the cause; no further checkpoint is written."""
        cost, step, loss = self.session.run.cost(), self.session.step, self.loss
        promotions = self._promotion_records()  # before the search, which repeats steps
        self.journal.add({"step": step + 1, "loss": loss, "diverged": True})
        if self.processes.count > 1:
            why = "the loss or a weight is not finite; the same run in one process names the tensor."
            summary = self._summary("diverged", cost, step=step, why=why, promotions=promotions)
            self.place.write_summary(summary)
            return summary
        fault = find_fault(self.session, self.place.checkpoints, lambda: self._report("searching"))
        good = f" The checkpoint of step {self.saved} is good." if self.saved >= 0 else ""
        summary = self._summary(
            "diverged", cost, step=step, why=f"{fault}{good}", site=fault.site, promotions=promotions
        )
        self.place.write_summary(summary)
        return summary

    # --- reporting ---

    def _summary(self, status: Status, cost: Cost, **more: Any) -> Summary:
        facts: dict[str, Any] = {
            "step": self.session.step,
            "metrics": self.metrics,
            "best": self.best,
            "loss": self.loss,
            **cost_figures(cost),
            "peak": self.session.peak(),
            "seconds": self._seconds(),
            "promotions": self._promotion_records(),
        }
        return Summary(self.place.path, status, **{**facts, **more})

    def _promotion_records(self) -> tuple[PromotionRecord, ...]:
        return tuple(map(PromotionRecord.of, self.session.run.promotions()))

    def _seconds(self) -> float:
        return round(time.perf_counter() - self.began, 3)

    def _report(self, phase: Phase) -> None:
        if self.on_progress is None:
            return
        self.on_progress(
            Progress(
                step=self.session.step,
                steps=self.steps,
                phase=phase,
                loss=self.loss,
                metric=self.metrics.get(self.session.task.metric.name),
                bits=self.bits,
                cost=self.cost + self._step_cost * (self.session.step - self._logged_at),
                peak=self._peak,
                seconds=self._seconds(),
                error=None if self.monitor is None else self.monitor.worst,
                alarm=None if self.monitor is None or self.monitor.alarm is None else str(self.monitor.alarm),
                promoted=self.promoted,
            )
        )
