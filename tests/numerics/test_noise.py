"""Random bits as a pure function of (seed, step, site, element), and the stochastic rounding that rests on them.

The bounds are statistical, but every draw is fixed by its counters: a test here passes always or never.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import bitplan
from bitplan.errors import BitplanError
from bitplan.numerics.formats import FloatFormat
from bitplan.numerics.noise import random_bits, unit_interval

#: Floats of every way through the code, and integers: constant or carried by float64 (e5m21, e8m3b1).
NAMES = ("e4m3", "e5m2", "e3m4", "e2m1", "bf16", "fp16", "tf32", "e4m3b4", "e4m3ns", "e5m21", "e8m3b1", "e8m0", "int8")


def stream(seed: int = 0, step: int = 0, site: int = 0, count: int = 1 << 14) -> Tensor:
    return random_bits(torch.empty(count), seed, step, site)


def neighbours(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The values of the format on either side of `x` in magnitude; equal where `x` is one itself."""
    down = bitplan.quantize(x, name, "toward-zero", overflow="saturate" if name != "int8" else None)
    number_format = bitplan.get_format(name)
    if not isinstance(number_format, FloatFormat):
        return down, torch.where(down == x, down, down + torch.sign(x))
    exponent = (torch.frexp(x.double()).exponent - 1).clamp(min=number_format.min_exponent)
    step = torch.ldexp(torch.ones_like(x, dtype=torch.float64), exponent - number_format.mantissa_bits)
    if not number_format.subnormals:
        step = torch.where(x.abs() < number_format.min_normal, number_format.min_normal, step)
    return down, torch.where(down == x, down, (down.double() + step.copysign(x)).float())


# --- the bits ---------------------------------------------------------------------------------------------


def test_every_bit_is_balanced_and_no_two_go_together() -> None:
    bits = stream(seed=1, count=1 << 18)
    columns = torch.stack([(bits >> place) & 1 for place in range(32)]).double()
    sigma = 0.5 / math.sqrt(bits.numel())
    assert bool(((columns.mean(1) - 0.5).abs() < 5 * sigma).all())
    correlation = torch.corrcoef(columns) - torch.eye(32)
    assert float(correlation.abs().max()) < 5.5 / math.sqrt(bits.numel())  # 496 pairs


def test_values_fill_the_unit_interval_evenly() -> None:
    uniform = unit_interval(stream(seed=2, count=1 << 18), torch.float64)
    assert float(uniform.min()) > 0
    assert float(uniform.max()) < 1
    counts = torch.histc(uniform, bins=256, min=0, max=1)
    expected = uniform.numel() / 256
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_squared - 255) < 5 * math.sqrt(2 * 255)


def test_the_uniforms_are_centred_and_exact_in_float32() -> None:
    ends = torch.tensor([0, -1], dtype=torch.int32)
    narrow, wide = unit_interval(ends.clone(), torch.float32), unit_interval(ends.clone(), torch.float64)
    assert wide.tolist() == [2.0**-24, 1 - 2.0**-24]
    assert torch.equal(narrow.double(), wide)


@pytest.mark.parametrize("lag", [1, 2, 3, 16, 17, 256, 1024])
def test_neighbouring_elements_are_independent(lag: int) -> None:
    uniform = unit_interval(stream(seed=3, count=1 << 18), torch.float64) - 0.5
    correlation = float((uniform[lag:] * uniform[:-lag]).mean() * 12)
    assert abs(correlation) < 5 / math.sqrt(uniform.numel())


def test_streams_of_neighbouring_counters_are_independent() -> None:
    """Consecutive seeds, steps and sites are what a training run uses; none may echo another."""
    near = [0, 1, 2, 3, 1000, 1 << 31, (1 << 31) - 1, 1 << 40, -1]
    keys = [(seed, 0, 0) for seed in near] + [(0, step, 0) for step in near[1:]] + [(0, 0, site) for site in near[1:]]
    keys += [(1, 1, 0), (1, 0, 1), (0, 1, 1), (1, 1, 1), (2, 1, 0), (1, 2, 0)]
    streams = torch.stack([unit_interval(stream(*key), torch.float64) for key in keys])
    correlation = (torch.corrcoef(streams) - torch.eye(len(keys))).abs()
    assert float(correlation.max()) < 5.5 / math.sqrt(streams.shape[1])
    flipped = torch.stack([stream(*key) for key in keys])
    for first, second in itertools.combinations(flipped, 2):
        differing = (first ^ second).view(torch.uint8)
        share = sum(int(((differing >> place) & 1).sum()) for place in range(8)) / (32 * len(first))
        assert abs(share - 0.5) < 6 * 0.5 / math.sqrt(32 * len(first))


def test_no_stream_is_a_shifted_copy_of_another() -> None:
    """A hash of (key + element) alone would give seed 1 the stream of seed 0, moved by one."""
    streams = [
        set(stream(seed, step, site, 4096).tolist()) for seed in range(3) for step in range(3) for site in (0, 1)
    ]
    expected = 4096**2 / 2**32  # shared values of two random streams
    assert max(len(first & second) for first, second in itertools.combinations(streams, 2)) <= expected + 5


def test_no_two_of_many_keys_are_the_same() -> None:
    first = [
        tuple(stream(seed, step, site, 2).tolist()) for seed in range(12) for step in range(12) for site in range(12)
    ]
    assert len(set(first)) == 12**3


@settings(deadline=None, max_examples=50)
@given(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(0, 1 << 40), st.integers(0, 1 << 20))
def test_numbers_and_tensors_count_alike(seed: int, step: int, site: int) -> None:
    like = torch.empty(5)
    fixed = random_bits(like, seed, step, site)
    assert torch.equal(random_bits(like, *map(torch.tensor, (seed, step, site))), fixed)
    assert torch.equal(random_bits(like, seed, torch.tensor(step), site), fixed)
    narrow = torch.tensor(site, dtype=torch.int32)
    assert torch.equal(random_bits(like, torch.tensor(seed), step, narrow), fixed)


def test_an_elements_bits_depend_on_its_index_alone() -> None:
    """Not on the shape, the number of elements, the memory layout or the type."""
    flat = stream(seed=4, count=2 * 3 * 4 * 5)
    square = torch.empty(2, 3, 4, 5)
    assert torch.equal(random_bits(square, 4).flatten(), flat)
    assert torch.equal(random_bits(square.to(memory_format=torch.channels_last), 4), flat.view(2, 3, 4, 5))
    assert torch.equal(random_bits(torch.empty(5, 4, 3, 2).permute(3, 2, 1, 0), 4), flat.view(2, 3, 4, 5))
    assert torch.equal(random_bits(torch.empty(7, dtype=torch.float64), 4), flat[:7])
    assert torch.equal(random_bits(torch.empty(()), 4), flat[0])


# --- rounding with them ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_only_ever_one_of_the_two_neighbours_and_both_of_them(name: str) -> None:
    number_format = bitplan.get_format(name)
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * (30 if name == "int8" else 3)
    x = x.clamp(-number_format.max, number_format.max)
    down, up = neighbours(x, name)
    rounded = torch.stack([bitplan.quantize(x, name, "stochastic", seed=seed) for seed in range(20)])
    assert bool(((rounded == down) | (rounded == up)).all())
    assert bool((rounded.sign() * x.sign() >= 0).all())
    between = (down != up) & ((x - down).abs() > (up - down).abs() / 4) & ((up - x).abs() > (up - down).abs() / 4)
    both = (rounded == down).any(0) & (rounded == up).any(0)
    assert int(between.sum()) > 500
    assert float(both[between].float().mean()) > 0.98  # 2 * 0.75^20 of them fail to show both


@pytest.mark.parametrize("name", NAMES)
def test_stochastic_rounding_is_unbiased_on_both_sides(name: str) -> None:
    """The mean of many draws is the number itself, for positions between two neighbours and for both signs."""
    number_format = bitplan.get_format(name)
    draws, base = 1 << 16, 1.0 if number_format.min_normal <= 1 else 4.0
    _, above = neighbours(torch.nextafter(torch.tensor([base]), torch.tensor([9.0])), name)
    step = float(above) - base
    for position in (1 / 64, 0.25, 0.5, 0.9, 1 - 1 / 64):
        for sign in (1.0, -1.0):
            value = torch.tensor(sign * (base + position * step))
            exact = abs((abs(float(value)) - base) / step)
            rounded = bitplan.quantize(value.expand(draws), name, "stochastic", seed=11, site=int(position * 64))
            share_up = float((rounded.double().abs() - base).mean() / step)
            sigma = math.sqrt(exact * (1 - exact) / draws)
            assert abs(share_up - exact) <= 4 * sigma, (position, sign)


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "fp16", "e4m3b4", "e2m1", "e4m3ns", "int8"])
def test_far_below_the_smallest_value_some_still_round_up(name: str) -> None:
    """What keeps small gradients alive: a hundredth of the smallest value survives once in a hundred."""
    smallest = bitplan.get_format(name).min_subnormal
    x = torch.full((1 << 16,), -smallest / 100)
    rounded = bitplan.quantize(x, name, "stochastic", seed=5)
    assert set(rounded.tolist()) == {0.0, -smallest}
    survivors = float((rounded != 0).double().mean())
    assert abs(survivors - 0.01) < 4 * math.sqrt(0.01 * 0.99 / len(x))
    if name != "int8":
        assert bool(rounded.signbit().all())


@pytest.mark.parametrize("name", NAMES)
def test_exact_values_stay_put_whatever_is_drawn(name: str) -> None:
    number_format = bitplan.get_format(name)
    x = torch.randn(2000, generator=torch.Generator().manual_seed(1)) * 2
    exact = torch.cat(
        [bitplan.quantize(x, name), torch.tensor([0.0, min(number_format.max, 3e38), -number_format.min_subnormal])]
    )
    exact = bitplan.quantize(exact, name)
    for seed in range(5):
        assert torch.equal(bitplan.quantize(exact, name, "stochastic", seed=seed), exact)


def test_counters_decide_and_nothing_else() -> None:
    """The same counters, the same result, whatever was drawn in between; another counter, another result."""
    x = torch.randn(1000)
    once = bitplan.quantize(x, "e4m3", "stochastic", seed=1, step=2, site=3)
    torch.rand(7)
    assert torch.equal(bitplan.quantize(x, "e4m3", "stochastic", seed=1, step=2, site=3), once)
    for other in (
        {"seed": 2, "step": 2, "site": 3},
        {"seed": 1, "step": 3, "site": 3},
        {"seed": 1, "step": 2, "site": 4},
    ):
        changed = (bitplan.quantize(x, "e4m3", "stochastic", **other) != once).float().mean()
        assert 0.2 < float(changed) < 0.5


def test_without_a_seed_torchs_generator_decides() -> None:
    x = torch.randn(1000)
    torch.manual_seed(3)
    first, second = bitplan.quantize(x, "e4m3", "stochastic"), bitplan.quantize(x, "e4m3", "stochastic")
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(bitplan.quantize(x, "e4m3", "stochastic"), first)


def test_a_channels_last_copy_is_rounded_alike() -> None:
    x = torch.randn(2, 5, 4, 3)
    plain = bitplan.quantize(x, "e4m3", "stochastic", seed=1)
    assert torch.equal(bitplan.quantize(x.to(memory_format=torch.channels_last), "e4m3", "stochastic", seed=1), plain)


def test_float32_and_float64_inputs_decide_alike() -> None:
    """The carrier is no part of the definition: the same number and bits go the same way."""
    x = torch.randn(4000)
    for name in ("e4m3", "e5m2", "bf16", "int8"):
        narrow = bitplan.quantize(x, name, "stochastic", seed=1)
        assert torch.equal(bitplan.quantize(x.double(), name, "stochastic", seed=1).float(), narrow)


# --- compiled ----------------------------------------------------------------------------------------------


def test_compiled_bits_are_the_eager_ones_for_numbers_tensors_and_layouts() -> None:
    """Tensor counters change without a recompilation; a number that changes becomes a symbol, with the same bits."""

    def both(x: Tensor, step: Tensor, number: int) -> tuple[Tensor, Tensor]:
        by_tensor = bitplan.quantize(x, "e4m3", "stochastic", seed=3, step=step, site=7)
        return by_tensor, random_bits(x, 3, number, 8)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(both, fullgraph=True, backend=counter)
    x = torch.randn(3, 5, 7, 2).to(memory_format=torch.channels_last)
    for step, number in ((0, 5), (1, 6), (1 << 33, 1 << 35), (9, -4)):
        now = torch.tensor(step)
        for ours, expected in zip(compiled(x, now, number), both(x, now, number), strict=True):
            assert torch.equal(ours, expected), (step, number)
    assert counter.frame_count == 2  # one for the constant number, one for the symbol


def test_seeds_beyond_32_bits_have_streams_of_their_own() -> None:
    """5 and 5 + 2^32 - 0x9E3779B1 + 2^32 folded to the same 32 bits."""
    seeds = [5, 5935498836, 5 + (1 << 32), 5 + (1 << 33), 5 + (1 << 62), -5 - (1 << 33), (1 << 63) - 1, -(1 << 63)]
    streams = {tuple(stream(seed, count=64).tolist()) for seed in seeds}
    assert len(streams) == len(seeds)
    for seed in seeds:
        assert torch.equal(stream(torch.tensor(seed), count=64), stream(seed, count=64))  # type: ignore[arg-type]
    compiled = torch.compile(lambda x, seed: random_bits(x, seed), backend="aot_eager", dynamic=True)
    for seed in seeds[:3]:
        assert torch.equal(compiled(torch.empty(64), seed), stream(seed, count=64))


@pytest.mark.parametrize("seed", [1 << 63, -(1 << 63) - 1, 10**400])
def test_a_seed_of_more_than_64_bits_is_refused(seed: int) -> None:
    with pytest.raises(BitplanError, match="64 bits"):
        bitplan.quantize(torch.ones(2), "e4m3", "stochastic", seed=seed)
    with pytest.raises(BitplanError, match="64 bits"):
        bitplan.attach(torch.nn.Linear(2, 2), "int8-all", seed=seed)
