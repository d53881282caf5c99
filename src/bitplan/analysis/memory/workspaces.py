"""Workspaces of CPU kernels, which fake tensors do not have.

:data:`RETURNED_WORKSPACES` are those that an operation returns for its backward pass: a function of the fake result and
the arguments returns the result with a workspace of the right size. :data:`TEMPORARY_BYTES` are those that are released
before the operation returns: a function of result and arguments returns the bytes allocated in addition to the result.

Both were derived from the allocator's events under torch 2.13; ``tests/memory`` compares them with those of the
installed torch. Workspaces of GPU kernels are not included: cuDNN chooses them at run time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# --- Recurrent layers


def _padded_row(elements: int) -> int:
    """oneDNN's row length: whole cache lines of floats, and no multiple of 256, to avoid cache set conflicts."""
    rounded = -(-elements // 16) * 16
    return rounded + 16 if rounded % 256 == 0 else rounded


def _rnn_workspace(result: tuple[Tensor, ...], input: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """oneDNN's training workspace of a recurrent layer.

    For each step and sequence it has the gates; and for states, cells and their gradients, before and after the layer
    and one step beyond the last: six rows of the width of the wider of input and state, and five of that of the state.
    """
    weight, recurrent_weight = args[0], args[1]  # (gates times features, inputs), (gates times features, features)
    hidden = recurrent_weight.shape[1]
    steps, batch = input.shape[0], input.shape[1]
    states = 6 * _padded_row(max(input.shape[2], hidden)) + 5 * _padded_row(hidden)
    elements = batch * (steps * _padded_row(weight.shape[0]) + (steps + 1) * states)
    return (*result[:3], result[3].new_empty(elements * input.element_size(), dtype=torch.uint8))


def _rnn_backward_bytes(result: Any, input: Tensor, weight: Tensor, recurrent_weight: Tensor, *rest: Any) -> int:
    """Gradients of gates and states of all steps, and the weights in oneDNN's row layout.

    Larger weights have one or two more copies, by unknown rules: 1 % of a step's peak or less.
    """
    steps, batch, inputs = input.shape
    hidden = recurrent_weight.shape[1]
    gates = _padded_row(weight.shape[0])
    elements = steps * batch * (gates + hidden) + (inputs + hidden + batch) * gates
    return elements * input.element_size() if input.device.type == "cpu" else 0


#: Operation -> function that adds the workspace to the result.
RETURNED_WORKSPACES: dict[Any, Callable[..., Any]] = {torch.ops.aten.mkldnn_rnn_layer.default: _rnn_workspace}


# --- Convolutions


#: oneDNN computes on blocks of this many channels, the floats in a register.
_BLOCK = 16 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 8


def _is_reordered(x: Tensor) -> bool:
    """Whether oneDNN converts the images to a blocked layout and back."""
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    is_channels_last = x.dim() in layouts and x.is_contiguous(memory_format=layouts[x.dim()])
    is_supported = x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return is_supported and not is_channels_last and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _pad_to_block(channels: int) -> int:
    return -(-channels // _BLOCK) * _BLOCK


def _blocked_bytes(x: Tensor) -> int:
    """Bytes of images in blocked layout."""
    images, channels, *size = x.shape
    return images * _pad_to_block(channels) * math.prod(size) * x.element_size()


def _blocked_read_bytes(x: Tensor, weight: Tensor) -> int:
    """Bytes of the blocked copy that a pass reads; fewer channels than a block are read without a copy."""
    is_pointwise = math.prod(weight.shape[2:]) == 1
    return _blocked_bytes(x) if x.shape[1] >= _BLOCK or is_pointwise else 0


def _few_channels_bytes(x: Tensor, transposed: bool) -> int:
    """Bytes of the copies for the weight gradient of fewer channels than a block: sequences become images."""
    return 2 * _bytes(x) if x.dim() == 3 else _bytes(x) if transposed else 0


def _blocked_weight_bytes(weight: Tensor, groups: int) -> int:
    """Bytes of the weight with both channel axes in blocks, except with groups."""
    if groups > 1:
        return _bytes(weight)
    first, second, *kernel = weight.shape
    return _pad_to_block(first) * _pad_to_block(second) * math.prod(kernel) * weight.element_size()


def _forward_bytes(result: Tensor, x: Tensor, weight: Tensor, groups: int) -> int:
    """Input, weight and result in blocked layout; then the result in both layouts."""
    blocks = _blocked_bytes(result)
    return max(_blocked_read_bytes(x, weight) + _blocked_weight_bytes(weight, groups) + blocks - _bytes(result), blocks)


def _backward_bytes(result: Tensor, grad: Tensor, weight: Tensor, groups: int, is_strided: bool) -> int:
    """The gradient of the input, or the result of a transposed convolution."""
    is_unblocked = is_strided and result.shape[1] < _BLOCK
    blocks = _bytes(result) if is_unblocked else _blocked_bytes(result)
    concurrent = _blocked_bytes(grad) + _blocked_weight_bytes(weight, groups) + blocks - _bytes(result)
    return max(concurrent, 2 * _bytes(result) if is_strided and weight.shape[1] > 1 else 0)


def _im2col_bytes(x: Tensor, weight: Tensor, result: Tensor) -> int:
    """Without oneDNN (float64): im2col of all images."""
    kernel_area = math.prod(weight.shape[2:])
    if x.device.type != "cpu" or x.dim() != 4 or x.dtype != torch.float64 or kernel_area == 1:
        return 0
    return x.shape[0] * x.shape[1] * kernel_area * math.prod(result.shape[2:]) * x.element_size()


def _convolution(
    result: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> int:
    if not _is_reordered(x):
        return _im2col_bytes(x, weight, result)
    if transposed:
        return _backward_bytes(result, x, weight, groups, any(size != 1 for size in stride))
    return _forward_bytes(result, x, weight, groups)


def _convolution_backward(
    result: tuple[Tensor | None, ...],
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    *rest: Any,
) -> int:
    """The larger of the workspaces of the input gradient and, allocated later, of the weight gradient."""
    grad_x, grad_weight = result[0], result[1]
    if not _is_reordered(x):
        return _im2col_bytes(x, weight, grad) if grad_weight is not None else 0
    workspace = 0
    copied = 0 if grad.is_contiguous() else _bytes(grad)  # a view of a gradient, as from a concatenation
    if grad_x is not None:
        is_strided = any(size != 1 for size in stride)
        workspace = (
            _forward_bytes(grad_x, grad, weight, groups)
            if transposed
            else _backward_bytes(grad_x, grad, weight, groups, is_strided)
        )
        workspace -= 0 if grad_weight is None else _bytes(weight)
    if grad_weight is not None and (groups == 1 or groups == x.shape[1]):
        small, large = (grad, x) if transposed else (x, grad)  # in the order of the weight's channel axes
        if x.dtype == torch.float32 or _blocked_read_bytes(small, weight):
            workspace = max(
                workspace,
                _blocked_bytes(large) + (_blocked_read_bytes(small, weight) or _few_channels_bytes(small, transposed)),
            )
    return workspace + copied


# --- Other operations


def _batch_norm_backward(result: Any, grad: Tensor, x: Tensor, *rest: Any) -> int:
    return _bytes(x) if x.device.type == "cpu" and grad.is_contiguous() == x.is_contiguous() else 0


def _upsample(result: Tensor, x: Tensor, *rest: Any) -> int:
    """Input and result in another layout."""
    return _bytes(x) + _bytes(result) if x.device.type == "cpu" else 0


def _upsample_backward(result: Tensor, grad: Tensor, *rest: Any) -> int:
    return 0 if grad.device.type != "cpu" or grad.is_contiguous() else _bytes(grad)


#: Operation -> function that returns its temporary bytes.
TEMPORARY_BYTES: dict[Any, Callable[..., int]] = {
    torch.ops.aten.convolution.default: _convolution,
    torch.ops.aten.convolution_backward.default: _convolution_backward,
    torch.ops.aten.mkldnn_rnn_layer_backward.default: _rnn_backward_bytes,
    torch.ops.aten.native_batch_norm_backward.default: _batch_norm_backward,
    torch.ops.aten.upsample_bilinear2d.default: _upsample,
    torch.ops.aten.upsample_bilinear2d_backward.default: _upsample_backward,
}
