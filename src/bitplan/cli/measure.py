"""``bitplan measure`` and ``advise``: the rounding error of every GEMM of a model, and a plan made from it."""

from __future__ import annotations

import math
import shlex
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress
from rich.text import Text

from bitplan.analysis.measure import DEFAULT_CANDIDATES, Measurement, measure
from bitplan.analysis.measure.candidate import check_candidates
from bitplan.analysis.measure.pass_metrics import metric_registry
from bitplan.analysis.measure.result import Row
from bitplan.analysis.targets import find_function, parse_file_name, target_errors
from bitplan.capture.selectors import plan_for_model
from bitplan.cli.arguments import TargetArgument, TaskSettingsOption, complete_plan
from bitplan.cli.compare import CompareProgress
from bitplan.cli.output import FittedTable, JsonOption, Output, command_output, make_folder
from bitplan.cli.schedules import read_bits
from bitplan.errors import MetricError, TaskError
from bitplan.gemm.sampling import Sampling
from bitplan.lab.compare.verify import RIVALS, Verified, VerifiedAdvice, verified_advice, verify
from bitplan.lab.compare.verify import STEPS as VERIFY_STEPS
from bitplan.lab.report.heatmaps import MEASUREMENT_FILE
from bitplan.lab.targets import load_target
from bitplan.lab.tasks.registry import find_task, task_names
from bitplan.lab.tasks.task import Task
from bitplan.lab.train.loop import stop_on_signals
from bitplan.lab.train.stages import STAGES, STEPS, measure_task
from bitplan.planners.advise import TAU, UNSEEN, Advice, add_reference, advise_on
from bitplan.planners.assign.budget import Step
from bitplan.planners.combining import has_budget, keep_budget, widths_to_measure
from bitplan.plans import Plan
from bitplan.plans.loading import find_plan
from bitplan.plans.schedules import Schedule
from bitplan.plans.schedules import schedule as schedule_named


def register(app: typer.Typer) -> None:
    app.command("measure")(measure_command)
    app.command("advise")(advise_command)


# --- measure


StagesOption = Annotated[
    bool,
    typer.Option(
        "--stages", help="Of a task: measure early, in the middle and late in training, not early alone (10 %)."
    ),
]
StepsOption = Annotated[
    int | None,
    typer.Option(min=1, help=f"Steps that a task is trained for (default: at most {STEPS}).", show_default=False),
]
RowsOption = Annotated[int, typer.Option(min=1, help="Rows of each operand that are looked at.")]
TermsOption = Annotated[int, typer.Option(min=1, help="The most terms of a sum; longer ones are cut.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Of weights, data and the choice of rows.")]
CandidatesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--candidate",
        "-c",
        metavar="TEXT",
        help="Such as 'e4m3 tensor', 'e5m2/e4m3 vector' (left/right) or 'int8 vector stochastic-dy'; repeatable. "
        f"Default: {', '.join(map(str, DEFAULT_CANDIDATES))}.",
        show_default=False,
    ),
]


def measure_command(
    target: TargetArgument,
    stages: StagesOption = False,
    steps: StepsOption = None,
    candidates: CandidatesOption = None,
    plan: Annotated[
        str | None,
        typer.Option(
            "--plan",
            metavar="PLAN",
            help="Also measure the formats of a plan: a preset or a file.",
            autocompletion=complete_plan,
            show_default=False,
        ),
    ] = None,
    rows: RowsOption = Sampling.rows,
    terms: TermsOption = Sampling.terms,
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            metavar="NAME",
            help="An error metric of your own: a registered name, or file.py:function, which is executed; repeatable.",
        ),
    ] = None,
    settings: TaskSettingsOption = None,
    seed: SeedOption = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1; of tasks.")] = "cpu",
    file: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Also write all of it to a JSON file, or into a folder."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the backward error of every product of TARGET, forward and backward, in several formats.

    A task is trained a little first; a model is measured as it is made. Rows of each product are sampled. With --json:
    a list of objects with product, pass, candidate, stage, median, mean, p99, sqnr, underflow, overflow and more.
    """
    with command_output(as_json) as output:
        candidate_texts = tuple(map(str, check_candidates(candidates)))
        request = MeasureRequest(
            target, stages, steps, candidate_texts if candidates else None, rows, terms, tuple(settings or ()), seed
        )
        request.metrics = tuple(metrics or ())
        request.plan = plan
        measurement = request.measured(output, device)
        if file is not None:
            path = file / MEASUREMENT_FILE if file.is_dir() or not file.suffix else file
            make_folder(path.parent)
            measurement.save(path)
            output.note(f"wrote {path}: draw it with: bitplan report {path}")
        output.document([row.to_dict() for row in measurement.rows])
        if not as_json:
            _print_measurement(measurement, output)


class MeasureRequest:
    """A measurement as the command line describes it."""

    def __init__(
        self,
        target: str,
        stages: bool,
        steps: int | None,
        candidates: tuple[str, ...] | None,
        rows: int,
        terms: int,
        settings: tuple[str, ...],
        seed: int,
    ) -> None:
        #: Error metrics of the user's own.
        self.metrics: tuple[str, ...] = ()
        #: A plan whose formats are measured, too.
        self.plan: str | None = None
        self.target = target
        self.stages = stages
        self.steps = steps
        self.candidates = candidates
        self.rows = rows
        self.terms = terms
        self.settings = settings
        self.seed = seed

    def task(self) -> Task | None:
        """The task, if the target is one."""
        try:
            if self.target in task_names() or parse_file_name(self.target) is not None:
                return find_task(self.target, self.settings, self.seed)
        except TaskError:
            if self.target in task_names() or self.settings:
                raise
        return None

    def measured(self, output: Output, device: str = "cpu") -> Measurement:
        task = self.task()
        how: dict[str, Any] = {"plan": self.plan, "rows": self.rows, "terms": self.terms, "seed": self.seed}
        how["metrics"] = {_metric_name(name): find_function(name, metric_registry) for name in self.metrics}
        if task is None:
            self._require_no_training()
            torch.manual_seed(self.seed)
            target = load_target(self.target)
            with target_errors(self.target):
                measurement = measure(
                    target.model, [target.batch], target.loss, self.candidates, target=self.target, **how
                )
        else:
            is_terminal = output.console.is_terminal
            with Progress(console=output.console, transient=True, disable=not is_terminal) as progress:
                bar = progress.add_task("training and measuring")
                with target_errors(self.target):
                    measurement = measure_task(
                        *(task, self.candidates),
                        stages=tuple(STAGES) if self.stages else ("early",),
                        steps=self.steps,
                        device=device,
                        on_step=lambda step, total: progress.update(bar, completed=step, total=total),
                        **how,
                    )
        return replace(measurement, target=self.target, command=self.command())

    def _require_no_training(self) -> None:
        if self.stages or self.steps is not None or self.settings:
            raise MetricError(
                f"{self.target} is a model without data to train on: leave out --stages, --steps and --set, or name a "
                f"task such as {', '.join(task_names()[:3])}."
            )

    def command(self) -> str:
        """The command that repeats the measurement."""
        arguments = ["bitplan", "measure", self.target, *["--stages"] * self.stages]
        arguments += [] if self.steps is None else ["--steps", str(self.steps)]
        for candidate in self.candidates or ():
            arguments += ["--candidate", candidate]
        arguments += [] if self.plan is None else ["--plan", self.plan]
        for name, default in (("rows", Sampling.rows), ("terms", Sampling.terms), ("seed", 0)):
            value = getattr(self, name)
            arguments += [] if value == default else [f"--{name}", str(value)]
        for metric in self.metrics:
            arguments += ["--metric", metric]
        for setting in self.settings:
            arguments += ["--set", setting]
        return shlex.join(arguments)


def _metric_name(name: str) -> str:
    """The column of a metric that a command names.

    >>> _metric_name("my_metrics.py:worst")
    'worst'
    """
    file = parse_file_name(name)
    return name if file is None else file[1]


def _print_measurement(measurement: Measurement, output: Output) -> None:
    for stage in measurement.stages:
        for metric in ("median", *measurement.own_metrics):
            _print_stage(measurement, measurement.select(stage=stage), metric, output)
    cut = sum(row.k < row.length for row in measurement.rows)
    output.console.print(
        "Median backward error of sampled elements; the least of each line is bold. It is smaller for longer sums: "
        f"compare within a line.{' Sums of more terms were cut to those under K.' if cut else ''}"
    )
    if measurement.skipped:
        few = [f"{name} ({why})" for name, why in list(measurement.skipped.items())[:3]]
        output.note(f"{len(measurement.skipped)} products were not measured: {'; '.join(few)}")


def _print_stage(measurement: Measurement, rows: Sequence[Row], metric: str, output: Output) -> None:
    table = FittedTable(_stage_title(rows[0]) + ("" if metric == "median" else f", {metric}"))
    table.add_column("product", "name")
    table.add_column("pass")
    table.add_column("K", "number")
    for candidate in measurement.candidates:
        table.add_column(candidate.replace(" ", "\n"), "number", is_optional=candidate != measurement.candidates[0])
    for product in dict.fromkeys((row.product, row.pass_) for row in rows):
        values = {
            row.candidate: row.median if metric == "median" else row.own[metric]
            for row in rows
            if (row.product, row.pass_) == product
        }
        least = min((value for value in values.values() if not math.isnan(value)), default=math.nan)
        terms = next(row.k for row in rows if (row.product, row.pass_) == product)
        bold = least if metric == "median" else math.nan  # what is good in a metric of the user's own is unknown
        cells = [_cell(values.get(candidate), bold) for candidate in measurement.candidates]
        table.add_row(*product, str(terms), *cells)
    table.print(output.console)


def _stage_title(row: Row) -> str:
    return row.stage if row.stage == "now" else f"{row.stage}: after {row.step} steps"


def _cell(value: float | None, least: float) -> Text:
    if value is None:
        return Text("-")
    return Text(f"{value:.1e}", style="bold" if value == least else "")


# --- advise


def advise_command(
    target: TargetArgument,
    tau: Annotated[
        float | None,
        typer.Option(
            help=f"The most that an error times the root of the sums' length may be (default: {TAU}, the level of e4m3 "
            "with a scale per tensor, which is known to train, on healthy models).",
            show_default=False,
        ),
    ] = None,
    cost: Annotated[str, typer.Option(metavar="memory|bitops|time", help="What is to be small.")] = "bitops",
    stages: Annotated[
        bool, typer.Option("--stages/--early", help="Of a task: measure at three stages, or early alone.")
    ] = True,
    steps: StepsOption = None,
    measured: Annotated[
        Path | None,
        typer.Option(
            "--measurement", metavar="FILE", help="Advise on what bitplan measure -o wrote.", show_default=False
        ),
    ] = None,
    candidates: CandidatesOption = None,
    rows: RowsOption = Sampling.rows,
    terms: TermsOption = Sampling.terms,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="PLAN",
            help="A plan to add the advice to, such as an assignment under a budget.",
            autocompletion=complete_plan,
            show_default=False,
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            help="Let the bits of integers follow a schedule, such as CR, each down to the bits that it needs.",
            show_default=False,
        ),
    ] = None,
    bits: Annotated[str, typer.Option(metavar="LOW-HIGH", help="Of the schedule.")] = "4-8",
    cycles: Annotated[int, typer.Option(min=1, help="Of the schedule.")] = 8,
    check: Annotated[
        bool,
        typer.Option("--verify", help=f"Train briefly under the advice, {', '.join(RIVALS)} and in high precision."),
    ] = False,
    verify_steps: Annotated[int, typer.Option(min=4, help="Steps of each of these runs.")] = VERIFY_STEPS,
    verify_seeds: Annotated[int, typer.Option(min=1, help="Seeds of each of these runs.")] = 1,
    verify_out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep these runs, for bitplan report.", show_default=False),
    ] = None,
    settings: TaskSettingsOption = None,
    seed: SeedOption = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1; of tasks.")] = "cpu",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the plan there.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Advise on a number format for each operand of each product of TARGET: the cheapest whose error is small enough.

    Measures as bitplan measure does, and says why for every slot, in the plan's file as well. With --verify, advice
    that does not train is made again with half of tau. With --json: one object.
    """
    with command_output(as_json) as output:
        bit_schedule = _schedule(schedule, bits, cycles)
        candidate_texts = tuple(map(str, widths_to_measure(add_reference(candidates), bit_schedule)))
        is_own_choice = bool(candidates) or bit_schedule is not None
        request = MeasureRequest(
            target, stages, steps, candidate_texts if is_own_choice else None, rows, terms, tuple(settings or ()), seed
        )
        base_plan = None if base is None else _plan_for_target(find_plan(base), target, settings or ())
        if check and request.task() is None:
            raise MetricError(f"{target} is a model without data to train on: --verify needs a task, such as digits.")
        if measured is not None:
            measurement = Measurement.load(measured)
        else:
            request.stages = stages and request.task() is not None
            measurement = request.measured(output, device)

        def advised(limit: float | None) -> Advice:
            advice = advise_on(measurement, tau=limit, cost=cost, base=base_plan, schedule=bit_schedule)
            return advice if base_plan is None else _within_budget(advice, base_plan, target, settings or ())

        advice, verified = advised(tau), None
        if check:
            runs = partial(_verify, request, verify_out, verify_steps, verify_seeds, device, output)
            verified = verified_advice(advice, advised, runs, output.note)
            advice = _with_conclusion(verified)
        if base_plan is not None:
            _note_below_need(advice, str(base), output)
        if out is not None:
            make_folder(out.parent)
            advice.plan.save(out)
        if not as_json:
            _print_advice(advice, output)
        document: dict[str, Any] = {"target": target, "file": out, **advice.to_dict()}
        if verified is not None:
            if not as_json:
                _print_verified(verified, output)
            document["verified"] = [result.to_dict() for result in verified.results]
            document["conclusion"] = verified.conclusion
        output.document(document)
        if out is not None:
            fails = verified is not None and verified.trains is False
            output.note(f"wrote {out}, which does not train." if fails else f"wrote {out}: {_next_step(request, out)}")


def _with_conclusion(verified: VerifiedAdvice) -> Advice:
    """The advice, whose plan says what its check found."""
    plan = verified.advice.plan
    made_by = plan.made_by if isinstance(plan.made_by, dict) else {}
    return replace(verified.advice, plan=replace(plan, made_by={**made_by, "verified": verified.conclusion}))


def _next_step(request: MeasureRequest, plan: Path) -> str:
    """How to train under the plan: a task by a command, a model in its own loop."""
    if request.task() is None:
        return f"train under it in your own loop, with bitplan.attach(model, {str(plan)!r}, optimizer=optimizer)."
    words = ["bitplan", "train", request.target, "--plan", str(plan)]
    for setting in request.settings:
        words += ["--set", setting]
    return f"train under it with: {shlex.join(words)}"


def _plan_for_target(plan: Plan, target: str, settings: Sequence[str]) -> Plan:
    """The plan with plain rules in the place of those with selectors."""
    if not plan.has_selectors:
        return plan
    loaded = load_target(target, shapes_only=True, settings=settings)
    with target_errors(target):
        return plan_for_model(plan, loaded.model, loaded.batch, loaded.loss)


def _within_budget(advice: Advice, base: Plan, target: str, settings: Sequence[str]) -> Advice:
    """The advice, if it fits into the memory budget that its base was made for."""
    if not has_budget(base):
        return advice
    loaded = load_target(target, shapes_only=True, settings=settings)
    with target_errors(target):
        step = Step(loaded.model, loaded.batch, loaded.loss, device="cpu")
        return replace(advice, plan=keep_budget(advice.plan, base, step))


def _note_below_need(advice: Advice, base: str, output: Output) -> None:
    made_by = advice.plan.made_by
    below = made_by.get("below_need", {}) if isinstance(made_by, dict) else {}
    if below:
        where, words = next(iter(below.items()))
        output.note(
            f"{base} gives {len(below)} operands fewer bits than their products need, such as {where} ({words}); all "
            f"are in the plan's made_by."
        )


def _schedule(name: str | None, bits: str, cycles: int) -> Schedule | None:
    if name is None:
        return None
    low, high = read_bits(bits)
    return schedule_named(name, low=low, high=high, cycles=cycles)


def _print_advice(advice: Advice, output: Output) -> None:
    table = FittedTable()
    table.add_column("slot", "name")
    table.add_column("format", "word", style="bold")
    table.add_column("why", "text")
    for slot in advice.slots:
        table.add_row(slot.where, str(slot.spec), slot.why)
    table.print(output.console)
    counts = ", ".join(f"{count} {name}" for name, count in advice.counts.items())
    output.console.print(
        f"{len(advice.slots)} slots: {counts}. tau {advice.tau:.3g} ({advice.tau_from}); cheapest by {advice.cost}."
    )
    output.console.print(f"What it does not see: {'; '.join(UNSEEN)}.")
    if advice.measurement.skipped:
        output.note(f"{len(advice.measurement.skipped)} products could not be measured and are left alone.")


def _verify(
    request: MeasureRequest,
    out: Path | None,
    steps: int,
    seeds: int,
    device: str,
    output: Output,
    advice: Advice,
    number: int,
) -> list[Verified]:
    own = None if out is None else out if number == 1 else out / f"round-{number}"
    run_folder = tempfile.TemporaryDirectory() if own is None else nullcontext(str(own))
    total = (2 + len(RIVALS)) * seeds
    with run_folder as folder, stop_on_signals() as stop_request, CompareProgress(output.console, total) as progress:
        return verify(
            *(request.target, advice, Path(folder)),
            settings=request.settings,
            steps=steps,
            seeds=range(seeds),
            device=device,
            on_update=progress,
            stop=stop_request,
        )


def _print_verified(verified: VerifiedAdvice, output: Output) -> None:
    table = FittedTable()
    table.add_column("trained briefly", "name")
    for heading in ("training loss", "above high precision", "metric", "of FP32's bit operations", "diverged"):
        table.add_column(heading, "number")
    for result in verified.results:
        table.add_row(
            result.label,
            *(
                f"{result.loss:.4f}",
                f"{result.gap:+.4f}",
                f"{result.metric:.4f}",
                f"{result.cost:.1%}",
                str(result.diverged),
            ),
        )
    table.print(output.console)
    output.console.print(verified.conclusion)
