"""Multiply-accumulates (MACs) of every product, from the shapes of its operands.

========================  ==========================================================================================
linear, matmul, bmm ...   elements of the result x length of the sum
conv 1d, 2d, 3d           elements of the result x (input channels / groups x kernel)
conv_transpose            elements of the *input* x (output channels / groups x kernel)
einsum of two             product of the sizes of all indices
grouped_mm                elements of x x columns of w
attention                 Q K^T and P V, each batch x heads x queries x keys x head size. Masked elements
                          are counted, though kernels may skip them
LSTM, GRU, RNN            steps x batch x elements of every weight matrix
sparse x dense            stored values x columns of the dense matrix
========================  ==========================================================================================

Biases, norms, softmax and other operations that are not products are not counted, as in the papers that bitplan
follows. An operation that torch implements by matrix products but that is not in the table raises an error, so that no
product is overlooked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bitplan.capture.ops import PRODUCTS
from bitplan.capture.recording import Operation
from bitplan.errors import CostError

#: Fused recurrent layers.
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@dataclass(frozen=True)
class Multiplication:
    """A product y = x w of an operation."""

    macs: int
    #: None: a tensor inside a fused operation.
    x: Tensor | None
    w: Tensor | None
    #: Whether y is the result of the operation, rather than a tensor inside it.
    is_result: bool = True


def multiplications(operation: Operation) -> list[Multiplication]:
    """The products of an operation."""
    counter = _COUNTERS.get(operation.op)
    if counter is not None:
        return list(counter(operation))
    if operation.aten_products:
        raise _uncounted_error(operation)
    return []


def _uncounted_error(operation: Operation) -> CostError:
    names = ", ".join(dict.fromkeys(operation.aten_products)) or "no product of aten's"
    return CostError(
        f"{operation.label} multiplies ({names}) in a way that bitplan cannot count: write it with linear, matmul, "
        f"convolutions or einsum of two tensors."
    )


# --- Products of two tensors


def _operands(operation: Operation) -> tuple[Tensor, Tensor]:
    if operation.operands is not None:
        return operation.operands
    x, w = [value for value in operation.details["args"] if isinstance(value, Tensor)][-2:]
    return x, w


def _count_matmul(operation: Operation) -> Iterator[Multiplication]:
    """Elements of the result x length of the sum; for a sparse matrix its stored values."""
    x, w = _operands(operation)
    is_sparse = [tensor.layout != torch.strided for tensor in (x, w)]
    if is_sparse == [True, True]:
        raise _uncounted_error(operation)
    if is_sparse == [True, False]:
        macs = _count_stored(operation, x) * (w.numel() // w.shape[0])
    elif is_sparse == [False, True]:
        macs = _count_stored(operation, w) * (x.numel() // x.shape[-1])
    elif operation.op == "linear" and w.dim() == 2:  # not by its result, which is a loss if that is computed in chunks
        macs = x.numel() * w.shape[0]
    else:
        macs = operation.outputs[0].numel() * x.shape[-1]
    yield Multiplication(macs, x, w)


def _count_stored(operation: Operation, sparse: Tensor) -> int:
    """The stored values of a sparse tensor, which fake tensors have only if they were made in the forward pass."""
    count = operation.nonzeros.get(id(sparse)) or sparse._nnz()
    if not count and sparse.numel():
        raise CostError(f"{operation.label}: the number of values of its sparse matrix is known only with real data.")
    return int(count)


def _count_addbmm(operation: Operation) -> Iterator[Multiplication]:
    x, w = _operands(operation)
    yield Multiplication(x.numel() * w.shape[-1], x, w)


def _count_contraction(operation: Operation) -> Iterator[Multiplication]:
    """With n(x) n(w) = n(y) k^2 for a sum over k indices: n(y) k = sqrt(n(x) n(w) n(y))."""
    x, w = _operands(operation)
    yield Multiplication(math.isqrt(x.numel() * w.numel() * operation.outputs[0].numel()), x, w)


def _count_convolution(operation: Operation) -> Iterator[Multiplication]:
    x, w = _operands(operation)
    narrow = x if operation.op.startswith("conv_transpose") else operation.outputs[0]
    yield Multiplication(narrow.numel() * math.prod(w.shape[1:]), x, w)


def _count_einsum(operation: Operation) -> Iterator[Multiplication]:
    equation, *rest = operation.details["args"]
    tensors = list(rest[0]) if len(rest) == 1 and isinstance(rest[0], (list, tuple)) else rest
    if len(tensors) == 1:
        return  # a sum, a diagonal or a transposition
    if len(tensors) != 2 or not isinstance(equation, str):
        raise _uncounted_error(operation)
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
    return [*before, *(f"...{number}" for number in range(covered, 0, -1)), *after]


# --- Operations with several products


def _count_attention(operation: Operation) -> Iterator[Multiplication]:
    args, kwargs = operation.details["args"], operation.details["kwargs"]
    names = ("query", "key", "value")
    query, key, value = (args[at] if len(args) > at else kwargs[name] for at, name in enumerate(names))
    scores = math.prod(query.shape[:-1]) * key.shape[-2]
    yield Multiplication(scores * query.shape[-1], query, key, is_result=False)
    yield Multiplication(scores * value.shape[-1], None, value)


def _count_recurrent(operation: Operation) -> Iterator[Multiplication]:
    """Every weight matrix is multiplied with every step of every sequence."""
    args = operation.details["args"]
    x, second = args[0], args[1]
    is_packed = isinstance(second, Tensor) and not second.is_floating_point()  # batch sizes of the steps
    weights, _, layers, _, _, bidirectional = args[3 if is_packed else 2 :][:6]
    matrices = [tensor for tensor in weights if tensor.dim() == 2]
    directions = 2 if bidirectional else 1
    per_direction = len(matrices) // (layers * directions)
    rows = x.numel() // x.shape[-1]
    for index, w in enumerate(matrices):
        reads_input = index % per_direction == 0 and index // per_direction < directions
        yield Multiplication(rows * w.numel(), x if reads_input else None, w, is_result=False)


def _count_cell(operation: Operation) -> Iterator[Multiplication]:
    x, hidden, input_weight, hidden_weight = operation.details["args"][:4]
    state = hidden if isinstance(hidden, Tensor) else hidden[0]
    for tensor, w in ((x, input_weight), (state, hidden_weight)):
        yield Multiplication(tensor.numel() * w.shape[0], tensor, w, is_result=False)


_COUNTERS: dict[str, Callable[[Operation], Iterator[Multiplication]]] = {
    **{op: _count_convolution if op.startswith("conv") else _count_matmul for op in PRODUCTS},
    "einsum": _count_einsum,
    "sparse_matmul": _count_matmul,
    "addmv": _count_matmul,
    "addbmm": _count_addbmm,
    "grouped_mm": _count_addbmm,
    "tensordot": _count_contraction,
    "inner": _count_contraction,
    "scaled_dot_product_attention": _count_attention,
    **dict.fromkeys(RECURRENT, _count_recurrent),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), _count_cell),
}
