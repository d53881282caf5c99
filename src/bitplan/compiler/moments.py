"""A tensor's float8 codes with the mean and variance of its channels, as one operation of a compiled graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitplan.compiler.kernel_ops import itself, register_kernels

# Defined by hand: torch.library.custom_op checks every result of every call for aliases.
_LIBRARY: Any = torch.library.Library("bitplan", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "coded_moments(Tensor y, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)


def coded_moments(y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, variance, mean) of `y`, (samples, channels, height, width): its values in a float8 type, saturating, and
    of these the moments of each channel, shaped (1, channels, 1, 1), the variance without Bessel's correction."""
    moments: tuple[Tensor, Tensor, Tensor] = torch.ops.bitplan.coded_moments(y, dtype)
    return moments


def plain_coded_moments(y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The reference implementation in plain torch."""
    largest = torch.finfo(dtype).max
    code = y.clamp(-largest, largest).to(dtype)
    var, mean = torch.var_mean(code.float(), (0, 2, 3), correction=0, keepdim=True)
    return code, var, mean


def _on_gpu(y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    if not _is_channels_last(y):
        return plain_coded_moments(y, dtype)
    with torch.cuda.device(y.get_device()):
        return _launched(y, dtype)


def _is_channels_last(y: Tensor, *_: Any) -> bool:
    """Whether the tensor is not empty and has channels last."""
    return y.numel() > 0 and y.is_contiguous(memory_format=torch.channels_last)


def _launched(y: Tensor, dtype: torch.dtype, wrap: Any = itself) -> tuple[Tensor, Tensor, Tensor]:
    from bitplan.compiler.moments_kernel import coded_moments_by_kernel

    return coded_moments_by_kernel(wrap, y, dtype)


def _fake_moments(y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    var = y.new_empty((1, y.shape[1], 1, 1), dtype=torch.float32)
    return torch.empty_like(y, dtype=dtype), var, torch.empty_like(var)


_LIBRARY.impl("coded_moments", plain_coded_moments, "CompositeExplicitAutograd")
_LIBRARY.impl("coded_moments", _on_gpu, "CUDA")
torch.library.register_fake("bitplan::coded_moments", _fake_moments, lib=_LIBRARY)
register_kernels("coded_moments", _launched, _is_channels_last, (__name__, f"{__name__}_kernel"))
