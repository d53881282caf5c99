"""Codes of any width side by side: the very bits of one long number."""

from __future__ import annotations

import math

import pytest
import torch

from bitplan.errors import QuantizeError
from bitplan.numerics.packing import pack_bits, unpack_bits


@pytest.mark.parametrize("width", range(1, 17))
def test_codes_of_every_width_follow_each_other_without_a_gap(width: int) -> None:
    """As one long number, first code lowest: what Python's own integers say."""
    generator = torch.Generator().manual_seed(width)
    for count in (*range(20), 257):
        codes = torch.randint(0, 1 << width, (count,), generator=generator, dtype=torch.int32)
        payload = pack_bits(codes, width)
        assert payload.dtype == torch.uint8
        assert payload.untyped_storage().nbytes() == math.ceil(count * width / 8)
        number = sum(code << (index * width) for index, code in enumerate(codes.tolist()))
        assert int.from_bytes(bytes(payload.tolist()), "little") == number
        assert torch.equal(unpack_bits(payload, width, count), codes)


@pytest.mark.parametrize("width", [0, 17, -1])
def test_other_widths_are_refused(width: int) -> None:
    with pytest.raises(QuantizeError, match=f"codes of 1 to 16 bits can be packed, not of {width}"):
        pack_bits(torch.zeros(8, dtype=torch.int32), width)
    with pytest.raises(QuantizeError, match=f"not of {width}"):
        unpack_bits(torch.zeros(8, dtype=torch.uint8), width, 8)
