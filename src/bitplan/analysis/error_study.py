"""The synthetic study: backward errors of formats in products of random matrices with tails of different heaviness.

Operands x (rows by size) and w (size by rows) have independent entries of Student's t distribution with nu degrees of
freedom: nu = 1 is the Cauchy distribution, which has no mean; nu = inf is the Gaussian. Both are quantised, the copies
are multiplied exactly, and the backward error of each element of the product is measured (Rasquinha & Tabak 2023, arXiv
2408.02897; of the set-up, 512 by 512 entries, INT8 and FP8 are theirs).

Result: the error of integers grows with the tails, that of floats hardly does. A scale per vector shifts the crossover
more than any change of format.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from bitplan.analysis.error_metrics import ErrorSummary, backward_error, summarize
from bitplan.errors import MetricError, nearest_names
from bitplan.numerics.formats import BlockFormat, get_format
from bitplan.numerics.quantizer import quantize
from bitplan.numerics.reference import Rounding

StudyScale = Literal["vector", "tensor"]

DISTRIBUTIONS = ("student-t",)
DEFAULT_FORMATS = ("int8", "e4m3", "e5m2")

#: With a lower nu, products of entries overflow float64.
LEAST_NU = 0.1


@dataclass(frozen=True)
class StudyRow:
    """The backward error of a format over all elements of all draws."""

    format: str
    nu: float
    scale: StudyScale
    median: float
    mean: float
    p99: float


def study(
    distribution: str = "student-t",
    nu: float = math.inf,
    size: int = 512,
    scale: StudyScale = "vector",
    formats: Sequence[str] = DEFAULT_FORMATS,
    rounding: Rounding = "nearest",
    draws: int = 10,
    seed: int = 0,
    *,
    rows: int | None = None,
) -> list[StudyRow]:
    """Measure the backward error of products of random matrices in each format.

    :param nu: degrees of freedom of Student's t: fewer mean heavier tails; ``inf`` is the Gaussian.
    :param size: the reduction length of the product.
    :param scale: ``vector``: a scale for each row of x and column of w; ``tensor``: one for x and one for w. A scale is
        amax divided by the format's largest value.
    :param draws: number of pairs of matrices; the results are over all their elements.
    :param seed: of stochastic rounding and of the draws, which are the same for all formats, scales and roundings.
    :param rows: rows of x and columns of w; by default `size`.

    >>> for nu in (1, math.inf):
    ...     print(min(study(nu=nu, size=64, draws=2), key=lambda row: row.median).format)
    e4m3
    int8
    """
    rows = size if rows is None else rows
    names = _check_formats(formats)
    _check(distribution, nu, size, scale, draws, seed, rows)
    errors: dict[str, list[Tensor]] = {name: [] for name in names}
    for draw in range(draws):
        x, w = draw_operands(nu, rows, size, seed, draw)
        for name in names:
            quantized_x = _quantize(x, name, rounding, scale, 1, seed, draw, site=0)
            quantized_w = _quantize(w, name, rounding, scale, 0, seed, draw, site=1)
            errors[name].append(backward_error(x, w, quantized_x @ quantized_w))
    return [_row(name, nu, scale, summarize(torch.stack(errors[name]))) for name in names]


def draw_operands(nu: float, rows: int, size: int, seed: int, draw: int) -> tuple[Tensor, Tensor]:
    """The matrices x and w of a draw, in float64."""
    generator = np.random.default_rng([seed, draw])

    def entries(shape: tuple[int, int]) -> Tensor:
        drawn = generator.standard_normal(shape) if math.isinf(nu) else generator.standard_t(nu, shape)
        return torch.from_numpy(drawn)

    return entries((rows, size)), entries((size, rows))


def _quantize(
    x: Tensor, name: str, rounding: Rounding, scale: StudyScale, axis: int, seed: int, draw: int, site: int
) -> Tensor:
    vector_axis = axis if scale == "vector" else None
    return quantize(x, name, rounding, scale, seed, axis=vector_axis, step=draw, site=site)


def _row(name: str, nu: float, scale: StudyScale, summary: ErrorSummary) -> StudyRow:
    return StudyRow(name, float(nu), scale, **asdict(summary))


def _check_formats(formats: Sequence[str]) -> list[str]:
    if not formats:
        raise MetricError("name at least one format, such as int8 or e4m3.")
    for name in formats:
        if isinstance(get_format(name), BlockFormat):
            raise MetricError(
                f"{name} is a block format, and this study scales vectors or tensors: name formats such as int8 or "
                f"e4m3."
            )
    return list(dict.fromkeys(formats))


def _check(distribution: str, nu: float, size: int, scale: str, draws: int, seed: int, rows: int) -> None:
    if distribution not in DISTRIBUTIONS:
        raise MetricError(f"there is no distribution {distribution!r}: use student-t, whose nu = inf is the Gaussian.")
    if scale not in get_args(StudyScale):
        raise MetricError(f"there is no scale {scale!r} here; {nearest_names(scale, get_args(StudyScale))}")
    if not nu >= LEAST_NU:
        raise MetricError(f"nu is at least {LEAST_NU}, or inf for the Gaussian, not {nu:g}.")
    for name, number in (("size", size), ("draws", draws), ("rows", rows)):
        if number < 1:
            raise MetricError(f"{name} is at least 1, not {number}.")
    if seed < 0:
        raise MetricError(f"a seed is at least 0, not {seed}.")
