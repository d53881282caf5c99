"""The command line's front door.

typer and rich are imported inside :func:`main` only, so that the library works without them and a
missing one is answered by a sentence.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from bitplan.compiler.torch_private import FAKE_TENSOR_LOGGER
from bitplan.errors import BitplanError

if TYPE_CHECKING:
    from typer import Typer

#: Exit code for whatever the user can mend, typer's own usage errors included.
USER_ERROR = 2

_COMMAND_LINE_LIBRARIES = ("typer", "rich")
#: What the extra ``lab`` installs.
_LAB_LIBRARIES = ("safetensors", "plotly", "PIL")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line on `arguments` (default: the process's own) and exit."""
    try:
        from bitplan.cli.app import app
    except ModuleNotFoundError as missing:
        library = (missing.name or "").partition(".")[0]
        if library not in _COMMAND_LINE_LIBRARIES:
            raise
        _refuse(f"the command line needs {library}, which is not installed: run 'pip install typer rich'.")
    if "TORCH_LOGS" not in os.environ:
        # What does not run on its batch is told in a sentence; torch would put a traceback in front of it.
        logging.getLogger(FAKE_TENSOR_LOGGER).addFilter(_is_no_failure_of_shapes)
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


def _is_no_failure_of_shapes(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("failed while attempting to run meta")


def _refuse(sentence: str) -> NoReturn:
    print(f"bitplan: {sentence}", file=sys.stderr)
    sys.exit(USER_ERROR)
