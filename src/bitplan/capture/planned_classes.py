"""The classes of modules with a plan, and how models get them and lose them.

Each is a subclass of the module's own class whose ``forward`` enters a scope (:mod:`bitplan.capture.scopes`). Copies,
pickles and ``to()`` treat such a module as one without a plan, and what would take operations out of the plan's reach
is refused or warned about.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.utils.parametrize import ParametrizationList

from bitplan.capture.constants import ACTIVATION, with_mask_tags
from bitplan.capture.scopes import (
    STATE,
    Interceptor,
    ModuleState,
    Planned,
    Scope,
    innermost_scope,
    is_planned,
    state_of,
)
from bitplan.compiler.torch_private import COMPILED_CALL, DisableTorchFunction, are_transforms_active
from bitplan.compiler.tracing import VERSION, guard_on, require_supported_transform
from bitplan.errors import BitplanWarning, PlanError, QuantizeError

_PASSIVE = Interceptor()


class _Planned(Planned):
    """What is mixed in."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self.__dict__.get(STATE)
        if state is None:  # detached; the method was bound to the module before, as Accelerate's wrappers do
            return type(self).forward(self, *args, **kwargs)
        interceptor = state.interceptor
        if interceptor.tags_constants and state.mask_arguments:
            args, kwargs = with_mask_tags(state.mask_arguments, args, kwargs)
        if torch.compiler.is_compiling():
            guard_on(self.__dict__[VERSION])
            if interceptor.wraps_calls:
                interceptor.check_compilation()
        elif innermost_scope() is None:
            _check_outermost_call(self, state, args)
            interceptor.on_outermost_call(self)
            if interceptor.wraps_calls:
                return self._wrapped_call(interceptor, args, kwargs)
        interceptor.on_call(self, args, kwargs)
        with Scope(interceptor, self):  # type: ignore[arg-type]
            return super().forward(*args, **kwargs)  # type: ignore[misc]

    def _wrapped_call(self, interceptor: Interceptor, args: Any, kwargs: dict[str, Any]) -> Any:
        interceptor.on_call(self, args, kwargs)  # type: ignore[arg-type]
        with interceptor.around_call(), Scope(interceptor, self):  # type: ignore[arg-type]
            return super().forward(*args, **kwargs)  # type: ignore[misc]

    def _make_weight(self) -> Any:
        """The forward of a parametrization: it makes a weight of others, by operations that no plan is about."""
        state = self.__dict__.get(STATE)
        if state is None:
            return type(self).forward(self)
        with Scope(_PASSIVE, self):  # type: ignore[arg-type]
            weight = super().forward()  # type: ignore[misc]
        return state.interceptor.on_weight(state.path, weight)

    def __setattr__(self, name: str, value: Any) -> None:
        if STATE in self.__dict__:
            if name == "forward":
                value = _scoped_forward(self, value)  # type: ignore[arg-type]
            elif name == "__class__":  # a lazy module gets its final class at the first call
                value = value if issubclass(value, _Planned) else planned_class(value)
            elif isinstance(value, nn.Module) and not torch.compiler.is_compiling():
                _on_new_submodule(self, name, value)  # type: ignore[arg-type]
        super().__setattr__(name, value)
        if name == "__class__" and STATE in self.__dict__:
            self.__dict__[STATE].interceptor.on_new_class(self)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        if STATE in self.__dict__ and module is not None:
            _on_new_submodule(self, name, module)  # type: ignore[arg-type]
        super().add_module(name, module)  # type: ignore[misc]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Our buffers move with the module, but keep their dtype and, where ``to_empty()`` drops them, their values.

        While a model is on the meta device, they stay on the device where they were.
        """
        own: dict[str, Tensor | None] = self._buffers  # type: ignore[attr-defined]
        ours = {name: own.pop(name) for name in [name for name in own if name.startswith(STATE)]}
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        for name, buffer in ours.items():
            moved = None if buffer is None else fn(buffer)
            if moved is not None and moved is not buffer:
                moved = buffer if moved.is_meta else buffer.to(moved.device, copy=True)  # type: ignore[union-attr]
            own[name] = moved
        return result

    def _before_uninstall(self) -> None:
        """Called before the module gets its own class back."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin: Any = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        own = {key: value for key, value in self.__dict__.items() if key != COMPILED_CALL}  # it runs the original
        twin.__dict__.update(copy.deepcopy(_with_own_forward(own), memo))
        if "forward" in twin.__dict__:
            twin.forward = twin.__dict__["forward"]
        state: ModuleState = self.__dict__[STATE]
        if state.twins is None:
            state.twins = weakref.WeakSet()
        state.twins.add(twin)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle holds the plain model: its class can be found again, an exchanged one cannot."""
        plain = original_class(type(self))  # type: ignore[arg-type]
        state: Any = plain.__getstate__(self)  # type: ignore[arg-type, no-untyped-call]
        if not isinstance(state, dict):
            return copyreg._reconstructor, (plain, object, None), state  # type: ignore[attr-defined]
        own = {key: value for key, value in _with_own_forward(state).items() if key not in (STATE, VERSION)}
        for kind, copied in (("_buffers", dict), ("_non_persistent_buffers_set", set)):
            kept = copied(own[kind])
            for name in [name for name in kept if name.startswith(STATE)]:
                kept.pop(name) if isinstance(kept, dict) else kept.remove(name)
            own[kind] = kept
        return copyreg._reconstructor, (plain, object, None), own  # type: ignore[attr-defined]


# --- A forward that was set on the instance hides the one of the class, and gets a scope of its own


#: The attribute of a function that puts the scope around an instance's own forward, which is its ``__wrapped__``.
_HAS_SCOPE = "_bitplan_scope"


def _scoped_forward(module: nn.Module, own: Callable[..., Any]) -> Callable[..., Any]:
    """`own`, which was set as the module's ``forward``, in the module's scope."""
    own = _own_forward(own)
    if isinstance(own, MethodType) and own.__self__ is module:  # stays a method: Accelerate looks for its function
        function = own.__func__

        def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return _call_in_scope(self, functools.partial(function, self), args, kwargs)

        return MethodType(_with_mark(method, function), module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return _call_in_scope(module, own, args, kwargs)

    return _with_mark(forward, own)


def _with_mark(scoped: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    functools.update_wrapper(scoped, own)
    setattr(scoped, _HAS_SCOPE, scoped)  # itself: whoever wraps it by functools.wraps copies its attributes
    return scoped


def _call_in_scope(module: nn.Module, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    state = module.__dict__.get(STATE)
    if state is None:
        return function(*args, **kwargs)
    interceptor = state.interceptor
    if interceptor.tags_constants and state.mask_arguments:
        args, kwargs = with_mask_tags(state.mask_arguments, args, kwargs)
    is_outermost = False
    if torch.compiler.is_compiling():
        guard_on(module.__dict__[VERSION])
        if interceptor.wraps_calls:
            interceptor.check_compilation()
    elif innermost_scope() is None:
        _check_outermost_call(module, state, args)
        interceptor.on_outermost_call(module)
        is_outermost = True
    interceptor.on_call(module, args, kwargs)
    if is_outermost and interceptor.wraps_calls:
        with interceptor.around_call(), Scope(interceptor, module):
            return function(*args, **kwargs)
    with Scope(interceptor, module):
        return function(*args, **kwargs)


def run_operation(module: nn.Module, op: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call `function` as the operation `op` of `module`, as if the module's own forward had called that operation."""
    if not is_planned(module):
        return function(*args)

    def run(*args: Any) -> Any:
        scope = Scope(state_of(module).interceptor, module)
        with DisableTorchFunction():
            if not scope.interceptor.enabled:
                return function(*args)
            return scope.interceptor.on_operation(scope, op, 0, ACTIVATION, function, args, {})

    return _call_in_scope(module, run, args, {})


def _own_forward(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as it was set, without a scope."""
    if isinstance(function, MethodType):
        own = _own_forward(function.__func__)
        return function if own is function.__func__ else MethodType(own, function.__self__)
    has_scope = getattr(function, _HAS_SCOPE, None) is function
    return function.__wrapped__ if has_scope else function  # type: ignore[attr-defined]


def _with_own_forward(attributes: dict[str, Any]) -> dict[str, Any]:
    """A module's attributes, with its own forward as it was set."""
    return {**attributes, "forward": _own_forward(attributes["forward"])} if "forward" in attributes else attributes


# --- What interception does not reach


def _check_outermost_call(module: Any, state: ModuleState, args: Any) -> None:
    """Raise or warn where interception would miss operations, or would be traced itself."""
    interceptor = state.interceptor
    if interceptor.reported_gaps is None or not interceptor.enabled:
        return
    if are_transforms_active():
        require_supported_transform()
        if interceptor.wraps_calls or (interceptor.records_values and module.training):
            what = "packed execution saves" if interceptor.wraps_calls else "this plan records ranges of"
            raise QuantizeError(
                f"{what} tensors, which torch.func transforms do not allow: use autograd and backward()."
            )
    is_scripted: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    if is_scripted or isinstance(args, Proxy) or any(isinstance(value, Proxy) for value in args):
        tracer = "torch.jit.trace" if is_scripted else "torch.fx"
        raise PlanError(f"{tracer} cannot trace a model with a plan: detach it first, or use torch.export.")
    _report_method(module, state)


#: How far up the call stack a method is looked for that has called a module.
_CALLERS = 4


def _report_method(module: Any, state: Any) -> None:
    """Warn where a method other than ``forward`` of a planned module runs one of its submodules.

    Operations of the method itself are in no scope.
    """
    interceptor = state.interceptor
    if not state.path or "method" in interceptor.reported_gaps:
        return
    frame, callers = sys._getframe(3), 0
    while frame is not None and callers < _CALLERS:
        if frame.f_globals.get("__name__") != nn.Module.__module__:
            callers += 1
            caller: Any = frame.f_locals.get("self")
            if caller is not module and is_planned(caller) and state_of(caller).interceptor is interceptor:
                method, owner = frame.f_code.co_name, type(caller).__name__
                interceptor.reported_gaps.add("method")
                warnings.warn(
                    f"{owner}.{method}() called {state.path} outside of {owner}.forward(): a plan rounds the "
                    f"operations of forward() methods, and those of {method}() itself are not rounded; move them into "
                    f"a forward() method, or wrap a loss by run.loss().",
                    BitplanWarning,
                    stacklevel=5,
                )
                return
        frame = frame.f_back  # type: ignore[assignment]


def _on_new_submodule(parent: nn.Module, name: str, module: nn.Module) -> None:
    """Raise where a submodule with a plan is replaced by one without; warn where parameters without one are added."""
    state = state_of(parent)
    if name == "parametrizations" or isinstance(module, ParametrizationList):  # registered after the plan
        _plan_module(module, state.interceptor, f"{state.path}.{name}".lstrip("."))
        return
    reported = state.interceptor.reported_gaps
    if reported is None or parent in state.copies():
        return
    path = f"{state.path}.{name}".lstrip(".")
    before = parent._modules.get(name)
    lost = set() if before is None else {inner for inner in before.modules() if is_planned(inner)}
    lost.difference_update(module.modules())
    if lost and (model := state.interceptor.model()) is not None:
        parent._modules[name] = None
        lost.difference_update(model.modules())  # those that are elsewhere in the model, too
        parent._modules[name] = before
    if lost:
        raise PlanError(
            f"{path} has a plan, and its rules would be lost if {type(module).__name__} replaced it: call "
            f"run.detach(), replace the module, then attach the plan again."
        )
    added = (
        inner for inner in module.modules() if not is_planned(inner) and any(True for _ in inner.parameters(False))
    )
    if "module" not in reported and next(added, None) is not None:
        reported.add("module")
        warnings.warn(
            f"{path} got parameters after the plan was attached: its operations follow the rules of "
            f"{state.path or type(parent).__name__}. Attach the plan afterwards to match {path} itself.",
            BitplanWarning,
            stacklevel=4,
        )


# --- Exchanged classes


_EXCHANGED: dict[type[nn.Module], type[nn.Module]] = {}
#: A class that somebody derived from an exchanged one -> the same class derived from the plain one.
_WITHOUT_PLAN: dict[type[nn.Module], type[nn.Module]] = {}


def planned_class(plain: type[nn.Module]) -> type[nn.Module]:
    """The subclass that enters the mode; one for each class, so that equal blocks share compiled code."""
    if plain not in _EXCHANGED:
        # Code of its own, though the same: torch.compile counts recompilations by the code object, and remembers by
        # file, line and name which sizes changed. Under one name a model's sizes would be symbolic because a planned
        # model of another class had others before.
        template: Any = _Planned._make_weight if issubclass(plain, ParametrizationList) else _Planned.forward
        code = template.__code__.replace(co_name=f"forward of {plain.__module__}.{plain.__qualname__}")
        forward = FunctionType(code, globals(), "forward", None, template.__closure__)
        forward.__signature__ = _forward_signature(plain)  # type: ignore[attr-defined]  # trainers read it
        own = {"__module__": plain.__module__, "forward": forward}
        exchanged = type(plain.__name__, (_Planned, plain), own)
        _EXCHANGED[plain], _WITHOUT_PLAN[exchanged] = exchanged, plain
    return _EXCHANGED[plain]


def _forward_signature(plain: type[nn.Module]) -> inspect.Signature:
    try:
        return inspect.signature(plain.forward)
    except (TypeError, ValueError):  # not written in Python
        return inspect.signature(_Planned.forward)


def register_planned_class(derived: type[nn.Module], plain: type[nn.Module]) -> None:
    """Let :func:`original_class` know a class that was derived from an exchanged one."""
    _WITHOUT_PLAN[derived] = plain


def original_class(planned: type[nn.Module]) -> type[nn.Module]:
    """The class without a plan, also of a class that ``fully_shard`` or ``parametrize`` derived since."""
    if planned not in _WITHOUT_PLAN:
        if not issubclass(planned, _Planned):
            return planned
        bases = tuple(original_class(base) for base in planned.__bases__)
        own = {name: value for name, value in vars(planned).items() if name not in ("__dict__", "__weakref__")}
        if not any(hasattr(base, "__deepcopy__") for base in bases):
            own.setdefault("__deepcopy__", _deepcopy_attributes)  # which parametrize adds where the class has none
        metaclass: Any = type(planned)
        _WITHOUT_PLAN[planned] = metaclass(planned.__name__, bases, own)
    return _WITHOUT_PLAN[planned]


def _deepcopy_attributes(self: Any, memo: dict[int, Any]) -> Any:
    twin = memo.setdefault(id(self), self.__new__(self.__class__))
    twin.__dict__ = copy.deepcopy(self.__dict__, memo)
    return twin


def install(model: nn.Module, interceptor: Interceptor) -> list[tuple[str, nn.Module]]:
    """Exchange the classes of all modules that can be followed; those (path and module) are returned."""
    followed: list[tuple[str, nn.Module]] = []
    parametrizations = [m for m in model.modules() if isinstance(m, ParametrizationList)]
    inside = {id(module) for outer in parametrizations for module in outer.modules() if module is not outer}
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) or "_orig_mod" in module._modules or id(module) in inside:
            continue  # cannot be seen, is torch.compile's wrapper around one that follows, or makes weights
        _plan_module(module, interceptor, without_wrappers(path))
        followed.append((without_wrappers(path), module))
    return followed


def _plan_module(module: nn.Module, interceptor: Interceptor, path: str) -> None:
    module.__dict__[VERSION] = ""
    module.__dict__[STATE] = ModuleState(interceptor, path, module)
    module.__class__ = planned_class(type(module))
    if "forward" in module.__dict__:
        module.forward = module.__dict__["forward"]


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own model inside torch.compile's and DistributedDataParallel's wrappers, whose paths a plan means."""
    while True:
        inner = model._modules.get("_orig_mod")
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def without_wrappers(path: str) -> str:
    """The path as it would be if torch.compile had wrapped none of the modules.

    >>> without_wrappers("blocks.0._orig_mod.fc")
    'blocks.0.fc'
    """
    return ".".join(part for part in path.split(".") if part != "_orig_mod")


def uninstall(modules: Iterable[nn.Module]) -> None:
    """Give every module its own class and forward back."""
    for module in modules:
        module._before_uninstall()  # type: ignore[operator]
        state: ModuleState = module.__dict__.pop(STATE)
        if state.twins is not None:
            state.twins.discard(module)
        del module.__dict__[VERSION]
        module.__class__ = original_class(type(module))
        if "forward" in module.__dict__:
            module.__dict__["forward"] = _own_forward(module.__dict__["forward"])


@contextmanager
def followed(model: nn.Module, interceptor: Interceptor) -> Iterator[None]:
    """`model` under `interceptor` for a while, uncompiled; a plan that is attached to it rests meanwhile."""
    resting = [state_of(module) for module in model.modules() if is_planned(module)]
    planned = [state.interceptor for state in resting]
    for state in resting:
        state.interceptor = interceptor
    installed = [] if resting else install(model, interceptor)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        uninstall(module for _, module in installed)
        for state, own in zip(resting, planned, strict=True):
            state.interceptor = own
