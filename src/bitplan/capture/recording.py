"""Recording a model: every operation of one forward pass, in the order they happen.

The model runs once on fake tensors (shapes and types, no data), so that a model that does not fit into memory can be
listed, priced and planned. An interceptor that changes nothing remembers what each operation was given and has made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from bitplan.capture.constants import ACTIVATION
from bitplan.capture.decompositions import DECOMPOSITIONS
from bitplan.capture.ops import FUSED, PRODUCTS
from bitplan.capture.scopes import Interceptor, Scope, followed, innermost_scope, loss_holder, state_of
from bitplan.compiler.torch_private import (
    DataDependentOutputException,
    DisableTorchFunction,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    tree_map,
)
from bitplan.errors import TargetError
from bitplan.numerics.wire_format import op_site, site_path
from bitplan.plans.match import ancestors

# --- A batch as users give it, and how a model and a loss are called with it


def split_batch(batch: Any, loss: Callable[..., Any] | None) -> tuple[Any, Any]:
    """(inputs, target): a pair is both where a loss wants a target, anything else is inputs alone."""
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
    #: An activation, a constant or a mask, see :mod:`bitplan.capture.constants`.
    kind: str = ACTIVATION
    #: For products: x, w and the settings that matter for counting.
    operands: tuple[Tensor, Tensor] | None = None
    details: dict[str, Any] = field(default_factory=dict)
    #: The fused operation that this one was written out of.
    inside: str | None = None
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

    @property
    def label(self) -> str:
        return site_path(self.module, op_site(self.op, self.index))


class Recorder(Interceptor):
    """An interceptor that changes nothing and remembers every operation."""

    tags_constants = True

    def __init__(
        self, parameter_names: dict[int, str], opens: Callable[[str, str], bool] | None, nonzeros: dict[int, int]
    ) -> None:
        self.opens = opens
        self.nonzeros = nonzeros
        self.operations: list[Operation] = []
        #: id of a parameter or of a view of one -> its name.
        self.parameter_names = dict(parameter_names)
        self.whole_parameters: dict[str, Tensor] = {}
        #: id of a tensor -> index of the operation that made it; the tensors are kept, so that no id is used again.
        self.made_by: dict[int, int] = {}
        self.kept: list[Any] = []
        self.is_in_operation = False

    def decomposition_of(self, scope: Scope, op: str) -> Callable[..., Any] | None:
        is_asked = self.opens is not None and op in DECOMPOSITIONS and self.opens(state_of(scope.module).path, op)
        return DECOMPOSITIONS[op] if is_asked else None

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
            if getattr(func, "__name__", "") in _SPLITS:
                self.operations[source].parts.extend(_tensors(result))
        return result

    def on_operation(
        self, scope: Scope, op: str, index: int, kind: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        given = _tensors((args, list(kwargs.values())))
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
                origins={id(t): self.made_by[id(t)] for t in given if id(t) in self.made_by},
                nonzeros={id(t): self.nonzeros[id(t)] for t in given if id(t) in self.nonzeros},
                aten_products=tuple(watch.seen),
                wholes={name: self.whole_parameters[name] for name, _ in parameters if name in self.whole_parameters},
            )
        )
        for tensor in fresh:
            self.made_by[id(tensor)] = len(self.operations) - 1
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
    """Every operation of one forward pass (and of the loss), run on fake tensors. The model is left untouched.

    :param opens: of a module's path and a fused operation, whether it is written out; without, none is.
    """
    faker = batch.faker if isinstance(batch, FakeInputs) else Faker()
    fake = faker.fake
    parameters = dict(model.named_parameters(remove_duplicate=False))
    twins: dict[int, Tensor] = {}
    fakes = {name: twins.setdefault(id(tensor), fake(tensor)) for name, tensor in parameters.items()}
    held = dict(model.named_buffers(remove_duplicate=False))
    buffers = {name: twins.setdefault(id(tensor), fake(tensor)) for name, tensor in held.items()}
    names: dict[int, str] = {}
    for name, tensor in fakes.items():
        names.setdefault(id(tensor), name)
    recorder = Recorder(names, opens, faker.nonzeros)
    recorder.whole_parameters = {names[id(tensor)]: tensor for tensor in fakes.values()}
    if isinstance(batch, FakeInputs):
        arguments, target = (batch.args, batch.kwargs), None
    else:
        inputs, target = split_batch(tree_map(fake, batch), loss)
        arguments = call_arguments(inputs)
    kept = _recurrent_weights_kept(model)
    hidden = nullcontext() if scripted_modules(model) else HiddenProducts(recorder)
    with _told_of_missing_values(), without_scopes(model), kept, faker.mode, hidden, followed(model, recorder):
        output = torch.func.functional_call(model, {**fakes, **buffers}, *arguments)
        if loss is not None:
            with Scope(recorder, loss_holder(recorder)):
                call_loss(loss, output, target)
    return recorder.operations


@contextmanager
def _recurrent_weights_kept(model: nn.Module) -> Iterator[None]:
    """Recurrent layers list their weights; those of a functional call would stay there, and cost a recompilation."""
    layers = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    lists = ("_flat_weights", "_flat_weight_refs")
    kept = [{name: layer.__dict__[name] for name in lists if name in layer.__dict__} for layer in layers]
    try:
        yield
    finally:
        for layer, content in zip(layers, kept, strict=True):
            layer.__dict__.update(content)


@contextmanager
def _told_of_missing_values() -> Iterator[None]:
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise TargetError(
            f"the model looks into its tensors ({error.func}), and listing runs it on shapes without values: do that "
            f"part before the model is called."
        ) from error
