"""``bitplan range-test``: the lowest width at which a task still learns."""

from __future__ import annotations

from typing import Annotated

import typer
from rich import box
from rich.progress import Progress
from rich.table import Table

from bitplan.analysis.targets import running
from bitplan.cli.arguments import complete_task
from bitplan.cli.output import JsonOption, Output, command_output
from bitplan.cli.schedules import read_bits
from bitplan.lab.task_planners import range_test_of_task
from bitplan.lab.tasks.registry import find_task
from bitplan.planners.range_test import THRESHOLD, WINDOW, RangeTest
from bitplan.plans.loading import find_plan

#: Characters of the longest bar.
_BAR = 40


def register(app: typer.Typer) -> None:
    app.command("range-test")(range_test_command)


def range_test_command(
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK",
            help="A task such as digits, or my_task.py:MyTask, a file that is run: name only those that you trust.",
            autocompletion=complete_task,
            show_default=False,
        ),
    ],
    bits: Annotated[str, typer.Option(metavar="LOW-HIGH", help="The widths to try.")] = "2-8",
    window: Annotated[int, typer.Option(min=4, help="Steps for each width.")] = WINDOW,
    threshold: Annotated[
        float, typer.Option(help="The share by which the training loss has to fall in a window.")
    ] = THRESHOLD,
    plan: Annotated[
        str | None,
        typer.Option(
            help="A plan whose bits follow a schedule (default: that of cyclic precision training).",
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the task's recipe; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the weights, the data and the random bits.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Find the lowest bits for a schedule: one short run whose bits rise, at the recipe's peak learning rate.

    The first width at which the training loss falls by more than the threshold is the bound. With --json: one object.
    """
    with command_output(as_json) as output:
        low, high = read_bits(bits)
        chosen = find_task(task, settings or (), seed)
        found_plan = None if plan is None else find_plan(plan)
        with Progress(console=output.console, transient=True, disable=not output.console.is_terminal) as progress:
            bar = progress.add_task("testing")
            with running(task):
                found = range_test_of_task(
                    chosen,
                    plan=found_plan,
                    low=low,
                    high=high,
                    window=window,
                    threshold=threshold,
                    on_step=lambda step, total: progress.update(bar, completed=step, total=total),
                )
        output.document({"task": task, **found.to_dict()})
        if not as_json:
            _print(found, output)


def _print(found: RangeTest, output: Output) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("bits", justify="right", style="bold")
    table.add_column("training loss", justify="right")
    table.add_column("change", justify="right")
    table.add_column("learns")
    table.add_column("", no_wrap=True)
    top = max((each.level for each in found.widths if each.level != float("inf")), default=0.0)
    mark = "█" if output.console.encoding.lower().startswith("utf") else "#"
    for each in found.widths:
        length = round(_BAR * each.level / top) if top and each.level <= top else _BAR
        table.add_row(
            str(each.bits),
            f"{each.level:.4g}",
            f"{-each.change:+.1%}",
            "yes" if each.learns else "no: may be chance" if each.change > found.threshold else "no",
            mark * length,
        )
    output.console.print(table)
    words = "no bound found" if found.low is None else f"lowest bits: {found.low}"
    output.console.print(f"{words} ({found.reason})", soft_wrap=True)
