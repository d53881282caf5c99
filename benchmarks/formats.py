"""``python benchmarks/run.py formats``: the time of rounding, by bitplan and by peers, relative to a plain copy.

On a CPU one thread rounds 2^20 float32 numbers and its CPU time counts; on a GPU events time tensors far larger than
the caches, and bandwidth (8 bytes per element) is compared with that of a copy.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.peers import COMPILED_PEERS, working_peers
from benchmarks.timing import seconds_per_call
from bitplan.lab.train.loop import chosen_device
from bitplan.machine import describe_machine
from bitplan.numerics.formats import FloatFormat, get_format
from bitplan.numerics.mutable_format import MutableFormat
from bitplan.numerics.quantizer import quantize
from bitplan.numerics.reference import Rounding

Mode = Literal["eager", "compiled", "compiled, tensor parameters"]

#: The formats of every run: the named floats and the three of Lee et al.
DEFAULT_FORMATS: tuple[str, ...] = (
    *("fp32", "tf32", "bf16", "fp16", "e5m2", "e4m3", "e3m4", "e3m2", "e2m3", "e2m1"),
    *("e6m9b0", "e5m2b0", "e4m3b4"),
)
CPU_ELEMENTS = 1 << 20
GPU_ELEMENTS = 1 << 28

#: The largest ns per element on one CPU thread; the least share of copy bandwidth on a GPU.
CPU_TARGETS: dict[tuple[Rounding, Mode], float] = {
    ("nearest", "eager"): 1.0,
    ("nearest", "compiled"): 0.35,
    ("nearest", "compiled, tensor parameters"): 0.5,
    ("stochastic", "eager"): 5.0,
    ("stochastic", "compiled"): 1.0,
}
GPU_TARGETS: dict[tuple[Rounding, Mode], float] = {("nearest", "compiled"): 0.9, ("stochastic", "compiled"): 0.8}
#: The largest multiple of the time of torch's own conversion, where it has one.
TORCH_RATIO = 1.1

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """One measurement."""

    who: str
    format: str
    rounding: Rounding
    mode: Mode
    ns_per_element: float
    #: Time of a plain copy of the same tensor divided by this time: 1.0 is memory bandwidth.
    share_of_copy: float
    terabytes_per_second: float
    #: Whether the result differed from the input. Inductor removes a conversion to bfloat16 or float16 and back, so
    #: torch's own compiled cast is a copy.
    rounded: bool
    #: bitplan's target, None for peers.
    target: float | None
    reached: bool | None


def bench_formats(
    formats: tuple[str, ...] = DEFAULT_FORMATS,
    device: str = "cpu",
    elements: int | None = None,
    samples: int = 15,
    peers: bool = True,
    on_row: Callable[[Row], None] = lambda row: None,
) -> dict[str, Any]:
    """Measure everything; returns a document with machine, versions, the copy's time and one entry per row."""
    where = chosen_device(device)
    count = elements or (GPU_ELEMENTS if where.type == "cuda" else CPU_ELEMENTS)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x = _spread_numbers(count, where)
        copy = seconds_per_call(x.clone, where, samples)
        rows = []
        for row in _rows(formats, x, copy, samples, peers):
            rows.append(row)
            on_row(row)
    finally:
        torch.set_num_threads(threads)
    return {
        "benchmark": "formats",
        "machine": describe_machine(where),
        "device": str(where),
        "elements": count,
        "threads": 1,
        "copy_ns_per_element": copy / count * 1e9,
        "rows": [asdict(row) for row in rows],
        "torch_ratios": _torch_ratios(rows),
    }


def _spread_numbers(count: int, device: torch.device) -> Tensor:
    """Normal numbers over many binades, so that every region of every format is covered."""
    generator = torch.Generator(device).manual_seed(0)
    numbers = torch.randn(count, device=device, generator=generator)
    return numbers * torch.exp2(torch.randint(-8, 8, (count,), device=device, generator=generator))


def _rows(formats: tuple[str, ...], x: Tensor, copy: float, samples: int, peers: bool) -> Iterator[Row]:
    for name in formats:
        if not isinstance(get_format(name), FloatFormat):
            log.warning("%s is no float format and is left out.", name)
            continue
        for rounding in ("nearest", "stochastic"):
            torch._dynamo.reset()
            for mode, call in _ours(name, rounding, x).items():
                yield _row("bitplan", name, rounding, mode, call, x, copy, samples)
            for who, peer in working_peers(name, rounding, x[:4096]).items() if peers else ():
                call = functools.partial(peer, x)
                yield _row(who, name, rounding, "eager", call, x, copy, samples)
                if who in COMPILED_PEERS:
                    fused = functools.partial(torch.compile(peer, fullgraph=True), x)
                    yield _row(who, name, rounding, "compiled", fused, x, copy, samples)


def _ours(name: str, rounding: Rounding, x: Tensor) -> dict[Mode, Callable[[], object]]:
    target = get_format(name)
    seed = torch.tensor(7, device=x.device)

    def constant(x: Tensor, seed: Tensor) -> Tensor:
        return quantize(x, target, rounding, seed=seed)

    calls: dict[Mode, Callable[[], object]] = {
        "eager": functools.partial(quantize, x, name, rounding, seed=7),
        "compiled": functools.partial(torch.compile(constant, fullgraph=True), x, seed),
    }
    if rounding == "nearest":
        live = MutableFormat(target, device=x.device)

        def by_row(x: Tensor) -> Tensor:
            return quantize(x, live, rounding)

        calls["compiled, tensor parameters"] = functools.partial(torch.compile(by_row, fullgraph=True), x)
    return calls


def _row(
    who: str,
    name: str,
    rounding: Rounding,
    mode: Mode,
    call: Callable[[], object],
    x: Tensor,
    copy: float,
    samples: int,
) -> Row:
    result = call()
    rounded = not torch.equal(torch.as_tensor(result, device=x.device), x)
    del result
    seconds = seconds_per_call(call, x.device, samples)
    nanoseconds = seconds / x.numel() * 1e9
    share = copy / seconds
    target = (GPU_TARGETS if x.is_cuda else CPU_TARGETS).get((rounding, mode)) if who == "bitplan" else None
    reached = None if target is None else (share >= target if x.is_cuda else nanoseconds <= target)
    traffic = 2 * x.nbytes / seconds / 1e12
    return Row(who, name, rounding, mode, nanoseconds, share, traffic, rounded, target, reached)


def _torch_ratios(rows: list[Row]) -> list[dict[str, Any]]:
    """bitplan's time relative to torch's own conversion, by mode, where torch has one that rounds."""
    fair = [row for row in rows if row.rounding == "nearest" and row.rounded]
    times = {(row.who, row.format, row.mode): row.ns_per_element for row in fair}
    return [
        {
            "format": name,
            "mode": mode,
            "ratio": times["bitplan", name, mode] / torch_time,
            "reached": times["bitplan", name, mode] <= TORCH_RATIO * torch_time,
        }
        for (who, name, mode), torch_time in times.items()
        if who == "torch cast"
    ]
