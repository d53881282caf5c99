"""What candidates do to one pass of one product: the figures of :mod:`bitplan.analysis.error_metrics` for many
candidates at once.

Every quantizer rounds each operand's sampled rows once, whichever candidates it is part of, and products of all
candidates are one batched product in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bitplan.analysis.error_metrics import ErrorSummary
from bitplan.analysis.measure.candidate import Tried
from bitplan.gemm.axes import resolve
from bitplan.gemm.matrices import SampledOperand
from bitplan.numerics.dtypes import carrier_for
from bitplan.numerics.formats import BlockFormat, FloatFormat, Format, IntFormat, get_format
from bitplan.numerics.mutable_format import MutableFormat
from bitplan.numerics.noise import random_bits
from bitplan.numerics.quantizer import Quantizer
from bitplan.numerics.reference import Rounding
from bitplan.numerics.scaling import divide, step_scale
from bitplan.plans.spec import QuantizerSpec

#: Kurtosis and dynamic range are those of at most so many sampled elements.
_LOOKED_AT = 16384


@dataclass(frozen=True)
class OperandFigures:
    """One operand in one quantizer, the other left as it is."""

    slot: str
    #: In a plan's words, such as ``e4m3 tensor``.
    quantizer: str
    #: Of the product's backward error with this operand alone quantised.
    median: float
    mean: float
    p99: float
    #: Of the operand's own sampled values.
    sqnr: float
    underflow: float
    overflow: float
    kurtosis: float
    dynamic_range: float
    #: Of the whole operand: its largest magnitude, and how many values it has.
    amax: float
    elements: int


@dataclass(frozen=True)
class PassFigures:
    """One candidate in one pass."""

    candidate: Tried
    median: float
    mean: float
    p99: float
    #: Of the product's sampled elements.
    sqnr: float
    #: Of both operands' sampled values together.
    underflow: float
    overflow: float
    left: OperandFigures
    right: OperandFigures


@dataclass(frozen=True)
class Sums:
    """How long the sums of a product are."""

    #: Terms that were added up.
    k: int
    #: Terms there are.
    length: int
    #: Terms that are not zero, on average over elements that have any: what an error's 1/sqrt(K) goes by.
    nonzero: float


def pass_figures(
    pass_: str, op: str, left: SampledOperand, right: SampledOperand, candidates: tuple[Tried, ...], seed: int
) -> tuple[Sums, list[PassFigures]]:
    """The figures of all candidates that are of their own in that pass."""
    return group_figures(pass_, op, [(left, right)], candidates, seed)[0]


def group_figures(
    pass_: str,
    op: str,
    pairs: Sequence[tuple[SampledOperand, SampledOperand]],
    candidates: tuple[Tried, ...],
    seed: int,
) -> list[tuple[Sums, list[PassFigures]]]:
    """The same of several products at once, whose sampled rows have the same shapes: far faster than one by one."""
    wanted = _wanted(pass_, candidates)
    if not wanted.candidates:
        return [(Sums(left.values.shape[-1], left.length, 0.0), []) for left, _ in pairs]
    rounder = _Rounder(pairs, op, seed)
    copies = [rounder.copies(wanted.specs[side], side) for side in (0, 1)]
    left, right = rounder.exact  # (products, matrices, rows, terms); copies have quantizers in front
    exact = left @ right.mT
    magnitude = left.abs() @ right.abs().mT
    both = copies[0][wanted.places[0]] @ copies[1][wanted.places[1]].mT
    computed = torch.cat([both, copies[0] @ right.mT, left @ copies[1].mT])
    errors = _summaries(exact, magnitude, computed)
    ratios = _decibels(exact, both)
    terms = ((left != 0).double() @ (right != 0).double().mT).flatten(1).sum(1).tolist()
    counts = (magnitude != 0).flatten(1).sum(1).tolist()
    count = len(wanted.candidates)
    ends = (count, count + len(wanted.specs[0]), count + len(wanted.specs[0]) + len(wanted.specs[1]))
    figures = [
        _operand_figures(
            *([pair[side] for pair in pairs], rounder.exact[side], wanted.specs[side], copies[side]),
            [own[ends[side] : ends[side + 1]] for own in errors],
        )
        for side in (0, 1)
    ]
    weights = [tensors[0].numel() for tensors in rounder.exact]
    return [
        (
            Sums(pair[0].values.shape[-1], pair[0].length, terms[number] / max(counts[number], 1)),
            _made(wanted, errors[number], ratios[number], [figures[side][number] for side in (0, 1)], weights),
        )
        for number, pair in enumerate(pairs)
    ]


def _made(
    wanted: _Wanted,
    errors: Sequence[ErrorSummary],
    ratios: Sequence[float],
    figures: Sequence[Sequence[OperandFigures]],
    weights: Sequence[int],
) -> list[PassFigures]:
    made = []
    for number, candidate in enumerate(wanted.candidates):
        left, right = (figures[side][wanted.places[side][number]] for side in (0, 1))
        error = errors[number]
        made.append(
            PassFigures(
                *(candidate, error.median, error.mean, error.p99, ratios[number]),
                underflow=_mean((left.underflow, right.underflow), weights),
                overflow=_mean((left.overflow, right.overflow), weights),
                left=left,
                right=right,
            )
        )
    return made


def needs_whole(pass_: str, candidates: tuple[Tried, ...]) -> bool:
    """Whether some candidate cannot be tried on sampled rows alone."""
    return any(not spec.is_simple for side in _wanted(pass_, candidates).specs for spec in side)


class _Wanted(NamedTuple):
    """What a pass has to compute: the same for every product."""

    candidates: list[Tried]
    #: Of the left and of the right operand: every quantizer once.
    specs: tuple[list[_Spec], list[_Spec]]
    #: Of each side: which of these each candidate has.
    places: tuple[list[int], list[int]]


class _Spec(NamedTuple):
    """A quantizer with all that is asked of it, looked up once."""

    spec: QuantizerSpec
    words: str
    plain: Quantizer
    largest: float
    #: Whether only the sampled rows need be rounded, with scales that follow from largest magnitudes.
    is_simple: bool


@lru_cache(maxsize=64)
def _wanted(pass_: str, candidates: tuple[Tried, ...]) -> _Wanted:
    own = [candidate for candidate in candidates if candidate.is_of_its_own(pass_)]
    pairs = [candidate.specs(pass_) for candidate in own]
    sides = [list(dict.fromkeys(pair[side] for pair in pairs)) for side in (0, 1)]
    places = [[sides[side].index(pair[side]) for pair in pairs] for side in (0, 1)]
    specs = [list(map(_looked_up, side)) for side in sides]
    return _Wanted(own, (specs[0], specs[1]), (places[0], places[1]))


def _looked_up(spec: QuantizerSpec) -> _Spec:
    target = spec.target
    is_usual = (
        spec.range != "minmax" and not spec.power_of_two and spec.axis is None and not getattr(target, "affine", False)
    )
    is_simple = spec.scale in (None, "tensor", "vector") and not isinstance(target, BlockFormat) and is_usual
    plain = Quantizer(target, spec.rounding, None, spec.overflow) if is_simple else Quantizer(get_format("fp32"))
    return _Spec(spec, str(spec), plain, math.inf if isinstance(target, BlockFormat) else target.max, is_simple)


class _Rounder:
    """Rounds the sampled rows of both operands of all products at once, each format once."""

    def __init__(self, pairs: Sequence[tuple[SampledOperand, SampledOperand]], op: str, seed: int) -> None:
        self.pairs = pairs
        self.op = op
        self.seed = seed
        values = [torch.stack([pair[side].values for pair in pairs]) for side in (0, 1)]
        self.dtype = torch.promote_types(values[0].dtype, values[1].dtype)
        self.exact = (values[0].double(), values[1].double())
        #: Rows of the left operand; those of the right one lie behind them.
        self.split = values[0].shape[-2]
        self._values = torch.cat([value.to(self.dtype) for value in values], -2)
        self._rounded: dict[tuple[Format, str | None, Rounding, int], Tensor] = {}

    def copies(self, specs: Sequence[_Spec], side: int) -> Tensor:
        """What a plan would make of one operand's rows under each quantizer, in float64."""
        for target in dict.fromkeys(spec.plain for spec in specs if spec.is_simple):
            self._round(target, [spec.spec.scale for spec in specs if spec.is_simple and spec.plain == target], side)
        return torch.stack([self._copy(spec, side) for spec in specs])

    def _copy(self, spec: _Spec, side: int) -> Tensor:
        if spec.is_simple:
            rounded = self._rounded[self._key(spec.plain, spec.spec.scale, side)]
            return rounded if spec.plain.rounding == "stochastic" else rounded[..., self._of(side), :]
        copies = []
        for operand in (pair[side] for pair in self.pairs):
            quantizer = resolve(spec.spec, operand.slot, self.op, operand.whole.dim())
            copies.append(operand.gather(quantizer.quantize(operand.whole, seed=self.seed)))
        return torch.stack(copies).double()

    def _key(self, plain: Quantizer, scale: str | None, side: int) -> tuple[Format, str | None, Rounding, int]:
        """Stochastic rounding is mostly asked for of the gradient alone; all else is done for both sides."""
        assert not isinstance(plain.format, MutableFormat)
        return plain.format, scale, plain.rounding, side if plain.rounding == "stochastic" else 0

    def _of(self, side: int) -> slice:
        return slice(self.split, None) if side else slice(self.split)

    def _round(self, plain: Quantizer, scales: Sequence[str | None], side: int) -> None:
        """Round rows to one format under several scales in one go."""
        missing = [scale for scale in dict.fromkeys(scales) if self._key(plain, scale, side) not in self._rounded]
        if not missing:
            return
        target = plain.format
        assert isinstance(target, (FloatFormat, IntFormat))
        rows = self._of(side) if plain.rounding == "stochastic" else slice(None)
        work = self._values[..., rows, :].to(carrier_for(self.dtype, target, plain.rounding).dtype)
        steps = torch.stack([self._step(scale, target.max, work.dtype)[..., rows, :] for scale in missing])
        ready = divide(work, steps)
        bits = random_bits(ready, self.seed) if plain.rounding == "stochastic" else None
        rounded = (plain.round_values(ready, bits) * steps).to(self.dtype).double()
        for number, scale in enumerate(missing):
            self._rounded[self._key(plain, scale, side)] = rounded[number]

    def _step(self, scale: str | None, largest: float, dtype: torch.dtype) -> Tensor:
        """The scale of each row: (products, matrices, rows, 1)."""
        rows = [torch.stack([pair[side].vector_amax for pair in self.pairs]) for side in (0, 1)]
        if scale is None:
            return torch.ones_like(torch.cat(rows, -2), dtype=dtype)
        if scale == "tensor":
            wholes = [torch.stack([pair[side].tensor_amax for pair in self.pairs]) for side in (0, 1)]
            rows = [whole.view(-1, 1, 1, 1).expand_as(row) for whole, row in zip(wholes, rows, strict=True)]
        return step_scale(torch.cat([row.to(dtype) for row in rows], -2), largest, power_of_two=False)


def _operand_figures(
    operands: Sequence[SampledOperand],
    exact: Tensor,
    specs: Sequence[_Spec],
    copies: Tensor,
    errors: Sequence[Sequence[ErrorSummary]],
) -> list[list[OperandFigures]]:
    """Of each product one for each quantizer."""
    ratios = _decibels(exact, copies)
    lost = ((exact != 0) & (copies == 0)).flatten(2).double().mean(2).t().tolist()
    beyond = [_overflows(spec, exact) for spec in specs]
    kurtoses, ranges = _tails(exact.flatten(1)[:, :_LOOKED_AT])
    largest = torch.stack([operand.tensor_amax for operand in operands]).tolist()
    figures = []
    for number, operand in enumerate(operands):
        amax = float(largest[number])
        own = []
        for place, spec in enumerate(specs):
            error, underflow = errors[number][place], lost[number][place]
            own.append(
                OperandFigures(
                    *(operand.slot, spec.words, error.median, error.mean, error.p99, ratios[number][place]),
                    underflow=math.nan if math.isnan(amax) else underflow,
                    overflow=math.nan if math.isnan(amax) else beyond[place][number],
                    kurtosis=kurtoses[number],
                    dynamic_range=ranges[number],
                    amax=amax,
                    elements=operand.elements,
                )
            )
        figures.append(own)
    return figures


def _overflows(spec: _Spec, exact: Tensor) -> list[float]:
    """Of each product; a scale makes room for all."""
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
    alike = values.amax(1) == values.amin(1)
    magnitude = values.abs()
    most, least = magnitude.amax(1), torch.where(magnitude == 0, math.inf, magnitude).amin(1)
    spread = torch.where(most == 0, 0.0, torch.log2(most) - torch.log2(least))
    return torch.where(alike, math.nan, kurtosis).tolist(), spread.tolist()


def _summaries(exact: Tensor, magnitude: Tensor, computed: Tensor) -> list[list[ErrorSummary]]:
    """For each product, the backward error (:mod:`bitplan.analysis.error_metrics`) of everything computed for it.

    Elements that have no term but zeros are no sums, and do not count: of a strided convolution's gradient they may be
    most. Where there are no others, errors are 0.
    """
    errors = (computed - exact).abs().flatten(2).numpy(force=True)
    sizes = magnitude.flatten(1).numpy(force=True)
    return [_summary_of(errors[:, number], size) for number, size in enumerate(sizes)]


def _summary_of(error: NDArray[np.float64], size: NDArray[np.float64]) -> list[ErrorSummary]:
    if not size.size:
        return [ErrorSummary(math.nan, math.nan, math.nan)] * len(error)
    counts = size != 0
    if not counts.any():
        error, size = error[:, :1], np.ones(1)
    elif not counts.all():
        error, size = error[:, counts], size[counts]
    relative = error / size
    medians, p99s = np.quantile(relative, (0.5, 0.99), axis=1)
    return [ErrorSummary(*map(float, values)) for values in zip(medians, relative.mean(1), p99s, strict=True)]


def _decibels(exact: Tensor, copies: Tensor) -> list[list[float]]:
    """:func:`bitplan.analysis.error_metrics.sqnr` of several approximations, of each product."""
    signals = exact.flatten(1).square().sum(1).tolist()
    noises = (copies - exact).flatten(2).square().sum(2).t().tolist()
    return [[_ratio(signal, noise) for noise in own] for signal, own in zip(signals, noises, strict=True)]


def _ratio(signal: float, noise: float) -> float:
    if math.isnan(signal) or math.isnan(noise):
        return math.nan
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal and math.isfinite(noise) else -math.inf


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    whole = sum(weights)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / whole if whole else 0.0
