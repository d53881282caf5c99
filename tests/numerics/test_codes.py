"""The bit pattern of every number of a format."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import bitplan
from bitplan.errors import FormatError
from bitplan.numerics.formats import FloatFormat, IntFormat
from bitplan.numerics.packing import decode, decode_without_table, encode


def assert_same(ours: Tensor, expected: Tensor) -> None:
    """Bit for bit, all NaNs alike."""
    assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape)
    pattern = torch.int32 if ours.dtype == torch.float32 else torch.int64
    differ = ours.view(pattern) != expected.view(pattern)
    assert int((differ & ~(ours.isnan() & expected.isnan())).sum()) == 0


def small_formats() -> Iterator[FloatFormat]:
    """Every float of up to 8 bits, with every kind of special codes, with and without subnormals."""
    for exponent_bits in range(1, 8):
        for mantissa_bits in range(8 - exponent_bits):
            for specials in ("ieee", "fn", "none"):
                for subnormals in (True, False):
                    try:
                        yield FloatFormat(exponent_bits, mantissa_bits, mantissa_bits - 2, specials, subnormals)
                    except FormatError:  # nothing but zero in it
                        continue


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_code_of_every_small_float_means_its_value(dtype: torch.dtype) -> None:
    checked = 0
    for target in small_formats():
        codes = torch.arange(1 << target.bits, dtype=torch.int32)
        values = decode(codes, target, dtype)
        assert_same(decode_without_table(codes, target, dtype), values)
        assert_same(values, torch.tensor([target.decode(code) for code in codes.tolist()], dtype=dtype))
        # Of several codes for one value (NaN; zero without subnormals) the encoder may choose one.
        again = encode(values, target)
        assert_same(decode(again, target, dtype), values)
        unique = values.isfinite() & ((values != 0) | target.subnormals)
        assert torch.equal(again[unique], codes[unique]), target.name
        assert int(again.min()) >= 0
        assert int(again.max()) < 1 << target.bits
        checked += 1
    assert checked > 100


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("e5m2", torch.float8_e5m2),
        ("e4m3", torch.float8_e4m3fn),
    ],
)
def test_codes_are_torchs_own_patterns(name: str, dtype: torch.dtype) -> None:
    target = bitplan.get_format(name)
    assert isinstance(target, FloatFormat)
    patterns = torch.arange(1 << target.bits, dtype=torch.int32)
    theirs = patterns.to(torch.uint8 if target.bits == 8 else torch.int16).view(dtype).float()
    assert_same(decode(patterns, target, torch.float32), theirs)
    finite = theirs.isfinite()
    assert torch.equal(encode(theirs, target)[finite], patterns[finite])
    packed = bitplan.pack(theirs, name)
    assert_same(packed.unpack(), bitplan.quantize(theirs, name))
    assert packed.nbytes == (1 << target.bits) * target.bits // 8


@pytest.mark.parametrize("bits", range(1, 17))
def test_every_integer_code_means_its_value(bits: int) -> None:
    codes = torch.arange(1 << bits, dtype=torch.int32)
    assert torch.equal(decode(codes, IntFormat(bits, affine=True), torch.float32), codes.float())
    assert torch.equal(encode(codes.float(), IntFormat(bits, affine=True)), codes)
    if bits > 1:
        half = 1 << (bits - 1)
        values = decode(codes, IntFormat(bits), torch.float32)
        expected = torch.where(codes < half, codes, codes - (1 << bits)).float()
        expected[half] = math.nan  # the code no symmetric integer needs
        assert_same(values, expected)
        assert torch.equal(encode(values, IntFormat(bits)), codes)
