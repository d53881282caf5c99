"""Random bits for stochastic rounding, as a pure function of where and when they are used.

A generator's stream depends on how often it was drawn from, so an eager, a compiled, a recomputed
and a resumed run would all round differently. Here the 32 bits of one element are a hash of
``(seed, step, site, element)`` and of nothing else. `element` is the row-major index, whatever the
memory layout, so a channels-last copy of a tensor is rounded alike.

The hash is the two-multiply xor-shift of C. Wellons ("lowbias32", public domain constants): add one
half of a 64-bit key first, xor the other half in between the multiplies, so that two keys never
give shifted or permuted copies of one stream. All arithmetic is int32, which wraps alike in
torch's eager kernels, in Inductor's C++ and in Triton.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: A number that is fixed, or a 0-d integer tensor that may change without a recompilation.
Counter = int | Tensor

_FIRST = 0x7FEB352D
_SECOND = 0x846CA68B - (1 << 32)  # as a signed 32-bit number
_ELEMENTS_PER_KEY = 1 << 31


def random_bits(like: Tensor, seed: Counter, step: Counter = 0, site: Counter = 0) -> Tensor:
    """Uniform int32 bits in the shape of `like`, equal on every device and in every mode."""
    low, high = _key(seed, step, site)
    count = like.numel()
    if count <= _ELEMENTS_PER_KEY:
        index = torch.arange(count, dtype=torch.int32, device=like.device)
    else:  # beyond int32 the wrapped index meets another key
        whole = torch.arange(count, dtype=torch.int64, device=like.device)
        index = (whole & (_ELEMENTS_PER_KEY - 1)).to(torch.int32)
        high = high ^ _mix_tensor((whole >> 31).to(torch.int32))
    index = _in_layout_of(index.view(like.shape), like)
    return _hash(index, low, high)


def _hash(index: Tensor, low: Counter, high: Counter | Tensor) -> Tensor:
    # In place: eager, every temporary saved is a tenth of the cost; compiled, it is all one kernel.
    bits = index + low
    bits ^= _shifted(bits, 16)
    bits *= _FIRST
    bits ^= high
    bits ^= _shifted(bits, 15)
    bits *= _SECOND
    bits ^= _shifted(bits, 16)
    return bits


def _mix_tensor(value: Tensor) -> Tensor:
    return _hash(value, 0, 0)


def _mix_int(value: int) -> int:
    """:func:`_mix_tensor` on one Python integer."""
    value &= 0xFFFFFFFF
    value = ((value ^ value >> 16) * _FIRST) & 0xFFFFFFFF
    value = ((value ^ value >> 15) * _SECOND) & 0xFFFFFFFF
    value ^= value >> 16
    return value - (1 << 32) if value >> 31 else value


def _key(seed: Counter, step: Counter, site: Counter) -> tuple[Counter, Counter]:
    """Two int32 numbers from the three counters, each wholly mixed before the next is added."""
    low: Counter = 0
    high: Counter = 0x3C6EF372
    for counter in (seed, step, site):
        for half in _halves(counter):
            low = _mix(low, half)
            high = _mix(high, low)
    return low, high


def _mix(state: Counter, word: Counter) -> Counter:
    mixed = (state ^ word) + 0x5BD1E995
    return _mix_tensor(mixed) if isinstance(mixed, Tensor) else _mix_int(mixed)


def _halves(counter: Counter) -> tuple[Counter, Counter]:
    """The low and high 32 bits, as signed numbers."""
    if isinstance(counter, Tensor):
        wide = counter.to(torch.int64)
        return wide.to(torch.int32), (wide >> 32).to(torch.int32)
    low = counter & 0xFFFFFFFF
    high = counter >> 32 & 0xFFFFFFFF
    return (low - (1 << 32) if low >> 31 else low), (high - (1 << 32) if high >> 31 else high)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Logical right shift; torch's own is arithmetic on signed integers."""
    shifted = bits >> by
    shifted &= (1 << (32 - by)) - 1
    return shifted


def _in_layout_of(index: Tensor, like: Tensor) -> Tensor:
    if like.is_contiguous() or torch.compiler.is_compiling():
        return index
    return torch.empty_like(like, dtype=torch.int32).copy_(index)


def unit_interval(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Centred uniforms (k + 1/2) / 2^23 from the upper 23 bits: exact in float32, never 0 or 1, mean 1/2."""
    scaled = _shifted(bits, 9).to(dtype)
    scaled += 0.5
    scaled *= math.ldexp(1.0, -23)
    return scaled
