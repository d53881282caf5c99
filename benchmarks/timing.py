"""Timing of functions by CPU time of one thread or by device events, and of training steps by wall time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

#: The least length of a sample, so that the clock's resolution does not matter.
_SAMPLE_SECONDS = 0.02


def seconds_per_call(call: Callable[[], object], device: torch.device, samples: int = 15) -> float:
    """The best of several samples: the speed of the undisturbed machine."""
    if device.type == "cuda":
        return _device_seconds(call, samples)
    call()
    begin = time.thread_time()
    call()
    repeats = max(1, int(_SAMPLE_SECONDS / max(time.thread_time() - begin, 1e-6)))
    return min(_thread_seconds(call, repeats) for _ in range(samples))


def seconds_per_step(step: Callable[[], object], steps: int, device: torch.device) -> float:
    """Wall time per step over a number of steps, from an idle device until it is idle again."""
    wait_for(device)
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    wait_for(device)
    return (time.perf_counter() - begin) / steps


def best_turns(timed: Mapping[str, Callable[[int], float]], turns: int) -> dict[str, float]:
    """Name -> seconds per step, the best of the turns that all take one after the other.

    A turn is as many steps as the fastest makes in half a second: before its first step a GPU waits for the host, which
    it does not do in training.

    :param timed: name -> a function that makes a number of steps and returns the seconds per step.
    """
    fastest = min(seconds(1) for seconds in timed.values())
    steps = max(1, min(20, int(0.5 / max(fastest, 1e-4))))
    best = dict.fromkeys(timed, float("inf"))
    for _ in range(turns):
        for name, seconds in timed.items():
            best[name] = min(best[name], seconds(steps))
    return best


def wait_for(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
