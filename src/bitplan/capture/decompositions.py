"""Fused operations written out in single ones, so that what happens inside can be rounded too.

Each function here takes the arguments of the fused one and computes the same by torch functions that an interceptor
sees: products as ``matmul`` and ``linear``, the rest by its own name. They are used only where a plan asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bitplan.capture.constants import ACTIVATION, CONSTANT, MASK, STATISTIC, named_mask
from bitplan.capture.ops import PRODUCTS
from bitplan.errors import QuantizeError
from bitplan.plans import PLACES, SLOTS, Decision, Plan, Rule, compile_match


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention``: softmax(Q K^T / sqrt(d) + mask) V."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = torch.matmul(query, key.transpose(-2, -1)) * factor
    if is_causal:
        allowed = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(allowed.logical_not(), -math.inf)
    if attn_mask is None:
        weights = torch.softmax(scores, -1)
    else:
        # As in torch, a row without any key (padding) has weights of 0; softmax alone gives NaN, backward, too.
        is_hidden = attn_mask.logical_not() if attn_mask.dtype == torch.bool else attn_mask == -math.inf
        is_empty = is_hidden.all(-1, keepdim=True)
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(is_hidden, -math.inf)
        else:
            scores = scores + named_mask(attn_mask)
        weights = torch.softmax(scores.masked_fill(is_empty, 0.0), -1).masked_fill(is_empty, 0.0)
    if dropout_p > 0.0:
        weights = torch.dropout(weights, dropout_p, True)
    return torch.matmul(weights, value)


#: The operation that :func:`attention` writes out.
ATTENTION = "scaled_dot_product_attention"


def attention_operations(is_causal: bool, is_grouped: bool) -> tuple[str, ...]:
    """The operations that :func:`attention` consists of, without a mask and dropout, in order, as sites name them."""
    repeated = ("repeat_interleave", "repeat_interleave") if is_grouped else ()
    return *repeated, "matmul", "mul", *(("masked_fill",) if is_causal else ()), "softmax", "matmul"


def lstm(
    x: Tensor,
    state: tuple[Tensor, Tensor],
    weights: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``torch.lstm`` over padded sequences: gates by two linears a step, cell and output by single operations."""

    dropout = dropout if train else 0.0
    out, last = _recurrent(
        x, state, weights, has_biases, num_layers, dropout, bidirectional, batch_first, _summed(_lstm_gates)
    )
    return out, last[0], last[1]


def _lstm_gates(gates: Tensor, hidden: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    enter, forget, new, leave = gates.chunk(4, -1)
    c = torch.sigmoid(forget) * hidden[1] + torch.sigmoid(enter) * torch.tanh(new)
    return torch.sigmoid(leave) * torch.tanh(c), c


def gru(
    x: Tensor,
    state: Tensor,
    weights: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor]:
    """``torch.gru`` over padded sequences."""

    dropout = dropout if train else 0.0
    out, last = _recurrent(
        x, (state,), weights, has_biases, num_layers, dropout, bidirectional, batch_first, _gru_gates
    )
    return out, last[0]


def _gru_gates(from_x: Tensor, from_h: Tensor, hidden: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    reset_x, update_x, new_x = from_x.chunk(3, -1)
    reset_h, update_h, new_h = from_h.chunk(3, -1)
    update = torch.sigmoid(update_x + update_h)
    new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
    return (new + update * (hidden[0] - new),)


def _simple(activation: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def rnn(
        x: Tensor,
        state: Tensor,
        weights: list[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, Tensor]:
        def cell(gates: Tensor, hidden: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (activation(gates),)

        out, last = _recurrent(
            *(x, (state,), weights, has_biases, num_layers, dropout if train else 0.0, bidirectional, batch_first),
            _summed(cell),
        )
        return out, last[0]

    return rnn


Cell = Callable[[Tensor, Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]


def _summed(cell: Callable[[Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]) -> Cell:
    return lambda from_x, from_h, hidden: cell(from_x + from_h, hidden)


def _recurrent(
    x: Tensor,
    state: tuple[Tensor, ...],
    weights: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    bidirectional: bool,
    batch_first: bool,
    cell: Cell,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    if not isinstance(num_layers, int) or isinstance(num_layers, bool):
        raise QuantizeError("packed sequences cannot be opened up: pad them, or plan only what lies outside the layer.")
    if batch_first:
        x = x.transpose(0, 1)
    directions = 2 if bidirectional else 1
    per_direction = 4 if has_biases else 2
    if len(weights) != num_layers * directions * per_direction:
        raise QuantizeError("recurrent layers with projections cannot be opened up: plan only what lies outside them.")
    last: list[tuple[Tensor, ...]] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            at = layer * directions + direction
            own = weights[at * per_direction : (at + 1) * per_direction]
            hidden = tuple(part[at] for part in state)
            steps, hidden = _one_direction(x, hidden, own, has_biases, bool(direction), cell)
            outputs.append(steps)
            last.append(hidden)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout > 0.0 and layer < num_layers - 1:
            x = torch.dropout(x, dropout, True)
    final = tuple(torch.stack([hidden[part] for hidden in last]) for part in range(len(state)))
    return (x.transpose(0, 1) if batch_first else x), final


def _one_direction(
    x: Tensor, hidden: tuple[Tensor, ...], own: list[Tensor], has_biases: bool, backwards: bool, cell: Cell
) -> tuple[Tensor, tuple[Tensor, ...]]:
    bias_x, bias_h = (own[2], own[3]) if has_biases else (None, None)
    inputs = F.linear(x, own[0], bias_x)  # all steps in one product, as the fused kernels do
    steps: list[Any] = [None] * x.shape[0]
    order = range(x.shape[0] - 1, -1, -1) if backwards else range(x.shape[0])
    for step in order:
        hidden = cell(inputs[step], F.linear(hidden[0], own[1], bias_h), hidden)
        steps[step] = hidden[0]
    return torch.stack(steps), hidden


def _single_step(gates: Cell, returns_all: bool = False) -> Callable[..., Any]:
    """``torch.lstm_cell``, ``gru_cell`` and ``rnn_*_cell``: two linears, then the gates."""

    def cell(
        x: Tensor,
        state: Any,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Any:
        hidden = tuple(state) if returns_all else (state,)
        last = gates(F.linear(x, w_ih, b_ih), F.linear(hidden[0], w_hh, b_hh), hidden)
        return last if returns_all else last[0]

    return cell


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``F.cross_entropy`` of classes: the log-softmax, then the negative log-likelihood."""
    if target.is_floating_point() or label_smoothing:
        raise QuantizeError(
            "a cross-entropy of probabilities or with label smoothing cannot be opened up: plan it as a whole."
        )
    logs = F.log_softmax(input, 1 if input.dim() > 1 else 0)
    return F.nll_loss(logs, target, weight, size_average, ignore_index, reduce, reduction)


# --- Products that are no single matrix product of two tensors


def tensordot(a: Tensor, b: Tensor, dims: Any = 2, out: Tensor | None = None) -> Tensor:
    """``torch.tensordot``: both tensors as matrices, with the summed axes last and first."""
    if isinstance(dims, int):
        summed_a, summed_b = list(range(a.dim() - dims, a.dim())), list(range(dims))
    else:
        pair = [part.tolist() if isinstance(part, Tensor) else part for part in dims]
        first, second = ([part] if isinstance(part, int) else list(part) for part in pair)
        summed_a, summed_b = [axis % a.dim() for axis in first], [axis % b.dim() for axis in second]
    free_a = [axis for axis in range(a.dim()) if axis not in summed_a]
    free_b = [axis for axis in range(b.dim()) if axis not in summed_b]
    length = math.prod([a.shape[axis] for axis in summed_a])
    left = a.permute(free_a + summed_a).reshape(-1, length)
    right = b.permute(summed_b + free_b).reshape(length, -1)
    shape = [a.shape[axis] for axis in free_a] + [b.shape[axis] for axis in free_b]
    return _into(torch.matmul(left, right).reshape(shape), out)


def inner(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """``torch.inner``: the sum over the last axes."""
    if not a.dim() or not b.dim():
        return _into(a * b, out)
    return tensordot(a, b, ([-1], [-1]), out)


def vecdot(x: Tensor, y: Tensor, dim: int = -1, out: Tensor | None = None) -> Tensor:
    """``torch.linalg.vecdot`` of real tensors."""
    rows, columns = x.movedim(dim, -1).unsqueeze(-2), y.movedim(dim, -1).unsqueeze(-1)
    return _into(torch.matmul(rows, columns).squeeze((-2, -1)), out)


def multi_dot(matrices: list[Tensor], out: Tensor | None = None) -> Tensor:
    """``torch.linalg.multi_dot`` from left to right; torch chooses the order with the fewest multiplications."""
    return _into(reduce(torch.matmul, matrices), out)


def chain_matmul(*matrices: Tensor, out: Tensor | None = None) -> Tensor:
    """``torch.chain_matmul``, as :func:`multi_dot`."""
    return multi_dot(list(matrices), out)


def addbmm(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None
) -> Tensor:
    """``torch.addbmm``: the sum over the batch is a part of the sum of one product."""
    left, right = batch1.transpose(0, 1).reshape(batch1.shape[1], -1), batch2.reshape(-1, batch2.shape[-1])
    return _into(_weighted_sum(input, beta, torch.matmul(left, right), alpha), out)


def addmv(
    input: Tensor, mat: Tensor, vec: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None
) -> Tensor:
    """``torch.addmv``."""
    return _into(_weighted_sum(input, beta, torch.matmul(mat, vec), alpha), out)


def _weighted_sum(input: Tensor, beta: float, product: Tensor, alpha: float) -> Tensor:
    return (input if beta == 1 else beta * input) + (product if alpha == 1 else alpha * product)


def _into(result: Tensor, out: Tensor | None) -> Tensor:
    return result if out is None else out.copy_(result)


def einsum_in_pairs(equation: str, *operands: Any) -> Tensor:
    """``torch.einsum`` of more than two tensors, from left to right, as torch does it without opt_einsum."""
    tensors = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else list(operands)
    inputs, _, result = equation.replace(" ", "").partition("->") if isinstance(equation, str) else ("...", "", "")
    if "..." in equation or "->" not in equation:
        raise QuantizeError(
            "the operands of an einsum of several tensors are rounded in pairs: write its equation with all indices, "
            "as in 'ij,jk,kl->il', or give keep: true for op: einsum."
        )
    terms = inputs.split(",")
    while len(tensors) > 2:
        later = "".join(terms[2:]) + result
        pair = "".join(dict.fromkeys(index for index in terms[0] + terms[1] if index in later))
        tensors = [torch.einsum(f"{terms[0]},{terms[1]}->{pair}", *tensors[:2]), *tensors[2:]]
        terms = [pair, *terms[2:]]
    return torch.einsum(f"{terms[0]},{terms[1]}->{result}", *tensors)


def bilinear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.bilinear``: x W for every output, then the sum with y."""
    products = torch.einsum("...j,...oj->...o", y, torch.einsum("...i,oij->...oj", x, weight))
    return products if bias is None else products + bias


def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Tensor:
    """``torch.convolution`` by the function of its number of dimensions."""
    settings = (output_padding, groups, dilation) if transposed else (dilation, groups)
    function: Callable[..., Tensor] = getattr(F, f"conv{'_transpose' if transposed else ''}{weight.dim() - 2}d")
    return function(input, weight, bias, stride, padding, *settings)


#: torch's own function, whose body is Python; the copy does not ask a mode first and so runs inside it.
multi_head_attention: Callable[..., Any] = FunctionType(
    F.multi_head_attention_forward.__code__,
    {**F.multi_head_attention_forward.__globals__, "has_torch_function": lambda _: False},
    "multi_head_attention",
    F.multi_head_attention_forward.__defaults__,
)

# --- Transformers' product of experts in compiled float32 code. The backward pass of its own operation reads offsets as
# Python numbers, which no graph can hold, and its operands are none that rules know.


@torch.library.custom_op(
    "bitplan::grouped_mm", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor offsets) -> Tensor"
)
def _grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    y = x.new_zeros(x.shape[0], weight.shape[2])
    for expert, rows in enumerate(_expert_rows(offsets)):
        y[rows] = x[rows] @ weight[expert]
    return y


@torch.library.custom_op(
    "bitplan::grouped_mm_of_rows", mutates_args=(), schema="(Tensor x, Tensor dy, Tensor offsets) -> Tensor"
)
def _grouped_mm_of_rows(x: Tensor, dy: Tensor, offsets: Tensor) -> Tensor:
    """The gradient of the weight."""
    return torch.stack([x[rows].T @ dy[rows] for rows in _expert_rows(offsets)])


def _expert_rows(offsets: Tensor) -> list[slice]:
    ends = offsets.tolist()
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


_grouped_mm.register_fake(lambda x, weight, offsets: x.new_empty(x.shape[0], weight.shape[2]))
_grouped_mm_of_rows.register_fake(lambda x, dy, offsets: x.new_empty(offsets.shape[0], x.shape[1], dy.shape[1]))


def _save_operands(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grouped_mm_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, offsets = ctx.saved_tensors
    dx = _grouped_mm(dy, weight.transpose(-2, -1), offsets) if ctx.needs_input_grad[0] else None
    return dx, _grouped_mm_of_rows(x, dy, offsets) if ctx.needs_input_grad[1] else None, None


_grouped_mm.register_autograd(_grouped_mm_backward, setup_context=_save_operands)


def grouped_mm(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """``transformers::grouped_mm_fallback``: rows of `input`, up to each offset, times the weight of their expert."""
    return torch.ops.bitplan.grouped_mm(input, weight, offs)  # type: ignore[no-any-return]


#: Functions that are looked into always: they only call others, or are replaced by operations that rules know.
TRANSPARENT: dict[str, Callable[..., Any]] = {
    "multi_head_attention_forward": multi_head_attention,
    "grouped_mm_fallback": grouped_mm,
}

#: Canonical operation name -> its open form.
DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": attention,
    "lstm": lstm,
    "gru": gru,
    "rnn_tanh": _simple(torch.tanh),
    "rnn_relu": _simple(torch.relu),
    "lstm_cell": _single_step(_summed(_lstm_gates), returns_all=True),
    "gru_cell": _single_step(_gru_gates),
    "rnn_tanh_cell": _single_step(_summed(lambda gates, hidden: (torch.tanh(gates),))),
    "rnn_relu_cell": _single_step(_summed(lambda gates, hidden: (torch.relu(gates),))),
    "cross_entropy": cross_entropy,
    "tensordot": tensordot,
    "inner": inner,
    "linalg_vecdot": vecdot,
    "linalg_multi_dot": multi_dot,
    "chain_matmul": chain_matmul,
    "addbmm": addbmm,
    "addmv": addmv,
    "bilinear": bilinear,
    "convolution": convolution,
    "einsum": einsum_in_pairs,
}


# --- Which fused operations a plan wants written out, and what its rules then say of the operations inside


_INSIDE = {
    "scaled_dot_product_attention": ("matmul", "softmax"),
    "cross_entropy": ("log_softmax", "nll_loss"),
    **dict.fromkeys(
        (f"{kind}{suffix}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for suffix in ("", "_cell")), ("linear",)
    ),
}


def is_decomposed(plan: Plan, module: str, op: str) -> bool:
    """Whether the plan asks for something inside the fused operation `op` of the module at that path."""
    if op not in DECOMPOSITIONS:
        return False
    return has_slots(plan.decide(module, op)) or any(_asks_inside(rule, module, op) for rule in plan.all_rules)


def inner_operations(op: str) -> tuple[str, ...]:
    """The operations inside the fused one that rules can ask for."""
    return _INSIDE.get(op, ())


def _asks_inside(rule: Rule, module: str, op: str) -> bool:
    matches = compile_match(rule)
    if rule.keep or not rule.op or matches.matches_operation(op) or not matches.matches_module(module):
        return False
    return any(matches.matches_operation(inner) or _numbered(rule, inner) for inner in inner_operations(op))


def _numbered(rule: Rule, inner: str) -> bool:
    """Whether the rule means one of several, as in ``matmul.1``."""
    return any(pattern.split(".")[0] == inner for pattern in rule.op)


def has_slots(decision: Decision) -> bool:
    return any(decision[slot].quantizer is not None for slot in SLOTS)


def decision_for(
    decide: Callable[[str, str], Decision], module: str, op: str, inside: str | None = None, kind: str = ACTIVATION
) -> Decision:
    """What a plan (its ``decide``) says of an operation.

    :param op: may carry its number, as in ``relu.1``.
    :param inside: the decomposed operation that it is a part of.
    :param kind: what it returns: constants, masks and statistics are left alone.
    """
    decision = decide(module, op)
    if inside is not None and op.split(".")[0] in PRODUCTS:
        around = decide(module, inside)
        decision = around if has_slots(around) else decision
    if kind == CONSTANT and not decision.constants:
        return decision.without(PLACES)
    if kind == STATISTIC:
        return decision.without(("activation", "grad_activation"))
    return decision.without(("activation",)) if kind == MASK else decision
