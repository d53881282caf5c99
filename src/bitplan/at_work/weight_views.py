"""Weights of a module, seen through views and through what stands for them; and the key that a weight's uses share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from bitplan.at_work.here import Here
from bitplan.at_work.tables import TABLE

#: The attribute by which a view of a weight tells how it came about.
WEIGHT_TAG = "_bitplan_weight"


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


def tag_views(result: Any, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
    """Note on every view that `func` made of a weight how it came about."""
    if isinstance(result, Tensor):
        if result is not args[0]:
            setattr(result, WEIGHT_TAG, WeightView(args[0], func, args[1:], kwargs, None))
    elif isinstance(result, (tuple, list)):
        for position, tensor in enumerate(result):
            if isinstance(tensor, Tensor):
                setattr(tensor, WEIGHT_TAG, WeightView(args[0], func, args[1:], kwargs, position))


def place_of_parameter(here: Here, module: nn.Module, tensor: Tensor) -> Here:
    """The place of one of an operation's weights; each is promoted by itself."""
    while getattr(tensor, WEIGHT_TAG, None) is not None:
        tensor = getattr(tensor, WEIGHT_TAG).parent
    for name, own in module._parameters.items():
        if own is tensor:
            return here.of_parameter(name)
    return here


def stands_for_a_parameter(module: nn.Module, tensor: Tensor) -> bool:
    """Whether `torch.func.functional_call` put the tensor in a parameter's place."""
    for own in module._parameters.values():  # noqa: SIM110 - tensors are compared by identity, under tracing too
        if own is tensor:
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
        names = [name for name, tensor in owner._parameters.items() if tensor is not None]
        for position, name in enumerate(names):
            if owner._parameters[name] is weight:
                table = owner._buffers.get(TABLE)
                return None if table is None else table[1 + position]
    return None
