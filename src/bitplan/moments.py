"""A tensor's float8 codes with the mean and variance of its channels, as one operation of a compiled graph."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("bitplan::coded_moments", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def coded_moments(y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, variance, mean) of `y`, (samples, channels, height, width): its values in a float8 type, saturating, and
    of these the moments of each channel, shaped (1, channels, 1, 1), the variance without Bessel's correction."""
    if y.is_cuda and y.is_contiguous(memory_format=torch.channels_last) and y.numel():
        from bitplan.moments_kernel import coded_moments_on_gpu

        return coded_moments_on_gpu(y, dtype)
    return plain_coded_moments(y, dtype)


@coded_moments.register_fake
def _(y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    var = y.new_empty((1, y.shape[1], 1, 1), dtype=torch.float32)
    return torch.empty_like(y, dtype=dtype), var, torch.empty_like(var)


def plain_coded_moments(y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The same by plain operations, to read and to compare with."""
    largest = torch.finfo(dtype).max
    code = y.clamp(-largest, largest).to(dtype)
    var, mean = torch.var_mean(code.float(), (0, 2, 3), correction=0, keepdim=True)
    return code, var, mean
