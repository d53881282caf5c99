"""A linear layer whose products run on low-precision units, pass by pass; what cannot, is emulated."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from bitplan.errors import PlanError
from bitplan.native.operands import Codes
from bitplan.native.units import Unit
from bitplan.products import Product
from bitplan.tracing import is_traced

_LINEAR = Product("linear")
#: The attribute by which the readers of a tensor, in a graph in the making, know of each other.
_FIRST_DY = "_bitplan_first_dy"


class NativeSlots(Protocol):
    """What the product asks of a plan."""

    #: Pass -> what multiplies there; a pass that is missing is emulated.
    units: dict[str, Unit]
    #: Whether both backward products get one rounded gradient.
    shares_dy: bool
    #: Operands, of x and w, that the backward pass casts again from what they were, rather than keep their codes.
    casts_again: tuple[str, ...]

    def round(self, slot: str, tensor: Tensor) -> Tensor: ...

    def codes(self, slots: list[str], tensor: Tensor, after: Tensor | None = None) -> list[Codes]:
        """The codes of a tensor for each of these slots; `after`: once more, and not before that tensor is there."""
        ...


class NativeLinear(torch.autograd.Function):
    """y = x w forward, dx = dy w and dw = dy x backward. Of x and w, the codes that backward products want are kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, slots: NativeSlots) -> Tensor:
        ctx.slots, ctx.shape, ctx.dtypes = slots, x.shape, (x.dtype, w.dtype)
        #: Begins with the first gradient that comes to any reader of x: they cast x again after that, once for all.
        ctx.first_dy = x.__dict__.setdefault(_FIRST_DY, []) if "x" in slots.casts_again and is_traced() else []
        wanted_x = _slots_of("x", slots, fprop=True, wgrad=ctx.needs_input_grad[1] and "x" not in slots.casts_again)
        wanted_w = _slots_of("w", slots, fprop=True, dgrad=ctx.needs_input_grad[0] and "w" not in slots.casts_again)
        of_x = dict(zip(wanted_x, slots.codes(wanted_x, x), strict=True))
        of_w = dict(zip(wanted_w, slots.codes(wanted_w, w), strict=True))
        if "fprop" in slots.units:
            left, right = of_x["fprop.x"], of_w["fprop.w"].transposed()
            rows = slots.units["fprop"].multiply(*_operands(left, right), _result_dtype(x))
            y = rows.reshape(*x.shape[:-1], -1)
            y = y if bias is None else y + bias.to(y.dtype)
        else:
            y = _LINEAR.forward(slots.round("fprop.x", x), slots.round("fprop.w", w), bias)
        ctx.save_for_backward(*of_x.get("wgrad.x", (x, None)), *of_w.get("dgrad.w", (w, None)), bias)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not is_traced():
            raise PlanError(
                "native execution has no second derivative: attach with execution='emulate' for create_graph=True."
            )
        x, x_scale, w, w_scale, bias = ctx.saved_tensors
        slots, dy, units = ctx.slots, grads[0], ctx.slots.units
        x_dtype, w_dtype = ctx.dtypes
        grad_x = grad_w = grad_bias = None
        wanted = _slots_of("dy", slots, dgrad=ctx.needs_input_grad[0], wgrad=ctx.needs_input_grad[1])
        of_dy = dict(zip(wanted, slots.codes(wanted, dy), strict=True))
        if "dgrad.dy" in of_dy:
            (right,) = slots.codes(["dgrad.w"], w, after=dy) if w_scale is None else [Codes(w, w_scale)]
            grad_x = units["dgrad"].multiply(*_operands(of_dy["dgrad.dy"], right), x_dtype).reshape(ctx.shape)
        elif ctx.needs_input_grad[0]:
            grad_x = torch.matmul(slots.round("dgrad.dy", dy), slots.round("dgrad.w", w).to(dy.dtype)).to(x_dtype)
        if "wgrad.dy" in of_dy:
            if x_scale is None:
                ctx.first_dy.append(dy)
                (right,) = slots.codes(["wgrad.x"], x, after=ctx.first_dy[0])
            else:
                right = Codes(x, x_scale)
            grad_w = units["wgrad"].multiply(*_operands(of_dy["wgrad.dy"].transposed(), right), w_dtype)
        elif ctx.needs_input_grad[1]:
            rounded = slots.round("wgrad.x", x).to(dy.dtype)
            grad_w = _LINEAR.grad_w(slots.round("wgrad.dy", dy), rounded, w).to(w_dtype)
        if bias is not None and ctx.needs_input_grad[2]:
            arrived = dy
            if slots.shares_dy:  # a gradient that is rounded once, where it arrives, is so for the bias, too
                known = next(iter(of_dy.values()), None)
                arrived = slots.round("dgrad.dy", dy) if known is None else known.decoded().to(dy.dtype)
            grad_bias = _LINEAR.grad_bias(arrived.reshape(dy.shape), bias).to(bias.dtype)
        return grad_x, grad_w, grad_bias, None


def _slots_of(operand: str, slots: NativeSlots, **wanted: bool) -> list[str]:
    """The slots of an operand in the passes that are wanted and run on a unit."""
    return [f"{one}.{operand}" for one, is_wanted in wanted.items() if is_wanted and one in slots.units]


def _operands(left: Codes, right: Codes) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    return left.values, right.values, (left.scale, right.scale)


def _result_dtype(x: Tensor) -> torch.dtype:
    """As a linear layer's own: autocast decides, where there is one."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def native_linear(x: Tensor, w: Tensor, bias: Tensor | None, slots: NativeSlots) -> Tensor:
    """y = x w + bias, its products on the units that `slots` names."""
    y: Tensor = NativeLinear.apply(x, w, bias, slots)  # type: ignore[no-untyped-call]
    return y
