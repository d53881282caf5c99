"""Files of tests/fresh_process compare the state of the whole process: each runs in a process of its own.

In a worker of pytest, models that other tests leak would disturb them, and each of their garbage collections would
visit the objects of all tests before them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("file", sorted((HERE / "fresh_process").glob("*.py")), ids=lambda file: file.stem)
def test_in_a_fresh_process(file: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", str(file)]
    tests = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=False)
    assert tests.returncode == 0, tests.stdout + tests.stderr
