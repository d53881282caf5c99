"""``bitplan advise``: a format for every operand of every product, from measured errors, with reasons."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from bitplan.analysis.measure import Measurement
from bitplan.cli.arguments import TargetArgument, complete_plan
from bitplan.cli.compare_progress import CompareProgress
from bitplan.cli.measure import (
    Asked,
    CandidatesOption,
    RowsOption,
    SeedOption,
    SettingsOption,
    StepsOption,
    TermsOption,
)
from bitplan.cli.output import JsonOption, Output, command_output, make_folder
from bitplan.cli.schedules import read_bits
from bitplan.errors import MetricError
from bitplan.gemm.sampling import Sampling
from bitplan.lab.compare.verify import RIVALS, STEPS, Verified, verify
from bitplan.lab.train.loop import stop_on_signals
from bitplan.planners.advise import UNSEEN, Advice, advise_on, with_reference
from bitplan.plans.loading import find_plan
from bitplan.plans.schedules import Schedule
from bitplan.plans.schedules import schedule as schedule_named


def register(app: typer.Typer) -> None:
    app.command("advise")(advise_command)


def advise_command(
    target: TargetArgument,
    tau: Annotated[
        float | None,
        typer.Option(
            help="The most that an error times the root of the sums' length may be (default: the level of e4m3 with a "
            "scale per tensor, which is known to train, in nine of ten products).",
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
        typer.Option(help="Let the bits of integers follow a schedule, such as CR.", show_default=False),
    ] = None,
    bits: Annotated[str, typer.Option(metavar="LOW-HIGH", help="Of the schedule.")] = "4-8",
    cycles: Annotated[int, typer.Option(min=1, help="Of the schedule.")] = 8,
    check: Annotated[
        bool,
        typer.Option("--verify", help=f"Train briefly under the advice, {', '.join(RIVALS)} and in high precision."),
    ] = False,
    verify_steps: Annotated[int, typer.Option(min=4, help="Steps of each of these runs.")] = STEPS,
    verify_seeds: Annotated[int, typer.Option(min=1, help="Seeds of each of these runs.")] = 1,
    verify_out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep these runs, for bitplan report.", show_default=False),
    ] = None,
    settings: SettingsOption = None,
    seed: SeedOption = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1; of tasks.")] = "cpu",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the plan there.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Advise on a number format for each operand of each product of TARGET: the cheapest whose error is small enough.

    Measures as bitplan measure does, and says why for every slot, in the plan's file as well. With --json: one object.
    """
    with command_output(as_json) as output:
        wanted = tuple(map(str, with_reference(candidates)))
        asked = Asked(target, stages, steps, wanted if candidates else None, rows, terms, tuple(settings or ()), seed)
        found_base = None if base is None else find_plan(base)
        moved = _schedule(schedule, bits, cycles)
        if check and asked.task() is None:
            raise MetricError(f"{target} is a model without data to train on: --verify needs a task, such as digits.")
        if measured is not None:
            measurement = Measurement.load(measured)
        else:
            asked.stages = stages and asked.task() is not None
            measurement = asked.measured(output, device)
        advice = advise_on(measurement, tau=tau, cost=cost, base=found_base, schedule=moved)
        if out is not None:
            make_folder(out.parent)
            advice.plan.save(out)
        if not as_json:
            _print(advice, output)
        results = None
        if check:
            results = _verify(asked, advice, verify_out, verify_steps, verify_seeds, device, output)
            if not as_json:
                _print_verified(results, output)
        document: dict[str, Any] = {"target": target, "file": out, **advice.to_dict()}
        if results is not None:
            document["verified"] = [each.to_dict() for each in results]
        output.document(document)
        if out is not None:
            output.note(f"wrote {out}: train under it with: bitplan train {target} --plan {out}")


def _schedule(name: str | None, bits: str, cycles: int) -> Schedule | None:
    if name is None:
        return None
    low, high = read_bits(bits)
    return schedule_named(name, low=low, high=high, cycles=cycles)


def _print(advice: Advice, output: Output) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("slot", no_wrap=True)
    table.add_column("format", no_wrap=True, style="bold")
    table.add_column("why")
    for each in advice.slots:
        table.add_row(each.where, str(each.spec), each.why)
    output.console.print(table)
    counts = ", ".join(f"{count} {name}" for name, count in advice.counts.items())
    output.console.print(
        f"{len(advice.slots)} slots: {counts}. tau {advice.tau:.3g} ({advice.tau_from}); cheapest by {advice.cost}.",
        soft_wrap=True,
    )
    output.console.print(f"What it does not see: {'; '.join(UNSEEN)}.", soft_wrap=True)
    if advice.measurement.skipped:
        output.note(f"{len(advice.measurement.skipped)} products could not be measured and are left alone.")


def _verify(
    asked: Asked, advice: Advice, out: Path | None, steps: int, seeds: int, device: str, output: Output
) -> list[Verified]:
    place = tempfile.TemporaryDirectory() if out is None else nullcontext(str(out))
    total = (2 + len(RIVALS)) * seeds
    with place as folder, stop_on_signals() as request, CompareProgress(output.console, total) as progress:
        return verify(
            *(asked.target, advice, Path(folder)),
            settings=asked.settings,
            steps=steps,
            seeds=range(seeds),
            device=device,
            on_update=progress,
            stop=request,
        )


def _print_verified(results: list[Verified], output: Output) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("trained briefly", no_wrap=True)
    for heading in ("training loss", "above high precision", "metric", "of FP32's bit operations", "diverged"):
        table.add_column(heading, justify="right")
    for each in results:
        table.add_row(
            each.label,
            *(f"{each.loss:.4f}", f"{each.gap:+.4f}", f"{each.metric:.4f}", f"{each.cost:.1%}", str(each.diverged)),
        )
    output.console.print(table)
