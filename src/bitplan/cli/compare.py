"""``bitplan compare`` and ``demo``: a task, or a training function, under several plans and seeds."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from bitplan.cli.arguments import (
    ClusterOption,
    ExecutionOption,
    GpusPerRunOption,
    TaskArgument,
    TaskSettingsOption,
    chosen_cluster,
    complete_plan,
    is_plan,
)
from bitplan.cli.output import JsonOption, Output, command_output, make_folder
from bitplan.cli.runs import MarginOption, print_experiment, write_page
from bitplan.cli.schedules import GradientBitsOption, PeriodOption, read_bits
from bitplan.cli.train import STOPPED
from bitplan.cluster import Cluster
from bitplan.errors import RunError
from bitplan.lab.compare import SUITES, Choice, SuiteOptions, Update, compare, find_suite
from bitplan.lab.compare.compare import choices_of, slug
from bitplan.lab.compare.functions import compare_function, load_function, names_function
from bitplan.lab.compare.suite_options import read_names, read_shares, read_widths
from bitplan.lab.report.answer import counted, listed, number_text
from bitplan.lab.report.figures import plotly
from bitplan.lab.report.summaries import MARGIN, Report, checked_margin
from bitplan.lab.report.tables import report_record
from bitplan.lab.tasks.registry import find_task
from bitplan.lab.tasks.task import Metric
from bitplan.lab.train import Summary
from bitplan.lab.train.folder import DEFAULT_PARENT
from bitplan.lab.train.loop import stop_on_signals
from bitplan.lab.train.record import metric_named
from bitplan.machine import cores


def register(app: typer.Typer) -> None:
    app.command("compare")(compare_command)
    app.command("demo")(demo)


# --- compare


def _complete_suite(incomplete: str) -> list[str]:
    return [name for name in SUITES if name.startswith(incomplete)]


_SUITES_HELP = "; ".join(f"{suite.name} ({suite.description})" for suite in SUITES.values())


def compare_command(
    task: TaskArgument,
    # An option takes one value: further plans behind --plans arrive as arguments.
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
            help=f"Plans that belong together: {_SUITES_HELP}; or those of a planner of your own, file.py:function, "
            "which is executed.",
            autocompletion=_complete_suite,
            show_default=False,
        ),
    ] = None,
    bits: Annotated[
        str | None,
        typer.Option(metavar="LOW-HIGH", help="Of cpt and deficits: the range of bits (3-8).", show_default=False),
    ] = None,
    cycles: Annotated[int | None, typer.Option(min=1, help="Of cpt: cycles (8).", show_default=False)] = None,
    static: Annotated[
        str | None, typer.Option(metavar="8,6", help="Of cpt: widths of static controls.", show_default=False)
    ] = None,
    schedules: Annotated[
        str | None, typer.Option(metavar="CR,RR", help="Of cpt: some of the ten schedules.", show_default=False)
    ] = None,
    period: PeriodOption = None,
    gradient_bits: GradientBitsOption = None,
    quantized_aggregation: Annotated[
        bool, typer.Option("--quantized-aggregation", "--q-agg", help="Of cpt and deficits, as of bitplan plan cpt.")
    ] = False,
    as_published: Annotated[
        bool, typer.Option("--as-published", help="Of cpt and deficits, as of bitplan plan cpt.")
    ] = False,
    ratios: Annotated[
        str | None,
        typer.Option(
            metavar="0.3,0.5", help="Of assign: shares of values in low precision, or tenths.", show_default=False
        ),
    ] = None,
    orders: Annotated[
        str | None,
        typer.Option(
            metavar="largest,smallest,random", help="Of assign: orders of the groups (largest).", show_default=False
        ),
    ] = None,
    promotions: Annotated[
        str | None,
        typer.Option(metavar="0.01,0", help="Of assign: thresholds of promotion; 0: none.", show_default=False),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from 0 on.")] = 1,
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", min=1, help="Processes side by side, which share the cores.")
    ] = 1,
    cluster: ClusterOption = None,
    gpus_per_run: GpusPerRunOption = None,
    settings: TaskSettingsOption = None,
    execution: ExecutionOption = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")] = "cpu",
    compile: Annotated[bool, typer.Option("--compile", help="Run training steps through torch.compile.")] = False,
    metric: Annotated[
        str | None,
        typer.Option(help="Of file.py:train: the figure to judge by (default: its first).", show_default=False),
    ] = None,
    better: Annotated[
        str | None,
        typer.Option(help="higher or lower: which is better (default: by the metric's name).", show_default=False),
    ] = None,
    margin: MarginOption = MARGIN,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="The comparison's folder (default: one in runs/)."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train TASK under several plans, with several seeds each, and compare the results.

    TASK may also be file.py:train, a function of a plan and a seed that returns its metrics; each call has a process.
    Finished runs are not repeated: after Ctrl-C the same command continues. A plan that fails is a result, too, and
    the exit code is 0. With --json: one object, as of bitplan report.
    """
    with command_output(as_json) as output:
        options = SuiteOptions(
            bits=None if bits is None else read_bits(bits),
            cycles=cycles,
            static=read_widths(static),
            gradient_bits=gradient_bits,
            period=period,  # type: ignore[arg-type]  # checked there
            schedules=None if schedules is None else read_names(schedules.upper()),
            quantized_aggregation=quantized_aggregation or None,
            as_published=as_published or None,
            ratios=read_shares(ratios),
            orders=read_names(orders),
            promotions=read_shares(promotions),
        )
        judged_by = _metric(metric, better)
        comparison = Comparison(task, tuple(settings or ()), execution, device, compile, options, judged_by)
        plan_names = [*(plans or ()), *(more_plans or ())]
        workers = chosen_cluster(cluster, gpus_per_run, device)
        report, code = run_comparison(comparison, suite, plan_names, seeds, out, jobs, output, workers, margin)
        output.document({} if report is None else report_record(report))
        if code == 0 and not as_json:
            assert report is not None
            folder = comparison.folder(suite, plan_names, out)
            option = "" if margin == MARGIN else f" --margin {margin:g}"
            output.console.print(f"The runs are in {folder}. A page about them:")
            output.console.print(f"bitplan report {shlex.quote(str(folder))}{option}", soft_wrap=True)  # to be copied
    if code:
        raise typer.Exit(code)


@dataclass(frozen=True)
class Comparison:
    """The options that all runs of a comparison share."""

    task: str
    settings: tuple[str, ...] = ()
    execution: str | None = None
    device: str = "cpu"
    compile: bool = False
    options: SuiteOptions = field(default_factory=SuiteOptions)
    #: Of a training function; None: the first figure that it returns.
    metric: Metric | None = None

    @cached_property
    def is_of_function(self) -> bool:
        """Whether a function is compared, ``file.py:train``; raises for options that only tasks have."""
        if not names_function(self.task):
            if self.metric is not None:
                raise RunError(f"{self.task} has a metric of its own: --metric and --better are of file.py:train.")
            return False
        own = {"--set": self.settings, "--execution": self.execution, "--compile": self.compile}
        wrong = [name for name, value in {**own, "--device": self.device != "cpu"}.items() if value]
        if wrong:
            raise RunError(f"{self.task} is a function, which decides that itself: leave out {wrong[0]}.")
        return True

    def folder(self, suite: str | None, plans: Sequence[str], out: Path | None) -> Path:
        """The comparison's folder: the same for the same comparison, whatever the number of seeds.

        >>> str(Comparison("digits", ("steps=200",)).folder("static", (), None))
        'runs/compare-digits-static-steps=200'
        """
        if out is not None:
            return out
        special = [] if self.execution in (None, "emulate") else [self.execution]
        special += [self.device] * (self.device != "cpu")
        special += ["compiled"] * self.compile
        task = Path(self.task.partition(":")[0]).stem
        variant = suite or "-".join(slug(choice.label) for choice in choices_of(plans))[:60]
        parts = [variant, *map(slug, self.options.labels), *map(slug, self.settings), *map(slug, special)]
        return DEFAULT_PARENT / "-".join(["compare", task, *parts])

    def command(self, suite: str | None, plans: Sequence[str], seeds: int, out: Path | None) -> str:
        """The command that repeats the comparison."""
        arguments = ["bitplan", "compare", self.task]
        arguments += ["--plans", *plans] if suite is None else ["--suite", suite, *self.options.arguments]
        arguments += ["--seeds", str(seeds)]
        for setting in self.settings:
            arguments += ["--set", setting]
        if self.metric is not None:
            arguments += ["--metric", self.metric.name, "--better", self.metric.better]
        if self.execution is not None:
            arguments += ["--execution", self.execution]
        if self.device != "cpu":
            arguments += ["--device", self.device]
        arguments += ["--compile"] * self.compile
        arguments += [] if out is None else ["--out", str(out)]
        return shlex.join(arguments)


def _metric(name: str | None, better: str | None) -> Metric | None:
    if name is None and better is not None:
        raise RunError("--better is of a --metric: give that, too.")
    return None if name is None else metric_named(name, better)


def _choices(comparison: Comparison, plans: Sequence[str], suite: str | None) -> list[Choice]:
    if is_plan(comparison.task):
        raise RunError(f"{comparison.task} is a plan: name a task first, as in digits --plans fp32 {comparison.task}.")
    if suite is not None and plans:
        raise RunError("give --plans or --suite, not both.")
    if suite is not None:
        if comparison.is_of_function and find_suite(suite).make is not None:
            load_function(comparison.task)  # raises for a function that cannot train
            raise RunError(
                f"the plans of {suite} are made for a task, and {comparison.task} is a function: give --plans."
            )
        return find_suite(suite).choices_for(
            lambda: find_task(comparison.task, comparison.settings), comparison.options
        )
    if comparison.options.chosen:
        option = comparison.options.arguments[0]
        raise RunError(f"{option} is an option of a suite: give --suite, too, or drop {option}.")
    if not plans:
        raise RunError(f"name what to compare: --plans with files or presets, or --suite {' or '.join(SUITES)}.")
    return choices_of(plans)


def run_comparison(
    comparison: Comparison,
    suite: str | None,
    plans: Sequence[str],
    seeds: int,
    out: Path | None,
    jobs: int,
    output: Output,
    cluster: Cluster | None = None,
    margin: float = MARGIN,
) -> tuple[Report | None, int]:
    """Run a comparison and print its table; the report, if any run is over, and the exit code."""
    checked_margin(margin)
    choices = _choices(comparison, plans, suite)
    folder = comparison.folder(suite, plans, out)
    if cluster is not None and comparison.is_of_function:
        raise RunError(f"{comparison.task} is a function, which runs on this machine: leave out --cluster.")
    total = len(choices) * seeds
    command = comparison.command(suite, plans, seeds, out)
    with stop_on_signals() as request, CompareProgress(output.console, total) as progress:
        if comparison.is_of_function:
            summaries = compare_function(
                comparison.task,
                choices,
                folder=folder,
                seeds=range(seeds),
                metric=comparison.metric,
                jobs=jobs,
                command=command,
                on_update=progress,
                stop=request,
            )
        else:
            summaries = compare(
                comparison.task,
                choices,
                folder=folder,
                seeds=range(seeds),
                settings=comparison.settings,
                jobs=jobs,
                cluster=cluster,
                execution=comparison.execution,
                device=comparison.device,
                compile=comparison.compile,
                command=command,
                on_update=progress,
                stop=request,
            )
    report = Report.of([folder], margin) if summaries else None
    if report is not None and not output.as_json:
        for experiment in report.experiments:
            print_experiment(experiment, output.console)
    if not request():
        return report, 0
    over = sum(summary.status != "stopped" for summary in summaries)
    output.note(f"stopped with {over} of {total} runs done: the same command continues.")
    return report, STOPPED + (request.signal or 0)


# --- progress: a bar for each run on a terminal, a line for each run where the output is piped


class CompareProgress:
    """Shows the progress that ``compare(on_update=...)`` reports."""

    def __init__(self, console: Console, total: int) -> None:
        self.console = console
        self._bars: Bars | None = None
        self._lines: dict[tuple[str, int], TaskID] = {}
        self._done = 0
        self._total = total
        if console.is_terminal:
            self._bars = Bars(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[status]}"),
                TimeElapsedColumn(),
                console=console,
            )
            self._whole = self._bars.add_task("all runs", total=total, status="")

    def __enter__(self) -> CompareProgress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, update: Update) -> None:
        if update.summary is not None:
            self._done += 1
        if self._bars is not None:
            self._show(self._bars, update)
        elif update.summary is not None:
            result = _run_result(update.summary)
            name = f"{update.job.label}, seed {update.job.seed}"
            self.console.print(f"[{self._done}/{self._total}] {name}: {result}")

    def _show(self, bars: Bars, update: Update) -> None:
        """A bar for each running run; a finished one leaves a line above them."""
        job, now = update.job, update.progress
        key = (job.label, job.seed)
        name = f"{job.label}, seed {job.seed}"
        if update.summary is not None:
            if key in self._lines:
                bars.remove_task(self._lines.pop(key))
            bars.console.print(f"{name}: {_run_result(update.summary)}")
            bars.update(self._whole, completed=self._done)
            return
        assert now is not None
        if key not in self._lines:
            self._lines[key] = bars.add_task(name, total=now.steps or None, status="")
        figures = [] if now.loss is None else [f"loss {now.loss:.3f}"]
        figures += [] if now.metric is None else [f"metric {now.metric:.3f}"]
        if now.phase == "searching":
            figures = ["not finite; looking for what broke first"]
        bars.update(self._lines[key], completed=now.step, total=now.steps or None, status=", ".join(figures))


def _run_result(summary: Summary) -> str:
    """The result of a run in a few words, its metric first."""
    figures = [f"{name} {number_text(value)}" for name, value in summary.metrics.items()]
    ending = "" if summary.status == "finished" else f"{summary.status} at step {summary.step}; "
    return f"{ending}{', '.join(figures) or 'no figures'} ({summary.seconds:.1f} s)"


# --- demo


TASK = "digits"
SUITE = "static"
PAGE = "report.html"
#: Enough to tell the plans apart, and short enough to wait for.
SETTINGS = ("steps=200",)
#: Runs are small: a second thread would speed none of them up, a second process does.
MOST_JOBS = 4


def _by_key(settings: Iterable[str]) -> dict[str, str]:
    """Later settings replace earlier ones."""
    return {setting.partition("=")[0]: setting for setting in settings}


def demo(
    folder: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the runs and the page.")
    ] = Path("bitplan-demo"),
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from 0 on.")] = 3,
    settings: TaskSettingsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what low precision does to real training: handwritten digits in FP32, BF16, 8, 6, 4 and a failing 2 bits.

    Ends with the answer in a sentence and a page to open. After Ctrl-C the same command continues.
    """
    plotly()  # before minutes of training, not after
    with command_output(as_json) as output:
        comparison = Comparison(TASK, tuple({**_by_key(SETTINGS), **_by_key(settings or ())}.values()))
        jobs = min(cores(), MOST_JOBS)
        make_folder(folder)
        names = [choice.label for choice in find_suite(SUITE).choices]
        output.console.print(
            f"Training {TASK} in {listed(names, len(names))}, {counted(seeds, 'seed')} each, {jobs} at a time: "
            "this takes a few minutes."
        )
        report, code = run_comparison(comparison, SUITE, (), seeds, folder, jobs, output)
        output.document({} if report is None else {"page": folder / PAGE, **report_record(report)})
        if code == 0:
            assert report is not None
            page = folder / PAGE
            write_page(report, page)
            if not as_json:
                output.console.print(f"Open this page to see it: {page.resolve()}")
    if code:
        raise typer.Exit(code)
