"""Memory that kernels take for themselves, of which torch's fake tensors know nothing.

:data:`KEPT` are workspaces that an operation returns for its backward pass: an entry gets what was returned on fake
tensors, and the arguments, and returns it with memory of the right size. :data:`PASSING` are those that are released
before the operation returns: an entry gets result and arguments and says how many bytes lived beside the result.

Both were found by looking at the allocator's events under torch 2.13; ``tests/memory`` holds them against those of the
torch that runs. Those of GPUs are not known here: cuDNN chooses its own.
"""

from __future__ import annotations

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


#: Operation -> what puts in the memory that it keeps.
KEPT: dict[Any, Callable[..., Any]] = {torch.ops.aten.mkldnn_rnn_layer.default: _recurrent_on_cpu}


# --- convolutions -----------------------------------------------------------------------------------------------


def _is_reordered(x: Tensor) -> bool:
    """Whether oneDNN takes the images and brings them into an order of its own, and back."""
    return (
        x.device.type == "cpu"
        and x.dim() == 4
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and not x.is_contiguous(memory_format=torch.channels_last)
    )


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _convolution(result: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> int:
    """First input and weight in oneDNN's order beside the result, then the result in both orders."""
    return max(_bytes(x) + _bytes(weight), _bytes(result)) if _is_reordered(x) else 0


def _convolution_backward(
    result: tuple[Tensor | None, ...], grad: Tensor, x: Tensor, weight: Tensor, sizes: Any, stride: Any, *rest: Any
) -> int:
    """Gradient and input in oneDNN's order; where the stride is not 1, also the input's gradient twice."""
    if not _is_reordered(x):
        return 0
    if result[0] is None:
        return _bytes(grad)
    is_strided = any(size != 1 for size in stride) and weight.shape[1] > 1
    return max(_bytes(grad) + _bytes(x), 2 * _bytes(x) - _bytes(weight) if is_strided else 0)


#: Operation -> how many bytes it takes for itself while it is at work.
PASSING: dict[Any, Callable[..., int]] = {
    torch.ops.aten.convolution.default: _convolution,
    torch.ops.aten.convolution_backward.default: _convolution_backward,
}
