"""Random states that are given back: what looks at a training run must not move its generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def randomness_kept() -> Iterator[None]:
    """Give torch (on every device), numpy and Python their random states back at the end."""
    python, numbers = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
