"""Elements of a format: one rounding for floats and integers, and blocks of them that share scales."""

from __future__ import annotations

import torch
from torch import Tensor

from bitplan.numbers.formats import BlockFormat, FloatFormat, IntFormat, Overflow
from bitplan.numbers.reference import Rounding
from bitplan.numbers.rounding import round_float, round_int
from bitplan.numbers.scaling import block_amax, divide, floor_log2, multiply_by_power, shared_exponent, step_scale
from bitplan.numbers.straight import Encoded

_E4M3 = FloatFormat(4, 3, specials="fn")


def round_element(
    t: Tensor, target: FloatFormat | IntFormat, rounding: Rounding, overflow: Overflow | None, bits: Tensor | None
) -> Tensor:
    """`t`, already divided by its scale, on the grid of `target`; `bits` decide stochastic rounding."""
    if isinstance(target, IntFormat):
        return round_int(t, target, rounding, bits) + 0.0  # an integer has no negative zero
    return round_float(t, target, rounding, overflow or target.default_overflow, bits)


def encode_block(blocks: Tensor, target: BlockFormat, rounding: Rounding, bits: Tensor | None) -> Encoded:
    """Elements and scales of values that lie in blocks along their last axis.

    ``e8m0`` scales are powers of two (OCP MX); E4M3 ones stand beside one float for the whole tensor (NVFP4).
    """
    scales: tuple[Tensor, ...]
    if target.scale == "e8m0":
        codes = shared_exponent(blocks, floor_log2(target.element_max))
        scales = (codes,)
        ready = multiply_by_power(blocks, codes, -1) * (1.0 / target.unit)
    else:
        amax = block_amax(blocks)
        whole = step_scale(amax.amax().reshape(1), 448.0 * target.element_max, power_of_two=False)
        wanted = divide(amax, whole * target.element_max)
        scales = (round_float(wanted, _E4M3, "nearest", "saturate"), whole)
        effective = scales[0] * whole
        # A block so small that its scale vanished becomes zeros.
        ready = divide(blocks, torch.where(effective == 0, torch.inf, effective))
    return Encoded(round_element(ready, target.element, rounding, "saturate", bits), scales)


def decode_block(elements: Tensor, scales: tuple[Tensor, ...], target: BlockFormat) -> Tensor:
    """The values again, still in blocks."""
    if target.scale == "e8m0":
        return multiply_by_power(elements * target.unit, scales[0], 1)
    return elements * (scales[0] * scales[1])
