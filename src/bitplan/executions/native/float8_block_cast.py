"""Casts of a matrix to E4M3 codes with scales for blocks, row-major and transposed, in one pass over its memory.

Blocks lie along the axis that a GEMM sums over: 1 x 128 values (lines), for inputs and gradients along features in one
GEMM and along rows in the other, or 128 x 128 (tiles), for weights. Both layouts of a tensor can come from one kernel,
because a tile of 128 x 128 holds all that the scales of its lines depend on. Inductor would generate a kernel per
layout, and copies for operands that cuBLAS reads transposed.

``bitplan::float8_block_cast`` returns codes and scales in the memory layout that the GEMM reads. On a GPU it is a
Triton kernel (:mod:`bitplan.executions.native.float8_block_cast_kernel`), elsewhere the reference implementation in
this file. Both equal :meth:`bitplan.numerics.quantizer.Quantizer.encode` bit for bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitplan.compiler.kernel_ops import register
from bitplan.executions.native.backends import BLOCK
from bitplan.executions.native.float8_cast import FORMATS
from bitplan.executions.native.gemm import Codes
from bitplan.numerics.rounding import round_float
from bitplan.numerics.scaling import Blocks, Tiles, block_amax, divide, step_scale


class BlockCast(NamedTuple):
    """The results of casting a matrix (rows, features); layouts that were not requested are empty."""

    #: (rows, features)
    rows: Tensor
    #: Of lines: (blocks along features, rows). Of tiles: (blocks along rows, blocks along features).
    row_scales: Tensor
    #: (features, rows)
    columns: Tensor
    #: Of lines: (blocks along rows, features). Of tiles: (blocks along features, blocks along rows).
    column_scales: Tensor


def cast_float8_blocks(
    x: Tensor,
    *,
    tiles: bool,
    power_of_two: bool = False,
    as_rows: bool = True,
    as_columns: bool = True,
    after: Tensor | None = None,
) -> BlockCast:
    """Cast `x`, a matrix in one of float8_cast.INPUT_DTYPES, to E4M3 codes with scales for blocks.

    :param tiles: whether blocks are 128 x 128; otherwise those of `rows` lie along features, those of `columns` along
        rows. Blocks at the edges may be smaller.
    :param after: a tensor that is not read; a compiled graph casts after computing it.

    >>> cast = cast_float8_blocks(torch.tensor([[1.0, -896.0]]), tiles=False)
    >>> cast.rows.float(), cast.row_scales, cast.columns.float().flatten(), cast.column_scales
    (tensor([[   0.5000, -448.0000]]), tensor([[2.]]), tensor([ 448., -448.]), tensor([[0.0022, 2.0000]]))
    """
    return BlockCast(*torch.ops.bitplan.float8_block_cast(x, tiles, power_of_two, as_rows, as_columns, after))


def block_codes(cast: BlockCast, tiles: bool, by_row: bool) -> Codes:
    """One layout as (rows, features), with scales in the shapes that :class:`Codes` describes; no copies."""
    if by_row:
        return Codes(cast.rows, cast.row_scales if tiles else cast.row_scales.t())
    return Codes(cast.columns.t(), cast.column_scales.t() if tiles else cast.column_scales)


_LIBRARY: Any = torch.library.Library("bitplan", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "float8_block_cast(Tensor x, bool tiles, bool power_of_two, bool as_rows, bool as_columns, Tensor? after=None) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def block_cast_reference(
    x: Tensor, tiles: bool, power_of_two: bool, as_rows: bool, as_columns: bool, after: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of :class:`BlockCast`."""
    rows, row_scales, columns, column_scales = results = block_cast_buffers(x, tiles, as_rows, as_columns)
    if as_rows and x.numel():
        _encode_into(rows, row_scales, x, tiles, power_of_two)
    if as_columns and x.numel():
        _encode_into(columns, column_scales, x.t(), tiles, power_of_two)
    return results


def _encode_into(codes: Tensor, scales: Tensor, x: Tensor, tiles: bool, power_of_two: bool) -> None:
    """Write the codes of `x`, and the scales of its tiles or of lines along its second axis."""
    target = FORMATS[torch.float8_e4m3fn]
    blocks = Tiles((0, 1), (BLOCK, BLOCK)) if tiles else Blocks(1, BLOCK)
    values = blocks.split(x.float())
    scale = step_scale(block_amax(values), target.max, power_of_two)
    elements = round_float(divide(values, scale), target, "nearest", "saturate")
    codes.copy_(blocks.join(elements, x.shape))
    grid = scale.squeeze(-1)
    scales.copy_(grid if tiles else grid.t())


def block_cast_buffers(
    x: Tensor, tiles: bool, as_rows: bool, as_columns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of :class:`BlockCast`, uninitialised."""
    rows, features = x.shape
    down, across = -(-rows // BLOCK), -(-features // BLOCK)
    return (
        x.new_empty((rows, features) if as_rows else (0, 0), dtype=torch.float8_e4m3fn),
        x.new_empty((0, 0) if not as_rows else (down, across) if tiles else (across, rows), dtype=torch.float32),
        x.new_empty((features, rows) if as_columns else (0, 0), dtype=torch.float8_e4m3fn),
        x.new_empty((0, 0) if not as_columns else (across, down) if tiles else (down, features), dtype=torch.float32),
    )


def _fake_block_cast(
    x: Tensor, tiles: bool, power_of_two: bool, as_rows: bool, as_columns: bool, after: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return block_cast_buffers(x, tiles, as_rows, as_columns)


register(_LIBRARY, "float8_block_cast", block_cast_reference, _fake_block_cast, __name__)
