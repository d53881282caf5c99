"""The cross-entropy of a linear head in chunks of tokens: no tensor of tokens x vocabulary exists.

:func:`linear_cross_entropy` multiplies a chunk of hidden states by the head's weight, computes loss and gradient of
these logits, and goes on to the next chunk; the loops are custom operations, :mod:`bitplan.runtime.head_loss_ops`.

There are two ways to the gradients:

* In the forward pass, together with the loss, if the gradient of the loss is a factor that can be multiplied in later:
  with ``reduction`` mean or sum, without rounding of the logits' gradient (dy), and not in float16, where a loss scale
  has to arrive before small gradients underflow. Each of the three GEMMs runs once.
* Otherwise in the backward pass, which computes the logits again.

With a plan for the head, x and w are rounded as whole tensors, as without chunks. A ``tensor`` scale of dy depends on
the range of all chunks; the forward pass computes it, so that dy is rounded as without chunks, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from bitplan.capture.planned_classes import original_class, run_operation
from bitplan.capture.scopes import innermost_scope, state_of
from bitplan.compiler.torch_private import DisableTorchFunction
from bitplan.compiler.tracing import opaque_in_graph, transformable
from bitplan.errors import PlanError, QuantizeError
from bitplan.numerics.formats import BlockFormat
from bitplan.numerics.wire_format import OPERAND_OF_SLOT
from bitplan.plans import SLOTS
from bitplan.runtime.autograd import (
    Buffers,
    CallConstants,
    OpRef,
    Slots,
    call_buffers,
    call_constants,
    chosen_ops,
    op_ref,
)
from bitplan.runtime.head_loss_ops import wide_dtype
from bitplan.runtime.op_context import OpContext
from bitplan.runtime.rounding_op import OpRounding, RoundingOp
from bitplan.runtime.statistics import observe_amax

_ours: Any = torch.ops.bitplan

Reduction = Literal["mean", "sum", "none"]


@dataclass(frozen=True)
class LogitLoss:
    """What is computed of the logits."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    #: What the logits are multiplied by.
    logit_scale: float = 1.0
    #: c of ``c * tanh(logits / c)``; None: the logits are not bounded.
    logit_softcap: float | None = None
    #: Tokens per chunk; None: as many as have :data:`~bitplan.runtime.head_loss_ops.MAX_LOGITS` logits.
    chunk: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise QuantizeError(f"label_smoothing lies between 0 and 1, not at {self.label_smoothing}.")
        if self.logit_softcap is not None and not self.logit_softcap > 0:
            raise QuantizeError(f"logit_softcap is a positive number or None, not {self.logit_softcap}.")
        if self.chunk is not None and (not isinstance(self.chunk, int) or self.chunk < 1):
            raise QuantizeError(f"chunk is a positive number of tokens or None, not {self.chunk!r}.")

    def arguments(self) -> tuple[int, float, float, float | None, int | None]:
        """The fields as a custom operation takes them."""
        return self.ignore_index, self.label_smoothing, self.logit_scale, self.logit_softcap, self.chunk


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor | nn.Module,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    shift: bool = False,
    chunk: int | None = None,
) -> Tensor:
    """``F.cross_entropy(F.linear(hidden, weight, bias).float(), targets)`` without the logits of all tokens.

    The loss is float32, or float64 for float64 logits; logits have the dtype of `hidden`, or autocast's. The gradient
    of the weight is summed over the chunks in the weight's dtype.

    :param hidden: (..., features)
    :param weight: (vocabulary, features); or the head itself, a linear layer, whose plan is then followed.
    :param targets: (...): a class for each position, or `ignore_index`.
    :param reduction: mean (over targets that are not ignored), sum, or none: a loss for each position.
    :param logit_scale: the logits are multiplied by this first,
    :param logit_softcap: then bounded by ``c * tanh(logits / c)``.
    :param shift: whether each position predicts the target of the next one, as in causal language models.
    :param chunk: tokens per chunk; by default as many as have 2^28 logits.

    >>> hidden, weight = torch.randn(5, 8), torch.randn(100, 8)
    >>> loss = linear_cross_entropy(hidden, weight, torch.arange(5), chunk=2)
    >>> torch.testing.assert_close(loss, nn.functional.cross_entropy(hidden @ weight.t(), torch.arange(5)))
    """
    if reduction not in get_args(Reduction):
        raise QuantizeError(f"reduction is 'mean', 'sum' or 'none', not {reduction!r}.")
    if targets.shape != hidden.shape[:-1] or targets.is_floating_point():
        raise QuantizeError(
            f"targets are class indices with the shape of hidden without its last axis, {tuple(hidden.shape[:-1])}; "
            f"these have shape {tuple(targets.shape)} and dtype {targets.dtype}."
        )
    if shift:
        targets = nn.functional.pad(targets[..., 1:], (0, 1), value=ignore_index)
    settings = LogitLoss(ignore_index, float(label_smoothing), float(logit_scale), logit_softcap, chunk)
    function = HeadLoss(targets, settings, reduction)
    if isinstance(weight, nn.Module):
        if bias is not None or not is_plain_linear(weight):
            raise QuantizeError(
                f"a head is an nn.Linear with its own bias, not a {type(weight).__name__} with bias=: give the weight "
                f"and the bias as tensors."
            )
        loss: Tensor = run_operation(weight, "linear", function, (hidden, weight.weight, weight.bias))
        return loss
    if not torch.compiler.is_compiling():
        _require_no_rules()
    with DisableTorchFunction():  # in the scope of a planned module, parts of the loss are no operations of that module
        return function(hidden, weight, bias)


def is_plain_linear(head: object) -> bool:
    """Whether a module computes ``F.linear`` of its weight and bias, and nothing else; with or without a plan.

    >>> is_plain_linear(nn.Linear(2, 2)), is_plain_linear(nn.LazyLinear(2)), is_plain_linear(nn.Identity())
    (True, False, False)
    """
    if not isinstance(head, nn.Linear) or isinstance(head, nn.LazyLinear) or "forward" in head.__dict__:
        return False
    return original_class(type(head)).forward is nn.Linear.forward


def _require_no_rules() -> None:
    """Raise in the scope of a planned module whose rules round operands of its linear products."""
    scope = innermost_scope()
    rounding_of = None if scope is None else getattr(scope.interceptor, "rounding_of", None)
    if scope is None or rounding_of is None:
        return
    rounding = rounding_of(scope.module, "linear", 0)
    if rounding is not None and (rounding.has_slots or rounding.rounds_weights):
        raise PlanError(
            f"the plan rounds linear products of {state_of(scope.module).path or 'the model'}, and would not reach the "
            f"one in linear_cross_entropy: give it the head itself, an nn.Linear, instead of a weight."
        )


@dataclass(frozen=True, eq=False)
class HeadLoss:
    """The loss as a function of the operands of the head's product: an operation ``linear`` that returns a loss."""

    targets: Tensor
    settings: LogitLoss
    reduction: Reduction

    def __call__(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        """The loss without rounding."""
        x, w, bias = _as_autocast(x, w, bias)
        if self.reduction == "none" or x.dtype == torch.float16:
            return self.reduced(
                transformable(_RowLosses).apply(x, w, bias, self.targets, self.settings, HeadSlots({}, None))
            )
        rows = self.targets.reshape(-1)
        factor = torch.ones((), dtype=wide_dtype(x.dtype), device=x.device)
        if self.reduction == "mean":
            factor = factor / (rows != self.settings.ignore_index).sum()
        loss: Tensor = transformable(_ReducedLoss).apply(x, w, bias, rows, factor, self.settings)
        return loss

    def rounded(
        self,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        rounding: OpRounding,
        context: OpContext,
        weight_key: Tensor | None,
        backends: tuple[tuple[str, str], ...] = (),
    ) -> Tensor:
        """The loss with the operands of the head's product rounded.

        :param backends: pairs of a pass and the low-precision backend that it runs on, see :mod:`bitplan.executions`.
        """
        applied: dict[str, RoundingOp] = {}
        for slot in SLOTS:
            place = rounding.shared.get(OPERAND_OF_SLOT[slot].tensor, slot)
            if rounding.applies(place, context.training):
                applied[slot] = rounding.places[place]
        if not torch.compiler.is_compiling():
            chosen = {slot: (op, context) for slot, op in applied.items()}
            rows = _apply_row_losses(x, w, bias, self.targets, self.settings, chosen, weight_key, backends)
        else:
            refs = tuple(op_ref(applied.get(slot), context) for slot in SLOTS)
            rows = _row_losses_in_graph(
                *(x, w, bias, self.targets, self.settings.arguments(), refs, call_constants(context)),
                *(call_buffers(context), weight_key, backends),
            )
        return self.reduced(rows)

    def reduced(self, rows: Tensor) -> Tensor:
        """The loss of all positions."""
        if self.reduction == "none":
            return rows.reshape(self.targets.shape)
        if self.reduction == "sum":
            return rows.sum()
        return rows.sum() / (self.targets != self.settings.ignore_index).sum()


def _as_autocast(x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands in the dtype in which a linear layer multiplies them."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x, w, bias
    dtype = torch.get_autocast_dtype(device)
    return x.to(dtype), w.to(dtype), None if bias is None else bias.to(dtype)


# --- The plan's rounding of the head's operands


class HeadOperands(NamedTuple):
    """The operands of the three GEMMs other than dy, and the backend of each pass: "" where it is emulated."""

    x: list[Tensor]
    w: list[Tensor]
    dgrad_w: list[Tensor]
    wgrad_x: list[Tensor]
    backends: list[str]

    def tensors(self) -> tuple[list[Tensor], ...]:
        return self[:4]


class HeadSlots(Slots):
    """The rounding of the six slots of a head whose loss is computed in chunks."""

    def head_operands(self, x: Tensor, w: Tensor, dtype: torch.dtype, needs_x: bool, needs_w: bool) -> HeadOperands:
        """
        :param dtype: that of the product.
        :param needs_x: whether there is a gradient of `x`, that is, a dgrad GEMM.
        """
        rows = self._rounded_once("fprop.x", "wgrad.x" if needs_w else None, x, dtype)
        weights = self._rounded_once("fprop.w", "dgrad.w" if needs_x else None, w, dtype)
        x_rows, x_columns = ([values.reshape(-1, x.shape[-1])] for values in rows)
        return HeadOperands(x_rows, [weights[0]], [weights[1]], x_columns, ["", "", ""])

    def _rounded_once(self, slot: str, backward: str | None, tensor: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """A tensor rounded for its forward and its backward GEMM."""
        first = self.round(slot, tensor).detach().to(dtype)
        if backward is None or self._op(slot) is self._op(backward):
            return [first, first]
        return [first, self.round(backward, tensor).detach().to(dtype)]

    def _op(self, slot: str) -> RoundingOp | None:
        return self.chosen[slot][0] if slot in self.chosen else None

    @property
    def needs_dy_range(self) -> bool:
        """Whether a scale of dy depends on the values of all chunks."""
        ops = (self._op(slot) for slot in _DY)
        return any(op is not None and op.spec.scale == "tensor" for op in ops)

    def dy_arguments(self, dy_range: Tensor | None) -> tuple[list[str], list[Tensor | None], list[Tensor | None], bool]:
        """What ``head_grads`` needs to round dy: operations, rows of mutable formats, ranges; and whether the bias's
        gradient sums rounded values."""
        keys, rows, spans = [], [], []
        for slot in _DY:
            op = self._op(slot)
            keys.append("" if op is None else op.key)
            context = self.chosen[slot][1] if op is not None else None
            rows.append(None if op is None or context is None else op.format_row(context))
            spans.append(None if op is None or context is None else _span_of_dy(op, context, dy_range))
        is_shared = self._op(_DY[0]) is not None and self._op(_DY[0]) is self._op(_DY[1])
        return keys, rows, spans, is_shared


_DY = ("dgrad.dy", "wgrad.dy")


def _range_of_dy(ranges: Tensor, factors: Tensor, dtype: torch.dtype) -> Tensor:
    """(2,): the least and the largest value of dy, from those of each row before it is multiplied by its factor."""
    products = (ranges * factors.unsqueeze(1)).to(dtype).to(ranges.dtype)
    return torch.stack((products.amin(), products.amax()))


def _span_of_dy(op: RoundingOp, context: OpContext, dy_range: Tensor | None) -> Tensor | None:
    """What determines the scale of dy: (2,), its range; or a number, its amax or that of past steps; None: nothing."""
    if op.spec.scale != "tensor" or dy_range is None:
        return None
    if op.spec.range == "minmax":
        return dy_range
    amax = dy_range.abs().amax()
    if op.is_delayed:
        record, history_max = op.remembered(context)
        if record is not None and context.observing:
            observe_amax(record, amax)
        if history_max is not None:
            return torch.where(history_max > 0, history_max.to(amax.dtype), amax)
    return amax


def why_not_in_chunks(rounding: OpRounding, training: bool) -> str | None:
    """Why a head with this rounding cannot compute its loss in chunks; None where it can."""
    if rounding.rounds_output(training):
        return "it rounds the logits or their gradient as a whole (activation, grad_activation)"
    if rounding.promotes:
        return "it promotes tensors of the head"
    if rounding.rotates:
        return "it rotates operands of the head"
    if any(op.function is not None for op in rounding.places.values()):
        return "a function of your own rounds tensors of the head"
    for slot in _DY:
        op = rounding.places.get(rounding.shared.get("dy", slot))
        if op is None:
            continue
        if op.is_stochastic:
            return f"{slot} is rounded stochastically"
        if op.watched:
            return f"statistics of {slot} are kept"
        quantizer = op.quantizer(2)
        if isinstance(quantizer.format, BlockFormat):
            crosses_chunks = quantizer.axis not in (1, -1) or quantizer.format.scale != "e8m0"
        else:
            scaling = quantizer.scaling
            along_row = scaling is not None and scaling.granularity in ("vector", "block") and scaling.axis in (1, -1)
            if scaling is not None and isinstance(scaling.block, tuple):
                along_row = scaling.block[0] == 1 and scaling.axis == (0, 1)
            crosses_chunks = scaling is not None and scaling.granularity != "tensor" and not along_row
        if crosses_chunks:
            return f"the scales of {slot} ({op.spec}) reach across chunks of tokens"
    return None


# --- Autograd


def _apply_row_losses(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    settings: LogitLoss,
    chosen: dict[str, tuple[RoundingOp, OpContext]],
    weight_key: Tensor | None,
    backends: tuple[tuple[str, str], ...],
) -> Tensor:
    slots = HeadSlots(chosen, weight_key)
    if backends:
        from bitplan.executions.native.head_loss import NativeHeadSlots

        slots = NativeHeadSlots(chosen, weight_key, dict(backends))
    losses: Tensor = transformable(_RowLosses).apply(x, w, bias, targets, settings, slots)
    return losses


@opaque_in_graph
def _row_losses_in_graph(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    settings: tuple[Any, ...],
    refs: tuple[OpRef, ...],
    call: CallConstants,
    buffers: Buffers,
    weight_key: Tensor | None,
    backends: tuple[tuple[str, str], ...],
) -> Tensor:
    chosen = chosen_ops(refs, call, buffers)
    return _apply_row_losses(x, w, bias, targets, LogitLoss(*settings), chosen, weight_key, backends)


def _product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a linear layer's result."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _needs_grad(ctx: Any, bias: Tensor | None) -> list[bool]:
    """Which of x, w and bias have a gradient; inside transforms of torch.func that is not known."""
    x, w, has_bias = getattr(ctx, "needs_input_grad", (True, True, True))[:3]
    return [x, w, bias is not None and has_bias]


class _ReducedLoss(torch.autograd.Function):
    """The sum of all losses times a factor, with gradients that the forward pass computes."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, targets: Tensor, factor: Tensor, settings: LogitLoss
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        needs_grad = _needs_grad(ctx, bias)
        ctx.shape, ctx.needs_grad = x.shape, needs_grad
        losses: Tensor
        if any(needs_grad):
            losses, *grads = _ours.head_loss_and_grads(
                rows, w, bias, targets, factor, *settings.arguments(), needs_grad
            )
            ctx.save_for_backward(*grads)
        else:
            losses, _ = _ours.head_losses([rows], [w], bias, targets, *settings.arguments(), "", x.dtype, False)
        return losses.sum() * factor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_w, grad_bias = (
            (grad * grads[0]).to(grad.dtype) if is_needed else None
            for grad, is_needed in zip(ctx.saved_tensors, ctx.needs_grad, strict=True)
        )
        return None if grad_x is None else grad_x.reshape(ctx.shape), grad_w, grad_bias, None, None, None


class _RowLosses(torch.autograd.Function):
    """The losses of all rows; the backward pass computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, targets: Tensor, settings: LogitLoss, slots: HeadSlots
    ) -> Tensor:
        needs_grad = _needs_grad(ctx, bias)
        dtype = _product_dtype(x)
        operands = slots.head_operands(x, w, dtype, *needs_grad[:2])
        dtypes = [x.dtype, w.dtype, dtype if bias is None else bias.dtype]
        bias = None if bias is None else bias.to(dtype)
        dy_range = any(needs_grad) and slots.needs_dy_range
        rows = targets.reshape(-1)
        arguments = (*settings.arguments(), operands.backends[0], dtype, dy_range)
        losses: Tensor
        losses, ranges = _ours.head_losses(operands.x, operands.w, bias, rows, *arguments)
        ctx.settings, ctx.slots, ctx.needs_grad, ctx.dtype = settings, slots, needs_grad, dtype
        ctx.shape, ctx.dtypes = x.shape, dtypes
        ctx.backends, ctx.lengths = operands.backends, [len(operand) for operand in operands.tensors()]
        ctx.save_for_backward(rows, ranges, bias, *(tensor for operand in operands.tensors() for tensor in operand))
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        targets, ranges, bias, *saved = ctx.saved_tensors
        operands = []
        for length in ctx.lengths:
            operands.append(saved[:length])
            saved = saved[length:]
        x, w, dgrad_w, wgrad_x = operands
        factors = grads[0].masked_fill(targets == ctx.settings.ignore_index, 0.0)
        dy = ctx.slots.dy_arguments(_range_of_dy(ranges, factors, ctx.dtype) if ranges.numel() else None)
        results = _ours.head_grads(
            *(factors, x, w, bias, targets, *ctx.settings.arguments(), dgrad_w, wgrad_x, ctx.backends, ctx.dtype),
            *(*dy, ctx.needs_grad),
        )
        grad_x, grad_w, grad_bias = (
            grad.to(dtype) if is_needed else None
            for grad, dtype, is_needed in zip(results, ctx.dtypes, ctx.needs_grad, strict=True)
        )
        return None if grad_x is None else grad_x.reshape(ctx.shape), grad_w, grad_bias, None, None, None
