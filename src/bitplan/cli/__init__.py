"""Entry point of the command line.

typer and rich are imported inside :func:`main` only: the library works without them, and a missing one is reported in a
sentence.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from bitplan.errors import BitplanError

if TYPE_CHECKING:
    from typer import Typer

#: Exit code of user errors, the same as typer's for wrong usage.
USER_ERROR = 2

_COMMAND_LINE_LIBRARIES = ("typer", "rich")
#: What the extra ``lab`` installs.
_LAB_LIBRARIES = ("safetensors", "plotly", "jinja2", "PIL")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line on `arguments` (default: the process's own) and exit."""
    try:
        from bitplan.cli.app import app
    except ModuleNotFoundError as missing:
        library = (missing.name or "").partition(".")[0]
        if library not in _COMMAND_LINE_LIBRARIES:
            raise
        _refuse(f"the command line needs {library}, which is not installed: run 'pip install typer rich'.")
    # A fixed program name: `python -m bitplan` must offer the same shell completion as `bitplan`.
    run_app(app, arguments, "bitplan")


def run_app(app: Typer, arguments: Sequence[str] | None, program: str) -> NoReturn:
    """Run a typer application on `arguments` and exit; a user's mistake is printed as one sentence."""
    try:
        app(args=arguments, prog_name=program)
    except BitplanError as error:
        _refuse(str(error))
    except ModuleNotFoundError as missing:
        library = (missing.name or "").partition(".")[0]
        if library not in _LAB_LIBRARIES:
            raise
        _refuse(f"this command needs {library}, which is not installed: run \"pip install 'bitplan[lab]'\".")
    sys.exit(0)


def _refuse(sentence: str) -> NoReturn:
    print(f"bitplan: {sentence}", file=sys.stderr)
    sys.exit(USER_ERROR)
