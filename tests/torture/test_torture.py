"""A sample of the torture tests; ``make torture`` runs them for ten minutes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUNNER = Path(__file__).with_name("run.py")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_few_cases_of_every_area_hold() -> None:
    ran = subprocess.run(
        [sys.executable, str(RUNNER), "--cases", "4", "--seconds", "40", "--seed", "0"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    cases = {line.split()[0]: line.split()[1:3] for line in ran.stdout.splitlines()[2:]}
    assert set(cases) == {"kills", "folders", "plans", "commands"}
    assert all(int(number) > 0 and failed == "0" for number, failed in cases.values())
