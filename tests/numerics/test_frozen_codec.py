"""Weights stored in few bits: bytes, values against a search in float64, chunks, eager against compiled."""

import numpy as np
import pytest
import torch
from torch import Tensor

import bitplan as bp
from bitplan.errors import QuantizeError
from bitplan.numerics import frozen_codec
from bitplan.numerics.formats import get_format
from bitplan.numerics.frozen_codec import FrozenCodec, codec_of_text, codes_from_tensors

CASES = [
    ("nf4", "block", 64, False),
    ("int4", "block", 64, False),
    ("e2m1", "block", 32, True),
    ("mxfp4", None, None, False),
    ("mxint8", None, None, False),
    ("e4m3", "tensor", None, False),
    ("e4m3", "block", 128, False),
    ("int8", "channel", None, False),
    ("nf4", "channel", None, False),
    ("int3", "tensor", None, True),
]


def codec_of(case: tuple, shape: tuple[int, ...]) -> FrozenCodec:
    return FrozenCodec(get_format(case[0]), shape, *case[1:])


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(shape, generator=generator) * torch.rand(shape[0], *[1] * (len(shape) - 1), generator=generator)
    ).to(dtype)


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def test_nf4_takes_at_most_0_53_bytes_per_value() -> None:
    codec = FrozenCodec(get_format("nf4"), (1024, 1024), "block", 64)
    assert codec.encode(drawn(1024, 1024)).nbytes / 1024**2 == pytest.approx(0.5 + 1 / 64 + 8 / 64 / 256, abs=1e-4)


@pytest.mark.parametrize("shape", [(16, 512), (7, 77)])
def test_every_value_is_the_nearest_under_its_stored_scale(shape: tuple[int, int]) -> None:
    weight = drawn(*shape)
    codec = FrozenCodec(get_format("nf4"), shape, "block", 64)
    codes = codec.encode(weight)
    decoded = codec.decode(codes, torch.float32).numpy()
    book = np.array(get_format("nf4").values())
    low, offset, step = (tensor.numpy() for tensor in codes.scales)
    blocks_per_row = -(-shape[1] // 64)
    for row in range(shape[0]):
        for first in range(0, shape[1], 64):
            number = row * blocks_per_row + first // 64
            group = number // 256
            scale = np.float32(np.float32(low[number] + offset[group]) * step[group])
            block = weight[row, first : first + 64].numpy().astype(np.float64)
            # The stored scale is within half a step of the amax, and the step is small.
            assert abs(scale - np.abs(block).max()) <= step[group] * 0.51
            nearest = np.abs(block[:, None] / np.float64(scale) - book).argmin(1)
            expected = book[nearest].astype(np.float32) * scale
            assert np.array_equal(decoded[row, first : first + 64], expected)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_decoding_has_the_same_bits(case: tuple, dtype: torch.dtype) -> None:
    weight = drawn(24, 200, dtype=dtype)
    codec = codec_of(case, (24, 200))
    codes = codec.encode(weight)
    decoded = codec.decode(codes, dtype)
    error = (decoded - weight).float().norm() / weight.float().norm()
    assert 1e-3 < error < (0.9 if case[0] == "int3" else 0.2)
    text = codec.text
    assert codec_of_text(text) == codec

    def decode(*tensors: Tensor) -> Tensor:
        return codec.decode(codes_from_tensors(tensors, codec), dtype, after=tensors[0].float().to(dtype))

    torch.compiler.reset()
    assert torch.equal(torch.compile(decode, fullgraph=True, backend="aot_eager")(*codes.tensors), decoded)


def test_inductor_decodes_to_the_same_bits() -> None:
    for case in (CASES[0], CASES[5]):
        codec = codec_of(case, (24, 256))
        codes = codec.encode(drawn(24, 256, dtype=torch.bfloat16))
        compiled = torch.compile(lambda *t, c=codec: c.decode(codes_from_tensors(t, c), torch.bfloat16), fullgraph=True)
        assert torch.equal(compiled(*codes.tensors), codec.decode(codes, torch.bfloat16))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunks_change_nothing(case: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = drawn(50, 67)
    codec = codec_of(case, (50, 67))
    whole = codec.encode(weight)
    decoded = codec.decode(whole, torch.float32)
    monkeypatch.setattr(frozen_codec, "_CHUNK", 500)
    parts = codec.encode(weight)
    assert all(torch.equal(bytes_of(a), bytes_of(b)) for a, b in zip(whole.tensors, parts.tensors, strict=True))
    assert torch.equal(codec.decode(parts, torch.float32), decoded)


def test_formats_with_one_scale_are_those_of_quantize() -> None:
    weight = drawn(32, 96)
    e4m3 = FrozenCodec(get_format("e4m3"), (32, 96), "tensor")
    assert torch.equal(e4m3.decode(e4m3.encode(weight), torch.float32), bp.quantize(weight, "e4m3", scale="tensor"))
    mxfp4 = FrozenCodec(get_format("mxfp4"), (32, 96))
    assert torch.equal(mxfp4.decode(mxfp4.encode(weight), torch.float32), bp.quantize(weight, "mxfp4"))
    int8 = FrozenCodec(get_format("int8"), (32, 96), "channel")
    assert torch.equal(
        int8.decode(int8.encode(weight), torch.float32), bp.quantize(weight, "int8", scale="channel", axis=0)
    )


def test_encoding_what_was_decoded_changes_nothing() -> None:
    codec = FrozenCodec(get_format("nf4"), (64, 256), "block", 64)
    once = codec.decode(codec.encode(drawn(64, 256)), torch.float32)
    twice = codec.decode(codec.encode(once), torch.float32)
    assert (once - twice).abs().max() <= 0.005 * once.abs().max()


def test_blocks_of_zeros_stay_zero_and_small_ones_do_not_vanish() -> None:
    weight = torch.zeros(4, 256)
    codec = FrozenCodec(get_format("nf4"), (4, 256), "block", 64)
    assert torch.equal(codec.decode(codec.encode(weight), torch.float32), weight)
    weight[0, :64], weight[1] = 100.0, 0.1
    decoded = codec.decode(codec.encode(weight), torch.float32)
    assert torch.equal(decoded[2:], weight[2:])
    assert (decoded[1] > 0).all()


def test_what_cannot_be_stored_is_said() -> None:
    with pytest.raises(QuantizeError, match="bf16"):
        FrozenCodec(get_format("bf16"), (4, 4), "tensor")
    with pytest.raises(QuantizeError, match="scale"):
        FrozenCodec(get_format("nf4"), (4, 4))
    with pytest.raises(QuantizeError, match="finite"):
        FrozenCodec(get_format("nf4"), (4, 4), "tensor").encode(torch.full((4, 4), torch.nan))
    with pytest.raises(QuantizeError, match="matrices"):
        FrozenCodec(get_format("nf4"), (4,), "tensor")
