"""The typer application: global options, and the table of commands.

A command's module is imported only when the command runs, so that ``bitplan --help`` and ``bitplan --version`` do not
wait for torch. The module has one function, ``register(app)``, which adds its commands to a typer application.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from bitplan._version import __version__
from bitplan.files import printable


class Entry(NamedTuple):
    """A command as ``bitplan --help`` shows it."""

    #: Of :mod:`bitplan.cli`.
    module: str
    #: The heading under which the command stands.
    panel: str
    summary: str


PLAN, UNDERSTAND, CHOOSE, LAB, OTHER = "Plan", "Understand", "Choose", "Lab", "Environment"

#: In the order of ``bitplan --help``.
COMMANDS: dict[str, Entry] = {
    "plan": Entry("plan", PLAN, "List, show, check, explain, make, export and import plans."),
    "models": Entry("model", UNDERSTAND, "List the built-in models."),
    "sites": Entry("model", UNDERSTAND, "List every tensor of one training step."),
    "cost": Entry("model", UNDERSTAND, "Bit operations and bytes of a training step under a plan."),
    "memory": Entry("model", UNDERSTAND, "Memory of a training step, estimated and measured."),
    "measure": Entry("measure", UNDERSTAND, "Rounding error of every GEMM of a model, by format."),
    "formats": Entry("formats", UNDERSTAND, "Range, spacing and special codes of number formats."),
    "error": Entry("formats", UNDERSTAND, "Rounding error of products of random matrices, by format."),
    "auto": Entry("auto", CHOOSE, "Find a plan for limits on memory, time and loss, measured and verified."),
    "assign": Entry("assign", CHOOSE, "Make a plan for a memory budget or a share of low precision."),
    "advise": Entry("measure", CHOOSE, "Make a plan from measured errors, with reasons."),
    "range-test": Entry("schedules", CHOOSE, "Find the lowest bit width at which a task still learns."),
    "schedules": Entry("schedules", CHOOSE, "Compare and draw precision schedules."),
    "tasks": Entry("runs", LAB, "List the built-in training tasks and their settings."),
    "train": Entry("train", LAB, "Train a task, under a plan if one is given."),
    "compare": Entry("compare", LAB, "Train a task under several plans and seeds."),
    "runs": Entry("runs", LAB, "List the runs in a folder."),
    "doctor": Entry("doctor", LAB, "Find the tensor whose rounding broke a run, and a plan that mends it."),
    "report": Entry("runs", LAB, "Write an HTML page about runs."),
    "demo": Entry("compare", LAB, "Train digits under six plans and write a page about it."),
    "crossover": Entry("crossover", OTHER, "From which size on native GEMMs pay on this machine."),
    "env": Entry("env", OTHER, "Versions, processor and GPUs, for a bug report."),
}

#: Commands of one argument that take a plan by ``--plan``.
WITH_PLAN = ("sites", "cost", "memory", "train")

_LOG_HANDLER = "bitplan command line"


class LazyGroup(TyperGroup):
    """A group of commands that are known by name and summary, and loaded when they are called or completed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, entry in COMMANDS.items():
            self.commands[name] = TyperCommand(name, help=entry.summary, rich_help_panel=entry.panel)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in COMMANDS and ctx.resilient_parsing:  # a shell asks what may follow
            from bitplan.cli.completion import command_from_table

            self.commands[args[0]] = command_from_table(args[0], COMMANDS[args[0]].summary)
        elif args and args[0] in COMMANDS:
            self.commands[args[0]] = load_command(args[0])
            if args[0] in WITH_PLAN:
                from bitplan.cli.arguments import require_one_argument

                require_one_argument(args[0], args[1:])
        return super().resolve_command(ctx, args)


def load_command(name: str) -> Any:
    """Import the module of a command; the command, as typer made it."""
    part = typer.Typer()
    import_module(f"bitplan.cli.{COMMANDS[name].module}").register(part)
    if "TORCH_LOGS" not in os.environ:
        # A model that does not run on its batch is reported in a sentence; torch would log a traceback before it.
        from bitplan.compiler.torch_private import FAKE_TENSOR_LOGGER

        logging.getLogger(FAKE_TENSOR_LOGGER).addFilter(_is_no_shape_error)
    return typer.main.get_group(part).commands[name]


def _is_no_shape_error(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("failed while attempting to run meta")


def whole_group() -> Any:
    """The application with every command loaded, for those who look at all of them."""
    group = typer.main.get_command(app)
    group.commands.update({name: load_command(name) for name in COMMANDS})  # type: ignore[attr-defined]
    return group


app = typer.Typer(
    name="bitplan",
    cls=LazyGroup,
    help="Number formats, plans and costs of low-precision training in PyTorch.",
    no_args_is_help=True,
    # A bug's traceback stays the plain one: short, pasteable, and without the values of local variables.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"bitplan {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    verbose: Annotated[
        int,
        typer.Option("--verbose", "-v", count=True, show_default=False, help="Show the log on stderr; -vv for all."),
    ] = 0,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    allow_code: Annotated[
        bool,
        typer.Option(
            "--allow-code", help="Import the functions that plans name as module:name. For plans that you trust only."
        ),
    ] = False,
) -> None:
    if allow_code:
        from bitplan.plans.code import code_allowed

        sys.path.append(os.getcwd())  # as for python -m bitplan; workers inherit it
        context.with_resource(code_allowed())
    if verbose:
        _show_log(logging.INFO if verbose == 1 else logging.DEBUG)


class _SafeFormatter(logging.Formatter):
    """Escapes control characters: messages may name what is in a run folder that somebody else made."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _show_log(level: int) -> None:
    log = logging.getLogger("bitplan")
    for handler in [handler for handler in log.handlers if handler.name == _LOG_HANDLER]:
        log.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.name = _LOG_HANDLER
    handler.setFormatter(_SafeFormatter("%(name)s: %(message)s"))
    log.addHandler(handler)
    log.setLevel(level)
