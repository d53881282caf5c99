from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def tiny() -> str:
    """A task of milliseconds, as a user's own file."""
    return f"{Path(__file__).parents[1] / 'train' / 'tiny_task.py'}:Tiny"
