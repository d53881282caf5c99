"""The figures of an error, against numpy written out, and the laws that they obey."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bitplan
from bitplan.analysis import error_metrics as metrics
from bitplan.errors import MetricError

NAN, INF = math.nan, math.inf


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_t(3, shape)).to(dtype)


# Against references written out.


def test_backward_error_element_by_element() -> None:
    left, right = drawn(5, 7, seed=1), drawn(7, 4, seed=2)
    computed = bitplan.quantize(left, "e4m3") @ bitplan.quantize(right, "e5m2")
    actual = metrics.backward_error(left, right, computed)
    assert actual.dtype == torch.float64
    for i in range(5):
        for j in range(4):
            terms = [float(left[i, k]) * float(right[k, j]) for k in range(7)]
            expected = abs(math.fsum(terms) - float(computed[i, j])) / math.fsum(map(abs, terms))
            assert float(actual[i, j]) == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_backward_error_of_batches_is_that_of_each() -> None:
    left, right = drawn(3, 2, 6, seed=1), drawn(3, 6, 4, seed=2)
    computed = left.bfloat16().float() @ right
    together = metrics.backward_error(left, right, computed)
    for index in range(3):
        alone = metrics.backward_error(left[index], right[index], computed[index])
        torch.testing.assert_close(together[index], alone, rtol=1e-9, atol=1e-15)


def test_cancellation_does_not_blow_backward_error_up() -> None:
    left, right = torch.tensor([[1.0, -1.0]]), torch.tensor([[1.0], [1.0]])
    assert float(metrics.backward_error(left, right, torch.tensor([[0.25]]))) == 0.125  # relative: infinite


def test_backward_error_keeps_what_float32_would_lose() -> None:
    left, right = torch.ones(1, 2), torch.tensor([[1.0], [2.0**-30]])
    result = metrics.backward_error(left, right, torch.tensor([[1.0]]))
    assert float(result) == 2.0**-30 / (1 + 2.0**-30)


def test_summary() -> None:
    values = drawn(1001, seed=3).abs()
    ordered = sorted(values.double().tolist())
    result = metrics.summarize(values)
    assert result.median == ordered[500]
    assert result.p99 == pytest.approx(ordered[990], rel=1e-12)
    assert result.mean == pytest.approx(math.fsum(ordered) / 1001, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_figures_of_a_tensor_against_numpy(dtype: torch.dtype) -> None:
    x = drawn(40, 50, seed=4, dtype=dtype)
    q = bitplan.quantize(x, "e3m2")
    a, b = x.double().numpy().ravel(), q.double().numpy().ravel()
    noise = np.sqrt(np.sum((b - a) ** 2))
    norm = np.sqrt(np.sum(a**2))
    centred = a - np.mean(a)
    expected = {
        metrics.sqnr: 20 * np.log10(norm / noise),
        metrics.underflow_share: np.sum((a != 0) & (b == 0)) / a.size,
        metrics.cosine_similarity: np.dot(a, b) / (norm * np.sqrt(np.sum(b**2))),
        metrics.gradient_to_noise: norm / noise,
    }
    for figure, value in expected.items():
        assert figure(x, q) == pytest.approx(value, rel=1e-9), figure.__name__
    assert 0 < metrics.underflow_share(x, q) < 1
    assert metrics.overflow_share(x, 2.5) == np.sum(np.abs(a) > 2.5) / a.size > 0
    assert metrics.dynamic_range(x) == pytest.approx(np.log2(np.abs(a).max() / np.abs(a[a != 0]).min()), rel=1e-9)
    kurtosis = np.mean(centred**4) / np.mean(centred**2) ** 2 - 3
    assert metrics.excess_kurtosis(x) == pytest.approx(kurtosis, rel=1e-9)
    np.testing.assert_allclose(metrics.relative_error(x, q).numpy().ravel(), np.abs(b - a) / np.abs(a), rtol=1e-12)


def test_kurtosis_of_known_distributions() -> None:
    generator = np.random.default_rng(0)
    for sample, expected in (
        (generator.standard_normal(400_000), 0.0),
        (generator.uniform(size=400_000), -1.2),
        (generator.laplace(size=400_000), 3.0),
    ):
        assert metrics.excess_kurtosis(torch.from_numpy(sample)) == pytest.approx(expected, abs=0.15)
    wide = torch.from_numpy(generator.standard_normal(1000))
    assert metrics.excess_kurtosis(wide * 1e200) == pytest.approx(metrics.excess_kurtosis(wide), rel=1e-9)


def test_the_gradient_rule_is_sqnr_in_other_units() -> None:
    x = drawn(100)
    q = bitplan.quantize(x, "e2m1")
    assert 20 * math.log10(metrics.gradient_to_noise(x, q)) == pytest.approx(metrics.sqnr(x, q), rel=1e-12)
    assert math.isclose(metrics.GRADIENT_TO_NOISE_THRESHOLD**2, 3)


# Zeros, NaN and infinities.


def test_backward_error_is_zero_where_the_denominator_is() -> None:
    left, right = torch.tensor([[0.0, 0.0], [1.0, 2.0]]), torch.ones(2, 1)
    result = metrics.backward_error(left, right, torch.tensor([[5.0], [3.0]]))
    assert result.flatten().tolist() == [0.0, 0.0]
    assert metrics.backward_error(torch.ones(2, 0), torch.ones(0, 3), torch.zeros(2, 3)).tolist() == [[0.0] * 3] * 2
    assert metrics.backward_error(left, right, torch.full((2, 1), NAN)).isnan().all()


PAIRS: list[tuple[Callable[..., float], list[float], list[float], float]] = [
    (metrics.sqnr, [0.0, 0.0], [0.0, 0.0], INF),
    (metrics.sqnr, [1.0, 2.0], [1.0, 2.0], INF),
    (metrics.sqnr, [0.0, 0.0], [0.0, 1.0], -INF),
    (metrics.sqnr, [1.0, INF], [1.0, 448.0], -INF),
    (metrics.cosine_similarity, [0.0, 0.0], [0.0, 0.0], 1.0),
    (metrics.cosine_similarity, [0.0, 0.0], [0.0, 1.0], 0.0),
    (metrics.cosine_similarity, [1.0, 2.0], [-2.0, -4.0], -1.0),
    (metrics.gradient_to_noise, [1.0, 2.0], [1.0, 2.0], INF),
    (metrics.gradient_to_noise, [0.0, 0.0], [1.0, 0.0], 0.0),
    (metrics.underflow_share, [], [], 0.0),
    (metrics.underflow_share, [0.0, 0.0], [0.0, 0.0], 0.0),
]


@pytest.mark.parametrize(("figure", "x", "q", "expected"), PAIRS)
def test_what_zeros_and_infinities_give(
    figure: Callable[..., float], x: list[float], q: list[float], expected: float
) -> None:
    assert figure(torch.tensor(x), torch.tensor(q)) == pytest.approx(expected)


def test_what_single_tensors_without_spread_give() -> None:
    assert metrics.overflow_share(torch.tensor([]), 1.0) == 0.0
    assert metrics.overflow_share(torch.tensor([INF, 1.0]), 448.0) == 0.5
    assert metrics.dynamic_range(torch.zeros(3)) == metrics.dynamic_range(torch.tensor([])) == 0.0
    assert metrics.dynamic_range(torch.tensor([1.0, INF])) == INF
    assert math.isnan(metrics.excess_kurtosis(torch.full((7,), 0.1)))
    assert math.isnan(metrics.excess_kurtosis(torch.tensor([])))
    result = metrics.relative_error(torch.tensor([0.0, 0.0, 2.0]), torch.tensor([0.0, 1.0, 1.0]))
    assert result.tolist() == [0.0, INF, 0.5]
    assert all(math.isnan(var) for var in vars(metrics.summarize(torch.tensor([]))).values())


def test_a_nan_is_never_hidden() -> None:
    broken, whole = torch.tensor([1.0, NAN]), torch.tensor([1.0, 2.0])
    for figure in (
        metrics.sqnr,
        metrics.cosine_similarity,
        metrics.gradient_to_noise,
        metrics.underflow_share,
    ):
        assert math.isnan(figure(broken, whole)), figure.__name__
        assert math.isnan(figure(whole, broken)), figure.__name__
    assert math.isnan(metrics.overflow_share(broken, 1.0))
    assert math.isnan(metrics.dynamic_range(broken))
    assert math.isnan(metrics.excess_kurtosis(broken))
    assert metrics.relative_error(whole, broken).isnan().tolist() == [False, True]
    assert all(math.isnan(var) for var in vars(metrics.summarize(broken)).values())


def test_misfits_are_one_sentence() -> None:
    with pytest.raises(MetricError, match=r"shapes \(2, 3\) and \(2, 3\) cannot be multiplied"):
        metrics.backward_error(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(MetricError, match="the same shape"):
        metrics.backward_error(torch.ones(2, 3), torch.ones(3, 2), torch.ones(2))
    with pytest.raises(MetricError, match="the same shape"):
        metrics.sqnr(torch.ones(2), torch.ones(1))
    with pytest.raises(MetricError, match="not list"):
        metrics.dynamic_range([1.0])  # type: ignore[arg-type]


# Laws.


def product_error(
    x: torch.Tensor, w: torch.Tensor, name: str, sides: str = "xw", scale: str = "vector"
) -> torch.Tensor:
    def rounded(t: torch.Tensor, axis: int) -> torch.Tensor:
        return bitplan.quantize(t, name, scale=scale, axis=axis if scale == "vector" else None)  # type: ignore[arg-type]

    q = (rounded(x, 1) if "x" in sides else x) @ (rounded(w, 0) if "w" in sides else w)
    return metrics.backward_error(x, w, q)


@settings(max_examples=20, deadline=None)
@given(
    power=st.integers(-60, 60),
    name=st.sampled_from(["int8", "e4m3", "e5m2", "int4"]),
    scale=st.sampled_from(["vector", "tensor"]),
    seed=st.integers(0, 1000),
)
def test_scaling_an_operand_by_a_power_of_two_changes_no_bit(power: int, name: str, scale: str, seed: int) -> None:
    x, w = (drawn(8, 16, seed=seed, dtype=torch.float64), drawn(16, 8, seed=seed + 1, dtype=torch.float64))
    expected = product_error(x, w, name, scale=scale)
    assert torch.equal(product_error(x * 2.0**power, w, name, scale=scale), expected)
    assert torch.equal(product_error(x, w * 2.0**power, name, scale=scale), expected)


@settings(max_examples=30, deadline=None)
@given(name=st.sampled_from(["e4m3", "e5m2", "e3m4", "e2m1"]), length=st.integers(1, 40), seed=st.integers(0, 1000))
def test_the_bound_in_the_normal_range(name: str, length: int, seed: int) -> None:
    target = bitplan.get_format(name)
    generator = np.random.default_rng(seed)
    low, high = math.log2(target.min_normal), math.log2(target.max)

    def entries(*shape: int) -> torch.Tensor:
        magnitude = 2.0 ** generator.uniform(low, high, shape)
        return torch.from_numpy(magnitude * generator.choice([-1.0, 1.0], shape)).clamp(-target.max, target.max)

    x, w = entries(6, length), entries(length, 6)
    u = target.epsilon / 2
    result = metrics.backward_error(x, w, bitplan.quantize(x, name) @ bitplan.quantize(w, name))
    assert float(result.amax()) <= 2 * u + u * u + 1e-15


def test_the_bound_is_not_idle() -> None:
    # Both operands just above the middle of the widest relative gap: both are rounded up by nearly u.
    u = 2.0**-4
    x = torch.full((1, 9), 1 + u + 1e-9, dtype=torch.float64)
    result = float(metrics.backward_error(x, x.T, bitplan.quantize(x, "e4m3") @ bitplan.quantize(x.T, "e4m3")))
    assert 0.9 * (2 * u + u * u) < result <= 2 * u + u * u


@pytest.mark.parametrize("name", ["int8", "e4m3", "e5m2"])
def test_one_operand_makes_about_the_square_root_of_half(name: str) -> None:
    generator = np.random.default_rng(0)
    x, w = (torch.from_numpy(generator.standard_normal((256, 256))) for _ in range(2))
    both = metrics.summarize(product_error(x, w, name)).median
    for side in "xw":
        assert metrics.summarize(product_error(x, w, name, side)).median / both == pytest.approx(0.5**0.5, rel=0.03)
    assert float(product_error(x, w, name, "").amax()) == 0.0
