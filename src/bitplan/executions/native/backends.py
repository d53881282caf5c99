"""The machine's own low-precision units: which number formats each multiplies, and how it is asked to.

A unit multiplies codes and adds up exactly or in float32; the scales of both operands are multiplied in afterwards. So
the operands are those of emulation, and only the order of accumulation differs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache

import torch
from torch import Tensor

from bitplan.compiler.torch_private import int_mm, is_vnni_supported, scaled_mm
from bitplan.numerics.formats import FloatFormat, Format, IntFormat

_E5M2 = FloatFormat(5, 2)
_FLOAT8 = {FloatFormat(4, 3, specials="fn"): torch.float8_e4m3fn, _E5M2: torch.float8_e5m2}


class Unit(ABC):
    """One kind of multiplication."""

    name: str

    @abstractmethod
    def dtype_of(self, target: Format) -> torch.dtype | None:
        """The torch type of a format's codes; None where the unit does not know the format."""

    @abstractmethod
    def is_on(self, device: torch.device) -> bool:
        """Whether that device has it."""

    @abstractmethod
    def multiply(self, a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], out: torch.dtype) -> Tensor:
        """``(a @ b)`` of codes (m, k) and (k, n), times their scales, each a number, (m, 1) or (1, n)."""

    def takes(self, left: Format, right: Format) -> bool:
        """Whether it multiplies numbers of these two formats."""
        return self.dtype_of(left) is not None and self.dtype_of(right) is not None


class Int8Unit(Unit):
    """8-bit integers, added up exactly in 32 bits: CPUs with VNNI, GPUs."""

    name = "int8"

    def dtype_of(self, target: Format) -> torch.dtype | None:
        return torch.int8 if isinstance(target, IntFormat) and not target.affine and target.bits <= 8 else None

    def is_on(self, device: torch.device) -> bool:
        if device.type == "cuda":
            return _capability(device) >= (8, 0)
        return device.type == "cpu" and is_vnni_supported()

    def multiply(self, a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], out: torch.dtype) -> Tensor:
        if a.is_cuda:  # cuBLAS wants the summed axis innermost in both
            a, b = _rows(a), _columns(b)
        whole = int_mm(a, b)
        return (whole.float() * scales[0] * scales[1]).to(out)


class Float8Unit(Unit):
    """E4M3 and E5M2, added up in float32: NVIDIA's GPUs from Ada and Hopper on.

    Their tensor cores by themselves keep fewer bits of a sum than float32 has; every so many products it is moved into
    float32, which takes time. The faster twin leaves that out.
    """

    def __init__(self, is_fast: bool = False) -> None:
        self.name = "fp8, fast sums" if is_fast else "fp8"
        self._is_fast = is_fast

    def dtype_of(self, target: Format) -> torch.dtype | None:
        return _FLOAT8.get(target) if isinstance(target, FloatFormat) else None

    def is_on(self, device: torch.device) -> bool:
        return device.type == "cuda" and torch.version.hip is None and _capability(device) >= (8, 9)

    def takes(self, left: Format, right: Format) -> bool:
        return super().takes(left, right) and not left == right == _E5M2

    def multiply(self, a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], out: torch.dtype) -> Tensor:
        one, other = (scale.float() for scale in scales)
        if one.numel() > 1 or other.numel() > 1:  # a scale for each row and column, or one for each tensor: not mixed
            # By way of vectors: a transposed row counts as contiguous, but not for all that multiply.
            one = one.expand(a.shape[0], 1).reshape(-1).contiguous().unsqueeze(1)
            other = other.expand(1, b.shape[1]).reshape(-1).contiguous().unsqueeze(0)
        else:
            one, other = one.reshape(()), other.reshape(())
        a, b = _rows(a), _columns(b)
        return scaled_mm(a, b, scale_a=one, scale_b=other, out_dtype=out, use_fast_accum=self._is_fast)


#: All units, those first that are preferred where several fit.
UNITS: tuple[Unit, ...] = (Float8Unit(), Int8Unit())
_FAST = Float8Unit(is_fast=True)
#: Unit -> its twin that adds up faster, with fewer bits.
FASTER = {"fp8": _FAST.name}


def units_of(device: torch.device) -> tuple[Unit, ...]:
    """The units of a device."""
    return tuple(unit for unit in UNITS if unit.is_on(device))


def unit_named(name: str) -> Unit:
    return next(unit for unit in (*UNITS, _FAST) if unit.name == name)


def suits(name: str, kind: str, sizes: tuple[int, int, int]) -> bool:
    """Whether the unit of that name multiplies (m, k) by (k, n) on that kind of device; else it is emulated.

    >>> suits("fp8", "cuda", (5, 32, 16)), suits("fp8", "cuda", (32, 5, 16)), suits("int8", "cpu", (2, 2, 1))
    (True, False, True)
    """
    m, k, n = sizes
    if kind != "cuda":
        # Of a matrix of one row that is a transposed column, torch's integer product reads other memory (2.11 to 2.13).
        return m > 1 and k > 1
    if name in ("fp8", _FAST.name):
        return k % 16 == 0 and n % 16 == 0
    return m > 16 and k % 8 == 0 and n % 8 == 0


def _rows(a: Tensor) -> Tensor:
    """The same matrix, with the numbers of a row side by side in memory, and with a step from row to row that says so.

    Of a single row torch calls any step contiguous, and cuBLAS is told what it is.
    """
    a = a.contiguous()
    return a.as_strided(a.shape, (a.shape[1], 1)) if a.shape[0] == 1 else a


def _columns(b: Tensor) -> Tensor:
    """The same matrix, with the numbers of a column side by side in memory."""
    return _rows(b.t()).t()


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
