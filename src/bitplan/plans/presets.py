"""Plans that come with bitplan, by name. Each is an ordinary plan file with its reasons in comments."""

from __future__ import annotations

import re
from importlib.resources import files
from importlib.resources.abc import Traversable

from bitplan.errors import PlanError, nearest_names

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_SUFFIX = ".yaml"


#: The presets to train with: they choose tensors by what they are, and so fit models of all kinds.
_FIRST = ("fp8-train", "fp8-train-small", "packed-fp8", "packed-fp8-mlp")


def preset_names() -> list[str]:
    """All names: those to train with first, the others sorted."""
    names = {file.name.removesuffix(_SUFFIX) for file in _folder().iterdir() if file.name.endswith(_SUFFIX)}
    return [*_FIRST, *sorted(names.difference(_FIRST))]


def is_preset_name(text: str) -> bool:
    """Whether a text is spelt like a preset's name; a file has a dot or a slash in it.

    >>> is_preset_name("fp8-linear"), is_preset_name("base.yaml"), is_preset_name("plans/base")
    (True, False, False)
    """
    return _NAME.fullmatch(text) is not None


def preset_text(name: str) -> str:
    """The YAML text of a preset, comments included."""
    names = preset_names()
    if name not in names:
        advice = nearest_names(name, names) if is_preset_name(name) else "Plan.load() reads files."
        raise PlanError(f"there is no preset {name!r}; {advice}")
    return (_folder() / f"{name}{_SUFFIX}").read_text(encoding="utf-8")


def _folder() -> Traversable:
    return files("bitplan.plans") / "presets"
