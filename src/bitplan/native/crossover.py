"""From which size on a low-precision unit pays on this machine: measured once, and remembered.

Rounding both operands and multiplying their codes is set against multiplying them as they are, for square matrices that
grow. Products of fewer multiplications than the smallest size that won, and won at every larger size, stay as they are.
Convolutions whose kernel has to be unfolded are set against torch's own likewise, for 3x3 kernels with more and more
channels: what unfolding costs is won back by the channels of the result.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from bitplan.files import write_whole
from bitplan.native.convolution import Convolution
from bitplan.native.float8_cast import FORMATS, READ, cast_float8
from bitplan.native.operands import BY_ROW, Codes, codes_of
from bitplan.native.paths import Worth
from bitplan.native.units import Unit, units_of
from bitplan.processor import cpu_name
from bitplan.products import Product
from bitplan.quantizer import make_quantizer

log = logging.getLogger("bitplan")

SIZES = (128, 256, 512, 1024, 2048)
#: Channels of 3x3 convolutions, and (samples, height and width) of their images by the kind of device.
CHANNELS = (16, 32, 64, 128, 256)
IMAGES = {"cpu": (8, 14), "cuda": (64, 28)}
#: Where no size that was measured won.
NEVER = 1 << 62
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
    return [_crossing(unit, size, device, dtype) for unit in units_of(device) for size in SIZES]


def measured_unfolded(device: torch.device, dtype: torch.dtype = torch.float32) -> list[Crossing]:
    """The same for 3x3 convolutions of images that have their channels last."""
    return [_crossing_unfolded(unit, size, device, dtype) for unit in units_of(device) for size in CHANNELS]


def least_work(table: list[Crossing]) -> int:
    """Multiplications from which on every size of the table won.

    >>> least_work([Crossing("int8", 128, 1.0, 2.0), Crossing("int8", 256, 3.0, 2.0), Crossing("int8", 512, 9.0, 4.0)])
    16777216
    >>> least_work([Crossing("int8", 128, 1.0, 2.0)]) == NEVER
    True
    """
    least = min(least_sizes(table).values(), default=NEVER)
    return NEVER if least == NEVER else least**3


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


def remembered(device: torch.device, dtype: torch.dtype) -> Worth:
    """From where on units pay on this machine, from the file that an earlier run left, or measured now."""
    if not units_of(device):
        return Worth(NEVER)
    file = cache_file()
    key = f"{_machine(device)}, {dtype}, torch {torch.__version__}, {torch.get_num_threads()} threads"
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
    return Worth(least_work(linear), tuple(least_sizes(unfolded).items()))


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
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))

    def native() -> Tensor:
        (one,), (other,) = (_codes(unit, matrix, ["fprop.x"]) for matrix in (a, b))
        return _multiplied(unit, one, other.transposed(), dtype)

    return Crossing(unit.name, size, _milliseconds(lambda: a @ b.t(), device), _milliseconds(native, device))


def _crossing_unfolded(unit: Unit, channels: int, device: torch.device, dtype: torch.dtype) -> Crossing:
    """All three passes: their matrices lie differently in memory."""
    samples, side = IMAGES[device.type]
    x, dy = (torch.randn(samples, side, side, channels, device=device, dtype=dtype).movedim(-1, 1) for _ in range(2))
    w = torch.randn(channels, 3, 3, channels, device=device, dtype=dtype).movedim(-1, 1)
    product = Product("conv2d", ([1, 1], [1, 1], [1, 1], False, [0, 0], 1))
    form = Convolution(product, (3, 3))

    def plain() -> Tensor:
        product.grad_x(dy, x, w)
        product.grad_w(dy, x, w)
        return product.forward(x, w, None)

    def native() -> Tensor:
        to_see, to_learn = _codes(unit, x, ["fprop.x", "wgrad.x"])
        to_apply, to_turn = _codes(unit, w, ["fprop.w", "dgrad.w"])
        to_send, to_blame = _codes(unit, dy, ["dgrad.dy", "wgrad.dy"])
        seen, turned = form.seen_backward(to_send, x.shape), form.weight_backward(to_turn, w.shape)
        form.grad_x(_multiplied(unit, seen, turned, dtype), x.shape)
        form.grad_w(_multiplied(unit, to_blame.transposed(), form.seen(to_learn, x.shape), dtype), w.shape)
        applied = form.weight(to_apply, w.shape).transposed()
        return form.result(_multiplied(unit, form.seen(to_see, x.shape), applied, dtype), x.shape)

    return Crossing(unit.name, channels, _milliseconds(plain, device), _milliseconds(native, device))


def _codes(unit: Unit, tensor: Tensor, slots: list[str]) -> list[Codes]:
    """As native execution makes them for these slots, of a tensor whose features are on its second axis."""
    quantizer = make_quantizer(_FORMATS[unit.name], scale="tensor")
    kind = unit.dtype_of(quantizer.format)  # type: ignore[arg-type]  # a constant one
    assert kind is not None
    if kind not in FORMATS or tensor.dtype not in READ:
        return [codes_of(quantizer.encode(tensor), kind, 1)] * len(slots)
    by_row = [slot in BY_ROW for slot in slots]
    rows = tensor.movedim(1, -1).reshape(-1, tensor.shape[1])
    cast = cast_float8(rows, kind, as_rows=any(by_row), as_columns=not all(by_row))
    return [Codes(cast.rows if is_by_row else cast.columns.t(), cast.scale) for is_by_row in by_row]


def _multiplied(unit: Unit, left: Codes, right: Codes, dtype: torch.dtype) -> Tensor:
    return unit.multiply(left.values, right.values, (left.scale, right.scale), dtype)


def _milliseconds(call: Callable[[], Tensor], device: torch.device) -> float:
    """The best of a few calls, after one that warms up."""
    best = float("inf")
    for _ in range(5):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 1e3 * best
