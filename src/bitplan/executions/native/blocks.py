"""Which products of block-scaled operands the FP8 units multiply: lines of 1 x 128 and tiles of 128 x 128 in E4M3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from bitplan.executions.native.backends import BLOCK, BLOCKS, BLOCKS_NEED, GemmBackend
from bitplan.numerics.mutable_format import MutableFormat
from bitplan.numerics.quantizer import Quantizer

#: 128 values along the sum, or 128 x 128.
BlockKind = Literal["line", "tile"]


def block_of(slot: str, quantizer: Quantizer, dims: int, summed: set[int]) -> BlockKind | str:
    """The kind of the blocks of an operand, or a sentence that says why the units do not multiply them."""
    scaling = quantizer.scaling
    assert scaling is not None
    block, axis = scaling.block, scaling.axis
    words = "x".join(map(str, block)) if isinstance(block, tuple) else str(block)
    rows, columns = block if isinstance(block, tuple) else (1, block)
    if columns != BLOCK or rows not in (1, BLOCK):
        return f"{slot} has blocks of {words}, and only those of 1x128 and 128x128 have a native path"
    if rows == BLOCK and not slot.endswith(".w"):
        return f"{slot} has tiles, which have a native path as weights only"
    along = axis[1] if isinstance(axis, tuple) else axis
    assert along is not None
    if along % dims not in summed and rows == 1:
        return f"the blocks of {slot} do not lie along the sum"
    return "line" if rows == 1 else "tile"


def block_backend_or_reason(
    left: str,
    right: str,
    op: str,
    kinds: Sequence[str],
    quantizers: Sequence[Quantizer],
    backends: Sequence[GemmBackend],
) -> GemmBackend | str:
    """The backend for two operands, at least one of them in blocks, or why there is none."""
    refused = [kind for kind in kinds if kind not in ("line", "tile")]
    if refused:
        return refused[0]
    if op != "linear":
        return f"blocks have a native path in linear layers only, and this is {op}"
    if len(kinds) != 2:
        return f"only one of {left} and {right} has blocks"
    formats = [quantizer.format for quantizer in quantizers]
    if any(isinstance(target, MutableFormat) or BLOCKS.code_dtype(target) is None for target in formats):
        names = " by ".join("a live format" if isinstance(target, MutableFormat) else target.name for target in formats)
        return f"blocks have a native path in e4m3 only, not in {names}"
    backend = next((backend for backend in backends if backend.takes_blocks), None)
    return f"products of blocks need {BLOCKS_NEED}" if backend is None else backend


def cuts_blocks(backend: str, gemm_pass: str, x: Sequence[int]) -> bool:
    """Whether blocks along tokens end with sequences of another length than a multiple of the block.

    The units see all tokens of a batch as one axis.
    """
    return backend == BLOCKS.name and gemm_pass == "wgrad" and len(x) > 2 and x[-2] % BLOCK != 0
