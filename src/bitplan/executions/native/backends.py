"""GEMM backends: the hardware's low-precision units, the number formats that each multiplies, and how it is called.

A backend multiplies codes and accumulates exactly or in float32; the scales of both operands are multiplied in
afterwards. So the operands are those of emulation, and only the order of accumulation differs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bitplan.compiler.torch_private import int_mm, is_vnni_supported, scaled_grouped_mm, scaled_mm
from bitplan.compiler.tracing import constant_when_traced
from bitplan.numerics.dtypes import TORCH_FLOAT8
from bitplan.numerics.formats import FloatFormat, Format, IntFormat

if TYPE_CHECKING:
    from bitplan.executions.native.gemm import Codes

_E5M2 = FloatFormat(5, 2)
_E4M3 = FloatFormat(4, 3, specials="fn")


class GemmBackend(ABC):
    """One way to multiply low-precision matrices."""

    name: str
    #: Whether it multiplies operands with scales for blocks along the sum, and no others.
    takes_blocks = False

    @abstractmethod
    def code_dtype(self, target: Format) -> torch.dtype | None:
        """The torch dtype of a format's codes; None where the backend does not support the format."""

    @abstractmethod
    def is_available(self, device: torch.device) -> bool:
        """Whether that device has it."""

    @abstractmethod
    def multiply(self, a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], out_dtype: torch.dtype) -> Tensor:
        """``(a @ b)`` of codes (m, k) and (k, n), times their scales: scalars, (m, 1) for `a` or (1, n) for `b`."""

    def supports_formats(self, left: Format, right: Format) -> bool:
        """Whether it multiplies numbers of these two formats."""
        return self.code_dtype(left) is not None and self.code_dtype(right) is not None


class Int8Backend(GemmBackend):
    """8-bit integers, accumulated exactly in 32 bits: CPUs with VNNI, GPUs."""

    name = "int8"

    def code_dtype(self, target: Format) -> torch.dtype | None:
        return torch.int8 if isinstance(target, IntFormat) and not target.affine and target.bits <= 8 else None

    def is_available(self, device: torch.device) -> bool:
        if device.type == "cuda":
            return _capability(device) >= (8, 0)
        return device.type == "cpu" and is_vnni_supported()

    def multiply(self, a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], out_dtype: torch.dtype) -> Tensor:
        if a.is_cuda:  # cuBLAS needs the summed axis innermost in both
            a, b = _row_major(a), _column_major(b)
        accumulated = int_mm(a, b)
        return (accumulated.float() * scales[0] * scales[1]).to(out_dtype)


class Float8Backend(GemmBackend):
    """E4M3 and E5M2, accumulated in float32: NVIDIA GPUs from Ada and Hopper on.

    The tensor cores themselves accumulate with fewer bits than float32 has; every few products the sum is moved to
    float32 registers, which takes time. Fast accumulation leaves that out.
    """

    def __init__(self, fast_accumulation: bool = False) -> None:
        self.name = "fp8, fast accumulation" if fast_accumulation else "fp8"
        self._fast_accumulation = fast_accumulation

    def code_dtype(self, target: Format) -> torch.dtype | None:
        return TORCH_FLOAT8.get(target)

    def is_available(self, device: torch.device) -> bool:
        return device.type == "cuda" and torch.version.hip is None and _capability(device) >= (8, 9)

    def supports_formats(self, left: Format, right: Format) -> bool:
        return super().supports_formats(left, right) and not left == right == _E5M2

    def multiply(self, a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], out_dtype: torch.dtype) -> Tensor:
        scale_a, scale_b = (scale.float() for scale in scales)
        if scale_a.numel() > 1 or scale_b.numel() > 1:  # rowwise or tensorwise scales: cuBLAS takes no mixture
            # By way of vectors: torch calls a transposed row contiguous, but not every GEMM accepts it as such.
            scale_a = scale_a.expand(a.shape[0], 1).reshape(-1).contiguous().unsqueeze(1)
            scale_b = scale_b.expand(1, b.shape[1]).reshape(-1).contiguous().unsqueeze(0)
        else:
            scale_a, scale_b = scale_a.reshape(()), scale_b.reshape(())
        a, b = _row_major(a), _column_major(b)
        fast = self._fast_accumulation
        return scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype, use_fast_accum=fast)


#: The side of the blocks that cuBLAS multiplies.
BLOCK = 128


class Float8BlockBackend(GemmBackend):
    """E4M3 with a scale for 1 x 128 or 128 x 128 values, accumulated in float32 from block to block: Hopper.

    Scales come as the matrices that they form: (m, k / 128) or (m / 128, k / 128) for `a`, (k / 128, n) or
    (k / 128, n / 128) for `b`. cuBLAS multiplies two operands with lines, or one with lines and one with tiles.
    """

    name = "fp8 blocks"
    takes_blocks = True

    def code_dtype(self, target: Format) -> torch.dtype | None:
        return torch.float8_e4m3fn if target == _E4M3 else None

    def is_available(self, device: torch.device) -> bool:
        is_hopper = device.type == "cuda" and torch.version.hip is None and _capability(device) == (9, 0)
        return is_hopper and _cuda_version() >= (12, 9) and hasattr(torch.nn.functional, "scaled_mm")

    def multiply(self, a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], out_dtype: torch.dtype) -> Tensor:
        scale_a, recipe_a = _scale_of_blocks(scales[0], a.shape[0])
        scale_b, recipe_b = _scale_of_blocks(scales[1].t(), b.shape[1])
        result_dtype = torch.float32 if out_dtype == torch.float16 else out_dtype
        product: Tensor = torch.nn.functional.scaled_mm(
            _row_major(a), _column_major(b), scale_a, recipe_a, scale_b, recipe_b, output_dtype=result_dtype
        )
        return product.to(out_dtype)


def _scale_of_blocks(scale: Tensor, rows: int) -> tuple[Tensor, Any]:
    """The scales of an operand with that many rows, whose columns are summed, in the layout that cuBLAS reads.

    Of lines as columns; of tiles with whole groups of four along the sum, transposed.
    """
    types = torch.nn.functional.ScalingType
    if scale.shape[0] == rows:
        return _column_major(scale.float()), types.BlockWise1x128
    missing = -scale.shape[1] % 4
    padded = torch.nn.functional.pad(scale.float(), (0, missing)) if missing else scale.float()
    return _row_major(padded).t(), types.BlockWise128x128


#: All backends; the first that supports both formats is used.
BACKENDS: tuple[GemmBackend, ...] = (Float8Backend(), Int8Backend())
_FAST = Float8Backend(fast_accumulation=True)
BLOCKS = Float8BlockBackend()
#: What a product of blocks takes, for messages.
BLOCKS_NEED = "a Hopper GPU (compute capability 9.0), CUDA 12.9 and torch.nn.functional.scaled_mm"
#: Name of a backend -> name of the one whose measured crossover it has.
CROSSOVER_OF = {BLOCKS.name: "fp8"}
#: Name of a backend -> name of its variant with fast accumulation.
FAST_VARIANTS = {"fp8": _FAST.name}


@constant_when_traced
def multiplies_groups(device: torch.device) -> bool:
    """Whether the device multiplies groups of E4M3 rows, each with a matrix of its own: Hopper does."""
    return device.type == "cuda" and torch.version.hip is None and _capability(device)[0] == 9


@constant_when_traced
def multiplies_attention(device: torch.device) -> bool:
    """Whether the device has the kernel of attention in FP8: Hopper, where Triton is."""
    is_hopper = device.type == "cuda" and torch.version.hip is None and _capability(device)[0] == 9
    return is_hopper and find_spec("triton") is not None


def multiply_groups(left: Codes, right: Codes, ends: Tensor, fast: bool) -> Tensor:
    """Each group of rows of `left` times its matrix of `right` transposed, in bfloat16.

    Codes (rows, k) and (groups, columns, k), with scales that are constant along k.
    """
    a, b = left.values.contiguous(), right.values
    if b.stride(2) != 1 or b.stride(1) < b.shape[2]:
        b = b.contiguous()
    scale_a = left.scale.expand(a.shape[0], 1).reshape(-1).contiguous()
    scale_b = right.scale.expand(*b.shape[:2], 1).squeeze(2).contiguous()
    return _scaled_grouped_mm(a, b.transpose(1, 2), scale_a, scale_b, ends, fast)


def multiply_over_groups(left: Codes, right: Codes, ends: Tensor, fast: bool) -> Tensor:
    """For each group of columns: those of `left` times those of `right` transposed, (groups, m, n) in bfloat16.

    Codes (m, columns) and (n, columns), with scales that are constant along columns. Groups end at multiples of 16, and
    none is empty.
    """
    scale_a, scale_b = (
        codes.scale.expand(codes.values.shape[0], 1).reshape(-1).repeat(len(ends)) for codes in (left, right)
    )
    return _scaled_grouped_mm(left.values.contiguous(), right.values.contiguous().t(), scale_a, scale_b, ends, fast)


def _scaled_grouped_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor, fast: bool) -> Tensor:
    options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": fast}
    return scaled_grouped_mm(a, b, scale_a, scale_b, ends.to(torch.int32), **options)


def backends_of(device: torch.device) -> tuple[GemmBackend, ...]:
    """The backends that a device has."""
    return tuple(backend for backend in BACKENDS if backend.is_available(device))


def backends_with_blocks(device: torch.device) -> tuple[GemmBackend, ...]:
    """The same with the one for scales of blocks, where the device has it."""
    return (*backends_of(device), *((BLOCKS,) if BLOCKS.is_available(device) else ()))


def backend_named(name: str) -> GemmBackend:
    return next(backend for backend in (*BACKENDS, _FAST, BLOCKS) if backend.name == name)


def supports_shape(name: str, device_type: str, shape: tuple[int, int, int]) -> bool:
    """Whether the backend of that name multiplies (m, k) by (k, n) on that type of device; otherwise it is emulated.

    >>> supports_shape("fp8", "cuda", (5, 32, 16)), supports_shape("fp8", "cuda", (32, 5, 16))
    (True, False)
    >>> supports_shape("int8", "cpu", (2, 2, 1))
    True
    """
    m, k, n = shape
    if name == BLOCKS.name:
        return m % 16 == 0 and k % BLOCK == 0 and n % BLOCK == 0
    if device_type != "cuda":
        # For a single-row matrix that is a transposed column, torch's integer GEMM reads wrong memory (2.11 to 2.13).
        return m > 1 and k > 1
    if name in ("fp8", _FAST.name):
        return k % 16 == 0 and n % 16 == 0
    return m > 16 and k % 8 == 0 and n % 8 == 0


def _row_major(a: Tensor) -> Tensor:
    """The same matrix in row-major order, also by its strides.

    torch calls a single row contiguous whatever its row stride is, and passes that stride on to cuBLAS.
    """
    a = a.contiguous()
    return a.as_strided(a.shape, (a.shape[1], 1)) if a.shape[0] == 1 else a


def _column_major(b: Tensor) -> Tensor:
    return _row_major(b.t()).t()


def _cuda_version() -> tuple[int, ...]:
    return tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
