"""Timing of functions by CPU time of one thread or by device events, and of training steps by wall time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from bitplan.planners.auto.trials import device_alone

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


@dataclass(frozen=True)
class StepTime:
    """Seconds per step over several turns."""

    #: The best turn: the speed of the undisturbed machine.
    best: float
    #: Interquartile range of the turns over their median; 0 for a single turn.
    spread: float

    @classmethod
    def of(cls, turns: Sequence[float]) -> StepTime:
        """
        >>> StepTime.of([4.0, 2.0, 2.0, 3.0, 2.0])
        StepTime(best=2.0, spread=0.75)
        """
        if len(turns) < 2:
            return cls(min(turns), 0.0)
        quarters = statistics.quantiles(turns, n=4)
        return cls(min(turns), (quarters[2] - quarters[0]) / statistics.median(turns))


def seconds_per_turn(step: Callable[[], object], steps: int, device: torch.device) -> float:
    """Wall time per step, between turns of other processes on the same GPU.

    A step before the clock starts takes memory from the device, which the others may have again afterwards. Turns of
    other benchmarks and of searches wait.
    """
    if device.type != "cuda":
        return seconds_per_step(step, steps, device)
    with device_alone(device):
        step()
        seconds = seconds_per_step(step, steps, device)
        torch.cuda.empty_cache()
    return seconds


def take_turns(timed: Mapping[str, Callable[[int], float]], turns: int) -> dict[str, StepTime]:
    """Name -> seconds per step, over the turns that all take one after the other.

    A machine that gets hot or busy then slows all of them. A turn is as many steps as the fastest makes in half a
    second: before its first step a GPU waits for the host, which it does not do in training.

    :param timed: name -> a function that makes a number of steps and returns the seconds per step.
    """
    fastest = min(seconds(1) for seconds in timed.values())
    steps = max(1, min(20, int(0.5 / max(fastest, 1e-4))))
    times: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(turns):
        for name, seconds in timed.items():
            times[name].append(seconds(steps))
    return {name: StepTime.of(taken) for name, taken in times.items()}


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
