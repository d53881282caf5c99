"""Scales against loops and formulas written out by hand, and the block formats against ml_dtypes and gfloat."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import bitplan
from bitplan.numerics.formats import BlockFormat, FloatFormat, IntFormat
from bitplan.numerics.reference import round_value
from bitplan.numerics.scaling import Granularity, floor_log2

F32 = np.float32


def sample(*shape: int, seed: int = 0) -> Tensor:
    """Numbers of very different size in every slice, so that a scale taken over the wrong elements shows."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-6, 7, shape, generator=generator).float())
    return torch.randn(*shape, generator=generator) * spread


#: An axis, or the two of a tile; the size of a block, or the rows and columns of a tile.
Axis = int | tuple[int, int] | None
Block = int | tuple[int, int] | None


def groups(shape: tuple[int, ...], scale: Granularity, axis: Axis, block: Block) -> Iterator[list[Any]]:
    """The index sets that share a scale, by looping over every element."""
    result: dict[tuple[Any, ...], list[Any]] = {}
    for index in itertools.product(*map(range, shape)):
        if scale == "tensor":
            key: tuple[Any, ...] = ()
        elif isinstance(block, tuple):
            pair = [number % len(shape) for number in (axis if isinstance(axis, tuple) else (-2, -1))]
            rest = tuple(at for number, at in enumerate(index) if number not in pair)
            key = (*rest, *(index[number] // size for number, size in zip(pair, block, strict=True)))
        elif scale == "channel":
            assert isinstance(axis, int)
            key = (index[axis],)
        else:
            along = (axis if isinstance(axis, int) else -1) % len(shape)
            rest = index[:along] + index[along + 1 :]
            key = rest if scale == "vector" else (*rest, index[along] // (block or 1))
        result.setdefault(key, []).append(index)
    yield from result.values()


def by_hand(
    x: Tensor, name: str, scale: Granularity, axis: Axis, block: Block, power_of_two: bool, minmax: bool
) -> Tensor:
    """Scale, round, scale back, group by group, in float32 steps (numpy's division is IEEE's)."""
    target = bitplan.get_format(name)
    assert isinstance(target, (FloatFormat, IntFormat))
    out = torch.empty_like(x)
    tiny = F32(torch.finfo(torch.float32).tiny)
    for members in groups(tuple(x.shape), scale, axis, block):
        values = np.array([float(x[index]) for index in members], dtype=F32)
        low = values.min() if minmax else F32(0)
        span = F32(values.max() - low) if minmax else np.abs(values).max()
        steps = F32(2.0**target.bits - 1 if minmax else target.max)
        step = max(F32(span / steps), tiny)
        if power_of_two:
            step = F32(2.0 ** math.ceil(math.log2(step)))
        grid = IntFormat(target.bits, affine=True) if minmax else target
        for index, value in zip(members, values, strict=True):
            element = F32(round_value(float(F32(F32(value - low) / step)), grid))
            out[index] = float(F32(float(element) * float(step) + float(low)))
    return out


CASES = [
    ("tensor", None, None),
    ("channel", 0, None),
    ("channel", 1, None),
    ("channel", -1, None),
    ("vector", 0, None),
    ("vector", -1, None),
    ("block", None, 4),
    ("block", 0, 2),
    ("block", 1, 3),
    ("block", -1, 100),
    ("block", None, (2, 4)),
    ("block", (0, 2), (2, 3)),
    ("block", (2, 0), (3, 2)),
    ("block", (1, 0), (100, 4)),
    ("block", None, (1, 4)),
    ("block", (-1, -2), (1, 2)),
]


@pytest.mark.parametrize("power_of_two", [False, True], ids=["plain", "power-of-two"])
@pytest.mark.parametrize(("scale", "axis", "block"), CASES)
def test_every_granularity_is_the_loop_over_groups(
    scale: Granularity, axis: Axis, block: Block, power_of_two: bool
) -> None:
    x = sample(5, 3, 10)
    for name, minmax in (("int4", False), ("e4m3", False), ("e2m1", False), ("uint4", True), ("uint8", True)):
        ours = bitplan.quantize(x, name, scale=scale, axis=axis, block=block, power_of_two=power_of_two)
        expected = by_hand(x, name, scale, axis, block, power_of_two, minmax)
        assert torch.equal(ours, expected), name


@pytest.mark.parametrize(("scale", "axis"), [("channel", 0), ("vector", 0), ("tensor", None)])
def test_one_dimension_is_enough(scale: Granularity, axis: int | None) -> None:
    """A bias has one axis. Per channel every element is its own largest, so it keeps its value."""
    x = sample(6)
    ours = bitplan.quantize(x, "int4", scale=scale, axis=axis)
    assert torch.equal(ours, by_hand(x, "int4", scale, axis, None, False, False))
    if scale == "channel":
        torch.testing.assert_close(ours, x, rtol=2.0**-22, atol=0)
    else:
        assert not torch.equal(ours, x)


def test_minmax_on_a_symmetric_integer_is_the_affine_one() -> None:
    x = sample(7, 9)
    affine = bitplan.quantize(x, "uint5", scale="tensor")
    assert torch.equal(bitplan.quantize(x, "int5", scale="tensor", range="minmax"), affine)
    assert torch.equal(bitplan.quantize(x, "uint5", scale="tensor", range="minmax"), affine)


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_affine_integers_are_the_quantiser_of_cyclic_precision_training(bits: int) -> None:
    """s = (max - min) / (2^b - 1); x_q = round(clamp((x - min) / s, 0, 2^b - 1)) * s + min; per output channel."""
    x = torch.randn(8, 300, generator=torch.Generator().manual_seed(0)) + 1
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    s = ((high - low) / (2**bits - 1)).clamp_min(1e-8)
    theirs = torch.round(((x - low) / s).clamp(0, 2**bits - 1)) * s + low
    ours = bitplan.quantize(x, f"uint{bits}", scale="channel", axis=0)
    torch.testing.assert_close(ours, theirs, rtol=2.0**-22, atol=float(x.abs().max()) * 2.0**-23)
    assert max(len(row.unique()) for row in ours) <= 2**bits
    assert min(len(row.unique()) for row in ours) >= min(2**bits, 300) // 3


def test_gradients_below_the_papers_floor_keep_their_steps() -> None:
    """With its floor of 1e-8 under the scale a tensor of 1e-9 would become one number."""
    x = sample(1000) * 1e-12
    ours = bitplan.quantize(x, "uint4", scale="tensor")
    assert 8 <= len(ours.unique()) <= 16


@pytest.mark.parametrize("name", ["int2", "int8", "int16", "e4m3", "e5m2", "e2m1", "e3m4", "fp16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_largest_magnitude_keeps_its_value(name: str, dtype: torch.dtype) -> None:
    x = sample(64, 33, seed=3).to(dtype)
    ours = bitplan.quantize(x, name, scale="channel", axis=0)
    largest = x.abs().argmax(1, keepdim=True)
    was, becomes = x.gather(1, largest), ours.gather(1, largest)
    assert bool(((becomes - was).abs() <= torch.finfo(dtype).eps * was.abs()).all())


@pytest.mark.parametrize("name", ["int8", "uint8", "e4m3"])
def test_extremes_of_a_minmax_range_and_amax_survive_every_rounding(name: str) -> None:
    x = sample(400)
    for rounding in ("nearest", "nearest-away", "stochastic"):
        ours = bitplan.quantize(x, name, rounding, scale="tensor", seed=1)
        at = int(x.argmax()), int(x.argmin())
        ends = at if name == "uint8" else (int(x.abs().argmax()),)
        for index in ends:
            assert float(ours[index]) == pytest.approx(float(x[index]), rel=2.0**-21)


@pytest.mark.parametrize("name", ["int4", "uint4", "e4m3", "bf16"])
def test_power_of_two_scales_are_powers_of_two_and_overflow_nothing(name: str) -> None:
    x = sample(30, 40)
    quantizer = bitplan.numerics.quantizer.make_quantizer(name, scale="vector", axis=1, power_of_two=True)
    elements, scales = quantizer.encode(x)
    assert set(torch.frexp(scales[0]).mantissa.flatten().tolist()) == {0.5}
    plain = bitplan.numerics.quantizer.make_quantizer(name, scale="vector", axis=1).encode(x).scales[0]
    assert bool(((scales[0] >= plain) & (scales[0] < 2 * plain)).all())
    assert bool((elements.abs() <= bitplan.get_format(name).max).all())


@pytest.mark.parametrize("name", ["int8", "uint8", "e4m3", "mxfp8", "mxint8", "nvfp4"])
def test_zeros_stay_zeros_and_so_do_their_signs_in_floats(name: str) -> None:
    x = torch.tensor([0.0, -0.0] * 20)
    ours = bitplan.quantize(x, name, scale=None if name[:2] in ("mx", "nv") else "tensor")
    assert torch.equal(ours, x)
    if name in ("e4m3", "mxfp8", "nvfp4"):
        assert torch.equal(ours.signbit(), x.signbit())


@pytest.mark.parametrize("name", ["int8", "uint8", "e4m3", "e5m2", "mxfp8", "mxfp4", "mxint8", "nvfp4"])
@pytest.mark.parametrize("size", [1e-38, 3e-39, 1e-44])
def test_numbers_near_the_smallest_float_cause_no_division_by_zero(name: str, size: float) -> None:
    x = sample(64).sign() * size
    scaled = None if name[:2] in ("mx", "nv") else "tensor"
    ours = bitplan.quantize(x, name, scale=scaled)
    assert bool(ours.isfinite().all())
    assert bool(((ours - x).abs() <= max(size, 0.5 * torch.finfo(x.dtype).tiny)).all())


@pytest.mark.parametrize("name", ["int8", "uint8", "e4m3"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_spoil_their_own_group_only(name: str, bad: float) -> None:
    """A group with no finite range has no scale: NaN says so. The other groups never see it."""
    x = sample(4, 50)
    clean = bitplan.quantize(x, name, scale="channel", axis=0)
    x[2, 7] = bad
    ours = bitplan.quantize(x, name, scale="channel", axis=0)
    assert bool(ours[2].isnan().all())
    assert torch.equal(ours[[0, 1, 3]], clean[[0, 1, 3]])


def test_a_constant_tensor_keeps_its_value_in_affine_integers() -> None:
    x = torch.full((5,), -3.7)
    assert torch.equal(bitplan.quantize(x, "uint4", scale="tensor"), x)


# --- blocks -----------------------------------------------------------------------------------------------

#: Oracles are imported where they are asked, so that a machine without them still runs the rest.
ELEMENTS = {
    "mxfp8": "float8_e4m3fn",
    "mxfp8e5m2": "float8_e5m2",
    "mxfp6": "float6_e2m3fn",
    "mxfp6e3m2": "float6_e3m2fn",
    "mxfp4": "float4_e2m1fn",
}
EMAX = {"mxfp8": 8, "mxfp8e5m2": 15, "mxfp6": 2, "mxfp6e3m2": 4, "mxfp4": 2, "mxint8": 0}


def ml_dtype(name: str) -> Any:
    return getattr(pytest.importorskip("ml_dtypes"), name)


def mx_by_hand(x: np.ndarray[Any, Any], name: str, size: int = 32) -> np.ndarray[Any, Any]:
    """OCP MX 1.0, 6.3: X = 2^(floor(log2 amax) - emax), elements x / X, normals beyond the largest clamped to it."""
    out = np.empty_like(x)
    target = bitplan.get_format(name)
    assert isinstance(target, BlockFormat)
    for row, into in zip(x, out, strict=True):
        for start in range(0, len(row), size):
            part = row[start : start + size].astype(np.float64)
            amax = np.abs(part).max()
            exponent = -127 if amax == 0 else max(math.frexp(amax)[1] - 1 - EMAX[name], -127)
            scaled = part / 2.0**exponent
            if name == "mxint8":
                element = np.clip(np.rint(scaled * 64), -127, 127) / 64
            else:
                element = np.clip(scaled, -target.element.max, target.element.max).astype(ml_dtype(ELEMENTS[name]))
                element = element.astype(np.float64)
            into[start : start + size] = element * 2.0**exponent
    return out


@pytest.mark.parametrize("columns", [3, 10, 32, 33, 100])
@pytest.mark.parametrize("name", EMAX)
def test_mx_blocks_follow_the_ocp_floor_rule(name: str, columns: int) -> None:
    """Ragged too: real layers have 3 or 10 channels, and a last block shorter than 32."""
    x = sample(40, columns, seed=columns)
    x[0] = 0.0
    x[1] *= 1e-38
    x[2] *= 1e30
    x[3] = 1.0
    ours = bitplan.quantize(x, name)
    expected = torch.from_numpy(mx_by_hand(x.numpy(), name))
    assert torch.equal(ours, expected)
    assert not torch.equal(ours, x)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("mxfp8", "format_info_mxfp8_e4m3"),
        ("mxfp8e5m2", "format_info_mxfp8_e5m2"),
        ("mxfp6", "format_info_mxfp6_e2m3"),
        ("mxfp6e3m2", "format_info_mxfp6_e3m2"),
        ("mxfp4", "format_info_mxfp4_e2m1"),
    ],
)
def test_mx_blocks_are_those_of_gfloat(name: str, theirs: str) -> None:
    gfloat = pytest.importorskip("gfloat")
    info = getattr(pytest.importorskip("gfloat.formats"), theirs)
    x = sample(12, 32, seed=5)
    expected = [gfloat.quantize_block(info, row.double().numpy(), gfloat.compute_scale_amax) for row in x]
    assert torch.equal(bitplan.quantize(x, name).double(), torch.from_numpy(np.stack(expected)))


def test_blocks_lie_along_the_axis_asked_for() -> None:
    x = sample(70, 3)
    along = bitplan.quantize(x, "mxfp4", axis=0)
    assert torch.equal(along, bitplan.quantize(x.T.contiguous(), "mxfp4").T)
    assert not torch.equal(along, bitplan.quantize(x, "mxfp4"))


@pytest.mark.parametrize("name", [*EMAX, "nvfp4"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_make_their_block_nan(name: str, bad: float) -> None:
    """OCP MX 1.0: the scale becomes NaN. NVFP4's tensor scale takes the whole tensor along."""
    x = sample(2, 96)
    clean = bitplan.quantize(x, name)
    x[1, 40] = bad
    ours = bitplan.quantize(x, name)
    spoilt = torch.ones_like(x, dtype=torch.bool) if name == "nvfp4" else torch.zeros_like(x, dtype=torch.bool)
    spoilt[1, 32:64] = True
    assert torch.equal(ours.isnan(), spoilt)
    assert torch.equal(ours[~spoilt], clean[~spoilt])


def nvfp4_by_hand(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Per tensor amax / (448 * 6) in float32; per 16 elements amax / 6 of that, in E4M3; elements E2M1."""
    whole = F32(np.abs(x).max() / F32(448 * 6))
    out = np.empty_like(x)
    for row, into in zip(x, out, strict=True):
        for start in range(0, len(row), 16):
            part = row[start : start + 16]
            expected = F32(np.abs(part).max() / F32(whole * F32(6)))
            scale = F32(np.minimum(expected, 448).astype(ml_dtype("float8_e4m3fn")))
            step = F32(scale * whole)
            scaled = part / step if step else part * F32(0)
            element = np.clip(scaled, -6, 6).astype(ml_dtype("float4_e2m1fn")).astype(F32)
            into[start : start + 16] = element * step
    return out


@pytest.mark.parametrize("columns", [3, 10, 16, 50])
def test_nvfp4_follows_its_formula(columns: int) -> None:
    x = sample(40, columns, seed=columns)
    x[0] = 0.0
    x[1] *= 1e-9  # so small that its block scale vanishes
    ours = bitplan.quantize(x, "nvfp4")
    assert torch.equal(ours, torch.from_numpy(nvfp4_by_hand(x.numpy())))
    assert bool((ours[1] == 0).all())


def test_float64_blocks_beyond_float32_saturate_at_the_largest_scale() -> None:
    """E8M0 ends at 2^127 however wide the input is."""
    x = torch.tensor([1e300, 1.0], dtype=torch.float64)
    assert bitplan.quantize(x, "mxfp4").tolist() == [6 * 2.0**127, 0.0]


def test_a_power_of_two_has_its_own_exponent() -> None:
    assert [floor_log2(value) for value in (1.0, 1.99, 2.0, 3.0, 4.0, 448.0, 512.0)] == [0, 0, 1, 1, 2, 8, 9]


# --- the extremes of a dtype ---


def extremes(dtype: torch.dtype) -> Tensor:
    """Rows whose largest value is, or is next to, the dtype's largest."""
    info = torch.finfo(dtype)
    top = torch.tensor(info.max, dtype=dtype)
    shares = (1.0, 1 - info.eps, 0.999, 0.99, 0.97, 0.93, 0.875, 0.75, 0.51)
    pairs = itertools.product(shares, (0.0, 1.0, -1.0, 0.5, -0.5))
    rows = [(share, other * share, sign * share, 0.1) for share, other in pairs for sign in (-1.0, 0.3)]
    return torch.stack([torch.stack([top * factor for factor in row]) for row in rows])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("rounding", ["nearest", "nearest-away", "toward-zero", "stochastic"])
def test_no_finite_value_becomes_infinite_under_a_scale(dtype: torch.dtype, rounding: Any) -> None:
    scales: list[dict[str, Any]] = [{"scale": "tensor"}, {"scale": "vector", "axis": 1}, {"scale": "block", "block": 2}]
    formats = ("int8", "uint8", "int2", "uint1", "e4m3", "e5m2", "e2m1", "e4m0", "e3m0")
    kinds: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in ("mxfp8", "mxfp4", "mxint8", "nvfp4")]
    for name, scale, power_of_two in itertools.product(formats, scales, (False, True)):
        kinds.append((name, {**scale, "power_of_two": power_of_two}))
    x = extremes(dtype)
    for name, options in kinds:
        rounded = bitplan.quantize(x, name, rounding, seed=1, **options)
        assert rounded.isfinite().all(), (name, options)
        assert torch.equal(bitplan.pack(x, name, rounding, seed=1, **options).unpack(), rounded), (name, options)


def test_the_values_at_the_extremes_saturate() -> None:
    assert bitplan.quantize(torch.tensor([65504.0, 1.0]).half(), "int8", scale="tensor", power_of_two=True)[0] == 65504
    largest = torch.finfo(torch.float32).max
    by_tensor = bitplan.quantize(torch.tensor([largest, 1.0]), "int8", scale="tensor")
    torch.testing.assert_close(by_tensor, torch.tensor([largest, 0.0]), rtol=1e-5, atol=0.0)
    # A range that is wider than the dtype's largest value reaches that far from its lower end.
    wide = bitplan.quantize(torch.tensor([3e38, -3e38, -2e38]), "uint8", scale="tensor")
    torch.testing.assert_close(wide, torch.tensor([largest - 3e38, -3e38, -2e38]), rtol=5e-3, atol=0.0)


@pytest.mark.parametrize("broken", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", ["e4m0", "e4m3", "e5m2", "int8", "uint8"])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_an_infinity_or_nan_makes_all_values_with_its_scale_nan(broken: float, name: str, power_of_two: bool) -> None:
    x = torch.tensor([[1.0, broken], [2.0, 3.0]])
    options: dict[str, Any] = {"scale": "channel", "axis": 0, "power_of_two": power_of_two}
    for rounded in (bitplan.quantize(x, name, **options), bitplan.pack(x, name, **options).unpack()):
        assert rounded[0].isnan().all()
        assert rounded[1].isfinite().all()
