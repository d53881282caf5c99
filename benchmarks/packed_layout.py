"""Time, memory and slowest kernels of one forward and backward pass of a timm model in packed execution, compiled.

    python benchmarks/packed_layout.py --model convnext_tiny --plan every-activation
    python benchmarks/packed_layout.py --model convnext_tiny --plan products-and-sums
    python benchmarks/packed_layout.py --model convnext_tiny --plan none

The model and its channels-last images are in BF16. A plan per process: compiled variants of one process share memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch

import bitplan
from bitplan.analysis.targets import Target, move_target
from bitplan.lab.train.loop import chosen_device

RULES: dict[str, list[dict[str, Any]]] = {
    "every-activation": [{"match": "*", "activation": "e4m3"}],
    "products-and-sums": [
        {"match": "*", "op": ["linear", "conv2d"], "activation": "e4m3"},
        {"match": "*", "op": "add", "activation": "e4m3"},
    ],
    "none": [],
}
#: Passes before anything is measured, and measured ones.
WARM_UP, REPEATS = 5, 30


def make_step(options: argparse.Namespace, device: torch.device) -> Callable[[], None]:
    """A forward and backward pass, compiled."""
    import timm

    torch.manual_seed(0)
    model = timm.create_model(options.model).to(torch.bfloat16).train()
    images = torch.randn(options.batch, 3, options.size, options.size, dtype=torch.bfloat16)
    target = move_target(Target(model, images), device)
    if options.plan == "none":
        compiled: Any = torch.compile(target.model)
    else:
        plan = bitplan.Plan.from_dict({"version": 1, "rules": RULES[options.plan]})
        compiled = bitplan.attach(target.model, plan, example=target.batch, execution="packed").compile()

    def step() -> None:
        compiled(target.batch).float().square().mean().backward()
        target.model.zero_grad(set_to_none=True)

    return step


def measure(step: Callable[[], None]) -> tuple[float, float]:
    """Median milliseconds, and the peak in GiB."""
    times = []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times), torch.cuda.max_memory_allocated() / 2**30


def slowest_kernels(step: Callable[[], None], count: int = 5) -> list[dict[str, Any]]:
    """The kernels with the most time in one step: calls, and milliseconds of all calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    rows = sorted(profile.key_averages(), key=lambda row: -row.self_device_time_total)[:count]
    return [
        {"kernel": row.key, "calls": row.count, "milliseconds": round(row.self_device_time_total / 1000, 3)}
        for row in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="convnext_tiny", help="a model of timm")
    parser.add_argument("--plan", choices=RULES, default="every-activation")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--size", type=int, default=224, help="height and width of the images")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    device = chosen_device(options.device)
    step = make_step(options, device)
    for _ in range(WARM_UP):
        step()
    if device.type != "cuda":  # that it runs at all: there is nothing to measure
        return
    milliseconds, peak = measure(step)
    kernels = slowest_kernels(step)
    if options.json:
        row = {"model": options.model, "plan": options.plan, "milliseconds": milliseconds, "peak_gib": peak}
        print(json.dumps({**row, "kernels": kernels}))
        return
    print(f"{options.model}, {options.plan}, {options.batch} images: {milliseconds:.1f} ms, {peak:.2f} GiB")
    for kernel in kernels:
        print(f"{kernel['milliseconds']:8.3f} ms {kernel['calls']:4} x {kernel['kernel'][:100]}")


if __name__ == "__main__":
    main()
