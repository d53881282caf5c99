"""The rows that a product is measured by, against products and scales written out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitplan.analysis import error_metrics as metrics
from bitplan.analysis.measure import Candidate, measure
from bitplan.analysis.measure.candidate import FormatPair, Planned
from bitplan.analysis.measure.pass_metrics import PassMetrics, ReductionLength, _tails, measure_products
from bitplan.capture.ops import PRODUCTS
from bitplan.gemm.axes import resolve
from bitplan.gemm.layouts import SampledOperand, layout_of
from bitplan.gemm.sampling import Sampling
from bitplan.plans import QuantizerSpec

#: So many rows that every element of a small product is looked at.
ALL = Sampling(rows=4096, terms=10**6)


def measure_pass(
    pass_: str, op: str, left: SampledOperand, right: SampledOperand, candidates: tuple[FormatPair, ...]
) -> tuple[ReductionLength, list[PassMetrics]]:
    return measure_products(pass_, op, [(left, right)], candidates, seed=0)[0]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).exp() * torch.randn(*shape, generator=generator)


def operands_of(
    op: str, function: Callable[..., Tensor], args: tuple[Any, ...], pass_: str, sampling: Sampling = ALL
) -> tuple[SampledOperand, SampledOperand, dict[str, Tensor]]:
    (x_at, _), (w_at, _) = PRODUCTS[op]
    x, w = args[x_at].requires_grad_(), args[w_at].requires_grad_()
    y = function(*args)
    dy = drawn(*y.shape, seed=9)
    grads = torch.autograd.grad(y, (x, w), dy)
    tensors = {"x": x.detach(), "w": w.detach(), "dy": dy}
    layout = layout_of(op, args, {}, x, w)
    left, right = layout.operands(pass_, tensors, sampling, sampling.draw("p", pass_, x.device))
    return left, right, {"fprop": y.detach(), "dgrad": grads[0], "wgrad": grads[1]}


CASES: dict[str, tuple[str, Callable[..., Tensor], tuple[Any, ...]]] = {
    "linear": ("linear", F.linear, (drawn(3, 5, 7), drawn(4, 7))),
    "matmul": ("matmul", torch.matmul, (drawn(2, 3, 5, 7), drawn(2, 3, 7, 4))),
    "matmul by a matrix": ("matmul", torch.matmul, (drawn(2, 5, 7), drawn(7, 4))),
    "bmm": ("bmm", torch.bmm, (drawn(3, 5, 7), drawn(3, 7, 4))),
    "addmm": ("addmm", torch.addmm, (drawn(4), drawn(5, 7), drawn(7, 4))),
    "einsum": ("einsum", torch.einsum, ("bqhd,bkhd->bhqk", drawn(2, 5, 3, 7), drawn(2, 4, 3, 7))),
    "conv2d": ("conv2d", F.conv2d, (drawn(2, 3, 6, 5), drawn(4, 3, 3, 2), None, (2, 1), (1, 0), (1, 2))),
    "grouped": ("conv2d", F.conv2d, (drawn(2, 4, 5, 5), drawn(6, 2, 3, 3), None, 1, 1, 1, 2)),
    "depthwise": ("conv1d", F.conv1d, (drawn(2, 4, 9), drawn(4, 1, 3), None, 2, 1, 1, 4)),
    "transposed": ("conv_transpose2d", F.conv_transpose2d, (drawn(2, 4, 3, 4), drawn(4, 2, 3, 3), None, 2, 1, 1, 2)),
    "conv3d": ("conv3d", F.conv3d, (drawn(1, 2, 3, 4, 3), drawn(3, 2, 2, 2, 2))),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("pass_", ["fprop", "dgrad", "wgrad"])
def test_all_rows_multiplied_are_the_product(name: str, pass_: str) -> None:
    op, function, args = CASES[name]
    left, right, products = operands_of(op, function, args, pass_)
    actual = left.values.double() @ right.values.double().mT
    expected = products[pass_].double()
    if name == "addmm" and pass_ == "fprop":
        expected = expected - args[0].detach().double()
    # The same numbers in another order, each exactly once.
    torch.testing.assert_close(
        actual.flatten().sort().values, expected.flatten().sort().values, rtol=1e-4, atol=1e-4 * float(expected.std())
    )
    assert left.length == right.length == left.values.shape[-1]


# The six slots of a linear and of a convolutional layer, with scales along the right axes.

#: Which dimensions of the whole tensor one scale spans: what is summed over, and for images all that a sample has.
LINEAR_DIMS = {"fprop.x": 2, "fprop.w": 1, "dgrad.dy": 2, "dgrad.w": 0, "wgrad.dy": (0, 1), "wgrad.x": (0, 1)}
CONV_DIMS = {
    **dict.fromkeys(("fprop.x", "fprop.w", "dgrad.dy"), (1, 2, 3)),
    **dict.fromkeys(("dgrad.w", "wgrad.dy", "wgrad.x"), (0, 2, 3)),
}


@pytest.mark.parametrize("scale", ["vector", "tensor"])
@pytest.mark.parametrize("layer", ["linear", "conv2d"])
@pytest.mark.parametrize("pass_", ["fprop", "dgrad", "wgrad"])
def test_six_slots_against_scales_by_hand(layer: str, pass_: str, scale: str) -> None:
    dims = LINEAR_DIMS if layer == "linear" else CONV_DIMS
    op, function, args = CASES[layer]
    left, right, _ = operands_of(op, function, args, pass_)
    candidates = (Candidate.of(f"int8 {scale}"),)
    _, (result,) = measure_pass(pass_, op, left, right, candidates)

    def by_hand(operand: SampledOperand) -> Tensor:
        whole = operand.whole
        over = tuple(range(whole.dim())) if scale == "tensor" else dims[operand.slot]
        step = whole.abs().amax(over, keepdim=True) / 127
        return operand.gather((whole / step).round() * step)

    first, second = by_hand(left), by_hand(right)
    computed = first.double() @ second.double().mT
    error = metrics.summarize(metrics.backward_error(left.values, right.values.mT, computed))
    assert (result.median, result.mean, result.p99) == pytest.approx((error.median, error.mean, error.p99), rel=1e-9)
    exact = left.values.double() @ right.values.double().mT
    assert result.sqnr == pytest.approx(metrics.sqnr(exact, computed), rel=1e-9)
    alone = metrics.summarize(
        metrics.backward_error(left.values, right.values.mT, first.double() @ right.values.double().mT)
    )
    assert result.left.median == pytest.approx(alone.median, rel=1e-9)
    assert result.left.underflow == metrics.underflow_share(left.values, first)
    assert result.right.sqnr == pytest.approx(metrics.sqnr(right.values, second), rel=1e-9)


@pytest.mark.parametrize("layer", ["linear", "conv2d", "bmm", "transposed"])
@pytest.mark.parametrize("name", ["e4m3", "int4", "bf16"])
def test_rounding_rows_is_rounding_all_as_an_attached_plan_does(layer: str, name: str) -> None:
    op, function, args = CASES[layer]
    for pass_ in ("fprop", "dgrad", "wgrad"):
        left, right, _ = operands_of(op, function, args, pass_, Sampling(rows=6, terms=20, seed=3))
        for scale in ("vector", "tensor"):
            candidate = Candidate(name, name, scale)  # type: ignore[arg-type]
            _, (result,) = measure_pass(pass_, op, left, right, (candidate,))
            copies = [
                operand.gather(resolve(spec, operand.slot, op, operand.whole.dim()).quantize(operand.whole)).double()
                for spec, operand in zip(candidate.specs(pass_), (left, right), strict=True)
            ]
            error = metrics.summarize(metrics.backward_error(left.values, right.values.mT, copies[0] @ copies[1].mT))
            assert result.median == pytest.approx(error.median, rel=1e-9)


def test_block_formats_and_formats_without_a_scale() -> None:
    left, right, _ = operands_of(*CASES["linear"], "fprop")
    names = ("mxfp8", "e4m3 unscaled", "e2m1 unscaled")
    _, actual = measure_pass("fprop", "linear", left, right, tuple(map(Candidate.of, names)))
    assert [item.overflow for item in actual][:2] == [0.0, 0.0]
    x, w = left.values, right.values
    beyond = [(item.abs() > 6).double().mean().item() for item in (x, w)]
    expected = (beyond[0] * x.numel() + beyond[1] * w.numel()) / (x.numel() + w.numel())
    assert actual[2].overflow == pytest.approx(expected)
    assert actual[2].overflow > 0
    assert 0 < actual[0].median < actual[2].median


@pytest.mark.parametrize(
    "message",
    [
        {"format": "int4", "scale": "tensor", "range": "minmax"},
        {"format": "int6", "scale": "channel", "range": "minmax"},
        {"format": "uint4", "scale": "tensor"},
        {"format": "e4m3", "scale": "tensor", "power_of_two": True},
        {"format": "int4", "scale": "block", "block": 3},
    ],
)
def test_a_plans_quantizers_are_tried_as_the_plan_has_them(message: dict[str, Any]) -> None:
    spec = QuantizerSpec(**message)
    op, function, args = CASES["linear"]
    left, right, _ = operands_of(op, function, args, "fprop")
    _, (result,) = measure_pass("fprop", op, left, right, (Planned((("fprop.x", spec),)),))
    rounded = left.gather(resolve(spec, "fprop.x", op, left.whole.dim()).quantize(left.whole))
    error = metrics.backward_error(left.values, right.values.mT, rounded.double() @ right.values.double().mT)
    assert result.median == pytest.approx(metrics.summarize(error).median, rel=1e-9)
    assert result.right.median == 0
    assert (result.left.quantizer, result.right.quantizer) == (str(spec), "fp32")


def numbers(figures: Any) -> list[float]:
    return [value for value in asdict(figures).values() if isinstance(value, float)]


def test_products_measured_together_are_those_measured_alone() -> None:
    pairs = []
    for seed in range(3):
        args = drawn(3, 5, 7, seed=seed), drawn(4, 7, seed=seed + 10)
        pairs.append(operands_of("linear", F.linear, args, "wgrad")[:2])
    candidates = tuple(map(Candidate.of, ("int8 tensor", "e4m3 vector", "e5m2/e4m3 tensor", "e2m1 unscaled", "mxfp8")))
    together = measure_products("wgrad", "linear", pairs, candidates, 0)
    light = measure_products("wgrad", "", [(left.light(), right.light()) for left, right in pairs], candidates[:4], 0)
    for number, pair in enumerate(pairs):
        sums, figures = measure_pass("wgrad", "linear", *pair, candidates)
        assert together[number][0] == light[number][0] == sums
        for second in (together[number][1], light[number][1]):
            for first, alone in zip(second, figures, strict=False):
                for part in ("left", "right", None):
                    actual, expected = (item if part is None else getattr(item, part) for item in (first, alone))
                    assert numbers(actual) == pytest.approx(numbers(expected), rel=1e-9, nan_ok=True)
    for (left, _), (_, figures) in zip(pairs, together, strict=True):
        assert figures[0].left.kurtosis == pytest.approx(metrics.excess_kurtosis(left.values), rel=1e-9)
        assert figures[0].left.dynamic_range == pytest.approx(metrics.dynamic_range(left.values), rel=1e-9)
        assert figures[0].left.elements == 60


def test_tails_of_odd_tensors() -> None:
    nan = float("nan")
    rows = torch.tensor([[0.0, 0.0, 0.0], [2.0, 2.0, 2.0], [0.0, -0.25, 8.0], [1.0, nan, 2.0]], dtype=torch.float64)
    kurtoses, ranges = _tails(rows)
    assert str(kurtoses) == str([nan, nan, metrics.excess_kurtosis(rows[2]), nan])
    assert str(ranges) == str([0.0, 0.0, 5.0, nan])


def test_sums_are_cut_and_rows_are_few_and_the_seed_decides_which() -> None:
    _, function, args = CASES["linear"]
    cut = Sampling(rows=3, terms=5, seed=1)
    left, right, _ = operands_of("linear", function, args, "wgrad", cut)
    assert left.values.shape == (1, 3, 5)
    assert right.values.shape == (1, 3, 5)
    assert left.length == 15
    again, _, _ = operands_of("linear", function, args, "wgrad", cut)
    other, _, _ = operands_of("linear", function, args, "wgrad", Sampling(rows=3, terms=5, seed=2))
    assert torch.equal(left.values, again.values)
    assert not torch.equal(left.values, other.values)
    # Scales are those of whole vectors, whatever was cut.
    whole = left.whole.flatten(0, 1).abs().amax(0)
    assert set(left.vector_amax.flatten().tolist()) <= set(whole.tolist())


def test_a_gaussian_layer_has_the_errors_of_the_synthetic_study() -> None:
    """The known table: 512 terms, Gaussian, a scale per vector: INT8 4.9e-4, E4M3 1.74e-3, E5M2 3.5e-3."""
    torch.manual_seed(0)
    model = nn.Linear(512, 512, bias=False)
    nn.init.normal_(model.weight)
    result = measure(
        model, [torch.randn(512, 512)], candidates=["int8 vector", "e4m3 vector", "e5m2 vector"], rows=64, terms=512
    )
    medians = {row.candidate: row.median for row in result.select(pass_="fprop")}
    study_errors = {"int8 vector": 4.9e-4, "e4m3 vector": 1.74e-3, "e5m2 vector": 3.5e-3}
    assert medians == pytest.approx(study_errors, rel=0.08)
    row = result.select(pass_="fprop", candidate="e4m3 vector")[0]
    assert row.left.median == pytest.approx(row.median / math.sqrt(2), rel=0.1)
