"""Rounding through the GPU's own float8 conversion in one pass, for eager code; imported only where Triton is.

torch has no saturating cast, so eager rounding takes three passes (clamp, cast, cast back): ten bytes per bf16 element
instead of four. With every tensor of a ResNet-50 rounded, a step took 2.2 times as long as without rounding. Compiled
code needs no kernel: Inductor fuses the casts with their neighbours.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitplan.compiler.torch_private import FakeTensor

_BLOCK = 4096
_TRITON_DTYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@triton.jit  # type: ignore[untyped-decorator]
def _through_float8(x, out, count, dtype: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    value = tl.load(x + at, mask=inside).to(tl.float32)
    rounded = value.to(dtype).to(tl.float32)  # saturates, as the hardware's conversion does
    tl.store(out + at, rounded.to(out.dtype.element_ty), mask=inside)


def round_through_float8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x`, which is dense in any memory format, cast to float8 and back."""
    out = torch.empty_like(x)
    if isinstance(x, FakeTensor) or not x.numel():  # estimates need only shapes; an empty grid is an error
        return out
    grid = (triton.cdiv(x.numel(), _BLOCK),)
    with torch.cuda.device(x.device):
        _through_float8[grid](x, out, x.numel(), _TRITON_DTYPES[dtype], _BLOCK, num_warps=8)
    return out
