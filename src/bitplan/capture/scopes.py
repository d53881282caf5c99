"""Module scopes: every operation of a model is intercepted, eager and compiled, together with its module.

A ``TorchFunctionMode`` intercepts all torch functions, ``F.relu`` and ``x + y`` as well as layers. Every module enters
a mode of its own, a :class:`Scope`, so that the module of an operation is known, also when a checkpointed region is
recomputed in the backward pass, after all modes were left. The module's class is replaced by a subclass whose
``forward`` enters the scope (:mod:`bitplan.capture.planned_classes`). A class, not a patched ``forward``: a deep copy
then runs on its own weights, and ``torch.compile`` sees one code object for equal blocks. Every call makes a new scope:
inside a checkpointed region ``torch.compile`` forbids changes to objects outside of it.

:class:`Interceptor` is the base of what is done with an operation.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
    float_buffers,
    kind_of_result,
    mask_arguments,
    tag_made_of_no_floats,
    tag_result,
    tag_view,
)
from bitplan.capture.decompositions import DECOMPOSITIONS, TRANSPARENT
from bitplan.capture.ops import FUSED, REGIONS, name_of, works_in_place
from bitplan.compiler import torch_private
from bitplan.compiler.torch_patches import Undo, replace_attribute
from bitplan.compiler.torch_private import (
    CHECKPOINT_GENERATOR,
    DISPATCH_MODULES,
    DISTRIBUTED_MODULES,
    FUNCTORCH_MODULES,
    DisableTorchFunction,
    checkpoint_generator,
    torch_function_mode_at,
    torch_function_stack_depth,
)
from bitplan.compiler.tracing import (
    VERSION,
    compile_only_inside_graphs,
    constant_when_traced,
    guard_on,
)
from bitplan.numerics.wire_format import LOSS_PATH

#: The attribute of a module with a plan that holds its state; names of buffers of ours begin so, too.
STATE = "_bitplan"

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
                buffers = module.__dict__[STATE].float_buffers
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
                    buffers = self.module.__dict__[STATE].float_buffers
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
_BETWEEN = DISPATCH_MODULES | {__name__, "bitplan.capture.planned_classes"}


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


class Planned:
    """Mixed into the class of a module with a plan, in front of it: :mod:`bitplan.capture.planned_classes`."""


def is_planned(module: object) -> bool:
    return isinstance(module, Planned)


def state_of(module: nn.Module) -> ModuleState:
    state: ModuleState = module.__dict__[STATE]
    return state


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
    holder.__dict__[STATE] = ModuleState(interceptor, LOSS_PATH, holder)
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
