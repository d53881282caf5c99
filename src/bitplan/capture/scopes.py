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
import inspect
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from bitplan.capture.constants import (
    ACTIVATION,
    CONSTANT,
    clear_tags,
    kind_of_result,
    mask_arguments,
    tag_made_of_integers,
    tag_result,
    tag_view,
    with_mask_tags,
)
from bitplan.capture.decompositions import DECOMPOSITIONS, TRANSPARENT
from bitplan.capture.ops import FUSED, REGIONS, name_of, traceable, works_in_place
from bitplan.compiler import torch_private
from bitplan.compiler.torch_patches import Undo, replace_attribute
from bitplan.compiler.torch_private import (
    CHECKPOINT_GENERATOR,
    DISPATCH_MODULES,
    FUNCTORCH_MODULES,
    DisableTorchFunction,
    checkpoint_generator,
    torch_function_mode_at,
    torch_function_stack_depth,
)
from bitplan.compiler.tracing import VERSION, constant_when_traced, guard_on
from bitplan.numerics.wire_format import LOSS_PATH

_STATE = "_bitplan"

#: Operations that may be replaced by several single ones.
MAY_BE_DECOMPOSED = FUSED.union(TRANSPARENT, DECOMPOSITIONS)


class ModuleState:
    """What is known of one module: its path, and what a plan does with its operations."""

    def __init__(self, interceptor: Interceptor, path: str, module: nn.Module) -> None:
        self.interceptor = interceptor
        self.path = path
        #: Names of its floating-point buffers, whose values are constants.
        self.float_buffers = tuple(
            name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_floating_point()
        )
        #: Positions and names of the arguments of ``forward`` that are masks.
        self.mask_arguments = mask_arguments(module)
        self.actions: dict[str, Any] = {}
        #: Whether the module has buffers of ours, which tracing has to look for.
        self.has_buffers = True
        #: Copies that were made of the module; they follow the plan, and its changes reach them.
        self.twins: weakref.WeakSet[nn.Module] | None = None

    def copies(self) -> Sequence[nn.Module]:
        """Those of the copies that still exist."""
        return () if self.twins is None else tuple(self.twins)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleState:
        return self  # a copy of the model follows the same plan, on its own weights


class Interceptor:
    """What is done with the operations of a model."""

    #: Copies of a model outlive its detachment: they are plain from then on.
    enabled = True
    #: Whether constants and masks are told apart from activations (:mod:`bitplan.capture.constants`).
    tags_constants = False
    #: Whether eager calls of the outermost module run inside :meth:`around_call`.
    wraps_calls = False

    def around_call(self) -> AbstractContextManager[None]:
        """The context of an eager call of the outermost module, where :attr:`wraps_calls`."""
        return nullcontext()

    def check_compilation(self) -> None:
        """Called while torch.compile traces a module, where :attr:`wraps_calls`."""

    def on_operation(
        self, scope: Scope, op: str, index: int, kind: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Do what `func` does, or something else, and return its result.

        :param kind: what the result is: an activation, a constant or a mask, see :mod:`bitplan.capture.constants`.
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


class Scope(TorchFunctionMode):
    """One call of one module: counts the operations in it and hands them to the interceptor.

    Scopes are nested as the modules are; the innermost handles an operation, and the others do not see it.
    """

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

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        interceptor = self.interceptor
        with DisableTorchFunction():  # or every question about a tensor goes through all scopes around
            has_float_tensor = interceptor.enabled and _has_float_tensor(args, named)
            if not has_float_tensor:
                op, decomposition, is_ours = None, None, False
            else:
                # Compiled code was planned when it was traced.
                is_ours = torch.compiler.is_compiling() or not _is_called_by_compiled_code()
                op = name_of(func)
                if op in MAY_BE_DECOMPOSED and (op != "einsum" or _has_several_operands(args)):
                    decomposition = TRANSPARENT.get(op) or interceptor.decomposition_of(self, op)
                else:
                    decomposition = None
            if is_ours and decomposition is None and op not in REGIONS:
                return self._intercept(op, traceable(func), args, named)
        # Other modes may want to see the rest, factories of tensors among them.
        if not is_ours:
            result = func(*args, **named)
            if interceptor.tags_constants and not has_float_tensor:
                with DisableTorchFunction():
                    result = tag_made_of_integers(args, named, result)
            return result
        if decomposition is None:
            return func(self.carried(args[0]), *args[1:], **named)
        inner = Scope(interceptor, self.module, self.counts)
        inner.inside = self.inside if op in TRANSPARENT else op
        with inner:
            return decomposition(*args, **named)

    def _intercept(self, op: str | None, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Hand an operation to the interceptor, or a function that makes no values of its own."""
        interceptor, module = self.interceptor, self.module
        buffers = state_of(module).float_buffers
        if op is None:
            result = interceptor.on_view(func, args, kwargs)
            return tag_view(module, buffers, func, args, kwargs, result) if interceptor.tags_constants else result
        if op == "einsum" and len(args) == 2 and isinstance(args[1], (list, tuple)):
            args = (args[0], *args[1])  # the operands as one list
        index = self._number(op)
        if not interceptor.tags_constants:
            return interceptor.on_operation(self, op, index, ACTIVATION, func, args, kwargs)
        kind, mask = kind_of_result(module, buffers, op, args, kwargs)
        result = interceptor.on_operation(self, op, index, kind, func, args, kwargs)
        if kind != CONSTANT and args and works_in_place(func):
            clear_tags(args[0])
        return tag_result(result, kind, mask)

    def _number(self, op: str) -> int:
        """The operation's number among its equals."""
        counts = self.counts
        if isinstance(counts, int):
            return _count_when_traced(counts, op)
        counts[op] = counts.get(op, -1) + 1
        return counts[op]

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


def _is_called_by_compiled_code() -> bool:
    """Whether a graph is running: a single compiled block inside a model whose own scope is open.

    Inductor calls matrix products as torch functions, and other backends all operations.
    """
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__") in DISPATCH_MODULES and frame.f_back is not None:
        frame = frame.f_back
    if "extern_kernels" in frame.f_globals or frame.f_globals.get("__name__", "").startswith(FUNCTORCH_MODULES):
        return True
    return frame.f_code.co_filename.startswith("<eval_with_key>") and not is_planned(frame.f_locals.get("self"))


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
        interceptor = self.__dict__[_STATE].interceptor
        interceptor.on_call(self, args, kwargs)
        if interceptor.tags_constants:
            args, kwargs = with_mask_tags(self.__dict__[_STATE].mask_arguments, args, kwargs)
        if torch.compiler.is_compiling():
            guard_on(self.__dict__[VERSION])
        if interceptor.wraps_calls:
            if torch.compiler.is_compiling():
                interceptor.check_compilation()
            elif innermost_scope() is None:
                return self._wrapped_call(interceptor, args, kwargs)
        with Scope(interceptor, self):  # type: ignore[arg-type]
            return super().forward(*args, **kwargs)  # type: ignore[misc]

    def _wrapped_call(self, interceptor: Interceptor, args: Any, kwargs: dict[str, Any]) -> Any:
        with interceptor.around_call(), Scope(interceptor, self):  # type: ignore[arg-type]
            return super().forward(*args, **kwargs)  # type: ignore[misc]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """``model.bfloat16()`` converts buffers too, but what was observed keeps its precision."""
        own: dict[str, Tensor | None] = self._buffers  # type: ignore[attr-defined]
        before = {name: buffer for name, buffer in own.items() if name.startswith(_STATE) and buffer is not None}
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        for name, buffer in before.items():
            moved = own[name]
            if moved is not None and moved.dtype != buffer.dtype:
                own[name] = buffer.to(moved.device)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin: Any = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        state: ModuleState = self.__dict__[_STATE]
        if state.twins is None:
            state.twins = weakref.WeakSet()
        state.twins.add(twin)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle holds the plain model: its class can be found again, an exchanged one cannot."""
        plain = original_class(type(self))
        state: Any = plain.__getstate__(self)  # type: ignore[arg-type, no-untyped-call]
        if not isinstance(state, dict):
            return copyreg._reconstructor, (plain, object, None), state  # type: ignore[attr-defined]
        own = {key: value for key, value in state.items() if key not in (_STATE, VERSION)}
        for kind, copied in (("_buffers", dict), ("_non_persistent_buffers_set", set)):
            kept = copied(own[kind])
            for name in [name for name in kept if name.startswith(_STATE)]:
                kept.pop(name) if isinstance(kept, dict) else kept.remove(name)
            own[kind] = kept
        return copyreg._reconstructor, (plain, object, None), own  # type: ignore[attr-defined]


_EXCHANGED: dict[type[nn.Module], type[nn.Module]] = {}


def planned_class(plain: type[nn.Module]) -> type[nn.Module]:
    """The subclass that enters the mode; one for each class, so that equal blocks share compiled code."""
    if plain not in _EXCHANGED:
        # Code of its own, though the same: torch.compile counts recompilations by the code object.
        forward = FunctionType(
            _Planned.forward.__code__.replace(), globals(), "forward", None, _Planned.forward.__closure__
        )
        forward.__signature__ = _forward_signature(plain)  # type: ignore[attr-defined]  # trainers read it
        own = {"__module__": plain.__module__, "forward": forward}
        _EXCHANGED[plain] = type(plain.__name__, (_Planned, plain), own)
    return _EXCHANGED[plain]


def _forward_signature(plain: type[nn.Module]) -> inspect.Signature:
    try:
        return inspect.signature(plain.forward)
    except (TypeError, ValueError):  # not written in Python
        return inspect.signature(_Planned.forward)


def original_class(planned: type) -> type[nn.Module]:
    plain: type[nn.Module] = planned.__mro__[2]
    return plain


def show_all_functions() -> Undo:
    """A patch of torch: torch.compile shows modes only functions that torch lists as overridable, and that list has
    gaps: hardswish is one.

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
        torch: (),
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
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) or "_orig_mod" in module._modules:
            continue  # cannot be seen, or is torch.compile's wrapper around one that follows
        module.__dict__[VERSION] = ""
        module.__dict__[_STATE] = ModuleState(interceptor, without_wrappers(path), module)
        module.__class__ = planned_class(type(module))
        followed.append((without_wrappers(path), module))
    return followed


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


def uninstall(followed: Iterable[tuple[str, nn.Module]]) -> None:
    """Give every module its own class back."""
    for _, module in followed:
        module.__class__ = original_class(type(module))
        del module.__dict__[_STATE], module.__dict__[VERSION]


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
        uninstall(installed)
        for state, own in zip(resting, planned, strict=True):
            state.interceptor = own


def _has_float_tensor(args: Any, kwargs: dict[str, Any]) -> bool:
    for value in args:
        if isinstance(value, Tensor):
            if value.is_floating_point():
                return True
        elif isinstance(value, (list, tuple)) and _contains_float_tensor(value):
            return True
    return bool(kwargs) and _has_float_tensor(tuple(kwargs.values()), {})


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
