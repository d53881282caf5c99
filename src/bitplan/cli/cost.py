"""``bitplan cost``: what a training step costs under a plan, beside FP32 and BF16."""

from __future__ import annotations

from typing import Annotated

import typer
from rich import box
from rich.table import Table

from bitplan.analysis.cost import Cost, estimate_cost
from bitplan.analysis.targets import running
from bitplan.cli.arguments import PlanArgument, TargetArgument
from bitplan.cli.output import JsonOption, Output, command_output
from bitplan.lab.targets import load_target


def register(app: typer.Typer) -> None:
    app.command("cost")(cost)


def cost(
    plan: PlanArgument,
    target: TargetArgument,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Add up a run of so many steps; of a plan that changes over time, all of it."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Price one training step of TARGET under PLAN before it runs: bit operations, bytes, mean bits.

    Bytes are those of all tensors of a step, not a peak. With --json: one object.
    """
    with command_output(as_json) as output:
        chosen = load_target(target, shapes_only=True)
        with running(target):
            whole = estimate_cost(chosen.model, plan, chosen.batch, chosen.loss, steps)
        output.document({"plan": plan, "target": target, **whole.to_dict()})
        if not as_json:
            _print(whole, plan, output)


def _print(whole: Cost, plan: str, output: Output) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(f"{whole.steps} step" + "s" * (whole.steps > 1), style="bold", no_wrap=True)
    for heading in (plan, "FP32", "BF16"):
        table.add_column(heading, justify="right", no_wrap=True)
    for what, *values in whole.rows():
        table.add_row(what, *(f"{value:,.3f}" for value in values))
    output.console.print(table)
    output.console.print(
        f"{whole.relative:.1%} of FP32's bit operations, {whole.effective_macs:,.0f} effective MACs of "
        f"{whole.forward_macs:,} forward ones.",
        soft_wrap=True,
    )
