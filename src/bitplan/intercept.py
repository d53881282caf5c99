"""Seeing every operation of a model, eager and compiled, and knowing which module it happens in.

A ``TorchFunctionMode`` sees all torch functions, ``F.relu`` and ``x + y`` as well as layers. To know *where* one
happens, and to be there again when a checkpointed region is recomputed in the backward pass (after the mode was
left), every module enters the mode itself: its class is exchanged for a subclass whose ``forward`` does so. A class,
not a patched ``forward``: a deep copy then runs on its own weights, and ``torch.compile`` sees one code object.

:class:`Interceptor` is the base; what is done with an operation is :meth:`Interceptor.on_operation`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bitplan.ops import name_of

_STATE = "_bitplan"


class ModuleState:
    """What an interceptor knows of one module: its path, and whatever :meth:`Interceptor.prepare` put there."""

    def __init__(self, interceptor: Interceptor, path: str) -> None:
        self.interceptor = interceptor
        self.path = path
        self.actions: dict[str, Any] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleState:
        return self  # a copy of the model follows the same plan, on its own weights


class Interceptor(TorchFunctionMode):
    """A mode that follows a model through its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.module: nn.Module | None = None
        self.counts: dict[str, int] = {}
        self.enabled = True

    def on_operation(
        self, module: nn.Module, op: str, index: int, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Do what `func` does, or something else, and return its result."""
        return func(*args, **kwargs)

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        module = self.module
        if module is None or not self.enabled:
            return func(*args, **named)
        op = name_of(func)
        if op is None or not _has_float_tensor(args, named):
            return func(*args, **named)
        index = self.counts.get(op, 0)
        self.counts[op] = index + 1
        return self.on_operation(module, op, index, func, args, named)

    def is_active(self) -> bool:
        """Whether this mode is on the live stack: it is not when a checkpointed region is recomputed."""
        depth = torch._C._len_torch_function_stack()
        return any(torch._C._get_function_stack_at(i) is self for i in range(depth))


class _Planned:
    """Mixed into a module's class in front of it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        mode = self.__dict__[_STATE].interceptor
        outer, outer_counts = mode.module, mode.counts
        mode.module, mode.counts = self, {}
        try:
            if mode.is_active():
                return super().forward(*args, **kwargs)  # type: ignore[misc]
            with mode:
                return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            mode.module, mode.counts = outer, outer_counts

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle holds the plain model: its class can be found again, an exchanged one cannot."""
        plain = original_class(type(self))
        own = {key: value for key, value in self.__dict__.items() if key != _STATE}
        return _rebuild, (plain,), own


def _rebuild(plain: type[nn.Module]) -> nn.Module:
    return plain.__new__(plain)


_EXCHANGED: dict[type[nn.Module], type[nn.Module]] = {}


def planned_class(plain: type[nn.Module]) -> type[nn.Module]:
    """The subclass that enters the mode; one for each class, so that equal blocks share compiled code."""
    if plain not in _EXCHANGED:
        _EXCHANGED[plain] = type(plain.__name__, (_Planned, plain), {"__module__": plain.__module__})
    return _EXCHANGED[plain]


def original_class(planned: type) -> type[nn.Module]:
    plain: type[nn.Module] = planned.__mro__[2]
    return plain


def install(model: nn.Module, interceptor: Interceptor) -> list[tuple[str, nn.Module]]:
    """Exchange the classes of all modules that can be followed; those (path and module) are returned."""
    followed: list[tuple[str, nn.Module]] = []
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        module.__dict__[_STATE] = ModuleState(interceptor, path)
        module.__class__ = planned_class(type(module))
        followed.append((path, module))
    return followed


def uninstall(followed: Iterable[tuple[str, nn.Module]]) -> None:
    """Give every module its own class back."""
    for _, module in followed:
        module.__class__ = original_class(type(module))
        del module.__dict__[_STATE]


def is_planned(module: nn.Module) -> bool:
    return isinstance(module, _Planned)


def state_of(module: nn.Module) -> ModuleState:
    state: ModuleState = module.__dict__[_STATE]
    return state


@contextmanager
def followed(model: nn.Module, interceptor: Interceptor) -> Iterator[list[tuple[str, nn.Module]]]:
    """`model` under `interceptor` for a while; what was attached before is back afterwards."""
    installed = install(model, interceptor)
    try:
        yield installed
    finally:
        uninstall(installed)


def _has_float_tensor(args: Any, kwargs: dict[str, Any]) -> bool:
    return any(_is_float(value) for value in args) or any(_is_float(value) for value in kwargs.values())


def _is_float(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point()
    return isinstance(value, (list, tuple)) and any(
        isinstance(item, Tensor) and item.is_floating_point() for item in value
    )
