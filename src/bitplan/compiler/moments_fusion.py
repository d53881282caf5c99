"""Fusions around batch norm in packed execution: codes and moments in one pass over memory, and folded batch norms."""

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
#: From this size on the saved pass over memory takes longer than the host needs to call a custom operation.
MIN_ELEMENTS = 1 << 25
#: Metadata key of a node that is always saved for the backward pass.
KEPT = "bitplan_kept"


def fuse_moments(graph: fx.Graph, device: str = "cuda", min_elements: int = MIN_ELEMENTS) -> int:
    """Fuse the rounding of a tensor to float8 with the moments of the rounded values that batch norm needs.

    In the forward graph of packed execution. Only of 16-bit tensors: the order of summation changes, and packed float32
    equals emulation bit for bit. Returns the number of fusions.
    """
    count = 0
    for node in list(graph.nodes):
        code = _rounded_before(node) if _is_moments(node) else None
        if code is None or code.meta["val"].device.type != device or code.meta["val"].numel() < min_elements:
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
        count += 1
    if count:
        graph.eliminate_dead_code()
    return count


def fold_batch_norms(graph: fx.Graph) -> int:
    """Fold batch norm into one factor and one summand per channel, which are saved. Returns the number of folds.

    In the joint graph of packed execution. Batch norm is recomputed in the backward pass, where every element would
    read five tensors (itself, mean, variance, weight and bias) and take a root. With that many readers Inductor writes
    intermediate results to memory, at the peak of the step. Folded, an element reads three. Only of 16-bit tensors, as
    above.
    """
    count = 0
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
        count += 1
    if count:
        graph.eliminate_dead_code()
    return count


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
    small = (tuple(parameter.meta["val"].shape[-3:]) for parameter in (mean, deviation, weight, bias))
    return (x, mean, deviation, weight, bias) if all(shape == channels for shape in small) else None


def _inputs_of(node: fx.Node | None, target: Any) -> tuple[fx.Node | None, fx.Node | None]:
    """Both operands, where `node` is that operation of two tensors."""
    if node is None or node.target is not target or len(node.args) != 2 or node.kwargs:
        return None, None
    left, right = node.args
    return (left, right) if isinstance(left, fx.Node) and isinstance(right, fx.Node) else (None, None)


def _call(graph: fx.Graph, target: Any, *args: fx.Node) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*(arg.meta["val"] for arg in args))
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
    options = {"correction": 0, "keepdim": True}
    return dims == [0, 2, 3] and dict(node.kwargs) == options and all(len(user.args) == 2 for user in node.users)


def _rounded_before(node: fx.Node) -> fx.Node | None:
    """The conversion to float8 whose values arrive at `node`; None where there is none, or of a 32-bit tensor."""
    source: Any = node.args[0]
    while isinstance(source, fx.Node) and source.target is _convert:
        converted: Any = source.args[0]
        if source.args[1] in _FLOAT8:
            value = converted.meta.get("val")
            is_half = isinstance(value, Tensor) and value.dtype in _HALF and value.dim() == 4
            return source if is_half else None
        source = converted
    return None
