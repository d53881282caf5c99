"""``bitplan runs``: the run folders that lie somewhere, and what came of each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from bitplan.cli.output import JsonOption, Output, command_output
from bitplan.errors import RunError
from bitplan.lab.train.folder import DEFAULT_PARENT, RunFolder, find_runs


def register(app: typer.Typer) -> None:
    app.command("runs")(runs)


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
                output.console.print(f"{folder} holds no runs: bitplan train makes them.", soft_wrap=True)
            else:
                _print(records, output)


def run_record(run: RunFolder) -> dict[str, Any]:
    """What JSON says about a run; one that cannot be read says why, and hides no other."""
    try:
        config, summary, status = run.config(), run.summary(), run.status()
    except RunError as error:
        return {"folder": run.path, "status": "unreadable", "why": str(error)}
    lines = run.metrics()
    name = config.metric["name"]
    values = [line[name] for line in lines if name in line]
    costs = [line["cost"] for line in lines if "cost" in line]
    return {
        "folder": run.path,
        "task": config.task,
        "plan": config.plan,
        "seed": config.seed,
        "status": status,
        "step": lines[-1]["step"] if summary is None and lines else 0 if summary is None else summary.step,
        "steps": config.settings["steps"],
        "metric": name,
        "value": values[-1] if values else None,
        #: Of the whole run in FP32, as far as it has come.
        "cost": costs[-1] if costs else None,
        "command": config.command,
        **({} if summary is None or summary.why is None else {"why": summary.why}),
    }


def _print(records: list[dict[str, Any]], output: Output) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("run", "task", "plan", "seed", "status"):
        table.add_column(heading, style="bold" if heading == "run" else None, no_wrap=True)
    for heading in ("steps", "metric", "cost"):
        table.add_column(heading, justify="right", no_wrap=True)
    for record in records:
        if record["status"] == "unreadable":
            output.note(record["why"])
            continue
        value, cost = record["value"], record["cost"]
        table.add_row(
            *(str(record["folder"]), record["task"], record["plan"] or "-", str(record["seed"]), record["status"]),
            f"{record['step']}/{record['steps']}",
            "-" if value is None else f"{record['metric']} {float(value):.4f}",
            "-" if cost is None else f"{float(cost):.1%}",
        )
    output.console.print(table)
