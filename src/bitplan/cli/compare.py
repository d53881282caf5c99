"""``bitplan compare``: a task under several plans and seeds."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from bitplan.cli.arguments import complete_plan
from bitplan.cli.compare_progress import CompareProgress
from bitplan.cli.output import JsonOption, Output, command_output
from bitplan.cli.report import print_experiment
from bitplan.cli.train import STOPPED
from bitplan.errors import RunError
from bitplan.lab.compare import SUITES, Choice, compare, find_suite
from bitplan.lab.compare.compare import choices_of, slug
from bitplan.lab.report.summaries import Report
from bitplan.lab.report.tables import report_record
from bitplan.lab.tasks.registry import find_task, task_names
from bitplan.lab.train.folder import DEFAULT_PARENT
from bitplan.lab.train.loop import stop_on_signals


def register(app: typer.Typer) -> None:
    app.command("compare")(compare_command)


def _complete_task(incomplete: str) -> list[str]:
    return [name for name in task_names() if name.startswith(incomplete)]


def _complete_suite(incomplete: str) -> list[str]:
    return [name for name in SUITES if name.startswith(incomplete)]


_SUITES_HELP = "; ".join(f"{suite.name} ({suite.description})" for suite in SUITES.values())


def compare_command(
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK",
            help="A task such as digits, or my_task.py:MyTask, a file that is run: name only those that you trust.",
            autocompletion=_complete_task,
            show_default=False,
        ),
    ],
    # An option takes one value: the words behind it arrive as arguments, and belong to it.
    more_plans: Annotated[
        list[str] | None,
        typer.Argument(metavar="PLAN", show_default=False, hidden=True, autocompletion=complete_plan),
    ] = None,
    plans: Annotated[
        list[str] | None,
        typer.Option(
            "--plans",
            metavar="PLAN...",
            help="Plans' files, presets, or fp32 for no plan at all.",
            autocompletion=complete_plan,
            show_default=False,
        ),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            help=f"Plans that belong together: {_SUITES_HELP}.", autocompletion=_complete_suite, show_default=False
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from 0 on.")] = 1,
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", min=1, help="Processes side by side, which share the cores.")
    ] = 1,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the task's recipe; repeatable.")
    ] = None,
    execution: Annotated[str, typer.Option(help="How plans are carried out.")] = "emulate",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")] = "cpu",
    compile: Annotated[bool, typer.Option("--compile", help="Run training steps through torch.compile.")] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="The comparison's folder (default: one in runs/)."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train TASK under several plans, with several seeds each, and compare what came of it.

    Runs that are over are not made again: after Ctrl-C the same command goes on. A plan that fails is a result, too,
    and the exit code is 0. With --json: one object, as of bitplan report.
    """
    with command_output(as_json) as output:
        asked = Asked(task, tuple(settings or ()), execution, device, compile)
        named = [*(plans or ()), *(more_plans or ())]
        report, code = run_comparison(asked, suite, named, seeds, out, jobs, output)
        output.document({} if report is None else report_record(report))
        if code == 0 and not as_json:
            assert report is not None
            place = asked.folder(suite, named, out)
            output.console.print(f"All of it is in {place}; draw it with: bitplan report {place}", soft_wrap=True)
    if code:
        raise typer.Exit(code)


@dataclass(frozen=True)
class Asked:
    """What all runs of a comparison share, as it was asked for."""

    task: str
    settings: tuple[str, ...] = ()
    execution: str = "emulate"
    device: str = "cpu"
    compile: bool = False

    def folder(self, suite: str | None, plans: Sequence[str], out: Path | None) -> Path:
        """Where it lies: the same folder for the same comparison, whatever the number of seeds.

        >>> str(Asked("digits", ("steps=200",)).folder("static", (), None))
        'runs/compare-digits-static-steps=200'
        """
        if out is not None:
            return out
        special = [self.execution] * (self.execution != "emulate") + [self.device] * (self.device != "cpu")
        special += ["compiled"] * self.compile
        task = Path(self.task.partition(":")[0]).stem
        what = suite or "-".join(slug(choice.label) for choice in choices_of(plans))[:60]
        return DEFAULT_PARENT / "-".join(["compare", task, what, *map(slug, self.settings), *map(slug, special)])

    def command(self, suite: str | None, plans: Sequence[str], seeds: int, out: Path | None) -> str:
        """What makes the comparison again."""
        words = ["bitplan", "compare", self.task]
        words += ["--plans", *plans] if suite is None else ["--suite", suite]
        words += ["--seeds", str(seeds)]
        for setting in self.settings:
            words += ["--set", setting]
        if self.execution != "emulate":
            words += ["--execution", self.execution]
        if self.device != "cpu":
            words += ["--device", self.device]
        words += ["--compile"] * self.compile
        words += [] if out is None else ["--out", str(out)]
        return shlex.join(words)


def _choices(asked: Asked, plans: Sequence[str], suite: str | None) -> list[Choice]:
    if suite is not None and plans:
        raise RunError("give --plans or --suite, not both.")
    if suite is not None:
        return find_suite(suite).choices_for(lambda: find_task(asked.task, asked.settings))
    if not plans:
        raise RunError(f"name what to compare: --plans with files or presets, or --suite {' or '.join(SUITES)}.")
    return choices_of(plans)


def run_comparison(
    asked: Asked, suite: str | None, plans: Sequence[str], seeds: int, out: Path | None, jobs: int, output: Output
) -> tuple[Report | None, int]:
    """Run it and show its table; what there is to report, and the exit code, are returned."""
    choices = _choices(asked, plans, suite)
    folder = asked.folder(suite, plans, out)
    total = len(choices) * seeds
    with stop_on_signals() as request, CompareProgress(output.console, total) as progress:
        summaries = compare(
            asked.task,
            choices,
            folder=folder,
            seeds=range(seeds),
            settings=asked.settings,
            jobs=jobs,
            execution=asked.execution,
            device=asked.device,
            compile=asked.compile,
            command=asked.command(suite, plans, seeds, out),
            on_update=progress,
            stop=request,
        )
    report = Report.of([folder]) if summaries else None
    if report is not None and not output.as_json:
        for experiment in report.experiments:
            print_experiment(experiment, output.console)
    if not request():
        return report, 0
    over = sum(summary.status != "stopped" for summary in summaries)
    output.note(f"stopped with {over} of {total} runs done: the same command goes on.")
    return report, STOPPED + (request.signal or 0)
