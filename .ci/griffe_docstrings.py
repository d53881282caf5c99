"""Turns docstrings into Markdown for the API reference: doctests become code blocks, Sphinx roles plain code."""

from __future__ import annotations

import re
from typing import Any

import griffe

#: A doctest and its output, up to the next blank line.
DOCTEST = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?! *$).*)*", flags=re.MULTILINE)
ROLE = re.compile(r":\w+:`~?([^`]+)`")


def _fenced(doctest: re.Match[str]) -> str:
    indent = doctest["indent"]
    return f"\n{indent}```pycon\n{doctest[0]}\n{indent}```\n"


class MarkdownDocstrings(griffe.Extension):
    """For every object of the package, when it has been collected."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(_fenced, ROLE.sub(r"`\1`", obj.docstring.value))
