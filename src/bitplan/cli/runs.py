"""``bitplan tasks``, ``runs`` and ``report``: what can be trained, what has been trained, and pages about it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from bitplan.analysis.measure import Measurement
from bitplan.cli.arguments import complete_task
from bitplan.cli.output import FittedTable, JsonOption, Kind, Output, command_output, make_folder, write_file
from bitplan.errors import RunError
from bitplan.lab.compare.folder import read_comparison
from bitplan.lab.report.heatmaps import MEASUREMENT_FILE
from bitplan.lab.report.summaries import MARGIN, Experiment, Report
from bitplan.lab.report.tables import COLUMNS_NOTE, csv_text, plan_columns, report_record
from bitplan.lab.tasks.registry import CARDS, Card, task_class, task_names
from bitplan.lab.tasks.task import Task
from bitplan.lab.train.folder import DEFAULT_PARENT, RunFolder, find_runs, is_number
from bitplan.lab.train.loop import stop_on_signals

MarginOption = Annotated[
    float, typer.Option(metavar="SHARE", help="Of the reference's metric: a plan that loses less keeps it.")
]


def register(app: typer.Typer) -> None:
    app.command("tasks")(tasks)
    app.command("runs")(runs)
    app.command("report")(report_command)


# --- tasks


def tasks(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[TASK]",
            help="Show this task with its settings; my_task.py:MyTask is executed: name only files that you trust.",
            autocompletion=complete_task,
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the tasks, or show one with the settings that --set may change.

    With --json: a list of objects, each with its settings; one object where a TASK is named.
    """
    with command_output(as_json) as output:
        if name is None:
            classes = [task_class(task_name) for task_name in task_names()]
            output.document([task_record(task) for task in classes])
            if not as_json:
                _print_tasks(classes, output)
        else:
            task = task_class(name)
            output.document(task_record(task))
            if not as_json:
                _print_task(task, output)


def task_record(task: type[Task]) -> dict[str, Any]:
    """A task as JSON; a user's own task has no card, and nulls in place of it."""
    card = CARDS.get(_task_name(task))
    return {
        "name": _task_name(task),
        "summary": getattr(task, "summary", ""),
        "model": card and card.model,
        "embedded": (card and card.embedded) or None,
        "public": (card and card.public) or None,
        "metric": card and {"name": card.metric, "better": card.better},
        "settings": asdict(task.settings_class()),
        "floor": card and card.floor and asdict(card.floor),
    }


def _task_name(task: type[Task]) -> str:
    return getattr(task, "name", task.__name__)


def _floor_text(card: Card) -> str:
    return "-" if card.floor is None else f"{card.floor.times_trivial:g}x trivial"


def _print_tasks(classes: list[type[Task]], output: Output) -> None:
    table = FittedTable()
    table.add_column("name", "name", style="bold")
    for heading in ("what", "model", "data here", "data you bring"):
        table.add_column(heading, "text", is_optional=heading.startswith("data"))
    table.add_column("metric", "text")
    table.add_column("FP32 reaches", "text", is_optional=True)
    for task in classes:
        card = CARDS[task.name]
        table.add_row(
            *(task.name, task.summary, card.model, card.embedded or "-", card.public or "-"),
            *(f"{card.metric}, {card.better}", _floor_text(card)),
        )
    table.print(output.console)
    output.console.print("bitplan tasks NAME shows its settings; bitplan train NAME trains it.")


def _print_task(task: type[Task], output: Output) -> None:
    console, card = output.console, CARDS.get(_task_name(task))
    console.print(f"{_task_name(task)}: {getattr(task, 'summary', 'a task of your own')}")
    if card is not None:
        for label, description in (
            ("model", card.model),
            ("data here", card.embedded),
            ("data you bring", card.public),
        ):
            if description:
                console.print(f"{label}: {description}")
        console.print(f"metric: {card.metric}, {card.better} is better")
        if card.floor is not None:
            short = " ".join(card.floor.settings)
            console.print(f"FP32 is at least {card.floor.times_trivial:g} times better than trivial with {short}")
    table = FittedTable()
    table.add_column("setting", "name", style="bold")
    table.add_column("default", "text")
    for key, value in asdict(task.settings_class()).items():
        table.add_row(
            key, repr(value) if value == "" else str(value).lower() if isinstance(value, bool) else str(value)
        )
    table.print(console)


# --- runs


def runs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run, or a folder that holds runs.")] = DEFAULT_PARENT,
    as_json: JsonOption = False,
) -> None:
    """List the runs in a folder: task, plan, seed, status, metric, cost.

    With --json: a list of objects.
    """
    with command_output(as_json) as output:
        records = [run_record(run) for run in find_runs(folder)]
        output.document(records)
        if not as_json:
            if not records:
                output.console.print(f"{folder} holds no runs: bitplan train and bitplan.record() make them.")
            else:
                _print_runs(records, output)


def run_record(run: RunFolder) -> dict[str, Any]:
    """A run as JSON; one that cannot be read has its reason instead."""
    try:
        config, summary, status = run.config(), run.summary(), run.status()
    except RunError as error:
        return {"folder": run.path, "status": "unreadable", "why": str(error)}
    lines = run.metrics()
    name = config.metric["name"]
    values, costs = ([line[key] for line in lines if _is_figure(line.get(key))] for key in (name, "cost"))
    return {
        "folder": run.path,
        "task": config.task,
        "plan": config.plan,
        "seed": config.seed,
        "status": status,
        "step": lines[-1]["step"] if summary is None and lines else 0 if summary is None else summary.step,
        "steps": config.settings.get("steps"),
        "metric": name,
        "value": values[-1] if values else None,
        #: Of the whole run in FP32, as far as it has come.
        "cost": costs[-1] if costs else None,
        "command": config.command,
        **({} if summary is None or summary.why is None else {"why": summary.why}),
    }


def _is_figure(value: Any) -> bool:
    """Whether a value of a line is a number; those that are not finite are texts."""
    return is_number(value) or value in ("NaN", "Infinity", "-Infinity")


def _print_runs(records: list[dict[str, Any]], output: Output) -> None:
    table = FittedTable()
    table.add_column("run", "name", style="bold")
    table.add_column("task", "name", is_optional=True)
    table.add_column("plan", "name")
    table.add_column("seed", "number", is_optional=True)
    table.add_column("status")
    table.add_column("steps", "number", is_optional=True)
    for heading in ("metric", "cost"):
        table.add_column(heading, "number")
    for record in records:
        if record["status"] == "unreadable":
            output.note(record["why"])
            continue
        value, cost = record["value"], record["cost"]
        table.add_row(
            *(str(record["folder"]), record["task"], record["plan"] or "-", str(record["seed"]), record["status"]),
            f"{record['step']}/{'-' if record['steps'] is None else record['steps']}",
            "-" if value is None else f"{record['metric']} {float(value):.4f}",
            "-" if cost is None else f"{float(cost):.1%}",
        )
    table.print(output.console)


# --- report


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
    watch: Annotated[
        bool, typer.Option("--watch", help="Write the page again while runs go on; an open page loads itself again.")
    ] = False,
    every: Annotated[float, typer.Option(min=0.5, metavar="SECONDS", help="Of --watch: how often.")] = 5.0,
    margin: MarginOption = MARGIN,
    as_json: JsonOption = False,
) -> None:
    """Write one HTML page about runs: what was run, the answer in a sentence, charts and tables.

    The page needs no network. With --watch: until all runs are over, or Ctrl-C. With --json: one object with plans,
    runs and the answer.
    """
    with command_output(as_json) as output:
        if watch:
            watch_runs(runs, page, every, margin, output)
        file = measurement_file(runs)
        if file is not None:
            try:
                measurement = Measurement.load(file)
            except RecursionError:
                raise RunError(f"{file} is nested too deeply: name a file of bitplan measure -o.") from None
            write_measurement_page(measurement, page)
            output.document({"page": page, **measurement.to_dict()})
            if not as_json:
                output.console.print(f"The page: {page}")
            return
        report = Report.of(runs, margin)
        write_page(report, page)
        if csv is not None:
            write_file(csv, csv_text(report))
            output.note(f"wrote {csv}")
        output.document({"page": page, **report_record(report)})
        if not as_json:
            for experiment in report.experiments:
                print_experiment(experiment, output.console)
            output.console.print(f"The page: {page}")


#: How often --watch looks for another run after all have ended.
_ROUNDS_FOR_NEXT_RUN = 3


def watch_runs(runs: Sequence[Path], page: Path, every: float, margin: float, output: Output) -> None:
    """Write the page again and again until all runs are over, or a signal arrives.

    A script may begin its next run a moment after the last one has ended: that is waited for.
    """
    written, is_told, rounds_complete = "", False, 0
    with stop_on_signals() as request:
        while not request():
            present = [path for path in runs if path.is_dir() and runs_state(path)]
            if present:
                state = "".join(map(runs_state, present))
                are_over = len(present) == len(runs) and all(map(is_complete, present))
                rounds_complete = rounds_complete + 1 if are_over else 0
                if rounds_complete > (_ROUNDS_FOR_NEXT_RUN if is_told else 0):
                    return
                if state != written:
                    write_page(Report.of(present, margin), page, every)
                    written = state
            if not is_told:
                output.note(f"open {page.resolve()}, which is written anew while runs go on (Ctrl-C ends this)")
                is_told = True
            waited = time.monotonic() + every
            while time.monotonic() < waited and not request():
                time.sleep(0.1)


def runs_state(path: Path) -> str:
    """Changes whenever a run in a folder has written something; empty where there is no run yet."""
    files = [file for run in find_runs(path) for file in (run.metrics_file, run.summary_file, run.run_file)]
    return "".join(f"{file}{file.stat().st_size}{file.stat().st_mtime_ns}" for file in files if file.exists())


def is_complete(path: Path) -> bool:
    """Whether all runs in a folder are over, those that comparisons have not begun included."""
    found = find_runs(path)
    for folder in {path, *(run.path.parent for run in found)}:
        comparison = read_comparison(folder)
        if comparison is not None and not all(RunFolder(folder / name).is_run for name in comparison.labels):
            return False
    return all(run.status() in ("finished", "diverged", "stopped") for run in found)


def write_page(report: Report, page: Path, refresh: float | None = None) -> None:
    """Write the page of a report.

    :param refresh: seconds after which an open page loads itself again; None: it does not.
    """
    from bitplan.lab.report.page import page_html

    text = page_html(report, refresh)
    make_folder(page.parent)
    write_file(page, text)


def measurement_file(paths: list[Path]) -> Path | None:
    """The file of a measurement, if `paths` is one: the file itself, or a folder that holds one and no run."""
    if len(paths) != 1:
        return None
    (path,) = paths
    inside = path / MEASUREMENT_FILE
    return path if path.is_file() else inside if inside.is_file() and not RunFolder(path).is_run else None


def write_measurement_page(measurement: Measurement, page: Path) -> None:
    """Write the page of a measurement."""
    from bitplan.lab.report.page import measurement_page_html

    text = measurement_page_html(measurement)
    make_folder(page.parent)
    write_file(page, text)


def print_experiment(experiment: Experiment, console: Console) -> None:
    """The table of plans, and the answer."""
    columns = plan_columns(experiment)
    table = FittedTable(experiment.name)
    for number, column in enumerate(columns):
        # Names of plans wrap: their ends alone may be alike.
        kind: Kind = "number" if column.is_number else "text" if number == 0 else "name"
        table.add_column(column.title, kind, is_optional=column.is_number and number > 2)
    for plan in experiment.plans:
        table.add_row(*(column.cell(plan).text for column in columns))
    table.print(console)
    console.print(COLUMNS_NOTE)
    console.print(experiment.answer, style="bold")
