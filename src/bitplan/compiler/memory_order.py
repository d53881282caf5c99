"""The memory order of tensors that a compiled model saves for its backward pass.

In a graph with convolutions, Inductor stores every saved tensor of four dimensions as channels-last, up to the last
convolution, whatever its dimensions mean. For images (samples, channels, height, width) this is right. For the input
and output of a linear layer in between, (samples, height, width, channels), it stores height innermost, while the
gradient that is read with the tensor has channels innermost: on an H200 the backward pass of a GELU between two linear
layers of ConvNeXt-T took 2.6 ms instead of 0.3. Without a plan torch saves the matrix that the linear layer returns,
which has two dimensions; codes have the shape that the next operation reads.

:func:`save_in_memory_order` saves such tensors as matrices, too. Both graphs see views of them, which cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from bitplan.compiler.patterns import call, view_as
from bitplan.compiler.torch_private import REALIZE_TO_STRIDES

_aten: Any = torch.ops.aten
_convolution = torch.ops.aten.convolution.default
#: Operations after which the dimensions of an image are elsewhere, or mean something else. Not ``view.dtype``.
_REARRANGING = frozenset(
    (
        _aten.view.default,
        _aten.reshape.default,
        _aten._unsafe_view.default,
        _aten.permute.default,
        _aten.transpose.int,
        _aten.as_strided.default,
        _aten.select.int,
        _aten.unsqueeze.default,
    )
)


def save_in_memory_order(forward: fx.GraphModule, backward: fx.GraphModule, num_results: int) -> int:
    """Save tensors of four dimensions that are no images as matrices. Returns how many were changed.

    :param num_results: how many of the forward graph's outputs are not saved tensors.
    """
    convolutions = forward.graph.find_nodes(op="call_function", target=_convolution)
    if not convolutions:
        return 0
    output = forward.graph.output_node()
    outputs: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    placeholders = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    images = _find_images(forward.graph)
    count = 0
    for position, node in enumerate(outputs[num_results:], num_results):
        if not isinstance(node, fx.Node) or node.name not in placeholders or node in outputs[:num_results]:
            continue
        if node in images or not _is_dense(node) or not node < convolutions[-1]:
            continue
        order = _order_of(node.meta["val"])
        outputs[position] = _save_as_matrix(forward.graph, node, order)
        _restore(backward.graph, placeholders[node.name], outputs[position], order)
        count += 1
    if count:
        output.args = (tuple(outputs),)
        forward.recompile()
        backward.recompile()
    return count


def _save_as_matrix(graph: fx.Graph, node: fx.Node, order: Sequence[int]) -> fx.Node:
    """Insert a view of a tensor: the matrix whose rows are the tensor's innermost dimension in memory."""
    node.meta[REALIZE_TO_STRIDES] = True
    with graph.inserting_before(node.next):
        ordered = _permute(graph, node, order)
        rows, columns = ordered.meta["val"].flatten(0, -2).shape
        matrix = call(graph, _aten.view.default, (ordered, [rows, columns]), node)
    matrix._rename(f"{node.name}_matrix")
    return matrix


def _restore(graph: fx.Graph, placeholder: fx.Node, matrix: fx.Node, order: Sequence[int]) -> None:
    """Read the forward graph's `matrix` in the backward graph, instead of the tensor that `placeholder` was."""
    shape = placeholder.meta["val"].shape
    inverse = [order.index(dim) for dim in range(len(order))]
    with graph.inserting_before(placeholder):
        saved = graph.placeholder(matrix.name)
    saved.meta.update(placeholder.meta)
    saved.meta["val"] = matrix.meta["val"]
    with graph.inserting_before(min(placeholder.users)):
        ordered = view_as(graph, saved, tuple(shape[dim] for dim in order))
        restored = _permute(graph, ordered, inverse)
    placeholder.replace_all_uses_with(restored)
    graph.erase_node(placeholder)


def _permute(graph: fx.Graph, node: fx.Node, order: Sequence[int]) -> fx.Node:
    if list(order) == sorted(order):
        return node
    return call(graph, _aten.permute.default, (node, list(order)), node)


def _find_images(graph: fx.Graph) -> set[fx.Node]:
    """Inputs and results of convolutions, and what other operations compute from images, or images from."""
    images: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if _dims(node) == 4 and any(_passes_images(user, node, images) for user in node.users):
            images.add(node)
    for node in graph.nodes:
        is_rearranged = node.target in _REARRANGING
        if node.target is _convolution or (not is_rearranged and any(map(images.__contains__, node.all_input_nodes))):
            images.add(node)
    return images


def _passes_images(user: fx.Node, node: fx.Node, images: set[fx.Node]) -> bool:
    if user.target is _convolution:
        return user.args[0] is node
    return user in images and user.target not in _REARRANGING


def _order_of(value: Tensor) -> tuple[int, ...]:
    """The dimensions of a tensor from the outermost to the innermost in memory."""
    strides = value.stride()
    return tuple(sorted(range(value.dim()), key=lambda dim: (-strides[dim], dim)))


def _is_dense(node: fx.Node) -> bool:
    """Whether it is a tensor of four dimensions, of static size, that fills its memory."""
    if _dims(node) != 4 or node.op != "call_function":
        return False
    value = node.meta["val"]
    is_static = all(isinstance(size, int) for size in value.shape)
    return is_static and value.numel() > 0 and value.permute(_order_of(value)).is_contiguous()


def _dims(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.dim() if isinstance(value, Tensor) else 0
