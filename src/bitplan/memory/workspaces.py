"""Memory that kernels return for their backward pass, of a size that torch's fake tensors do not know.

An entry gets what the operation returned on fake tensors, and its arguments, and returns it with memory of the right
size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _good_row(elements: int) -> int:
    """oneDNN's length of a row: whole cache lines of floats, and no multiple of 256, which would hit one cache set."""
    rounded = -(-elements // 16) * 16
    return rounded + 16 if rounded % 256 == 0 else rounded


def _recurrent_on_cpu(result: tuple[Tensor, ...], input: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """oneDNN's training workspace of one recurrent layer.

    For each step and sequence of the batch it keeps the gates, and for states, cells and the gradients of both, before
    and after the layer and one step beyond the last: six rows as wide as the wider of input and state, and five as wide
    as the state. (Found from the sizes that torch 2.13 returns for an LSTM, which this meets within 3 %.)
    """
    weight = args[0]  # (gates times features, inputs)
    workspace = result[3]
    hidden = args[1].shape[1]
    steps, batch = input.shape[0], input.shape[1]
    gates = weight.shape[0] // hidden
    states = 6 * _good_row(max(input.shape[2], hidden)) + 5 * _good_row(hidden)
    elements = batch * (steps * _good_row(gates * hidden) + (steps + 1) * states)
    return (*result[:3], workspace.new_empty(elements * input.element_size(), dtype=torch.uint8))


#: Operation -> what puts the memory in.
WORKSPACES: dict[Any, Callable[..., Any]] = {torch.ops.aten.mkldnn_rnn_layer.default: _recurrent_on_cpu}
