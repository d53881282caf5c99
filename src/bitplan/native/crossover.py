"""From which size on a low-precision unit pays on this machine: measured once, and remembered.

Rounding both operands and multiplying their codes is set against multiplying them as they are, for square matrices that
grow. Products of fewer multiplications than the smallest size that won, and won at every larger size, stay as they are.
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
from bitplan.native.float8_cast import FORMATS, READ, cast_float8
from bitplan.native.operands import Codes, codes_of
from bitplan.native.units import Unit, units_of
from bitplan.processor import cpu_name
from bitplan.quantizer import make_quantizer

log = logging.getLogger("bitplan")

SIZES = (128, 256, 512, 1024, 2048)
#: Where no size that was measured won.
NEVER = 1 << 62
_FORMATS = {"int8": "int8", "fp8": "e4m3"}


@dataclass(frozen=True)
class Crossing:
    """Square matrices of one size: milliseconds as they are, and by a unit."""

    unit: str
    size: int
    plain: float
    native: float


def measured(device: torch.device, dtype: torch.dtype = torch.float32) -> list[Crossing]:
    """The table for this machine: every unit of the device, every size."""
    return [_crossing(unit, size, device, dtype) for unit in units_of(device) for size in SIZES]


def least_work(table: list[Crossing]) -> int:
    """Multiplications from which on every size of the table won.

    >>> least_work([Crossing("int8", 128, 1.0, 2.0), Crossing("int8", 256, 3.0, 2.0), Crossing("int8", 512, 9.0, 4.0)])
    16777216
    >>> least_work([Crossing("int8", 128, 1.0, 2.0)]) == NEVER
    True
    """
    least = NEVER
    for unit in {row.unit for row in table}:
        won = NEVER
        for row in sorted((row for row in table if row.unit == unit), key=lambda row: -row.size):
            if row.native >= row.plain:
                break
            won = row.size**3
        least = min(least, won)
    return least


def remembered(device: torch.device, dtype: torch.dtype) -> int:
    """:func:`least_work` of this machine, from the file that an earlier run left, or measured now."""
    if not units_of(device):
        return NEVER
    file = cache_file()
    key = f"{_machine(device)}, {dtype}, torch {torch.__version__}, {torch.get_num_threads()} threads"
    known = _read(file)
    if key not in known:
        with unset_fake_temporarily():  # a model may be planned on tensors that only have shapes; time is real
            known[key] = [asdict(row) for row in measured(device, dtype)]
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps(known, indent=2) + "\n")
        except OSError as error:
            log.info("the crossover is not remembered, and will be measured again: %s", error)
    return least_work([Crossing(**row) for row in known[key]])


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
    quantizer = make_quantizer(_FORMATS[unit.name], scale="tensor")
    kind = unit.dtype_of(quantizer.format)  # type: ignore[arg-type]  # a constant one
    assert kind is not None

    def codes(matrix: Tensor) -> Codes:
        if kind in FORMATS and dtype in READ:
            cast = cast_float8(matrix, kind, as_columns=False)
            return Codes(cast.rows, cast.scale)
        return codes_of(quantizer.encode(matrix), kind)

    def native() -> Tensor:
        one, other = codes(a), codes(b)
        return unit.multiply(one.values, other.values.t(), (one.scale, other.scale), dtype)

    return Crossing(unit.name, size, _milliseconds(lambda: a @ b.t(), device), _milliseconds(native, device))


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
