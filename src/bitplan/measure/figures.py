"""What candidates do to one pass of one product: the figures of :mod:`bitplan.metrics` for many candidates at once.

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
from torch import Tensor

from bitplan.axes import resolve
from bitplan.formats import BlockFormat, FloatFormat, IntFormat
from bitplan.measure.candidate import Tried
from bitplan.measure.operands import Operand
from bitplan.metrics import ErrorSummary, dynamic_range, excess_kurtosis, overflow_share
from bitplan.noise import random_bits
from bitplan.plan.spec import QuantizerSpec
from bitplan.quantizer import Quantizer
from bitplan.rounding import carrier_for
from bitplan.scaling import divide, step_scale

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
    pass_: str, op: str, left: Operand, right: Operand, candidates: tuple[Tried, ...], seed: int
) -> tuple[Sums, list[PassFigures]]:
    """The figures of all candidates that are of their own in that pass."""
    wanted = _wanted(pass_, candidates)
    if not wanted.candidates:
        return Sums(left.values.shape[-1], left.length, 0.0), []
    rounder = _Rounder(left, right, op, seed)
    copies = [rounder.copies(wanted.specs[side], side) for side in (0, 1)]
    exact_left, exact_right = rounder.exact
    exact = exact_left @ exact_right.mT
    magnitude = exact_left.abs() @ exact_right.abs().mT
    both = copies[0][wanted.places[0]] @ copies[1][wanted.places[1]].mT
    computed = torch.cat([both, copies[0] @ exact_right.mT, exact_left @ copies[1].mT])
    errors = _summaries(exact, magnitude, computed)
    ratios = _decibels(exact, both)
    figures: list[list[OperandFigures]] = []
    start = len(wanted.candidates)
    for side, operand in enumerate((left, right)):
        specs, end = wanted.specs[side], start + len(wanted.specs[side])
        figures.append(_operand_figures(operand, rounder.exact[side], specs, copies[side], errors[start:end]))
        start = end
    weights = [each.numel() for each in rounder.exact]
    made = []
    for number, candidate in enumerate(wanted.candidates):
        one, other = (figures[side][wanted.places[side][number]] for side in (0, 1))
        error = errors[number]
        made.append(
            PassFigures(
                *(candidate, error.median, error.mean, error.p99, ratios[number]),
                underflow=_mean((one.underflow, other.underflow), weights),
                overflow=_mean((one.overflow, other.overflow), weights),
                left=one,
                right=other,
            )
        )
    terms = (exact_left != 0).double() @ (exact_right != 0).double().mT
    nonzero = float(terms.sum() / max(int((magnitude != 0).sum()), 1))
    return Sums(left.values.shape[-1], left.length, nonzero), made


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
    is_simple = spec.scale in (None, "tensor", "vector") and not isinstance(target, BlockFormat)
    plain = Quantizer(target, spec.rounding, None, spec.overflow)
    return _Spec(spec, str(spec), plain, math.inf if isinstance(target, BlockFormat) else target.max, is_simple)


class _Rounder:
    """Rounds the sampled rows of both operands at once, each format once."""

    def __init__(self, left: Operand, right: Operand, op: str, seed: int) -> None:
        self.operands = (left, right)
        self.op = op
        self.seed = seed
        self.dtype = torch.promote_types(left.values.dtype, right.values.dtype)
        self.exact = (left.values.double(), right.values.double())
        #: Rows of the left operand; those of the right one lie behind them.
        self.split = left.values.shape[1]
        self._rows: dict[bool, Tensor] = {}
        self._rounded: dict[tuple[bool, QuantizerSpec], Tensor] = {}

    def copies(self, specs: Sequence[_Spec], side: int) -> Tensor:
        """What a plan would make of one operand's rows under each quantizer, in float64."""
        return torch.stack([self._copy(each, side) for each in specs])

    def _copy(self, wanted: _Spec, side: int) -> Tensor:
        if not wanted.is_simple:
            operand = self.operands[side]
            quantizer = resolve(wanted.spec, operand.slot, self.op, operand.whole.dim())
            return operand.gather(quantizer.quantize(operand.whole, seed=self.seed)).double()
        # Stochastic rounding is mostly asked for of the gradient alone.
        together = wanted.spec.rounding != "stochastic"
        key = (together or side == 0, wanted.spec)
        if key not in self._rounded:
            self._rounded[key] = self._round(wanted, slice(None) if together else self._of(side))
        whole = self._rounded[key]
        return whole[:, self._of(side)] if together else whole

    def _of(self, side: int) -> slice:
        return slice(self.split, None) if side else slice(self.split)

    def _round(self, wanted: _Spec, rows: slice) -> Tensor:
        spec, target = wanted.spec, wanted.plain.format
        assert isinstance(target, (FloatFormat, IntFormat))
        work = self._work(carrier_for(self.dtype, target, spec.rounding).dtype == torch.float64)[:, rows]
        bits = random_bits(work, self.seed) if spec.rounding == "stochastic" else None
        if spec.scale is None:
            return wanted.plain.round_values(work, bits).to(self.dtype).double()
        scale = step_scale(self._amax(spec.scale)[:, rows].to(work.dtype), wanted.largest, power_of_two=False)
        elements = wanted.plain.round_values(divide(work, scale), bits)
        return (elements * scale).to(self.dtype).double()

    def _work(self, wide: bool) -> Tensor:
        if wide not in self._rows:
            carrier = torch.float64 if wide else torch.float32
            self._rows[wide] = torch.cat([operand.values.to(carrier) for operand in self.operands], 1)
        return self._rows[wide]

    def _amax(self, scale: str) -> Tensor:
        """The largest magnitude that each row's scale follows from: (matrices, rows, 1)."""
        found = []
        for operand in self.operands:
            rows = operand.vector_amax
            found.append(rows if scale == "vector" else operand.tensor_amax.reshape(1, 1, 1).expand_as(rows))
        return torch.cat(found, 1)


def _operand_figures(
    operand: Operand, exact: Tensor, specs: Sequence[_Spec], copies: Tensor, errors: Sequence[ErrorSummary]
) -> list[OperandFigures]:
    ratios = _decibels(exact, copies)
    lost = ((exact != 0) & (copies == 0)).flatten(1).double().mean(1).tolist()
    some = exact.flatten()[:_LOOKED_AT]
    kurtosis, spread = excess_kurtosis(some), dynamic_range(some)
    amax = float(operand.tensor_amax)
    if math.isnan(amax):
        lost = [math.nan] * len(lost)
    return [
        OperandFigures(
            *(operand.slot, each.words, error.median, error.mean, error.p99, ratio, underflow),
            *(_overflow(each, exact), kurtosis, spread, amax, operand.whole.numel()),
        )
        for each, error, ratio, underflow in zip(specs, errors, ratios, lost, strict=True)
    ]


def _overflow(wanted: _Spec, exact: Tensor) -> float:
    """A scale makes room for all."""
    if wanted.spec.scale is not None or math.isinf(wanted.largest):
        return 0.0
    return overflow_share(exact, wanted.largest)


def _summaries(exact: Tensor, magnitude: Tensor, computed: Tensor) -> list[ErrorSummary]:
    """Of the backward error of each computed product: :func:`bitplan.metrics.backward_error`, many at once.

    Elements that have no term but zeros are no sums, and do not count: of a strided convolution's gradient they may be
    most. Where there are no others, errors are 0.
    """
    size = magnitude.flatten()
    if not size.numel():
        return [ErrorSummary(math.nan, math.nan, math.nan)] * len(computed)
    counts = size != 0
    error = (computed - exact).abs().flatten(1)
    if not bool(counts.any()):
        error, size = error[:, :1], torch.ones_like(size[:1])
    elif not bool(counts.all()):
        error, size = error[:, counts], size[counts]
    found = (error / size).numpy(force=True)
    medians, p99s = np.quantile(found, (0.5, 0.99), axis=1)
    return [ErrorSummary(*map(float, each)) for each in zip(medians, found.mean(1), p99s, strict=True)]


def _decibels(exact: Tensor, copies: Tensor) -> list[float]:
    """:func:`bitplan.metrics.sqnr` of several approximations."""
    signal = float(exact.square().sum())
    return [_ratio(signal, each) for each in (copies - exact).flatten(1).square().sum(1).tolist()]


def _ratio(signal: float, noise: float) -> float:
    if math.isnan(signal) or math.isnan(noise):
        return math.nan
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal and math.isfinite(noise) else -math.inf


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    whole = sum(weights)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / whole if whole else 0.0
