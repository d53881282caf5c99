"""Measuring memory prints nothing, though torch's profiler reports its starts and stops on stderr.

Run by tests/test_fresh_process.py.
"""

from __future__ import annotations

import pytest
import torch

from bitplan.analysis.memory.measure import HostAllocator


def test_nothing_is_said_on_stderr_by_the_profiler(capfd: pytest.CaptureFixture[str]) -> None:
    with HostAllocator():
        torch.empty(10)
    assert capfd.readouterr().err == ""
