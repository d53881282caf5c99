"""The example of docs/packed.md runs, and really saves what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "packed.md").read_text()


def test_the_example_runs_and_shows_bytes_by_class(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL) if "import" in block)
    exec(example, {})
    shown = capsys.readouterr().out
    assert "activations" in shown
