"""Entry point of the command line.

typer and rich are imported inside :func:`main` only: the library works without them, and a missing one is reported in a
sentence.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from bitplan.errors import BitplanError
from bitplan.files import printable

if TYPE_CHECKING:
    from typer import Typer

#: Exit code of user errors, the same as typer's for wrong usage.
USER_ERROR = 2
#: Exit code of commands whose output nobody reads any longer, as shells have it for SIGPIPE.
CLOSED_OUTPUT = 128 + 13

_COMMAND_LINE_LIBRARIES = ("typer", "rich")
log = logging.getLogger("bitplan")

#: Errors of writing to stdout, which have no file name.
_OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO)
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
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal or a pipe may be ASCII only
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            app(args=arguments, prog_name=program)
        finally:
            sys.stdout.flush()
    except BitplanError as error:
        _refuse(str(error))
    except ModuleNotFoundError as missing:
        library = (missing.name or "").partition(".")[0]
        if library not in _LAB_LIBRARIES:
            raise
        _refuse(f"this command needs {library}, which is not installed: run \"pip install 'bitplan[lab]'\".")
    except OSError as error:
        _refuse_system_error(error)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        log.debug("out of memory", exc_info=error)
        _refuse("there is not enough memory for that: choose smaller sizes.")
    sys.exit(0)


def _refuse_system_error(error: OSError) -> NoReturn:
    """Errors of the operating system are those of a file, a folder or the output, which the user can mend."""
    log.debug("the system reported an error", exc_info=error)
    if error.filename is not None:
        _refuse(f"cannot use {error.filename} ({error.strerror}): name another file or folder.")
    if error.errno not in _OUTPUT_ERRORS:
        raise error
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - what is left in its buffer must not fail again at exit
    if error.errno == errno.EPIPE:
        sys.exit(CLOSED_OUTPUT)
    _refuse(f"cannot write the output ({error.strerror}): free some space, or send it elsewhere.")


def _is_out_of_memory(error: Exception) -> bool:
    """torch reports host memory that it cannot allocate as a plain RuntimeError, device memory as a class of it."""
    text = str(error)
    return isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text


def _refuse(sentence: str) -> NoReturn:
    print(f"bitplan: {printable(sentence)}", file=sys.stderr)
    sys.exit(USER_ERROR)
