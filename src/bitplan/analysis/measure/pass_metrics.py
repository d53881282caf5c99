"""The metrics of :mod:`bitplan.analysis.error_metrics` for many candidates in a pass of a product.

Every quantizer rounds the sampled rows of an operand once, however many candidates use it, and the products of all
candidates are one batched product in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bitplan.analysis.error_metrics import ErrorSummary, decibels
from bitplan.analysis.measure.candidate import FormatPair
from bitplan.errors import MetricError
from bitplan.extensions import METRICS, Registry
from bitplan.gemm.axes import resolve, rotation_of
from bitplan.gemm.layouts import SampledOperand
from bitplan.numerics.dtypes import carrier_for
from bitplan.numerics.formats import BlockFormat, CodebookFormat, FloatFormat, Format, IntFormat, get_format
from bitplan.numerics.mutable_format import MutableFormat
from bitplan.numerics.noise import random_bits
from bitplan.numerics.quantizer import Quantizer
from bitplan.numerics.reference import Rounding
from bitplan.numerics.scaling import divide, step_scale
from bitplan.plans.spec import QuantizerSpec

#: Kurtosis and dynamic range are computed on at most this many sampled elements.
_MAX_SAMPLES = 16384


@dataclass(frozen=True)
class OperandMetrics:
    """The metrics of an operand under a quantizer, with the other operand exact."""

    slot: str
    #: The text of the quantizer, such as ``e4m3 tensor``.
    quantizer: str
    #: The product's backward error with only this operand quantised.
    median: float
    mean: float
    p99: float
    #: Of the operand's sampled values.
    sqnr: float
    underflow: float
    overflow: float
    kurtosis: float
    dynamic_range: float
    #: Amax and number of elements of the whole operand.
    amax: float
    elements: int


@dataclass(frozen=True)
class PassMetrics:
    """The metrics of a candidate in a pass."""

    candidate: FormatPair
    median: float
    mean: float
    p99: float
    #: Of the product's sampled elements.
    sqnr: float
    #: Of both operands' sampled values together.
    underflow: float
    overflow: float
    left: OperandMetrics
    right: OperandMetrics
    #: Metrics of the user's own, by name.
    own: Mapping[str, float] = field(default_factory=dict)


#: An error metric of the user's own: of the exact elements of a product that were sampled, and those computed from
#: rounded operands, both (matrices, rows, columns) in float64.
Metric = Callable[[Tensor, Tensor], Any]

metric_registry: Registry[Metric] = Registry(METRICS, "error metric")


def register_metric(name: str, metric: Metric) -> Metric:
    """Make an error metric known by a name, for ``measure(metrics=...)`` and ``bitplan measure --metric``.

    :param metric: a function of the exact and the computed product, float64 tensors of one shape; returns a number.
    """
    return metric_registry.register(name, metric)


@dataclass(frozen=True)
class ReductionLength:
    """The number of terms that a product sums for each element."""

    #: Sampled terms.
    k: int
    #: All terms.
    length: int
    #: Nonzero terms, averaged over elements that have any. Errors fall with the square root of this.
    nonzero: float


def measure_products(
    pass_: str,
    op: str,
    pairs: Sequence[tuple[SampledOperand, SampledOperand]],
    candidates: tuple[FormatPair, ...],
    seed: int,
    own: Mapping[str, Metric] | None = None,
) -> list[tuple[ReductionLength, list[PassMetrics]]]:
    """The metrics of all candidates that apply to the pass, for products whose sampled rows have the same shapes.

    Several products at once are far faster than one by one.
    """
    pass_plan = _plan_pass(pass_, candidates)
    if not pass_plan.candidates:
        return [(ReductionLength(left.values.shape[-1], left.length, 0.0), []) for left, _ in pairs]
    rounder = _Rounder(pairs, op, seed)
    copies = [rounder.copies(pass_plan.specs[side], side) for side in (0, 1)]
    left, right = rounder.exact  # (products, matrices, rows, terms); copies have quantizers in front
    exact = left @ right.mT
    magnitude = left.abs() @ right.abs().mT
    both = copies[0][pass_plan.spec_indices[0]] @ copies[1][pass_plan.spec_indices[1]].mT
    computed = torch.cat([both, copies[0] @ right.mT, left @ copies[1].mT])
    errors = _summarize_errors(exact, magnitude, computed)
    ratios = _sqnrs(exact, both)
    terms = ((left != 0).double() @ (right != 0).double().mT).flatten(1).sum(1).tolist()
    counts = (magnitude != 0).flatten(1).sum(1).tolist()
    count = len(pass_plan.candidates)
    ends = (count, count + len(pass_plan.specs[0]), count + len(pass_plan.specs[0]) + len(pass_plan.specs[1]))
    metrics = [
        _operand_metrics(
            [pair[side] for pair in pairs],
            rounder.exact[side],
            pass_plan.specs[side],
            copies[side],
            [product_errors[ends[side] : ends[side + 1]] for product_errors in errors],
        )
        for side in (0, 1)
    ]
    weights = [tensors[0].numel() for tensors in rounder.exact]
    return [
        (
            ReductionLength(pair[0].values.shape[-1], pair[0].length, terms[number] / max(counts[number], 1)),
            _combine(
                *(pass_plan, errors[number], ratios[number], [metrics[side][number] for side in (0, 1)], weights),
                [_own_metrics(own or {}, exact[number], computed) for computed in both[:, number]],
            ),
        )
        for number, pair in enumerate(pairs)
    ]


def _combine(
    pass_plan: _PassPlan,
    errors: Sequence[ErrorSummary],
    ratios: Sequence[float],
    operand_metrics: Sequence[Sequence[OperandMetrics]],
    weights: Sequence[int],
    own: Sequence[Mapping[str, float]],
) -> list[PassMetrics]:
    combined = []
    for number, candidate in enumerate(pass_plan.candidates):
        left, right = (operand_metrics[side][pass_plan.spec_indices[side][number]] for side in (0, 1))
        error = errors[number]
        combined.append(
            PassMetrics(
                candidate,
                error.median,
                error.mean,
                error.p99,
                sqnr=ratios[number],
                underflow=_mean((left.underflow, right.underflow), weights),
                overflow=_mean((left.overflow, right.overflow), weights),
                left=left,
                right=right,
                own=own[number],
            )
        )
    return combined


def _own_metrics(metrics: Mapping[str, Metric], exact: Tensor, computed: Tensor) -> dict[str, float]:
    values = {}
    for name, metric in metrics.items():
        try:
            values[name] = float(metric(exact, computed))
        except Exception as error:
            raise MetricError(
                f"the error metric {name} failed ({type(error).__name__}: {error}): it is called with the exact and "
                f"the computed product and returns a number."
            ) from error
    return values


def needs_whole_operands(pass_: str, candidates: tuple[FormatPair, ...]) -> bool:
    """Whether a candidate needs the whole operands rather than sampled rows."""
    return any(not spec.is_simple for side in _plan_pass(pass_, candidates).specs for spec in side)


class _PassPlan(NamedTuple):
    """The candidates and quantizers of a pass, the same for every product."""

    candidates: list[FormatPair]
    #: The distinct quantizers of the left and of the right operand.
    specs: tuple[list[_Spec], list[_Spec]]
    #: For each side, the index of each candidate's quantizer.
    spec_indices: tuple[list[int], list[int]]


class _Spec(NamedTuple):
    """A quantizer with derived values."""

    spec: QuantizerSpec
    text: str
    plain: Quantizer
    largest: float
    #: Whether it is enough to round the sampled rows, with scales from the amax.
    is_simple: bool


@lru_cache(maxsize=64)
def _plan_pass(pass_: str, candidates: tuple[FormatPair, ...]) -> _PassPlan:
    applicable = [candidate for candidate in candidates if candidate.applies_to(pass_)]
    pairs = [candidate.specs(pass_) for candidate in applicable]
    sides = [list(dict.fromkeys(pair[side] for pair in pairs)) for side in (0, 1)]
    indices = [[sides[side].index(pair[side]) for pair in pairs] for side in (0, 1)]
    specs = [list(map(_prepare_spec, side)) for side in sides]
    return _PassPlan(applicable, (specs[0], specs[1]), (indices[0], indices[1]))


def _prepare_spec(spec: QuantizerSpec) -> _Spec:
    target = spec.target
    has_plain_scale = (
        spec.range != "minmax" and not spec.power_of_two and spec.axis is None and not getattr(target, "affine", False)
    )
    has_plain_format = not isinstance(target, BlockFormat) and spec.rotate is None
    is_simple = spec.scale in (None, "tensor", "vector") and has_plain_format and has_plain_scale
    plain = Quantizer(target, spec.rounding, None, spec.overflow) if is_simple else Quantizer(get_format("fp32"))
    return _Spec(spec, str(spec), plain, math.inf if isinstance(target, BlockFormat) else target.max, is_simple)


class _Rounder:
    """Rounds the sampled rows of both operands of all products, once for each format."""

    def __init__(self, pairs: Sequence[tuple[SampledOperand, SampledOperand]], op: str, seed: int) -> None:
        self.pairs = pairs
        self.op = op
        self.seed = seed
        values = [torch.stack([pair[side].values for pair in pairs]) for side in (0, 1)]
        self.dtype = torch.promote_types(values[0].dtype, values[1].dtype)
        self.exact = (values[0].double(), values[1].double())
        #: Rows of the left operand, which come before those of the right.
        self.split = values[0].shape[-2]
        self._values = torch.cat([value.to(self.dtype) for value in values], -2)
        self._rounded: dict[tuple[Format, str | None, Rounding, int], Tensor] = {}

    def copies(self, specs: Sequence[_Spec], side: int) -> Tensor:
        """The rows of an operand rounded by each quantizer, in float64."""
        for target in dict.fromkeys(spec.plain for spec in specs if spec.is_simple):
            self._round(target, [spec.spec.scale for spec in specs if spec.is_simple and spec.plain == target], side)
        return torch.stack([self._copy(spec, side) for spec in specs])

    def _copy(self, spec: _Spec, side: int) -> Tensor:
        if spec.is_simple:
            rounded = self._rounded[self._key(spec.plain, spec.spec.scale, side)]
            return rounded if spec.plain.rounding == "stochastic" else rounded[..., self._rows(side), :]
        copies = []
        for operand in (pair[side] for pair in self.pairs):
            dims = operand.whole.dim()
            quantizer = resolve(spec.spec, operand.slot, self.op, dims)
            rotation = rotation_of(spec.spec, operand.slot, self.op, dims)
            if rotation is None:
                rounded = quantizer.quantize(operand.whole, seed=self.seed)
            else:  # rotated back, so that it is compared with the operand, and multiplied with sampled terms of the sum
                rounded = rotation.undo(quantizer.quantize(rotation.apply(operand.whole), seed=self.seed).double())
            copies.append(operand.gather(rounded))
        return torch.stack(copies).double()

    def _key(self, plain: Quantizer, scale: str | None, side: int) -> tuple[Format, str | None, Rounding, int]:
        """Stochastic rounding, mostly of the gradient only, is done for one side; all else for both sides at once."""
        assert not isinstance(plain.format, MutableFormat)
        return plain.format, scale, plain.rounding, side if plain.rounding == "stochastic" else 0

    def _rows(self, side: int) -> slice:
        return slice(self.split, None) if side else slice(self.split)

    def _round(self, plain: Quantizer, scales: Sequence[str | None], side: int) -> None:
        """Round rows to a format with several scales at once."""
        missing = [scale for scale in dict.fromkeys(scales) if self._key(plain, scale, side) not in self._rounded]
        if not missing:
            return
        target = plain.format
        assert isinstance(target, (FloatFormat, IntFormat, CodebookFormat))
        rows = self._rows(side) if plain.rounding == "stochastic" else slice(None)
        values = self._values[..., rows, :].to(carrier_for(self.dtype, target, plain.rounding).dtype)
        steps = torch.stack([self._step(scale, target.max, values.dtype)[..., rows, :] for scale in missing])
        scaled = divide(values, steps)
        bits = random_bits(scaled, self.seed) if plain.rounding == "stochastic" else None
        rounded = (plain.round_values(scaled, bits) * steps).to(self.dtype).double()
        for number, scale in enumerate(missing):
            self._rounded[self._key(plain, scale, side)] = rounded[number]

    def _step(self, scale: str | None, largest: float, dtype: torch.dtype) -> Tensor:
        """The scale of each row: (products, matrices, rows, 1)."""
        rows = [torch.stack([pair[side].vector_amax for pair in self.pairs]) for side in (0, 1)]
        if scale is None:
            return torch.ones_like(torch.cat(rows, -2), dtype=dtype)
        if scale == "tensor":
            amaxes = [torch.stack([pair[side].tensor_amax for pair in self.pairs]) for side in (0, 1)]
            rows = [amax.view(-1, 1, 1, 1).expand_as(row) for amax, row in zip(amaxes, rows, strict=True)]
        return step_scale(torch.cat([row.to(dtype) for row in rows], -2), largest, power_of_two=False)


def _operand_metrics(
    operands: Sequence[SampledOperand],
    exact: Tensor,
    specs: Sequence[_Spec],
    copies: Tensor,
    errors: Sequence[Sequence[ErrorSummary]],
) -> list[list[OperandMetrics]]:
    """For each product, the metrics of each quantizer."""
    ratios = _sqnrs(exact, copies)
    underflows = ((exact != 0) & (copies == 0)).flatten(2).double().mean(2).t().tolist()
    overflows = [_overflow_shares(spec, exact) for spec in specs]
    kurtoses, ranges = _tails(exact.flatten(1)[:, :_MAX_SAMPLES])
    amaxes = torch.stack([operand.tensor_amax for operand in operands]).tolist()
    metrics = []
    for number, operand in enumerate(operands):
        amax = float(amaxes[number])
        by_spec = []
        for index, spec in enumerate(specs):
            error = errors[number][index]
            by_spec.append(
                OperandMetrics(
                    operand.slot,
                    spec.text,
                    error.median,
                    error.mean,
                    error.p99,
                    sqnr=ratios[number][index],
                    underflow=math.nan if math.isnan(amax) else underflows[number][index],
                    overflow=math.nan if math.isnan(amax) else overflows[index][number],
                    kurtosis=kurtoses[number],
                    dynamic_range=ranges[number],
                    amax=amax,
                    elements=operand.elements,
                )
            )
        metrics.append(by_spec)
    return metrics


def _overflow_shares(spec: _Spec, exact: Tensor) -> list[float]:
    """The share of each product; with a scale nothing overflows."""
    if spec.spec.scale is not None or math.isinf(spec.largest) or not exact.numel():
        return [0.0] * len(exact)
    shares: list[float] = (exact.abs() > spec.largest).flatten(1).double().mean(1).tolist()
    return shares


def _tails(values: Tensor) -> tuple[list[float], list[float]]:
    """Excess kurtosis and dynamic range of each row, as :mod:`bitplan.analysis.error_metrics` defines them."""
    if not values.shape[1]:
        return [math.nan] * len(values), [0.0] * len(values)
    deviation = values - values.mean(1, keepdim=True)
    square = (deviation / deviation.abs().amax(1, keepdim=True)).square()
    kurtosis = square.square().mean(1) / square.mean(1).square() - 3.0
    is_constant = values.amax(1) == values.amin(1)
    magnitude = values.abs()
    largest, smallest = magnitude.amax(1), torch.where(magnitude == 0, math.inf, magnitude).amin(1)
    spread = torch.where(largest == 0, 0.0, torch.log2(largest) - torch.log2(smallest))
    return torch.where(is_constant, math.nan, kurtosis).tolist(), spread.tolist()


def _summarize_errors(exact: Tensor, magnitude: Tensor, computed: Tensor) -> list[list[ErrorSummary]]:
    """For each product, the backward error (:mod:`bitplan.analysis.error_metrics`) of all its approximations.

    Elements whose terms are all zero do not count: in the gradient of a strided convolution they may be most. If there
    are no others, errors are 0.
    """
    errors = (computed - exact).abs().flatten(2).numpy(force=True)
    sizes = magnitude.flatten(1).numpy(force=True)
    return [_summarize_product(errors[:, number], size) for number, size in enumerate(sizes)]


def _summarize_product(error: NDArray[np.float64], size: NDArray[np.float64]) -> list[ErrorSummary]:
    if not size.size:
        return [ErrorSummary(math.nan, math.nan, math.nan)] * len(error)
    is_counted = size != 0
    if not is_counted.any():
        error, size = error[:, :1], np.ones(1)
    elif not is_counted.all():
        error, size = error[:, is_counted], size[is_counted]
    relative = error / size
    medians, p99s = np.quantile(relative, (0.5, 0.99), axis=1)
    return [ErrorSummary(*map(float, values)) for values in zip(medians, relative.mean(1), p99s, strict=True)]


def _sqnrs(exact: Tensor, copies: Tensor) -> list[list[float]]:
    """For each product, :func:`bitplan.analysis.error_metrics.sqnr` of all its approximations."""
    signals = exact.flatten(1).square().sum(1).tolist()
    noises = (copies - exact).flatten(2).square().sum(2).t().tolist()
    return [[decibels(signal, noise) for noise in row] for signal, row in zip(signals, noises, strict=True)]


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    total = sum(weights)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total if total else 0.0
