"""A linear layer whose products run on low-precision units, pass by pass; what cannot, is emulated."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from bitplan.errors import PlanError
from bitplan.native.operands import PASSES, Codes, codes_of
from bitplan.native.units import Unit
from bitplan.products import Product
from bitplan.straight import Encoded
from bitplan.tracing import is_traced

_LINEAR = Product("linear")


class NativeSlots(Protocol):
    """What the product asks of a plan."""

    #: Pass -> what multiplies there; a pass that is missing is emulated.
    units: dict[str, Unit]
    #: Whether both backward products get one rounded gradient.
    shares_dy: bool

    def round(self, slot: str, tensor: Tensor) -> Tensor: ...

    def encode(self, slot: str, tensor: Tensor) -> tuple[Encoded, torch.dtype]: ...


class NativeLinear(torch.autograd.Function):
    """y = x w forward, dx = dy w and dw = dy x backward. Of x, the codes that the weight's gradient wants are kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, slots: NativeSlots) -> Tensor:
        ctx.slots, ctx.shape, ctx.dtype = slots, x.shape, x.dtype
        if "fprop" in slots.units:
            rows = slots.units["fprop"].multiply(*_matrices(slots, "fprop", x, w), _result_dtype(x))
            y = rows.reshape(*x.shape[:-1], -1)
            y = y if bias is None else y + bias.to(y.dtype)
        else:
            y = _LINEAR.forward(slots.round("fprop.x", x), slots.round("fprop.w", w), bias)
        if "wgrad" in slots.units and ctx.needs_input_grad[1]:
            ctx.save_for_backward(*_codes(slots, "wgrad.x", x), w, bias)
        else:
            ctx.save_for_backward(x, None, w, bias)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not is_traced():
            raise PlanError(
                "native execution has no second derivative: attach with execution='emulate' for create_graph=True."
            )
        kept, scale, w, bias = ctx.saved_tensors
        slots, dy = ctx.slots, grads[0]
        grad_x = grad_w = grad_bias = None
        if ctx.needs_input_grad[0]:
            if "dgrad" in slots.units:
                rows = slots.units["dgrad"].multiply(*_matrices(slots, "dgrad", dy, w), ctx.dtype)
                grad_x = rows.reshape(ctx.shape)
            else:
                grad_x = torch.matmul(slots.round("dgrad.dy", dy), slots.round("dgrad.w", w).to(dy.dtype))
                grad_x = grad_x.to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            if scale is not None:
                left, right = _codes(slots, "wgrad.dy", dy).transposed(), Codes(kept, scale)
                unit = slots.units["wgrad"]
                grad_w = unit.multiply(left.values, right.values, (left.scale, right.scale), w.dtype)
            else:
                rounded = slots.round("wgrad.x", kept).to(dy.dtype)
                grad_w = _LINEAR.grad_w(slots.round("wgrad.dy", dy), rounded, w).to(w.dtype)
        if bias is not None and ctx.needs_input_grad[2]:
            # A gradient that is rounded once, where it arrives, is so for the bias, too.
            arrived = slots.round("dgrad.dy", dy) if slots.shares_dy else dy
            grad_bias = _LINEAR.grad_bias(arrived, bias).to(bias.dtype)
        return grad_x, grad_w, grad_bias, None


def _result_dtype(x: Tensor) -> torch.dtype:
    """As a linear layer's own: autocast decides, where there is one."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def native_linear(x: Tensor, w: Tensor, bias: Tensor | None, slots: NativeSlots) -> Tensor:
    """y = x w + bias, its products on the units that `slots` names."""
    y: Tensor = NativeLinear.apply(x, w, bias, slots)  # type: ignore[no-untyped-call]
    return y


def _codes(slots: NativeSlots, slot: str, tensor: Tensor) -> Codes:
    return codes_of(*slots.encode(slot, tensor))


def _matrices(
    slots: NativeSlots, one: str, left: Tensor, right: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """The two matrices of a pass of which the right one is the weight, and their scales."""
    names = PASSES[one]
    a, b = _codes(slots, names[0], left), _codes(slots, names[1], right)
    b = b.transposed() if one == "fprop" else b
    return a.values, b.values, (a.scale, b.scale)
