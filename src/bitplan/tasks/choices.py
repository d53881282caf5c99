"""Settings that are given as words: ``--set key=value``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, get_type_hints

from bitplan.errors import TaskError, nearest_names
from bitplan.tasks.task import Settings

_TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def read_settings(kind: type[Settings], given: Sequence[str], task: str) -> Settings:
    """The settings of `kind` with what is `given` as ``key=value``, each value read as its field's type.

    >>> read_settings(Settings, ["steps=200", "lr=0.05"], "digits").lr
    0.05
    """
    types = get_type_hints(kind)
    known = [field.name for field in fields(kind)]
    chosen: dict[str, Any] = {}
    for item in given:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise TaskError(f"{item!r} sets nothing: write key=value, such as steps=200.")
        if key not in known:
            raise TaskError(f"the task {task} has no setting {key!r}; {nearest_names(key, known)}")
        if key in chosen:
            raise TaskError(f"{key} is set twice: give it once.")
        chosen[key] = _read(key, text, types[key])
    try:
        return kind(**chosen)
    except ValueError as error:
        if isinstance(error, TaskError):
            raise
        raise TaskError(f"the task {task} refuses these settings: {error}") from error


def _read(key: str, text: str, kind: Any) -> Any:
    if kind is bool:
        if text.lower() in _TRUTH:
            return _TRUTH[text.lower()]
    elif kind is str:
        return text
    elif kind in (int, float):
        try:
            # 64_000 and 1e3 are whole numbers, too.
            number = float(text)
            if kind is float:
                return number
            if number.is_integer():
                return int(text) if text.lstrip("+-").replace("_", "").isdigit() else int(number)
        except ValueError:
            pass
    else:
        raise TaskError(f"{key} is of a kind that words cannot give: set it in the task's own file.")
    raise TaskError(f"{key}={text}: {key} must be {_WORDS[kind]}.")
