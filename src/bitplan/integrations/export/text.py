"""Pieces of exported files: the comment at the top, lists of names, and patterns that choose layers.

Module paths and file names come from users, so that everything that enters a file is quoted here.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bitplan._version import __version__
from bitplan.files import printable


@dataclass(frozen=True)
class FileHeader:
    """What the comment at the top of an exported file says."""

    #: The target and its version, such as ``torchao 0.18``.
    format: str
    #: Such as ``the plan fp8-linear``.
    plan: str
    #: The model's name on the command line; None where Python code gave a model.
    target: str | None
    #: What the file leaves out.
    lines: tuple[str, ...] = ()

    def comment(self, sign: str) -> str:
        model = "" if self.target is None else f", for {self.target}"
        lines = [f"Written by bitplan {__version__} from {self.plan}{model}, for {self.format}."]
        if self.lines:
            lines += ["Not expressed here:", *(f"- {line}" for line in self.lines)]
        return "\n".join(f"{sign} {' '.join(printable(line).split())}" for line in lines)


def python_strings(texts: Sequence[str], indent: int) -> str:
    """A list of strings as Python, one a line.

    >>> print(python_strings(["a.b"], 0))
    [
        'a.b',
    ]
    """
    if not texts:
        return "[]"
    margin = " " * indent
    return "\n".join(["[", *(f"{margin}    {text!r}," for text in texts), f"{margin}]"])


# --- Patterns


def layer_globs(paths: Sequence[str], modules: Sequence[str]) -> list[str]:
    """Globs (:mod:`fnmatch`) that fit all of `paths` and no other module, with ``*`` for numbers where that is so.

    >>> layer_globs(["layers.0.up", "layers.1.up", "layers.0.down"], ["layers.1.down"])
    ['layers.*.up', 'layers.0.down']
    """
    globs = {
        path: ".".join("*" if part.isdigit() else _glob_escape(part) for part in path.split(".")) for path in paths
    }
    fits = _fitting_another(globs, modules, lambda glob: re.compile(fnmatch.translate(glob)))
    return list(dict.fromkeys(_glob_escape(path) if glob in fits else glob for path, glob in globs.items()))


def _glob_escape(part: str) -> str:
    """`part` as a glob that fits itself only; :func:`glob.escape` would also split it as a path."""
    return re.sub(r"([*?[])", r"[\1]", part)


def layer_expression(paths: Sequence[str], modules: Sequence[str]) -> str:
    """One regular expression for :func:`layer_globs`, without anchors; numbers become ``[0-9]+``.

    >>> layer_expression(["layers.0.up", "layers.1.up"], ["head"])
    'layers\\\\.[0-9]+\\\\.up'
    """
    expressions = {
        path: r"\.".join("[0-9]+" if part.isdigit() else re.escape(part) for part in path.split(".")) for path in paths
    }
    fits = _fitting_another(expressions, modules, re.compile)
    return "|".join(
        dict.fromkeys(re.escape(path) if expression in fits else expression for path, expression in expressions.items())
    )


def _fitting_another(
    pattern_of_path: Mapping[str, str], modules: Sequence[str], compiled: Callable[[str], re.Pattern[str]]
) -> set[str]:
    """The patterns that also fit a module that is not among the paths."""
    others = [module for module in modules if module not in pattern_of_path]
    return {
        pattern for pattern in dict.fromkeys(pattern_of_path.values()) if any(map(compiled(pattern).fullmatch, others))
    }
