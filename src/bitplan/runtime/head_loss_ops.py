"""The custom operations of a head's loss in chunks of tokens (:mod:`bitplan.runtime.head_loss`).

* ``bitplan::head_loss_and_grads``: losses and gradients in one pass over the chunks;
* ``bitplan::head_losses``: losses alone, and the range of the gradient of each row of logits;
* ``bitplan::head_grads``: gradients alone, of logits that are computed again, their gradient (dy) rounded.

torch.compile does not see the loops over chunks, so nothing of a chunk is saved, and no partitioner recognizes the
logits of the backward pass as those of the forward pass. On a GPU the step from the logits to their losses and
gradients is compiled by itself: it reads the logits twice and writes nothing else of their size but dy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.compiler import torch_private
from bitplan.numerics.quantizer import Span
from bitplan.runtime.rounding_op import op_of_key

#: Logits of a chunk by default: 2048 tokens of a vocabulary of 128,256, 0.5 GiB in bfloat16. Smaller chunks would add
#: each one's weight gradient to the sum more often, larger ones save no time.
MAX_LOGITS = 1 << 28


#: Graphs of a step: settings x dtypes x sizes of chunks.
_MOST_GRAPHS = 64
#: Kind of device -> at multiples of so many bytes rows of logits begin, by further columns: cuBLAS is several times
#: slower where they do not, as with the 50,257 tokens of GPT-2.
_ALIGNMENT = {"cuda": 16}


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which losses of logits are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# --- A chunk of logits: loss, range of the gradient, gradient


def chunk_size(tokens: int, vocabulary: int, chunk: int | None) -> int:
    """Tokens per chunk: `chunk`, or for None chunks of nearly equal size, a multiple of 16 as FP8 units need it.

    >>> chunk_size(16384, 128256, None), chunk_size(5000, 128256, None), chunk_size(10, 50, None)
    (2048, 1680, 16)
    """
    if chunk is not None:
        return chunk
    most = max(MAX_LOGITS // vocabulary // 128 * 128, 128)
    count = -(-tokens // most)
    return -(-tokens // max(count, 1) // 16) * 16 or 16


def _chunks(tokens: int, vocabulary: int, chunk: int | None) -> Iterator[slice]:
    size = chunk_size(tokens, vocabulary, chunk)
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))


def _log_probabilities(logits: Tensor, logit_scale: float, logit_softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """The logarithms of the probabilities, and the logits after softcapping divided by the cap."""
    wide = wide_dtype(logits.dtype)
    if logit_scale == 1.0 and logit_softcap is None:
        return torch.log_softmax(logits, -1, dtype=wide), None
    scaled = logits.to(wide) * logit_scale
    if logit_softcap is None:
        return torch.log_softmax(scaled, -1), None
    bounded = torch.tanh(scaled / logit_softcap)
    return torch.log_softmax(bounded * logit_softcap, -1), bounded


def _losses(log_p: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float) -> Tensor:
    ignored = targets == ignore_index
    losses = -log_p.gather(1, targets.masked_fill(ignored, 0).unsqueeze(1)).squeeze(1)
    if label_smoothing:
        losses = losses * (1 - label_smoothing) - log_p.mean(-1) * label_smoothing
    return losses.masked_fill(ignored, 0.0)


def _gradient(
    log_p: Tensor,
    bounded: Tensor | None,
    targets: Tensor,
    factors: Tensor,
    ignore_index: int,
    label_smoothing: float,
    logit_scale: float,
) -> Tensor:
    """The gradient of the logits, times `factors`, one for each row, as autograd computes it; overwrites `log_p`."""
    ignored = targets == ignore_index
    factors = factors.masked_fill(ignored, 0.0).unsqueeze(1)
    gradient = log_p.exp_().mul_(factors)
    if torch.compiler.is_compiling():  # a comparison is fused with the rest, a scatter is not
        is_target = torch.arange(log_p.shape[1], device=log_p.device) == targets.unsqueeze(1)
        gradient = gradient - torch.where(is_target, factors * (1 - label_smoothing), 0.0)
    else:
        gradient.scatter_add_(1, targets.masked_fill(ignored, 0).unsqueeze(1), -factors * (1 - label_smoothing))
    if label_smoothing:
        gradient = gradient.sub_(factors * (label_smoothing / log_p.shape[1]))
    if bounded is not None:
        gradient = gradient.mul_(1 - bounded.square())
    return gradient if logit_scale == 1.0 else gradient.mul_(logit_scale)


Settings = tuple[int, float, float, float | None]


def _loss_step(logits: Tensor, targets: Tensor, settings: Settings, with_range: bool) -> tuple[Tensor, Tensor]:
    """Losses of a chunk, and the least and the largest gradient in each row."""
    ignore_index, label_smoothing, logit_scale, logit_softcap = settings
    log_p, bounded = _log_probabilities(logits, logit_scale, logit_softcap)
    losses = _losses(log_p, targets, ignore_index, label_smoothing)
    if not with_range:
        return losses, losses.new_empty(0)
    ones = torch.ones_like(losses)
    gradient = _gradient(log_p, bounded, targets, ones, ignore_index, label_smoothing, logit_scale)
    return losses, torch.stack((gradient.amin(1), gradient.amax(1)), 1)


def _gradient_step(logits: Tensor, targets: Tensor, factors: Tensor, settings: Settings, columns: int) -> Tensor:
    """The gradient of a chunk's logits, in their dtype, with as many columns of zeros as make `columns`."""
    ignore_index, label_smoothing, logit_scale, logit_softcap = settings
    log_p, bounded = _log_probabilities(logits, logit_scale, logit_softcap)
    gradient = _gradient(log_p, bounded, targets, factors, ignore_index, label_smoothing, logit_scale)
    return _with_columns(gradient.to(logits.dtype), columns)


def _combined_step(
    logits: Tensor, targets: Tensor, factors: Tensor, settings: Settings, columns: int
) -> tuple[Tensor, Tensor]:
    """Losses and gradient of a chunk."""
    ignore_index, label_smoothing, logit_scale, logit_softcap = settings
    log_p, bounded = _log_probabilities(logits, logit_scale, logit_softcap)
    losses = _losses(log_p, targets, ignore_index, label_smoothing)
    gradient = _gradient(log_p, bounded, targets, factors, ignore_index, label_smoothing, logit_scale)
    return losses, _with_columns(gradient.to(logits.dtype), columns)


def _with_columns(matrix: Tensor, columns: int) -> Tensor:
    """A matrix with columns of zeros behind its own."""
    return matrix if matrix.shape[1] == columns else nn.functional.pad(matrix, (0, columns - matrix.shape[1]))


def _with_rows(matrix: Tensor) -> Tensor:
    """The weight with as many rows of zeros behind its own as let every row of logits be aligned."""
    if matrix.dtype.itemsize == 1:  # codes, whose unit has asked for a multiple of its own
        return matrix
    missing = -len(matrix) % max(1, _ALIGNMENT.get(matrix.device.type, 1) // matrix.dtype.itemsize)
    return nn.functional.pad(matrix, (0, 0, 0, missing)) if missing else matrix


def _product(x: Tensor, w: Tensor, bias: Tensor | None, vocabulary: int) -> Tensor:
    """The logits of `vocabulary` classes; `w` may have further rows."""
    if bias is not None and len(w) > vocabulary:  # in the product, which rounds its result once
        bias = nn.functional.pad(bias, (0, len(w) - vocabulary))
    return nn.functional.linear(x, w, bias)[:, :vocabulary]


@cache
def _compiled(step: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(step, fullgraph=True)

    def with_constant_settings(*args: Any) -> Any:
        # A second value of a float makes Dynamo treat it as a variable, which torch 2.11 cannot compile here. As
        # constants, settings, dtypes and sizes of chunks have graphs of their own.
        with torch_private.dynamo_config.patch(specialize_float=True, recompile_limit=_MOST_GRAPHS):
            return compiled(*args)

    return with_constant_settings


def _step(step: Callable[..., Any], logits: Tensor) -> Callable[..., Any]:
    """`step` compiled on a GPU: it reads the logits twice there, and writes nothing but its results."""
    return _compiled(step) if logits.is_cuda else step


# --- Custom operations: loops over chunks
#
# An operand is a list: [values], or codes for a low-precision unit, [codes, scale].

_LIBRARY: Any = torch.library.Library("bitplan", "FRAGMENT")  # type: ignore[no-untyped-call]
_SETTINGS = "int ignore_index, float label_smoothing, float logit_scale, float? logit_softcap, int? chunk"
for _schema in (
    f"head_loss_and_grads(Tensor x, Tensor w, Tensor? bias, Tensor targets, Tensor factor, {_SETTINGS}, "
    "bool[] needs_grad) -> (Tensor, Tensor, Tensor, Tensor)",
    f"head_losses(Tensor[] x, Tensor[] w, Tensor? bias, Tensor targets, {_SETTINGS}, str backend, ScalarType dtype, "
    "bool with_range) -> (Tensor, Tensor)",
    f"head_grads(Tensor factors, Tensor[] x, Tensor[] w, Tensor? bias, Tensor targets, {_SETTINGS}, "
    "Tensor[] dgrad_w, Tensor[] wgrad_x, str[] backends, ScalarType dtype, str[] dy_ops, Tensor?[] dy_rows, "
    "Tensor?[] dy_spans, bool rounds_bias_dy, bool[] needs_grad) -> (Tensor, Tensor, Tensor)",
):
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def _head_loss_and_grads(
    x: Tensor, w: Tensor, bias: Tensor | None, targets: Tensor, factor: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses of all rows, and the gradients of their sum times `factor`."""
    *settings, chunk, needs_grad = arguments
    losses = targets.new_empty(targets.shape, dtype=wide_dtype(x.dtype))
    grads, rows = _Gradients(x, w, x.dtype, needs_grad), _with_rows(w)
    for part in _chunks(len(x), len(w), chunk):
        logits = _product(x[part], rows, bias, len(w))
        step = _step(_combined_step, logits)
        losses[part], dy = step(logits, targets[part], factor.expand(len(logits)), tuple(settings), len(rows))
        del logits
        grads.add_x(part, [dy], [rows])
        grads.add_w([dy], [x[part]])
        grads.add_bias(dy)
    return losses, *grads.results()


def _head_losses(
    x: list[Tensor], w: list[Tensor], bias: Tensor | None, targets: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor]:
    """Losses of all rows, and the least and largest gradient in each row."""
    *settings, chunk, backend, dtype, with_range = arguments
    losses = targets.new_empty(targets.shape, dtype=wide_dtype(dtype))
    ranges = losses.new_empty((len(targets), 2) if with_range else 0)
    rows = [_with_rows(w[0]), *w[1:]]
    for part in _chunks(len(x[0]), len(w[0]), chunk):
        logits = _logits(x, rows, bias, part, backend, dtype, len(w[0]))
        losses[part], chunk_range = _step(_loss_step, logits)(logits, targets[part], tuple(settings), with_range)
        if with_range:
            ranges[part] = chunk_range
    return losses, ranges


def _head_grads(
    factors: Tensor, x: list[Tensor], w: list[Tensor], bias: Tensor | None, targets: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the sum of all rows' losses times `factors`."""
    *settings, chunk, dgrad_w, wgrad_x, backends, dtype = arguments[:-5]
    dy_ops, dy_rows, dy_spans, rounds_bias_dy, needs_grad = arguments[-5:]
    grads = _Gradients(x[0], w[0], dtype, needs_grad, backends)
    rows, dgrad_rows = ([_with_rows(values), *scale] for values, *scale in (w, dgrad_w))
    columns = len(rows[0])
    for part in _chunks(len(x[0]), len(w[0]), chunk):
        logits = _logits(x, rows, bias, part, backends[0], dtype, len(w[0]))
        is_rounded = any(dy_ops)  # as it is without further columns
        step_columns = len(w[0]) if is_rounded else columns
        dy = _step(_gradient_step, logits)(logits, targets[part], factors[part], tuple(settings), step_columns)
        del logits
        needs_dy = (needs_grad[0] or rounds_bias_dy, needs_grad[1])
        operands = _rounded_dy(dy, dy_ops, dy_rows, dy_spans, backends[1:], needs_dy)
        if columns > step_columns:
            operands = [[_with_columns(values, columns)] for (values,) in operands]
        grads.add_x(part, operands[0], dgrad_rows)
        grads.add_w(operands[1], [wgrad_x[0][part], *wgrad_x[1:]])
        grads.add_bias(decoded(operands[0]).to(dtype) if rounds_bias_dy and needs_grad[2] else dy)
    return grads.results()


class _Gradients:
    """The gradients of x, w and bias, chunk by chunk; those that are not needed are empty.

    dy may have columns of zeros behind those of the vocabulary, and w as many rows.
    """

    def __init__(
        self, x: Tensor, w: Tensor, dtype: torch.dtype, needed: Sequence[bool], backends: Sequence[str] = ("", "", "")
    ) -> None:
        self.needed, self.backends = needed, backends
        self.dtype = dtype
        self.x = x.new_empty(x.shape if needed[0] else 0, dtype=dtype)
        self.w = x.new_empty(w.shape if needed[1] else 0, dtype=dtype)
        self.vocabulary = len(w)
        #: Summed in the wide dtype.
        self.bias = x.new_zeros(w.shape[:1] if needed[2] else 0, dtype=wide_dtype(dtype))
        self.is_empty = True

    def add_x(self, part: slice, dy: list[Tensor], w: list[Tensor]) -> None:
        if not self.needed[0]:
            return
        if self.backends[1]:
            self.x[part] = _multiply_codes(self.backends[1], dy, w, self.dtype)
        else:
            torch.mm(dy[0], w[0], out=self.x[part])

    def add_w(self, dy: list[Tensor], x: list[Tensor]) -> None:
        if not self.needed[1]:
            return
        transposed = [dy[0][:, : self.vocabulary].t(), *(scale.t() if scale.dim() == 2 else scale for scale in dy[1:])]
        if self.backends[2]:
            product = _multiply_codes(self.backends[2], transposed, x, self.dtype)
            self.w = product if self.is_empty else self.w.add_(product)
        elif self.is_empty:
            torch.mm(transposed[0], x[0], out=self.w)
        else:
            self.w.addmm_(transposed[0], x[0])
        self.is_empty = False

    def add_bias(self, dy: Tensor) -> None:
        if self.needed[2]:
            self.bias += dy[:, : self.vocabulary].sum(0, dtype=self.bias.dtype)

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        if self.is_empty:  # there were no tokens
            self.w.zero_()
        return self.x, self.w, self.bias.to(self.dtype)


def _logits(
    x: list[Tensor],
    w: list[Tensor],
    bias: Tensor | None,
    part: slice,
    backend: str,
    dtype: torch.dtype,
    vocabulary: int,
) -> Tensor:
    if not backend:
        return _product(x[0][part], w[0], bias, vocabulary)
    left = [x[0][part], *(scale[part] if scale.dim() == 2 and len(scale) > 1 else scale for scale in x[1:])]
    right = [w[0].t(), *(scale.t() if scale.dim() == 2 else scale for scale in w[1:])]
    logits = _multiply_codes(backend, left, right, dtype)
    return logits if bias is None else logits.add_(bias)


def _multiply_codes(backend: str, left: list[Tensor], right: list[Tensor], dtype: torch.dtype) -> Tensor:
    from bitplan.executions.native.backends import backend_named

    return backend_named(backend).multiply(left[0], right[0], (left[1], right[1]), dtype)


def decoded(operand: list[Tensor]) -> Tensor:
    """The values of an operand."""
    return operand[0] if len(operand) == 1 else operand[0].float() * operand[1]


def _rounded_dy(
    dy: Tensor,
    keys: Sequence[str],
    rows: Sequence[Tensor | None],
    spans: Sequence[Tensor | None],
    backends: Sequence[str],
    needed: Sequence[bool],
) -> list[list[Tensor]]:
    """The operands that a chunk of dy is in dgrad and in wgrad."""
    operands: list[list[Tensor]] = []
    is_shared = all(needed) and keys[0] == keys[1] and backends[0] == backends[1]
    for position, (key, row, span, backend) in enumerate(zip(keys, rows, spans, backends, strict=True)):
        if not key or not needed[position]:
            operands.append([dy])
            continue
        if len(operands) == 2:
            break
        limits: Span | None = None if span is None else (span[0], span[1]) if span.dim() else span
        op = op_of_key(key)
        if backend:
            from bitplan.executions.native.head_loss import dy_codes

            layouts = ("rows", "columns") if is_shared else (("rows", "columns")[position],)
            operands += dy_codes(dy, op, backend, row, limits, layouts)
        else:
            operands += [[op.quantizer(dy.dim()).round_values(dy, None, row, limits)]] * (2 if is_shared else 1)
    return operands


def _fake_grads(x: Tensor, w: Tensor, dtype: torch.dtype, needed: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (x.shape if needed[0] else (0,), w.shape if needed[1] else (0,), w.shape[:1] if needed[2] else (0,))
    grad_x, grad_w, grad_bias = (x.new_empty(size, dtype=dtype) for size in sizes)
    return grad_x, grad_w, grad_bias


def _fake_loss_and_grads(x: Tensor, w: Tensor, bias: Any, targets: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return targets.new_empty(targets.shape, dtype=wide_dtype(x.dtype)), *_fake_grads(x, w, x.dtype, arguments[-1])


def _fake_losses(
    x: list[Tensor], w: list[Tensor], bias: Any, targets: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor]:
    *_, dtype, with_range = arguments
    losses = targets.new_empty(targets.shape, dtype=wide_dtype(dtype))
    return losses, losses.new_empty((len(targets), 2) if with_range else 0)


def _fake_head_grads(factors: Tensor, x: list[Tensor], w: list[Tensor], *arguments: Any) -> tuple[Tensor, ...]:
    return _fake_grads(x[0], w[0], arguments[-6], arguments[-1])


for _name, _loop, _fake in (
    ("head_loss_and_grads", _head_loss_and_grads, _fake_loss_and_grads),
    ("head_losses", _head_losses, _fake_losses),
    ("head_grads", _head_grads, _fake_head_grads),
):
    _LIBRARY.impl(_name, _loop, "CompositeExplicitAutograd")
    torch.library.register_fake(f"bitplan::{_name}", _fake, lib=_LIBRARY)
