"""``bitplan measure``: what number formats do to every product of a model in training."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from bitplan.analysis.measure import DEFAULT_CANDIDATES, Measurement, measure
from bitplan.analysis.measure.candidate import checked_candidates
from bitplan.analysis.measure.result import Row
from bitplan.analysis.targets import named_file, running
from bitplan.cli.arguments import TargetArgument
from bitplan.cli.output import JsonOption, Output, command_output, make_folder
from bitplan.errors import MetricError, TaskError
from bitplan.gemm.sampling import Sampling
from bitplan.lab.report.heatmaps import MEASUREMENT_FILE
from bitplan.lab.targets import load_target
from bitplan.lab.tasks.registry import find_task, task_names
from bitplan.lab.tasks.task import Task
from bitplan.lab.train.stages import STAGES, STEPS, measure_task

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
SettingsOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a task's recipe; repeatable.")
]
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


def register(app: typer.Typer) -> None:
    app.command("measure")(measure_command)


def measure_command(
    target: TargetArgument,
    stages: StagesOption = False,
    steps: StepsOption = None,
    candidates: CandidatesOption = None,
    rows: RowsOption = Sampling.rows,
    terms: TermsOption = Sampling.terms,
    settings: SettingsOption = None,
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
        wanted = tuple(map(str, checked_candidates(candidates)))
        asked = Asked(target, stages, steps, wanted if candidates else None, rows, terms, tuple(settings or ()), seed)
        found = asked.measured(output, device)
        if file is not None:
            place = file / MEASUREMENT_FILE if file.is_dir() or not file.suffix else file
            make_folder(place.parent)
            found.save(place)
            output.note(f"wrote {place}: draw it with: bitplan report {place}")
        output.document([row.to_dict() for row in found.rows])
        if not as_json:
            _print(found, output)


class Asked:
    """A measurement as it was asked for."""

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
        self.target = target
        self.stages = stages
        self.steps = steps
        self.candidates = candidates
        self.rows = rows
        self.terms = terms
        self.settings = settings
        self.seed = seed

    def task(self) -> Task | None:
        """The task, where the target is one."""
        try:
            if self.target in task_names() or named_file(self.target) is not None:
                return find_task(self.target, self.settings, self.seed)
        except TaskError:
            if self.target in task_names() or self.settings:
                raise
        return None

    def measured(self, output: Output, device: str = "cpu") -> Measurement:
        task = self.task()
        how: dict[str, Any] = {"rows": self.rows, "terms": self.terms, "seed": self.seed}
        if task is None:
            self._require_no_training()
            torch.manual_seed(self.seed)
            target = load_target(self.target)
            with running(self.target):
                found = measure(target.model, [target.batch], target.loss, self.candidates, target=self.target, **how)
        else:
            shown = output.console.is_terminal
            with Progress(console=output.console, transient=True, disable=not shown) as progress:
                bar = progress.add_task("training and measuring")
                with running(self.target):
                    found = measure_task(
                        *(task, self.candidates),
                        stages=tuple(STAGES) if self.stages else ("early",),
                        steps=self.steps,
                        device=device,
                        on_step=lambda step, total: progress.update(bar, completed=step, total=total),
                        **how,
                    )
        return replace(found, target=self.target, command=self.command())

    def _require_no_training(self) -> None:
        if self.stages or self.steps is not None or self.settings:
            raise MetricError(
                f"{self.target} is a model without data to train on: leave out --stages, --steps and --set, or name a "
                f"task such as {', '.join(task_names()[:3])}."
            )

    def command(self) -> str:
        """What makes the measurement again."""
        words = ["bitplan", "measure", self.target, *["--stages"] * self.stages]
        words += [] if self.steps is None else ["--steps", str(self.steps)]
        for candidate in self.candidates or ():
            words += ["--candidate", candidate]
        for name, default in (("rows", Sampling.rows), ("terms", Sampling.terms), ("seed", 0)):
            value = getattr(self, name)
            words += [] if value == default else [f"--{name}", str(value)]
        for setting in self.settings:
            words += ["--set", setting]
        return shlex.join(words)


def _print(found: Measurement, output: Output) -> None:
    for stage in found.stages:
        rows = found.select(stage=stage)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=_title(rows[0]), title_justify="left")
        table.add_column("product", no_wrap=True)
        table.add_column("pass")
        table.add_column("K", justify="right")
        for candidate in found.candidates:
            table.add_column(candidate.replace(" ", "\n"), justify="right")
        for product in dict.fromkeys((row.product, row.pass_) for row in rows):
            own = {row.candidate: row for row in rows if (row.product, row.pass_) == product}
            least = min((row.median for row in own.values() if not math.isnan(row.median)), default=math.nan)
            cells = [_cell(own.get(candidate), least) for candidate in found.candidates]
            table.add_row(*product, str(next(iter(own.values())).k), *cells)
        output.console.print(table)
    cut = sum(row.k < row.length for row in found.rows)
    output.console.print(
        "Median backward error of sampled elements; the least of each line is bold. It is smaller for longer sums: "
        f"compare within a line.{' Sums of more terms were cut to those under K.' if cut else ''}",
        soft_wrap=True,
    )
    if found.skipped:
        few = [f"{name} ({why})" for name, why in list(found.skipped.items())[:3]]
        output.note(f"{len(found.skipped)} products were not measured: {'; '.join(few)}")


def _title(row: Row) -> str:
    return row.stage if row.stage == "now" else f"{row.stage}: after {row.step} steps"


def _cell(row: Row | None, least: float) -> Text:
    if row is None:
        return Text("-")
    return Text(f"{row.median:.1e}", style="bold" if row.median == least else "")
