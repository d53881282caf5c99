"""A graph pass that lets Inductor write tables of sines and cosines to memory.

Rotary embeddings multiply queries and keys of every layer by the cosine and sine of (position x frequency): small
tensors, the same for all samples, heads and layers. Inductor computes pointwise operations where they are read. So
every element of every query and key took two sines and a cosine, of angles that adjacent elements read far apart in
memory. A table in memory is a few megabytes, is computed once per pass, and is rounded to the dtype in which the model
reads it, as in eager execution. For a Llama-3.2-1B shape of transformers (16 layers, 16,384 tokens, one H200, kernel
time by ``benchmarks/native_profile.py``) rotary embeddings took 5.9 ms per step, with tables 1.7.
"""

from __future__ import annotations

from torch import Tensor, fx

from bitplan.compiler.patterns import aten, convert, readers
from bitplan.compiler.torch_private import REALIZE_TO_STRIDES

#: A switch for comparisons: whether tables are written to memory.
WRITES_TABLES = True
#: A table has at most this share of the elements of a tensor that is computed from it.
LARGEST_SHARE = 1 / 4
_WAVES = (aten.cos.default, aten.sin.default)
#: Operations on a table alone, after which it is still a table.
_UNARY = (convert, aten.mul.Tensor, aten.mul.Scalar, aten.neg.default)


def write_tables(graph: fx.Graph, device: str = "cuda") -> int:
    """Mark sines and cosines that larger tensors are computed from, to be written to memory. Returns their number."""
    if not WRITES_TABLES:
        return 0
    tables = {_table_of(node) for wave in _WAVES for node in graph.find_nodes(op="call_function", target=wave)}
    tables = {table for table in tables if _is_table(table, device)}
    for table in tables:
        table.meta[REALIZE_TO_STRIDES] = True
    return len(tables)


def _table_of(wave: fx.Node) -> fx.Node:
    """The tensor that other tensors are computed from: scaled, and converted to another dtype."""
    table = wave
    while len(table.users) == 1:
        (user,) = table.users
        if user.target not in _UNARY or user.all_input_nodes != [table]:
            break
        table = user
    return table


def _is_table(node: fx.Node, device: str) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.device.type != device or not value.is_contiguous():
        return False
    results = [reader.meta.get("val") for reader, _ in readers(node)]
    sizes = [result.numel() for result in results if isinstance(result, Tensor)]
    if not all(isinstance(size, int) for size in (value.numel(), *sizes)):
        return False
    return 0 < value.numel() <= LARGEST_SHARE * max(sizes, default=0)
