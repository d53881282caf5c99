"""Recording a training loop of your own: :func:`record` writes the run folder that the lab's loop writes.

The loop stays as it is. What the plan says of a run (bits, cost, promotions, statistics of every tensor) is read from
its :class:`~bitplan.Attachment`, which counts the optimizer's steps; the loss and other values come from
:meth:`Recorder.log`, and figures on held-out data from :meth:`Recorder.evaluate`.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bitplan.analysis.cost import Cost
from bitplan.errors import BitplanError, BitplanWarning, RunError
from bitplan.files import strict
from bitplan.lab.tasks.task import Metric
from bitplan.lab.train.config import LOG_EVERY, RunConfig, machine, plan_name, versions
from bitplan.lab.train.folder import Journal, RunFolder
from bitplan.lab.train.session import peak_bytes
from bitplan.lab.train.summary import (
    Events,
    Progress,
    PromotionRecord,
    Status,
    Summary,
    bits_since,
    cost_figures,
    cost_sums,
    open_events,
    planned_sites,
    share_of_run,
    statistics_record,
    with_statistics,
)
from bitplan.plans import Plan
from bitplan.plans.execution import Emulate, ExecutionOptions, execution_options
from bitplan.plans.loading import find_plan
from bitplan.runtime.attach import Attachment, attach, attach_observer
from bitplan.runtime.clock import Total
from bitplan.runtime.dispatch import value_before_rounding
from bitplan.runtime.statistics import Statistics

if TYPE_CHECKING:
    from bitplan.lab.report.summaries import Report

log = logging.getLogger("bitplan")

#: Lines of ``metrics.jsonl`` for one line of ``statistics.jsonl``, which has a record of every tensor.
_LINES_PER_STATISTICS = 5
#: Ends of the names of figures that a Trainer logs and that are no metrics.
_SPEEDS = ("runtime", "_per_second")
#: Names of metrics of which less is better contain one of these, or have such a word, or one that ends so (rmse).
_LOWER = ("loss", "error", "perplexity", "bits_per", "bits per")
_LOWER_WORDS = ("ppl", "nll", "wer", "cer", "fid", "bpc", "bpb")
_LOWER_ENDS = ("mse", "mae", "mape")
#: The metric of a run that names none: the mean loss of its last lines.
_TRAINING_LOSS = Metric("training loss", "lower", math.nan)
#: The share of the lines at a run's end whose mean loss that is.
_LAST = 0.1


def metric_named(name: str, better: str | None = None, trivial: float = math.nan) -> Metric:
    """The metric of that name; which direction is better follows from the name, unless `better` says it.

    >>> metric_named("held-out loss").better, metric_named("accuracy").better, metric_named("IoU", "lower").better
    ('lower', 'higher', 'lower')
    >>> metric_named("WER").better, metric_named("answer accuracy").better
    ('lower', 'higher')
    """
    lowered = name.lower()
    is_lower = any(part in lowered for part in _LOWER) or any(
        word in _LOWER_WORDS or word.endswith(_LOWER_ENDS) for word in re.split(r"[^a-z0-9]+", lowered)
    )
    direction: Literal["higher", "lower"] = "lower" if is_lower else "higher"
    if better not in (None, "higher", "lower"):
        raise RunError(f"better is {better!r}: of a metric, 'higher' or 'lower' is better.")
    if better is not None:
        direction = "lower" if better == "lower" else "higher"
    return Metric(name, direction, float(trivial))


@dataclass(frozen=True)
class RunNames:
    """What a recorded run is called, and what it is judged by."""

    #: Runs of one task are compared with each other.
    task: str
    #: The script, or ``file.py:train``.
    source: str
    seed: int = 0
    #: None: the mean loss of the run's last lines.
    metric: Metric | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    #: The plan on the command line; None: none, or a plan without a name there.
    plan_source: str | None = None
    #: The command that repeats the run.
    command: str = ""
    #: The SHA-256 of the file of `source`, where it is executed by name.
    sha256: str | None = None
    #: The folder of the run that this one is compared with.
    reference: Path | None = None


class Recorder:
    """Writes a run folder while a loop trains. Made by :func:`record`."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        names: RunNames,
        *,
        log_every: int = LOG_EVERY,
        overwrite: bool = False,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.folder = RunFolder(folder)
        self.names = names
        self.log_every = log_every
        self.overwrite = overwrite
        self.on_progress = on_progress
        #: The attached plan; None before :func:`bitplan.attach` is called.
        self.run: Attachment | None = None
        #: Whose learning rate is recorded.
        self.optimizer: Optimizer | None = None
        #: Optimizer steps made.
        self.step = 0
        #: The result, once the run is over.
        self.summary: Summary | None = None
        self._lines: Journal | None = None
        self._events = Events()
        self._files = ExitStack()
        self._began = time.perf_counter()
        #: The step whose line waits for the values of :meth:`log`, and these values.
        self._pending: int | None = None
        self._values: dict[str, Any] = {}
        self._line: dict[str, Any] = {}
        self._losses: list[float] = []
        self._metrics: dict[str, float] = {}
        self._evaluated_at = -1
        self._best: float | None = None
        #: The cost up to the last line, and its sums; a detached plan has no promotions to price.
        self._cost: Cost | None = None
        self._sums: tuple[float, ...] = (0, 0, 0, 0)
        self._is_detached = self._is_unpriced = False
        #: Whether a trainer counts the steps of a run without a plan, rather than the calls of :meth:`log`.
        self._is_counted = False
        self._statistics: dict[str, Statistics] = {}
        self._promotions: tuple[PromotionRecord, ...] = ()
        self._sites: list[dict[str, Any]] = []

    # --- what a loop calls ---

    def log(self, loss: Tensor | float | None = None, **values: Tensor | float) -> None:
        """Record the loss of this step, and other values by name; a tensor is read only where a line is written."""
        if loss is not None:
            values = {"loss": loss, **values}
        # Detached: a loss that waits for its line would keep the graph of its step alive.
        self._values = {name: value.detach() if isinstance(value, Tensor) else value for name, value in values.items()}
        if self.run is None and not self._is_counted:
            self._count(self.step + 1)
        if self._pending is not None:
            self._write_line()

    def evaluate(self, **metrics: Tensor | float) -> None:
        """Record figures on held-out data at this step, the run's metric among them."""
        if self._pending is not None:
            self._write_line()
        figures = {name: as_number(name, value) for name, value in metrics.items()}
        metric = self.names.metric
        if metric is not None:
            if metric.name not in figures:
                raise RunError(
                    f"the run is judged by {metric.name}, and got {', '.join(metrics) or 'no figure'}: give "
                    f"{metric.name}, too, or name another metric."
                )
            value = figures[metric.name]
            if self._best is None or metric.is_better(value, self._best) or math.isnan(self._best):
                self._best = value
        line = {"step": self.step, "evaluation": True, **figures}
        journal = self._journal()
        if figures != self._metrics or self.step != self._evaluated_at:
            journal.add(line)
            self._events.add(line)
        self._metrics, self._evaluated_at = figures, self.step
        self._report()

    def trainer_callback(self) -> Any:
        """A callback for the ``Trainer`` of Transformers, which records the losses and evaluations that it logs."""
        from transformers import TrainerCallback

        recorder = self

        class RecordCallback(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                recorder._is_counted = True
                steps = {"steps": int(state.max_steps)}
                recorder.names = replace(recorder.names, settings={**steps, **recorder.names.settings})

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if recorder.run is None:
                    recorder._count(int(state.global_step))

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
                figures = {name.removeprefix("eval_"): value for name, value in logs.items() if name[:5] == "eval_"}
                figures = {name: value for name, value in figures.items() if not name.endswith(_SPEEDS)}
                if figures:
                    recorder.evaluate(**figures)
                elif "loss" in logs:
                    recorder._pending = recorder.step  # the Trainer has read its loss: every one has a line
                    recorder.log(loss=float(logs["loss"]), lr=float(logs.get("learning_rate", math.nan)))

        return RecordCallback()

    def report(self) -> Report:
        """The run as :class:`~bitplan.lab.report.Report`, against its reference where one was named."""
        from bitplan.lab.report.summaries import Report

        return Report.of([self.folder.path])

    # --- the life of a run ---

    @contextmanager
    def opened(self) -> Iterator[Recorder]:
        """Hold the folder, and record the first plan that is attached meanwhile."""
        if self.log_every < 1:
            raise RunError(f"log_every is {self.log_every}; it must be at least 1.")
        with self.folder.locked(), self._files:
            self._began = time.perf_counter()
            observer = attach_observer.set(self.observe)
            try:
                yield self
            except BaseException as error:
                self._close("stopped", f"{type(error).__name__} after step {self.step}: run it again from its start")
                raise
            else:
                self._close("finished")
            finally:
                attach_observer.reset(observer)

    def observe(self, run: Attachment) -> None:
        """Record this plan, unless one is recorded already."""
        if self.run is None and self.step == 0:
            self.run = run
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)
            run.after_each_step(self._count)
            run.before_detach(self._capture)

    def join(self, metric: Metric | None, settings: Mapping[str, Any], log_every: int) -> None:
        """Take what :func:`record` was given inside a training function, where the comparison leaves it open."""
        names = self.names
        self.names = replace(names, metric=names.metric or metric, settings={**settings, **names.settings})
        self.log_every = log_every

    def judge(self, figures: Mapping[str, float], metric: Metric) -> None:
        """Record what a training function returned, which is judged by `metric`."""
        self.names = replace(self.names, metric=metric)
        self.evaluate(**figures)

    def _count(self, step: int) -> None:
        """A step was made; its line waits for the values of :meth:`log`."""
        if self._pending is not None:
            self._write_line()
        self.step = step
        if step == 1 or step % self.log_every == 0 or self._lines is None:
            self._pending = step

    def _journal(self) -> Journal:
        if self._lines is None:
            self._begin()
        assert self._lines is not None
        return self._lines

    def _begin(self) -> None:
        """Write the run's configuration, and open its files behind the lines of earlier steps."""
        config, plan = self._config(), self._plan
        if not (self.overwrite and self.folder.is_run and self.folder.config().is_recorded):
            is_there = self.folder.require_room_for(config, plan)
            summary = self.folder.summary() if is_there else None
            if summary is not None and summary.status != "stopped":
                raise RunError(
                    f"{self.folder} holds this run already, {summary.status}: name another folder, or record it again "
                    f"with overwrite=True."
                )
        self.folder.sweep()
        self.folder.forget_summary()
        self.folder.begin(config, plan)
        after = self.step - 1
        self._lines = self._files.enter_context(Journal(self.folder.metrics_file, after))
        self._times = self._files.enter_context(Journal(self.folder.times_file, after))
        self._statistics_lines = self._files.enter_context(Journal(self.folder.statistics_file, after))
        self._events = self._files.enter_context(open_events(self.folder.events, max(after, 0)))

    @property
    def _plan(self) -> Plan | None:
        """The plan, unless it changes nothing."""
        has_effect = self.run is not None and (self.run.plan.all_rules or self.run.plan.optimizer_rule is not None)
        return self.run.plan if self.run is not None and has_effect else None

    def _config(self) -> RunConfig:
        names, device, plan = self.names, self._device, self._plan
        execution = Emulate() if self.run is None else self.run.execution
        reference = names.reference
        return RunConfig(
            task=names.task,
            task_source=names.source,
            settings=strict(dict(names.settings)),
            plan=None if plan is None else plan.label or plan_name(plan, names.plan_source),
            plan_source=names.plan_source,
            seed=names.seed,
            metric=strict(vars(names.metric or _TRAINING_LOSS)),
            task_sha256=names.sha256,
            execution=execution.kind,
            device=str(device),
            log_every=self.log_every,
            label=_precision(self.run) if plan is None else None,
            is_recorded=True,
            reference=None if reference is None else os.path.relpath(reference, self.folder.path),
            command=names.command,
            versions=versions(),
            machine=machine(device),
        )

    @property
    def _device(self) -> torch.device:
        model = None if self.run is None else self.run.model
        return torch.device("cpu") if model is None else next(model.parameters(), torch.empty(0)).device

    def _write_line(self) -> None:
        step, self._pending = self._pending, None
        journal = self._journal()
        values = {name: as_number(name, value) for name, value in self._values.items()}
        self._values = {}
        self._losses += [values["loss"]] if "loss" in values else []
        rate = None if self.optimizer is None else self.optimizer.param_groups[0].get("lr")
        line: dict[str, Any] = {"step": step, **({} if rate is None else {"lr": float(rate)}), **values}
        self._read_run()
        if self._cost is not None:
            steps = self.names.settings.get("steps")
            share = share_of_run(self._cost, max(steps, self._cost.steps)) if isinstance(steps, int) else None
            line |= {**bits_since(self._cost, self._sums), "cost": self._cost.relative if share is None else share}
            self._sums = cost_sums(self._cost)
        if self.run is not None and self.run.promotes:
            line["promoted"] = len(self._promotions)
            line |= {} if self._cost is None else {"low_precision_ratio": self._cost.low_precision_ratio}
        if self.step == 1 or self.step % (self.log_every * _LINES_PER_STATISTICS) == 0:
            self._read_statistics()
        self._line = line
        journal.add(line)
        self._times.add({"step": step, "seconds": self._seconds(), "peak": peak_bytes(self._device)})
        self._events.add(line)
        self._report()

    def _read_run(self) -> None:
        """What the steps so far have cost, and what was promoted; without a cost where the model cannot be recorded."""
        if self.run is None or self._is_detached:
            return
        if self.run.promotes:
            self._promotions = tuple(map(PromotionRecord.of, self.run.promotions()))
        if self._is_unpriced:
            return
        try:
            self._cost = self.run.cost()
            if not self._sites:
                self._sites = planned_sites(self.run)
                self.folder.write_sites(self._sites)
        except (BitplanError, RuntimeError) as error:
            self._is_unpriced = True
            log.warning("%s is recorded without bits and costs: %s", self.folder, error)

    def _read_statistics(self) -> None:
        if self.run is None or self._is_detached or not self.run.has_stats:
            return
        before, self._statistics = self._statistics, self.run.stats()
        records = {site: statistics_record(own.since(before.get(site))) for site, own in self._statistics.items()}
        if records:
            self._statistics_lines.add({"step": self.step, "sites": records})

    def _capture(self) -> None:
        """Read the plan for the last time."""
        if self.step == 0:
            self.run = None  # attached to look at a model, such as an estimate does: the next plan is recorded
        if self._is_detached or self.step == 0:
            return
        if self._pending is None and self._values:
            self._pending = self.step  # the last step's line, which is no multiple of log_every
        if self._pending is not None:
            self._write_line()
        self._read_run()
        self._read_statistics()
        self._is_detached = True

    def _close(self, status: Status, why: str | None = None) -> None:
        self._capture()
        if self.step == 0 and not self._metrics:
            if status == "finished":
                raise RunError(
                    f"nothing was recorded in {self.folder}: give record() or attach() the optimizer=, whose steps are "
                    f"counted, or call log() after each step."
                )
            return  # the loop never began
        journal = self._journal()
        if self.names.metric is None and self._losses:
            last = self._losses[-max(1, round(_LAST * len(self._losses))) :]
            self._metrics = {_TRAINING_LOSS.name: sum(last) / len(last), **self._metrics}
            journal.add({"step": self.step, "evaluation": True, **self._metrics})
        if status == "finished" and self.names.metric is not None and not self._metrics:
            warnings.warn(
                f"{self.folder} is judged by {self.names.metric.name}, which it never got: call "
                f"evaluate({self.names.metric.name}=...) before the end.",
                BitplanWarning,
                stacklevel=2,
            )
        loss = self._losses[-1] if self._losses else None
        if status == "finished" and loss is not None and not math.isfinite(loss):
            status, why = "diverged", f"the loss is not finite at step {self.step}"
        self.summary = Summary(
            *(self.folder.path, status, self.step, self._metrics),
            best=self._best,
            loss=loss,
            **({} if self._cost is None else cost_figures(self._cost)),
            peak=peak_bytes(self._device),
            seconds=self._seconds(),
            why=why,
            promotions=self._promotions,
        )
        if self._statistics:
            self.folder.write_sites(with_statistics(self._sites, self._statistics))
        self.folder.begin(self._config(), self._plan)  # again: a training function names its metric at the end
        self.folder.write_summary(self.summary)

    def _seconds(self) -> float:
        return round(time.perf_counter() - self._began, 3)

    def _report(self) -> None:
        if self.on_progress is None:
            return
        steps, metric = self.names.settings.get("steps"), self.names.metric
        self.on_progress(
            Progress(
                step=self.step,
                steps=steps if isinstance(steps, int) else 0,
                phase="training",
                loss=self._losses[-1] if self._losses else None,
                metric=None if metric is None else self._metrics.get(metric.name),
                bits=self._line.get("bits", 0.0),
                cost=self._line.get("cost", 0.0),
                peak=peak_bytes(self._device),
                seconds=self._seconds(),
                promoted=len(self._promotions),
            )
        )


#: The run of the training function that :func:`bitplan.compare` has called; :func:`record` inside it continues it.
compared_run: ContextVar[Recorder | None] = ContextVar("compared_run", default=None)


@contextmanager
def record(
    folder: str | os.PathLike[str],
    model: nn.Module | None = None,
    plan: Plan | str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    optimizer: Optimizer | None = None,
    example: Any = None,
    steps: Total | None = None,
    seed: int = 0,
    execution: str | ExecutionOptions | None = None,
    reference: str | os.PathLike[str] | None = None,
    task: str | None = None,
    metric: str | None = None,
    better: str | None = None,
    trivial: float = math.nan,
    settings: Mapping[str, Any] | None = None,
    log_every: int = LOG_EVERY,
    stats: bool | None = None,
    overwrite: bool = False,
) -> Iterator[Recorder]:
    """Record a training loop in a run folder, for ``bitplan report`` and ``bitplan runs``.

    ::

        with bp.record("runs/mine", model, "int8-all", optimizer=optimizer, example=batch, metric="accuracy") as run:
            for ...:
                ...
                optimizer.step()
                run.log(loss=loss)
            run.evaluate(accuracy=...)

    With a `model`, its plan is attached here and detached at the end. Without one, the first plan that
    :func:`bitplan.attach`, or a trainer's callback, attaches inside the block is recorded. An exception ends the run as
    *stopped*, and a loss that is not finite at the end as *diverged*. Inside a training function of
    :func:`bitplan.compare`, the comparison decides the folder, the seed and the metric.

    :param plan: as :func:`bitplan.attach` takes it; None: no plan, the run that others are compared with.
    :param optimizer: as :func:`bitplan.attach` takes it; so are `example`, `steps`, `seed` and `execution`.
    :param reference: the folder of the run that this one is judged against in reports.
    :param task: runs of one task are compared with each other; by default the script's name.
    :param metric: the name of the figure of :meth:`Recorder.evaluate` that the run is judged by; by default the mean
        loss at the end.
    :param better: ``"higher"`` or ``"lower"``; by default ``"lower"`` for losses, errors and perplexities.
    :param trivial: the metric of a predictor that has learned nothing, which a working plan must beat.
    :param settings: the recipe, for tables; `steps` is added.
    :param log_every: steps between lines of ``metrics.jsonl``, where the loss is read.
    :param stats: statistics of every tensor's rounding, which take time; by default in emulation only.
    :param overwrite: record a finished run again.
    """
    resolved = None if plan is None else find_plan(plan)
    if model is None and resolved is not None:
        raise RunError("record() attaches a plan to a model: give it the model, too, or attach inside the block.")
    outer = compared_run.get()
    recipe = {**({"steps": steps} if isinstance(steps, int) else {}), **(settings or {})}
    judged_by = None if metric is None else metric_named(metric, better, trivial)
    if outer is not None:
        recorder = outer
        recorder.join(judged_by, recipe, log_every)
    else:
        script = Path(sys.argv[0]).name if sys.argv else ""
        source = script if script.endswith(".py") and script != "ipykernel_launcher.py" else "notebook"
        names = RunNames(
            task=task or Path(source).stem,
            source=source,
            seed=seed,
            metric=judged_by,
            settings=recipe,
            plan_source=str(plan) if isinstance(plan, (str, os.PathLike)) else None,
            command="" if source == "notebook" else shlex.join(["python", *sys.argv]),
            reference=None if reference is None else _run_folder(reference),
        )
        recorder = Recorder(folder, names, log_every=log_every, overwrite=overwrite)
    with nullcontext() if outer is not None else recorder.opened(), ExitStack() as stack:
        if optimizer is not None:
            recorder.optimizer = optimizer
        if model is not None:
            is_emulated = _options(resolved, execution).kind == "emulate"
            run = attach(
                *(model, Plan() if resolved is None else resolved),
                optimizer=optimizer,
                example=example,
                steps=steps,
                seed=recorder.names.seed,
                execution=execution,
                stats=is_emulated if stats is None else stats,
            )
            stack.callback(run.detach)
        yield recorder


def _options(plan: Plan | None, execution: str | ExecutionOptions | None) -> ExecutionOptions:
    if execution is not None:
        return execution_options(execution)
    return (None if plan is None else plan.declared_execution) or Emulate()


def _run_folder(path: str | os.PathLike[str]) -> Path:
    if not RunFolder(path).is_run:
        raise RunError(f"reference= names {os.fspath(path)}, which is no run folder: record the reference run first.")
    return Path(path)


def _precision(run: Attachment | None) -> str | None:
    """The name of a run without a plan: the format of most of its parameters."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in () if run is None else run.model.parameters():
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
    return names.get(max(sizes, key=lambda dtype: sizes[dtype])) if sizes else None


def as_number(name: str, value: Any) -> float:
    """A recorded value as a number; raises an error that names it where it is none."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value_before_rounding(value).detach())
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = "a tensor of shape " + str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
        raise RunError(f"{name} is {kind}, and a run records numbers: give a number or a tensor with one.") from error
