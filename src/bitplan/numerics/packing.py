"""Packed tensors: the values of :func:`bitplan.quantize`, stored in the format's own number of bits.

Every element becomes its code, and codes of 1 to 16 bits are stored without gaps. Without block or channel scales they
are in the tensor's memory order, so that a channels-last tensor is not permuted twice; otherwise in row-major order.
Scales are stored separately.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from bitplan.compiler.torch_private import FakeTensor
from bitplan.compiler.tracing import is_traced
from bitplan.errors import QuantizeError
from bitplan.numerics import chunks
from bitplan.numerics.codebook import codes_of_values, values_of_codes
from bitplan.numerics.dtypes import FLOAT32, carrier_of
from bitplan.numerics.formats import (
    BlockFormat,
    CodebookFormat,
    ElementFormat,
    FloatFormat,
    Format,
    IntFormat,
    Overflow,
)
from bitplan.numerics.mutable_format import MutableFormat
from bitplan.numerics.noise import Counter
from bitplan.numerics.quantizer import Encoded, Quantizer, make_quantizer, round_element, with_plain_bits
from bitplan.numerics.reference import Rounding
from bitplan.numerics.rounding import round_float, round_int
from bitplan.numerics.scaling import BlockShape, Granularity, Range, Scaling, divide, multiply_by_power

# --- Codes of any width in bytes, without gaps


#: The widest code that can be packed.
MAX_PACKED_BITS = 16


def is_smaller(target: Format, dtype: torch.dtype) -> bool:
    """Whether the format's own bits are fewer than those of `dtype`."""
    return target.bits <= MAX_PACKED_BITS and target.bits_per_value < dtype.itemsize * 8


def pack_bits(codes: Tensor, width: int) -> Tensor:
    """A flat tensor of codes below 2^width as bytes without gaps."""
    _require_width(width)
    if width == 8:
        return codes.to(torch.uint8)
    group, bytes_per_group = _grouping(width)
    count = codes.numel()
    wide = codes.to(torch.int32)
    if missing := -count % group:
        wide = torch.nn.functional.pad(wide, (0, missing))
    columns = wide.view(-1, group).unbind(1)
    packed = [_byte(columns, byte, width) for byte in range(bytes_per_group)]
    payload = torch.stack(packed, 1).flatten()
    size = (count * width + 7) // 8
    return payload if payload.numel() == size else payload[:size].clone()


def unpack_bits(payload: Tensor, width: int, count: int) -> Tensor:
    """The first `count` codes of :func:`pack_bits`, as int32."""
    _require_width(width)
    if width == 8:
        return payload[:count].to(torch.int32)
    group, bytes_per_group = _grouping(width)
    if missing := -payload.numel() % bytes_per_group:
        payload = torch.nn.functional.pad(payload, (0, missing))
    columns = payload.view(-1, bytes_per_group).to(torch.int32).unbind(1)
    codes = [_code(columns, index, width) for index in range(group)]
    return torch.stack(codes, 1).flatten()[:count]


def _grouping(width: int) -> tuple[int, int]:
    """The least number of codes that fill whole bytes, and how many bytes."""
    common = math.gcd(width, 8)
    return 8 // common, width // common


def _byte(codes: tuple[Tensor, ...], byte: int, width: int) -> Tensor:
    """Byte `byte` of every group: all codes that overlap it, shifted into position."""
    parts = [
        codes[i] << (i * width - 8 * byte) if i * width >= 8 * byte else codes[i] >> (8 * byte - i * width)
        for i in range(len(codes))
        if i * width < 8 * byte + 8 and (i + 1) * width > 8 * byte
    ]
    return (reduce(operator.or_, parts) & 255).to(torch.uint8)


def _code(columns: tuple[Tensor, ...], index: int, width: int) -> Tensor:
    """Code `index` of every group, from the bytes that it overlaps."""
    first = index * width
    parts = [
        columns[byte] << (8 * byte - first) if 8 * byte >= first else columns[byte] >> (first - 8 * byte)
        for byte in range(first // 8, (first + width + 7) // 8)
    ]
    return reduce(operator.or_, parts) & ((1 << width) - 1)


def _require_width(width: int) -> None:
    if not 1 <= width <= MAX_PACKED_BITS:
        raise QuantizeError(f"codes of 1 to {MAX_PACKED_BITS} bits can be packed, not of {width}.")


# --- Codes: values of a format as bit patterns, and back


def encode(elements: Tensor, target: ElementFormat) -> Tensor:
    """Numbers on the grid of `target` as int32 codes."""
    if isinstance(target, IntFormat):
        mask = (1 << target.bits) - 1
        codes = torch.nan_to_num(elements).to(torch.int32) & mask
        return codes if target.affine else torch.where(elements.isnan(), 1 << (target.bits - 1), codes)
    if isinstance(target, CodebookFormat):
        return codes_of_values(elements, target)
    carrier = carrier_of(elements)
    source = elements.view(carrier.int_dtype)
    cut = carrier.mantissa_bits - target.mantissa_bits
    below_first = (target.min_exponent + carrier.exponent_bias - 1) << target.mantissa_bits
    codes = ((source & ~carrier.sign_bit) >> cut) - below_first
    if target.min_exponent > carrier.min_exponent or not target.subnormals:
        steps = elements.abs() * (1.0 / target.min_subnormal if target.subnormals else 0.0)
        codes = torch.where(elements.abs() < target.min_normal, torch.nan_to_num(steps, 0, 0).to(codes.dtype), codes)
    codes = torch.where(elements.isinf(), _infinity_code(target), codes)
    codes = torch.where(elements.isnan(), _nan_code(target), codes)
    return (codes | (source < 0).to(codes.dtype) << (target.bits - 1)).to(torch.int32)


def decode(codes: Tensor, target: ElementFormat, dtype: torch.dtype) -> Tensor:
    """The values of codes of `target`; eager code looks up floats in a table."""
    return decoder(target, dtype, codes.device)(codes)


def decoder(target: ElementFormat, dtype: torch.dtype, device: torch.device) -> Callable[[Tensor], Tensor]:
    """As :func:`decode`, for many tensors of one format: the table is made once."""
    if is_traced() or not isinstance(target, FloatFormat):
        return lambda codes: decode_without_table(codes.to(torch.int32), target, dtype)
    table = decode_without_table(torch.arange(1 << target.bits, dtype=torch.int32, device=device), target, dtype)
    return lambda codes: table[codes.to(torch.int32)]


def decode_without_table(codes: Tensor, target: ElementFormat, dtype: torch.dtype) -> Tensor:
    """As :func:`decode`, each value computed from its int32 code, as in compiled graphs."""
    if isinstance(target, IntFormat):
        if target.affine:
            return codes.to(dtype)
        half = 1 << (target.bits - 1)
        return torch.where(codes == half, math.nan, ((codes ^ half) - half).to(dtype))
    if isinstance(target, CodebookFormat):
        return values_of_codes(codes, target, dtype)
    if dtype == torch.float32 and target.min_exponent >= FLOAT32.min_exponent and target.max <= FLOAT32.max:
        return _decode_by_bits(codes, target)
    magnitude = codes & ((1 << (target.bits - 1)) - 1)
    field, mantissa = magnitude >> target.mantissa_bits, magnitude & ((1 << target.mantissa_bits) - 1)
    # float64 holds every value of every format exactly; powers of two are built from their bits.
    power = ((field.long() - target.exponent_bias + 1023) << 52).view(torch.float64)
    normal = power * (1.0 + mantissa.double() * target.epsilon)
    subnormal = mantissa.double() * (target.min_subnormal if target.subnormals else 0.0)
    values = torch.where(field > 0, normal, subnormal)
    values = _with_specials(values, magnitude, target)
    # Triton's unary minus is 0 - x and makes no negative zero.
    return torch.where(codes >> (target.bits - 1) > 0, values * -1.0, values).to(dtype)


def _decode_by_bits(codes: Tensor, target: FloatFormat) -> Tensor:
    """Decode by shifting exponent and mantissa into a float32; for devices where float64 is slow or missing."""
    magnitude = codes & ((1 << (target.bits - 1)) - 1)
    shifted = magnitude << (FLOAT32.mantissa_bits - target.mantissa_bits)
    normal = (shifted + ((FLOAT32.exponent_bias - target.exponent_bias) << FLOAT32.mantissa_bits)).view(torch.float32)
    subnormal = magnitude.to(torch.float32) * (target.min_subnormal if target.subnormals else 0.0)
    values = torch.where(magnitude >> target.mantissa_bits > 0, normal, subnormal)
    values = _with_specials(values, magnitude, target)
    sign = (codes >> (target.bits - 1)) << (FLOAT32.bits - 1)
    return (values.view(torch.int32) | sign).view(torch.float32)


def _with_specials(values: Tensor, magnitude: Tensor, target: FloatFormat) -> Tensor:
    """`values` with infinities and NaNs where the codes without sign are theirs."""
    if target.specials == "none":
        return values
    first_nan = _nan_code(target)
    if target.specials == "ieee":
        values = torch.where(magnitude == _infinity_code(target), math.inf, values)
        first_nan = _infinity_code(target) + 1
    return torch.where(magnitude >= first_nan, math.nan, values)


def _infinity_code(target: FloatFormat) -> int:
    """IEEE: all-ones exponent. Other formats have no infinity, and the code is never used."""
    return ((1 << target.exponent_bits) - 1) << target.mantissa_bits


def _nan_code(target: FloatFormat) -> int:
    """IEEE: the quiet NaN; OCP: all ones; without NaN codes zero, and the scale is NaN."""
    if target.specials == "ieee":
        return _infinity_code(target) | (1 << max(target.mantissa_bits - 1, 0))
    return (1 << (target.bits - 1)) - 1 if target.specials == "fn" else 0


_BFLOAT16 = FloatFormat(8, 7)


@dataclass(frozen=True)
class PackedTensor:
    """A tensor stored in low precision; made by :func:`pack`."""

    payload: Tensor
    scales: tuple[Tensor, ...]
    quantizer: Quantizer
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the storages of payload and scales."""
        return sum(tensor.untyped_storage().nbytes() for tensor in (self.payload, *self.scales))

    @property
    def device(self) -> torch.device:
        return self.payload.device

    @property
    def format(self) -> Format:
        assert not isinstance(self.quantizer.format, MutableFormat)
        return self.quantizer.format

    def unpack(self) -> Tensor:
        """The tensor that ``quantize`` would have returned, bit for bit."""
        like = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        if not like.numel():
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        element = _element(self.format)
        is_elementwise = _is_elementwise(self.quantizer, self.scales)
        if is_elementwise and not is_traced():
            return self._unpack_in_chunks(element, self.quantizer._carrier_dtype(like))
        order = chunks.memory_order(self.stride) if is_elementwise else tuple(range(len(self.shape)))
        codes = unpack_bits(self.payload, element.bits, like.numel()).view([self.shape[dim] for dim in order])
        codes = codes.permute([order.index(dim) for dim in range(len(order))])
        blocks = self.quantizer.blocks(like)
        if blocks is not None:
            codes = blocks.split(codes)
        carrier = self.quantizer._carrier_dtype(like)
        scales = self.scales
        if isinstance(self.format, BlockFormat) and self.format.scale == "e4m3":
            scales = (decode(scales[0], _E4M3, carrier), scales[1])
        return self.quantizer.decode(Encoded(decode(codes, element, carrier), scales), like)

    def _unpack_in_chunks(self, element: ElementFormat, carrier: torch.dtype) -> Tensor:
        result = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        single = tuple(scale.reshape(()) for scale in self.scales)
        values_of = decoder(element, carrier, self.device)
        start = 0
        for chunk in chunks.chunks_of(chunks.in_memory_order(result)):  # all but the last have whole bytes
            size = (chunk.numel() * element.bits + 7) // 8
            codes = unpack_bits(self.payload[start : start + size], element.bits, chunk.numel()).view(chunk.shape)
            chunk.copy_(self.quantizer.decode(Encoded(values_of(codes), single), chunk))
            start += size
        return result

    def to(self, device: torch.device | str) -> PackedTensor:
        """The same on another device."""
        moved = tuple(scale.to(device) for scale in self.scales)
        return PackedTensor(self.payload.to(device), moved, self.quantizer, self.shape, self.stride, self.dtype)

    def __repr__(self) -> str:
        shape = tuple(self.shape)
        return f"PackedTensor({self.format.name}, shape={shape}, {self.dtype}, {self.nbytes} bytes, {self.device})"


_E4M3 = FloatFormat(4, 3, specials="fn")


def pack(
    x: Tensor,
    format: str | Format,
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
) -> PackedTensor:
    """`x` rounded as by :func:`bitplan.quantize`, with the same parameters, and stored in the format's own bits.

    >>> pack(torch.randn(1000), "e2m3").nbytes
    750
    """
    if isinstance(format, MutableFormat):
        raise QuantizeError("a live format has no fixed width: pack with its current format.")
    quantizer = make_quantizer(
        format, rounding, scale, axis=axis, block=block, range=range, power_of_two=power_of_two, overflow=overflow
    )
    return pack_with(quantizer, x, seed=seed, step=step, site=site)


def pack_with(
    quantizer: Quantizer, x: Tensor, *, seed: Counter | None = None, step: Counter = 0, site: Counter = 0
) -> PackedTensor:
    """As :func:`pack`, with a quantizer."""
    quantizer.check(x)
    assert not isinstance(quantizer.format, MutableFormat)
    source = with_plain_bits(x.detach())
    element = _element(quantizer.format)
    _require_codes(quantizer, element, source)
    if not source.numel():
        payload, stride = (
            torch.empty(0, dtype=torch.uint8, device=x.device),
            torch.empty_like(source, device="meta").stride(),
        )
        return PackedTensor(payload, (), quantizer, x.shape, stride, x.dtype)
    return _packed(quantizer, source, quantizer.encode(source, quantizer.noise(source, seed, step, site)))


def pack_rounded(quantizer: Quantizer, y: Tensor, scales: Sequence[Tensor]) -> PackedTensor:
    """Pack `y`, which `quantizer` has already rounded with these scales, without changing a bit.

    A rounded value divided by its scale is within one ulp of the carrier of a value on the grid, so rounding to nearest
    restores it, whatever the rounding mode was.
    """
    assert not isinstance(quantizer.format, MutableFormat)
    source = y.detach()
    _require_codes(quantizer, _element(quantizer.format), source)
    if not is_traced() and _is_elementwise(quantizer, scales):
        pieces = chunks.chunks_of(chunks.in_memory_order(source))
        if len(pieces) > 1:
            return _pack_in_chunks(quantizer, source, pieces, scales)
    return _packed(quantizer, source, Encoded(_elements_of(quantizer, source, scales), tuple(scales)))


def _is_elementwise(quantizer: Quantizer, scales: Sequence[Tensor]) -> bool:
    """Whether all elements share one scale or have none, so that their order does not matter."""
    if isinstance(quantizer.format, BlockFormat) or not all(scale.numel() == 1 for scale in scales):
        return False
    return quantizer.scaling is None or quantizer.scaling.granularity == "tensor"


def _pack_in_chunks(
    quantizer: Quantizer, source: Tensor, pieces: Sequence[Tensor], scales: Sequence[Tensor]
) -> PackedTensor:
    """Pack chunk by chunk: the intermediate results of encoding are several times its output."""
    element = _element(quantizer.format)  # type: ignore[arg-type]
    payload = torch.empty((source.numel() * element.bits + 7) // 8, dtype=torch.uint8, device=source.device)
    single = [scale.reshape(()) for scale in scales]
    start = 0
    with chunks.unchunked():
        for piece in pieces:  # all but the last have a power of two of elements, and so whole bytes
            codes = pack_bits(encode(_elements_of(quantizer, piece, single), element), element.bits)
            payload[start : start + codes.numel()] = codes
            start += codes.numel()
    own = tuple(scale.clone() for scale in scales)
    stride = torch.empty_like(source, device="meta").stride()
    return PackedTensor(payload, own, quantizer, source.shape, stride, source.dtype)


def _packed(quantizer: Quantizer, source: Tensor, encoded: Encoded) -> PackedTensor:
    assert not isinstance(quantizer.format, MutableFormat)
    element = _element(quantizer.format)
    elements, scales = encoded
    if isinstance(quantizer.format, BlockFormat) and quantizer.format.scale == "e4m3":
        scales = (encode(scales[0], _E4M3).to(torch.uint8), scales[1])
    blocks = quantizer.blocks(source)
    if blocks is not None:  # the padding of a ragged last block is not stored
        elements = blocks.join(elements, source.shape)
    codes, stride = encode(elements, element), torch.empty_like(source, device="meta").stride()
    if _is_elementwise(quantizer, scales):
        codes = codes.permute(chunks.memory_order(stride))
    payload = pack_bits(codes.flatten(), element.bits)
    own = tuple(scale.clone() for scale in scales)  # a view would keep its whole base alive
    return PackedTensor(payload, own, quantizer, source.shape, stride, source.dtype)


def _elements_of(quantizer: Quantizer, y: Tensor, scales: Sequence[Tensor]) -> Tensor:
    work = y.to(quantizer._carrier_dtype(y))
    blocks = quantizer.blocks(y)
    if blocks is not None:
        work = blocks.split(work)
    target = quantizer.format
    if isinstance(target, BlockFormat):
        if target.scale == "e8m0":
            return multiply_by_power(work, scales[0], -1) * (1.0 / target.unit)
        effective = scales[0] * scales[1]
        ready = divide(work, torch.where(effective == 0, torch.inf, effective))
        return round_float(ready, target.element, "nearest", "saturate")  # type: ignore[arg-type]
    assert not isinstance(target, MutableFormat)
    if not scales:
        return work
    ready = divide(work if len(scales) == 1 else work - scales[1], scales[0])
    if isinstance(target, IntFormat):
        return round_int(ready, target, "nearest") + 0.0
    return round_element(ready, target, "nearest", "saturate", None)


def _element(target: Format) -> ElementFormat:
    return target.element if isinstance(target, BlockFormat) else target


def _require_codes(quantizer: Quantizer, element: ElementFormat, x: Tensor) -> None:
    if element.bits > MAX_PACKED_BITS:
        raise QuantizeError(
            f"{element.name} has {element.bits} bits and pack takes up to {MAX_PACKED_BITS}: leave it unpacked."
        )
    if isinstance(element, IntFormat):
        return
    if isinstance(element, FloatFormat) and quantizer.overflow == "special" and element.specials == "none":
        raise QuantizeError(f"{element.name} has no code for infinity: pack it with overflow='saturate'.")
    # With a scale, NaN makes the scale NaN and is restored; without one it needs a code of its own. A compiled graph
    # cannot check, so NaN becomes zero there; fake tensors have no values to check.
    has_code = isinstance(quantizer.format, BlockFormat) or quantizer.scaling is not None or element.has_nan_code
    if not has_code and not is_traced() and not isinstance(x, FakeTensor) and bool(x.isnan().any()):
        raise QuantizeError(f"the tensor holds NaN and {element.name} has no code for it: pack it with a scale.")


def stored(encoded: Encoded, quantizer: Quantizer, like: Tensor) -> Encoded:
    """The same elements, computed through their codes, for a compiled graph: its partitioner then saves the codes.

    BF16 is the upper half of float32, so two shifts are enough. Decoding is so cheap that Inductor repeats it wherever
    the values are read instead of storing them beside their codes.
    """
    assert not isinstance(quantizer.format, MutableFormat)
    element, blocks = _element(quantizer.format), quantizer.blocks(like)
    if element == _BFLOAT16 and blocks is None and encoded.elements.dtype == torch.float32:
        upper = (encoded.elements.view(torch.int32) >> 16).to(torch.int16)
        return Encoded((upper.to(torch.int32) << 16).view(torch.float32), encoded.scales)
    codes = encode(encoded.elements, element)
    if blocks is not None:  # the padding of a ragged last block is not stored
        codes = blocks.join(codes, like.shape)
    wide = _wide(_small(codes, element.bits), element.bits, codes.shape)
    if blocks is not None:
        wide = blocks.split(wide)
    return Encoded(decode_without_table(wide, element, encoded.elements.dtype), encoded.scales)


def _small(codes: Tensor, bits: int) -> Tensor:
    """Codes in the smallest dtype; packed if there is none of their width."""
    if bits == 8:
        return codes.to(torch.uint8)
    if bits == 16:
        return (codes - (codes >> 15 << 16)).to(torch.int16)
    return pack_bits(codes.flatten(), bits)


def _wide(small: Tensor, bits: int, shape: torch.Size) -> Tensor:
    """The inverse of :func:`_small`."""
    if bits in (8, 16):
        return small.to(torch.int32) & ((1 << bits) - 1)
    return unpack_bits(small, bits, shape.numel()).view(shape)
