"""What a plan does, written once more in plain torch: every rounding is one call of ``bitplan.quantize``.

It follows docs/how-to/plans.md and shares no code with the runtime: rules are dictionaries, the last one that names a
tensor decides, and every operation is computed out of place. Not covered: stochastic rounding, ``grad_at: consumer``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bitplan

__all__ = ["Hand", "Run", "View"]

#: Key of a rule -> the places it means.
KEYS: dict[str, tuple[str, ...]] = {
    **{key: (key,) for key in ("weight", "activation", "grad_activation", "grad_weight")},
    **{key: (key,) for key in ("fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x")},
    "x": ("fprop.x", "wgrad.x"),
    "w": ("fprop.w", "dgrad.w"),
    "dy": ("dgrad.dy", "wgrad.dy"),
}
#: Operand -> the place whose axis and history it has where both of its products share it.
SHARED = {"x": "fprop.x", "w": "fprop.w", "dy": "dgrad.dy"}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0, "e3m2": 28.0}


@dataclass(frozen=True)
class View:
    """A view of a weight: the whole weight is rounded."""

    weight: nn.Parameter
    of: Callable[[Tensor], Tensor]


class Run:
    """The rules, and what is remembered from step to step."""

    def __init__(self, rules: tuple[dict[str, Any], ...]) -> None:
        self.rules = rules
        #: Rules that decided something that exists.
        self.used: set[int] = set()
        #: Rules that match something without any tensor to round (masked scores without a gradient), and others.
        self.without_tensors: set[int] = set()
        self.with_tensors: set[int] = set()
        #: (rule, key) pairs that name something that exists.
        self.present: set[tuple[int, str]] = set()
        self._amax: dict[str, list[float]] = {}
        self._now: dict[str, float] = {}

    def step(self) -> None:
        for site in set(self._amax) | set(self._now):
            self._amax.setdefault(site, []).append(self._now.get(site, 0.0))
        self._now = {}

    def round(self, x: Tensor, spec: Any, axis: dict[str, Any], site: str | None) -> Tensor:
        """`x` rounded. `site`: under what name its amax is remembered; None where it is not."""
        spec = {"format": spec} if isinstance(spec, str) else dict(spec)
        spec.pop("rounding", None)
        history, margin = spec.pop("history", None), spec.pop("margin", 0)
        past = 0.0
        if history is not None and site is not None:
            past = max([0.0, *self._amax.get(site, [])[-history:]])
            self._now[site] = max(self._now.get(site, 0.0), float(x.detach().abs().max()))
        if past > 0:
            largest = LARGEST[spec["format"]]
            scale = torch.tensor(past * 2.0**margin, dtype=torch.float32) / largest
            rounded = (bitplan.quantize(x.detach().float() / scale, spec["format"]) * scale).to(x.dtype)
        else:
            if spec.get("scale") == "vector":
                spec |= axis
            rounded = bitplan.quantize(x.detach(), spec.pop("format"), **spec)
        return rounded


Rounding = Callable[[Tensor], Tensor] | None


class _Rounded(torch.autograd.Function):
    """Values rounded forward, gradients backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Rounding, gradient: Rounding) -> Tensor:
        ctx.gradient = gradient
        return x.clone() if value is None else value(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] if ctx.gradient is None else ctx.gradient(grads[0]), None, None


def _apply(x: Tensor, value: Rounding, gradient: Rounding) -> Tensor:
    return x if value is None and gradient is None else _Rounded.apply(x, value, gradient)


class _ThreeProducts(torch.autograd.Function):
    """The three products of an operation, with six operands that are rounded separately."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, op: str, settings: Any, slots: Any) -> Tensor:
        ctx.save_for_backward(x, w, bias)
        ctx.op, ctx.settings, ctx.slots = op, settings, slots
        return multiply(op, slots("fprop.x", x), slots("fprop.w", w), bias, settings)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, w, bias = ctx.saved_tensors
        op, slots, dy = ctx.op, ctx.slots, grads[0]
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = grad_of_x(op, slots("dgrad.dy", dy), x, slots("dgrad.w", w), ctx.settings)
        if ctx.needs_input_grad[1]:
            dw = grad_of_w(op, slots("wgrad.dy", dy), slots("wgrad.x", x), w, ctx.settings)
        if bias is not None and ctx.needs_input_grad[2]:
            dy = slots("bias", dy)
            db = dy.sum((0, *range(2, dy.dim()))) if op.startswith("conv") else dy.sum_to_size(bias.shape)
        return dx, dw, db, None, None, None


def multiply(op: str, x: Tensor, w: Tensor, bias: Tensor | None, settings: Any) -> Tensor:
    if op == "linear":
        return F.linear(x, w, bias)
    if op == "einsum":
        return torch.einsum(settings, x, w)
    if op.startswith("conv"):
        return getattr(F, op)(x, w, bias, padding=1, groups=settings)
    return torch.matmul(x, w) if bias is None else torch.addmm(bias, x, w)


def _conv_backward(dy: Tensor, x: Tensor, w: Tensor, groups: int, mask: list[bool]) -> tuple[Tensor, ...]:
    dims = w.dim() - 2
    settings = ([1] * dims, [1] * dims, [1] * dims, False, [0] * dims, groups)
    return torch.ops.aten.convolution_backward(dy, x, w, None, *settings, mask)


def grad_of_x(op: str, dy: Tensor, x: Tensor, w: Tensor, settings: Any) -> Tensor:
    if op == "linear":
        return dy @ w
    if op == "einsum":
        left, right, out = settings.replace("->", ",").split(",")
        return torch.einsum(f"{out},{right}->{left}", dy, w)
    if op.startswith("conv"):
        return _conv_backward(dy, x, w, settings, [True, False, False])[0]
    return (dy @ w.mT).sum_to_size(x.shape)


def grad_of_w(op: str, dy: Tensor, x: Tensor, w: Tensor, settings: Any) -> Tensor:
    if op == "linear":
        return dy.flatten(0, -2).T @ x.flatten(0, -2)
    if op == "einsum":
        left, right, out = settings.replace("->", ",").split(",")
        return torch.einsum(f"{left},{out}->{right}", x, dy)
    if op.startswith("conv"):
        return _conv_backward(dy, x, w, settings, [False, True, False])[1]
    return (x.mT @ dy).sum_to_size(w.shape)


def vector_axis(op: str, place: str, dims: int) -> dict[str, Any]:
    """Along which axis a ``vector`` scale lies: that which the product sums over; or all but one, by ``channel``."""
    product, tensor = place.split(".")
    if op.startswith("conv"):
        by_channel = product == "wgrad" or place == "dgrad.w"
        return {"scale": "channel", "axis": 1 if by_channel else 0}
    if op == "linear":
        if tensor == "w":
            return {"axis": 0 if product == "dgrad" else 1}
        return {"scale": "channel", "axis": dims - 1} if product == "wgrad" else {"axis": dims - 1}
    sums_rows = product == "wgrad" or place == "fprop.w"
    return {"axis": dims - 2 if sums_rows else dims - 1}


class Hand:
    """One call of a module: its operations, rounded by hand."""

    def __init__(self, run: Run, path: str = "") -> None:
        self.run, self.path = run, path
        self.counts: Counter[str] = Counter()

    def child(self, name: str) -> Hand:
        return Hand(self.run, f"{self.path}.{name}".strip("."))

    def __call__(self, op: str, function: Callable[..., Tensor], *args: Any) -> Tensor:
        """An operation that is no product."""
        return self._operation(op, function, args)

    def mask(self, op: str, function: Callable[..., Tensor], *args: Any) -> Tensor:
        """An operation that masks scores: its gradient is rounded, its values are not."""
        return self._operation(op, function, args, is_mask=True)

    def constant(self, op: str, function: Callable[..., Tensor], *args: Any) -> Tensor:
        """An operation on constants: it counts, and is left alone."""
        self.counts[op] += 1
        return function(*args)

    def _operation(self, op: str, function: Callable[..., Tensor], args: Any, is_mask: bool = False) -> Tensor:
        site, places = self._decide(op)
        has_weights = any(isinstance(arg, nn.Parameter) for arg in args)
        y = function(*self._rounded_weights(site, places, args))
        self._note(site, _present(y, has_weights, has_weights and _learns(args), is_mask))
        return self._output(site, places, y, is_mask)

    def product(self, op: str, x: Any, w: Any, bias: Any = None, settings: Any = None) -> Tensor:
        site, places = self._decide(op)
        args = (x, w, bias)
        has_weights = any(isinstance(arg, (nn.Parameter, View)) for arg in args)
        x, w, bias = self._rounded_weights(site, places, args)
        shared = {
            key: places[SHARED[key]][1]
            for key in SHARED
            if all(place in places and places[place][2] == key for place in KEYS[key])
            and len({places[place][0] for place in KEYS[key]}) == 1
        }
        slots = [place for place in places if "." in place]
        recorded = torch.is_grad_enabled()
        if any(_operand(place) not in shared for place in slots):

            def rounded(place: str, tensor: Tensor) -> Tensor:
                if place == "bias" and "dy" in shared:
                    place = "dgrad.dy"  # the one rounded gradient is that of the bias, too
                if place not in places:
                    return tensor
                at = SHARED[_operand(place)] if _operand(place) in shared else place
                return self._round(site, at, places[place][1], tensor, op, recorded)

            y = _ThreeProducts.apply(x, w, bias, op, settings, rounded)
        else:
            for key, spec in shared.items():
                if key == "x":
                    x = _apply(x, lambda t, s=spec: self._round(site, "fprop.x", s, t, op, recorded), None)
                if key == "w":
                    w = _apply(w, lambda t, s=spec: self._round(site, "fprop.w", s, t, op, recorded), None)
            y = multiply(op, x, w, bias, settings)
            if "dy" in shared and y.requires_grad:
                y = _apply(y, None, lambda t: self._round(site, "dgrad.dy", shared["dy"], t, op, recorded))
        self._note(site, _present(y, has_weights, has_weights and _learns(args), False, is_product=True))
        return self._output(site, places, y, False)

    def _output(self, site: str, places: Any, y: Tensor, is_mask: bool) -> Tensor:
        value = gradient = None
        if "activation" in places and not is_mask:
            value = self._rounding(site, "activation", places)
        if "grad_activation" in places and y.requires_grad and torch.is_grad_enabled():
            gradient = self._rounding(site, "grad_activation", places)
        return _apply(y, value, gradient)

    def _rounded_weights(self, site: str, places: Any, args: Any) -> list[Any]:
        if "weight" not in places and "grad_weight" not in places:
            return [arg.of(arg.weight) if isinstance(arg, View) else arg for arg in args]
        weights = [arg for arg in args if isinstance(arg, nn.Parameter)]
        largest = max(weights, key=Tensor.numel, default=None)
        rounded = []
        for arg in args:
            weight = arg.weight if isinstance(arg, View) else arg
            if isinstance(weight, nn.Parameter):
                is_recorded = weight is largest or isinstance(arg, View)
                value = self._rounding(site, "weight", places, is_recorded) if "weight" in places else None
                gradient = None
                if "grad_weight" in places and weight.requires_grad:
                    gradient = self._rounding(site, "grad_weight", places, is_recorded)
                new = _apply(weight, value, gradient)
                arg = arg.of(new) if isinstance(arg, View) else new
            rounded.append(arg)
        return rounded

    def _rounding(self, site: str, place: str, places: Any, is_recorded: bool = True) -> Rounding:
        spec, is_recorded = places[place][1], is_recorded and torch.is_grad_enabled()
        return lambda tensor: self._round(site, place, spec, tensor, "", is_recorded)

    def _round(self, site: str, place: str, spec: Any, tensor: Tensor, op: str, is_recorded: bool = True) -> Tensor:
        axis = vector_axis(op, place, tensor.dim()) if "." in place else {}
        return self.run.round(tensor, spec, axis, f"{self.path}/{site}:{place}" if is_recorded else None)

    # --- rules ---

    def _decide(self, op: str) -> tuple[str, dict[str, tuple[int, Any, str]]]:
        """The operation's name with its number, and for each place that is rounded: rule, quantizer and key."""
        site = f"{op}.{self.counts[op]}"
        self.counts[op] += 1
        places: dict[str, tuple[int, Any, str]] = {}
        for number, rule in enumerate(self.run.rules):
            if not self._is_matched(rule, op, site):
                continue
            if rule.get("keep"):
                places.clear()
            for key, spec in rule.items():
                for place in KEYS.get(key, ()):
                    places[place] = (number, spec, key)
        return site, places

    def _is_matched(self, rule: dict[str, Any], op: str, site: str) -> bool:
        path = rule["match"]
        is_path = path in ("*", self.path) or self.path.startswith(f"{path}.")
        return is_path and rule.get("op") in (None, op, site)

    def _note(self, site: str, present: set[str]) -> None:
        """Which rules have an effect here."""
        op = site.partition(".")[0]
        last: dict[str, int] = {}
        for number, rule in enumerate(self.run.rules):
            if self._is_matched(rule, op, site):
                keys = {key: KEYS[key] for key in rule if key in KEYS}
                self.run.present |= {(number, key) for key, places in keys.items() if present & {*places}}
                spoken = present if rule.get("keep") else {place for places in keys.values() for place in places}
                last |= dict.fromkeys(spoken & present, number)
                self.run.without_tensors |= set() if present else {number}
                self.run.with_tensors |= {number} if spoken & present else set()
        self.run.used |= set(last.values())


def _operand(place: str) -> str:
    return place.partition(".")[2]


def _learns(args: Any) -> bool:
    weights = [arg.weight if isinstance(arg, View) else arg for arg in args]
    return any(isinstance(weight, nn.Parameter) and weight.requires_grad for weight in weights)


def _present(y: Tensor, has_weights: bool, learns: bool, is_mask: bool, is_product: bool = False) -> set[str]:
    """The places that an operation has."""
    places = set() if is_mask else {"activation"}
    if has_weights:
        places.add("weight")
    if learns:
        places.add("grad_weight")
    if is_product:
        places |= {"fprop.x", "fprop.w"}
    if y.requires_grad:
        places |= {"grad_activation"}
        if is_product:
            places |= {"dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x"}
    return places
