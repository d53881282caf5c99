"""From which size on a low-precision unit pays on this machine: measured once, and remembered.

A linear layer's three products, with the casts that they want, are set against the same products as they are, for
square matrices that grow. Products of fewer multiplications than the smallest size that won, and won at every larger
size, stay as they are. Casts are compiled, as in a compiled model. On a GPU the calls are replayed as a CUDA graph:
what counts is the time of the device, since a compiled model hides the host's behind it.

Convolutions whose kernel has to be unfolded are set against torch's own likewise, for 3x3 kernels with more and more
channels: what unfolding costs is won back by the channels of the result.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitplan.compiler import torch_private
from bitplan.compiler.torch_private import unset_fake_temporarily
from bitplan.executions.native.backends import Unit, suits, units_of
from bitplan.executions.native.convolution import Convolution
from bitplan.executions.native.float8_cast import FORMATS, READ, cast_float8
from bitplan.executions.native.gemm import BY_ROW, PASSES, Codes, Form, codes_of
from bitplan.executions.native.paths import Terms
from bitplan.files import write_whole
from bitplan.gemm.products import Product
from bitplan.machine import cpu_name
from bitplan.numerics.noise import randomness_kept
from bitplan.numerics.quantizer import Quantizer, make_quantizer

log = logging.getLogger("bitplan")

SIZES = {"cpu": (128, 256, 512, 1024, 2048), "cuda": (512, 1024, 2048, 3072, 4096, 8192)}
#: Channels of 3x3 convolutions, and (samples, height and width) of their images by the kind of device.
CHANNELS = (16, 32, 64, 128, 256)
IMAGES = {"cpu": (8, 14), "cuda": (64, 28)}
#: Where no size that was measured won.
NEVER = 1 << 62
#: Tables that were measured in another way are measured again.
_METHOD = "three products, compiled"
#: Calls of one CUDA graph, so that its start does not count.
_REPLAYED = 10
_FORMATS = {"int8": "int8", "fp8": "e4m3"}


@dataclass(frozen=True)
class Crossing:
    """One size: milliseconds as it is, and by a unit."""

    unit: str
    #: The side of square matrices, or the channels of a convolution.
    size: int
    plain: float
    native: float


def measured(device: torch.device, dtype: torch.dtype = torch.float32) -> list[Crossing]:
    """The table for this machine: every unit of the device, every size."""
    return _rows(_crossing, SIZES[device.type], device, dtype)


def measured_unfolded(device: torch.device, dtype: torch.dtype = torch.float32) -> list[Crossing]:
    """The same for 3x3 convolutions of images that have their channels last, where a unit takes so few channels."""
    return _rows(_crossing_unfolded, CHANNELS, device, dtype)


def _rows(
    measure: Callable[[Unit, int, torch.device, torch.dtype], Crossing | None],
    sizes: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
) -> list[Crossing]:
    """What fits beside what lies on the device already; numbers are drawn, and nobody else's change."""
    found: list[Crossing | None] = []
    with randomness_kept():
        for unit in units_of(device):
            with contextlib.suppress(torch.OutOfMemoryError):
                for size in sizes:
                    found.append(measure(unit, size, device, dtype))
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the largest matrices take gigabytes, which torch would hold on to
    return [row for row in found if row is not None]


def least_works(table: list[Crossing]) -> dict[str, int]:
    """Unit -> multiplications from which on every size of the table won.

    >>> least_works([Crossing("int8", 128, 1.0, 2.0), Crossing("int8", 256, 3.0, 2.0), Crossing("fp8", 256, 1.0, 2.0)])
    {'int8': 16777216, 'fp8': 4611686018427387904}
    """
    return {unit: NEVER if size == NEVER else size**3 for unit, size in least_sizes(table).items()}


def least_sizes(table: list[Crossing]) -> dict[str, int]:
    """Unit -> the size from which on every size of the table won.

    >>> least_sizes([Crossing("int8", 16, 1.0, 2.0), Crossing("int8", 32, 3.0, 2.0)])
    {'int8': 32}
    """
    least: dict[str, tuple[int, bool]] = {}
    for row in sorted(table, key=lambda row: -row.size):
        before = least.setdefault(row.unit, (NEVER, True))
        wins = before[1] and row.native < row.plain
        least[row.unit] = (row.size if wins else before[0], wins)
    return {unit: size for unit, (size, _) in least.items()}


def remembered(device: torch.device, dtype: torch.dtype) -> Terms:
    """From where on units pay on this machine, from the file that an earlier run left, or measured now."""
    if not units_of(device):
        return Terms(NEVER)
    file = cache_file()
    key = f"{_machine(device)}, {dtype}, torch {torch.__version__}, {torch.get_num_threads()} threads, {_METHOD}"
    known = _read(file)
    tables = {key: measured, f"{key}, 3x3": measured_unfolded}
    missing = {name: measure for name, measure in tables.items() if name not in known}
    if missing:
        with unset_fake_temporarily():  # a model may be planned on tensors that only have shapes; time is real
            for name, measure in missing.items():
                known[name] = [asdict(row) for row in measure(device, dtype)]
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps(known, indent=2) + "\n")
        except OSError as error:
            log.info("the crossover is not remembered, and will be measured again: %s", error)
    linear, unfolded = ([Crossing(**row) for row in known[name]] for name in tables)
    return Terms(0, tuple(least_works(linear).items()), tuple(least_sizes(unfolded).items()))


def cache_file() -> Path:
    """Where the tables lie; ``BITPLAN_CACHE`` names another folder."""
    named = os.environ.get("BITPLAN_CACHE")
    if named:
        return Path(named) / "crossover.json"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bitplan" / "crossover.json"


def _read(file: Path) -> dict[str, list[dict[str, Any]]]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        for rows in content.values():
            for row in rows:
                Crossing(**row)
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    return dict(content)


def _machine(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def _crossing(unit: Unit, size: int, device: torch.device, dtype: torch.dtype) -> Crossing:
    x, w, dy = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(3))

    def plain() -> tuple[Tensor, ...]:
        return x @ w.t(), dy @ w, dy.t() @ x

    return Crossing(
        *(unit.name, size, milliseconds(plain, device)),
        milliseconds(lambda: _three_products(unit, x, w, dy, Form()), device),
    )


def _crossing_unfolded(unit: Unit, channels: int, device: torch.device, dtype: torch.dtype) -> Crossing | None:
    """All three passes: their matrices lie differently in memory."""
    samples, side = IMAGES[device.type]
    x, dy = (torch.randn(samples, side, side, channels, device=device, dtype=dtype).movedim(-1, 1) for _ in range(2))
    w = torch.randn(channels, 3, 3, channels, device=device, dtype=dtype).movedim(-1, 1)
    product = Product("conv2d", ([1, 1], [1, 1], [1, 1], False, [0, 0], 1))
    form = Convolution(product, (3, 3))
    if not all(suits(unit.name, device.type, form.sizes(one, x.shape, w.shape)) for one in PASSES):
        return None

    def plain() -> tuple[Tensor, ...]:
        return product.forward(x, w, None), product.grad_x(dy, x, w), product.grad_w(dy, x, w)

    return Crossing(
        *(unit.name, channels, milliseconds(plain, device)),
        milliseconds(lambda: _three_products(unit, x, w, dy, form), device),
    )


def _three_products(unit: Unit, x: Tensor, w: Tensor, dy: Tensor, form: Form) -> tuple[Tensor, ...]:
    """Forward and backward as native execution makes them, casts included."""
    to_see, to_learn = _codes(unit, x, ["fprop.x", "wgrad.x"])
    to_apply, to_turn = _codes(unit, w, ["fprop.w", "dgrad.w"])
    to_send, to_blame = _codes(unit, dy, ["dgrad.dy", "wgrad.dy"])
    y = _multiplied(unit, form.seen(to_see, x.shape), form.weight(to_apply, w.shape).transposed(), x.dtype)
    sent, turned = form.seen_backward(to_send, x.shape), form.weight_backward(to_turn, w.shape)
    grad_x = _multiplied(unit, sent, turned, x.dtype)
    grad_w = _multiplied(unit, to_blame.transposed(), form.seen(to_learn, x.shape), x.dtype)
    return form.result(y, x.shape), form.grad_x(grad_x, x.shape), form.grad_w(grad_w, w.shape)


def _codes(unit: Unit, tensor: Tensor, slots: list[str]) -> list[Codes]:
    """As native execution makes them for these slots, of a tensor whose features are on its second axis."""
    _, kind = _rounding(unit)
    if kind not in FORMATS or tensor.dtype not in READ:
        return [_encoder(unit)(tensor)] * len(slots)
    by_row = [slot in BY_ROW for slot in slots]
    rows = tensor.movedim(1, -1).reshape(-1, tensor.shape[1])
    cast = cast_float8(rows, kind, as_rows=any(by_row), as_columns=not all(by_row))
    return [Codes(cast.rows if is_by_row else cast.columns.t(), cast.scale) for is_by_row in by_row]


def _rounding(unit: Unit) -> tuple[Quantizer, torch.dtype]:
    """A quantizer that the unit knows, and the type of its codes."""
    quantizer = make_quantizer(_FORMATS[unit.name], scale="tensor")
    kind = unit.dtype_of(quantizer.format)  # type: ignore[arg-type]  # a constant one
    assert kind is not None
    return quantizer, kind


@cache
def _encoder(unit: Unit) -> Callable[[Tensor], Codes]:
    """Rounds to codes of a unit, compiled as in a compiled model, where that is one pass over memory or two."""
    quantizer, kind = _rounding(unit)

    def encode(tensor: Tensor) -> Codes:
        return codes_of(quantizer.encode(tensor), kind, 1)

    compiled: Callable[[Tensor], Codes] | None = torch.compile(encode, dynamic=True, fullgraph=True)

    def encoded(tensor: Tensor) -> Codes:
        nonlocal compiled
        if compiled is not None:
            try:
                return compiled(tensor)
            except (
                torch_private.TorchDynamoException
            ) as error:  # a machine without a compiler, where no model is compiled either
                log.info("the crossover is measured uncompiled: %s", error)
                compiled = None
        return encode(tensor)

    return encoded


def _multiplied(unit: Unit, left: Codes, right: Codes, dtype: torch.dtype) -> Tensor:
    return unit.multiply(left.values, right.values, (left.scale, right.scale), dtype)


def milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """The best of a few calls, after one that warms up."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            replay = _replays(call)
            return min(_device_milliseconds(replay) for _ in range(5)) / _REPLAYED
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return 1e3 * best


def _device_milliseconds(call: Callable[[], None]) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    began.record()
    call()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended))


def _replays(call: Callable[[], object]) -> Callable[[], None]:
    """The work that a few calls leave to a GPU, to be done again without the host."""
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # kernels are compiled, and libraries get ready, outside of the graph
        call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_REPLAYED):
            call()
    return graph.replay
