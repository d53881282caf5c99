"""``bitplan doctor``: why a run diverged, jumped or fell behind, and a plan that mends it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from bitplan.cli.output import FittedTable, JsonOption, Output, command_output, make_folder
from bitplan.cli.train import own_code, task_of_run, warnings_as_notes
from bitplan.lab.train.config import command_of
from bitplan.lab.train.doctor import STEPS, diagnose_run
from bitplan.lab.train.folder import RunFolder
from bitplan.planners.diagnose import MOST_REPLAYS, TOLERANCE, Diagnosis


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor_command)


def doctor_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.", show_default=False)],
    task_file: Annotated[
        str | None,
        typer.Option(
            "--task",
            metavar="FILE.py:NAME",
            help="Of a run whose task is a file: that file again, as no run folder chooses code to run.",
            show_default=False,
        ),
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="A run of the same task that RUN falls behind.", show_default=False),
    ] = None,
    at: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The step at which the trouble shows (default: that of the divergence, of a spike, or where RUN falls "
            "behind its reference).",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="About how many steps are replayed.")] = STEPS,
    tolerance: Annotated[
        float, typer.Option(help="The share by which the loss may exceed that without rounding.")
    ] = TOLERANCE,
    replays: Annotated[int, typer.Option(min=4, help="The most replays of the search.")] = MOST_REPLAYS,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:1 (default: the run's own).", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Write the plan that mends the run.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find out why RUN diverged, jumped or fell behind: replay it, and bisect over the tensors that its plan rounds.

    Replays start at the last good checkpoint and differ in what is kept in high precision, until the cause is a few
    operands. A plan that mends it is verified by a replay. Where the run diverges without rounding, too, no operand is
    blamed. RUN is not changed. With --json: one object.
    """
    with command_output(as_json) as output, warnings_as_notes(output):
        folder = RunFolder(run)
        task, source = task_of_run(folder, task_file, ("doctor",))
        with own_code(source), _ReplayProgress(output) as progress:
            diagnosis = diagnose_run(
                *(task, run),
                reference=reference,
                at=at,
                steps=steps,
                tolerance=tolerance,
                most_replays=replays,
                device=device,
                report=progress,
            )
        if out is not None and diagnosis.plan is not None:
            make_folder(out.parent)
            diagnosis.plan.save(out)
        output.document({"run": run, **diagnosis.to_dict(), "file": None if diagnosis.plan is None else out})
        if not as_json:
            _print(diagnosis, output)
        if diagnosis.plan is None and out is not None:
            output.note(f"{out} was not written: no plan mends this.")
        elif diagnosis.plan is not None:
            config = folder.config()
            command = command_of(
                *(task, source, diagnosis.plan, str(out)),
                execution=config.execution,
                device=torch.device(config.device),
                compile=config.compile,
            )
            output.note(f"wrote {out}: train under it with: {command}" if out else "-o FILE writes the plan.")


class _ReplayProgress:
    """The last replay: a moving line on a terminal, nothing elsewhere, where the table has them all."""

    def __init__(self, output: Output) -> None:
        self._bar = Progress(
            *(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()),
            console=output.console,
            transient=True,
            disable=not output.console.is_terminal,
        )
        self._line = self._bar.add_task("replaying", total=None)

    def __enter__(self) -> _ReplayProgress:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def __call__(self, sentence: str) -> None:
        self._bar.update(self._line, description=sentence)


def _print(diagnosis: Diagnosis, output: Output) -> None:
    if diagnosis.records:
        table = FittedTable()
        table.add_column("replay", "text")
        table.add_column("loss above high precision", "number")
        table.add_column("verdict")
        for record in diagnosis.records:
            table.add_row(record.change, f"{record.excess:+.3g}", record.verdict)
        table.print(output.console)
    output.console.print(diagnosis.summary)
