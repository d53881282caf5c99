"""``bitplan train``: one run of a task, in a folder of its own."""

from __future__ import annotations

import logging
import math
import shlex
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from bitplan.analysis.cost import estimate_cost
from bitplan.analysis.explain import explain
from bitplan.analysis.sharding import UNSHARDED, Sharding
from bitplan.analysis.targets import describe_error, file_sha256, parse_file_name, target_errors
from bitplan.cli import CLOSED_OUTPUT
from bitplan.cli.arguments import ExecutionOption, OptionalTaskArgument, TaskSettingsOption, complete_plan
from bitplan.cli.assign import FormatsOption, OrderOption
from bitplan.cli.output import FittedTable, JsonOption, Output, OutputClosed, command_output
from bitplan.errors import BitplanError, BitplanWarning, RunError, TaskError
from bitplan.files import byte_text, printable
from bitplan.lab.task_planners import AssignOptions, assign_task
from bitplan.lab.tasks.registry import find_task, task_names
from bitplan.lab.tasks.task import Task
from bitplan.lab.train import Progress, RunFolder, Summary, fresh_folder, train
from bitplan.lab.train.checkpoint import checkpoints_in
from bitplan.lab.train.config import command_of, plan_name, program, resolve_execution
from bitplan.lab.train.loop import StopRequest, chosen_device, stop_on_signals
from bitplan.lab.train.processes import Processes, joined_processes, sharding_of, started_processes
from bitplan.planners.assign.assign import LOSS_SCALE
from bitplan.plans import ROLES, Plan
from bitplan.plans.loading import find_plan


def register(app: typer.Typer) -> None:
    app.command("train")(train_command)


log = logging.getLogger("bitplan")

#: Exit codes: a run that diverged, and the base to which shells add the number of a signal.
DIVERGED = 1
STOPPED = 128


def train_command(
    task: OptionalTaskArgument = None,
    plan: Annotated[
        str | None,
        typer.Option(
            "--plan", "-p", help="A plan's file or a preset; without one, FP32.", autocompletion=complete_plan
        ),
    ] = None,
    assign: Annotated[
        str | None,
        typer.Option(
            help="Make the plan first: low precision for this ratio of all values (0.9), under a budget (70%, 6GiB), "
            "or as a baseline (operator).",
            show_default=False,
        ),
    ] = None,
    order: OrderOption = "largest",
    formats: FormatsOption = None,
    promotion: Annotated[
        float | None,
        typer.Option(help="Of --assign, as of bitplan assign; 0: nothing is promoted.", show_default=False),
    ] = None,
    loss_scale: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Multiply the loss by this, adapted as the run goes on; 0: no. By default 65536 with --assign and the "
            "formats paper. The same as --set loss_scale=.",
            show_default=False,
        ),
    ] = None,
    execution: ExecutionOption = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")] = "cpu",
    compile: Annotated[bool, typer.Option("--compile", help="Run training steps through torch.compile.")] = False,
    seed: Annotated[int, typer.Option(help="Of weights, data and random rounding.")] = 0,
    settings: TaskSettingsOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="The run's folder (default: a new one in runs/).")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="DIR", help="Go on with the run in this folder.")
    ] = None,
    task_file: Annotated[
        str | None,
        typer.Option(
            "--task",
            metavar="FILE.py:NAME",
            help="With --resume, of a run whose task is a file: that file again, as no run folder chooses code to run.",
            show_default=False,
        ),
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(min=0, help="Steps between checkpoints (default: as evaluations; 0: at the end).")
    ] = None,
    measure_every: Annotated[
        int,
        typer.Option(
            min=0,
            help="Look at every product before every so many steps, on a copy: errors by format, and an alarm (0: no).",
        ),
    ] = 0,
    shard: Annotated[
        str | None,
        typer.Option(help="Under torchrun: the processes share the model by fsdp or ddp, each with a part of a batch."),
    ] = None,
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="Under torchrun: so many processes split the layers of the model's tp_plan.")
    ] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run, and do not.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train TASK, under a plan if one is given, and keep everything in a run folder.

    The same command with the same --out goes on with a run that was stopped or killed, bit for bit. Ctrl-C stops after
    the current step. Exit code 1: the run diverged. With --json: one object, what came of it.

    Several processes: torchrun --nproc-per-node 2 -m bitplan train TASK --shard fsdp --out DIR.
    """
    with (
        joined_processes(_sharding(shard, tensor_parallel, resume), chosen_device(device)) as processes,
        command_output(as_json) as output,
        warnings_as_notes(output),
    ):
        of_assign = order != "largest" or formats is not None or promotion is not None
        if resume is not None:
            _require_nothing_else(task, plan, settings, out, assign, of_assign, loss_scale is not None)
            request = _RunRequest.from_folder(resume, task_file, checkpoint_every)
        elif task_file is not None:
            raise RunError("--task goes with --resume: give a new run's task without it, as bitplan train TASK.")
        elif task is None:
            raise TaskError(f"name a task to train, such as {', '.join(task_names())}, or a run with --resume.")
        else:
            if assign is not None and plan is not None:
                raise RunError("give --plan or --assign, not both.")
            if assign is None and of_assign:
                raise RunError(
                    "--order, --formats and --promotion say how --assign is done: give that, too, or drop them."
                )
            assign_options = None if assign is None else AssignOptions(assign, order, formats, promotion)
            recipe = _with_loss_scale(settings or [], loss_scale, assign_options)
            task_object = find_task(task, recipe, seed)
            run_plan = None if plan is None else find_plan(plan)
            if assign_options is not None:
                plan, run_plan = (
                    assign_options.source,
                    _assigned(assign_options, task_object, task, compile, device, output),
                )
            name = None if run_plan is None else plan_name(run_plan, plan)
            folder = out or processes.share(lambda: fresh_folder(task_object.name, name, seed))
            request = _RunRequest(
                *(
                    task_object,
                    task,
                    run_plan,
                    plan,
                    folder,
                    execution,
                    device,
                    compile,
                    checkpoint_every,
                    measure_every,
                )
            )
        if dry_run:
            _describe(request, processes.sharding, output)
            return
        code = _train(request, processes, output)
    if code:
        raise typer.Exit(code)


def _sharding(kind: str | None, tensor_parallel: int, resume: Path | None) -> Sharding:
    """How the processes that torchrun has started share the run."""
    started = started_processes()
    if resume is None:
        if kind is not None and started == 1:
            raise RunError(
                f"--shard {kind} is for several processes: start them as torchrun --nproc-per-node 2 -m bitplan train"
                f" ..."
            )
        return sharding_of(kind, tensor_parallel, started)
    folder = RunFolder(resume)
    if not folder.is_run:
        return UNSHARDED  # an error that is reported with the other options
    sharding = Sharding.parse(folder.config().sharding)
    if sharding.world != started:
        start = shlex.join([*program(sharding.world), "train", "--resume", str(resume)])
        raise RunError(f"{resume} is a run of {sharding.world} processes, not of {started}: start it as {start}")
    return sharding


def _with_loss_scale(settings: list[str], loss_scale: float | None, assign_options: AssignOptions | None) -> list[str]:
    """The recipe with the loss scale of --loss-scale, or the paper's where its formats need one and none is set."""
    is_set = any(setting.partition("=")[0].strip() == "loss_scale" for setting in settings)
    if loss_scale is not None:
        if is_set:
            raise RunError("the loss scale is given twice: drop --set loss_scale or --loss-scale.")
        return [*settings, f"loss_scale={loss_scale:g}"]
    is_recommended = (
        assign_options is not None
        and assign_options.what != "fp32"
        and assign_options.choose_formats().needs_loss_scale
    )
    return [*settings, f"loss_scale={LOSS_SCALE:g}"] if is_recommended and not is_set else settings


def _assigned(options: AssignOptions, task: Task, source: str, compile: bool, device: str, output: Output) -> Plan:
    with target_errors(source):
        result = assign_task(
            *(task, options.request(task.seed), options.choose_formats()),
            compile=compile,
            device=chosen_device(device),
            report=output.note,
        )
    output.note(f"{result.name}: {result.plan.description}")
    return result.plan


class _RunRequest:
    """A run as the command line describes it."""

    def __init__(
        self,
        task: Task,
        task_source: str,
        plan: Plan | None,
        plan_source: str | None,
        folder: Path,
        execution: str | None,
        device: str,
        compile: bool,
        checkpoint_every: int | None,
        measure_every: int = 0,
    ) -> None:
        self.task = task
        self.task_source = task_source
        self.plan = plan
        self.plan_source = plan_source
        self.folder = RunFolder(folder)
        self.execution = execution
        self.device = device
        self.compile = compile
        self.checkpoint_every = checkpoint_every
        self.measure_every = measure_every

    @classmethod
    def from_folder(cls, folder: Path, task_file: str | None, checkpoint_every: int | None) -> _RunRequest:
        run_folder = RunFolder(folder)
        config = run_folder.config()
        task, task_source = task_of_run(run_folder, task_file, ("train", "--resume"))
        return cls(
            *(task, task_source, run_folder.plan(), config.plan_source, folder),
            *(config.execution, config.device, config.compile, checkpoint_every, config.measure_every),
        )

    @property
    def plan_label(self) -> str:
        return "no plan" if self.plan is None else plan_name(self.plan, self.plan_source)


def task_of_run(folder: RunFolder, task_file: str | None, command: tuple[str, ...]) -> tuple[Task, str]:
    """The task of a run and its source.

    :param task_file: the file of the task, as the user names it.
    :param command: what the user typed before the folder, for messages.
    """
    config = folder.config()
    if config.is_recorded:
        again = f": run it again with: {config.command}" if config.command else "."
        raise RunError(
            f"{folder} was recorded in a loop of its own, which bitplan {' '.join(command)} cannot repeat{again}"
        )
    source = _task_source(folder, config.task_source, task_file, command)
    # Settings that key=value cannot express keep the defaults of the task's own file.
    settings = [f"{key}={value}" for key, value in config.settings.items() if isinstance(value, (str, int, float))]
    return find_task(source, settings, config.seed), source


def _task_source(folder: RunFolder, recorded: str, task_file: str | None, command: tuple[str, ...]) -> str:
    """The source of a run's task: a built-in one comes from the run's record, a file only from the user.

    A file is executed, and whoever made the folder wrote the record.
    """
    is_built_in = recorded in task_names()
    if task_file is None:
        if is_built_in:
            return recorded
        is_file = parse_file_name(recorded) is not None
        raise RunError(
            f"{folder} is a run of {recorded}, which {'is a file' if is_file else 'does not come with bitplan'}, and a "
            f"run folder does not choose code to run: if you trust the task's file, name it, as in "
            f"{shlex.join(['bitplan', *command, str(folder)])} --task "
            f"{shlex.quote(recorded) if is_file else 'FILE.py:NAME'}"
        )
    if is_built_in and task_file != recorded:
        raise RunError(f"{folder} is a run of {recorded}, which comes with bitplan: leave out --task.")
    file = parse_file_name(task_file)
    if file is None and not is_built_in:
        raise RunError(
            f"{folder} is a run of {recorded}, and {task_file} is no file: name the run's own, FILE.py:NAME."
        )
    if file is not None and file[0].is_file():
        folder.require_task_file(task_file, file_sha256(file[0]))  # before it is run
    return task_file


def _require_nothing_else(*options: object) -> None:
    if any(options):
        raise RunError(
            "--resume takes everything from the run's folder: leave out TASK, --plan, --assign, --set and --out (a "
            "task that is a file is named by --task)."
        )


# --- training ---


def _train(request: _RunRequest, processes: Processes, output: Output) -> int:
    before = request.folder.summary() if request.folder.is_run else None
    is_over = before is not None and before.status != "stopped"
    if request.compile and not is_over:
        output.note("the first step compiles the model, which may take minutes.")
    if (
        request.plan is not None
        and request.execution is None
        and resolve_execution(request.plan, None).kind == "emulate"
    ):
        output.note(
            "the plan is emulated, which saves neither memory nor time: --execution packed saves memory, native time."
        )
    metric = request.task.metric.name
    several = processes.count > 1
    with (
        stop_on_signals(several) as stop_request,
        RunProgress(output.console, metric) as progress,
        own_code(request.task_source),
    ):
        summary = train(
            request.task,
            request.plan,
            folder=request.folder.path,
            execution=request.execution,
            device=request.device,
            compile=request.compile,
            checkpoint_every=request.checkpoint_every,
            measure_every=request.measure_every,
            task_source=request.task_source,
            plan_source=request.plan_source,
            on_progress=_until_closed(_with_alarms(progress, output), stop_request),
            stop=stop_request,
            processes=processes,
        )
    output.document(_record(request, summary))
    if is_over:
        output.note(f"{request.folder} holds this run already, {summary.status}: nothing was trained.")
    if not output.as_json:
        output.console.print(summary_sentence(request, summary))
    if summary.status == "finished":
        return 0
    if summary.status == "diverged":
        output.note(f"the run diverged: {summary.why}")
        return DIVERGED
    output.note(str(summary.why))
    return STOPPED + (stop_request.signal or 0)


def _until_closed(show: Callable[[Progress], None], stop_request: StopRequest) -> Callable[[Progress], None]:
    """A callback that stops the run, with a checkpoint, once nobody reads the output (``bitplan train ... | head``)."""

    def on_progress(now: Progress) -> None:
        try:
            show(now)
        except OutputClosed:
            stop_request.signal = CLOSED_OUTPUT - STOPPED

    return on_progress


def _with_alarms(show: Callable[[Progress], None], output: Output) -> Callable[[Progress], None]:
    """A callback that shows progress, and prints every new alarm as a remark."""
    reported: set[str] = set()

    def on_progress(now: Progress) -> None:
        if now.alarm is not None and now.alarm not in reported:
            reported.add(now.alarm)
            output.note(f"alarm: {now.alarm}")
        show(now)

    return on_progress


def _record(request: _RunRequest, summary: Summary) -> dict[str, Any]:
    run = request.folder.config()
    facts = {"task": run.task, "plan": run.plan, "seed": run.seed, "command": run.command}
    return {"folder": request.folder.path, **facts, **summary.to_dict()}


def summary_sentence(request: _RunRequest, summary: Summary) -> str:
    """The result of a run in a sentence."""
    metric = request.task.metric
    value = summary.metrics.get(metric.name)
    reached = "" if value is None else f"{metric.name} {value:.4f} (the trivial predictor: {metric.trivial:.4g}) "
    return (
        f"{request.task.name}, {request.plan_label}, seed {request.task.seed}: {reached}after {summary.step} steps in "
        f"{summary.seconds:.1f} s, {summary.cost.get('relative_to_fp32', math.nan):.1%} of FP32's bit operations, peak "
        f"{byte_text(summary.peak)}; all of it in {summary.folder}"
    )


@contextmanager
def own_code(task_source: str) -> Iterator[None]:
    """An error in a user's own task is reported in a sentence; -vv shows the traceback."""
    try:
        yield
    except BitplanError:
        raise
    except Exception as error:
        file = parse_file_name(task_source)
        if file is None:
            raise
        log.debug("the task failed", exc_info=error)
        raise TaskError(f"{task_source} failed in training: {describe_error(error, file[0])}") from error


@contextmanager
def warnings_as_notes(output: Output) -> Iterator[None]:
    """Print warnings of bitplan as remarks as they occur."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", BitplanWarning)
        showwarning = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
            if issubclass(category, BitplanWarning):
                output.note(str(message))
            else:
                showwarning(message, category, *rest, **more)

        warnings.showwarning = show
        yield


# --- dry run ---


def _describe(request: _RunRequest, sharding: Sharding, output: Output) -> None:
    settings = asdict(request.task.settings)
    with own_code(request.task_source):
        target = request.task.target()
        sites = explain(target.model, request.plan or Plan(), target.batch, target.loss)
        whole = estimate_cost(
            target.model, request.plan or Plan(), target.batch, target.loss, request.task.settings.all_steps
        )
    formats = Counter(
        (explanation.site.role, explanation.words or "as it is")
        for explanation in sites
        if explanation.site.role in ROLES or explanation.quantizer is not None
    )
    state = _state_of(request.folder)
    command = command_of(
        *(request.task, request.task_source, request.plan, request.plan_source),
        execution=request.execution,
        device=chosen_device(request.device),
        compile=request.compile,
        measure_every=request.measure_every,
        sharding=sharding,
    )
    output.document(
        {
            "dry_run": True,
            "task": request.task.name,
            "plan": None if request.plan is None else request.plan_label,
            "seed": request.task.seed,
            "settings": settings,
            "formats": [{"role": role, "format": name, "tensors": n} for (role, name), n in formats.items()],
            "cost": whole.to_dict(),
            "folder": request.folder.path,
            "state": state,
            "command": command,
        }
    )
    if output.as_json:
        return
    console = output.console
    execution = resolve_execution(request.plan, request.execution).kind
    console.print(
        f"{request.task.name}, {request.plan_label}, seed {request.task.seed}, {execution} on {request.device}"
    )
    console.print("settings: " + ", ".join(f"{key}={value}" for key, value in settings.items()))
    table = FittedTable()
    for heading in ("role", "format"):
        table.add_column(heading)
    table.add_column("tensors", "number")
    for (role, name), number in formats.items():
        table.add_row(role, name, str(number))
    table.print(console)
    console.print(f"cost: {whole.gbitops:,.1f} GBitOPs, {whole.relative:.1%} of FP32's")
    console.print(f"folder: {request.folder} ({state})")
    console.print(f"command: {command}", soft_wrap=True)  # to be copied


def _state_of(folder: RunFolder) -> str:
    if not folder.is_run:
        return "new"
    status = folder.status()
    checkpoints = checkpoints_in(folder.checkpoints)
    if status in ("stopped", "unfinished"):
        return f"{status}, would go on from step {checkpoints[0].step if checkpoints else 0}"
    return str(status)


# --- progress: one moving line on a terminal, lines that stay where the output is piped


#: Lines of a run in piped output, beside those of its evaluations.
_LINES = 10


class RunProgress:
    """Shows the progress that ``train(on_progress=...)`` reports."""

    def __init__(self, console: Console, metric: str, label: str = "") -> None:
        self.console = console
        self.metric = metric
        self.label = printable(label)
        self._last: Progress | None = None
        self._bar: Bar | None = None
        if console.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(bar_width=8),
                MofNCompleteColumn(),
                TextColumn("{task.fields[status]}"),
                TimeRemainingColumn(compact=True),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task(self.label, total=None, status="")

    def __enter__(self) -> RunProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, now: Progress) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=now.step, total=now.steps, status=progress_text(now, self.metric))
        elif self._is_worth_a_line(now):
            start = f"{self.label}: " if self.label else ""
            self.console.print(f"{start}step {now.step}/{now.steps}: {progress_text(now, self.metric)}")
        self._last = now

    def _is_worth_a_line(self, now: Progress) -> bool:
        before = self._last
        if now.phase != "training":
            return now.phase == "searching" and (before is None or before.phase != "searching")
        was_evaluating = before is not None and before.phase == "evaluating"
        return was_evaluating or now.step == 1 or now.step % max(1, now.steps // _LINES) == 0


def progress_text(now: Progress, metric: str) -> str:
    """Loss, metric, bits, cost (of the whole run in FP32) and peak memory, short enough for 80 columns."""
    if now.phase == "searching":
        return "the loss is not finite; looking for what broke first"
    parts = [] if now.loss is None else [f"loss {now.loss:.3f}"]
    parts += [] if now.metric is None else [f"{metric} {now.metric:.3f}"]
    parts += [f"{now.promoted} promoted"] if now.promoted else []
    parts += [f"{now.bits:.3g} bits", f"cost {now.cost:.1%}", byte_text(now.peak)]
    parts += [] if now.error is None else [f"error {now.error:.1e}"]
    return ", ".join(parts)
