"""Weights that are not trained, stored as codes and scales and decoded wherever they are read.

:class:`FrozenCodec` encodes a weight once and decodes it to the same bits, eager and compiled. What it stores:

==============================  ==============================================================================
codes                           without gaps; formats that torch has a dtype for are stored in it (FP8, int8)
scale: tensor, channel          float32; a channel is a row of the weight, one output feature
scale: block                    8-bit whole numbers times a step: ``(code + offset) * step``, with offset and step
                                in float32 for each 256 scales. This is the double quantisation of QLoRA, with a
                                whole offset in place of a mean, so that the only rounding is that of one product.
                                With ``power_of_two`` the scale's exponent, in 8 bits (E8M0)
mx formats                      E8M0, as the format has it
==============================  ==============================================================================

A block of 64 4-bit codes takes 32 bytes, 1 byte of scale and 8/256 bytes of offset and step: 0.516 bytes per value.
Elements are rounded with the scales as they are stored. A weight is a matrix here: a convolution's has one row for each
output channel. Blocks lie along rows.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitplan.compiler.torch_private import FakeTensor
from bitplan.compiler.tracing import is_traced
from bitplan.errors import QuantizeError
from bitplan.numerics.codebook import book_table
from bitplan.numerics.dtypes import TORCH_FLOAT8
from bitplan.numerics.formats import BlockFormat, CodebookFormat, ElementFormat, Format, IntFormat, get_format
from bitplan.numerics.packing import decode_without_table, encode, pack_bits, unpack_bits
from bitplan.numerics.quantizer import encode_block, round_element
from bitplan.numerics.scaling import (
    Blocks,
    Granularity,
    amax_of,
    block_amax,
    divide,
    largest_finite,
    multiply_by_power,
    step_scale,
)

#: So many scales share an offset and a step.
SCALES_PER_GROUP = 256
#: Offsets are whole numbers up to this, so that their sum with a code is exact in float32.
_LARGEST_OFFSET = 1 << 20
#: Elements that are encoded at a time, because intermediate results are several times the weight.
_CHUNK = 1 << 24
_INT8 = IntFormat(8)


class FrozenCodes(NamedTuple):
    """A weight in few bits: the tensors that stay in memory."""

    #: One-dimensional bytes without gaps; or a matrix of float8 or int8.
    payload: Tensor
    #: (scale,), (codes of scales, offsets, steps) or (exponents,).
    scales: tuple[Tensor, ...]
    #: The values by code, where a lookup is faster than arithmetic.
    table: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.payload, *self.scales) if self.table is None else (self.payload, *self.scales, self.table)

    @property
    def nbytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors)


@dataclass(frozen=True)
class FrozenCodec:
    """How weights of one shape are stored. Hashable; :attr:`text` stands for it in compiled graphs.

    >>> codec = FrozenCodec(get_format("nf4"), (64, 256), "block", 64)
    >>> codes = codec.encode(torch.randn(64, 256))
    >>> codec.decode(codes, torch.bfloat16).shape, codes.payload.numel()
    (torch.Size([64, 256]), 8192)
    """

    format: Format
    shape: tuple[int, ...]
    #: None for block formats, which have their own scales.
    granularity: Granularity | None = None
    block: int | None = None
    power_of_two: bool = False

    def __post_init__(self) -> None:
        target = self.format
        if target.bits > 8 or (isinstance(target, IntFormat) and target.affine):
            raise QuantizeError(
                f"{target.name} cannot store frozen weights: use a symmetric format of up to 8 bits, such as nf4, "
                f"int4, int8 or e4m3."
            )
        if len(self.shape) < 2 or math.prod(self.shape) == 0:
            raise QuantizeError(f"only matrices can be stored in few bits, not a weight of shape {tuple(self.shape)}.")
        if isinstance(target, BlockFormat):
            if target.scale != "e8m0":
                raise QuantizeError(f"{target.name} cannot store frozen weights: use mxfp4, or nf4 with scale: block.")
        elif self.granularity is None:
            raise QuantizeError(f"{target.name} needs a scale to store weights: add scale: block and block: 64.")
        elif self.granularity == "vector":
            raise QuantizeError("a frozen weight has a scale for the tensor, each channel or each block, not vectors.")

    @property
    def text(self) -> str:
        """What :func:`codec_of_text` makes the codec of again."""
        return repr((self.format.name, tuple(self.shape), self.granularity, self.block, self.power_of_two))

    @property
    def element(self) -> ElementFormat:
        return self.format.element if isinstance(self.format, BlockFormat) else self.format

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return self.shape[0], math.prod(self.shape[1:])

    @property
    def code_dtype(self) -> torch.dtype | None:
        """The dtype of codes that are stored as a matrix; None where they are packed."""
        return torch.int8 if self.element == _INT8 else TORCH_FLOAT8.get(self.element)

    @property
    def is_one_factor(self) -> bool:
        """Whether a weight is a matrix of codes times one float32, or one for each row, as GEMM backends take it."""
        return self.code_dtype is not None and self.granularity in ("tensor", "channel")

    @property
    def has_double_scales(self) -> bool:
        """Whether block scales are themselves stored in 8 bits, with an offset and a step."""
        return self.granularity == "block" and not self.power_of_two

    @property
    def blocks(self) -> Blocks | None:
        """How rows are split; None where a row is not. A block is not longer than a row."""
        size = self.format.size if isinstance(self.format, BlockFormat) else self.block
        return None if size is None else Blocks(1, min(size, self.matrix_shape[1]))

    # --- Encoding

    def encode(self, weight: Tensor) -> FrozenCodes:
        """The codes of a weight of this shape. Not for compiled code."""
        with torch.no_grad():
            matrix = weight.detach().reshape(self.matrix_shape)
            if not isinstance(matrix, FakeTensor) and not bool(matrix.isfinite().all()):
                raise QuantizeError("a weight that is stored in few bits must be finite, and this one is not.")
            if isinstance(self.format, BlockFormat):
                scale, stored = self._encode_block_scales(matrix, self.format)
            else:
                scale, stored = self._encode_scales(matrix)
            parts = [self._codes(rows, scale[at] if scale.dim() else scale) for at, rows in _row_chunks(matrix)]
        if self.code_dtype is None:
            return FrozenCodes(pack_bits(torch.cat(parts), self.element.bits), stored, self._table(matrix))
        # Not every supported torch concatenates float8.
        payload = torch.cat([part.view(torch.uint8) for part in parts]).view(self.code_dtype)
        return FrozenCodes(payload, stored)

    def _split(self, rows: Tensor) -> Tensor:
        blocks = self.blocks
        return rows.float() if blocks is None else blocks.split(rows.float())

    def _encode_scales(self, matrix: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The scales that elements are divided by, and the tensors that are stored of them."""
        limit = largest_finite(matrix.dtype, torch.float32)
        chunks = [rows for _, rows in _row_chunks(matrix)]
        if self.granularity == "tensor":
            amax = torch.stack([amax_of(rows, (0, 1)).float().reshape(()) for rows in chunks]).amax()
        else:
            dim_amax = block_amax if self.granularity == "block" else lambda rows: amax_of(rows, (1,))
            amax = torch.cat([dim_amax(self._split(rows)) for rows in chunks])
        scale = step_scale(amax, self.element.max, self.power_of_two, limit)
        if self.has_double_scales:
            stored = _encode_double(scale.flatten())
            return _decode_double(stored, scale.numel()).view(scale.shape), stored
        if self.granularity == "block":  # powers of two: their exponents
            return scale, ((scale.view(torch.int32) >> 23).to(torch.uint8).clone(),)
        return scale, (scale.clone(),)

    def _encode_block_scales(self, matrix: Tensor, target: BlockFormat) -> tuple[Tensor, tuple[Tensor, ...]]:
        limit = largest_finite(matrix.dtype, torch.float32)
        parts = [
            encode_block(self._split(rows), target, "nearest", None, limit).scales[0] for _, rows in _row_chunks(matrix)
        ]
        exponents = torch.cat(parts)
        return self._powers(exponents), (exponents,)

    def _codes(self, rows: Tensor, scale: Tensor) -> Tensor:
        """Codes of some rows: a matrix, or flat where they are packed."""
        elements = round_element(divide(self._split(rows), scale), self.element, "nearest", "saturate", None)
        blocks = self.blocks
        if blocks is not None:
            elements = blocks.join(elements, rows.shape)
        if self.code_dtype is not None:
            return elements.to(self.code_dtype)
        return encode(elements.contiguous(), self.element).to(torch.uint8).flatten()

    def _table(self, like: Tensor) -> Tensor | None:
        element = self.element
        if isinstance(element, IntFormat):
            return None
        if isinstance(element, CodebookFormat):
            return book_table(element, torch.float32, like).clone()
        codes = torch.arange(1 << element.bits, dtype=torch.int32, device=like.device)
        return decode_without_table(codes, element, torch.float32)

    # --- Decoding

    def decode(self, codes: FrozenCodes, dtype: torch.dtype, after: Tensor | None = None) -> Tensor:
        """The weight in `dtype`; the same bits eager and compiled.

        :param after: in a graph: decode again, after this tensor is computed. Otherwise the graph would keep what was
            decoded before, in full.
        """
        payload, scale = codes.payload, self._decode_scales(codes.scales)
        if is_traced():
            if after is not None:
                payload = depending_on(payload, after)
            return self._decode_rows(payload, scale, codes.table, self.matrix_shape).to(dtype).view(self.shape)
        result = torch.empty(self.matrix_shape, dtype=dtype, device=payload.device)
        for at, rows in _row_chunks(result, whole_bytes=self.element.bits):
            part = payload[at] if self.code_dtype is not None else payload[_byte_range(at, rows, self.element.bits)]
            own = scale[at] if scale.dim() else scale
            rows.copy_(self._decode_rows(part, own, codes.table, (rows.shape[0], rows.shape[1])))
        return result.view(self.shape)

    def _decode_rows(self, payload: Tensor, scale: Tensor, table: Tensor | None, shape: tuple[int, int]) -> Tensor:
        """Values of some rows in float32."""
        if self.code_dtype is not None:
            elements = payload.float()
        else:
            elements = self._unpacked(payload, table, shape[0] * shape[1]).view(shape)
        blocks = self.blocks
        if blocks is None:
            return elements * scale
        return blocks.join(blocks.split(elements) * scale, torch.Size(shape))

    def _unpacked(self, payload: Tensor, table: Tensor | None, count: int) -> Tensor:
        bits = self.element.bits
        if bits == 4 and table is not None and not is_traced():
            pairs = torch.stack((table.repeat(16), table.repeat_interleave(16)), 1)  # the lower half comes first
            return pairs[payload.to(torch.int32)].view(-1)[:count]
        if bits == 4:
            shifts = torch.arange(0, 8, 4, dtype=torch.int32, device=payload.device)
            codes = (payload.to(torch.int32).unsqueeze(-1) >> shifts & 15).view(-1)[:count]
        else:
            codes = unpack_bits(payload, bits, count)
        if table is None:
            half = 1 << (bits - 1)
            return ((codes ^ half) - half).float()
        if not is_traced():
            return table[codes]
        # Codes are below the table's size, so indices need no check.
        values: Tensor = torch.ops.aten._unsafe_index.Tensor(table, [codes])
        return values

    def _decode_scales(self, stored: tuple[Tensor, ...]) -> Tensor:
        """The factors of elements, split into blocks where there are any."""
        blocks = self.blocks
        if blocks is None:
            return stored[0]
        if not self.has_double_scales:
            return self._powers(stored[0])
        rows, columns = self.matrix_shape
        per_row = -(-columns // blocks.size)
        return _decode_double(stored, rows * per_row).view(rows, per_row, 1)

    def _powers(self, exponents: Tensor) -> Tensor:
        unit = self.format.unit if isinstance(self.format, BlockFormat) else 1.0
        return multiply_by_power(torch.full_like(exponents, unit, dtype=torch.float32), exponents, 1)


def codes_from_tensors(tensors: tuple[Tensor, ...], codec: FrozenCodec) -> FrozenCodes:
    """The inverse of :attr:`FrozenCodes.tensors`."""
    has_table = codec.code_dtype is None and not isinstance(codec.element, IntFormat)
    if has_table:
        return FrozenCodes(tensors[0], tensors[1:-1], tensors[-1])
    return FrozenCodes(tensors[0], tensors[1:])


@lru_cache(maxsize=1024)
def codec_of_text(text: str) -> FrozenCodec:
    """The codec whose :attr:`FrozenCodec.text` this is."""
    name, shape, granularity, block, power_of_two = ast.literal_eval(text)
    return FrozenCodec(get_format(name), shape, granularity, block, power_of_two)


# --- Scales in 8 bits


def _encode_double(scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, offsets and steps of positive scales: (code + offset) * step.

    Offsets are at least 1, so that no scale becomes zero.
    """
    missing = -len(scales) % SCALES_PER_GROUP
    groups = torch.cat((scales, scales[-1:].expand(missing))).view(-1, SCALES_PER_GROUP)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    step = divide(high - low, 254.0)
    step = torch.maximum(step, high * (1.0 / _LARGEST_OFFSET)).clamp_min(torch.finfo(torch.float32).tiny)
    offset = torch.floor(divide(low, step)).clamp(1, _LARGEST_OFFSET)
    codes = (torch.round(divide(groups, step)) - offset).clamp(0, 255).to(torch.uint8)
    return codes.flatten()[: len(scales)].clone(), offset.flatten().clone(), step.flatten().clone()


def _decode_double(stored: tuple[Tensor, ...], count: int) -> Tensor:
    """The scales, flat. The sum is exact, so that one rounding remains, whatever a compiler fuses."""
    codes, offset, step = stored
    if count % SCALES_PER_GROUP == 0:
        grouped = codes.view(-1, SCALES_PER_GROUP)
        return ((grouped.float() + offset.unsqueeze(1)) * step.unsqueeze(1)).view(-1)
    each = [part.unsqueeze(1).expand(-1, SCALES_PER_GROUP).reshape(-1)[:count] for part in (offset, step)]
    return (codes.float() + each[0]) * each[1]


# --- Chunks of rows


def _row_chunks(matrix: Tensor, whole_bytes: int = 8) -> Iterator[tuple[slice, Tensor]]:
    """Some rows at a time, with their numbers; as many as have whole bytes of codes with that many bits."""
    rows, columns = matrix.shape
    step = max(_CHUNK // max(columns, 1), 1)
    if columns * whole_bytes % 8:
        step = -(-step // 8) * 8
    for first in range(0, rows, step):
        at = slice(first, min(first + step, rows))
        yield at, matrix[at]


def _byte_range(at: slice, rows: Tensor, bits: int) -> slice:
    columns = rows.shape[1]
    return slice(at.start * columns * bits // 8, (at.stop * columns * bits + 7) // 8)


#: dtype -> the dtype of whole numbers with as many bits.
_WHOLE: dict[torch.dtype, torch.dtype] = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def depending_on(payload: Tensor, after: Tensor) -> Tensor:
    """`payload`, computed from `after`, too, so that a graph cannot compute it earlier."""
    if not after.numel() or after.dtype not in _WHOLE:
        return payload
    first: Any = after
    while first.dim():
        first = first[0]
    nothing: Tensor = (first.view(_WHOLE[after.dtype]) & 0).to(torch.uint8)
    if payload.dtype == torch.uint8:
        return payload | nothing
    return (payload.view(torch.uint8) | nothing).view(payload.dtype)
