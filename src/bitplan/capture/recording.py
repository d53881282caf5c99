"""Recording a model: every operation of one forward pass, in the order they happen.

The model runs once on fake tensors (shapes and types, no data), so that a model that does not fit into memory can be
listed, priced and planned; one that needs values runs on those of the batch. An interceptor that changes nothing
remembers what each operation was given and has made.
"""

from __future__ import annotations

import inspect
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.data import DataLoader, Dataset

from bitplan.capture.constants import ACTIVATION, SQUARE, STATISTIC, is_constant
from bitplan.capture.decompositions import DECOMPOSITIONS
from bitplan.capture.ops import FACTORIES_LIKE, FUSED, PRODUCTS
from bitplan.capture.planned_classes import followed
from bitplan.capture.scopes import (
    Interceptor,
    Scope,
    innermost_scope,
    loss_holder,
    reentrant_regions_called_once,
    state_of,
)
from bitplan.compiler.torch_private import (
    DISTRIBUTED_MODULES,
    FAKE_TENSOR_LOGGER,
    DataDependentOutputException,
    DisableTorchFunction,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    tree_leaves,
    tree_map,
)
from bitplan.errors import BitplanError, PlanError, TargetError
from bitplan.numerics.wire_format import op_site, site_path
from bitplan.plans.match import ancestors

# --- A batch as users give it, and how a model and a loss are called with it


def split_batch(batch: Any, loss: Callable[..., Any] | None) -> tuple[Any, Any]:
    """(inputs, target): a pair is both where a loss wants a target, anything else is inputs alone."""
    if isinstance(loss, type):
        raise TargetError(f"the loss is the class {loss.__name__}: make one of it, as in {loss.__name__}().")
    if loss is not None and isinstance(batch, (tuple, list)) and len(batch) == 2 and wants_target(loss):
        return batch[0], batch[1]
    return batch, None


def wants_target(loss: Callable[..., Any]) -> bool:
    try:
        needed = [
            parameter
            for parameter in inspect.signature(loss).parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        return True
    return len(needed) >= 2 or isinstance(loss, nn.Module)


def call_arguments(inputs: Any) -> tuple[Any, ...]:
    """(args, kwargs) of the model's call: a mapping becomes keywords, a tuple positions, anything else one argument."""
    if isinstance(inputs, dict) or hasattr(inputs, "keys"):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def inputs_of(model: nn.Module, example: Any) -> Any:
    """What `model` takes of an example as a loader gives it: a target that its forward has no place for is left out."""
    if isinstance(example, (DataLoader, Dataset)):
        kind = "DataLoader" if isinstance(example, DataLoader) else "Dataset"
        raise PlanError(f"example= is one batch, not a {kind}: give next(iter(loader)), as the model takes it.")
    if isinstance(example, np.ndarray):
        raise PlanError("example= is a batch of tensors, not a numpy array: give torch.from_numpy(example).")
    if isinstance(example, Iterator):
        raise PlanError(f"example= is one batch, not a {type(example).__name__} of them: give next() of it.")
    if not isinstance(example, (tuple, list, Mapping)):
        return example
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return example
    args, kwargs = call_arguments(example)
    if _binds(signature, args, kwargs):
        return example
    if len(args) == 2 and _binds(signature, args[:1], {}):
        return args[0]
    known = {name: value for name, value in kwargs.items() if name in signature.parameters}
    return known if known and _binds(signature, (), known) else example


def require_tensors(batch: Any) -> None:
    """Raise for what is no batch: a number, a shape, nothing."""
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(batch)):
        advice = "next(iter(loader))" if isinstance(batch, DataLoader) else "torch.randn(8, 16), or (inputs, target)"
        raise TargetError(
            f"the batch has no tensor, it is of type {type(batch).__name__}: give a batch as the model takes it, such "
            f"as {advice}."
        )


def _binds(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def call_loss(loss: Callable[..., Any], output: Any, target: Any) -> Any:
    return loss(output) if target is None else loss(output, target)


# --- Fake tensors: shapes, types and devices without data, so that what does not fit into memory can be run


class Faker:
    """Turns tensors into fake ones: shape, type and device without data."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        #: id of a fake sparse tensor -> how many values the real one held.
        self.nonzeros: dict[int, int] = {}

    def fake(self, tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or isinstance(tensor, FakeTensor):
            return tensor
        if hasattr(tensor, "device_mesh"):  # spread over processes: a whole tensor in its place
            with self.mode:
                twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        else:
            twin = self.mode.from_tensor(tensor.detach())
        if tensor.layout != torch.strided:
            self.nonzeros[id(twin)] = tensor._nnz()
        return twin.requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else twin


class FakeInputs:
    """What a model was called with, to be recorded later; no data is kept alive."""

    def __init__(self, args: Any, kwargs: dict[str, Any]) -> None:
        self.faker = Faker()
        self.args = tree_map(self.faker.fake, args)
        self.kwargs = tree_map(self.faker.fake, kwargs)


# --- Noticing matrix products wherever they hide, so that a cost can refuse to overlook one


#: torch's own products, as functions of any kind (custom, composite, from other libraries) end in them.
ATEN_PRODUCTS = frozenset(
    """
    mm bmm addmm baddbmm addbmm mv addmv dot vdot convolution _convolution convolution_overrideable _trilinear
    _sparse_mm _sparse_addmm _sparse_sparse_matmul sspaddmm hspmm sparse_sampled_addmm _int_mm _scaled_mm _grouped_mm
    _scaled_grouped_mm mkldnn_rnn_layer _thnn_fused_lstm_cell _cudnn_rnn miopen_rnn _mkldnn_linear mkldnn_linear
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_attention_math
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention _flash_attention_forward
    _efficient_attention_forward _native_multi_head_attention _transformer_encoder_layer_fwd
    """.split()  # noqa: SIM905 - a paragraph of names reads better than a page of quotes
)


class ProductWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the names of aten's products among everything that runs inside it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: OpOverload[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in ATEN_PRODUCTS:
            self.note(name)
        return func(*args, **(kwargs or {}))

    def note(self, name: str) -> None:
        self.seen.append(name)


class HiddenProducts(ProductWatch):  # type: ignore[no-untyped-call]
    """Records products outside of all operations: those of scripted functions and of extensions."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def note(self, name: str) -> None:
        scope = innermost_scope()
        if not self.recorder.is_in_operation and scope is not None:
            index = sum(operation.op == name for operation in self.recorder.operations)
            hidden = Operation(state_of(scope.module).path, name, index, [], [], [], False, aten_products=(name,))
            self.recorder.operations.append(hidden)


# --- Scripted and traced modules: they run without Python, so that no mode sees what happens inside them


def scripted_modules(model: nn.Module) -> list[str]:
    """Their paths, outermost ones only."""
    scripted = [path for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    return [path for path in scripted if not set(scripted).intersection(ancestors(path))]


@contextmanager
def without_scopes(model: nn.Module) -> Iterator[None]:
    """While scripted modules run, modes do not look.

    On real tensors they could see nothing anyway; but fake tensors compute parts of scripted code in Python, and that
    must not be taken for operations of the model.
    """
    unseen = [model.get_submodule(path) for path in scripted_modules(model)]
    if not unseen:
        yield
        return
    guards: list[Any] = []

    def enter(module: nn.Module, *given: Any) -> None:
        if any(module is each for each in unseen):
            guards.append(DisableTorchFunction())
            guards[-1].__enter__()

    def leave(module: nn.Module, *given: Any) -> None:
        if any(module is each for each in unseen):
            guards.pop().__exit__(None, None, None)

    # Hooks for all modules: scripted ones take none of their own.
    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


#: Functions that cut a tensor into parts.
_SPLITS = frozenset({"chunk", "split", "split_with_sizes", "tensor_split"})


#: Functions whose result says which values are the largest.
_RANKINGS = frozenset({"topk", "argmax", "argmin", "argsort", "sort"})

#: Functions that write into their first argument and make no values of their own.
_WRITES = frozenset({"__setitem__", "copy_"})

#: A part of a tensor, by the offsets of the views that cut it out; () is all of it.
Part = tuple[int, ...]


class Read(NamedTuple):
    """A tensor that an operation was given."""

    #: The number of the operation that made it; below 0 for the model's inputs, which have numbers, too.
    source: int
    part: Part = ()


@dataclass(frozen=True, eq=False)
class FusedCall:
    """The arguments of a fused operation that was written out."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Operation:
    """One call of one operation, as it was seen."""

    module: str
    op: str
    index: int
    inputs: list[int]
    parameters: list[tuple[str, Tensor]]
    outputs: list[Tensor]
    needs_grad: bool
    #: An activation, a constant, a mask, ... see :mod:`bitplan.capture.constants`.
    kind: str = ACTIVATION
    #: For products: x, w and the settings that matter for counting.
    operands: tuple[Tensor, Tensor] | None = None
    details: dict[str, Any] = field(default_factory=dict)
    #: The fused operation that this one was written out of.
    inside: str | None = None
    #: The arguments of its call; the same object for all operations inside.
    fused_call: FusedCall | None = None
    #: id of a tensor that it was given -> number of the operation that made it; parameters and data are not here.
    origins: dict[int, int] = field(default_factory=dict)
    #: id of a sparse tensor that it was given -> how many values it holds (a fake one has forgotten).
    nonzeros: dict[int, int] = field(default_factory=dict)
    #: Matrix products that torch did in it, by their names in aten: see :mod:`bitplan.capture.recording`.
    aten_products: tuple[str, ...] = ()
    #: Name of a parameter -> the parameter, of which `parameters` may have a view.
    wholes: dict[str, Tensor] = field(default_factory=dict)
    #: What its result was split into. These are views, and no sites, but some accounts of memory count them.
    parts: list[Tensor] = field(default_factory=list)
    #: For each of these parts, what a reader of it reads.
    part_reads: list[Read] = field(default_factory=list)
    #: What a product reads as x and as w; None for parameters, buffers and constants.
    operand_reads: tuple[Read | None, Read | None] = (None, None)
    #: Every tensor that it was given, in order, but for parameters, buffers and constants that no operation made.
    reads: list[Read] = field(default_factory=list)
    #: Whether its result, or a view of it, is among the model's outputs.
    is_output: bool = False
    #: Whether the model asks which of its results are the largest.
    is_ranked: bool = False

    @property
    def label(self) -> str:
        return site_path(self.module, op_site(self.op, self.index))


class Recorder(Interceptor):
    """An interceptor that changes nothing and remembers every operation."""

    tags_constants = True

    def __init__(
        self, parameters: dict[str, Tensor], opens: Callable[[str, str], bool] | None, nonzeros: dict[int, int]
    ) -> None:
        self.opens = opens
        self.nonzeros = nonzeros
        self.operations: list[Operation] = []
        #: id of a parameter or of a view of one -> its name.
        self.parameter_names = {id(tensor): name for name, tensor in parameters.items()}
        self.whole_parameters = dict(parameters)
        #: id of a tensor -> index of the operation that made it; the tensors are kept, so that no id is used again.
        self.made_by: dict[int, int] = {}
        self.kept: list[Any] = []
        #: id of a tensor -> what it is, or is a part of, for everything that is read.
        self.read_as: dict[int, Read] = {}
        #: ids of buffers and of views of parameters and buffers.
        self.fixed: set[int] = set()
        self._data_count = 0
        self.is_in_operation = False
        self._fused_call: FusedCall | None = None

    def decomposition_of(self, scope: Scope, op: str) -> Callable[..., Any] | None:
        is_asked = self.opens is not None and op in DECOMPOSITIONS and self.opens(state_of(scope.module).path, op)
        return partial(self._decomposed, DECOMPOSITIONS[op]) if is_asked else None

    def _decomposed(self, decomposition: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        around, self._fused_call = self._fused_call, FusedCall(args, kwargs)
        try:
            return decomposition(*args, **kwargs)
        finally:
            self._fused_call = around

    def on_view(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        count = next((self.nonzeros[id(t)] for t in _tensors(args) if id(t) in self.nonzeros), None)
        if count is not None and isinstance(result, Tensor) and result.layout != torch.strided:
            self.nonzeros[id(result)] = count
            self.kept.append(result)
        name = next((self.parameter_names[id(t)] for t in _tensors(args[:1]) if id(t) in self.parameter_names), None)
        if name is not None:
            for tensor in _tensors(result):
                self.parameter_names.setdefault(id(tensor), name)
                self.kept.append(tensor)
        source = next((self.made_by[id(t)] for t in _tensors(args) if id(t) in self.made_by), None)
        if source is not None:
            for tensor in _tensors(result):  # views and casts continue their source
                if id(tensor) not in self.made_by:
                    self.made_by[id(tensor)] = source
                    self.kept.append(tensor)
        self._note_parts(getattr(func, "__name__", ""), _tensors(args), _tensors(result))
        if source is not None and getattr(func, "__name__", "") in _SPLITS:
            split = self.operations[source]
            split.parts.extend(_tensors(result))
            split.part_reads.extend(self.read_as.get(id(tensor), Read(source)) for tensor in _tensors(result))
        return result

    def _is_fixed(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter, a buffer, or a constant that no operation made."""
        key = id(tensor)
        return key in self.parameter_names or key in self.fixed or (is_constant(tensor) and key not in self.made_by)

    def _read(self, tensor: Tensor) -> Read:
        if id(tensor) not in self.read_as:
            self._data_count += 1
            self.read_as[id(tensor)] = Read(-self._data_count)
            self.kept.append(tensor)
        return self.read_as[id(tensor)]

    def _operand_reads(self, operands: tuple[Tensor, Tensor] | None) -> tuple[Read | None, Read | None]:
        x, w = operands or (None, None)
        return self._operand_read(x), self._operand_read(w)

    def _operand_read(self, tensor: Any) -> Read | None:
        return self._read(tensor) if isinstance(tensor, Tensor) and not self._is_fixed(tensor) else None

    def _note_parts(self, name: str, given: list[Tensor], results: list[Tensor]) -> None:
        """Views and casts are what they were made of, or a part of it."""
        source = next((t for t in given if id(t) in self.made_by), given[0] if given else None)
        if source is None:
            return
        if name in _WRITES:
            self._note_write(given)
        elif self._is_fixed(source) or name in FACTORIES_LIKE:
            self.fixed.update(map(id, results))
            self.kept.extend(results)
        else:
            whole = self._read(source)
            if name in _RANKINGS and whole.source >= 0:
                self.operations[whole.source].is_ranked = True
            for tensor in results:
                if id(tensor) not in self.read_as:
                    is_cut = tensor.numel() < source.numel() and tensor.layout == torch.strided
                    offset = (int(tensor.storage_offset()),) if is_cut else ()
                    self.read_as[id(tensor)] = Read(whole.source, whole.part + offset)
                    self.kept.append(tensor)

    def _note_write(self, given: list[Tensor]) -> None:
        """A buffer that an activation is written into holds that activation from then on."""
        target, value = given[0], given[-1]
        if value is not target and value.is_floating_point() and not self._is_fixed(value) and self._is_fixed(target):
            self.fixed.discard(id(target))
            self.read_as[id(target)] = Read(self._read(value).source)
            self.kept.append(target)

    def note_outputs(self, output: Any) -> None:
        """Mark the operations whose results the model returns."""
        values = output if isinstance(output, (Tensor, list, tuple, dict)) else getattr(output, "__dict__", ())
        for tensor in _tensors(values):
            read = self.read_as.get(id(tensor))
            if read is not None and read.source >= 0:
                self.operations[read.source].is_output = True

    def _note_parameters(self, module: nn.Module) -> None:
        """Parameters of a running module may be other objects than before: sharded and offloaded ones are."""
        for own_name, tensor in module._parameters.items():
            if tensor is not None and id(tensor) not in self.parameter_names:
                name = f"{state_of(module).path}.{own_name}".lstrip(".")
                self.parameter_names[id(tensor)] = name
                self.whole_parameters[name] = tensor
                self.kept.append(tensor)

    def on_weight(self, path: str, weight: Any) -> Any:
        name = ".".join(part for part in path.split(".") if part != "parametrizations")
        for tensor in _tensors(weight):
            self.parameter_names[id(tensor)] = name
            self.whole_parameters[name] = tensor
            self.kept.append(tensor)
        return weight

    def on_operation(
        self, scope: Scope, op: str, index: int, kind: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        given = _tensors((args, list(kwargs.values())))
        self._note_parameters(scope.module)
        self.is_in_operation = True
        with ProductWatch() as watch:
            result = func(*args, **kwargs)
        self.is_in_operation = False
        known = {id(tensor) for tensor in given}
        outputs = [t for t in _tensors(result) if t.is_floating_point()]
        fresh = [t for t in outputs if id(t) not in known] or (outputs if _changes_first(func, kwargs) else [])
        if not fresh:
            return result
        parameters = [(self.parameter_names[id(t)], t) for t in given if id(t) in self.parameter_names]
        sources = [self.made_by[id(t)] for t in given if id(t) in self.made_by]
        reads = [self._read(t) for t in given if not self._is_fixed(t)]
        operands = _operands(op, args, kwargs)
        self.operations.append(
            Operation(
                module=state_of(scope.module).path,
                op=op,
                index=index,
                inputs=list(dict.fromkeys(sources)),
                parameters=parameters,
                outputs=fresh,
                kind=kind,
                needs_grad=any(t.requires_grad for t in fresh),
                operands=operands,
                details=_details(op, args, kwargs, bool(watch.seen)),
                inside=scope.inside,
                fused_call=self._fused_call,
                origins={id(t): self.made_by[id(t)] for t in given if id(t) in self.made_by},
                nonzeros={id(t): self.nonzeros[id(t)] for t in given if id(t) in self.nonzeros},
                aten_products=tuple(watch.seen),
                wholes={name: self.whole_parameters[name] for name, _ in parameters if name in self.whole_parameters},
                reads=reads,
                operand_reads=self._operand_reads(operands),
            )
        )
        for tensor in fresh:
            self.made_by[id(tensor)] = len(self.operations) - 1
            self.read_as[id(tensor)] = Read(len(self.operations) - 1)
            self.fixed.discard(id(tensor))
            self.kept.append(tensor)
        self.kept.extend(given)
        return result


def _changes_first(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    return bool(kwargs.get("inplace")) or "out" in kwargs or (name.endswith("_") and not name.startswith("__"))


def _operands(op: str, args: Any, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    if op == "einsum" and len(args) != 3:
        return None  # a sum or a transposition of one tensor, or a chain of products
    if op in PRODUCTS:
        (x_at, x_name), (w_at, w_name) = PRODUCTS[op]
        x = args[x_at] if len(args) > x_at else kwargs[x_name]
        w = args[w_at] if len(args) > w_at else kwargs[w_name]
        return x, w
    return None


def _details(op: str, args: Any, kwargs: dict[str, Any], multiplies: bool) -> dict[str, Any]:
    """How a product was called: what counting it needs."""
    return {"args": args, "kwargs": kwargs} if multiplies or op in FUSED or op in PRODUCTS else {}


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    return []


def record(
    model: nn.Module,
    batch: Any,
    loss: Callable[..., Tensor] | None = None,
    opens: Callable[[str, str], bool] | None = None,
) -> list[Operation]:
    """Every operation of one forward pass (and of the loss). The model is left untouched.

    The model runs on fake tensors. One that needs values, such as a mask that it counts or an operation that torch has
    for real tensors only, runs once on the values of `batch` instead.

    :param opens: of a module's path and a fused operation, whether it is written out; without, none is.
    """
    try:
        with _without_logs_of_failures():
            return _record_on_fakes(model, batch, loss, opens)
    except BitplanError:
        raise
    except Exception as error:  # of whatever kind: the model's own code has run on tensors without values
        if not _has_values(batch):
            raise _missing_values(error) from error
        try:
            return _record_on_values(model, batch, loss, opens)
        except Exception:
            if any(parameter.is_meta for parameter in model.parameters()):
                raise _missing_values(error) from error
            require_tensors(batch)
            raise


def _record_on_fakes(
    model: nn.Module, batch: Any, loss: Callable[..., Tensor] | None, opens: Callable[[str, str], bool] | None
) -> list[Operation]:
    faker = batch.faker if isinstance(batch, FakeInputs) else Faker()
    fake = faker.fake
    parameters = _own_tensors(model, "named_parameters")
    twins: dict[int, Tensor] = {}
    fakes = {name: twins.setdefault(id(tensor), fake(tensor)) for name, tensor in parameters.items()}
    held = _own_tensors(model, "named_buffers")
    buffers = {name: twins.setdefault(id(tensor), fake(tensor)) for name, tensor in held.items()}
    if isinstance(batch, FakeInputs):
        arguments, target = (batch.args, batch.kwargs), None
    else:
        inputs, target = split_batch(tree_map(fake, batch), loss)
        arguments = call_arguments(inputs)
    recorder = Recorder(_first_names(fakes), opens, faker.nonzeros)
    recorder.fixed.update(map(id, buffers.values()))
    with _without_distributed_hooks(model):
        _run(model, recorder, {**fakes, **buffers}, arguments, loss, target, faker.mode)
    return _with_kinds_of_squares(recorder.operations)


def _record_on_values(
    model: nn.Module, batch: Any, loss: Callable[..., Tensor] | None, opens: Callable[[str, str], bool] | None
) -> list[Operation]:
    twins: dict[int, Tensor] = {}
    held = _own_tensors(model, "named_buffers")
    buffers = {name: twins.setdefault(id(tensor), tensor.clone()) for name, tensor in held.items()}
    inputs, target = split_batch(tree_map(_copy, batch), loss)
    recorder = Recorder(_first_names(_own_tensors(model, "named_parameters")), opens, {})
    recorder.fixed.update(map(id, buffers.values()))
    for tensor in (*tree_leaves(inputs), *buffers.values()):
        if isinstance(tensor, Tensor) and tensor.layout != torch.strided:
            recorder.nonzeros[id(tensor)] = tensor._nnz()
    with torch.enable_grad(), _random_states_kept():
        _run(model, recorder, buffers, call_arguments(inputs), loss, target)
    for module in model.modules():
        if isinstance(getattr(type(module), "reshard", None), FunctionType):
            module.reshard()  # type: ignore[operator]  # fully_shard leaves the outermost parameters whole until the backward pass
    return _without_values(recorder)


def _run(
    model: nn.Module,
    recorder: Recorder,
    tensors: dict[str, Tensor],
    arguments: tuple[Any, ...],
    loss: Callable[..., Tensor] | None,
    target: Any,
    fake_mode: AbstractContextManager[Any] = nullcontext(),  # noqa: B008 - without state
) -> None:
    hidden = nullcontext() if scripted_modules(model) else HiddenProducts(recorder)
    checkpointing = reentrant_regions_called_once()
    # Interception looks for masks in the values of buffers, before they are fake.
    with without_scopes(model), _attributes_kept(model), checkpointing, followed(model, recorder), fake_mode, hidden:
        output = torch.func.functional_call(model, tensors, *arguments, tie_weights=False)
        recorder.note_outputs(output)
        if loss is not None:
            with Scope(recorder, loss_holder(recorder)):
                call_loss(loss, output, target)


def _own_tensors(model: nn.Module, kind: str) -> dict[str, Tensor]:
    """Parameters or buffers by name; those of a module with several paths by its first.

    ``functional_call`` would exchange these several times, and restore only the first exchange.
    """
    return {
        f"{path}.{name}".removeprefix("."): tensor
        for path, module in model.named_modules()
        for name, tensor in getattr(module, kind)(recurse=False, remove_duplicate=False)
    }


def _first_names(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters by name, a shared one by the first of its names."""
    names: dict[int, str] = {}
    for name, tensor in parameters.items():
        names.setdefault(id(tensor), name)
    return {name: parameters[name] for name in names.values()}


def _copy(value: Any) -> Any:
    """A copy of a tensor, which the model may write into."""
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _without_values(recorder: Recorder) -> list[Operation]:
    """The operations with fake tensors in the place of real ones, whose memory is freed."""
    faker = Faker()
    twins: dict[int, Any] = {}

    def fake(value: Any) -> Any:
        if id(value) not in twins:
            twins[id(value)] = faker.fake(value)
        return twins[id(value)] if isinstance(value, Tensor) else value

    kept = {id(tensor): tensor for tensor in recorder.kept}
    for operation in recorder.operations:
        operation.outputs, operation.parts = [*map(fake, operation.outputs)], [*map(fake, operation.parts)]
        operation.parameters = [(name, fake(tensor)) for name, tensor in operation.parameters]
        operation.wholes = {name: fake(tensor) for name, tensor in operation.wholes.items()}
        operation.operands = tree_map(fake, operation.operands)
        operation.details = tree_map(fake, operation.details)
        operation.origins = {id(fake(kept[key])): made_by for key, made_by in operation.origins.items()}
        operation.nonzeros = {id(fake(kept[key])): count for key, count in operation.nonzeros.items()}
    return _with_kinds_of_squares(recorder.operations)


def _with_kinds_of_squares(operations: list[Operation]) -> list[Operation]:
    """The operations; squares that statistics alone are computed of are statistics themselves, others activations."""
    read = {source for operation in operations for source in operation.inputs}
    read_otherwise = {source for operation in operations if operation.kind != STATISTIC for source in operation.inputs}
    for number, operation in enumerate(operations):
        if operation.kind == SQUARE:
            operation.kind = STATISTIC if number in read - read_otherwise else ACTIVATION
    return operations


def _has_values(batch: Any) -> bool:
    if isinstance(batch, FakeInputs):
        return False
    return not any(isinstance(t, FakeTensor) or t.is_meta for t in tree_leaves(batch) if isinstance(t, Tensor))


def _missing_values(error: Exception) -> Exception:
    """The error of a model that needs values, where there are none; any other error as it is."""
    if not isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return error
    return TargetError(
        f"the model looks into its tensors ({error.func}), and was run on shapes without values: give a batch with "
        f"values, in attach() as example=."
    )


@contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Restore attributes that modules set while they run: caches, counters, the weights of recurrent layers."""
    before = [(module, dict(module.__dict__)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            for name in [name for name in module.__dict__ if name not in attributes]:
                del module.__dict__[name]
            for name, value in attributes.items():
                if module.__dict__.get(name) is not value:  # a write would make torch.compile check its guards again
                    module.__dict__[name] = value


@contextmanager
def _without_distributed_hooks(model: nn.Module) -> Iterator[None]:
    """Leave out the hooks that gather and split the tensors of a sharded model: it is recorded on whole ones."""
    changed: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            others = {number: hook for number, hook in hooks.items() if not _is_distributed(hook)}
            if len(others) < len(hooks):
                changed.append((hooks, dict(hooks)))
                hooks.clear()
                hooks.update(others)
    try:
        yield
    finally:
        for hooks, before in changed:
            hooks.clear()
            hooks.update(before)


def _is_distributed(hook: Callable[..., Any]) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith(DISTRIBUTED_MODULES)


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """Restore torch's, NumPy's and Python's random numbers."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextmanager
def _without_logs_of_failures() -> Iterator[None]:
    """torch logs operations that fail on fake tensors, twenty lines each, and the model then runs on real ones."""
    logger = logging.getLogger(FAKE_TENSOR_LOGGER)
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled
