"""Error metrics of quantised tensors and products, by which formats are compared.

Pure functions of tensors. All arithmetic is float64, whatever the dtype of the inputs, so that errors of 1e-7 are those
of the format. Two rules hold throughout:

* A NaN in the inputs gives NaN.
* The docstring of each function states its value for zero divided by zero.

The backward error rates an *operation* with a pair of operands; the other metrics rate a tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bitplan.errors import MetricError

#: Ratio of gradient norm to quantisation noise below which low precision stops helping (Chmiel et al. 2025, "FP4 All
#: the Way", arXiv 2505.19115).
GRADIENT_TO_NOISE_THRESHOLD = math.sqrt(3.0)


@dataclass(frozen=True)
class ErrorSummary:
    """Median, mean and 99th percentile."""

    median: float
    mean: float
    p99: float


def summarize(values: Tensor) -> ErrorSummary:
    """Median, mean and 99th percentile (both with linear interpolation) of all elements.

    NaN if there are no elements or one of them is NaN.

    >>> summarize(torch.tensor([1.0, 2.0, 3.0, 10.0]))
    ErrorSummary(median=2.5, mean=4.0, p99=9.79)
    """
    flat = _double(values).flatten().numpy(force=True)
    if not flat.size or np.isnan(flat).any():
        return ErrorSummary(math.nan, math.nan, math.nan)
    median, p99 = np.quantile(flat, (0.5, 0.99))
    return ErrorSummary(float(median), float(flat.mean()), float(p99))


def backward_error(left: Tensor, right: Tensor, computed: Tensor) -> Tensor:
    """The backward error of a product of matrices, a value for each element of the result.

    ``BE_ij = |L R - C|_ij / (|L| |R|)_ij``, where L and R are the exact operands and C is the `computed` result,
    for example the product of their quantised copies (Rasquinha & Tabak 2023, arXiv 2408.02897).

    The denominator is the sum of magnitudes ``sum_k |L_ik| |R_kj|`` and not ``|L R|``: cancellation does not
    inflate the error. It does not change if an operand and the result are multiplied by a number. If the relative error
    of each operand is at most u, then ``BE <= 2u + u^2``. Random errors cancel, so it falls as 1/sqrt(K) with the
    reduction length K: compare products at equal K, or after multiplying by sqrt(K).

    BE = 0 where the denominator is 0. Leading dimensions are batches, as in ``torch.matmul``.

    >>> backward_error(torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0], [1.0]]), torch.tensor([[4.5]]))
    tensor([[0.1250]], dtype=torch.float64)
    """
    left, right, computed = _double(left), _double(right), _double(computed)
    if left.dim() < 2 or right.dim() < 2 or left.shape[-1] != right.shape[-2]:
        raise MetricError(
            f"matrices of shapes {tuple(left.shape)} and {tuple(right.shape)} cannot be multiplied: give (..., M, K) "
            f"and (..., K, N)."
        )
    exact = left @ right
    _require_same_shape("a product", exact, "its computed value", computed)
    error, magnitude = (exact - computed).abs(), left.abs() @ right.abs()
    return torch.where((magnitude == 0) & ~torch.isnan(error), 0.0, error / magnitude)


def relative_error(values: Tensor, approximation: Tensor) -> Tensor:
    """``|q - x| / |x|`` for each element: 0 where both are 0, infinite where only x is.

    MoR (arXiv 2512.22804) chooses by the mean over a tensor's elements: a tensor with more than 0.045 in E4M3 stays in
    BF16.
    """
    x, q = _pair(values, approximation)
    error = (q - x).abs()
    return torch.where(error == 0, 0.0, error / x.abs())


def sqnr(values: Tensor, approximation: Tensor) -> float:
    """The signal-to-quantisation-noise ratio in decibels, ``10 log10(sum x^2 / sum (q - x)^2)``.

    Every bit of an integer or of a mantissa adds about 6 dB. Infinite without noise, also for a tensor of zeros; minus
    infinity for noise in a tensor of zeros.

    >>> round(sqnr(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])), 6)
    20.0
    """
    x, q = _pair(values, approximation)
    return decibels(float(x.square().sum()), float((q - x).square().sum()))


def decibels(signal: float, noise: float) -> float:
    """``10 log10(signal / noise)`` of two powers, with the limits of :func:`sqnr`."""
    if math.isnan(signal) or math.isnan(noise):
        return math.nan
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal and math.isfinite(noise) else -math.inf


def overflow_share(values: Tensor, largest: float) -> float:
    """The share of elements beyond the largest magnitude of a format, infinities included.

    With a scale, `largest` is the format's largest value times the scale. No elements: 0.

    >>> overflow_share(torch.tensor([1.0, -500.0, 448.0, 2.0]), 448.0)
    0.25
    """
    x = _double(values)
    if torch.isnan(x).any():
        return math.nan
    return float((x.abs() > largest).double().mean()) if x.numel() else 0.0


def underflow_share(values: Tensor, approximation: Tensor) -> float:
    """The share of all elements that are nonzero and are rounded to zero. No elements: 0.

    >>> underflow_share(torch.tensor([1.0, 1e-9, 0.0, 2.0]), torch.tensor([1.0, 0.0, 0.0, 2.0]))
    0.25
    """
    x, q = _pair(values, approximation)
    if torch.isnan(x).any() or torch.isnan(q).any():
        return math.nan
    return float(((x != 0) & (q == 0)).double().mean()) if x.numel() else 0.0


def dynamic_range(values: Tensor) -> float:
    """``log2(largest magnitude) - log2(smallest magnitude above zero)``, in powers of two, as in Transformer Engine.

    E4M3 spans 17.8 of them, E5M2 31.8, INT8 7. 0 if all elements are zero; infinite with an infinity.

    >>> dynamic_range(torch.tensor([0.0, -0.25, 8.0]))
    5.0
    """
    magnitude = _double(values).abs()
    if torch.isnan(magnitude).any():
        return math.nan
    magnitude = magnitude[magnitude > 0]
    return math.log2(float(magnitude.amax())) - math.log2(float(magnitude.amin())) if magnitude.numel() else 0.0


def excess_kurtosis(values: Tensor) -> float:
    """Heaviness of the tails: ``mean((x - m)^4) / mean((x - m)^2)^2 - 3``, with m the mean.

    0 for Gaussian numbers, -1.2 for uniform ones, ``6 / (nu - 4)`` for Student's t with nu > 4 degrees of freedom. The
    larger it is, the sooner the uniform grid of integers loses to floats. NaN if all elements are equal or there are
    none.
    """
    x = _double(values)
    if not x.numel() or float(x.amax()) == float(x.amin()):
        return math.nan
    # Divided by the largest deviation, so that the fourth power neither overflows nor underflows.
    deviation = x - x.mean()
    square = (deviation / deviation.abs().amax()).square()
    return float(square.square().mean() / square.mean().square()) - 3.0


def cosine_similarity(values: Tensor, approximation: Tensor) -> float:
    """``x.q / (|x| |q|)`` of the two tensors as vectors: whether a gradient keeps its direction.

    1 if both are zero, 0 if only one is. Unlike SQNR it ignores a common factor.
    """
    x, q = _pair(values, approximation)
    norms = [float(torch.linalg.vector_norm(tensor)) for tensor in (x, q)]
    if any(math.isnan(norm) for norm in norms):
        return math.nan
    if 0.0 in norms:
        return 1.0 if norms == [0.0, 0.0] else 0.0
    cosine = float(((x / norms[0]) * (q / norms[1])).sum())
    return cosine if math.isnan(cosine) else min(max(cosine, -1.0), 1.0)


def gradient_to_noise(gradient: Tensor, approximation: Tensor) -> float:
    """The norm of a gradient relative to that of its quantisation noise, ``|g| / |q - g|``.

    The sqrt 3 rule (Chmiel et al. 2025, arXiv 2505.19115): as gradients shrink in training and the noise does not, low
    precision stops helping once this falls below :data:`GRADIENT_TO_NOISE_THRESHOLD`, the square root of 3. That the
    noise is measured by its norm over all elements is our reading of their abstract.
    In decibels this is :func:`sqnr`. Infinite without noise, 0 if only the gradient is zero.

    >>> gradient_to_noise(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 6.0]))
    2.5
    """
    x, q = _pair(gradient, approximation)
    norm, noise = float(torch.linalg.vector_norm(x)), float(torch.linalg.vector_norm(q - x))
    if math.isnan(norm) or math.isnan(noise):
        return math.nan
    return norm / noise if noise else math.inf


def _double(values: Tensor) -> Tensor:
    if not isinstance(values, Tensor):
        raise MetricError(f"error metrics take tensors, not {type(values).__name__}: pass torch.as_tensor(...).")
    return values.detach().to(torch.float64)


def _pair(values: Tensor, approximation: Tensor) -> tuple[Tensor, Tensor]:
    x, q = _double(values), _double(approximation)
    _require_same_shape("a tensor", x, "its approximation", q)
    return x, q


def _require_same_shape(name: str, x: Tensor, other_name: str, q: Tensor) -> None:
    if x.shape != q.shape:
        raise MetricError(
            f"{name} of shape {tuple(x.shape)} and {other_name} of shape {tuple(q.shape)} cannot be compared: give "
            f"tensors of the same shape."
        )
