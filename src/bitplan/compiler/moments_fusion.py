"""Work that Inductor would do in several passes over memory, handed to operations that do it in one."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from bitplan.compiler import moments  # noqa: F401 - defines the operation

_aten: Any = torch.ops.aten
_convert: Any = torch.ops.prims.convert_element_type.default
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_HALF = (torch.bfloat16, torch.float16)
#: From so many elements on, the pass that is saved takes longer than it takes the host to call an operation of ours.
LEAST = 1 << 25
#: The mark of a node that is kept for the backward pass whatever it costs to compute.
KEPT = "bitplan_kept"


def fuse_moments(graph: fx.Graph, device: str = "cuda", least: int = LEAST) -> int:
    """In the forward graph of packed execution: where a tensor of at least so many elements is rounded to float8 and
    batch norm wants the moments of the rounded values, make codes and moments in one pass. How many there were.

    Only of 16-bit tensors: sums are added up in another order, and packed float32 equals emulation bit for bit.
    """
    found = 0
    for node in list(graph.nodes):
        code = _rounded_before(node) if _is_moments(node) else None
        if code is None or code.meta["val"].device.type != device or code.meta["val"].numel() < least:
            continue
        values = (code.meta["val"], *node.meta["val"])
        with graph.inserting_before(code):
            both = graph.call_function(torch.ops.bitplan.coded_moments.default, code.args)
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


def fold_batch_norms(graph: fx.Graph) -> int:
    """In the joint graph of packed execution: let batch norm be one factor and one summand for each channel, which are
    kept. How many there were.

    Batch norm is computed again in backward, and there every element would read five tensors (itself, mean, variance,
    weight and bias) and take a root: so many readers that Inductor writes results into memory which it could compute
    where they are wanted, at the peak of the step. Folded it reads three. Only of 16-bit tensors, as above.
    """
    found = 0
    for node in list(graph.nodes):
        parts = _normalised(node)
        if parts is None:
            continue
        x, mean, deviation, weight, bias = parts
        with graph.inserting_before(node):
            factor = _call(graph, _aten.mul.Tensor, deviation, weight)
            # Not mean times factor: Triton 3.6 fails on kernels that store a number per channel and go on with it.
            shift = _call(graph, _aten.mul.Tensor, _call(graph, _aten.mul.Tensor, mean, deviation), weight)
            summand = _call(graph, _aten.sub.Tensor, bias, shift)
            scaled = _call(graph, _aten.mul.Tensor, x, factor)
            folded = _call(graph, _aten.add.Tensor, scaled, summand)
        for small in (factor, summand):
            small.meta[KEPT] = True
        node.replace_all_uses_with(folded)
        found += 1
    if found:
        graph.eliminate_dead_code()
    return found


def _normalised(node: fx.Node) -> tuple[fx.Node, ...] | None:
    """x, mean, inverse deviation, weight and bias, where `node` is their batch norm in training, of a 16-bit x."""
    weighted, bias = _inputs_of(node, _aten.add.Tensor)
    normal, weight = _inputs_of(weighted, _aten.mul.Tensor)
    centred, deviation = _inputs_of(normal, _aten.mul.Tensor)
    x, mean = _inputs_of(centred, _aten.sub.Tensor)
    if x is None or deviation is None or weight is None or bias is None or mean is None:
        return None
    if deviation.target is not _aten.rsqrt.default or mean.target is not operator.getitem:
        return None
    value: Any = x.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() != 4 or value.dtype not in _HALF:
        return None
    channels = (value.shape[1], 1, 1)
    small = (tuple(each.meta["val"].shape[-3:]) for each in (mean, deviation, weight, bias))
    return (x, mean, deviation, weight, bias) if all(shape == channels for shape in small) else None


def _inputs_of(node: fx.Node | None, target: Any) -> tuple[fx.Node | None, fx.Node | None]:
    """Both operands, where `node` is that operation of two tensors."""
    if node is None or node.target is not target or len(node.args) != 2 or node.kwargs:
        return None, None
    one, other = node.args
    return (one, other) if isinstance(one, fx.Node) and isinstance(other, fx.Node) else (None, None)


def _call(graph: fx.Graph, target: Any, *given: fx.Node) -> fx.Node:
    node = graph.call_function(target, given)
    node.meta["val"] = target(*(each.meta["val"] for each in given))
    return node


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
