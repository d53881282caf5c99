"""The command line as a fixture."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from commands import Ran, runner

from bitplan.cli import main


@pytest.fixture
def bitplan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    return runner(main, capsys, monkeypatch)
