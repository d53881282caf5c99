"""Running a command line in this process, as a user would meet it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Ran:
    code: object
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out, parse_constant=_no_constant)


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not strict JSON")


def runner(
    main: Callable[[list[str]], object], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Ran]:
    """A function that runs `main` on its arguments and returns exit code, stdout and stderr."""
    # The machine's own colours and width (pytest-xdist sets COLUMNS for its workers) must not reach the tests.
    for variable in ("COLUMNS", "FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS", "TTY_COMPATIBLE"):
        monkeypatch.delenv(variable, raising=False)

    def run(*arguments: object) -> Ran:
        with pytest.raises(SystemExit) as exit_:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ran(exit_.value.code or 0, captured.out, captured.err)

    return run
