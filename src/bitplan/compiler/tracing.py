"""torch.compile's tracer for planned models: its state, opaque functions, guards and settings."""

from __future__ import annotations

import hashlib
import itertools
import re
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import cache, wraps
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from bitplan.compiler import torch_private
from bitplan.compiler.torch_patches import Undo, replace_attribute
from bitplan.compiler.torch_private import DisableTorchFunction, TracingContext, are_transforms_active
from bitplan.errors import QuantizeError

# --- Tracing

F = TypeVar("F", bound=Callable[..., Any])

#: Functions that :func:`allow_functions_in_graph` has yet to pass to torch.compiler.allow_in_graph. That imports
#: ``torch._dynamo``, which takes more than a second and which eager code does not need.
_pending_functions: list[Callable[..., Any]] = []
#: Those that were passed to it, by id; graphs may call them.
_functions_in_graph: dict[int, Callable[..., Any]] = {}
#: Functions that are compiled inside of graphs only.
_uncompiled_functions: list[Any] = []


def is_traced() -> bool:
    """Whether torch.compile is tracing this code, including functions that it does not trace into."""
    return torch.compiler.is_compiling() or TracingContext.try_get() is not None


def is_traced_below_dynamo() -> bool:
    """Whether this code runs as it is while a graph is made: Dynamo calls it, or AOTAutograd records its operations."""
    return not torch.compiler.is_dynamo_compiling() and is_traced()


def needs_shapes_only(x: Tensor) -> bool:
    """Where :func:`is_traced_below_dynamo`: whether no operation is recorded, so that only a result's shape matters.

    Dynamo, and AOTAutograd before it makes a graph, run every function of ours in this way.
    """
    is_recorded = torch_private.get_proxy_mode() is not None
    return not is_recorded and isinstance(x, (torch_private.FakeTensor, torch_private.FunctionalTensor))


def below_autograd() -> Any:
    """A context without autograd, which otherwise records a ``detach`` for every view of another dtype."""
    key, key_set = torch_private.DispatchKey, torch_private.DispatchKeySet
    return torch_private.ExcludeDispatchKeyGuard(key_set(key.AutogradFunctionality) | key_set(key.ADInplaceOrView))


def constant_when_traced(function: F) -> F:
    """Under torch.compile, call `function` while tracing and use its result as a constant."""
    setattr(function, torch_private.CONSTANT_MARK, True)
    return function


def opaque_in_graph(function: F) -> F:
    """Under torch.compile, do not trace into `function`; AOTAutograd traces it instead.

    Its arguments are tensors and constants. Takes effect at the next :func:`allow_functions_in_graph`. A backend may
    run it inside the scope of an outer module, after a graph break: that must not intercept its operations.
    """

    @wraps(function)
    def without_modes(*args: Any, **kwargs: Any) -> Any:
        with DisableTorchFunction():
            return function(*args, **kwargs)

    _pending_functions.append(without_modes)
    return without_modes  # type: ignore[return-value]


def compile_only_inside_graphs(function: F) -> F:
    """Let torch.compile trace `function` inside of graphs only: called outside of one, it is not compiled.

    After a graph break, operations around a graph are intercepted in Python, and torch.compile would compile functions
    of ours one by one, with the number of the operation as a constant. Takes effect at the next
    :func:`allow_functions_in_graph`.
    """
    _uncompiled_functions.append(function)
    return function


def allow_functions_in_graph() -> None:
    """Register the functions that torch.compile treats in a special way; call before compiling anything."""
    action = torch_private.FrameAction
    for function in _uncompiled_functions:  # each time: torch.compiler.reset() forgets it
        strategy = torch_private.FrameExecStrategy(action.SKIP, action.SKIP)
        torch_private.set_code_exec_strategy(function.__code__, strategy)
    while _pending_functions:
        function = _pending_functions.pop()
        torch.compiler.allow_in_graph(function)  # type: ignore[no-untyped-call]
        _functions_in_graph[id(function)] = function


#: Attributes of a tensor that are views of it -> the method that returns the same view of a real tensor.
_VIEW_ATTRIBUTES = {"T": "t", "mT": "adjoint", "H": "adjoint", "mH": "adjoint", "data": "detach"}
#: Those that tensors of any number of dimensions have; the others are for matrices.
_OF_BATCHES = ("mT", "mH")


def show_view_attributes() -> Undo:
    """A patch of torch: torch.compile shows modes the methods of tensors, but not attributes such as ``T``.

    Read inside a mode, such an attribute becomes a call of the method; eagerly, modes see both.
    """
    original = torch_private.TensorVariable.var_getattr

    def var_getattr(self: Any, tx: Any, name: str) -> Any:
        method = _VIEW_ATTRIBUTES.get(name)
        is_seen = method is not None and tx.symbolic_torch_function_state.in_torch_function_mode()
        if is_seen and self.dtype is not None and self.dtype.is_floating_point:
            has_method = name == "data" or self.ndim == 2 or (name in _OF_BATCHES and self.ndim > 2)
            if has_method:
                return self.call_method(tx, method, [], {})
        return original(self, tx, name)

    return replace_attribute(torch_private.TensorVariable, "var_getattr", var_getattr)


def hide_custom_backward() -> Undo:
    """A patch of torch: modes do not see the backward method of a ``torch.autograd.Function`` that is traced.

    Eagerly it runs after all modes were left, and its operations are not rounded.
    """
    variable = torch_private.AutogradFunctionApplyVariable
    name = "trace_backward_graph"
    original = getattr(variable, name)

    def trace_backward_graph(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        state = tx.symbolic_torch_function_state
        was_enabled, state.torch_function_mode_enabled = state.torch_function_mode_enabled, False
        try:
            return original(self, tx, *args, **kwargs)
        finally:
            state.torch_function_mode_enabled = was_enabled

    return replace_attribute(variable, name, trace_backward_graph)


def fall_back_to_eager() -> Undo:
    """A patch of torch: a graph that the backend cannot compile runs eagerly, as it would without a plan.

    Such a graph reads values of tensors, as the backward pass of Transformers' experts does in float32. torch runs it
    eagerly, unless the graph calls a function that somebody has passed to ``torch.compiler.allow_in_graph``; then it
    raises. Our functions are no reason for that.
    """
    name = "call_user_compiler"
    original = getattr(torch_private.OutputGraph, name)

    def call_user_compiler(self: Any, gm: Any, *args: Any) -> Any:
        targets = [node.target for node in gm.graph.nodes if node.op == "call_function"]
        others = (target for target in targets if id(target) not in _functions_in_graph)
        if not any(torch_private.is_callable_allowed(target) for target in others):
            self.has_user_defined_allowed_in_graph = False
        return original(self, gm, *args)

    return replace_attribute(torch_private.OutputGraph, name, call_user_compiler)


# --- torch.func: what its transforms demand of an autograd function


class _SavedContext(SimpleNamespace):
    """Stands for the context of an autograd function while its forward runs."""

    saved: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved = tensors


def transformable(function: type[torch.autograd.Function]) -> Any:
    """An autograd function whose ``apply`` also works inside ``torch.func.grad`` and ``torch.func.vjp``.

    They demand ``setup_context``, with which torch inspects the signature of ``forward`` at every call: several
    microseconds, that no other call has to pay.
    """
    if are_transforms_active() and not torch.compiler.is_compiling():
        require_supported_transform()
        return _with_setup_context(function)
    return function


@cache
def _with_setup_context(function: Any) -> SimpleNamespace:
    def forward(*args: Any) -> Any:
        return function.forward(args[-1], *args[:-1])

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        context: _SavedContext = inputs[-1]
        ctx.save_for_backward(*context.saved)
        for name, value in vars(context).items():
            if name != "saved":
                setattr(ctx, name, value)

    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        require_supported_transform()
        return (*function.backward(ctx, *grads), None)

    own = {"forward": forward, "setup_context": setup_context, "backward": backward}
    derived: Any = type(function.__name__, (torch.autograd.Function,), {n: staticmethod(f) for n, f in own.items()})
    return SimpleNamespace(apply=lambda *args: derived.apply(*args, _SavedContext()))


def require_supported_transform() -> None:
    """Raise inside of transforms that rounding does not support: all but one torch.func.grad or vjp."""
    stack = torch_private.transform_stack() or []
    if len(stack) > 1 or any(level.key() != torch_private.TransformType.Grad for level in stack):
        names = ", ".join(level.key().name for level in stack)
        raise QuantizeError(
            f"a model with a plan runs inside one torch.func.grad or vjp, and not inside these transforms of "
            f"torch.func: {names}; loop over samples or rows instead, or detach the plan."
        )


# --- Guards: one version per module


#: The attribute of a module that holds its version.
VERSION = "_bitplan_version"

#: Guards that the version makes redundant (on a module's state, ``_bitplan``), and guards on what never changes: our
#: own code, and the base classes of a replaced class, which is guarded itself. Names are those of torch's guards.
_REDUNDANT = re.compile(
    r"_bitplan(?!\w)|^G\['__import_bitplan_dot_|\.__mro__\[\d+\]\.forward(\.__code__)?$|\.__mro__\[1\]\.__dict__"
)


def version_of(state: Hashable) -> str:
    """The version of a state of plain values: a digest, so that equal states have equal versions."""
    return hashlib.blake2b(repr(state).encode(), digest_size=16).hexdigest()


@constant_when_traced
def guard_on(version: str) -> None:
    """Make the graph that is being traced valid for this version only."""


def keep_guards(guards: Sequence[Any]) -> Sequence[bool]:
    """For each of torch's guards, whether to keep it (``guard_filter_fn``)."""
    return [_REDUNDANT.search(guard.name) is None for guard in guards]


# --- Settings of the tracer, raised while a planned model exists


#: Setting -> the values that living owners need, by need id.
_needs: dict[str, dict[int, int]] = {}
#: Setting -> its value before the first owner.
_original: dict[str, int] = {}
#: Setting -> the value that was last set by this module; a different one was set by somebody else and is left alone.
_last_set: dict[str, int] = {}
_need_ids = itertools.count()
#: Graphs per code object, where copies of a model are compiled one after the other.
_RECOMPILE_LIMIT = 256


class RaisedSetting:
    """Keeps a setting of torch.compile's tracer at `value` or above until removed, or until `owner` is collected.

    Several models may need the same setting. It has the largest of their values, and its original one after the last.
    """

    def __init__(self, name: str, value: int, owner: object) -> None:
        needs = _needs.setdefault(name, {})
        if not needs:
            _original[name] = _last_set[name] = getattr(torch_private.dynamo_config, name)
        need_id = next(_need_ids)
        needs[need_id] = value
        _apply(name)
        self.remove: Callable[[], None] = weakref.finalize(owner, _remove, name, need_id)


def _remove(name: str, need_id: int) -> None:
    del _needs[name][need_id]
    _apply(name)


def _apply(name: str) -> None:
    setting_type = type(_original[name])
    value = setting_type(max([_original[name], *_needs[name].values()]))
    if getattr(torch_private.dynamo_config, name) == _last_set[name]:
        setattr(torch_private.dynamo_config, name, value)
    _last_set[name] = value


def raise_recompile_limit() -> AbstractContextManager[None]:
    """A context in which the same code can be compiled for many copies of a model.

    torch counts graphs per code object and would take the copies for endless recompilation.
    """
    patched: AbstractContextManager[None] = torch_private.dynamo_config.patch(recompile_limit=_RECOMPILE_LIMIT)
    return patched
