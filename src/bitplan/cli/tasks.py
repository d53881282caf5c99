"""``bitplan tasks``: the ready experiments, and the settings of one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from bitplan.cli.arguments import complete_task
from bitplan.cli.output import JsonOption, Output, command_output
from bitplan.lab.tasks.registry import CARDS, Card, task_class, task_names
from bitplan.lab.tasks.task import Task


def register(app: typer.Typer) -> None:
    app.command("tasks")(tasks)


def tasks(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[TASK]",
            help="Show this one with its settings; my_task.py:MyTask is run, so name only files that you trust.",
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
            found = [task_class(each) for each in task_names()]
            output.document([task_record(task) for task in found])
            if not as_json:
                _print_all(found, output)
        else:
            task = task_class(name)
            output.document(task_record(task))
            if not as_json:
                _print_one(task, output)


def task_record(task: type[Task]) -> dict[str, Any]:
    """What JSON says about a task; a task of the user's own has no card, and what it would say is null."""
    card = CARDS.get(_name(task))
    return {
        "name": _name(task),
        "summary": getattr(task, "summary", ""),
        "model": card and card.model,
        "embedded": (card and card.embedded) or None,
        "public": (card and card.public) or None,
        "metric": card and {"name": card.metric, "better": card.better},
        "settings": asdict(task.settings_class()),
        "floor": card and card.floor and asdict(card.floor),
    }


def _name(task: type[Task]) -> str:
    return getattr(task, "name", task.__name__)


def _floor_text(card: Card) -> str:
    return "-" if card.floor is None else f"{card.floor.times_trivial:g}x trivial"


def _print_all(found: list[type[Task]], output: Output) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("name", style="bold", no_wrap=True)
    for heading in ("what", "model", "data here", "data you bring", "metric", "FP32 reaches"):
        table.add_column(heading)
    for task in found:
        card = CARDS[task.name]
        table.add_row(
            *(task.name, task.summary, card.model, card.embedded or "-", card.public or "-"),
            *(f"{card.metric}, {card.better}", _floor_text(card)),
        )
    output.console.print(table)
    output.console.print("bitplan tasks NAME shows its settings; bitplan train NAME trains it.", soft_wrap=True)


def _print_one(task: type[Task], output: Output) -> None:
    console, card = output.console, CARDS.get(_name(task))
    console.print(f"{_name(task)}: {getattr(task, 'summary', 'a task of your own')}", soft_wrap=True)
    if card is not None:
        for what, words in (("model", card.model), ("data here", card.embedded), ("data you bring", card.public)):
            if words:
                console.print(f"{what}: {words}", soft_wrap=True)
        console.print(f"metric: {card.metric}, {card.better} is better", soft_wrap=True)
        if card.floor is not None:
            short = " ".join(card.floor.settings)
            console.print(f"FP32 is at least {card.floor.times_trivial:g} times better than trivial with {short}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("setting", style="bold", no_wrap=True)
    table.add_column("default", no_wrap=True)
    for key, value in asdict(task.settings_class()).items():
        table.add_row(
            key, repr(value) if value == "" else str(value).lower() if isinstance(value, bool) else str(value)
        )
    console.print(table)
