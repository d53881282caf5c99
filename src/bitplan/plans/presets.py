"""Plans that come with bitplan, by name. Each is an ordinary plan file with its reasons in comments."""

from __future__ import annotations

import re
from importlib.resources import files
from importlib.resources.abc import Traversable

from bitplan.errors import PlanError, nearest_names

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_SUFFIX = ".yaml"


def preset_names() -> list[str]:
    """All names, sorted."""
    return sorted(file.name.removesuffix(_SUFFIX) for file in _folder().iterdir() if file.name.endswith(_SUFFIX))


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
        raise PlanError(f"there is no preset {name!r}; {nearest_names(name, names)}")
    return (_folder() / f"{name}{_SUFFIX}").read_text(encoding="utf-8")


def _folder() -> Traversable:
    return files("bitplan.plans") / "presets"
