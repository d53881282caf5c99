"""Scales: how a tensor's range is mapped onto a format's, and at what granularity.

With ``amax``, the largest magnitude of the elements that share a scale, and ``fmax``, the format's largest value:

* range ``amax``: ``scale = amax / fmax``, elements ``x / scale``; symmetric integers and floats.
* range ``minmax`` (unsigned integers): ``scale = (max - min) / (2^n - 1)``, elements ``(x - min) / scale``.
  Wolfe & Kyrillidis floor this scale at 1e-8; gradients are often smaller than that, so ours is
  floored at the smallest normal number only.
* power of two: the scale is rounded *up* to one, so that nothing overflows.

No finite value becomes infinite: a scale is limited so that the format's largest value times the scale is finite in
the tensor's dtype, and values beyond saturate. An infinity or NaN makes the scale NaN, and all values that share it.

=========  ===================================================================================
tensor     one scale
channel    one scale per index of `axis`
vector     one scale per vector along `axis`, the axis a product sums over
block      one scale per `block` neighbours along `axis` (the last by default), or per tile of
           `block` = (rows, columns) along the two axes of `axis` (the last two by default)
=========  ===================================================================================

Divisions are correctly rounded everywhere. Two traps are avoided for that: torch on CUDA divides by a Python number by
multiplying with its reciprocal, and Triton's plain division is approximate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from bitplan.compiler.tracing import is_traced
from bitplan.errors import QuantizeError, nearest_names
from bitplan.numerics.dtypes import FLOAT64, carrier_of

Granularity = Literal["tensor", "channel", "vector", "block"]
Range = Literal["amax", "minmax"]
#: The number of neighbours that share a scale: along one axis, or rows and columns of a tile.
BlockShape = int | tuple[int, int]

#: The longest amax history in steps, and the largest margin of a delayed scale as a power of two; beyond that few
#: formats have any values left for the current tensor.
LONGEST_HISTORY, MOST_MARGIN = 32, 16


@dataclass(frozen=True)
class Scaling:
    """Which elements share a scale, and how it is computed."""

    granularity: Granularity
    axis: int | tuple[int, int] | None = None
    block: BlockShape | None = None
    range: Range = "amax"
    power_of_two: bool = False

    def __post_init__(self) -> None:
        granularities = get_args(Granularity)
        if self.granularity not in granularities:
            raise QuantizeError(
                f"there is no scale {self.granularity!r}; {nearest_names(str(self.granularity), granularities)}"
            )
        if self.range not in get_args(Range):
            raise QuantizeError(f"a scale's range is 'amax' or 'minmax', not {self.range!r}.")
        if self.granularity != "block" and self.block is not None:
            raise QuantizeError(f"block= belongs to scale='block', not to {self.granularity!r}.")
        if self.granularity == "channel" and self.axis is None:
            raise QuantizeError("scale='channel' needs axis=, the dimension that keeps one scale per index.")
        if self.granularity == "vector" and self.axis is None:
            raise QuantizeError("scale='vector' needs axis=, the dimension that the product sums over.")
        if self.granularity == "tensor" and self.axis is not None:
            raise QuantizeError("scale='tensor' has one scale and no axis: drop axis=, or use 'channel' or 'vector'.")
        object.__setattr__(self, "block", checked_block(self.block))
        if self.granularity == "block" and self.block is None:
            raise QuantizeError(
                "scale='block' needs block=, how many neighbours share a scale: 128, or tiles of [128, 128]."
            )
        object.__setattr__(self, "axis", checked_axes(self.axis, self.block))


def as_pair(value: Any) -> Any:
    """Two numbers in a list, as plans hold them, as a tuple; everything else as it is."""
    return tuple(value) if isinstance(value, list) else value


def checked_block(block: Any) -> BlockShape | None:
    """`block=` as a number or a pair of numbers; raises unless it is one of them, or None."""
    if block is None:
        return None
    sizes = tuple(block) if isinstance(block, (tuple, list)) else (block,)
    if len(sizes) not in (1, 2) or not all(type(size) is int and size >= 1 for size in sizes):
        raise QuantizeError(
            f"scale='block' needs block=, how many neighbours share a scale: a number from 1 on, or two, rows and "
            f"columns, as in [128, 128]; not {block!r}."
        )
    return (sizes[0], sizes[1]) if len(sizes) == 2 else sizes[0]


def checked_axes(axis: Any, block: BlockShape | None) -> Any:
    """`axis=` of a scale whose blocks are `block`; raises where one has two dimensions and the other has not."""
    is_pair = isinstance(axis, (tuple, list))
    if axis is None or (not is_pair and not isinstance(block, tuple)):
        return axis
    if not is_pair or not isinstance(block, tuple) or len(axis) != 2 or axis[0] == axis[1]:
        raise QuantizeError(
            f"a block of two numbers lies along two axes, as axis=(0, 1), and every other scale along one: axis is "
            f"{axis!r} and block is {block!r}."
        )
    return tuple(axis)


@dataclass(frozen=True)
class Blocks:
    """How a tensor is split into blocks along one axis: moved last, padded with zeros, split in two."""

    axis: int
    size: int

    def split(self, x: Tensor, repeat_last: bool = False) -> Tensor:
        """(..., count, size); a 0-d tensor counts as one element.

        Zeros would widen a min-max range, so there the last element is repeated instead.
        """
        last = x.movedim(self.axis, -1) if x.dim() else x.reshape(1)
        missing = -last.shape[-1] % self.size
        if missing and repeat_last:
            last = torch.cat((last, last[..., -1:].expand(*last.shape[:-1], missing)), -1)
        elif missing:
            last = torch.nn.functional.pad(last, (0, missing))
        return last.reshape(*last.shape[:-1], last.shape[-1] // self.size, self.size)

    def join(self, blocks: Tensor, shape: torch.Size) -> Tensor:
        """The inverse of :meth:`split` for a tensor of that shape."""
        flat = blocks.reshape(*blocks.shape[:-2], blocks.shape[-2] * self.size)
        if is_traced() and not blocks.is_cuda:
            # Inductor's C++ loops skip the ragged rest where they read blocks flattened and cropped in one step (torch
            # 2.11 and 2.13, CppScheduling.try_loop_split); for as_strided it stores the blocks first.
            flat = flat.as_strided(flat.shape, flat.stride())
        if not shape:
            return flat[0]
        return flat[..., : shape[self.axis]].movedim(-1, self.axis)


@dataclass(frozen=True)
class Tiles:
    """How a tensor is split into two-dimensional blocks: two axes moved last, padded with zeros, each split in two."""

    axes: tuple[int, int]
    sizes: tuple[int, int]

    def split(self, x: Tensor, repeat_last: bool = False) -> Tensor:
        """(..., tiles down, tiles across, elements of a tile)."""
        last = x.movedim(self.axes, (-2, -1))
        for axis, size in zip((-2, -1), self.sizes, strict=True):
            missing = -last.shape[axis] % size
            if missing and repeat_last:  # zeros would widen a min-max range
                edge = last.narrow(axis, last.shape[axis] - 1, 1)
                last = torch.cat((last, torch.cat([edge] * missing, axis)), axis)
            elif missing:
                last = torch.nn.functional.pad(last, (0, missing) if axis == -1 else (0, 0, 0, missing))
        (rows, columns), (height, width) = last.shape[-2:], self.sizes
        grid = last.reshape(*last.shape[:-2], rows // height, height, columns // width, width)
        return grid.transpose(-3, -2).reshape(*last.shape[:-2], rows // height, columns // width, height * width)

    def join(self, blocks: Tensor, shape: torch.Size) -> Tensor:
        """The inverse of :meth:`split` for a tensor of that shape."""
        down, across = blocks.shape[-3:-1]
        height, width = self.sizes
        grid = blocks.reshape(*blocks.shape[:-1], height, width).transpose(-3, -2)
        flat = grid.reshape(*blocks.shape[:-3], down * height, across * width)
        if is_traced() and not blocks.is_cuda:
            flat = flat.as_strided(flat.shape, flat.stride())  # see Blocks.join
        rows, columns = (shape[axis] for axis in self.axes)
        return flat[..., :rows, :columns].movedim((-2, -1), self.axes)


def blocks_of(x: Tensor, axis: int | tuple[int, int] | None, block: BlockShape) -> Blocks | Tiles:
    """How `x` is split into blocks, none of which is longer than its axis. A vector is one row of a matrix."""
    if isinstance(block, int) or x.dim() < 2:
        size = block if isinstance(block, int) else block[1]
        along = axis if isinstance(axis, int) else -1
        along = checked_axis(along, x) if x.dim() else 0
        length = x.shape[along] if x.dim() else 1
        return Blocks(along, min(size, max(length, 1)))
    rows, columns = (checked_axis(number, x) for number in (axis if isinstance(axis, tuple) else (-2, -1)))
    if rows == columns:
        raise QuantizeError(f"axis {axis} names one axis of a tensor of shape {tuple(x.shape)} twice: give two axes.")
    height, width = (min(size, max(x.shape[at], 1)) for size, at in zip(block, (rows, columns), strict=True))
    if height == 1:
        return Blocks(columns, width)
    return Blocks(rows, height) if width == 1 else Tiles((rows, columns), (height, width))


def checked_axis(axis: int, x: Tensor) -> int:
    """`axis` as a non-negative number; raises if `x` has no such axis."""
    if not -x.dim() <= axis < x.dim():
        raise QuantizeError(f"axis {axis} does not exist in a tensor of shape {tuple(x.shape)}: it has {x.dim()} axes.")
    return axis % x.dim()


def reduced_dims(x: Tensor, scaling: Scaling) -> tuple[int, ...]:
    """The dimensions whose elements share a scale (blocks already split off)."""
    if scaling.granularity == "block":
        return (x.dim() - 1,)
    if scaling.granularity == "tensor":
        return tuple(range(x.dim()))
    assert isinstance(scaling.axis, int)
    axis = checked_axis(scaling.axis, x)
    return (axis,) if scaling.granularity == "vector" else tuple(d for d in range(x.dim()) if d != axis)


def minmax_scale(
    x: Tensor, steps: float | Tensor, dims: tuple[int, ...], power_of_two: bool, limit: float
) -> tuple[Tensor, Tensor]:
    """The step between two codes and the value of code 0, dimensions kept."""
    low = _least(x, dims)
    # Halves: the difference of two finite numbers may be infinite. Halving is exact.
    return step_scale(_largest(x, dims) * 0.5 - low * 0.5, steps * 0.5, power_of_two, limit * 0.5), low


def step_scale(span: Tensor, steps: float | Tensor, power_of_two: bool, limit: float | None = None) -> Tensor:
    """span / steps, at least the smallest normal number, rounded up to a power of two if `power_of_two`.

    :param limit: what `steps` times the scale must not exceed; then a span that is not finite gives NaN.
    """
    carrier = carrier_of(span)
    tiny = torch.finfo(carrier.dtype).tiny
    scale = divide(span, steps)
    if limit is None:
        scale = scale.clamp_min(tiny)
    elif isinstance(steps, Tensor):
        scale = torch.minimum(scale.clamp_min(tiny), _largest_scale_by_row(steps, limit, power_of_two))
    else:
        scale = scale.clamp(tiny, _largest_scale(steps, limit, power_of_two))
    if power_of_two:
        mantissa = (1 << carrier.mantissa_bits) - 1
        raised = ((scale.view(carrier.int_dtype) + mantissa) & carrier.exponent_mask).view(carrier.dtype)
        return raised.add_(scale if limit is None else span, alpha=0.0)  # NaN stays NaN
    # Infinity times 0 is NaN. Inductor takes `scale + span * 0` for `scale`, but not this.
    return scale if limit is None else scale.add_(span, alpha=0.0)


#: Rounding the scale and its product with an element may each exceed the exact value by half a unit.
_ROUNDING_MARGIN = 1 - 2.0**-20


def _largest_scale(steps: float, limit: float, power_of_two: bool) -> float:
    """The largest scale whose product with `steps` does not exceed `limit`."""
    quotient = min(limit / steps, limit)
    return 2.0 ** (math.frexp(quotient)[1] - 1) if power_of_two else quotient * _ROUNDING_MARGIN


def _largest_scale_by_row(steps: Tensor, limit: float, power_of_two: bool) -> Tensor:
    """As :func:`_largest_scale`, for a format in a tensor."""
    quotient = torch.full_like(steps, limit) / steps
    if not power_of_two:
        return quotient * _ROUNDING_MARGIN
    carrier = carrier_of(quotient)
    return (quotient.view(carrier.int_dtype) & carrier.exponent_mask).view(carrier.dtype)


def largest_finite(dtype: torch.dtype, carrier: torch.dtype) -> float:
    """What a scale times a format's largest value must not exceed, for values of a dtype.

    Not float16's own: a power of two that is limited so would be too small for many ordinary values, so these are
    clamped when they are decoded.
    """
    return float(torch.finfo(torch.bfloat16 if dtype == torch.bfloat16 else carrier).max)


def amax_of(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The amax, dimensions kept."""
    if is_traced():
        return torch.amax(x.abs(), dims, keepdim=True) if dims else x.abs()
    if len(dims) == x.dim():
        least, largest = torch.aminmax(x)
        return torch.maximum(largest, -least).view((1,) * x.dim())
    # Eagerly two reductions read the input twice; one of |x| would write it once and read it twice.
    return torch.maximum(_largest(x, dims), -_least(x, dims))


def _largest(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return torch.amax(x, dims, keepdim=True) if dims else x  # torch takes no dimensions for all of them


def _least(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return torch.amin(x, dims, keepdim=True) if dims else x


def block_amax(blocks: Tensor) -> Tensor:
    """The amax of each block, last dimension kept."""
    return amax_of(blocks, (blocks.dim() - 1,))


def divide(a: Tensor, b: float | Tensor) -> Tensor:
    """The correctly rounded quotient, eager and compiled, on every device.

    Dividing in float64 and rounding to float32 rounds twice, which is harmless: 53 >= 2 * 24 + 2 bits (Figueroa 1995).
    """
    if a.dtype == torch.float64 and a.is_cuda and is_traced() and not isinstance(b, Tensor):
        # Inductor multiplies by the reciprocal of a constant divisor; for float32 the float64 division below is exact.
        b = (a.view(torch.int64) & 0 | FLOAT64.bits_of(b)).view(torch.float64)
    if not isinstance(b, Tensor) and a.device.type == "cpu" and not is_traced():
        return a / b
    divisor = b if isinstance(b, Tensor) else torch.full_like(a, b)
    if a.dtype == torch.float32 and a.is_cuda and is_traced():
        return (a.double() / divisor.double()).float()
    return a / divisor


def steps_above(steps: Tensor, scale: Tensor, low: Tensor) -> Tensor:
    """steps * scale + low, rounded after each operation.

    Triton fuses the product with the addition, which changes nothing where the product is exact: in float64 for float32
    numbers; for float64 ones in two halves, each few enough bits for a count of up to 16.
    """
    if steps.dtype == torch.float32:
        return (steps.double() * scale.double() + low.double()).float()
    upper = (scale.view(torch.int64) & -(1 << 27)).view(torch.float64)
    return (steps * upper + steps * (scale - upper)) + low


def floor_log2(value: float) -> int:
    """The exponent of the largest power of two up to `value`, which is at least 1."""
    exponent = 0
    while 2.0 ** (exponent + 1) <= value:
        exponent += 1
    return exponent


def shared_exponent(blocks: Tensor, element_max_exponent: int) -> Tensor:
    """OCP MX floor rule: floor(log2 amax) - emax as an E8M0 code (exponent + 127; 255 is NaN), one per block.

    Blocks of zeros and of numbers below float32's normals get the least exponent, -127.
    """
    amax = block_amax(blocks)
    carrier = carrier_of(amax)
    exponent = (amax.view(carrier.int_dtype) >> carrier.mantissa_bits) - carrier.exponent_bias
    code = (exponent - element_max_exponent + 127).clamp(0, 254)
    broken = (exponent == carrier.exponent_bias + 1).to(code.dtype)  # infinity or NaN in the block
    return (code + (255 - code) * broken).to(torch.uint8)


def multiply_by_power(x: Tensor, code: Tensor, sign: Literal[1, -1]) -> Tensor:
    """x * 2^(sign * (code - 127)), exactly: in two halves, since 2^-127 and 2^127 are no normal float32 pair."""
    carrier = carrier_of(x)
    exponent = sign * (code.to(carrier.int_dtype) - 127)
    half = exponent >> 1
    first = ((half + carrier.exponent_bias) << carrier.mantissa_bits).view(carrier.dtype)
    second = ((exponent - half + carrier.exponent_bias) << carrier.mantissa_bits).view(carrier.dtype)
    nan = torch.full_like(first, float("nan"))
    return x * torch.where(code == 255, nan, first) * second
