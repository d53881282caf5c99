"""Input gradients of convolutions as forward convolutions, in compiled models with deterministic cuDNN.

Where cuDNN must be deterministic, its kernels for input gradients are slow for few channels: on an H200 those of six
convolutions of 16 channels (ResNet-20, batch 128, TF32) take 0.77 ms, where the forward pass of the same layers takes
0.19. The gradient of a convolution's input at stride 1 is itself a convolution: of the output's gradient with the
weights, flipped in space and with input and output channels swapped. Forward kernels are deterministic, too.

Results differ in their last bits from those of cuDNN's own kernels, so other programs keep these.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from bitplan.compiler.graph_passes import PostGradPass, with_pass
from bitplan.compiler.patterns import VALUE_KEYS
from bitplan.compiler.torch_private import detect_fake_mode, get_hash_for_files, select_decomp_table

_aten: Any = torch.ops.aten
#: A switch for comparisons.
REPLACES = True


def input_gradient(dy: Tensor, w: Tensor, padding: list[int]) -> Tensor:
    """The gradient of the input of a convolution for which :func:`is_forward_convolution` holds."""
    axes, back = list(range(2, w.dim())), _padding_of_gradient(w, padding)
    turned = w.flip(axes).transpose(0, 1)
    ones, zeros = [1] * len(axes), [0] * len(axes)
    gradient: Tensor = _aten.convolution(dy, turned, None, ones, back, ones, False, zeros, 1)
    return gradient


def is_forward_convolution(
    w: Tensor, stride: list[int], padding: list[int], dilation: list[int], transposed: bool, groups: int
) -> bool:
    """Whether the gradient of a convolution's input is a convolution: stride 1, neither groups nor dilation."""
    is_plain = not transposed and groups == 1 and all(size == 1 for size in (*stride, *dilation))
    return is_plain and not w.is_complex() and all(size >= 0 for size in _padding_of_gradient(w, padding))


def _padding_of_gradient(w: Tensor, padding: list[int]) -> list[int]:
    return [size - 1 - before for size, before in zip(w.shape[2:], padding, strict=True)]


def replace_input_gradients(graph: fx.Graph, device: str = "cuda") -> int:
    """Replace input gradients on that device by forward convolutions. Returns how many were replaced."""
    count = 0
    for node in graph.find_nodes(op="call_function", target=_aten.convolution_backward.default):
        dy, _, w, _, stride, padding, dilation, transposed, _, groups, output_mask = node.args
        value = w.meta["val"]
        settings = (stride, padding, dilation, transposed, groups)
        if not output_mask[0] or value.device.type != device or not is_forward_convolution(value, *settings):
            continue
        mode = detect_fake_mode([value])
        assert mode is not None
        with mode, graph.inserting_before(node):
            gradient = _insert_input_gradient(graph, dy, w, padding, node)
        for user in [user for user in node.users if user.args[1] == 0]:
            assert user.target is operator.getitem
            user.replace_all_uses_with(gradient)
            graph.erase_node(user)
        node.update_arg(10, [False, *output_mask[1:]])
        node.meta["val"] = (None, *node.meta["val"][1:])
        if not node.users:
            graph.erase_node(node)
        count += 1
    return count


def _insert_input_gradient(graph: fx.Graph, dy: fx.Node, w: fx.Node, padding: list[int], node: fx.Node) -> fx.Node:
    """The nodes of :func:`input_gradient`, with the metadata of the node that they replace."""
    decompositions = select_decomp_table()
    traced = make_fx(partial(input_gradient, padding=padding), decompositions)(dy.meta["val"], w.meta["val"])
    copies: dict[fx.Node, fx.Node] = dict(zip(traced.graph.find_nodes(op="placeholder"), (dy, w), strict=True))
    kept = {key: value for key, value in node.meta.items() if key not in VALUE_KEYS}
    for traced_node in traced.graph.nodes:
        if traced_node.op == "call_function":
            copies[traced_node] = graph.node_copy(traced_node, copies.__getitem__)
            copies[traced_node].meta.update(kept)
    (gradient,) = traced.graph.output_node().all_input_nodes
    return copies[gradient]


class InputGradientPass(PostGradPass):
    """:func:`replace_input_gradients` as an Inductor pass."""

    def change(self, graph: fx.Graph) -> None:
        replace_input_gradients(graph)

    def own_key(self) -> Any:
        return get_hash_for_files((__file__,))


def with_input_gradients(options: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor options for a model that is compiled now, with the pass where cuDNN must be deterministic.

    Only ``torch.backends.cudnn.deterministic`` asks for it, as ``bitplan train`` does.
    """
    return with_pass(options, InputGradientPass) if REPLACES else dict(options)
