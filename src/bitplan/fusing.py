"""Work that Inductor would do in several passes over memory, handed to operations that do it in one."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from bitplan.moments import coded_moments

_convert: Any = torch.ops.prims.convert_element_type.default
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_HALF = (torch.bfloat16, torch.float16)


def fuse_moments(graph: fx.Graph, device: str = "cuda") -> int:
    """In the forward graph of packed execution: where a tensor is rounded to float8 and batch norm wants the moments of
    the rounded values, make codes and moments in one pass. How many there were.

    Only of 16-bit tensors: sums are added up in another order, and packed float32 equals emulation bit for bit.
    """
    found = 0
    for node in list(graph.nodes):
        code = _rounded_before(node) if _is_moments(node) else None
        if code is None or code.meta["val"].device.type != device:
            continue
        values = (code.meta["val"], *node.meta["val"])
        with graph.inserting_before(code):
            both = graph.call_function(coded_moments._opoverload, code.args)
            both.meta["val"] = values
            parts = [_part(graph, both, number, value) for number, value in enumerate(values)]
        for user in list(node.users):
            user.replace_all_uses_with(parts[1 + user.args[1]])
            graph.erase_node(user)
        code.replace_all_uses_with(parts[0])
        graph.erase_node(node)
        found += 1
    if found:
        graph.eliminate_dead_code()
    return found


def _part(graph: fx.Graph, whole: fx.Node, number: int, value: Tensor) -> fx.Node:
    part = graph.call_function(operator.getitem, (whole, number))
    part.meta["val"] = value
    return part


def _is_moments(node: fx.Node) -> bool:
    """Variance and mean of every channel of a batch of images."""
    if node.target is not torch.ops.aten.var_mean.correction:
        return False
    dims = node.args[1] if len(node.args) > 1 else None
    wanted = {"correction": 0, "keepdim": True}
    return dims == [0, 2, 3] and dict(node.kwargs) == wanted and all(len(user.args) == 2 for user in node.users)


def _rounded_before(node: fx.Node) -> fx.Node | None:
    """The conversion to float8 whose values arrive at `node`; None where there is none, or of a 32-bit tensor."""
    source: Any = node.args[0]
    while isinstance(source, fx.Node) and source.target is _convert:
        given: Any = source.args[0]
        if source.args[1] in _FLOAT8:
            value = given.meta.get("val")
            is_half = isinstance(value, Tensor) and value.dtype in _HALF and value.dim() == 4
            return source if is_half else None
        source = given
    return None
