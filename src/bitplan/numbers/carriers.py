"""Carriers: the IEEE types in which a coarser format's arithmetic is done, and which of them a format needs.

A carrier must hold every number of the format exactly, and a little more: the bits below the format's last one are what
rounding decides by.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bitplan.numbers.formats import FloatFormat, IntFormat
from bitplan.numbers.reference import Rounding

#: Odds of stochastic rounding are resolved at least this finely (in bits).
_LEAST_ODDS_BITS = 12


@dataclass(frozen=True)
class Carrier:
    """The IEEE type in which the arithmetic is done."""

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
        """The bit pattern of a positive number the carrier holds exactly."""
        mantissa, exponent = math.frexp(value)
        if exponent - 1 < self.min_exponent:
            return int(math.ldexp(value, self.mantissa_bits - self.min_exponent))
        return self.bits_of_power(exponent - 1) + int((2 * mantissa - 1) * (1 << self.mantissa_bits))


FLOAT32 = Carrier(torch.float32, torch.int32, 23, 127)
FLOAT64 = Carrier(torch.float64, torch.int64, 52, 1023)


def carrier_of(x: Tensor) -> Carrier:
    """The carrier that a tensor lies in already."""
    return FLOAT64 if x.dtype == torch.float64 else FLOAT32


def carrier_for(dtype: torch.dtype, target: FloatFormat | IntFormat, rounding: Rounding) -> Carrier:
    """float32 wherever it is exact; float64 for float64 inputs and for formats that outreach float32's normals."""
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
