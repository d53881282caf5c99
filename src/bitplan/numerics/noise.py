"""Random bits for stochastic rounding, as a pure function of site and step.

A generator's stream depends on how often it was drawn from, so eager, compiled, recomputed and resumed runs would round
differently. Here the 32 bits of an element are a hash of ``(seed, step, site, element)``. `element` is the row-major
index, whatever the memory layout, so a channels-last copy of a tensor is rounded equally.

The hash is the two-multiply xor-shift of C. Wellons ("lowbias32", public domain constants): one half of a 64-bit key is
added first, the other half is xored in between the multiplications, so that two keys never give shifted or permuted
copies of one stream. All arithmetic is int32, which wraps equally in torch's eager kernels, in Inductor's C++ and in
Triton.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bitplan.compiler.tracing import is_traced
from bitplan.errors import QuantizeError

#: A constant, or a 0-d integer tensor that may change without recompilation.
Counter = int | Tensor

_FIRST = 0x7FEB352D
_SECOND = 0x846CA68B - (1 << 32)  # as a signed 32-bit number
_FOLD = 0x9E3779B1 - (1 << 32)
_ADDED = 0x5BD1E995
_ELEMENTS_PER_KEY = 1 << 31


def random_bits(like: Tensor, seed: Counter, step: Counter = 0, site: Counter = 0) -> Tensor:
    """Uniform int32 bits in the shape of `like`, equal on every device and in every mode."""
    return bits_of_key(like, *_key(seed, step, site, like.device))


def key_of(seed: int, step: int, site: int = 0) -> tuple[int, int]:
    """The key of three counters as two int32 numbers, for callers that store keys in a tensor."""
    low, high = _key(seed, step, site, torch.device("cpu"))
    return int(low), int(high)


def keys_of(seed: int, step: int, sites: NDArray[np.uint32]) -> NDArray[np.int32]:
    """The :func:`key_of` of many sites below 2^32, one row each.

    In numpy, whose operations on short arrays take a tenth of torch's time.

    >>> keys_of(1, 2, np.array([3, 2**32 - 1], np.uint32)).tolist() == [[*key_of(1, 2, 3)], [*key_of(1, 2, 2**32 - 1)]]
    True
    """
    first, second = _mixed_counters((seed, step), torch.device("cpu"))
    assert isinstance(first, int)
    assert isinstance(second, int)
    low = _mix_array(np.uint32(first & 0xFFFFFFFF) ^ sites)
    high = _mix_array(np.uint32(second & 0xFFFFFFFF) ^ low)
    return np.stack((low, high), 1).view(np.int32)


def _mix_array(mixed: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """As :func:`_mix` after its xor: unsigned numbers wrap, and their shifts are logical."""
    bits = mixed + np.uint32(_ADDED)
    bits ^= bits >> np.uint32(16)
    bits *= np.uint32(_FIRST)
    bits ^= bits >> np.uint32(15)
    bits *= np.uint32(_SECOND & 0xFFFFFFFF)
    bits ^= bits >> np.uint32(16)
    return bits


def bits_of_key(like: Tensor, low: Counter, high: Counter) -> Tensor:
    """The :func:`random_bits` of a key; mixing a key inside a graph costs seconds of compilation."""
    count = like.numel()
    if isinstance(low, int) and isinstance(high, int) and like.device.type == "cpu" and is_traced():
        low, high = _from_memory(low, high, like.device)
    if count <= _ELEMENTS_PER_KEY:
        index = torch.arange(count, dtype=torch.int32, device=like.device)
    else:  # beyond int32 the wrapped index is combined with another key
        whole = torch.arange(count, dtype=torch.int64, device=like.device)
        index = (whole & (_ELEMENTS_PER_KEY - 1)).to(torch.int32)
        high = high ^ _mix_tensor((whole >> 31).to(torch.int32))
    index = _in_layout_of(index.view(like.shape), like)
    return _hash(index, low, high)


def _from_memory(low: int, high: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A constant key as two numbers that the C++ compiler cannot see.

    Inductor's scalar loops multiply signed integers, whose overflow is undefined in C++: from the key GCC infers
    that the product always overflows and drops the result. A view of another width makes Inductor store the key.
    """
    both = [torch.full((), number, dtype=torch.int32, device=device) for number in (low, high)]
    first, second = torch.stack(both).view(torch.int64).view(torch.int32)
    return first, second


def _hash(index: Tensor, low: Counter, high: Counter | Tensor) -> Tensor:
    # In place: in eager code every temporary is a tenth of the cost; compiled, all of it is one kernel.
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


def _key(seed: Counter, step: Counter, site: Counter, device: torch.device) -> tuple[Counter, Counter]:
    """Two int32 numbers from three counters, each completely mixed before the next is added."""
    low, high = _mixed_counters((seed, step, site), device)
    if isinstance(low, Tensor) and isinstance(high, Tensor) and is_traced():
        # Inductor would mix the key again for every element; a view of another width makes it store the key.
        low, high = torch.stack((low, high)).view(torch.int64).view(torch.int32)
    return low, high


def _mixed_counters(counters: Iterable[Counter], device: torch.device) -> tuple[Counter, Counter]:
    low: Counter = 0
    high: Counter = 0x3C6EF372
    for counter in counters:
        word, upper = _words(counter, device)
        low = _mix(low, word)
        high = _mix(high, low)
        if upper is not None:
            high = _int32(high ^ upper * _SECOND)
    return low, high


def _int32(number: Counter) -> Counter:
    """Wrapped, as tensors do by themselves."""
    if isinstance(number, Tensor):
        return number
    number &= 0xFFFFFFFF
    return number - (1 << 32) if number >> 31 else number


def _mix(state: Counter, word: Counter) -> Counter:
    mixed = (state ^ word) + _ADDED
    return _mix_tensor(mixed) if isinstance(mixed, Tensor) else _mix_int(mixed)


def _words(counter: Counter, device: torch.device) -> tuple[Counter, Counter | None]:
    """The counter folded to 32 bits, as a signed number (unchanged if it fits), and what lies above 32 bits.

    The latter is None or 0 for a counter of 32 bits, signed or not.
    """
    if not isinstance(counter, Tensor) and is_traced() and _is_symbol(counter):
        # A symbol would be carried through the whole mixing as one expression; the view stores it.
        low, high = torch.full((1,), counter, dtype=torch.int64, device=device).view(torch.int32)
        return low + high * _FOLD, high - (high >> 31)
    if isinstance(counter, Tensor):
        if counter.dtype == torch.int32:
            # A negative number's upper half is all ones.
            return counter + (counter >> 31) * _FOLD, None
        wide = counter.to(torch.int64)
        upper = wide >> 32
        return (wide + upper * _FOLD).to(torch.int32), (upper - (upper >> 63)).to(torch.int32)
    if not -(1 << 63) <= counter < 1 << 63:
        raise QuantizeError(
            f"a seed has at most 64 bits with its sign, not {counter.bit_length() + 1}: take it modulo 2**63."
        )
    above = counter >> 32
    return _int32(counter + above * _FOLD), above + 1 if above < 0 else above


def _is_symbol(number: int) -> bool:
    """Whether torch.compile replaced a number by a symbol because it changed between calls."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return not has_static_value(number)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Logical right shift; torch's own is arithmetic on signed integers."""
    shifted = bits >> by
    shifted &= (1 << (32 - by)) - 1
    return shifted


def _in_layout_of(index: Tensor, like: Tensor) -> Tensor:
    if like.is_contiguous() or is_traced():
        return index
    return torch.empty_like(like, dtype=torch.int32).copy_(index)


def unit_interval(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Centred uniforms (k + 1/2) / 2^23 from the upper 23 bits: exact in float32, never 0 or 1, mean 1/2."""
    scaled = _shifted(bits, 9).to(dtype)
    scaled += 0.5
    scaled *= math.ldexp(1.0, -23)
    return scaled


# --- Random states: measurements of a training run must not advance its generators


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the random states of torch (on every device), numpy and Python at the end."""
    python, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
