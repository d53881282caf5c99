"""Rounding by torch's own conversions, where one is fast and right to the last bit."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor

from bitplan.numbers.formats import FloatFormat, Overflow
from bitplan.numbers.reference import Rounding
from bitplan.tracing import constant_when_traced, is_traced

#: Formats whose conversion torch has, fast and right to the last bit: on every device, and on CUDA inside the range.
_TORCH_DTYPES = {FloatFormat(8, 7): torch.bfloat16, FloatFormat(5, 10): torch.float16}
_TORCH_FLOAT8 = {FloatFormat(4, 3, specials="fn"): torch.float8_e4m3fn, FloatFormat(5, 2): torch.float8_e5m2}


def round_by_torch(x: Tensor, target: FloatFormat, rounding: Rounding, overflow: Overflow) -> Tensor | None:
    """`x`, of any dtype, rounded by torch's own conversion there and back; None where that is not this rounding.

    Not with 16-bit types under torch.compile: Inductor drops a cast to one and back (seen with torch 2.11 and 2.13).
    """
    if rounding != "nearest" or x.dtype == torch.float64:
        return None
    if overflow == "special" and target in _TORCH_DTYPES and not is_traced():
        return x.to(_TORCH_DTYPES[target], copy=True).to(x.dtype)
    if overflow == "saturate" and x.is_cuda and target in _TORCH_FLOAT8:
        dtype = _TORCH_FLOAT8[target]
        if _converts_float8(x.device):  # saturating, in Triton's code; torch's own cast overflows
            if is_traced():
                return x.to(dtype).to(x.dtype)
            if _is_dense(x):
                from bitplan.numbers.float8_kernel import round_through_float8

                return round_through_float8(x, dtype)
        return None if is_traced() else x.clamp(-target.max, target.max).to(dtype).to(x.dtype)
    return None


def is_cast_small(target: object, device: torch.device) -> bool:
    """Whether rounding to `target` in a graph goes through a tensor of a small type anyway."""
    return target in _TORCH_FLOAT8 and device.type == "cuda" and _converts_float8(device)


@constant_when_traced
def _converts_float8(device: torch.device) -> bool:
    """Whether the GPU has instructions for float8 (NVIDIA's from Ada and Hopper on), and Triton to use them."""
    return _has_float8_units(device)


@cache
def _has_float8_units(device: torch.device) -> bool:
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 9):
        return False
    return importlib.util.find_spec("triton") is not None


def _is_dense(x: Tensor) -> bool:
    return x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))
