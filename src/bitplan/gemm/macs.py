"""Multiply-accumulates (MACs) of every product, from the shapes of what was multiplied.

========================  ==========================================================================================
linear, matmul, bmm ...   elements of the result x length of the sum
conv 1d, 2d, 3d           elements of the result x (input channels / groups x kernel)
conv_transpose            elements of the *input* x (output channels / groups x kernel)
einsum of two             product of the sizes of all indices
grouped_mm                elements of x x columns of w
attention                 Q K^T and P V, each batch x heads x queries x keys x head size. A causal mask or any other is
                          counted as dense: kernels may skip what is masked, the definition does not
LSTM, GRU, RNN            steps x batch x elements of every weight matrix
sparse x dense            stored values x columns of the dense matrix
========================  ==========================================================================================

Biases, norms, softmax and everything else that is not a product count nothing, as in the papers that bitplan follows.
An operation that torch carries out by matrix products but that is not in the table raises: a cost must not overlook
one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitplan.capture.ops import PRODUCTS
from bitplan.capture.recording import Operation
from bitplan.errors import CostError


@dataclass(frozen=True)
class Multiplication:
    """One product y = x w of an operation."""

    macs: int
    #: None: a tensor inside a fused operation, which nobody else sees.
    x: Tensor | None
    w: Tensor | None
    #: Whether y is what the operation returns, rather than a tensor inside it.
    is_result: bool = True


def multiplications(operation: Operation) -> list[Multiplication]:
    """The products of an operation; none for what multiplies nothing."""
    counter = _COUNTERS.get(operation.op)
    if counter is not None:
        return list(counter(operation))
    if operation.aten_products:
        raise _uncounted(operation)
    return []


def _uncounted(operation: Operation) -> CostError:
    names = ", ".join(dict.fromkeys(operation.aten_products)) or "no product of aten's"
    return CostError(
        f"{operation.label} multiplies ({names}) in a way that bitplan cannot count: write it with linear, matmul, "
        f"convolutions or einsum of two tensors."
    )


# --- two tensors ---


def _two(operation: Operation) -> tuple[Tensor, Tensor]:
    if operation.operands is not None:
        return operation.operands
    x, w = [value for value in operation.details["args"] if isinstance(value, Tensor)][-2:]
    return x, w


def _matrices(operation: Operation) -> Iterator[Multiplication]:
    """Elements of the result x length of the sum; of a sparse matrix only what it holds."""
    x, w = _two(operation)
    held = [tensor.layout != torch.strided for tensor in (x, w)]
    if held == [True, True]:
        raise _uncounted(operation)
    if held == [True, False]:
        macs = _values(operation, x) * (w.numel() // w.shape[0])
    elif held == [False, True]:
        macs = _values(operation, w) * (x.numel() // x.shape[-1])
    else:
        macs = operation.outputs[0].numel() * x.shape[-1]
    yield Multiplication(macs, x, w)


def _values(operation: Operation, sparse: Tensor) -> int:
    """How many values a sparse tensor holds. A fake one does not know unless it was made in the forward pass."""
    count = operation.nonzeros.get(id(sparse)) or sparse._nnz()
    if not count and sparse.numel():
        raise CostError(f"{operation.label}: how many values its sparse matrix holds is known only to real data.")
    return int(count)


def _summed_batch(operation: Operation) -> Iterator[Multiplication]:
    x, w = _two(operation)
    yield Multiplication(x.numel() * w.shape[-1], x, w)


def _grouped(operation: Operation) -> Iterator[Multiplication]:
    """Every row of x meets the matrix of its group; of two matrices, each group is a part of the sum."""
    x, w = _two(operation)
    yield Multiplication(x.numel() * w.shape[-1], x, w)


def _contraction(operation: Operation) -> Iterator[Multiplication]:
    """With n(x) n(w) = n(y) k^2 for a sum over k indices: n(y) k = sqrt(n(x) n(w) n(y))."""
    x, w = _two(operation)
    yield Multiplication(math.isqrt(x.numel() * w.numel() * operation.outputs[0].numel()), x, w)


def _convolution(operation: Operation) -> Iterator[Multiplication]:
    x, w = _two(operation)
    placed = x if operation.op.startswith("conv_transpose") else operation.outputs[0]
    yield Multiplication(placed.numel() * math.prod(w.shape[1:]), x, w)


def _einsum(operation: Operation) -> Iterator[Multiplication]:
    equation, *rest = operation.details["args"]
    tensors = list(rest[0]) if len(rest) == 1 and isinstance(rest[0], (list, tuple)) else rest
    if len(tensors) == 1:
        return  # a sum, a diagonal, a transposition
    if len(tensors) != 2 or not isinstance(equation, str):
        raise _uncounted(operation)
    sizes: dict[str, int] = {}
    for term, tensor in zip(equation.replace(" ", "").partition("->")[0].split(","), tensors, strict=True):
        for index, size in zip(_indices(term, tensor.dim()), tensor.shape, strict=True):
            sizes[index] = max(size, sizes.get(index, 1))
    yield Multiplication(math.prod(sizes.values()), *tensors)


def _indices(term: str, dims: int) -> list[str]:
    """The index of every dimension; those under an ellipsis are numbered from the right, as broadcasting does.

    >>> _indices("b...d", 4)
    ['b', '...2', '...1', 'd']
    """
    before, dots, after = term.partition("...")
    covered = dims - len(before) - len(after) if dots else 0
    return [*before, *(f"...{place}" for place in range(covered, 0, -1)), *after]


# --- several products in one call ---


def _attention(operation: Operation) -> Iterator[Multiplication]:
    query, key, value = _three(operation.details["args"], operation.details["kwargs"])
    scores = math.prod(query.shape[:-1]) * key.shape[-2]
    yield Multiplication(scores * query.shape[-1], query, key, is_result=False)
    yield Multiplication(scores * value.shape[-1], None, value)


def _three(args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    names = ("query", "key", "value")
    return [args[place] if len(args) > place else kwargs[name] for place, name in enumerate(names)]


def _recurrent(operation: Operation) -> Iterator[Multiplication]:
    """Every weight matrix meets every step of every sequence once."""
    args = operation.details["args"]
    x, second = args[0], args[1]
    is_packed = isinstance(second, Tensor) and not second.is_floating_point()  # sizes of the batch, step by step
    weights, _, layers, _, _, bidirectional = args[3 if is_packed else 2 :][:6]
    matrices = [tensor for tensor in weights if tensor.dim() == 2]
    directions = 2 if bidirectional else 1
    per_direction = len(matrices) // (layers * directions)
    rows = x.numel() // x.shape[-1]
    for place, w in enumerate(matrices):
        from_input = place % per_direction == 0 and place // per_direction < directions
        yield Multiplication(rows * w.numel(), x if from_input else None, w, is_result=False)


def _cell(operation: Operation) -> Iterator[Multiplication]:
    x, hidden, for_x, for_hidden = operation.details["args"][:4]
    state = hidden if isinstance(hidden, Tensor) else hidden[0]
    for part, w in ((x, for_x), (state, for_hidden)):
        yield Multiplication(part.numel() * w.shape[0], part, w, is_result=False)


_COUNTERS: dict[str, Callable[[Operation], Iterator[Multiplication]]] = {
    **{op: _convolution if op.startswith("conv") else _matrices for op in PRODUCTS},
    "einsum": _einsum,
    "grouped_mm": _grouped,
    "sparse_matmul": _matrices,
    "addmv": _matrices,
    "addbmm": _summed_batch,
    "tensordot": _contraction,
    "inner": _contraction,
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), _cell),
}
