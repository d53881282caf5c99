"""Overhead of eager execution on a small linear layer, relative to the layer without a plan.

Prints the median CPU time of forward + backward of Linear(64, 64) on a batch of 32 (one thread) for every execution,
times plain; every contender runs in a process of its own. Below that, the call frames and source files that lie
between ``nn.Linear.forward`` and the rounding arithmetic.

    python benchmarks/eager_overhead.py [--plan int8-linear] [--repeats 3000]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXECUTIONS = ("plain", "emulate", "packed", "native")
#: A layer small enough that Python overhead, not arithmetic, decides the time.
FEATURES, BATCH = 64, 32


def measure_step_seconds(execution: str, plan: str, repeats: int) -> float:
    """Median seconds of one forward and backward pass."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = torch.nn.Linear(FEATURES, FEATURES)
    x = torch.randn(BATCH, FEATURES, requires_grad=True)
    grad = torch.randn(BATCH, FEATURES)
    attach_for(layer, plan, execution, x)
    seconds = []
    for _ in range(repeats):
        begin = time.thread_time()
        layer(x).backward(grad)
        seconds.append(time.thread_time() - begin)
    return statistics.median(seconds)


def attach_for(layer: Any, plan: str, execution: str, x: object) -> None:
    import bitplan as bp

    if execution == "native":
        bp.attach(layer, plan, example=x, execution=bp.Native(min_macs=0))
    elif execution != "plain":
        bp.attach(layer, plan, example=x, execution=execution)


def find_frames_to_rounding(execution: str, plan: str) -> list[tuple[str, str]]:
    """(file, function) of the frames below ``nn.Linear.forward`` at the first call of the rounding arithmetic."""
    import torch

    from bitplan.numerics import quantizer

    layer = torch.nn.Linear(FEATURES, FEATURES)
    x = torch.randn(BATCH, FEATURES, requires_grad=True)
    attach_for(layer, plan, execution, x)
    stacks: list[list[traceback.FrameSummary]] = []

    def capturing(arithmetic: Callable[..., object]) -> Callable[..., object]:
        def capture_stack(*args: object) -> object:
            stacks.append(traceback.extract_stack()[:-1])
            return arithmetic(*args)

        return capture_stack

    arithmetic = {name: getattr(quantizer, name) for name in ("round_float", "round_int")}
    for name, function in arithmetic.items():
        setattr(quantizer, name, capturing(function))
    try:
        layer(x)
    finally:
        for name, function in arithmetic.items():
            setattr(quantizer, name, function)
    stack = stacks[0]
    first = max(
        at for at, frame in enumerate(stack) if frame.name == "forward" and frame.filename.endswith("linear.py")
    )
    source = Path(quantizer.__file__).parents[1]
    return [
        (str(Path(frame.filename).relative_to(source)), frame.name)
        for frame in stack[first + 1 :]
        if source in Path(frame.filename).parents
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", default="int8-linear")
    parser.add_argument("--repeats", type=int, default=3000)
    parser.add_argument("--contender", choices=EXECUTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--frames", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.frames:
        print(json.dumps(find_frames_to_rounding(options.contender, options.plan)))
        return
    if options.contender:
        print(measure_step_seconds(options.contender, options.plan, options.repeats))
        return
    own = [sys.executable, __file__, "--plan", options.plan, "--repeats", str(options.repeats)]

    def run(*arguments: str) -> str:
        return subprocess.run([*own, *arguments], check=True, capture_output=True, text=True).stdout

    seconds = {execution: float(run("--contender", execution)) for execution in EXECUTIONS}
    for execution, median in seconds.items():
        print(f"{execution:8} {median * 1e6:8.1f} us  {median / seconds['plain']:5.1f} times plain")
    frames = json.loads(run("--contender", "emulate", "--frames"))
    print(f"{len(frames)} frames in {len({file for file, _ in frames})} files below nn.Linear.forward:")
    for file, function in frames:
        print(f"  {file}: {function}")


if __name__ == "__main__":
    main()
