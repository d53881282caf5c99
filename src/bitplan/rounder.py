"""Doing to a model's tensors what a plan says, operation by operation, forward and backward.

Everything here must trace under ``torch.compile(fullgraph=True)`` and give the same graph for equal blocks,
so what differs between blocks (the noise's key, the step) lies in a buffer of the module, not in Python numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.actions import Action, Slots, rounded_both_ways, rounded_gradient
from bitplan.errors import QuantizeError
from bitplan.intercept import Interceptor, Scope, state_of
from bitplan.opened import OPENED
from bitplan.ops import PRODUCTS, out_of_place, works_in_place
from bitplan.plan import SLOTS, Plan
from bitplan.products import product_of, slot_product

#: The module buffer that holds the key of stochastic rounding: a hash of seed, step and the module's path.
KEY = "_bitplan_key"
#: Stands for every operation that no rule names.
ANY = "any other"
#: The attribute by which a tensor tells its consumers how to round the gradients they send back.
_GRAD_TAG = "_bitplan_grad"


class Rounder(Interceptor):
    """The interceptor that rounds."""

    def __init__(self, plan: Plan | None = None) -> None:
        """`plan` only where an operation's name must be matched against patterns when it is met."""
        self.plan = plan
        #: Set when some plan rounds gradients where they leave a consumer.
        self.tags_gradients = False
        self.on_site: Callable[[nn.Module, str, int], None] | None = None

    def on_operation(
        self, scope: Scope, op: str, index: int, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        module = scope.module
        if not torch.compiler.is_compiling() and self.on_site is not None:
            self.on_site(module, op, index)
        if self.tags_gradients:
            args = _map(lambda tensor: self._from_consumer(module, tensor, index), args)
        action = self.action(scope, op, index)
        if action is None:
            return func(*args, **kwargs)
        if op in PRODUCTS and action.has_slots:
            return self._product(module, action, index, func, args, kwargs)
        args, kwargs = self._rounded_weights(module, action, index, args, kwargs)
        return self._call(module, action, op, index, func, args, kwargs)

    def on_view(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if self.tags_gradients and isinstance(result, Tensor) and args and isinstance(args[0], Tensor):
            gradient = getattr(args[0], _GRAD_TAG, None)
            if gradient is not None:
                setattr(result, _GRAD_TAG, gradient)
        return result

    def action(self, scope: Scope, op: str, index: int) -> Action | None:
        actions = state_of(scope.module).actions
        if scope.inside is not None and op in PRODUCTS:
            inner = actions.get(scope.inside)
            if inner is not None and inner.has_slots:
                return inner  # type: ignore[no-any-return]
        numbered = actions.get(f"{op}.{index}")
        if numbered is not None:
            return numbered  # type: ignore[no-any-return]
        if op not in actions and self.plan is not None:
            decision = self.plan.decide(state_of(scope.module).path, op)
            actions[op] = None if decision.changes_nothing else Action(decision, op)
        return actions[op if op in actions else ANY]  # type: ignore[no-any-return]

    def written_out(self, scope: Scope, op: str) -> Callable[..., Any] | None:
        if op not in OPENED:
            return None
        actions = state_of(scope.module).actions
        action = actions.get(op)
        asked = actions[f"open {op}"] or (action is not None and action.has_slots)
        return OPENED[op] if asked else None

    # --- outputs ---

    def _call(
        self, module: nn.Module, action: Action, op: str, index: int, func: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run `func` and round what it returns; an in-place function ends with the rounded values in its tensor."""
        if not (action.applies("activation", module.training) or "grad_activation" in action.places):
            return func(*args, **kwargs)
        target: Tensor | None = kwargs.get("out")
        if target is not None:
            kwargs = {key: value for key, value in kwargs.items() if key != "out"}
        elif works_in_place(func):
            target, func = args[0], out_of_place(func)
        elif kwargs.get("inplace"):
            target, kwargs = args[0], {**kwargs, "inplace": False}
        result = func(*args, **kwargs)
        if target is None:
            return _map(lambda tensor: self._rounded_output(module, action, tensor, index, args), result)
        return target.copy_(self._rounded_output(module, action, result, index, ()))

    def _rounded_output(self, module: nn.Module, action: Action, tensor: Tensor, index: int, inputs: Any) -> Tensor:
        if not tensor.is_floating_point() or any(tensor is given for given in inputs):
            return tensor  # dropout in evaluation, say, returns what it was given
        value = action.places["activation"] if action.applies("activation", module.training) else None
        gradient = action.places.get("grad_activation") if torch.is_grad_enabled() and tensor.requires_grad else None
        if action.at_consumer and gradient is not None:
            tensor = rounded_both_ways(tensor, value, None, _key(module), index)
            setattr(tensor, _GRAD_TAG, gradient)
            return tensor
        return rounded_both_ways(tensor, value, gradient, _key(module), index)

    def _from_consumer(self, module: nn.Module, tensor: Tensor, index: int) -> Tensor:
        gradient = getattr(tensor, _GRAD_TAG, None)
        if gradient is None or not torch.is_grad_enabled():
            return tensor
        return rounded_gradient(tensor, gradient, _key(module), index)

    # --- weights ---

    def _rounded_weights(
        self, module: nn.Module, action: Action, index: int, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        if "weight" not in action.places and "grad_weight" not in action.places:
            return args, kwargs
        return (
            _map(lambda tensor: self._rounded_weight(module, action, tensor, index), args),
            {
                key: _map(lambda t: self._rounded_weight(module, action, t, index), value)
                for key, value in kwargs.items()
            },
        )

    def _rounded_weight(self, module: nn.Module, action: Action, tensor: Tensor, index: int) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            return tensor
        gradient = action.places.get("grad_weight") if torch.is_grad_enabled() and tensor.requires_grad else None
        value = action.places["weight"] if action.applies("weight", module.training) else None
        return rounded_both_ways(tensor, value, gradient, _key(module), index)

    # --- products ---

    def _product(
        self, module: nn.Module, action: Action, index: int, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        op = action.op if action.op in PRODUCTS else "matmul"
        args, kwargs = self._rounded_weights(module, action, index, args, kwargs)
        (x_at, x_name), (w_at, w_name) = PRODUCTS[op]
        x = args[x_at] if len(args) > x_at else kwargs[x_name]
        w = args[w_at] if len(args) > w_at else kwargs[w_name]
        _require_room_under_autocast(action, x)
        key = _key(module)
        if action.slots_apart:
            product, bias = product_of(op, args, kwargs)
            slots = Slots(action, module.training, index)
            result = slot_product(x, w, bias, product, slots, key)
        else:
            if "x" in action.shared and action.applies("fprop.x", module.training):
                x = action.places["fprop.x"].round(x, key, index)
            if "w" in action.shared and action.applies("fprop.w", module.training):
                w = action.places["fprop.w"].round(w, key, index)
            args, kwargs = _replaced(args, kwargs, (x_at, x_name, x), (w_at, w_name, w))
            result = func(*args, **kwargs)
            if "dy" in action.shared and torch.is_grad_enabled() and result.requires_grad:
                result = rounded_gradient(result, action.places["dgrad.dy"], key, index)
        return self._rounded_output(module, action, result, index, ())


def _key(module: nn.Module) -> Tensor | None:
    return module._buffers.get(KEY)


def _map(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with `change` applied to every tensor in it, tuples and lists entered."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[_map(change, item) for item in value])
    if isinstance(value, (list, tuple)):
        return type(value)([_map(change, item) for item in value])
    return value


def _replaced(args: Any, kwargs: dict[str, Any], *places: tuple[int, str, Tensor]) -> tuple[list[Any], dict[str, Any]]:
    positional, named = list(args), dict(kwargs)
    for position, name, tensor in places:
        if len(positional) > position:
            positional[position] = tensor
        else:
            named[name] = tensor
    return positional, named


def _require_room_under_autocast(action: Action, x: Tensor) -> None:
    """Autocast would round a finer operand again, to its own type: that is an error, not a surprise."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return
    dtype = torch.get_autocast_dtype(kind)
    for slot in SLOTS:
        if slot in action.places:
            target = action.places[slot].spec.target
            if target.kind == "float" and target.epsilon < torch.finfo(dtype).eps:
                raise QuantizeError(
                    f"autocast computes {action.op} in {dtype}, which is coarser than {target.name} in {slot}: "
                    f"choose a coarser format, or leave autocast."
                )
