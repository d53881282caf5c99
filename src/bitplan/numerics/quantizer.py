"""A quantizer: a format, a rounding and a scaling, applied to tensors.

It has two halves, which packing uses, too: :meth:`Quantizer.encode` returns the elements on the format's grid and their
scales, and :meth:`Quantizer.decode` multiplies them. ``quantize`` is one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from bitplan.compiler.tracing import (
    below_autograd,
    is_traced,
    is_traced_below_dynamo,
    needs_shapes_only,
    transformable,
)
from bitplan.errors import FormatError, QuantizeError, nearest_names
from bitplan.numerics import chunks
from bitplan.numerics.codebook import round_to_book
from bitplan.numerics.dtypes import TORCH_FLOAT8, carrier_for, round_by_torch
from bitplan.numerics.formats import (
    BlockFormat,
    CodebookFormat,
    ElementFormat,
    FloatFormat,
    Format,
    IntFormat,
    Overflow,
    get_format,
)
from bitplan.numerics.mutable_format import MutableFormat
from bitplan.numerics.noise import Counter, random_bits
from bitplan.numerics.reference import ROUNDINGS, Rounding
from bitplan.numerics.rounding import round_float, round_float_by_row, round_int, round_to_whole
from bitplan.numerics.scaling import (
    Blocks,
    BlockShape,
    Granularity,
    Range,
    Scaling,
    Tiles,
    amax_of,
    as_pair,
    block_amax,
    blocks_of,
    checked_axes,
    checked_block,
    divide,
    floor_log2,
    largest_finite,
    minmax_scale,
    multiply_by_power,
    reduced_dims,
    shared_exponent,
    step_scale,
    steps_above,
)

# --- Straight-through rounding


class Encoded(NamedTuple):
    """Elements on the grid, in the carrier's dtype and possibly split into blocks, with their scales."""

    elements: Tensor
    #: Nothing, (scale,), (scale, minimum), (E8M0 codes,) or (block scales, tensor scale), by the kind of quantizer.
    scales: tuple[Tensor, ...]


#: The range of a ``tensor`` scale that does not come from the tensor: the least and the largest value, to which values
#: are clamped; or the amax of past steps, beyond which values overflow, and which is 0 before the first step.
Span = tuple[Tensor, Tensor] | Tensor

#: Called between encoding and decoding: observes the elements and scales, or stores them.
Between = Callable[[Encoded], Encoded]


class RoundsValues(Protocol):
    """A quantizer for :func:`straight_through`."""

    def round_values(
        self,
        x: Tensor,
        bits: Tensor | None,
        row: Tensor | None = None,
        span: Span | None = None,
        between: Between | None = None,
    ) -> Tensor: ...


def straight_through(
    quantizer: RoundsValues,
    x: Tensor,
    bits: Tensor | None,
    row: Tensor | None = None,
    span: Span | None = None,
    between: Between | None = None,
) -> Tensor:
    """The rounded `x`; its gradient passes through unchanged."""
    if x.requires_grad and torch.is_grad_enabled():
        straight: Tensor = transformable(StraightThrough).apply(x, quantizer, bits, row, span, between)
        return straight
    return quantizer.round_values(x.detach(), bits, row, span, between)


class StraightThrough(torch.autograd.Function):
    """The rounded value forward, the gradient unchanged backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        quantizer: RoundsValues,
        bits: Tensor | None,
        row: Tensor | None,
        span: Span | None,
        between: Between | None,
    ) -> Tensor:
        return quantizer.round_values(x, bits, row, span, between)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        return grads[0], None, None, None, None, None


# --- Elements of a format, and blocks of them that share scales


_E4M3 = FloatFormat(4, 3, specials="fn")


def round_element(
    t: Tensor,
    target: ElementFormat,
    rounding: Rounding,
    overflow: Overflow | None,
    bits: Tensor | None,
    is_bounded: bool = False,
) -> Tensor:
    """`t`, already divided by its scale, rounded to the grid of `target`; `bits` are those of stochastic rounding.

    :param is_bounded: whether no magnitude is above the format's largest value by more than an error of the division.
    """
    if isinstance(target, IntFormat):
        return round_int(t, target, rounding, bits) + 0.0  # an integer has no negative zero
    if isinstance(target, CodebookFormat):
        return round_to_book(t, target, rounding, bits)
    return round_float(t, target, rounding, overflow or target.default_overflow, bits, is_bounded)


def encode_block(blocks: Tensor, target: BlockFormat, rounding: Rounding, bits: Tensor | None, limit: float) -> Encoded:
    """Elements and scales of values in blocks along the last axis.

    ``e8m0`` scales are powers of two (OCP MX); E4M3 scales come with one float for the whole tensor (NVFP4).

    :param limit: the largest value that a float may have.
    """
    scales: tuple[Tensor, ...]
    if target.scale == "e8m0":
        codes = shared_exponent(blocks, floor_log2(target.element_max))
        scales = (codes,)
        ready = multiply_by_power(blocks, codes, -1) * (1.0 / target.unit)
    else:
        amax = block_amax(blocks)
        tensor_scale = step_scale(amax.amax().reshape(1), 448.0 * target.element_max, power_of_two=False, limit=limit)
        block_scale = divide(amax, tensor_scale * target.element_max)
        scales = (round_float(block_scale, _E4M3, "nearest", "saturate"), tensor_scale)
        effective = scales[0] * tensor_scale
        # A block whose scale underflows becomes zeros.
        ready = divide(blocks, torch.where(effective == 0, torch.inf, effective))
    return Encoded(round_element(ready, target.element, rounding, "saturate", bits), scales)


def decode_block(elements: Tensor, scales: tuple[Tensor, ...], target: BlockFormat) -> Tensor:
    """The values, still in blocks."""
    if target.scale == "e8m0":
        return multiply_by_power(elements * target.unit, scales[0], 1)
    return elements * (scales[0] * scales[1])


_IS_2_11 = torch.__version__.startswith("2.11.")
#: From this size on, rounding a scaled tensor in chunks is faster on a CPU: on two EPYC cores two to five times as fast
#: at 2^24 elements, no faster at 2^20, half as fast at 2^17.
_LARGE_ON_CPU = 1 << 21

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Quantizer:
    """How a tensor is rounded: validated when created, without state.

    `axis` is that of a block format's blocks, and `block` their shape where it is not the format's own; other scales
    have their own.
    """

    format: Format | MutableFormat
    rounding: Rounding = "nearest"
    scaling: Scaling | None = None
    overflow: Overflow | None = None
    axis: int | tuple[int, int] | None = None
    block: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.rounding not in ROUNDINGS:
            raise QuantizeError(
                f"there is no rounding {self.rounding!r}; {nearest_names(str(self.rounding), ROUNDINGS)}"
            )
        if self.overflow not in (None, "saturate", "special"):
            raise QuantizeError(f"overflow is 'saturate' or 'special', not {self.overflow!r}.")
        affine = self._is_affine
        if isinstance(self.format, BlockFormat):
            if self.scaling is not None:
                raise QuantizeError(f"{self.format.name} brings its own block scales: drop scale=.")
        elif self.scaling is None:
            if affine:
                raise QuantizeError(f"{self._name} counts steps above a minimum: give it scale='tensor' or another.")
        elif affine and self.scaling.range != "minmax":
            object.__setattr__(self, "scaling", replace(self.scaling, range="minmax"))
        elif self.scaling.range == "minmax" and not affine:
            if not isinstance(self.format, IntFormat):
                instead = "make a uint live instead" if self.format.kind == "int" else "use range='amax'"
                raise QuantizeError(f"a min-max range serves integer formats, not {self._name}: {instead}.")
            object.__setattr__(self, "format", IntFormat(self.format.bits, affine=True))
        if self.overflow == "special" and not isinstance(self.format, (FloatFormat, MutableFormat)):
            raise QuantizeError(f"{self._name} has no special codes to overflow to: use overflow='saturate'.")
        if isinstance(self.format, MutableFormat) and self.overflow is not None:
            raise QuantizeError("a live format carries its own overflow: give it to MutableFormat instead.")
        if self.axis is not None and not isinstance(self.format, BlockFormat):
            raise QuantizeError("axis= goes with a scale: give scale='channel', 'vector' or 'block' too.")
        if self.block is not None:
            if not isinstance(self.format, BlockFormat):
                raise QuantizeError("block= describes a scale: give scale='block' too.")
            if not isinstance(checked_block(self.block), tuple):
                raise QuantizeError(
                    f"{self._name} has blocks of {self.format.size}: drop block=, or give it two numbers, rows and "
                    f"columns, such as [{self.format.size}, {self.format.size}]."
                )
            object.__setattr__(self, "block", checked_block(self.block))
        object.__setattr__(self, "axis", checked_axes(self.axis, self.block))

    @property
    def _is_affine(self) -> bool:
        return isinstance(self.format, (IntFormat, MutableFormat)) and self.format.affine

    @property
    def _is_float8(self) -> bool:
        """Whether GPU kernels compute the same scales, which they do not limit: only powers of two would need it."""
        return isinstance(self.format, FloatFormat) and self.format in TORCH_FLOAT8

    @property
    def _name(self) -> str:
        return f"a live {self.format.kind}" if isinstance(self.format, MutableFormat) else self.format.name

    def quantize(self, x: Tensor, *, seed: Counter | None = None, step: Counter = 0, site: Counter = 0) -> Tensor:
        """`x` rounded, in its own dtype, shape, memory order and device; the gradient passes straight through."""
        self.check(x)
        return straight_through(self, x, self.noise(x, seed, step, site))

    def round_values(
        self,
        x: Tensor,
        bits: Tensor | None,
        row: Tensor | None = None,
        span: Span | None = None,
        between: Between | None = None,
    ) -> Tensor:
        """As :meth:`quantize`, with given random bits, without checks and without a gradient.

        :param between: called with the elements and scales between encoding and decoding; once per chunk of a large
            tensor.
        """
        if not x.numel():
            return x.clone()
        if is_traced_below_dynamo():
            if needs_shapes_only(x):
                return torch.empty_like(x)
            with below_autograd():  # otherwise autograd adds a node to the graph for every view
                return self._round_values(x, bits, row, span, between)
        return self._round_values(with_plain_bits(x), bits, row, span, between)

    def _round_values(
        self, x: Tensor, bits: Tensor | None, row: Tensor | None, span: Span | None, between: Between | None
    ) -> Tensor:
        if self.scaling is None and isinstance(self.format, FloatFormat):
            by_torch = round_by_torch(x, self.format, self.rounding, self.overflow or self.format.default_overflow)
            if by_torch is not None:
                return _in_layout_of(x, by_torch)
        if bits is None and not is_traced() and self._gains_by_chunks(x):
            return self._round_in_chunks(x, row, span, between)
        encoded = self.encode(x, bits, row, span)
        rounded = self.decode(encoded if between is None else between(encoded), x)
        is_new = self.scaling is not None and self.scaling.granularity != "block"  # a product with the scale
        if is_new or not is_traced():
            return rounded
        # torch 2.11 drops the gradient of an autograd function whose result was modified in place; a clone, which
        # Inductor removes, was not modified. Its CPU convolutions reject a bias that is a view of another dtype; the
        # result of a clamp without effect is no view.
        return rounded.clamp(max=torch.inf) if _IS_2_11 and not x.is_cuda else rounded.clone()

    def check(self, x: Tensor) -> None:
        """Raise an error if this quantizer cannot round `x`."""
        if not isinstance(x, Tensor) or x.dtype not in _DTYPES:
            actual = x.dtype if isinstance(x, Tensor) else type(x).__name__
            advice = "convert it by .float()" if isinstance(x, Tensor) else "make it one by torch.tensor()"
            raise QuantizeError(
                f"only float32, bfloat16, float16 and float64 tensors can be rounded, not {actual}: {advice}."
            )
        if not is_traced() and (x.layout != torch.strided or x.is_nested):
            layout = "nested" if x.is_nested else str(x.layout).removeprefix("torch.").strip("_")
            raise QuantizeError(f"only dense tensors can be rounded, not {layout} ones: round their values or a copy.")
        if isinstance(self.format, MutableFormat):
            if (x.dtype == torch.float64) != (self.format.carrier.dtype == torch.float64):
                raise QuantizeError(f"this live format was made for other inputs: make it with dtype={x.dtype}.")
        elif not isinstance(self.format, BlockFormat):
            require_range = _require_range if is_traced() else _require_range_once
            require_range(self.format, x.dtype, self.scaling is not None)

    def max_magnitude(self, row: Tensor | None = None) -> float | Tensor:
        """The largest representable magnitude of unscaled values; infinite with a scale."""
        if self.scaling is not None or isinstance(self.format, BlockFormat):
            return float("inf")
        return self._largest(row)

    def _largest(self, row: Tensor | None) -> float | Tensor:
        """The format's largest value, by its row in a table where it is mutable."""
        assert not isinstance(self.format, BlockFormat)
        return self.format.max if row is None or not isinstance(self.format, MutableFormat) else self.format.max_in(row)

    def overflow_threshold(self, row: Tensor | None = None) -> float | Tensor:
        """The magnitude from which on unscaled values overflow; infinite with a scale."""
        if self.scaling is not None or isinstance(self.format, BlockFormat):
            return float("inf")
        if row is None or not isinstance(self.format, MutableFormat):
            assert not isinstance(self.format, MutableFormat)
            return self.format.overflow_threshold
        return self.format.overflow_threshold_in(row)

    def max_delayed_magnitude(self, span: Tensor, row: Tensor | None = None) -> Tensor:
        """The largest representable magnitude with a delayed scale; infinite before the first step."""
        assert self.scaling is not None
        largest = self._largest(row)
        scale = step_scale(span.float(), largest, self.scaling.power_of_two)
        return torch.where(span > 0, scale * largest, torch.inf)

    def noise(self, x: Tensor, seed: Counter | None, step: Counter, site: Counter) -> Tensor | None:
        """The random bits of a call; without a seed, one is drawn from torch's generator."""
        if self.rounding != "stochastic":
            return None
        if seed is None:
            seed = torch.randint(0, 1 << 31, (), device=x.device, dtype=torch.int32)
        return random_bits(x, seed, step, site)

    def encode(
        self,
        x: Tensor,
        bits: Tensor | None = None,
        row: Tensor | None = None,
        span: Span | None = None,
    ) -> Encoded:
        """The first half: elements and scales.

        :param row: replaces a live format's own row.
        :param span: the range of a ``tensor`` scale, if it does not come from `x`.
        """
        work = x.to(self._carrier_dtype(x))
        blocks = self.blocks(x)
        if blocks is not None:
            work = blocks.split(work, repeat_last=self._is_affine)
            bits = None if bits is None else blocks.split(bits)
        if isinstance(self.format, BlockFormat):
            return encode_block(work, self.format, self.rounding, bits, largest_finite(x.dtype, work.dtype))
        scales = self._scales(work, row, span, x.dtype)
        return Encoded(self._elements(work, scales, bits, row, span), scales)

    def _scales(self, work: Tensor, row: Tensor | None, span: Span | None, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Nothing, (scale,) or (scale, minimum) for values in the carrier's dtype, dimensions kept.

        :param dtype: that of the result.
        """
        if self.scaling is None:
            return ()
        largest = self._largest(row)
        limit = largest_finite(dtype, work.dtype)
        amax_limit = None if self._is_float8 and work.dtype == torch.float32 else limit
        power_of_two = self.scaling.power_of_two
        if isinstance(span, Tensor):
            current = amax_of(work, tuple(range(work.dim())))
            amax = torch.where(span > 0, span.to(current.dtype), current)
            return (step_scale(amax, largest, power_of_two, amax_limit),)
        shape = (1,) * work.dim()
        if span is not None:
            work = torch.stack(span).to(work.dtype).view(2, *shape)
        dims = reduced_dims(work, self.scaling) if span is None else (0,)
        scales: tuple[Tensor, ...]
        if self._is_affine:
            scales = minmax_scale(work, largest, dims, power_of_two, limit)
        else:
            scales = (step_scale(amax_of(work, dims), largest, power_of_two, amax_limit),)
        return scales if span is None else tuple(scale.view(shape) for scale in scales)

    def _elements(
        self, work: Tensor, scales: tuple[Tensor, ...], bits: Tensor | None, row: Tensor | None, span: Span | None
    ) -> Tensor:
        if span is not None and not isinstance(span, Tensor):
            work = torch.minimum(torch.maximum(work, span[0]), span[1])
        if len(scales) == 2:
            work = work - scales[1]
        ready = divide(work, scales[0]) if scales else work
        if isinstance(self.format, (FloatFormat, IntFormat, CodebookFormat)):
            # A scale that comes from these values and is not limited takes none of them above the largest value.
            is_bounded = self._is_float8 and len(scales) > 0 and span is None and work.dtype == torch.float32
            return round_element(ready, self.format, self.rounding, self.overflow, bits, is_bounded)
        return self._round_to_row(ready, bits, row)

    # --- Large tensors, eager

    def _gains_by_chunks(self, x: Tensor) -> bool:
        """Whether a large tensor is faster in chunks; roundings of one operation are chunked by that operation."""
        is_large = x.is_cuda or x.numel() >= _LARGE_ON_CPU
        if isinstance(self.format, BlockFormat) or not is_large or chunks.chunk_size_of(x) == x.numel():
            return False
        if self.scaling is not None:
            return self.scaling.granularity == "tensor"
        return isinstance(self.format, MutableFormat) or x.dtype != self._carrier_dtype(x)

    def _round_in_chunks(self, x: Tensor, row: Tensor | None, span: Span | None, between: Between | None) -> Tensor:
        """As :meth:`round_values`; a tensor scale depends only on the least and the largest value."""
        carrier, result = self._carrier_dtype(x), torch.empty_like(x)
        extremes = (
            torch.stack(torch.aminmax(x)).to(carrier) if self.scaling is not None else x.new_empty(0, dtype=carrier)
        )
        single = tuple(scale.reshape(()) for scale in self._scales(extremes, row, span, x.dtype))
        scales = tuple(scale.reshape((1,) * x.dim()) for scale in single)
        pairs = tuple(chunks.paired_chunks(x, result))
        with chunks.unchunked():
            for chunk, rounded in pairs:
                elements = self._elements(chunk.to(carrier), single, None, row, span)
                if between is not None:
                    elements = between(Encoded(elements, scales)).elements
                rounded.copy_(self.decode(Encoded(elements, single), chunk))
        return result

    def decode(self, encoded: Encoded, like: Tensor) -> Tensor:
        """The second half: values in the dtype, shape and layout of `like` (which may be a meta tensor)."""
        elements, scales = encoded
        if isinstance(self.format, BlockFormat):
            values = decode_block(elements, scales, self.format)
        elif not scales:
            values = elements
        elif self._is_affine:
            values = steps_above(elements, *scales)
        else:
            values = elements * scales[0]
        blocks = self.blocks(like)
        if blocks is not None:
            values = blocks.join(values, like.shape)
        if self._may_exceed(like.dtype):
            largest = torch.finfo(like.dtype).max
            values = values.clamp(-largest, largest) if is_traced() else values.clamp_(-largest, largest)
        values = values.to(like.dtype)
        if blocks is not None and values.stride() == like.stride() and not is_traced():
            return values.clone()  # joined blocks are a view, which autograd lets nobody write into
        return _in_layout_of(like, values)

    def _may_exceed(self, dtype: torch.dtype) -> bool:
        """Whether a finite value may be decoded to more than the dtype's largest value: see :func:`largest_finite`.

        Not where a float may overflow to infinity, which must stay.
        """
        if self._is_affine:
            return True
        if self.scaling is None or not self.scaling.power_of_two or not (self._is_float8 or dtype == torch.float16):
            return False
        if isinstance(self.format, FloatFormat):
            return (self.overflow or self.format.default_overflow) == "saturate"
        return isinstance(self.format, IntFormat) or self.format.kind == "int"

    def blocks(self, x: Tensor) -> Blocks | Tiles | None:
        """How `x` is split into blocks; None without blocks. A block is not longer than its axis."""
        if isinstance(self.format, BlockFormat):
            return blocks_of(x, self.axis, self.block if self.block and x.dim() > 1 else self.format.size)
        if self.scaling is not None and self.scaling.granularity == "block":
            return blocks_of(x, self.scaling.axis, self.scaling.block or 1)
        return None

    def _carrier_dtype(self, x: Tensor) -> torch.dtype:
        if isinstance(self.format, MutableFormat):
            return self.format.carrier.dtype
        element = self.format.element if isinstance(self.format, BlockFormat) else self.format
        carrier = carrier_for if is_traced() else _carrier_for_once
        return carrier(x.dtype, element, self.rounding).dtype

    def _round_to_row(self, t: Tensor, bits: Tensor | None, row: Tensor | None = None) -> Tensor:
        """`t` rounded to the grid of a live format."""
        assert isinstance(self.format, MutableFormat)
        row = self.format.row if row is None else row
        if self.format.kind == "float":
            return round_float_by_row(t, row, self.rounding, bits)
        low, high = row[0], row[1]
        return torch.minimum(torch.maximum(round_to_whole(t, self.rounding, bits), low), high) + 0.0


def with_plain_bits(x: Tensor) -> Tensor:
    """`x`, copied where it is a view such as ``c.conj().imag``, which negates the bits in memory when it is read."""
    return x if is_traced() or not x.is_neg() else x.resolve_neg()


def _in_layout_of(like: Tensor, values: Tensor) -> Tensor:
    if values.stride() == like.stride():
        return values
    # empty_like of a meta tensor would not keep the strides of axes of length one.
    own = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=values.device)
    copy = (own if like.is_meta else torch.empty_like(like)).copy_(values)
    return copy.clone() if is_traced() else copy  # see Quantizer._round_values


def _require_range(target: ElementFormat, dtype: torch.dtype, scaled: bool) -> None:
    info = torch.finfo(dtype)
    if isinstance(target, IntFormat):
        fits = target.max <= 2.0 / info.eps
    elif isinstance(target, CodebookFormat):
        # With a scale, neighbours must stay apart when their products with it are rounded to the dtype.
        pairs = pairwise(target.book)
        fits = all(high - low >= 2 * info.eps * max(abs(low), abs(high)) for low, high in pairs) and (
            scaled or all(torch.tensor(value, dtype=dtype).item() == value for value in target.book)
        )
    else:
        smallest = info.smallest_normal * info.eps
        in_range = scaled or (target.max <= info.max and target.min_subnormal >= smallest)
        fits = target.epsilon >= info.eps and in_range
    if not fits:
        raise FormatError(f"{dtype} cannot hold the values of {target.name}: convert the tensor to a wider type first.")


#: Cached for eager calls on small tensors, which notice every microsecond; torch.compile warns of caches.
_require_range_once = lru_cache(maxsize=1024)(_require_range)
_carrier_for_once = lru_cache(maxsize=1024)(carrier_for)


def make_quantizer(
    format: str | Format | MutableFormat,
    rounding: Rounding = "nearest",
    scale: Granularity | Scaling | None = None,
    *,
    axis: int | tuple[int, int] | None = None,
    block: BlockShape | None = None,
    range: Range | None = None,
    power_of_two: bool = False,
    overflow: Overflow | None = None,
) -> Quantizer:
    """The :class:`Quantizer` of the arguments of :func:`quantize`."""
    target = format if isinstance(format, MutableFormat) else get_format(format)
    if scale is None and block is not None and isinstance(target, BlockFormat):
        if range is not None or power_of_two:
            raise QuantizeError(f"{target.name} brings its own block scales: drop range= and power_of_two=.")
        return Quantizer(target, rounding, None, overflow, axis, block)  # type: ignore[arg-type]  # it checks block
    if scale is None:
        if block is not None or range is not None or power_of_two:
            raise QuantizeError("block=, range= and power_of_two= describe a scale: give scale= too.")
        return Quantizer(target, rounding, None, overflow, axis)
    if isinstance(scale, Scaling):
        if axis is not None or block is not None or range is not None or power_of_two:
            raise QuantizeError("a Scaling says all about the scale: drop axis=, block=, range= and power_of_two=.")
        scaling = scale
    else:
        scaling = Scaling(scale, axis, block, range or "amax", power_of_two)
    return Quantizer(target, rounding, scaling, overflow)


_make_quantizer_once = lru_cache(maxsize=1024)(make_quantizer)


def quantize(
    x: Tensor,
    format: str | Format | MutableFormat,
    rounding: Rounding = "nearest",
    scale: Granularity | Scaling | None = None,
    seed: Counter | None = None,
    *,
    axis: int | tuple[int, int] | None = None,
    block: BlockShape | None = None,
    range: Range | None = None,
    power_of_two: bool = False,
    overflow: Overflow | None = None,
    step: Counter = 0,
    site: Counter = 0,
) -> Tensor:
    """`x` rounded to `format`, in its own dtype, shape and device. The gradient is straight-through.

    The result has the strides of `x` where `x` fills its memory without gaps (channels last, transposed). Otherwise it
    is a dense tensor in the same memory order.

    :param format: a name (:func:`bitplan.get_format`), a format, or a :class:`MutableFormat`.
    :param rounding: ``nearest`` (ties to even), ``nearest-away``, ``toward-zero`` or ``stochastic``.
    :param scale: None, ``tensor``, ``channel`` (with `axis`), ``vector`` (with `axis`), ``block`` (with `block`).
    :param block: how many neighbours along `axis` share a scale; or two numbers, rows and columns of a tile along the
        last two axes, or along the two of `axis`. Block formats take two numbers, too.
    :param range: ``amax`` (the default), or ``minmax`` for integers: 2^n - 1 steps from the least value to the largest.
    :param power_of_two: round the scale up to a power of two.
    :param overflow: ``saturate`` or ``special``; None is the format's own default.
    :param seed: with `step` and `site` decides stochastic rounding, the same on every device, eager and compiled.
        Without a seed one is drawn from torch's generator at each call.

    >>> quantize(torch.tensor([1.0, 1.06, 500.0]), "e4m3")
    tensor([  1.,   1., 448.])
    """
    make = make_quantizer if is_traced() or not isinstance(format, str) else _make_quantizer_once
    quantizer = make(
        format,
        rounding,
        scale,
        axis=as_pair(axis),
        block=as_pair(block),
        range=range,
        power_of_two=power_of_two,
        overflow=overflow,
    )
    return quantizer.quantize(x, seed=seed, step=step, site=site)
