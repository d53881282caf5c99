"""Shell completion without torch: what may follow on a command line, read from ``completion.json``.

The commands' own modules import torch, which takes seconds. The table is made from them by
``python -m bitplan.cli.completion``; a test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer

FILE = "completion.json"


def command_from_table(name: str, help_text: str) -> Any:
    """A command that can be completed and not be run: its parameters, and those of its subcommands."""
    return typer.main.get_group(_application(_table()[name], name, help_text)).commands[name]


def make_table() -> dict[str, Any]:
    """The table of all commands."""
    from bitplan.cli.app import COMMANDS, load_command

    return {name: _entry(load_command(name)) for name in COMMANDS}


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads((files("bitplan.cli") / FILE).read_text(encoding="utf-8"))
    return table


def _entry(command: Any) -> dict[str, Any]:
    if hasattr(command, "commands"):
        inner = {name: {"help": _first_line(sub), **_entry(sub)} for name, sub in command.commands.items()}
        return {"commands": inner}
    context = command.context_class(command, info_name=command.name, resilient_parsing=True)
    return {
        "params": [
            {
                "opts": [*parameter.opts, *parameter.secondary_opts] if parameter.param_type_name == "option" else [],
                "is_flag": bool(getattr(parameter, "is_flag", False)),
                "nargs": parameter.nargs,
                "values": [item.value for item in parameter.shell_complete(context, "") if item.type == "plain"],
            }
            for parameter in command.params
        ]
    }


def _first_line(command: Any) -> str:
    return (command.help or "").strip().splitlines()[0] if command.help else ""


def _application(entry: dict[str, Any], name: str, help_text: str) -> typer.Typer:
    application = typer.Typer()
    if "commands" in entry:
        group = typer.Typer(help=help_text)
        for sub, inner in entry["commands"].items():
            group.command(sub, help=inner["help"])(_function(inner["params"]))
        application.add_typer(group, name=name)
    else:
        application.command(name, help=help_text)(_function(entry["params"]))
        application.command("_", hidden=True)(lambda: None)  # an application of one command is that command
    return application


def _function(rows: list[dict[str, Any]]) -> Callable[..., None]:
    """A function whose signature has these parameters, as typer reads it."""

    def function(**values: Any) -> None:
        """Completed, never called."""

    parameters = []
    for number, row in enumerate(rows):
        complete = _completing(row["values"])
        kind: Any = bool if row["is_flag"] else list[str] | None
        if row["opts"]:
            option = typer.Option(*row["opts"], autocompletion=None if row["is_flag"] else complete)
        else:
            option = typer.Argument(autocompletion=complete)
            kind = kind if row["nargs"] != 1 else str | None
        name, default = f"parameter{number}", False if row["is_flag"] else None
        annotation = Annotated[kind, option]
        parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
    function.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return function


def _completing(values: list[str]) -> Callable[[str], list[str]]:
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


if __name__ == "__main__":
    (Path(__file__).parent / FILE).write_text(json.dumps(make_table(), indent=1) + "\n")
