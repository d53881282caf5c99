"""Timing one function: CPU time of one thread, or device events on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

#: A sample is long enough for the clock to be no part of it.
_SAMPLE_SECONDS = 0.02


def seconds_per_call(call: Callable[[], object], device: torch.device, samples: int = 15) -> float:
    """The best of several samples: what the machine can do when nothing else disturbs it."""
    if device.type == "cuda":
        return _device_seconds(call, samples)
    call()
    begin = time.thread_time()
    call()
    repeats = max(1, int(_SAMPLE_SECONDS / max(time.thread_time() - begin, 1e-6)))
    return min(_thread_seconds(call, repeats) for _ in range(samples))


def _thread_seconds(call: Callable[[], object], repeats: int) -> float:
    begin = time.thread_time()
    for _ in range(repeats):
        call()
    return (time.thread_time() - begin) / repeats


def _device_seconds(call: Callable[[], object], samples: int, repeats: int = 10) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(samples):
        start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3 / repeats)
    return best
