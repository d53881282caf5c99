"""``bitplan auto``: find a plan that meets limits for memory, time and loss, measured and verified on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from bitplan.analysis.memory.step import OPTIMIZER_NAMES
from bitplan.analysis.targets import batch_size, find_function, move_target, target_errors
from bitplan.cli.arguments import ClusterOption, GpusPerRunOption, SettingsOption, TargetArgument, chosen_cluster
from bitplan.cli.output import FittedTable, JsonOption, Output, command_output
from bitplan.errors import MemoryEstimateError, PlanError, nearest_names
from bitplan.files import byte_text
from bitplan.lab.targets import load_target_and_task
from bitplan.lab.train.loop import chosen_device
from bitplan.planners.assign.budget import Budget
from bitplan.planners.auto import AutoResult, Limits, LocalTrials, Problem, ProcessTrials, search
from bitplan.planners.auto.cluster_trials import ClusterTrials
from bitplan.planners.auto.trials import Trials
from bitplan.planners.registry import registry

#: Precisions of autocast by name.
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: The exit status where the plan does not meet the limits.
NOT_MET = 1


def register(app: typer.Typer) -> None:
    app.command("auto")(auto_command)


def auto_command(
    target: TargetArgument,
    memory: Annotated[
        str | None,
        typer.Option(help="What the peak of a training step may be: 8GiB, or 50% of the peak without a plan."),
    ] = None,
    slowdown: Annotated[
        float | None, typer.Option(help="What a step may take, in multiples of the time without a plan.")
    ] = None,
    loss_gap: Annotated[
        float | None,
        typer.Option(help="How much larger the final loss may be (default: as much as seeds change it, or 1 %)."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    batch: Annotated[int | None, typer.Option(min=1, help="Samples a step, if not the target's own number.")] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="sgd, adamw or none; by default a task's own, and none for other targets.")
    ] = None,
    compile: Annotated[
        bool | None, typer.Option("--compile/--eager", help="Plans for the compiled model (default: on a GPU).")
    ] = None,
    autocast: Annotated[str | None, typer.Option(help="bf16 or fp16.")] = None,
    steps: Annotated[
        int | None, typer.Option(min=0, help="Training steps of the verification (default: up to 200); 0: none.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of the verification.")] = 3,
    jobs: Annotated[
        int, typer.Option(min=1, help="Candidates that are compiled at a time, each in a process of its own.")
    ] = 1,
    cluster: ClusterOption = None,
    gpus_per_run: GpusPerRunOption = None,
    planners: Annotated[
        list[str] | None,
        typer.Option(
            "--planner",
            metavar="NAME",
            help="A planner of your own, whose plans are tried, too: a registered name, or file.py:function, which is "
            "executed; repeatable.",
        ),
    ] = None,
    settings: SettingsOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the plan there (default: print it).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find a plan for TARGET: formats, execution and recomputation, measured on this machine and verified by training.

    Without limits: the plan with the best product of memory and time; the table also names the fastest and the
    smallest. Where the limits cannot be met, the nearest plan is written and the exit status is 1. Ctrl-C returns the
    best so far. With --json: one object, everything that was tried and the plan.
    """
    with command_output(as_json) as output:
        limits = Limits(None if memory is None else Budget.parse(memory), slowdown, loss_gap)
        if optimizer is not None and optimizer not in OPTIMIZER_NAMES:
            raise MemoryEstimateError(
                f"there is no optimizer {optimizer!r} here; {nearest_names(optimizer, OPTIMIZER_NAMES)}"
            )
        if autocast is not None and autocast not in _AUTOCAST:
            raise MemoryEstimateError(f"there is no autocast {autocast!r}; {nearest_names(autocast, _AUTOCAST)}")
        is_compiled = chosen_device(device).type == "cuda" if compile is None else compile
        arguments = (target, tuple(settings or ()), device, batch, optimizer, is_compiled, autocast)
        problem = load_problem(*arguments)
        workers = chosen_cluster(cluster, gpus_per_run, device)
        if workers is not None and jobs > 1:
            raise PlanError("a cluster has as many candidates at a time as it has room for: drop --jobs or --cluster.")
        own = [find_function(name, registry) for name in planners or ()]
        with target_errors(target), _progress(output) as report:
            trials: Trials
            if workers is not None:
                trials = ClusterTrials(load_problem, arguments, workers)
            else:
                trials = LocalTrials(problem) if jobs == 1 else ProcessTrials(load_problem, arguments, jobs)
            result = search(problem, limits, trials, steps=steps, seeds=seeds, planners=own, report=report)
        output.document({"target": target, "batch": batch_size(problem.target.batch), **result.to_dict()})
        if out is not None:
            result.save(out)
        if not as_json:
            _print(result, output)
            if out is None:
                typer.echo(result.plan.to_yaml(), nl=False)
        if out is not None:
            output.note(f"wrote {out}.")
    if not result.meets_limits:
        raise typer.Exit(NOT_MET)


def load_problem(
    source: str,
    settings: Sequence[str],
    device: str,
    batch: int | None,
    optimizer: str | None,
    compile: bool,
    autocast: str | None,
) -> Problem:
    """The training step that a target's name stands for; a task brings its data and its optimizer."""
    torch.manual_seed(0)
    where = chosen_device(device)
    made, task = load_target_and_task(source, settings=settings)
    target = move_target(made, where, batch)
    precision = None if autocast is None else _AUTOCAST[autocast]
    if task is None:
        return Problem(target, None if optimizer == "none" else optimizer, None, compile, precision)
    make: Any = task.optimizer if optimizer is None else None if optimizer == "none" else optimizer
    data: Callable[[int], Any] | None = task.batch if batch is None else None
    return Problem(target, make, data, compile, precision)


@contextmanager
def _progress(output: Output) -> Iterator[Callable[[str], None]]:
    """What the search is doing: a line with a clock on a terminal, otherwise a line for each part."""
    if not output.console.is_terminal:
        yield output.note
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=output.console, transient=True) as progress:
        line = progress.add_task("searching", total=None)

        def report(sentence: str) -> None:
            progress.update(line, description=sentence)

        yield report


def _print(result: AutoResult, output: Output) -> None:
    table = FittedTable()
    table.add_column("candidate", "text")
    table.add_column("peak", "number")
    table.add_column("ms/step", "number")
    table.add_column("loss gap", "number", is_optional=True)
    table.add_column("predicted", "number", is_optional=True)
    table.add_column("verdict", "text")
    for row in result.rows:
        trial = row.trial
        table.add_row(
            row.name,
            "-" if trial is None else byte_text(trial.peak),
            "-" if trial is None else f"{trial.milliseconds:.2f}",
            "-" if row.loss_gap is None else f"{row.loss_gap.gap:+.4f}",
            "-" if row.predicted_peak is None else byte_text(row.predicted_peak),
            row.verdict,
        )
    table.print(output.console)
    output.console.print(result.summary)
    if result.picks:
        output.console.print("; ".join(f"{pick}: {name}" for pick, name in result.picks.items()) + ".")
