"""The command line as a fixture."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from commands import Ran, runner

from benchmarks.commands import main


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    return runner(main, capsys, monkeypatch)
