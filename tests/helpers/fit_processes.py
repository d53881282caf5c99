"""Processes in place of those of ``python benchmarks/run.py fit``."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.fit import Measured


def hang_after_a_step(connection: Connection, way: str, *arguments: Any) -> None:
    connection.send(("news", "step 1"))
    connection.send(("measured", Measured(step_seconds=[1.5], losses=[2.0])))
    time.sleep(60)


def be_killed(connection: Connection, way: str, *arguments: Any) -> None:
    connection.send(("news", "model made"))
    os.kill(os.getpid(), signal.SIGKILL)
