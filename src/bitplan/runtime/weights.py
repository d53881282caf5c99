"""Weights of a module: views of them, substitutes by functional_call, and the key that all uses of a weight share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.runtime.module_state import TABLE, parameter_names
from bitplan.runtime.op_context import OpContext

#: The attribute of a tensor that is a weight, though no parameter: a :class:`WeightView`, or True for a tensor that a
#: parametrization has made.
WEIGHT_TAG = "_bitplan_weight"


class WeightView:
    """How a view of a weight was made. The whole weight is rounded, and the same view is taken of the result."""

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


def tag_views(result: Any, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
    """Record on every view that `func` made of a weight how it was made."""
    if isinstance(result, Tensor):
        if result is not args[0]:
            setattr(result, WEIGHT_TAG, WeightView(args[0], func, args[1:], kwargs, None))
    elif isinstance(result, (tuple, list)):
        for position, tensor in enumerate(result):
            if isinstance(tensor, Tensor):
                setattr(tensor, WEIGHT_TAG, WeightView(args[0], func, args[1:], kwargs, position))


def taggable(result: Any) -> Any:
    """The result of a view function. Dynamo lets nothing be noted of one of several tensors, but of a view of it."""
    if isinstance(result, (tuple, list)) and torch.compiler.is_compiling():
        return tuple(part.view_as(part) if isinstance(part, Tensor) else part for part in result)
    return result


def context_of_parameter(context: OpContext, module: nn.Module, tensor: Tensor) -> OpContext:
    """The place of one of an operation's weights; each is promoted by itself."""
    while isinstance(view := getattr(tensor, WEIGHT_TAG, None), WeightView):
        tensor = view.parent
    for name, own in module._parameters.items():
        if own is tensor:
            return context.of_parameter(name)
    return context


def replaces_parameter(module: nn.Module, tensor: Tensor) -> bool:
    """Whether `torch.func.functional_call` has put the tensor, which is no parameter, in a parameter's place."""
    parameters: dict[str, Any] = module._parameters
    for own in parameters.values():  # noqa: SIM110 - a generator takes long to trace
        # A parameter is not compared: tracing takes long to compare tensors.
        if own is not None and not isinstance(own, nn.Parameter) and own is tensor:
            return True
    return False


def contains_weight(value: Any) -> bool:
    """Whether a parameter, or a view of one, is among the values."""
    if isinstance(value, (list, tuple)):
        return any(map(contains_weight, value))
    return isinstance(value, nn.Parameter) or getattr(value, WEIGHT_TAG, None) is not None


def weight_key(module: nn.Module, weight: Tensor) -> Tensor | None:
    """The key that all uses of a parameter share; None for one that belongs to no module beneath this one."""
    for owner in (module, *module.modules()):
        names = parameter_names(owner)
        for position, name in enumerate(names):
            if owner._parameters[name] is weight:
                table = owner._buffers.get(TABLE)
                return None if table is None else table[1 + position]
    return None


def frozen_weight_key(module: nn.Module) -> Tensor | None:
    """The key of a weight that the module has stored in few bits, which emulation finds by the parameter."""
    table = module._buffers.get(TABLE)
    names = parameter_names(module)
    return table[1 + names.index("weight")] if table is not None and "weight" in names else None


# --- Tensors in nested arguments and results


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with `change` applied to every tensor in it, tuples and lists entered."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[map_tensors(change, item) for item in value])
    if isinstance(value, (list, tuple)):
        return type(value)([map_tensors(change, item) for item in value])
    return value


def largest(value: Any, kind: type) -> Any:
    """Of the tensors of a kind in `value` the (first) one with most elements; None where there is none."""
    if isinstance(value, kind):
        return value
    best = None
    if isinstance(value, (list, tuple)):
        for item in value:
            candidate = largest(item, kind)
            if candidate is not None and (best is None or candidate.numel() > best.numel()):
                best = candidate
    return best
