"""Writing files so that nothing a user had is lost."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write all of `text` or nothing: a process that is killed on the way leaves the old file as it was."""
    if path.exists() and not path.is_file():  # a pipe or a terminal has nothing to lose
        path.write_text(text, encoding="utf-8", newline="\n")
        return
    target = path.resolve()
    fresh = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        fresh.write_text(text, encoding="utf-8", newline="\n")
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)
