"""Carriers: the IEEE dtypes in which a format's arithmetic is done, and which of them a format needs.

A carrier must represent every value of the format exactly, with some bits below the format's last one, which decide
rounding.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from bitplan.compiler.tracing import constant_when_traced, is_traced
from bitplan.numerics.formats import ElementFormat, FloatFormat, Format, Overflow
from bitplan.numerics.reference import Rounding

#: The least resolution of the probabilities of stochastic rounding, in bits.
_LEAST_ODDS_BITS = 12


@dataclass(frozen=True)
class Carrier:
    """The IEEE dtype in which the arithmetic is done."""

    dtype: torch.dtype
    int_dtype: torch.dtype
    mantissa_bits: int
    exponent_bias: int

    @property
    def exponent_mask(self) -> int:
        return (2 * self.exponent_bias + 1) << self.mantissa_bits

    @property
    def bits(self) -> int:
        return torch.finfo(self.dtype).bits

    @property
    def sign_bit(self) -> int:
        """As a signed integer of the carrier's width."""
        return -(1 << (self.bits - 1))

    @property
    def min_exponent(self) -> int:
        return 1 - self.exponent_bias

    @property
    def max(self) -> float:
        return float(torch.finfo(self.dtype).max)

    def bits_of_power(self, exponent: int) -> int:
        """The bit pattern of 2^exponent."""
        return (exponent + self.exponent_bias) << self.mantissa_bits

    def bits_of(self, value: float) -> int:
        """The bit pattern of a positive number that the carrier represents exactly."""
        mantissa, exponent = math.frexp(value)
        if exponent - 1 < self.min_exponent:
            return int(math.ldexp(value, self.mantissa_bits - self.min_exponent))
        return self.bits_of_power(exponent - 1) + int((2 * mantissa - 1) * (1 << self.mantissa_bits))


FLOAT32 = Carrier(torch.float32, torch.int32, 23, 127)

FLOAT64 = Carrier(torch.float64, torch.int64, 52, 1023)


def carrier_of(x: Tensor) -> Carrier:
    """The carrier of a tensor that already has a carrier's dtype."""
    return FLOAT64 if x.dtype == torch.float64 else FLOAT32


def carrier_for(dtype: torch.dtype, target: ElementFormat, rounding: Rounding) -> Carrier:
    """float32 wherever it is exact; float64 for float64 inputs and for formats beyond float32's normal numbers."""
    if dtype == torch.float64 or (isinstance(target, FloatFormat) and not _fits_float32(target, rounding)):
        return FLOAT64
    return FLOAT32


def _fits_float32(target: FloatFormat, rounding: Rounding) -> bool:
    if target.max > FLOAT32.max or target.min_exponent < FLOAT32.min_exponent:
        return False
    if continues_grid(target, FLOAT32):
        return True
    odds_bits = FLOAT32.mantissa_bits - target.mantissa_bits
    coarse_odds = rounding == "stochastic" and odds_bits < _LEAST_ODDS_BITS
    return 1.0 / target.min_subnormal <= FLOAT32.max and not coarse_odds


def continues_grid(target: FloatFormat, carrier: Carrier) -> bool:
    """Whether the carrier's own subnormals continue the target's grid, so that no uniform region is needed."""
    return target.min_exponent == carrier.min_exponent and target.subnormals


# --- Rounding by torch's own conversions, where they are fast and exact


#: The only tables of formats that torch has a dtype for. Its conversions to 16 bits are correctly rounded on every
#: device, those to float8 inside the format's range.
TORCH_16_BIT: dict[Format, torch.dtype] = {FloatFormat(8, 7): torch.bfloat16, FloatFormat(5, 10): torch.float16}
TORCH_FLOAT8: dict[Format, torch.dtype] = {
    FloatFormat(4, 3, specials="fn"): torch.float8_e4m3fn,
    FloatFormat(5, 2): torch.float8_e5m2,
}


#: Up to so many elements torch's float8 casts on a CPU are faster than arithmetic on bits: 23 instead of 105
#: microseconds for 2^11 elements, but 467 instead of 303 for 2^16 (E4M3, one core with AVX2, torch 2.13).
_SMALL_ON_CPU = 1 << 14


def round_by_torch(x: Tensor, target: FloatFormat, rounding: Rounding, overflow: Overflow) -> Tensor | None:
    """`x`, of any dtype, converted by torch and back; None where that is not this rounding.

    Not to 16-bit dtypes under torch.compile: Inductor removes a cast and its inverse (torch 2.11 and 2.13).
    """
    if rounding != "nearest" or x.dtype == torch.float64:
        return None
    if overflow == "special" and target in TORCH_16_BIT and not is_traced():
        return x.to(TORCH_16_BIT[target], copy=True).to(x.dtype)
    if overflow != "saturate" or target not in TORCH_FLOAT8:
        return None
    dtype = TORCH_FLOAT8[target]
    if x.device.type == "cpu" and x.numel() <= _SMALL_ON_CPU and not is_traced():
        return x.clamp(-target.max, target.max).to(dtype).to(x.dtype)
    if x.is_cuda:
        if _converts_float8(x.device):  # saturating, in Triton's code; torch's own cast overflows
            if is_traced():
                return x.to(dtype).to(x.dtype)
            if _is_dense(x):
                from bitplan.numerics.float8_kernel import round_through_float8

                return round_through_float8(x, dtype)
        return None if is_traced() else x.clamp(-target.max, target.max).to(dtype).to(x.dtype)
    return None


def is_cast_small(target: object, device: torch.device) -> bool:
    """Whether rounding to `target` in a graph casts to an 8-bit dtype in any case."""
    return target in TORCH_FLOAT8 and device.type == "cuda" and _converts_float8(device)


@constant_when_traced
def _converts_float8(device: torch.device) -> bool:
    """Whether the GPU has instructions for float8 (NVIDIA's from Ada and Hopper on), and Triton to use them."""
    return _has_float8_units(device)


@cache
def _has_float8_units(device: torch.device) -> bool:
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 9):
        return False
    return importlib.util.find_spec("triton") is not None


def _is_dense(x: Tensor) -> bool:
    return x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))
