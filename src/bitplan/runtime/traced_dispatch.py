"""The common cases of :mod:`bitplan.runtime.dispatch` while torch.compile traces, in few Python operations.

Dynamo follows Python at some 50 microseconds for an attribute, a comparison or a call and 600 for a new object, for
every operation of a model. So decisions are made by functions that it calls and whose results it takes as constants.
These know a module by its version, which covers all that they read. Rare cases (promotion, gradients rounded at their
consumers, observed weights, operands rounded for each pass, in-place functions) are traced in full.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.capture.constants import CONSTANT, MASK
from bitplan.capture.ops import PRODUCTS, inplace_position, works_in_place
from bitplan.capture.scopes import Scope, state_of_version
from bitplan.compiler.tracing import VERSION, constant_when_traced
from bitplan.numerics.wire_format import op_site
from bitplan.runtime.autograd import call_text, relu_in_graph, rounded_in_graph
from bitplan.runtime.decisions import rounding_of
from bitplan.runtime.module_state import AMAX_HISTORY_MAX, RECORD, TABLE
from bitplan.runtime.op_context import missing_record
from bitplan.runtime.rounding_op import OpRounding, RoundingOp
from bitplan.runtime.weights import WEIGHT_TAG, WeightView, largest, map_tensors, replaces_parameter, weight_key

#: What is done around an operation: nothing; its output and its weights are rounded; those of a ReLU; the operands of a
#: product, too, once for all passes; or something else, which is not done here.
PLAIN, ROLES, RELU, OPERANDS, GENERAL = "plain", "roles", "relu", "operands", "general"

#: Of :func:`rounding_text`: a tensor is observed that the module's record has no row for.
NO_RECORD = "no record"

#: One operation in one call of a module: version, operation, number, the decomposed operation around it, training, and
#: the module's buffers: table, record and amax_history_max.
TracedCall = tuple[str, str, int, str | None, bool, Tensor | None, Tensor | None, Tensor | None]


def traced_operation(
    way: str, scope: Scope, op: str, index: int, kind: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """The result of `func` with its tensors rounded, where `way` is ROLES, RELU or OPERANDS."""
    module, inside = scope.module, scope.inside
    version, training = module.__dict__[VERSION], module.training
    table, record, history_max = None, None, None
    if has_buffers(version):
        buffers = module._buffers
        table, record, history_max = buffers.get(TABLE), buffers.get(RECORD), buffers.get(AMAX_HISTORY_MAX)
    call = (version, op, index, inside, training, table, record, history_max)
    places = "- grad_activation" if kind == MASK else "activation grad_activation"
    if way == RELU:
        x = args[0] if args else kwargs["input"]
        text = rounding_text(version, op, index, inside, training, places, x.requires_grad, record is not None, True)
        if text == NO_RECORD:
            raise missing_record(op_site(op, index))
        return relu_in_graph(x, text, table, record, history_max) if text else func(*args, **kwargs)
    draws = draws_bits(version, op, index, inside)
    result: Any
    if way == OPERANDS:
        result = _product(call, module, func, args, kwargs, draws)
    else:
        if rounds_weights(version, op, index, inside):
            args, kwargs = _with_rounded_weights(call, module, args, kwargs, draws)
        result = func(*args, **kwargs)
        if may_return_input(op) and isinstance(result, Tensor):
            for value in args:
                if isinstance(value, Tensor) and result is value:
                    return result
    if isinstance(result, Tensor):
        return _rounded(call, result, places, result.requires_grad) if result.dtype.is_floating_point else result
    main = largest(result, Tensor)

    def rounded_part(tensor: Tensor) -> Tensor:
        if not tensor.dtype.is_floating_point or any(tensor is value for value in args):
            return tensor
        return _rounded(call, tensor, places, tensor.requires_grad, is_recorded=tensor is main)

    return map_tensors(rounded_part, result)


def _rounded(
    call: TracedCall,
    tensor: Tensor,
    places: str,
    has_gradient: bool,
    key: Tensor | None = None,
    is_recorded: bool = True,
) -> Tensor:
    version, op, index, inside, training, table, record, history_max = call
    if not is_recorded:
        record = history_max = None
    text = rounding_text(version, op, index, inside, training, places, has_gradient, record is not None, is_recorded)
    if text == NO_RECORD:  # raised in traced code: without fullgraph=True, torch.compile then runs it eagerly
        raise missing_record(op_site(op, index))
    return rounded_in_graph(tensor, text, table, record, history_max, key) if text else tensor


def _with_rounded_weights(
    call: TracedCall, module: nn.Module, args: Any, kwargs: dict[str, Any], draws: bool
) -> tuple[Any, dict[str, Any]]:
    def rounded_weight(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            tag = getattr(tensor, WEIGHT_TAG, None)
            if isinstance(tag, WeightView):
                return tag.of(rounded_weight(tag.parent))
            if tag is None and not replaces_parameter(module, tensor):
                return tensor
        key = weight_key(module, tensor) if draws else None
        return _rounded(call, tensor, "weight grad_weight", tensor.requires_grad, key)

    rounded_args = []
    has_parameters = len(module._parameters) > 0
    for value in args:
        if isinstance(value, Tensor):
            # Most tensors are no weights; this is rounded_weight() without a call.
            if has_parameters or isinstance(value, nn.Parameter) or getattr(value, WEIGHT_TAG, None) is not None:
                value = rounded_weight(value)
        elif isinstance(value, (list, tuple)):
            value = map_tensors(rounded_weight, value)
        rounded_args.append(value)
    if kwargs:
        kwargs = {name: map_tensors(rounded_weight, value) for name, value in kwargs.items()}
    return rounded_args, kwargs


def _product(
    call: TracedCall, module: nn.Module, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], draws: bool
) -> Tensor:
    """A product whose operands are rounded once for all passes."""
    version, op, index, inside = call[:4]
    (x_at, x_name), (w_at, w_name) = PRODUCTS[op]
    w = args[w_at] if len(args) > w_at else kwargs[w_name]
    key = weight_key(module, w) if draws and isinstance(w, nn.Parameter) else None
    if rounds_weights(version, op, index, inside):
        args, kwargs = _with_rounded_weights(call, module, args, kwargs, draws)
    args, kwargs = list(args), dict(kwargs)
    for position, name, places in ((x_at, x_name, "fprop.x -"), (w_at, w_name, "fprop.w -")):
        if len(args) > position:
            args[position] = _rounded(call, args[position], places, False, key if name == w_name else None)
        else:
            kwargs[name] = _rounded(call, kwargs[name], places, False, key if name == w_name else None)
    result: Tensor = func(*args, **kwargs)
    return _rounded(call, result, "- dgrad.dy", result.requires_grad)


# --- Decisions, which tracing takes as constants


@constant_when_traced
def way_of(version: str, op: str, index: int, inside: str | None, kind: str, training: bool, arguments: int) -> str:
    """Which case an operation of a module with that version is.

    :param arguments: the number of positional arguments.
    """
    if state_of_version(version) is None:
        return GENERAL
    action = _action(version, op, index, inside)
    if action is None or (kind == CONSTANT and not action.rounds_constants):
        return PLAIN
    weights = (action.places.get(place) for place in ("weight", "grad_weight"))
    if action.promotes or action.at_consumer or any(weight is not None and weight.observes for weight in weights):
        return GENERAL
    is_product = op in PRODUCTS and (op != "einsum" or arguments == 3)
    if is_product and any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
        return GENERAL
    if is_product and action.has_slots:
        return GENERAL if action.slots_apart or action.is_prepared else OPERANDS
    return RELU if op == "relu" and action.rounds_output(training) else ROLES


@constant_when_traced
def inplace_argument(func: Callable[..., Any]) -> int:
    """The position of a function's argument ``inplace``; -1 where it has none, -2 where it always works in place."""
    return -2 if works_in_place(func) else inplace_position(func)


#: Common operations whose result is always a new tensor.
_RETURN_NEW_TENSORS = frozenset(
    """
    add sub mul div neg pow rsqrt sqrt exp log sin cos tanh sigmoid silu gelu relu softmax log_softmax layer_norm
    rms_norm group_norm batch_norm embedding mean sum var cat stack matmul bmm linear addmm baddbmm conv1d conv2d conv3d
    max_pool2d avg_pool2d adaptive_avg_pool2d scaled_dot_product_attention cross_entropy mse_loss
    """.split()  # noqa: SIM905 - a paragraph of names reads better than a page of quotes
)


@constant_when_traced
def may_return_input(op: str) -> bool:
    """Whether an operation may return the very tensor that it was given."""
    return op not in _RETURN_NEW_TENSORS


@constant_when_traced
def rounds_weights(version: str, op: str, index: int, inside: str | None) -> bool:
    """Whether weights among the arguments of an operation are rounded."""
    action = _action(version, op, index, inside)
    return action is not None and action.rounds_weights


@constant_when_traced
def draws_bits(version: str, op: str, index: int, inside: str | None) -> bool:
    """Whether roundings of an operation draw random bits, for which a weight has a key of its own."""
    action = _action(version, op, index, inside)
    return action is not None and action.needs_key


@constant_when_traced
def has_buffers(version: str) -> bool:
    """Whether modules of that version have buffers of ours."""
    state = state_of_version(version)
    return state is not None and state.has_buffers


@constant_when_traced
def rounding_text(
    version: str,
    op: str,
    index: int,
    inside: str | None,
    training: bool,
    places: str,
    has_gradient: bool,
    has_record: bool,
    is_recorded: bool,
) -> str:
    """The constants of a rounding, as :func:`bitplan.runtime.autograd.call_text` has them; empty: there is none.

    :data:`NO_RECORD` where statistics have no room.

    :param places: those of the tensor and of its gradient; ``-``: none.
    :param has_gradient: whether the tensor has a gradient where gradients are computed.
    :param is_recorded: whether it is the one of several results whose statistics are kept.
    """
    action = _action(version, op, index, inside)
    assert action is not None
    forward, backward = places.split(" ")
    site, computes_gradients = op_site(op, index), torch.is_grad_enabled()
    value = action.places[forward] if action.applies(forward, training) else None
    gradient = action.places.get(backward) if computes_gradients and has_gradient else None
    if value is None and gradient is None:
        return ""
    observing = is_recorded and training and computes_gradients

    def row(rounding: RoundingOp) -> int:
        records = action.state_of(rounding.place).records if rounding.has_records and has_record else {}
        return records.get(site, -1)

    used = [rounding for rounding in (value, gradient) if rounding is not None]
    if observing and any(rounding.observes and row(rounding) < 0 for rounding in used):
        return NO_RECORD
    refs = [("", -1) if rounding is None else (rounding.key, row(rounding)) for rounding in (value, gradient)]
    return call_text(refs[0], refs[1], (site, site, training, observing))


def _action(version: str, op: str, index: int, inside: str | None) -> OpRounding | None:
    state = state_of_version(version)
    assert state is not None
    return rounding_of(state.actions, op, index, inside)
