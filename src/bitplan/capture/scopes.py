"""Module scopes: every operation of a model is intercepted, eager and compiled, together with its module.

A ``TorchFunctionMode`` intercepts all torch functions, ``F.relu`` and ``x + y`` as well as layers. Every module enters
a mode of its own, a :class:`Scope`, so that the module of an operation is known, also when a checkpointed region is
recomputed in the backward pass, after all modes were left. The module's class is replaced by a subclass whose
``forward`` enters the scope. A class, not a patched ``forward``: a deep copy then runs on its own weights, and
``torch.compile`` sees one code object for equal blocks. Every call makes a new scope: inside a checkpointed region
``torch.compile`` forbids changes to objects outside of it.

:class:`Interceptor` is the base of what is done with an operation.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import inspect
import itertools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn import functional as F
from torch.nn.utils.parametrize import ParametrizationList
from torch.overrides import TorchFunctionMode

from bitplan.capture.constants import (
    ACTIVATION,
    CONSTANT,
    clear_tags,
    float_buffers,
    kind_of_result,
    mask_arguments,
    tag_made_of_no_floats,
    tag_result,
    tag_view,
    with_mask_tags,
)
from bitplan.capture.decompositions import DECOMPOSITIONS, TRANSPARENT
from bitplan.capture.ops import FUSED, REGIONS, name_of, works_in_place
from bitplan.compiler import torch_private
from bitplan.compiler.torch_patches import Undo, replace_attribute
from bitplan.compiler.torch_private import (
    CHECKPOINT_GENERATOR,
    COMPILED_CALL,
    DISPATCH_MODULES,
    DISTRIBUTED_MODULES,
    FUNCTORCH_MODULES,
    DisableTorchFunction,
    are_transforms_active,
    checkpoint_generator,
    torch_function_mode_at,
    torch_function_stack_depth,
)
from bitplan.compiler.tracing import (
    VERSION,
    compile_only_inside_graphs,
    constant_when_traced,
    guard_on,
    require_supported_transform,
)
from bitplan.errors import BitplanWarning, PlanError, QuantizeError
from bitplan.numerics.wire_format import LOSS_PATH

_STATE = "_bitplan"

#: Operations that may be replaced by several single ones.
MAY_BE_DECOMPOSED = FUSED.union(TRANSPARENT, DECOMPOSITIONS)


class ModuleState:
    """What is known of one module: its path, and what a plan does with its operations."""

    def __init__(self, interceptor: Interceptor, path: str, module: nn.Module) -> None:
        self.interceptor = interceptor
        self.path = path
        self.float_buffers = float_buffers(module)
        #: Positions and names of the arguments of ``forward`` that are masks.
        self.mask_arguments = mask_arguments(module)
        self.actions: dict[str, Any] = {}
        #: The attachment, where nothing but the module keeps it alive.
        self.attachment: object = None
        #: Whether the module has buffers of ours, which tracing has to look for.
        self.has_buffers = True
        #: Copies that were made of the module; they follow the plan, and its changes reach them.
        self.twins: weakref.WeakSet[nn.Module] | None = None
        self._peers = _Peers()

    def set_version(self, version: str) -> None:
        """Let :func:`state_of_version` find this state, or an equal one, as long as one of them exists."""
        self._peers.states.discard(self)
        self._peers = _PEERS.setdefault(version, _Peers())
        self._peers.states.add(self)

    def copies(self) -> Sequence[nn.Module]:
        """Those of the copies that still exist."""
        return () if self.twins is None else tuple(self.twins)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleState:
        return self  # a copy of the model follows the same plan, on its own weights


class _Peers:
    """The states of all modules with one version."""

    def __init__(self) -> None:
        self.states: weakref.WeakSet[ModuleState] = weakref.WeakSet()


#: By version; the states hold them.
_PEERS: weakref.WeakValueDictionary[str, _Peers] = weakref.WeakValueDictionary()


def state_of_version(version: str) -> ModuleState | None:
    """A state with that version; all that tracing reads of such states is equal."""
    peers = _PEERS.get(version)
    return None if peers is None else next(iter(peers.states), None)


class Interceptor:
    """What is done with the operations of a model."""

    #: Copies of a model outlive its detachment: they are plain from then on.
    enabled = True
    #: Whether constants, masks and statistics are told apart from activations (:mod:`bitplan.capture.constants`).
    tags_constants = False
    #: Whether eager calls of the outermost module run inside :meth:`around_call`.
    wraps_calls = False
    #: Whether statistics of tensors are written into buffers while the model trains.
    records_values = False
    #: The model that a plan is attached to, while there is one.
    model: Callable[[], nn.Module | None] = staticmethod(lambda: None)
    #: The processes over which tensor parallelism splits tensors of the model.
    split_over: Any = None
    #: Kinds of operations out of its reach that were warned about, each once; None: they are not reported.
    reported_gaps: set[str] | None = None

    def around_call(self) -> AbstractContextManager[None]:
        """The context of an eager call of the outermost module, where :attr:`wraps_calls`."""
        return nullcontext()

    def check_compilation(self) -> None:
        """Called while torch.compile traces a module, where :attr:`wraps_calls`."""

    def on_operation(
        self, scope: Scope, op: str, index: int, kind: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Do what `func` does, or something else, and return its result.

        :param kind: what the result is: an activation, a constant, a mask, ... see :mod:`bitplan.capture.constants`.
        """
        return func(*args, **kwargs)

    def decomposition_of(self, scope: Scope, op: str) -> Callable[..., Any] | None:
        """A function that does what a fused operation does in single ones, where that is wanted."""
        return None

    def on_call(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """A module is about to be called."""

    def tags_of(self, given: Any) -> dict[int, Any]:
        """What is known of some arguments, by their position, beyond their values."""
        return {}

    def with_tags(self, args: Any, known: dict[int, Any]) -> Any:
        """`args`, which are detached copies of others, with what was known of those."""
        return args

    def on_view(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Functions that make no values of their own."""
        return func(*args, **kwargs)

    def on_outermost_call(self, module: nn.Module) -> None:
        """A module is about to be called eagerly, by no other module with a plan."""

    def on_new_class(self, module: nn.Module) -> None:
        """A module was given another class, as ``fully_shard`` gives one."""

    def on_weight(self, path: str, weight: Any) -> Any:
        """A weight that the parametrization of that path has made."""
        return weight


_PASSIVE = Interceptor()


class Scope(TorchFunctionMode):
    """One call of one module: counts the operations in it and hands them to the interceptor.

    Scopes are nested as the modules are; the innermost handles an operation, and the others do not see it.
    """

    @compile_only_inside_graphs
    def __init__(self, interceptor: Interceptor, module: nn.Module, counts: dict[str, int] | int | None = None) -> None:
        super().__init__()
        self.interceptor = interceptor
        self.module = module
        if counts is None:
            counts = _new_counts() if torch.compiler.is_compiling() else {}
        #: How often each operation ran here. Under torch.compile the number of such a count that tracing keeps for
        #: itself: inside a checkpointed region, what lies outside must not be changed.
        self.counts = counts
        #: Inside an opened operation: the operation whose rules its products follow.
        self.inside: str | None = None

    @compile_only_inside_graphs
    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        interceptor = self.interceptor
        with DisableTorchFunction():  # or every question about a tensor goes through all scopes around
            first = args[0] if args else None
            has_float_tensor = interceptor.enabled and (
                (isinstance(first, Tensor) and first.dtype.is_floating_point) or _has_float_tensor(args, named)
            )
            if not has_float_tensor:
                op, decomposition, is_ours = None, None, False
            else:
                op = name_of(func)
                is_ours = torch.compiler.is_compiling() or _is_called_by_model(op)
                if op in MAY_BE_DECOMPOSED and (op != "einsum" or _has_several_operands(args)):
                    decomposition = TRANSPARENT.get(op) or interceptor.decomposition_of(self, op)
                else:
                    decomposition = None
            if is_ours and decomposition is None and op not in REGIONS:
                module, tags = self.module, interceptor.tags_constants
                buffers = module.__dict__[_STATE].float_buffers
                if op is None:
                    if func is Tensor.unflatten:  # the method's body says super(), which torch.compile cannot follow
                        func = torch.unflatten
                    result = interceptor.on_view(func, args, named)
                    return tag_view(module, buffers, func, args, named, result) if tags else result
                if op == "einsum" and len(args) == 2 and isinstance(args[1], (list, tuple)):
                    args = (args[0], *args[1])  # the operands as one list
                kind, mask = kind_of_result(module, buffers, op, args, named) if tags else (ACTIVATION, 0)
                counts = self.counts
                if isinstance(counts, int):
                    index = _count_when_traced(counts, op)
                else:
                    index = counts[op] = counts.get(op, -1) + 1
                result = interceptor.on_operation(self, op, index, kind, func, args, named)
                if tags and kind != CONSTANT and works_in_place(func):
                    clear_tags(first)
                return tag_result(result, kind, mask) if mask or kind != ACTIVATION else result
        # Other modes may want to see the rest, factories of tensors among them.
        if not is_ours:
            result = func(*args, **named)
            if interceptor.tags_constants and not has_float_tensor:
                with DisableTorchFunction():
                    buffers = self.module.__dict__[_STATE].float_buffers
                    result = tag_made_of_no_floats(self.module, buffers, args, named, result)
            return result
        if decomposition is None:
            return func(self.carried(args[0]), *args[1:], **named)
        inner = Scope(interceptor, self.module, self.counts)
        inner.inside = self.inside if op in TRANSPARENT else op
        with inner:
            return decomposition(*args, **named)

    def next_index(self, op: str) -> int:
        """The number that the next operation of that name has here."""
        counts = self.counts
        return _next_when_traced(counts, op) if isinstance(counts, int) else counts.get(op, -1) + 1

    def count(self, ops: Iterable[str]) -> None:
        """Count operations that a kernel computes together, so that those that follow have the numbers they had."""
        counts = self.counts
        for op in ops:
            if isinstance(counts, int):
                _count_when_traced(counts, op)
            else:
                counts[op] = counts.get(op, -1) + 1

    def carried(self, function: Callable[..., Any], given: Any = ()) -> Callable[..., Any]:
        """`function` to be called in this scope, now and when it is recomputed after the scope was left.

        :param given: its arguments, where it will be recomputed on detached copies of them.
        """
        known = self.interceptor.tags_of(given)
        if isinstance(function, nn.Module) and is_planned(function) and not known:
            return function  # it has a scope of its own
        interceptor, module, counts, inside = self.interceptor, self.module, self.counts, self.inside
        before = dict(counts) if isinstance(counts, dict) else counts
        first = True

        def in_scope(*args: Any, **kwargs: Any) -> Any:
            nonlocal first
            again = Scope(interceptor, module, dict(before) if isinstance(before, dict) else before)
            again.inside = inside
            if known:
                args = interceptor.with_tags(args, known)
            with again:
                result = function(*args, **kwargs)
            if isinstance(counts, dict) and isinstance(again.counts, dict) and first:
                first = False
                counts.update(again.counts)  # what follows the region goes on counting where it ended
            return result

        return in_scope


#: Modules between an operation's caller and a scope, on the call stack.
_BETWEEN = DISPATCH_MODULES | {__name__}


def _is_called_by_model(op: str | None) -> bool:
    """Whether the model's own code calls an operation, not a graph that runs and not a hook of a sharded module.

    Compiled code was planned when it was traced; a single compiled block may run inside a model whose own scope is
    open. Inductor calls matrix products as torch functions, and other backends all operations. After a graph break
    several scopes may be open: the inner ones pass the call on. Hooks of sharded modules gather weights and split
    activations: of these calls, casts and views alone concern a plan, which has to know what they return.
    """
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__") in _BETWEEN and frame.f_back is not None:
        frame = frame.f_back
    caller = frame.f_globals.get("__name__", "")
    if "extern_kernels" in frame.f_globals or caller.startswith(FUNCTORCH_MODULES):
        return False
    if op is not None and caller.startswith(DISTRIBUTED_MODULES):
        return False
    return not frame.f_code.co_filename.startswith("<eval_with_key>") or is_planned(frame.f_locals.get("self"))


#: Counts of the calls that torch.compile is tracing. A call is over long before so many others began.
_MAX_TRACED_CALLS = 1 << 14
_traced_counts: dict[int, dict[str, int]] = {}
_call_numbers = itertools.count()


@constant_when_traced
def _new_counts() -> int:
    number = next(_call_numbers)
    _traced_counts[number] = {}
    if len(_traced_counts) > _MAX_TRACED_CALLS:
        del _traced_counts[next(iter(_traced_counts))]
    return number


@constant_when_traced
def _count_when_traced(counts: int, op: str) -> int:
    """Counting while torch.compile traces: it sees a constant, and no side effect."""
    traced = _traced_counts.setdefault(counts, {})
    traced[op] = traced.get(op, -1) + 1
    return traced[op]


@constant_when_traced
def _next_when_traced(counts: int, op: str) -> int:
    return _traced_counts.get(counts, {}).get(op, -1) + 1


def innermost_scope() -> Scope | None:
    """The scope of the operation that is running; None outside of models with a plan."""
    for position in range(torch_function_stack_depth() - 1, -1, -1):
        mode = torch_function_mode_at(position)
        if isinstance(mode, Scope):
            return mode
    return None


class _Planned:
    """Mixed into a module's class in front of it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self.__dict__.get(_STATE)
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
        state = self.__dict__.get(_STATE)
        if state is None:
            return type(self).forward(self)
        with Scope(_PASSIVE, self):  # type: ignore[arg-type]
            weight = super().forward()  # type: ignore[misc]
        return state.interceptor.on_weight(state.path, weight)

    def __setattr__(self, name: str, value: Any) -> None:
        if _STATE in self.__dict__:
            if name == "forward":
                value = _scoped_forward(self, value)  # type: ignore[arg-type]
            elif name == "__class__":  # a lazy module gets its final class at the first call
                value = value if issubclass(value, _Planned) else planned_class(value)
            elif isinstance(value, nn.Module) and not torch.compiler.is_compiling():
                _on_new_submodule(self, name, value)  # type: ignore[arg-type]
        super().__setattr__(name, value)
        if name == "__class__" and _STATE in self.__dict__:
            self.__dict__[_STATE].interceptor.on_new_class(self)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        if _STATE in self.__dict__ and module is not None:
            _on_new_submodule(self, name, module)  # type: ignore[arg-type]
        super().add_module(name, module)  # type: ignore[misc]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Our buffers move with the module, but keep their dtype and, where ``to_empty()`` drops them, their values.

        While a model is on the meta device, they stay on the device where they were.
        """
        own: dict[str, Tensor | None] = self._buffers  # type: ignore[attr-defined]
        ours = {name: own.pop(name) for name in [name for name in own if name.startswith(_STATE)]}
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
        state: ModuleState = self.__dict__[_STATE]
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
        own = {key: value for key, value in _with_own_forward(state).items() if key not in (_STATE, VERSION)}
        for kind, copied in (("_buffers", dict), ("_non_persistent_buffers_set", set)):
            kept = copied(own[kind])
            for name in [name for name in kept if name.startswith(_STATE)]:
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
    state = module.__dict__.get(_STATE)
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


def show_all_functions() -> Undo:
    """A patch of torch: torch.compile shows modes only functions that torch lists as overridable, and that list has
    gaps: hardswish is one, and the grouped product of expert layers another.

    A function that is added here is shown to modes, and is no different where there is none.
    """
    listed = torch_private.get_overridable_functions()
    homes: dict[Any, tuple[str, ...]] = {
        F: (
            "hardsigmoid",
            "hardswish",
            "sigmoid",
            "tanh",
            "threshold",
            "upsample",
            "upsample_bilinear",
            "upsample_nearest",
        ),
        torch.sparse: ("addmm", "log_softmax", "mm", "sampled_addmm", "softmax", "sum"),
        torch: ("_grouped_mm",),
    }
    missing: set[Callable[..., Any]] = set()
    for home, names in homes.items():
        in_place = [name for name in dir(home) if name.endswith("_") and not name.startswith("_")]
        missing.update(getattr(home, name) for name in (*names, *in_place) if callable(getattr(home, name, None)))
    missing -= listed
    listed.update(missing)
    return lambda: listed.difference_update(missing)


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
    module.__dict__[_STATE] = ModuleState(interceptor, path, module)
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
        state: ModuleState = module.__dict__.pop(_STATE)
        if state.twins is not None:
            state.twins.discard(module)
        del module.__dict__[VERSION]
        module.__class__ = original_class(type(module))
        if "forward" in module.__dict__:
            module.__dict__["forward"] = _own_forward(module.__dict__["forward"])


def is_planned(module: object) -> bool:
    return isinstance(module, _Planned)


def state_of(module: nn.Module) -> ModuleState:
    state: ModuleState = module.__dict__[_STATE]
    return state


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


def _has_float_tensor(args: Any, kwargs: dict[str, Any]) -> bool:
    for value in args:
        if isinstance(value, Tensor):
            if value.is_floating_point():
                return True
        elif isinstance(value, (list, tuple)) and _contains_float_tensor(value):
            return True
    # torch 2.11 cannot trace bool() of a dictionary with tensors: torch.diff(prepend=...) would break the graph.
    return len(kwargs) > 0 and _has_float_tensor(tuple(kwargs.values()), {})


def _has_several_operands(args: Any) -> bool:
    """Whether an einsum multiplies more than two tensors."""
    is_listed = len(args) == 2 and isinstance(args[1], (list, tuple))
    return len(args[1]) > 2 if is_listed else len(args) > 3


def _contains_float_tensor(values: Iterable[Any]) -> bool:
    for item in values:  # noqa: SIM110 - a loop costs a third of a generator
        if isinstance(item, Tensor) and item.is_floating_point():
            return True
    return False


# --- Functions under activation checkpointing


_keep_hooks = checkpoint_generator

_Reentrant = torch_checkpoint.CheckpointFunction


def _planned_keep_hooks(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    scope = innermost_scope()
    return _keep_hooks(function if scope is None else scope.carried(function), *args, **kwargs)


class _PlannedReentrant(_Reentrant):
    @classmethod
    def apply(cls, function: Callable[..., Any], *args: Any) -> Any:
        scope = innermost_scope()
        return _Reentrant.apply(  # type: ignore[no-untyped-call]
            function if scope is None else scope.carried(function, args[1:]), *args
        )


def carry_scopes() -> Undo:
    """A patch of torch: checkpointed functions carry their scope along."""
    restore_hooked = replace_attribute(torch_checkpoint, CHECKPOINT_GENERATOR, _planned_keep_hooks)
    restore_reentrant = replace_attribute(torch_checkpoint, "CheckpointFunction", _PlannedReentrant)

    def undo() -> None:
        restore_hooked()
        restore_reentrant()

    return undo


class _CalledOnce:
    """In the place of torch's reentrant checkpointing: the function is called, with gradients, and never again."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


@contextmanager
def reentrant_regions_called_once() -> Iterator[None]:
    """Reentrant regions run without gradients until the backward pass, which recording does not have."""
    restore = replace_attribute(torch_checkpoint, "CheckpointFunction", _CalledOnce)
    try:
        yield
    finally:
        restore()


# --- A loss function as a part of the model: its tensors are sites of the module path ``loss``


def loss_holder(interceptor: Interceptor) -> nn.Module:
    """An empty module for a loss, whose operations `interceptor` sees."""
    holder = nn.Module()
    holder.__dict__["_bitplan"] = ModuleState(interceptor, LOSS_PATH, holder)
    return holder


def in_loss_scope(
    function: Callable[..., Tensor], interceptor: Interceptor, holder: nn.Module
) -> Callable[..., Tensor]:
    """`function` with its operations in the holder's scope, eager and compiled, as a planned module has its own."""

    def planned_loss(*args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():
            guard_on(holder.__dict__[VERSION])
        if interceptor.wraps_calls and not torch.compiler.is_compiling() and innermost_scope() is None:
            with interceptor.around_call(), Scope(interceptor, holder):
                return function(*args, **kwargs)
        with Scope(interceptor, holder):
            return function(*args, **kwargs)

    return planned_loss
