"""Codes of any width side by side in bytes, without a gap.

The first code lies in the lowest bits; ``n`` codes of ``w`` bits take ``ceil(n * w / 8)`` bytes. As many codes as fill
whole bytes make a group (eight of 3 bits: three bytes), and all groups are shifted into place at once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bitplan.errors import QuantizeError

#: The widest code that can be packed.
MAX_PACKED_BITS = 16


def pack_bits(codes: Tensor, width: int) -> Tensor:
    """A flat tensor of codes below 2^width as bytes without gaps."""
    _require_width(width)
    if width == 8:
        return codes.to(torch.uint8)
    group, bytes_per_group = _grouping(width)
    count = codes.numel()
    wide = codes.to(torch.int32)
    if missing := -count % group:
        wide = torch.nn.functional.pad(wide, (0, missing))
    columns = wide.view(-1, group).unbind(1)
    packed = [_byte(columns, byte, width) for byte in range(bytes_per_group)]
    payload = torch.stack(packed, 1).flatten()
    size = (count * width + 7) // 8
    return payload if payload.numel() == size else payload[:size].clone()


def unpack_bits(payload: Tensor, width: int, count: int) -> Tensor:
    """The first `count` codes of :func:`pack_bits`, as int32."""
    _require_width(width)
    if width == 8:
        return payload[:count].to(torch.int32)
    group, bytes_per_group = _grouping(width)
    if missing := -payload.numel() % bytes_per_group:
        payload = torch.nn.functional.pad(payload, (0, missing))
    columns = payload.view(-1, bytes_per_group).to(torch.int32).unbind(1)
    codes = [_code(columns, index, width) for index in range(group)]
    return torch.stack(codes, 1).flatten()[:count]


def _grouping(width: int) -> tuple[int, int]:
    """The least number of codes that fill whole bytes, and how many bytes."""
    common = math.gcd(width, 8)
    return 8 // common, width // common


def _byte(codes: tuple[Tensor, ...], byte: int, width: int) -> Tensor:
    """Byte `byte` of every group: all codes that reach into it, shifted to their place."""
    parts = [
        codes[i] << (i * width - 8 * byte) if i * width >= 8 * byte else codes[i] >> (8 * byte - i * width)
        for i in range(len(codes))
        if i * width < 8 * byte + 8 and (i + 1) * width > 8 * byte
    ]
    whole = parts[0]
    for part in parts[1:]:
        whole = whole | part
    return (whole & 255).to(torch.uint8)


def _code(columns: tuple[Tensor, ...], index: int, width: int) -> Tensor:
    """Code `index` of every group, gathered from the bytes it lies in."""
    first = index * width
    parts = [
        columns[byte] << (8 * byte - first) if 8 * byte >= first else columns[byte] >> (first - 8 * byte)
        for byte in range(first // 8, (first + width + 7) // 8)
    ]
    whole = parts[0]
    for part in parts[1:]:
        whole = whole | part
    return whole & ((1 << width) - 1)


def _require_width(width: int) -> None:
    if not 1 <= width <= MAX_PACKED_BITS:
        raise QuantizeError(f"codes of 1 to {MAX_PACKED_BITS} bits can be packed, not of {width}.")
