"""``python -m benchmarks.attention_tiles``: tiles of the FP8 attention kernel on Hopper, beside torch's attention.

The shape is 4 x 4096 tokens, 32 heads, causal. Times are medians of 20 calls of the forward kernel alone, on codes.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from bitplan.compiler.kernel_ops import launch_directly

BATCH, TOKENS, HEADS = 4, 4096, 32
#: Queries and keys of a block, warps and stages; then the most registers of a thread.
SHAPES = (
    ((64, 128, 4, 2), None),
    ((64, 128, 4, 3), None),
    ((64, 64, 4, 3), None),
    ((64, 64, 4, 2), 128),
    ((128, 64, 8, 2), 128),
    ((128, 64, 8, 3), 128),
    ((128, 64, 8, 4), 128),
    ((128, 32, 8, 4), 128),
    ((128, 64, 4, 3), None),
    ((128, 128, 8, 2), None),
    ((128, 128, 8, 3), None),
)


def milliseconds(function: Callable[[], object], seconds_before: float = 0.2) -> float:
    """The median time of a call, once the GPU's clock is up."""
    end = time.monotonic() + seconds_before
    while time.monotonic() < end:
        function()
        torch.cuda.synchronize()
    times: list[float] = []
    for _ in range(20):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        function()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def main() -> None:
    from bitplan.executions.native.attention_kernel import Tiles, launch_attention_forward

    for size in (64, 128):
        torch.manual_seed(0)
        states = [torch.randn(BATCH, TOKENS, HEADS, size, device="cuda").bfloat16().transpose(1, 2) for _ in range(3)]
        q, k, v = states
        scales = [torch.ops.bitplan.attention_amax(x) / 448 for x in states]
        codes = [
            torch.ops.bitplan.attention_cast(x, scale, number == 2)
            for number, (x, scale) in enumerate(zip(states, scales, strict=True))
        ]
        plain = milliseconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))  # noqa: B023
        print(f"heads of {size}: torch, BF16 {plain:.3f} ms")
        expected: torch.Tensor | None = None
        for (shape, registers), adds in itertools.product(SHAPES, (True, False)):
            tiles = Tiles(*shape, adds_in_float32=adds, max_registers=registers)

            def call() -> tuple[torch.Tensor, torch.Tensor]:
                arguments: tuple[Any, ...] = (*codes, *scales, size**-0.5, True, tiles)  # noqa: B023
                return launch_attention_forward(launch_directly, *arguments)

            try:
                out = call()[0].float()
                expected = out if expected is None else expected
                apart = float((out - expected).norm() / expected.norm())
                print(f"{milliseconds(call):.3f} ms, {apart:.4f} from the first, {tiles}", flush=True)
            except Exception as error:  # too much shared memory, say
                print(f"{tiles}: {type(error).__name__}", flush=True)


if __name__ == "__main__":
    main()
