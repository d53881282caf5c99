"""``bitplan report``: a page about runs, and their figures as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from bitplan.analysis.measure import Measurement
from bitplan.cli.output import JsonOption, command_output, make_folder, write_file
from bitplan.lab.report.heatmaps import MEASUREMENT_FILE
from bitplan.lab.report.summaries import Experiment, Report
from bitplan.lab.report.tables import COLUMNS_NOTE, csv_text, plan_columns, report_record
from bitplan.lab.train.folder import RunFolder


def register(app: typer.Typer) -> None:
    app.command("report")(report_command)


def report_command(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUNS...",
            help="Run folders, comparison folders, or folders that hold some; or a file of bitplan measure -o.",
            show_default=False,
        ),
    ],
    page: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The page to write.")] = Path(
        "report.html"
    ),
    csv: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", help="Also write every run as a line of a table.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write one HTML page about runs: what was run, the answer in a sentence, charts and tables.

    The page needs no network. With --json: one object with plans, runs and the answer.
    """
    with command_output(as_json) as output:
        file = measurement_file(runs)
        if file is not None:
            found = Measurement.load(file)
            write_measurement_page(found, page)
            output.document({"page": page, **found.to_dict()})
            if not as_json:
                output.console.print(f"The page: {page}", soft_wrap=True)
            return
        report = Report.of(runs)
        write_page(report, page)
        if csv is not None:
            write_file(csv, csv_text(report))
            output.note(f"wrote {csv}")
        output.document({"page": page, **report_record(report)})
        if not as_json:
            for experiment in report.experiments:
                print_experiment(experiment, output.console)
            output.console.print(f"The page: {page}", soft_wrap=True)


def write_page(report: Report, page: Path) -> None:
    """Write the page of a report."""
    from bitplan.lab.report.page import page_html

    text = page_html(report)
    make_folder(page.parent)
    write_file(page, text)


def measurement_file(paths: list[Path]) -> Path | None:
    """The measurement that is asked about, where it is one: a file, or a folder that holds nothing else."""
    if len(paths) != 1:
        return None
    (path,) = paths
    inside = path / MEASUREMENT_FILE
    return path if path.is_file() else inside if inside.is_file() and not RunFolder(path).is_run else None


def write_measurement_page(found: Measurement, page: Path) -> None:
    """Write the page of a measurement."""
    from bitplan.lab.report.page import measurement_page_html

    text = measurement_page_html(found)
    make_folder(page.parent)
    write_file(page, text)


def print_experiment(experiment: Experiment, console: Console) -> None:
    """The table of plans, and the answer."""
    columns = plan_columns(experiment)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=experiment.name, title_justify="left")
    for column in columns:
        table.add_column(column.title, justify="right" if column.is_number else "left", no_wrap=True)
    for plan in experiment.plans:
        table.add_row(*(column.cell(plan).text for column in columns))
    console.print(table)
    console.print(COLUMNS_NOTE)
    console.print(experiment.answer, soft_wrap=True, style="bold")
