"""The typer application: global options, and the list of command modules.

A command module has one function, ``register(app)``, which adds its command (``app.command()``) or its
group of commands (``app.add_typer(group, name=...)``). Adding the module to :data:`COMMANDS` is all it takes.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from bitplan._version import __version__
from bitplan.cli import (
    advise,
    assign,
    compare,
    cost,
    demo,
    env,
    error,
    formats,
    measure,
    memory,
    plan,
    range_test,
    report,
    runs,
    schedules,
    sites,
    tasks,
    train,
)

#: What adds each command, in the order ``bitplan --help`` shows them.
COMMANDS: tuple[Callable[[typer.Typer], None], ...] = (
    formats.register,
    error.register,
    measure.register,
    advise.register,
    sites.register,
    plan.register,
    cost.register,
    schedules.register,
    range_test.register,
    assign.register,
    memory.register,
    tasks.register,
    train.register,
    compare.register,
    report.register,
    runs.register,
    demo.register,
    env.register,
)

_LOG_HANDLER = "bitplan command line"

app = typer.Typer(
    name="bitplan",
    help="Number formats, plans and costs of low-precision training in PyTorch.",
    no_args_is_help=True,
    # A bug's traceback stays the plain one: short, pasteable, and without the values of local variables.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"bitplan {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    verbose: Annotated[
        int,
        typer.Option("--verbose", "-v", count=True, show_default=False, help="Show the log on stderr; -vv for all."),
    ] = 0,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if verbose:
        _show_log(logging.INFO if verbose == 1 else logging.DEBUG)


def _show_log(level: int) -> None:
    log = logging.getLogger("bitplan")
    for old in [handler for handler in log.handlers if handler.name == _LOG_HANDLER]:
        log.removeHandler(old)
    handler = logging.StreamHandler(sys.stderr)
    handler.name = _LOG_HANDLER
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    log.addHandler(handler)
    log.setLevel(level)


for _register in COMMANDS:
    _register(app)
