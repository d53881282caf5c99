"""The kernel of :mod:`bitplan.executions.native.attention`; imported only where Triton is.

A program computes the outputs of `block_m` queries of one head. It goes over the keys in blocks and keeps, for each
query, the largest score so far, the sum of exponentials and the weighted sum of values, all in float32.

Two things follow from Hopper's FP8 tensor cores:

* They read both operands with the summed axis innermost, and Triton cannot transpose bytes on the way. So values come
  transposed, (features, tokens).
* The first operand of the second product, the probabilities, is the result of the first. A thread holds other columns
  of a result than of an operand: of 16 columns, 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, and 4 t to 4 t + 3. The sum over
  keys does not depend on their order, so the tokens of the values are stored in the order in which probabilities lie in
  registers (:func:`bitplan.executions.native.attention.transpose_values`). Then no thread sends any to another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitplan.executions.native.attention import KEY_BLOCK, PEAK
from bitplan.executions.native.float8_cast import FORMATS
from bitplan.executions.native.float8_cast_kernel import _codes_of, _magnitude_bits, _quotient


class Tiles(NamedTuple):
    """How the kernel is cut into programs."""

    #: Queries of a program.
    block_m: int = 64
    #: Keys of a block.
    block_n: int = 128
    num_warps: int = 4
    #: Blocks of keys and values that are loaded ahead.
    num_stages: int = 2
    #: Whether blocks are loaded by the tensor memory accelerator, instead of by each thread.
    uses_descriptors: bool = True
    #: Whether the tensor cores start each block's product at zero, and float32 units add it to the sum.
    adds_in_float32: bool = True
    #: Whether tokens of the values are interleaved.
    interleaved: bool = True
    #: The most registers of a thread.
    max_registers: int | None = None


#: Tokens that a program of the casts takes, and the most programs that share the amax of a head of a sample.
_TILE, _AMAX_PARTS = 64, 16
_LOG2_PEAK = tl.constexpr(8.807354922057604)  # of 448
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit  # type: ignore[untyped-decorator]
def _attend_blocks(  # type: ignore[no-untyped-def]
    total,
    row_sum,
    row_max,
    query,
    keys,
    values,
    first,
    last,
    query_index,
    key_row,
    key_column,
    key_width,
    value_row,
    key_count,
    padded_count,
    factor,
    is_masked: tl.constexpr,
    is_causal: tl.constexpr,
    head_size: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    uses_descriptors: tl.constexpr,
    adds_in_float32: tl.constexpr,
    interleaved: tl.constexpr,
):
    """Add the keys `first` to `last` to the running sums."""
    value_feature = value_row + tl.arange(0, head_size)
    key_feature = key_column + tl.arange(0, head_size)
    for start in range(first, last, block_n):
        start = tl.multiple_of(start, block_n)
        column = start + tl.arange(0, block_n)
        if uses_descriptors:
            key = keys.load([(key_row + start).to(tl.int32), key_column])
        elif is_masked:  # rows beyond the last are not read; their scores are dropped below
            row = key_row + tl.minimum(column, key_count - 1)
            key = tl.load(keys + row[:, None] * key_width + key_feature[None, :])
        else:
            key = tl.load(keys + (key_row + column)[:, None] * key_width + key_feature[None, :])
        scores = tl.dot(query, key.T)
        if is_masked:
            is_visible = column[None, :] < key_count
            if is_causal:
                is_visible = is_visible & (column[None, :] <= query_index[:, None])
            scores = tl.where(is_visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        correction = tl.exp2((row_max - new_max) * factor)
        weights = tl.exp2(scores * factor - (new_max * factor - _LOG2_PEAK)[:, None])
        row_max = new_max
        row_sum = row_sum * correction + tl.sum(weights, 1)
        codes = weights.to(tl.float8e4nv)
        if interleaved:
            codes = tl.reshape(codes, (block_m, block_n // 16, 2, 4, 2))
            codes = tl.reshape(tl.permute(codes, (0, 1, 3, 2, 4)), (block_m, block_n))
        if uses_descriptors:
            value = values.load([value_row.to(tl.int32), start])
        else:
            value = tl.load(values + value_feature[:, None] * padded_count + column[None, :])
        if adds_in_float32:
            total = total * correction[:, None] + tl.dot(codes, value.T)
        else:
            total = tl.dot(codes, value.T, total * correction[:, None])
    return total, row_sum, row_max


@triton.jit  # type: ignore[untyped-decorator]
def _amax_of_head(  # type: ignore[no-untyped-def]
    x,
    out,
    heads,
    tokens,
    batch_stride,
    head_stride,
    token_stride,
    head_size: tl.constexpr,
    part_count: tl.constexpr,
    tile: tl.constexpr,
):
    """Store the amax of one part of one head of one sample."""
    part = tl.program_id(0)
    batch = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    start_of_head = x + batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride
    feature = tl.arange(0, head_size)
    amax = tl.zeros([tile, head_size], tl.int32)
    for start in range(part * tile, tokens, part_count * tile):
        token = start + tl.arange(0, tile)
        row = start_of_head + token.to(tl.int64)[:, None] * token_stride
        value = tl.load(row + feature[None, :], mask=(token < tokens)[:, None], other=0.0)
        amax = tl.maximum(amax, _magnitude_bits(value.to(tl.float32)))
    amax = tl.max(tl.max(amax, 1), 0).to(tl.float32, bitcast=True)
    tl.store(out + tl.program_id(1) * part_count + part, amax)


@triton.jit  # type: ignore[untyped-decorator]
def _token_at(place, transposed: tl.constexpr):  # type: ignore[no-untyped-def]
    """Transposed, the places of a group of 16 hold tokens 0, 1, 8, 9, 2, 3, 10, 11, ..."""
    if transposed:  # noqa: SIM108 - a branch on a constexpr is removed
        token = (place // 16) * 16 + (place // 2 % 2) * 8 + (place // 4 % 4) * 2 + place % 2
    else:
        token = place
    return token


@triton.jit  # type: ignore[untyped-decorator]
def _restore_head(  # type: ignore[no-untyped-def]
    codes,
    scale,
    out,
    heads,
    tokens,
    padded,
    head_size: tl.constexpr,
    transposed: tl.constexpr,
    tile: tl.constexpr,
):
    """Multiply the codes of a tile of one head with their scale."""
    place = tl.program_id(0) * tile + tl.arange(0, tile)
    token = _token_at(place, transposed)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    feature = tl.arange(0, head_size)
    is_inside = (token < tokens)[:, None]
    offset = ((batch * tokens + token) * heads + head)[:, None] * head_size + feature[None, :]
    if transposed:
        row = (tl.program_id(1).to(tl.int64) * head_size + feature)[:, None] * padded
        code = tl.trans(tl.load(codes + row + place[None, :]))  # whole blocks, without a mask
    else:
        code = tl.load(codes + offset, mask=is_inside, other=0.0)
    value = code.to(tl.float32) * tl.load(scale + head)
    tl.store(out + offset, value.to(tl.bfloat16), mask=is_inside)


@triton.jit(do_not_specialize=["zero"])  # type: ignore[untyped-decorator]
def _cast_head(  # type: ignore[no-untyped-def]
    x,
    scale,
    out,
    heads,
    tokens,
    padded,
    batch_stride,
    head_stride,
    token_stride,
    zero,
    format_max: tl.constexpr,
    head_size: tl.constexpr,
    transposed: tl.constexpr,
    tile: tl.constexpr,
):
    """Cast the tokens of a tile of one head."""
    place = tl.program_id(0) * tile + tl.arange(0, tile)
    token = _token_at(place, transposed)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    feature = tl.arange(0, head_size)
    is_inside = (token < tokens)[:, None]
    row = batch * batch_stride + head * head_stride + token.to(tl.int64) * token_stride
    value = tl.load(x + row[:, None] + feature[None, :], mask=is_inside, other=0.0).to(tl.float32)
    codes = _codes_of(_quotient(value, tl.load(scale + head), format_max, True), zero, False)
    codes_out = out.to(tl.pointer_type(tl.uint8), bitcast=True)
    if transposed:
        offset = (tl.program_id(1).to(tl.int64) * head_size + feature)[:, None] * padded + place[None, :]
        tl.store(codes_out + offset, tl.trans(codes), mask=(place < padded)[None, :])
    else:
        offset = ((batch * tokens + token) * heads + head)[:, None] * head_size + feature[None, :]
        tl.store(codes_out + offset, codes, mask=is_inside)


@triton.jit(do_not_specialize=["softmax_scale"])  # type: ignore[untyped-decorator]
def _attention(  # type: ignore[no-untyped-def]
    queries,
    keys,
    values,
    out,
    logsumexp,
    query_scale,
    key_scale,
    value_scale,
    softmax_scale,
    heads,
    key_heads,
    query_count,
    key_count,
    padded_count,
    is_causal: tl.constexpr,
    has_ragged_end: tl.constexpr,
    head_size: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    uses_descriptors: tl.constexpr,
    adds_in_float32: tl.constexpr,
    interleaved: tl.constexpr,
):
    block = tl.program_id(0)
    if is_causal:  # the longest programs first
        block = tl.num_programs(0) - 1 - block
    batch = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    key_head = head // (heads // key_heads)
    query_row = batch.to(tl.int64) * query_count
    key_row = batch.to(tl.int64) * key_count
    value_row = (batch * key_heads + key_head).to(tl.int64) * head_size
    query_width = heads * head_size
    key_width = key_heads * head_size
    first_query = block * block_m
    query_index = first_query + tl.arange(0, block_m)
    feature = tl.arange(0, head_size)
    if uses_descriptors:
        query = queries.load([(query_row + first_query).to(tl.int32), head * head_size])
    else:
        row = query_row + tl.minimum(query_index, query_count - 1)
        query = tl.load(queries + row[:, None] * query_width + (head * head_size + feature)[None, :])
    # Scores are multiplied by it in the exponent of two.
    factor = softmax_scale * tl.load(query_scale + head) * tl.load(key_scale + key_head) * 1.4426950408889634
    total = tl.zeros([block_m, head_size], tl.float32)
    row_sum = tl.zeros([block_m], tl.float32)
    row_max = tl.full([block_m], float("-inf"), tl.float32)
    unmasked = key_count // block_n * block_n
    end = key_count
    if is_causal:
        unmasked = tl.minimum(unmasked, first_query // block_n * block_n)
        end = tl.minimum(end, first_query + block_m)
    total, row_sum, row_max = _attend_blocks(
        total,
        row_sum,
        row_max,
        query,
        keys,
        values,
        0,
        unmasked,
        query_index,
        key_row,
        key_head * head_size,
        key_width,
        value_row,
        key_count,
        padded_count,
        factor,
        False,
        is_causal,
        head_size,
        block_m,
        block_n,
        uses_descriptors,
        adds_in_float32,
        interleaved,
    )
    if is_causal or has_ragged_end:
        total, row_sum, row_max = _attend_blocks(
            total,
            row_sum,
            row_max,
            query,
            keys,
            values,
            unmasked,
            end,
            query_index,
            key_row,
            key_head * head_size,
            key_width,
            value_row,
            key_count,
            padded_count,
            factor,
            True,
            is_causal,
            head_size,
            block_m,
            block_n,
            uses_descriptors,
            adds_in_float32,
            interleaved,
        )
    is_inside = query_index < query_count
    value_factor = tl.load(value_scale + key_head) / row_sum
    offset = (query_row + query_index)[:, None] * query_width + (head * head_size + feature)[None, :]
    tl.store(out + offset, (total * value_factor[:, None]).to(out.dtype.element_ty), mask=is_inside[:, None])
    sums = (row_max * factor + (tl.log2(row_sum) - _LOG2_PEAK)) * _LN2
    tl.store(logsumexp + tl.program_id(1).to(tl.int64) * query_count + query_index, sums, mask=is_inside)


def launch_attention_amax(wrap: Any, x: Tensor) -> Tensor:
    """As :func:`bitplan.executions.native.attention.amax_by_head_reference`; features are contiguous."""
    batch, heads, tokens, size = x.shape
    parts = min(_AMAX_PARTS, triton.cdiv(tokens, _TILE))
    out = torch.empty(batch, heads, parts, dtype=torch.float32, device=x.device)
    wrap(_amax_of_head)[(parts, batch * heads)](
        *(x, out, heads, tokens, *x.stride()[:3], size, parts, _TILE), num_warps=4
    )
    return out.amax((0, 2))


def launch_attention_restore(wrap: Any, codes: Tensor, scale: Tensor, tokens: int, transposed: bool) -> Tensor:
    """As :func:`bitplan.executions.native.attention.restore_by_head_reference`."""
    codes, scale = codes.contiguous(), scale.contiguous()
    batch, heads, size = codes.shape[0], scale.shape[0], codes.shape[2 if transposed else 3]
    out = torch.empty(batch, tokens, heads, size, dtype=torch.bfloat16, device=codes.device)
    wrap(_restore_head)[(triton.cdiv(tokens, _TILE), batch * heads)](
        *(codes, scale, out, heads, tokens, codes.shape[3], size, transposed, _TILE), num_warps=4
    )
    return out


def launch_attention_cast(wrap: Any, x: Tensor, scale: Tensor, transposed: bool) -> Tensor:
    """As :func:`bitplan.executions.native.attention.cast_by_head_reference`; features are contiguous."""
    batch, heads, tokens, size = x.shape
    padded = -(-tokens // KEY_BLOCK) * KEY_BLOCK
    shape = (batch, heads, size, padded) if transposed else (batch, tokens, heads, size)
    out, scale = torch.empty(shape, dtype=torch.float8_e4m3fn, device=x.device), scale.contiguous()
    wrap(_cast_head)[(triton.cdiv(padded, _TILE), batch * heads)](
        *(x, scale, out, heads, tokens, padded, *x.stride()[:3], 0),
        *(FORMATS[torch.float8_e4m3fn].max, size, transposed, _TILE),
        num_warps=8,
    )
    return out


def launch_attention_forward(
    wrap: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    softmax_scale: float,
    is_causal: bool,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """As :func:`bitplan.executions.native.attention.attention_reference`; tensors are not empty."""
    assert PEAK == 448
    q, k, v, q_scale, k_scale, v_scale = (tensor.contiguous() for tensor in (q, k, v, q_scale, k_scale, v_scale))
    tiles = tiles or tiles_for(q.shape[-1], is_causal)
    batch, queries, heads, size = q.shape
    keys, key_heads = k.shape[1:3]
    out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    logsumexp = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    operands: tuple[Any, ...] = (q, k, v)
    if tiles.uses_descriptors:
        operands = _descriptors(q, k, v, tiles)
    wrap(_attention)[(triton.cdiv(queries, tiles.block_m), batch * heads)](
        *operands,
        *(out, logsumexp, q_scale, k_scale, v_scale, softmax_scale),
        *(heads, key_heads, queries, keys, v.shape[-1]),
        *(is_causal, keys % tiles.block_n != 0, size, tiles.block_m, tiles.block_n),
        *(tiles.uses_descriptors, tiles.adds_in_float32, tiles.interleaved),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **({} if tiles.max_registers is None else {"maxnreg": tiles.max_registers}),
    )
    return out, logsumexp


def _descriptors(q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> tuple[Any, ...]:
    from triton.tools.tensor_descriptor import TensorDescriptor

    size = q.shape[-1]
    blocks = ((tiles.block_m, size), (tiles.block_n, size), (size, tiles.block_n))
    return tuple(
        TensorDescriptor.from_tensor(codes, list(block))
        for codes, block in zip(
            (q.flatten(0, 1).flatten(1), k.flatten(0, 1).flatten(1), v.flatten(0, 2)), blocks, strict=True
        )
    )


def tiles_for(head_size: int, is_causal: bool) -> Tiles:
    """The fastest tiles on an H200."""
    return Tiles()
