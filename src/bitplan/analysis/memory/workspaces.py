"""Memory that kernels take for themselves, of which torch's fake tensors know nothing.

:data:`KEPT` are workspaces that an operation returns for its backward pass: an entry gets what was returned on fake
tensors, and the arguments, and returns it with memory of the right size. :data:`PASSING` are those that are released
before the operation returns: an entry gets result and arguments and says how many bytes lived beside the result.

Both were found by looking at the allocator's events under torch 2.13; ``tests/memory`` holds them against those of the
torch that runs. Those of GPUs are not known here: cuDNN chooses its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# --- recurrent layers -------------------------------------------------------------------------------------------


def _good_row(elements: int) -> int:
    """oneDNN's length of a row: whole cache lines of floats, and no multiple of 256, which would hit one cache set."""
    rounded = -(-elements // 16) * 16
    return rounded + 16 if rounded % 256 == 0 else rounded


def _recurrent_on_cpu(result: tuple[Tensor, ...], input: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """oneDNN's training workspace of one recurrent layer.

    For each step and sequence of the batch it keeps the gates, and for states, cells and the gradients of both, before
    and after the layer and one step beyond the last: six rows as wide as the wider of input and state, and five as wide
    as the state.
    """
    weight, recurrent_weight = args[0], args[1]  # (gates times features, inputs), (gates times features, features)
    hidden = recurrent_weight.shape[1]
    steps, batch = input.shape[0], input.shape[1]
    states = 6 * _good_row(max(input.shape[2], hidden)) + 5 * _good_row(hidden)
    elements = batch * (steps * _good_row(weight.shape[0]) + (steps + 1) * states)
    return (*result[:3], result[3].new_empty(elements * input.element_size(), dtype=torch.uint8))


def _recurrent_backward_on_cpu(result: Any, input: Tensor, weight: Tensor, recurrent_weight: Tensor, *rest: Any) -> int:
    """Gradients of the gates and of the states of all steps, and the weights in oneDNN's rows.

    Larger weights have another copy or two, by rules that were not found: a hundredth of a step's peak or less.
    """
    steps, batch, inputs = input.shape
    hidden = recurrent_weight.shape[1]
    gates = _good_row(weight.shape[0])
    elements = steps * batch * (gates + hidden) + (inputs + hidden + batch) * gates
    return elements * input.element_size() if input.device.type == "cpu" else 0


#: Operation -> what puts in the memory that it keeps.
KEPT: dict[Any, Callable[..., Any]] = {torch.ops.aten.mkldnn_rnn_layer.default: _recurrent_on_cpu}


# --- convolutions -----------------------------------------------------------------------------------------------


#: oneDNN computes on blocks of so many channels: as many floats as a register holds.
_BLOCK = 16 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 8


def _is_reordered(x: Tensor) -> bool:
    """Whether oneDNN takes the images and brings them into an order of its own, and back."""
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    is_in_order = x.dim() in layouts and x.is_contiguous(memory_format=layouts[x.dim()])
    is_known = x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return is_known and not is_in_order and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _blocks(channels: int) -> int:
    return -(-channels // _BLOCK) * _BLOCK


def _in_blocks(x: Tensor) -> int:
    """Bytes of images whose channels fill whole blocks."""
    images, channels, *places = x.shape
    return images * _blocks(channels) * math.prod(places) * x.element_size()


def _read_in_blocks(x: Tensor, weight: Tensor) -> int:
    """Bytes of a copy that a pass reads; less than a block of channels, a network's first ones, is read as it is."""
    is_product = math.prod(weight.shape[2:]) == 1
    return _in_blocks(x) if x.shape[1] >= _BLOCK or is_product else 0


def _few_channels(x: Tensor, transposed: bool) -> int:
    """Bytes of copies that the weight's gradient takes of less than a block of channels: sequences become images."""
    return 2 * _bytes(x) if x.dim() == 3 else _bytes(x) if transposed else 0


def _weight_in_blocks(weight: Tensor, groups: int) -> int:
    """Both its axes of channels fill blocks, unless groups cut them."""
    if groups > 1:
        return _bytes(weight)
    first, second, *kernel = weight.shape
    return _blocks(first) * _blocks(second) * math.prod(kernel) * weight.element_size()


def _forth(result: Tensor, x: Tensor, weight: Tensor, groups: int) -> int:
    """Input, weight and result in blocks; then the result in both orders."""
    blocks = _in_blocks(result)
    return max(_read_in_blocks(x, weight) + _weight_in_blocks(weight, groups) + blocks - _bytes(result), blocks)


def _back(result: Tensor, grad: Tensor, weight: Tensor, groups: int, is_strided: bool) -> int:
    """What spreads each value over a kernel's places: an input's gradient, or a transposed convolution's result."""
    is_whole = is_strided and result.shape[1] < _BLOCK
    blocks = _bytes(result) if is_whole else _in_blocks(result)
    at_once = _in_blocks(grad) + _weight_in_blocks(weight, groups) + blocks - _bytes(result)
    return max(at_once, 2 * _bytes(result) if is_strided and weight.shape[1] > 1 else 0)


def _columns(x: Tensor, weight: Tensor, result: Tensor) -> int:
    """Without oneDNN (float64) every image is written as many times as a kernel has places, all at once."""
    places = math.prod(weight.shape[2:])
    if x.device.type != "cpu" or x.dim() != 4 or x.dtype != torch.float64 or places == 1:
        return 0
    return x.shape[0] * x.shape[1] * places * math.prod(result.shape[2:]) * x.element_size()


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
        return _columns(x, weight, result)
    if transposed:
        return _back(result, x, weight, groups, any(size != 1 for size in stride))
    return _forth(result, x, weight, groups)


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
    """The input's gradient, before the weight's has its memory; then the weight's beside it."""
    to_x, to_weight = result[0], result[1]
    if not _is_reordered(x):
        return _columns(x, weight, grad) if to_weight is not None else 0
    workspace = 0
    copied = 0 if grad.is_contiguous() else _bytes(grad)  # a part of a gradient, as a concatenation passes it back
    if to_x is not None:
        is_strided = any(size != 1 for size in stride)
        workspace = _forth(to_x, grad, weight, groups) if transposed else _back(to_x, grad, weight, groups, is_strided)
        workspace -= 0 if to_weight is None else _bytes(weight)
    if to_weight is not None and (groups == 1 or groups == x.shape[1]):
        small, large = (grad, x) if transposed else (x, grad)  # in which order of channels the weight's are
        if x.dtype == torch.float32 or _read_in_blocks(small, weight):
            workspace = max(
                workspace, _in_blocks(large) + (_read_in_blocks(small, weight) or _few_channels(small, transposed))
            )
    return workspace + copied


# --- others -----------------------------------------------------------------------------------------------------


def _batch_norm_backward(result: Any, grad: Tensor, x: Tensor, *rest: Any) -> int:
    return _bytes(x) if x.device.type == "cpu" and grad.is_contiguous() == x.is_contiguous() else 0


def _upsample(result: Tensor, x: Tensor, *rest: Any) -> int:
    """Both in another order."""
    return _bytes(x) + _bytes(result) if x.device.type == "cpu" else 0


def _upsample_backward(result: Tensor, grad: Tensor, *rest: Any) -> int:
    return 0 if grad.device.type != "cpu" or grad.is_contiguous() else _bytes(grad)


#: Operation -> how many bytes it takes for itself while it is at work.
PASSING: dict[Any, Callable[..., int]] = {
    torch.ops.aten.convolution.default: _convolution,
    torch.ops.aten.convolution_backward.default: _convolution_backward,
    torch.ops.aten.mkldnn_rnn_layer_backward.default: _recurrent_backward_on_cpu,
    torch.ops.aten.native_batch_norm_backward.default: _batch_norm_backward,
    torch.ops.aten.upsample_bilinear2d.default: _upsample,
    torch.ops.aten.upsample_bilinear2d_backward.default: _upsample_backward,
}
