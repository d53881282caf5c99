"""A Ray cluster of this machine, with two CPUs, for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def local_ray() -> Iterator[None]:
    ray = pytest.importorskip("ray", reason="needs the extra ray")
    patch = pytest.MonkeyPatch()
    patch.setenv("OMP_NUM_THREADS", "1")
    patch.setenv("RAY_worker_niceness", "0")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        yield
    finally:
        ray.shutdown()
        patch.undo()
