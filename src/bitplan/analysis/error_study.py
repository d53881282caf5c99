"""The synthetic study: what formats do to products of random matrices whose tails are as heavy as one likes.

Operands x (rows by size) and w (size by rows) have independent entries of Student's t distribution with nu degrees of
freedom: nu = 1 is Cauchy's, without even a mean; nu = inf is the Gaussian. Both are quantised, their copies multiplied
exactly, and the backward error of each element of the product is taken (Rasquinha & Tabak 2023, arXiv 2408.02897; the
set-up beyond 512 by 512 entries, INT8 and FP8 is ours).

What it shows: an integer's error grows with the tails, a float's hardly does; and a scale for each vector moves the
point where they cross more than any change of format.
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

#: Entries of a lower nu are so large that their products leave float64.
LEAST_NU = 0.1


@dataclass(frozen=True)
class StudyRow:
    """One format's backward error over all elements of all draws."""

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
    """The backward error of products of random matrices in each format.

    :param nu: degrees of freedom of Student's t, the fewer, the heavier the tails; ``inf`` is the Gaussian.
    :param size: how many terms each element of the product sums.
    :param scale: ``vector``: a scale for each vector that is summed over, so rows of x and columns of w; ``tensor``:
        one for x and one for w. Each is the largest magnitude over the format's largest value.
    :param draws: pairs of matrices; the figures are of all their elements together.
    :param seed: decides the draws, which are the same for all formats, scales and roundings, and stochastic rounding.
    :param rows: rows of x and columns of w; as many as `size` if not given.

    >>> for nu in (1, math.inf):
    ...     print(min(study(nu=nu, size=64, draws=2), key=lambda row: row.median).format)
    e4m3
    int8
    """
    rows = size if rows is None else rows
    names = _checked_formats(formats)
    _check(distribution, nu, size, scale, draws, seed, rows)
    errors: dict[str, list[Tensor]] = {name: [] for name in names}
    for draw in range(draws):
        x, w = draw_operands(nu, rows, size, seed, draw)
        for name in names:
            quantized_x = _quantized(x, name, rounding, scale, 1, seed, draw, site=0)
            quantized_w = _quantized(w, name, rounding, scale, 0, seed, draw, site=1)
            errors[name].append(backward_error(x, w, quantized_x @ quantized_w))
    return [_row(name, nu, scale, summarize(torch.stack(errors[name]))) for name in names]


def draw_operands(nu: float, rows: int, size: int, seed: int, draw: int) -> tuple[Tensor, Tensor]:
    """The matrices x and w of one draw, in float64."""
    generator = np.random.default_rng([seed, draw])

    def entries(shape: tuple[int, int]) -> Tensor:
        drawn = generator.standard_normal(shape) if math.isinf(nu) else generator.standard_t(nu, shape)
        return torch.from_numpy(drawn)

    return entries((rows, size)), entries((size, rows))


def _quantized(
    x: Tensor, name: str, rounding: Rounding, scale: StudyScale, axis: int, seed: int, draw: int, site: int
) -> Tensor:
    vector_axis = axis if scale == "vector" else None
    return quantize(x, name, rounding, scale, seed, axis=vector_axis, step=draw, site=site)


def _row(name: str, nu: float, scale: StudyScale, summary: ErrorSummary) -> StudyRow:
    return StudyRow(name, float(nu), scale, **asdict(summary))


def _checked_formats(formats: Sequence[str]) -> list[str]:
    if not formats:
        raise MetricError("name at least one format, such as int8 or e4m3.")
    for name in formats:
        if isinstance(get_format(name), BlockFormat):
            raise MetricError(
                f"{name} brings scales of its own, and this study is of one per vector or tensor: name formats such as "
                f"int8, e4m3 or e2m1."
            )
    return list(dict.fromkeys(formats))


def _check(distribution: str, nu: float, size: int, scale: str, draws: int, seed: int, rows: int) -> None:
    if distribution not in DISTRIBUTIONS:
        raise MetricError(f"there is no distribution {distribution!r}: use student-t, whose nu = inf is the Gaussian.")
    if scale not in get_args(StudyScale):
        raise MetricError(f"there is no scale {scale!r} here; {nearest_names(scale, get_args(StudyScale))}")
    if not nu >= LEAST_NU:
        raise MetricError(f"nu is at least {LEAST_NU}, or inf for the Gaussian, not {nu:g}.")
    for what, number in (("size", size), ("draws", draws), ("rows", rows)):
        if number < 1:
            raise MetricError(f"{what} is at least 1, not {number}.")
    if seed < 0:
        raise MetricError(f"a seed is at least 0, not {seed}.")
