"""Doing to a model's tensors what a plan says, operation by operation, forward and backward.

Everything here must trace under ``torch.compile(fullgraph=True)`` and give the same graph for equal blocks,
so what differs between blocks (the noise's key, the step) lies in a buffer of the module, not in Python numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.actions import Action, Here, Slots, rounded_both_ways, rounded_gradient
from bitplan.decisions import ANY, inner_key
from bitplan.errors import QuantizeError
from bitplan.intercept import Interceptor, Scope, state_of
from bitplan.opened import OPENED
from bitplan.ops import PRODUCTS, out_of_place, works_in_place
from bitplan.plan import SLOTS
from bitplan.products import product_of, slot_product
from bitplan.tables import TABLE

#: The attribute by which a tensor tells its consumers how to round the gradients they send back.
_GRAD_TAG = "_bitplan_grad"
#: The attribute by which a view of a weight is known as one.
_WEIGHT_TAG = "_bitplan_weight"


class Rounder(Interceptor):
    """The interceptor that rounds."""

    def __init__(self) -> None:
        #: Set when some plan rounds gradients where they leave a consumer.
        self.tags_gradients = False
        #: Set when some plan rounds weights, so that views of them must be known.
        self.tags_weights = False
        #: Called eagerly when a module is entered, as long as it is wanted.
        self.on_first_call: Callable[[nn.Module, Any, dict[str, Any]], None] | None = None
        #: Called eagerly for every operation, as long as it is wanted.
        self.on_site: Callable[[nn.Module, str, int], None] | None = None
        #: Called eagerly when an operation with an action is met in a place where it was not met before.
        self.on_new_site: Callable[[nn.Module, Action, Here], None] | None = None

    def on_operation(
        self, scope: Scope, op: str, index: int, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        module = scope.module
        if self.on_site is not None and not torch.compiler.is_compiling():
            self.on_site(module, op, index)
        action = self.action_of(module, op, index, scope.inside)
        if action is None and not self.tags_gradients:
            return func(*args, **kwargs)
        here = Here(f"{op}.{index}", module)
        if self.tags_gradients:
            args = _map(lambda tensor: self._from_consumer(tensor, here), args)
        if action is None:
            return func(*args, **kwargs)
        if not torch.compiler.is_compiling() and self.on_new_site is not None and here.site not in action.met:
            self.on_new_site(module, action, here)
        if op in PRODUCTS and action.has_slots:
            return self._product(module, action, here, func, args, kwargs)
        if op in PRODUCTS and args and isinstance(args[0], Tensor):
            _require_room_under_autocast(action, args[0])
        args, kwargs = self._rounded_weights(module, action, here, args, kwargs)
        return self._call(action, here, func, args, kwargs)

    def on_call(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if self.on_first_call is not None and not torch.compiler.is_compiling():
            self.on_first_call(module, args, kwargs)

    def on_view(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if not args or not isinstance(args[0], Tensor):
            return result
        if self.tags_gradients and isinstance(result, Tensor):
            gradient = getattr(args[0], _GRAD_TAG, None)
            if gradient is not None:
                setattr(result, _GRAD_TAG, gradient)
        if self.tags_weights and (isinstance(args[0], nn.Parameter) or hasattr(args[0], _WEIGHT_TAG)):
            _tag_views(result, func, args, kwargs)
        return result

    @staticmethod
    def action_of(module: nn.Module, op: str, index: int, inside: str | None = None) -> Action | None:
        """What happens to the operation of that number, which may lie inside an opened one."""
        actions = state_of(module).actions
        if inside is not None:
            inner = actions.get(inner_key(inside, op))
            if inner is not None:
                return inner  # type: ignore[no-any-return]
        numbered = f"{op}.{index}"
        if numbered in actions:
            return actions[numbered]  # type: ignore[no-any-return]
        return actions[op if op in actions else ANY]  # type: ignore[no-any-return]

    def written_out(self, scope: Scope, op: str) -> Callable[..., Any] | None:
        return OPENED[op] if op in OPENED and state_of(scope.module).actions[f"open {op}"] else None

    # --- outputs ---

    def _call(self, action: Action, here: Here, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `func` and round what it returns; an in-place function ends with the rounded values in its tensor."""
        if not (action.applies("activation", here.training) or "grad_activation" in action.places):
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
            return _map(lambda tensor: self._rounded_output(action, here, tensor, args), result)
        return target.copy_(self._rounded_output(action, here, result, ()))

    def _rounded_output(self, action: Action, here: Here, tensor: Tensor, inputs: Any) -> Tensor:
        if not tensor.is_floating_point() or any(tensor is given for given in inputs):
            return tensor  # dropout in evaluation, say, returns what it was given
        value = action.places["activation"] if action.applies("activation", here.training) else None
        gradient = action.places.get("grad_activation") if torch.is_grad_enabled() and tensor.requires_grad else None
        if action.at_consumer and gradient is not None:
            tensor = rounded_both_ways(tensor, value, None, here)
            setattr(tensor, _GRAD_TAG, gradient)
            return tensor
        return rounded_both_ways(tensor, value, gradient, here)

    def _from_consumer(self, tensor: Tensor, here: Here) -> Tensor:
        gradient = getattr(tensor, _GRAD_TAG, None)
        if gradient is None or not torch.is_grad_enabled():
            return tensor
        return rounded_gradient(tensor, gradient, here)

    # --- weights ---

    def _rounded_weights(
        self, module: nn.Module, action: Action, here: Here, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        if "weight" not in action.places and "grad_weight" not in action.places:
            return args, kwargs
        return (
            _map(lambda tensor: self._rounded_weight(module, action, here, tensor), args),
            {
                key: _map(lambda t: self._rounded_weight(module, action, here, t), value)
                for key, value in kwargs.items()
            },
        )

    def _rounded_weight(self, module: nn.Module, action: Action, here: Here, tensor: Tensor) -> Tensor:
        view: WeightView | None = getattr(tensor, _WEIGHT_TAG, None)
        if view is not None:
            return view.of(self._rounded_weight(module, action, here, view.parent))
        if not isinstance(tensor, nn.Parameter):
            return tensor
        gradient = action.places.get("grad_weight") if torch.is_grad_enabled() and tensor.requires_grad else None
        value = action.places["weight"] if action.applies("weight", here.training) else None
        key = weight_key(module, tensor) if action.needs_key else None
        return rounded_both_ways(tensor, value, gradient, here, key)

    # --- products ---

    def _product(
        self, module: nn.Module, action: Action, here: Here, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        op = here.site.split(".")[0]
        (x_at, x_name), (w_at, w_name) = PRODUCTS[op]
        w = args[w_at] if len(args) > w_at else kwargs[w_name]
        key = weight_key(module, w) if action.needs_key and isinstance(w, nn.Parameter) else None
        args, kwargs = self._rounded_weights(module, action, here, args, kwargs)
        x = args[x_at] if len(args) > x_at else kwargs[x_name]
        w = args[w_at] if len(args) > w_at else kwargs[w_name]
        _require_room_under_autocast(action, x)
        if action.slots_apart:
            product, bias = product_of(op, args, kwargs)
            result = slot_product(x, w, bias, product, Slots(action, here, key))
        else:
            if "x" in action.shared and action.applies("fprop.x", here.training):
                x = action.places["fprop.x"].round(x, here)
            if "w" in action.shared and action.applies("fprop.w", here.training):
                w = action.places["fprop.w"].round(w, here, key)
            args, kwargs = _replaced(args, kwargs, (x_at, x_name, x), (w_at, w_name, w))
            result = func(*args, **kwargs)
            if "dy" in action.shared and torch.is_grad_enabled() and result.requires_grad:
                result = rounded_gradient(result, action.places["dgrad.dy"], here)
        return self._rounded_output(action, here, result, ())


class WeightView:
    """How a view of a weight came about. The weight itself is rounded, as a whole, and looked at in the same way."""

    def __init__(
        self, parent: Tensor, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], position: int | None
    ) -> None:
        self.parent = parent
        self.func, self.args, self.kwargs = func, args, kwargs
        #: Among several results, as of ``chunk``.
        self.position = position

    def of(self, rounded: Tensor) -> Tensor:
        seen = self.func(rounded, *self.args, **self.kwargs)
        return seen if self.position is None else seen[self.position]  # type: ignore[no-any-return]


def _tag_views(result: Any, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
    if isinstance(result, Tensor):
        if result is not args[0]:
            setattr(result, _WEIGHT_TAG, WeightView(args[0], func, args[1:], kwargs, None))
    elif isinstance(result, (tuple, list)):
        for position, tensor in enumerate(result):
            if isinstance(tensor, Tensor):
                setattr(tensor, _WEIGHT_TAG, WeightView(args[0], func, args[1:], kwargs, position))


def weight_key(module: nn.Module, weight: Tensor) -> Tensor | None:
    """The key that all uses of a parameter share; None for one that belongs to no module beneath this one."""
    for owner in (module, *module.modules()):
        names = [name for name, tensor in owner._parameters.items() if tensor is not None]
        for position, name in enumerate(names):
            if owner._parameters[name] is weight:
                table = owner._buffers.get(TABLE)
                return None if table is None else table[1 + position]
    return None


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
    for place in ("weight", *SLOTS):
        if place in action.places:
            target = action.places[place].spec.target
            if target.kind == "float" and target.epsilon < torch.finfo(dtype).eps:
                raise QuantizeError(
                    f"autocast computes {action.op} in {dtype}, which is coarser than {target.name} in {place}: "
                    f"choose a coarser format, or leave autocast."
                )
