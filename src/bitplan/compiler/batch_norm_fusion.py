"""Fusions around batch norm in packed execution: float8 codes with channel statistics, and folded batch norms.

The operation ``bitplan::cast_with_channel_stats`` rounds a tensor to float8 and computes mean and variance of the
rounded values per channel, in one pass over memory.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from bitplan.compiler.kernel_ops import register_kernels
from bitplan.compiler.patterns import call, result_of

# Defined by hand: torch.library.custom_op checks every result of every call for aliases.
_LIBRARY: Any = torch.library.Library("bitplan", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "cast_with_channel_stats(Tensor y, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)

_aten: Any = torch.ops.aten
_convert: Any = torch.ops.prims.convert_element_type.default
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_HALF = (torch.bfloat16, torch.float16)
#: From this size on the saved pass over memory takes longer than the host needs to call a custom operation.
MIN_ELEMENTS = 1 << 25
#: Metadata key of a node that is always saved for the backward pass.
ALWAYS_SAVED = "bitplan_always_saved"


def cast_with_channel_stats_reference(y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, variance, mean) of `y`, (samples, channels, height, width), in plain torch.

    Codes are the values in a float8 dtype, saturating. Variance, without Bessel's correction, and mean are those of the
    codes, shaped (1, channels, 1, 1).
    """
    largest = torch.finfo(dtype).max
    codes = y.clamp(-largest, largest).to(dtype)
    var, mean = torch.var_mean(codes.float(), (0, 2, 3), correction=0, keepdim=True)
    return codes, var, mean


def _is_channels_last(y: Tensor, *_: Any) -> bool:
    """Whether the tensor is not empty and in the memory format channels_last."""
    return y.numel() > 0 and y.is_contiguous(memory_format=torch.channels_last)


_KERNEL = register_kernels("cast_with_channel_stats", __name__, _is_channels_last)


def _cast_on_gpu(y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    if not _is_channels_last(y):
        return cast_with_channel_stats_reference(y, dtype)
    with torch.cuda.device(y.get_device()):
        results: tuple[Tensor, Tensor, Tensor] = _KERNEL.launch(y, dtype)
    return results


def _fake_cast(y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    var = y.new_empty((1, y.shape[1], 1, 1), dtype=torch.float32)
    return torch.empty_like(y, dtype=dtype), var, torch.empty_like(var)


_LIBRARY.impl("cast_with_channel_stats", cast_with_channel_stats_reference, "CompositeExplicitAutograd")
_LIBRARY.impl("cast_with_channel_stats", _cast_on_gpu, "CUDA")
torch.library.register_fake("bitplan::cast_with_channel_stats", _fake_cast, lib=_LIBRARY)


def fuse_channel_stats(graph: fx.Graph, device: str = "cuda", min_elements: int = MIN_ELEMENTS) -> int:
    """Fuse the rounding of a tensor to float8 with the channel statistics that batch norm needs.

    In the forward graph of packed execution. Only of 16-bit tensors: the order of summation changes, and packed float32
    equals emulation bit for bit. Returns the number of fusions.
    """
    count = 0
    for node in list(graph.nodes):
        codes = _find_codes(node) if _is_channel_stats(node) else None
        if codes is None or codes.meta["val"].device.type != device or codes.meta["val"].numel() < min_elements:
            continue
        with graph.inserting_before(codes):
            fused = graph.call_function(torch.ops.bitplan.cast_with_channel_stats.default, codes.args)
            fused.meta["val"] = (codes.meta["val"], *node.meta["val"])
            new_codes, *stats = (result_of(graph, fused, number) for number in range(3))
        for user in list(node.users):
            user.replace_all_uses_with(stats[user.args[1]])
            graph.erase_node(user)
        codes.replace_all_uses_with(new_codes)
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
        inputs = _match_batch_norm(node)
        if inputs is None:
            continue
        x, mean, deviation, weight, bias = inputs
        with graph.inserting_before(node):
            factor = call(graph, _aten.mul.Tensor, (deviation, weight))
            # Not mean times factor: Triton 3.6 fails on kernels that store a number per channel and then use it.
            shift = call(graph, _aten.mul.Tensor, (call(graph, _aten.mul.Tensor, (mean, deviation)), weight))
            summand = call(graph, _aten.sub.Tensor, (bias, shift))
            scaled = call(graph, _aten.mul.Tensor, (x, factor))
            folded = call(graph, _aten.add.Tensor, (scaled, summand))
        for saved in (factor, summand):
            saved.meta[ALWAYS_SAVED] = True
        node.replace_all_uses_with(folded)
        count += 1
    if count:
        graph.eliminate_dead_code()
    return count


def _match_batch_norm(node: fx.Node) -> tuple[fx.Node, ...] | None:
    """x, mean, inverse deviation, weight and bias, where `node` is their batch norm in training, of a 16-bit x."""
    weighted, bias = _operands_of(node, _aten.add.Tensor)
    normal, weight = _operands_of(weighted, _aten.mul.Tensor)
    centred, deviation = _operands_of(normal, _aten.mul.Tensor)
    x, mean = _operands_of(centred, _aten.sub.Tensor)
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


def _operands_of(node: fx.Node | None, target: Any) -> tuple[fx.Node | None, fx.Node | None]:
    """Both operands, where `node` is that operation of two tensors."""
    if node is None or node.target is not target or len(node.args) != 2 or node.kwargs:
        return None, None
    left, right = node.args
    return (left, right) if isinstance(left, fx.Node) and isinstance(right, fx.Node) else (None, None)


def _is_channel_stats(node: fx.Node) -> bool:
    """Whether the node computes variance and mean of every channel of a batch of images."""
    if node.target is not torch.ops.aten.var_mean.correction:
        return False
    dims = node.args[1] if len(node.args) > 1 else None
    options = {"correction": 0, "keepdim": True}
    return dims == [0, 2, 3] and dict(node.kwargs) == options and all(len(user.args) == 2 for user in node.users)


def _find_codes(node: fx.Node) -> fx.Node | None:
    """The conversion to float8 that `node` reads; None if there is none, or if its input has 32 bits."""
    source: Any = node.args[0]
    while isinstance(source, fx.Node) and source.target is _convert:
        converted: Any = source.args[0]
        if source.args[1] in _FLOAT8:
            value = converted.meta.get("val")
            is_half = isinstance(value, Tensor) and value.dtype in _HALF and value.dim() == 4
            return source if is_half else None
        source = converted
    return None
