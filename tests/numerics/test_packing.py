"""Packed tensors: the bytes they really take, and the very numbers of ``quantize``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import bitplan
from bitplan.errors import FormatError, QuantizeError
from bitplan.numerics import chunks
from bitplan.numerics.packing import pack_rounded
from bitplan.numerics.quantizer import make_quantizer
from bitplan.numerics.reference import ROUNDINGS

PATTERN = {
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
SCALES: list[dict[str, Any]] = [
    {"scale": "tensor"},
    {"scale": "channel", "axis": 0},
    {"scale": "vector", "axis": -1, "power_of_two": True},
    {"scale": "block", "block": 4},
    {"scale": "block", "block": 3, "axis": 0},
    {"scale": "block", "block": (2, 4)},
]
#: Each kind of code: special codes or none, no mantissa, no subnormals, all subnormal, carried by float64 (e8m3b1).
FLOATS = (
    *("fp16", "bf16", "e5m2", "e4m3", "e3m4", "e3m2", "e2m3", "e2m1", "e4m3b4", "e5m2b0", "e6m9b0"),
    *("e4m3ns", "e8m0", "e3m0none", "e1m0none", "e1m3none", "e8m3b1", "e5m7", "e2m5b3"),
)
INTS = ("int2", "int3", "int8", "int11", "int16")
AFFINE = ("uint1", "uint3", "uint8", "uint13", "uint16")
BLOCKS = ("mxfp8", "mxfp8e5m2", "mxfp6", "mxfp6e3m2", "mxfp4", "mxint8", "nvfp4")


def sample(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-7, 8, shape, generator=generator).float())
    return torch.randn(shape, generator=generator) * spread


def assert_same(ours: Tensor, expected: Tensor) -> None:
    """Bit for bit, all NaNs alike, in the same layout."""
    assert (ours.dtype, ours.shape, ours.stride()) == (expected.dtype, expected.shape, expected.stride())
    pattern = PATTERN[ours.dtype]
    differ = ours.contiguous().view(pattern) != expected.contiguous().view(pattern)
    assert int((differ & ~(ours.isnan() & expected.isnan())).sum()) == 0


# --- bytes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "name", "scale", "nbytes"),
    [
        ((1000,), "e2m3", {}, 750),
        ((1000,), "int3", {}, 375),
        ((1001,), "int3", {}, 376),
        ((1000,), "e4m3", {}, 1000),
        ((1000,), "fp16", {}, 2000),
        ((1000,), "e5m7", {}, 1625),
        ((1000,), "int3", {"scale": "tensor"}, 375 + 4),
        ((1000,), "uint1", {"scale": "tensor"}, 125 + 8),
        ((10, 100), "int4", {"scale": "channel", "axis": 0}, 500 + 40),
        ((10, 100), "int4", {"scale": "vector", "axis": 0}, 500 + 400),
        ((10, 100), "uint4", {"scale": "channel", "axis": 0}, 500 + 80),
        ((10, 100), "e2m1", {"scale": "block", "block": 16}, 500 + 10 * 7 * 4),
        ((64, 256), "mxfp4", {}, 8192 + 512),
        ((64, 256), "mxfp6", {}, 12288 + 512),
        ((64, 256), "mxint8", {}, 16384 + 512),
        ((64, 256), "nvfp4", {}, 8192 + 1024 + 4),
        # A ragged last block costs its scale and its own elements, not the padding.
        ((8, 3), "mxfp4", {}, 12 + 8),
        ((8, 10), "mxfp8", {}, 80 + 8),
        ((8, 10), "nvfp4", {}, 40 + 8 + 4),
        ((10, 8), "uint4", {"scale": "block", "block": 16, "axis": 0}, 40 + 8 * 8),
        # One scale per tile of rows and columns, ragged ones included; then tiles of block formats.
        ((256, 384), "e4m3", {"scale": "block", "block": (128, 128)}, 256 * 384 + 2 * 3 * 4),
        ((256, 384), "e4m3", {"scale": "block", "block": (1, 128)}, 256 * 384 + 256 * 3 * 4),
        ((130, 200), "e4m3", {"scale": "block", "block": (128, 128)}, 130 * 200 + 2 * 2 * 4),
        ((3, 10, 9), "uint4", {"scale": "block", "block": (4, 4)}, 135 + 3 * 3 * 3 * 8),
        ((10, 9), "int8", {"scale": "block", "block": (1 << 31, 1 << 31)}, 90 + 4),
        ((64, 256), "nvfp4", {"block": (16, 16)}, 8192 + 64 + 4),
        ((20, 40), "mxfp8", {"block": (16, 32)}, 800 + 2 * 2),
        ((), "int8", {}, 1),
        ((0, 7), "mxfp4", {}, 0),
    ],
)
def test_bytes_are_those_of_the_elements_and_scales(
    shape: tuple[int, ...], name: str, scale: dict[str, Any], nbytes: int
) -> None:
    packed = bitplan.pack(sample(*shape), name, **scale)
    assert packed.nbytes == nbytes
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in (packed.payload, *packed.scales)}
    assert sum(tensor.untyped_storage().nbytes() for tensor in storages.values()) == nbytes
    assert_same(packed.unpack(), bitplan.quantize(sample(*shape), name, **scale))


def test_a_packed_tensor_says_what_it_is() -> None:
    packed = bitplan.pack(sample(4, 6).bfloat16(), "e4m3")
    assert repr(packed) == "PackedTensor(e4m3, shape=(4, 6), torch.bfloat16, 24 bytes, cpu)"
    assert packed.format == bitplan.get_format("e4m3")
    assert packed.device == torch.device("cpu")
    moved = bitplan.pack(sample(4, 6), "mxfp4").to("cpu")
    assert_same(moved.unpack(), bitplan.quantize(sample(4, 6), "mxfp4"))


# --- numbers ----------------------------------------------------------------------------------------------


def cases(name: str) -> list[dict[str, Any]]:
    if name in BLOCKS:
        return [{}, {"axis": 0}, {"block": (2, 4)}]
    return [*SCALES, *([] if name in AFFINE else [{}]), *([{**SCALES[3], "range": "minmax"}] if name in INTS else [])]


@pytest.mark.parametrize("dtype", list(PATTERN), ids=str)
@pytest.mark.parametrize("name", [*FLOATS, *INTS, *AFFINE, *BLOCKS])
def test_unpacking_gives_what_quantize_gives(name: str, dtype: torch.dtype) -> None:
    """Every rounding and scale; 10 elements to a row make every block a ragged one."""
    x = sample(5, 10).to(dtype)
    served = 0
    for scale in cases(name):
        try:
            bitplan.quantize(x, name, **scale)
        except FormatError:  # the type cannot hold the format
            continue
        for rounding in ROUNDINGS:
            packed = bitplan.pack(x, name, rounding, seed=4, step=1, site=2, **scale)
            assert_same(packed.unpack(), bitplan.quantize(x, name, rounding, seed=4, step=1, site=2, **scale))
            served += 1
    assert served > 0 or dtype in (torch.bfloat16, torch.float16)


def layouts() -> list[Tensor]:
    plain = sample(4, 6, 5, 7)
    return [
        plain.to(memory_format=torch.channels_last),
        plain.permute(3, 1, 0, 2),
        plain[:, ::2, :, 1:4],
        plain[:1, :1, :1, :3],
        sample(9, 1).T,
        sample(4, 1).expand(4, 9),
        sample(3),
        torch.tensor(1.7),
        torch.empty(0),
        torch.empty(3, 0, 2),
    ]


@pytest.mark.parametrize("index", range(len(layouts())))
@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("e4m3", {}),
        ("int3", {"scale": "tensor"}),
        ("uint5", {"scale": "block", "block": 4}),
        ("uint5", {"scale": "block", "block": (2, 4)}),
        ("mxfp4", {}),
        ("nvfp4", {}),
        ("nvfp4", {"block": (3, 3)}),
    ],
)
def test_layouts_survive(name: str, scale: dict[str, Any], index: int) -> None:
    x = layouts()[index]
    for rounding in ("nearest", "stochastic"):
        ours = bitplan.pack(x, name, rounding, seed=1, **scale).unpack()
        assert_same(ours, bitplan.quantize(x, name, rounding, seed=1, **scale))


@pytest.mark.parametrize("name", [*FLOATS, *INTS])
def test_special_values_survive(name: str) -> None:
    """NaN, infinities, both zeros, the largest and the smallest; as they come without a scale, as NaN with one."""
    number_format = bitplan.get_format(name)
    largest, smallest = min(number_format.max, 3e38), number_format.min_subnormal
    x = torch.tensor([math.inf, -math.inf, 0.0, -0.0, largest, -largest, smallest, -smallest, smallest / 3])
    with_nan = torch.cat([x, torch.tensor([math.nan])])
    if number_format.has_nan_code:
        assert_same(bitplan.pack(with_nan, name).unpack(), bitplan.quantize(with_nan, name))
    assert_same(bitplan.pack(x, name).unpack(), bitplan.quantize(x, name))
    scaled = bitplan.pack(with_nan, name, scale="tensor").unpack()
    assert_same(scaled, bitplan.quantize(with_nan, name, scale="tensor"))
    assert bool(scaled.isnan().all())
    if name in ("e5m2", "e4m3", "fp16", "bf16"):
        special = bitplan.pack(with_nan, name, overflow="special").unpack()
        assert_same(special, bitplan.quantize(with_nan, name, overflow="special"))


def test_a_packed_tensor_has_no_history() -> None:
    x = sample(10).requires_grad_()
    packed = bitplan.pack(x, "e4m3")
    assert not packed.payload.requires_grad
    assert not packed.unpack().requires_grad


# --- mistakes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "name", "more", "sentence"),
    [
        (torch.ones(3), "fp32", {}, "fp32 has 32 bits and pack takes up to 16: leave it unpacked."),
        (torch.ones(3), "tf32", {}, "tf32 has 19 bits and pack takes up to 16"),
        (torch.tensor([math.nan]), "e2m1", {}, "holds NaN and e2m1 has no code for it: pack it with a scale."),
        (torch.tensor([math.nan]), "e8m0", {}, "holds NaN and e8m0 has no code for it"),
        (torch.ones(3), "e2m1", {"overflow": "special"}, "e2m1 has no code for infinity: pack it with overflow="),
    ],
)
def test_what_cannot_be_packed_says_so(x: Tensor, name: str, more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(QuantizeError, match=sentence):
        bitplan.pack(x, name, **more)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "turned": lambda x: x.permute(3, 0, 2, 1),
    "every second": lambda x: x.repeat_interleave(2, 1)[:, ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["e4m3b4", "e3m2", "int5", "e6m9b0"])
@pytest.mark.parametrize("scale", [None, "tensor"])
def test_a_large_tensor_is_packed_part_by_part_and_the_same(
    name: str, scale: Literal["tensor"] | None, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "int5" and scale is None:
        pytest.skip("integers need a scale")
    torch.manual_seed(0)
    x = LAYOUTS[layout](torch.randn(3, 11, 6007, 1) * 9)  # no whole number of parts, nor of bytes
    assert (len(chunks.chunks_of(x)) > 1) == (layout != "every second")
    quantizer = make_quantizer(name, "nearest-away", scale, overflow="saturate" if name.startswith("e") else None)
    y = quantizer.round_values(x, None)
    scales = quantizer.encode(x).scales
    packed = pack_rounded(quantizer, y, scales)
    assert torch.equal(packed.unpack(), y)
    assert packed.unpack().stride() == torch.empty_like(y).stride()
    torch.compiler.reset()
    assert torch.equal(torch.compile(packed.unpack, backend="eager", fullgraph=True, dynamic=False)(), y)
    monkeypatch.setattr(chunks, "chunks_of", lambda whole: (whole,))
    assert torch.equal(pack_rounded(quantizer, y, scales).payload, packed.payload)
    assert torch.equal(quantizer.round_values(x, None), y)
