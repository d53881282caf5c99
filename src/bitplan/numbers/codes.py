"""Codes: a number of a format's grid as its bit pattern, and back.

Floats have their sign on top, then exponent and mantissa; symmetric integers are two's complement, with the code that
none of them needs for NaN; affine ones are the step count. Plain torch operations throughout, which compiled graphs
fuse; eager, a float format has few enough codes for a table of all its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from bitplan.numbers.carriers import FLOAT32, carrier_of
from bitplan.numbers.formats import FloatFormat, IntFormat
from bitplan.tracing import is_traced


def encode(elements: Tensor, target: FloatFormat | IntFormat) -> Tensor:
    """Numbers on the grid of `target` as int32 codes."""
    if isinstance(target, IntFormat):
        mask = (1 << target.bits) - 1
        codes = torch.nan_to_num(elements).to(torch.int32) & mask
        return codes if target.affine else torch.where(elements.isnan(), 1 << (target.bits - 1), codes)
    carrier = carrier_of(elements)
    source = elements.view(carrier.int_dtype)
    cut = carrier.mantissa_bits - target.mantissa_bits
    below_first = (target.min_exponent + carrier.exponent_bias - 1) << target.mantissa_bits
    codes = ((source & ~carrier.sign_bit) >> cut) - below_first
    if target.min_exponent > carrier.min_exponent or not target.subnormals:
        steps = elements.abs() * (1.0 / target.min_subnormal if target.subnormals else 0.0)
        codes = torch.where(elements.abs() < target.min_normal, torch.nan_to_num(steps, 0, 0).to(codes.dtype), codes)
    codes = torch.where(elements.isinf(), _infinity_code(target), codes)
    codes = torch.where(elements.isnan(), _nan_code(target), codes)
    return (codes | (source < 0).to(codes.dtype) << (target.bits - 1)).to(torch.int32)


def decode(codes: Tensor, target: FloatFormat | IntFormat, dtype: torch.dtype) -> Tensor:
    """The numbers that codes of `target` stand for; floats, eager, by a table of all of them."""
    return decoder(target, dtype, codes.device)(codes)


def decoder(target: FloatFormat | IntFormat, dtype: torch.dtype, device: torch.device) -> Callable[[Tensor], Tensor]:
    """:func:`decode` for many tensors of one format: what it looks up is made once."""
    if is_traced() or isinstance(target, IntFormat):
        return lambda codes: decode_without_table(codes.to(torch.int32), target, dtype)
    table = decode_without_table(torch.arange(1 << target.bits, dtype=torch.int32, device=device), target, dtype)
    return lambda codes: table[codes.to(torch.int32)]


def decode_without_table(codes: Tensor, target: FloatFormat | IntFormat, dtype: torch.dtype) -> Tensor:
    """The same, each number computed from its int32 code, as graphs do it."""
    if isinstance(target, IntFormat):
        if target.affine:
            return codes.to(dtype)
        half = 1 << (target.bits - 1)
        return torch.where(codes == half, math.nan, ((codes ^ half) - half).to(dtype))
    if dtype == torch.float32 and target.min_exponent >= FLOAT32.min_exponent and target.max <= FLOAT32.max:
        return _decode_by_bits(codes, target)
    magnitude = codes & ((1 << (target.bits - 1)) - 1)
    field, mantissa = magnitude >> target.mantissa_bits, magnitude & ((1 << target.mantissa_bits) - 1)
    # float64 holds every value of every format exactly; powers of two are built from their bits.
    power = ((field.long() - target.exponent_bias + 1023) << 52).view(torch.float64)
    normal = power * (1.0 + mantissa.double() * target.epsilon)
    subnormal = mantissa.double() * (target.min_subnormal if target.subnormals else 0.0)
    values = torch.where(field > 0, normal, subnormal)
    values = _with_specials(values, magnitude, target)
    # Triton's unary minus is 0 - x and makes no negative zero.
    return torch.where(codes >> (target.bits - 1) > 0, values * -1.0, values).to(dtype)


def _decode_by_bits(codes: Tensor, target: FloatFormat) -> Tensor:
    """A code's exponent and mantissa moved to their places in a float32; cheap, where float64 is slow or missing."""
    magnitude = codes & ((1 << (target.bits - 1)) - 1)
    shifted = magnitude << (FLOAT32.mantissa_bits - target.mantissa_bits)
    normal = (shifted + ((FLOAT32.exponent_bias - target.exponent_bias) << FLOAT32.mantissa_bits)).view(torch.float32)
    subnormal = magnitude.to(torch.float32) * (target.min_subnormal if target.subnormals else 0.0)
    values = torch.where(magnitude >> target.mantissa_bits > 0, normal, subnormal)
    values = _with_specials(values, magnitude, target)
    sign = (codes >> (target.bits - 1)) << (FLOAT32.bits - 1)
    return (values.view(torch.int32) | sign).view(torch.float32)


def _with_specials(values: Tensor, magnitude: Tensor, target: FloatFormat) -> Tensor:
    """`values` with infinities and NaNs where the codes, signs cut off, stand for them."""
    if target.specials == "none":
        return values
    first_nan = _nan_code(target)
    if target.specials == "ieee":
        values = torch.where(magnitude == _infinity_code(target), math.inf, values)
        first_nan = _infinity_code(target) + 1
    return torch.where(magnitude >= first_nan, math.nan, values)


def _infinity_code(target: FloatFormat) -> int:
    """IEEE: all-ones exponent. Elsewhere no element is infinite and the number is never used."""
    return ((1 << target.exponent_bits) - 1) << target.mantissa_bits


def _nan_code(target: FloatFormat) -> int:
    """IEEE: the quiet NaN; OCP: all ones; without NaN codes zero, and the scale is NaN."""
    if target.specials == "ieee":
        return _infinity_code(target) | (1 << max(target.mantissa_bits - 1, 0))
    return (1 << (target.bits - 1)) - 1 if target.specials == "fn" else 0
