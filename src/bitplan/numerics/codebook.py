"""Rounding to a code book, and its codes: the fast implementation of :class:`~bitplan.numerics.formats.CodebookFormat`.

Every rounding but the stochastic one is a comparison with thresholds: the smallest number of the carrier that goes to
the upper of two neighbours. They are computed exactly, so ties and numbers next to them are right. Eager code searches
the thresholds; a compiled graph compares with each of them, because a table would be a constant that is copied to the
device at every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitplan.compiler.torch_private import FakeTensor
from bitplan.compiler.tracing import constant_when_traced, is_traced
from bitplan.numerics.formats import CodebookFormat
from bitplan.numerics.noise import unit_interval
from bitplan.numerics.reference import Rounding


def round_to_book(x: Tensor, target: CodebookFormat, rounding: Rounding, bits: Tensor | None = None) -> Tensor:
    """`x`, in its carrier's dtype, rounded to values of the book; NaN stays NaN, and what lies beyond saturates."""
    if rounding == "stochastic":
        assert bits is not None
        return _round_stochastically(x, target, bits)
    limits = thresholds(target.book, x.dtype == torch.float64, rounding)
    return _keep_nan(x, _select(x, limits, target.book))


def codes_of_values(elements: Tensor, target: CodebookFormat) -> Tensor:
    """The int32 codes of values of the book. NaN has no code: it gets the last one, and its scale is NaN."""
    if not is_traced():
        edges = _table(target.book[1:], elements.dtype, elements.device, elements)
        return torch.bucketize(elements.contiguous(), edges, out_int32=True, right=True)
    codes = (elements >= target.book[1]).to(torch.int32)
    for value in target.book[2:]:
        codes = codes + (elements >= value).to(torch.int32)
    return codes


def values_of_codes(codes: Tensor, target: CodebookFormat, dtype: torch.dtype) -> Tensor:
    """The values of int32 codes; codes beyond the book have its last value."""
    if not is_traced():
        return book_table(target, dtype, codes)[codes]
    values = [*target.book, *[target.book[-1]] * ((1 << target.bits) - len(target.book))]
    return _select_by_bits(codes, values, target.bits - 1).to(dtype)


def book_table(target: CodebookFormat, dtype: torch.dtype, like: Tensor) -> Tensor:
    """The values by code, for all codes of the format's width, on the device of `like`."""
    missing = (1 << target.bits) - len(target.book)
    return _table((*target.book, *[target.book[-1]] * missing), dtype, like.device, like)


@constant_when_traced
def thresholds(book: tuple[float, ...], is_double: bool, rounding: Rounding) -> tuple[float, ...]:
    """For each value but the first: the smallest float32 (or float64) that is rounded to it or to a later one."""
    return _thresholds(book, is_double, rounding)


@lru_cache(maxsize=256)
def _thresholds(book: tuple[float, ...], is_double: bool, rounding: Rounding) -> tuple[float, ...]:
    number = np.float64 if is_double else np.float32
    return tuple(
        _threshold(low, high, code % 2 == 1, rounding, number) for code, (low, high) in enumerate(pairwise(book))
    )


def _threshold(low: float, high: float, low_is_odd: bool, rounding: Rounding, number: Callable[..., Any]) -> float:
    is_high_farther = abs(high) > abs(low)
    if rounding == "toward-zero" and abs(low) != abs(high):
        return high if is_high_farther else float(np.nextafter(number(low), number(math.inf)))
    middle = (Fraction(low) + Fraction(high)) / 2
    tie_goes_up = is_high_farther if rounding == "nearest-away" and abs(low) != abs(high) else low_is_odd
    threshold = number(float(middle))
    while Fraction(float(threshold)) > middle:
        threshold = np.nextafter(threshold, number(-math.inf))
    while Fraction(float(threshold)) < middle:
        threshold = np.nextafter(threshold, number(math.inf))
    if Fraction(float(threshold)) == middle and not tie_goes_up:
        threshold = np.nextafter(threshold, number(math.inf))
    return float(threshold)


def _round_stochastically(x: Tensor, target: CodebookFormat, bits: Tensor) -> Tensor:
    """Up with the probability of the position between the neighbours, compared in float64."""
    inner = target.book[1:-1]  # at or above the first of these, `x` has another neighbour below
    low, high = _select(x, inner, target.book[:-1]).double(), _select(x, inner, target.book[1:]).double()
    uniform = unit_interval(bits, torch.float64)
    rounded = torch.where(x.double() - low > uniform * (high - low), high, low)
    return _keep_nan(x, rounded.to(x.dtype))


def _select(x: Tensor, limits: tuple[float, ...], values: tuple[float, ...]) -> Tensor:
    """The value whose number is that of the limits at or below `x`; NaN gets any."""
    if not is_traced():
        if not limits:
            return torch.full_like(x, values[0])
        found = torch.bucketize(x.contiguous(), _table(limits, x.dtype, x.device, x), out_int32=True, right=True)
        return _table(values, x.dtype, x.device, x)[found]
    selected = torch.full_like(x, values[0])
    for limit, value in zip(limits, values[1:], strict=True):
        selected = torch.where(x >= limit, value, selected)
    return selected


def _keep_nan(x: Tensor, rounded: Tensor) -> Tensor:
    return torch.where(x.isnan(), x, rounded)


def _select_by_bits(codes: Tensor, values: list[float], bit: int) -> Tensor:
    """A binary tree of selections: one comparison a bit, one selection a value."""
    half = len(values) // 2
    is_upper = (codes >> bit & 1) > 0
    if half == 1:
        return torch.where(is_upper, values[1], values[0])
    lower, upper = (_select_by_bits(codes, part, bit - 1) for part in (values[:half], values[half:]))
    return torch.where(is_upper, upper, lower)


def _table(values: tuple[float, ...], dtype: torch.dtype, device: torch.device, like: Tensor | None = None) -> Tensor:
    """The values as a tensor; made once, unless `like` is fake, with which only other fake tensors can be used."""
    if isinstance(like, FakeTensor) or device.type == "meta":
        return torch.tensor(values, dtype=dtype, device=device)
    return _cached_table(values, dtype, device)


@lru_cache(maxsize=64)
def _cached_table(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)
