"""``bitplan demo``: the product's main job on built-in data, in a few minutes on two CPU cores."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from bitplan.cli.compare import Asked, run_comparison
from bitplan.cli.output import JsonOption, command_output, make_folder
from bitplan.cli.report import write_page
from bitplan.lab.compare import find_suite
from bitplan.lab.compare.workers import cores
from bitplan.lab.report.answer import counted, listed
from bitplan.lab.report.figures import plotly
from bitplan.lab.report.tables import report_record

TASK = "digits"
SUITE = "static"
PAGE = "report.html"
#: Enough to tell the plans apart, and short enough to wait for.
SETTINGS = ("steps=200",)
#: Runs are small: a second thread would speed none of them up, a second process does.
MOST_JOBS = 4


def register(app: typer.Typer) -> None:
    app.command("demo")(demo)


def _by_key(settings: Iterable[str]) -> dict[str, str]:
    """Later ones take the place of earlier ones."""
    return {setting.partition("=")[0]: setting for setting in settings}


def demo(
    folder: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the runs and the page.")
    ] = Path("bitplan-demo"),
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from 0 on.")] = 3,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the task's recipe; repeatable.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what low precision does to real training: handwritten digits in FP32, BF16, 8, 6, 4 and a failing 2 bits.

    Ends with the answer in a sentence and a page to open. After Ctrl-C the same command goes on.
    """
    plotly()  # before minutes of training, not after
    with command_output(as_json) as output:
        asked = Asked(TASK, tuple({**_by_key(SETTINGS), **_by_key(settings or ())}.values()))
        jobs = min(cores(), MOST_JOBS)
        make_folder(folder)
        names = [choice.label for choice in find_suite(SUITE).choices]
        output.console.print(
            f"Training {TASK} in {listed(names, len(names))}, {counted(seeds, 'seed')} each, {jobs} at a time: "
            "this takes a few minutes.",
            soft_wrap=True,
        )
        report, code = run_comparison(asked, SUITE, (), seeds, folder, jobs, output)
        output.document({} if report is None else {"page": folder / PAGE, **report_record(report)})
        if code == 0:
            assert report is not None
            page = folder / PAGE
            write_page(report, page)
            if not as_json:
                output.console.print(f"Open this page to see it: {page.resolve()}", soft_wrap=True)
    if code:
        raise typer.Exit(code)
