"""``bitplan train``: one run of a task, in a folder of its own."""

from __future__ import annotations

import logging
import shlex
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from bitplan.analysis.cost import estimate_cost
from bitplan.analysis.explain import explain
from bitplan.analysis.targets import file_sha256, in_words, named_file, running
from bitplan.cli.arguments import complete_plan
from bitplan.cli.assign import FormatsOption, OrderOption
from bitplan.cli.output import JsonOption, Output, command_output
from bitplan.cli.run_progress import RunProgress
from bitplan.errors import BitplanError, BitplanWarning, RunError, TaskError
from bitplan.files import byte_text
from bitplan.lab.task_planners import AssignWords, assign_task
from bitplan.lab.tasks.registry import find_task, task_names
from bitplan.lab.tasks.task import Task
from bitplan.lab.train import Progress, RunFolder, Summary, fresh_folder, train
from bitplan.lab.train.checkpoint import checkpoints_in
from bitplan.lab.train.config import command_of, plan_name
from bitplan.lab.train.loop import chosen_device, stop_on_signals
from bitplan.planners.assign.assign import LOSS_SCALE
from bitplan.plans import ROLES, Plan
from bitplan.plans.loading import find_plan

log = logging.getLogger("bitplan")

#: Exit codes: of a run that diverged, and what the number of a signal is added to, as shells do.
DIVERGED = 1
STOPPED = 128


def register(app: typer.Typer) -> None:
    app.command("train")(train_command)


def _complete_task(incomplete: str) -> list[str]:
    return [name for name in task_names() if name.startswith(incomplete)]


def train_command(
    task: Annotated[
        str | None,
        typer.Argument(
            metavar="TASK",
            help="A task such as digits, or my_task.py:MyTask, a file that is run: name only those that you trust.",
            autocompletion=_complete_task,
            show_default=False,
        ),
    ] = None,
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
    execution: Annotated[str, typer.Option(help="How the plan is carried out.")] = "emulate",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")] = "cpu",
    compile: Annotated[bool, typer.Option("--compile", help="Run training steps through torch.compile.")] = False,
    seed: Annotated[int, typer.Option(help="Of weights, data and random rounding.")] = 0,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the task's recipe; repeatable.")
    ] = None,
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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run, and do not.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train TASK, under a plan if one is given, and keep everything in a run folder.

    The same command with the same --out goes on with a run that was stopped or killed, bit for bit. Ctrl-C stops after
    the current step. Exit code 1: the run diverged. With --json: one object, what came of it.
    """
    with command_output(as_json) as output, _warnings_as_notes(output):
        of_assign = order != "largest" or formats is not None or promotion is not None
        if resume is not None:
            _require_nothing_else(task, plan, settings, out, assign, of_assign, loss_scale is not None)
            asked = _Asked.from_folder(resume, task_file, checkpoint_every)
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
            words = None if assign is None else AssignWords(assign, order, formats, promotion)
            recipe = _with_loss_scale(settings or [], loss_scale, words)
            made = find_task(task, recipe, seed)
            found = None if plan is None else find_plan(plan)
            if words is not None:
                plan, found = words.source, _assigned(words, made, task, compile, device, output)
            name = None if found is None else plan_name(found, plan)
            folder = out or fresh_folder(made.name, name, seed)
            asked = _Asked(
                *(made, task, found, plan, folder, execution, device, compile, checkpoint_every, measure_every)
            )
        if dry_run:
            _describe(asked, output)
            return
        code = _train(asked, output)
    if code:
        raise typer.Exit(code)


def _with_loss_scale(settings: list[str], given: float | None, words: AssignWords | None) -> list[str]:
    """The recipe with its loss scale: the one given, or the paper's where the formats want one and none is said."""
    said = any(setting.partition("=")[0].strip() == "loss_scale" for setting in settings)
    if given is not None:
        if said:
            raise RunError("the loss scale is given twice: drop --set loss_scale or --loss-scale.")
        return [*settings, f"loss_scale={given:g}"]
    wanted = words is not None and words.what != "fp32" and words.chosen_formats().wants_loss_scale
    return [*settings, f"loss_scale={LOSS_SCALE:g}"] if wanted and not said else settings


def _assigned(words: AssignWords, task: Task, source: str, compile: bool, device: str, output: Output) -> Plan:
    with running(source):
        found = assign_task(
            *(task, words.asked(task.seed), words.chosen_formats()),
            compile=compile,
            device=chosen_device(device),
            tell=output.note,
        )
    output.note(f"{found.name}: {found.plan.description}")
    return found.plan


class _Asked:
    """A run as it was asked for."""

    def __init__(
        self,
        task: Task,
        task_source: str,
        plan: Plan | None,
        plan_source: str | None,
        folder: Path,
        execution: str,
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
    def from_folder(cls, folder: Path, task_file: str | None, checkpoint_every: int | None) -> _Asked:
        place = RunFolder(folder)
        known = place.config()
        task_source = _task_to_resume(place, known.task_source, task_file)
        # What words cannot give is what the task's own file says.
        settings = [f"{key}={value}" for key, value in known.settings.items() if isinstance(value, (str, int, float))]
        task = find_task(task_source, settings, known.seed)
        return cls(
            *(task, task_source, place.plan(), known.plan_source, folder),
            *(known.execution, known.device, known.compile, checkpoint_every, known.measure_every),
        )

    @property
    def plan_words(self) -> str:
        return "no plan" if self.plan is None else plan_name(self.plan, self.plan_source)


def _task_to_resume(folder: RunFolder, recorded: str, named: str | None) -> str:
    """What names the task of a run that goes on: the run's record a built-in one, and only the user a file.

    Whoever made the folder wrote the record, and a file that is named is run.
    """
    is_built_in = recorded in task_names()
    if named is None:
        if is_built_in:
            return recorded
        is_file = named_file(recorded) is not None
        raise RunError(
            f"{folder} is a run of {recorded}, which {'is a file' if is_file else 'does not come with bitplan'}, and a "
            f"run folder does not choose code to run: if you trust the task's file, name it, as in "
            f"bitplan train --resume {shlex.quote(str(folder))} --task "
            f"{shlex.quote(recorded) if is_file else 'FILE.py:NAME'}"
        )
    if is_built_in and named != recorded:
        raise RunError(f"{folder} is a run of {recorded}, which comes with bitplan: leave out --task.")
    file = named_file(named)
    if file is None and not is_built_in:
        raise RunError(f"{folder} is a run of {recorded}, and {named} is no file: name the run's own, FILE.py:NAME.")
    if file is not None and file[0].is_file():
        folder.require_task_file(named, file_sha256(file[0]))  # before it is run
    return named


def _require_nothing_else(*given: object) -> None:
    if any(given):
        raise RunError(
            "--resume takes everything from the run's folder: leave out TASK, --plan, --assign, --set and --out (a "
            "task that is a file is named by --task)."
        )


# --- training ---


def _train(asked: _Asked, output: Output) -> int:
    before = asked.folder.summary() if asked.folder.is_run else None
    is_over = before is not None and before.status != "stopped"
    if asked.compile and not is_over:
        output.note("the first step compiles the model, which may take minutes.")
    metric = asked.task.metric.name
    with stop_on_signals() as request, RunProgress(output.console, metric) as progress, _own_code(asked):
        summary = train(
            asked.task,
            asked.plan,
            folder=asked.folder.path,
            execution=asked.execution,
            device=asked.device,
            compile=asked.compile,
            checkpoint_every=asked.checkpoint_every,
            measure_every=asked.measure_every,
            task_source=asked.task_source,
            plan_source=asked.plan_source,
            on_progress=_with_alarms(progress, output),
            stop=request,
        )
    output.document(_record(asked, summary))
    if is_over:
        output.note(f"{asked.folder} holds this run already, {summary.status}: nothing was trained.")
    if not output.as_json:
        output.console.print(summary_words(asked, summary), soft_wrap=True)
    if summary.status == "finished":
        return 0
    if summary.status == "diverged":
        output.note(f"the run diverged: {summary.why}")
        return DIVERGED
    output.note(str(summary.why))
    return STOPPED + (request.signal or 0)


def _with_alarms(show: Callable[[Progress], None], output: Output) -> Callable[[Progress], None]:
    """What shows progress, and every new alarm as a remark."""
    told: set[str] = set()

    def on_progress(now: Progress) -> None:
        if now.alarm is not None and now.alarm not in told:
            told.add(now.alarm)
            output.note(f"alarm: {now.alarm}")
        show(now)

    return on_progress


def _record(asked: _Asked, summary: Summary) -> dict[str, Any]:
    run = asked.folder.config()
    facts = {"task": run.task, "plan": run.plan, "seed": run.seed, "command": run.command}
    return {"folder": asked.folder.path, **facts, **summary.to_dict()}


def summary_words(asked: _Asked, summary: Summary) -> str:
    """What came of a run, in a sentence."""
    metric = asked.task.metric
    value = summary.metrics.get(metric.name)
    reached = "" if value is None else f"{metric.name} {value:.4f} (the trivial predictor: {metric.trivial:.4g}) "
    return (
        f"{asked.task.name}, {asked.plan_words}, seed {asked.task.seed}: {reached}after {summary.step} steps in "
        f"{summary.seconds:.1f} s, {summary.cost['relative_to_fp32']:.1%} of FP32's bit operations, peak "
        f"{byte_text(summary.peak)}; all of it in {summary.folder}"
    )


@contextmanager
def _own_code(asked: _Asked) -> Iterator[None]:
    """What goes wrong in a user's own task is told in a sentence; -vv shows the rest."""
    try:
        yield
    except BitplanError:
        raise
    except Exception as error:
        named = named_file(asked.task_source)
        if named is None:
            raise
        log.debug("the task failed", exc_info=error)
        raise TaskError(f"{asked.task_source} failed in training: {in_words(error, named[0])}") from error


@contextmanager
def _warnings_as_notes(output: Output) -> Iterator[None]:
    """bitplan's warnings as remarks, when they come."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", BitplanWarning)
        shown = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
            if issubclass(category, BitplanWarning):
                output.note(str(message))
            else:
                shown(message, category, *rest, **more)

        warnings.showwarning = show
        yield


# --- what would run ---


def _describe(asked: _Asked, output: Output) -> None:
    settings = asdict(asked.task.settings)
    with _own_code(asked):
        target = asked.task.target()
        sites = explain(target.model, asked.plan or Plan(), target.batch, target.loss)
        whole = estimate_cost(
            target.model, asked.plan or Plan(), target.batch, target.loss, asked.task.settings.all_steps
        )
    formats = Counter(
        (each.site.role, each.words or "as it is")
        for each in sites
        if each.site.role in ROLES or each.quantizer is not None
    )
    state = _state_of(asked.folder)
    command = command_of(
        *(asked.task, asked.task_source, asked.plan_source),
        execution=asked.execution,
        device=chosen_device(asked.device),
        compile=asked.compile,
        measure_every=asked.measure_every,
    )
    output.document(
        {
            "dry_run": True,
            "task": asked.task.name,
            "plan": None if asked.plan is None else asked.plan_words,
            "seed": asked.task.seed,
            "settings": settings,
            "formats": [{"role": role, "format": name, "tensors": n} for (role, name), n in formats.items()],
            "cost": whole.to_dict(),
            "folder": asked.folder.path,
            "state": state,
            "command": command,
        }
    )
    if output.as_json:
        return
    console = output.console
    console.print(f"{asked.task.name}, {asked.plan_words}, seed {asked.task.seed}, {asked.execution} on {asked.device}")
    console.print("settings: " + ", ".join(f"{key}={value}" for key, value in settings.items()), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("role", "format"):
        table.add_column(heading, no_wrap=True)
    table.add_column("tensors", justify="right")
    for (role, name), number in formats.items():
        table.add_row(role, name, str(number))
    console.print(table)
    console.print(f"cost: {whole.gbitops:,.1f} GBitOPs, {whole.relative:.1%} of FP32's")
    console.print(f"folder: {asked.folder} ({state})", soft_wrap=True)
    console.print(f"command: {command}", soft_wrap=True)


def _state_of(folder: RunFolder) -> str:
    if not folder.is_run:
        return "new"
    status = folder.status()
    known = checkpoints_in(folder.checkpoints)
    if status in ("stopped", "unfinished"):
        return f"{status}, would go on from step {known[0].step if known else 0}"
    return str(status)
