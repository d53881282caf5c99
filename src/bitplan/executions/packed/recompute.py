"""Functions that save less for the backward pass than torch's own and compute the same bits (eager, ``packed``).

torch's ReLU saves its whole result, dropout on a CPU a whole tensor of factors, max-pooling eight bytes for every
index. The ReLU and the dropout of this module save one bit per element. Operations whose backward pass needs their own,
unrounded result (tanh, softmax, attention, ...) save their *inputs*, which a plan has rounded and which are therefore
small, and are recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bitplan.capture.ops import works_in_place
from bitplan.executions.packed.saved_tensors import PackedCopy
from bitplan.gemm.products import Product, has_settings, product_of
from bitplan.numerics import chunks
from bitplan.runtime.autograd import rounded_both_ways
from bitplan.runtime.op_context import OpContext
from bitplan.runtime.rounded_mark import copy_mark, mark_rounded, packable
from bitplan.runtime.rounding_op import RoundingOp

_ATTENTION = torch.nn.functional.scaled_dot_product_attention

#: Operations that save their result, or more than their inputs: recomputed in the backward pass.
RECOMPUTED = frozenset(
    """
    tanh sigmoid softmax log_softmax softmin exp expm1 sqrt rsqrt reciprocal elu celu selu logsigmoid logsumexp
    scaled_dot_product_attention max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d
    adaptive_max_pool3d cross_entropy nll_loss hardtanh relu6
    """.split()  # noqa: SIM905 - a paragraph of names reads better than a page of quotes
)

#: Of these, the operations that save nothing but their result.
_SAVE_RESULT = frozenset(
    ["tanh", "sigmoid", "softmax", "log_softmax", "softmin", "exp", "expm1", "sqrt", "rsqrt", "reciprocal"]
)


def memory_saving(op: str, func: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the result of `func` that saves less, where there is one; otherwise `func`."""
    if op in ("relu", "dropout"):
        saving = bit_relu if op == "relu" else bit_dropout
        return partial(saving, inplace=True) if works_in_place(func) else saving
    return _recomputed(op, func) if op in RECOMPUTED else func


# --- One bit per element


#: Multiplying an int64 of eight bytes, each 0 or 1, by this gathers the bits in its highest byte: byte i is shifted
#: left by 56 - 7 i, all other shifted copies fall outside of the highest byte, and no two of them overlap.
_GATHER = 0x0102040810204080
#: Selects bit i of byte i, of a byte that is repeated eight times.
_SPREAD = 0x8040201008040201 - (1 << 64)


class Bits:
    """A boolean mask with one bit per element."""

    def __init__(self, mask: Tensor) -> None:
        self.shape, self.stride = mask.shape, mask.stride()
        flat = mask.as_strided((mask.numel(),), (1,), mask.storage_offset())  # in memory order
        if padding := -flat.numel() % 8:
            flat = torch.nn.functional.pad(flat, (0, padding))
        elif flat.storage_offset() % 8:
            flat = flat.clone()
        self.payload = ((flat.view(torch.int64) * _GATHER) >> 56).to(torch.uint8)

    def mask(self) -> Tensor:
        spread = (self.payload.to(torch.int64) * 0x0101010101010101) & _SPREAD
        return spread.view(torch.uint8).bool().as_strided(self.shape, self.stride)

    def where_set(self, x: Tensor) -> Tensor:
        """`x` where the mask is set, otherwise zero."""
        return torch.where(self.mask(), x, torch.zeros((), dtype=x.dtype, device=x.device))


class PositivePart:
    """The mask of a ReLU's gradient: a bit per element, or the packed result once another operation saves it."""

    def __init__(self, y: Tensor) -> None:
        self.bits: Bits | None = Bits(~(y <= 0))
        self.copy: PackedCopy | None = None

    def share_copy(self, y: Tensor) -> None:
        """Replace the bits by a packed copy of `y`, which has the same signs, when there is one."""
        mark = packable(y)
        if mark is not None:
            mark.on_packed.append(self._use_copy)

    def _use_copy(self, copy: PackedCopy) -> None:
        self.copy, self.bits = copy, None

    def apply(self, x: Tensor) -> Tensor:
        """`x` where the result of the ReLU is positive, otherwise zero."""
        if self.bits is not None:
            return self.bits.where_set(x)
        assert self.copy is not None
        passed: Tensor = torch.ops.aten.threshold_backward(x, self.copy.unpack(), 0)
        return passed


class BitRelu(torch.autograd.Function):
    """ReLU that saves the signs of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inplace: bool) -> Tensor:
        y = torch.nn.functional.relu(x, inplace)
        if inplace:
            ctx.mark_dirty(x)
        ctx.positive = PositivePart(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.positive.apply(grads[0]), None


def bit_relu(input: Tensor, inplace: bool = False) -> Tensor:
    """ReLU that saves one bit per element for its gradient."""
    if not (torch.is_grad_enabled() and input.requires_grad):
        return torch.nn.functional.relu(input, inplace)
    y: Tensor = BitRelu.apply(input, inplace)  # type: ignore[no-untyped-call]
    return y


class PackedGridRelu(torch.autograd.Function):
    """ReLU of a tensor on the grid, so that the result is on it, too; the gradient is rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backward: RoundingOp, context: OpContext) -> Tensor:
        ctx.backward_op, ctx.context = backward, context
        y = torch.relu(x)
        ctx.positive = PositivePart(y)
        copy_mark(y, x)
        ctx.positive.share_copy(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rounded = ctx.backward_op.round(grads[0], ctx.context)
        return mark_rounded(ctx.positive.apply(rounded), ctx.backward_op.grid), None, None


class RoundedBitRelu(torch.autograd.Function):
    """ReLU whose result is rounded in place, value by value, so that there is no second tensor of its size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: RoundingOp, backward: RoundingOp | None, context: OpContext) -> Tensor:
        ctx.backward_op, ctx.context = backward, context
        y = torch.relu(x)
        ctx.positive = PositivePart(y)
        quantizer = forward.quantizer_of(y)
        for chunk in chunks.chunks_of(y):
            chunk.copy_(quantizer.round_values(chunk, None))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.backward_op is None:
            return ctx.positive.apply(grads[0]), None, None, None
        rounded = ctx.backward_op.round(grads[0], ctx.context)
        return mark_rounded(ctx.positive.apply(rounded), ctx.backward_op.grid), None, None, None


def rounded_bit_relu(x: Tensor, forward: RoundingOp | None, backward: RoundingOp | None, context: OpContext) -> Tensor:
    """ReLU that saves one bit per element, its output and its gradient rounded."""
    forward, backward = (None if op is None else op.after_promotion(context) for op in (forward, backward))
    if forward is None or not forward.changes_nothing_in(x):
        is_trained = torch.is_grad_enabled() and x.requires_grad
        if forward is None or not is_trained or not forward.rounds_value_by_value(context):
            return rounded_both_ways(bit_relu(x), forward, backward, context)
        y = RoundedBitRelu.apply(x, forward, backward, context)  # type: ignore[no-untyped-call]
        return mark_rounded(y, forward.grid, forward.quantizer_of(y))
    if backward is None:
        y = bit_relu(x)
        copy_mark(y, x)
    else:
        y = PackedGridRelu.apply(x, backward, context)  # type: ignore[no-untyped-call]
    return mark_rounded(y, forward.grid)


class BitDropout(torch.autograd.Function):
    """Dropout that saves a bit per element, with the random numbers of torch's dropout."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, inplace: bool) -> Tensor:
        ctx.p = p
        if x.is_cuda:
            y, passed = torch.native_dropout(x, p, True)
        else:
            factors = torch.empty_like(x).bernoulli_(1 - p)
            passed = factors.bool()
            y = x * factors.div_(1 - p)
        ctx.passed = Bits(passed)
        if not inplace:
            return y
        ctx.mark_dirty(x)
        return x.copy_(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        passed = ctx.passed.mask()
        if grads[0].is_cuda:
            return torch.ops.aten.native_dropout_backward(grads[0], passed, 1 / (1 - ctx.p)), None, None
        return grads[0] * passed.to(grads[0].dtype).div_(1 - ctx.p), None, None


def bit_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout that saves one bit per element for its gradient."""
    needs_grad = torch.is_grad_enabled() and input.requires_grad
    if not (needs_grad and training and 0 < p < 1 and input.numel()):
        return torch.nn.functional.dropout(input, p, training, inplace)
    y: Tensor = BitDropout.apply(input, p, inplace)  # type: ignore[no-untyped-call]
    return y


# --- Convolutions


class SequentialConvolution(torch.autograd.Function):
    """A convolution on a CPU whose two gradients are computed one after the other, that of the weight first.

    torch computes both in one call, during which the unpacked input, its copy in oneDNN's layout and the input's
    gradient are alive together: the peak of a packed step. The gradient of the input does not need the input, so it is
    released before: a transposed convolution computes it, with the bits of ``convolution_backward`` for the shapes that
    :func:`sequential_convolution` admits.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, product: Product) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.product, ctx.size = product, x.shape
        return product.forward(x, w, None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), product = grads, ctx.product
        x, w = ctx.saved_tensors
        grad_w = product.grad_w(dy, x, w)
        del x
        return product.grad_x_by_transposition(dy, ctx.size, w), grad_w, None


#: 1x1 kernels with fewer input channels are summed in another order.
_LEAST_CHANNELS = 8


def sequential_convolution(op: str, func: Callable[..., Any]) -> Callable[..., Any]:
    """The convolution `func` with its gradients one after the other, where its call has a simple form."""

    def convolve(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs["input"]
        w = args[1] if len(args) > 1 else kwargs["weight"]
        # For other kernels, groups and layouts oneDNN was seen to sum the two in another order.
        is_simple = x.is_cpu and x.dtype == w.dtype and x.dim() == 4 == w.dim() and x.is_contiguous() and x.numel()
        is_simple = is_simple and w.is_contiguous() and w.shape[1] == x.shape[1] and len(x) > 1
        is_simple = is_simple and (min(w.shape[2:]) > 1 or w.shape[1] >= _LEAST_CHANNELS)
        needs_both = torch.is_grad_enabled() and x.requires_grad and w.requires_grad
        if not is_simple or not needs_both or torch.is_autocast_enabled("cpu") or not has_settings(op, args, kwargs):
            return func(*args, **kwargs)
        product, bias = product_of(op, args, kwargs)
        if bias is not None or product.output_padding_of(x.shape, w.shape) is None:
            return func(*args, **kwargs)
        return SequentialConvolution.apply(x, w, product)  # type: ignore[no-untyped-call]

    return convolve


# --- Recomputed


class Recomputed(torch.autograd.Function):
    """An operation that saves its inputs only and is recomputed in the backward pass with the same random numbers."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> Any:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        return call.run(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [
            tensor.detach().requires_grad_(needs_grad)
            for tensor, needs_grad in zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        ]
        with torch.enable_grad():
            result = ctx.call.recompute(inputs)
        outputs = list(result) if isinstance(result, (tuple, list)) else [result]
        paired = [(y, g) for y, g in zip(outputs, grads, strict=True) if y.requires_grad and g is not None]
        trained_inputs = [tensor for tensor in inputs if tensor.requires_grad]
        gradients = iter(torch.autograd.grad([y for y, _ in paired], trained_inputs, [g for _, g in paired]))
        return None, *(next(gradients) if tensor.requires_grad else None for tensor in inputs)


class Call:
    """A call of a torch function without its tensors, with the autocast and random state of the call."""

    def __init__(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
        self.func = func
        self.args = [None if isinstance(value, Tensor) else value for value in args]
        self.kwargs = {key: None if isinstance(value, Tensor) else value for key, value in kwargs.items()}
        #: Positions and names of the tensor arguments.
        self.tensor_arguments: list[int | str] = [at for at, value in enumerate(args) if isinstance(value, Tensor)]
        self.tensor_arguments += [key for key, value in kwargs.items() if isinstance(value, Tensor)]
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        self.device = tensors[0].device
        self.autocast = _current_autocast(self.device.type)
        #: Only attention draws random numbers; its fifth argument is the dropout probability.
        self.is_random = bool(kwargs.get("dropout_p") or (len(args) > 4 and func is _ATTENTION and args[4]))
        self.state: Tensor | None = None

    def run(self, tensors: Any) -> Any:
        if self.is_random:
            self.state = _random_state(self.device)
        return self._call(tensors)

    def recompute(self, tensors: Any) -> Any:
        with self.autocast():
            if self.state is None:
                return self._call(tensors)
            current = _random_state(self.device)
            _set_random_state(self.device, self.state)
            try:
                return self._call(tensors)
            finally:
                _set_random_state(self.device, current)

    def _call(self, tensors: Any) -> Any:
        args, kwargs = list(self.args), dict(self.kwargs)
        for argument, tensor in zip(self.tensor_arguments, tensors, strict=True):
            if isinstance(argument, int):
                args[argument] = tensor
            else:
                kwargs[argument] = tensor
        return self.func(*args, **kwargs)


def _recomputed(op: str, func: Callable[..., Any]) -> Callable[..., Any]:
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        overwrites = works_in_place(func) or kwargs.get("inplace") or kwargs.get("out") is not None
        if overwrites or not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
            return func(*args, **kwargs)  # what was overwritten cannot be recomputed from
        if op in _SAVE_RESULT and not any(tensor.is_leaf or packable(tensor) for tensor in tensors):
            # The input takes as much memory as the result, and the model may overwrite it.
            return func(*args, **kwargs)
        return Recomputed.apply(Call(func, args, kwargs), *tensors)  # type: ignore[no-untyped-call]

    return recomputed


def _current_autocast(device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    if not torch.is_autocast_enabled(device_type):
        return nullcontext
    dtype = torch.get_autocast_dtype(device_type)
    return lambda: torch.autocast(device_type, dtype)


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
