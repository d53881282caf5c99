"""Results of operations that are no activations: constants, attention scores under a mask, and statistics of norms.

A *constant* depends on no parameter and on no floating-point input of the model: positions, rotary angles, expert
offsets, masks. A tensor is one where it is made of integers and Python numbers (``arange``, a cast of indices), of a
buffer of its own module, or of other constants. Everything else counts as an activation.

A *mask* has entries that stand for minus infinity: -inf, ``torch.finfo(dtype).min``, -1e9. They would decide the scale
of a rounded tensor: all other values would become 0, or NaN. A tensor is one from the operation that writes such a
number until the operation (a softmax, usually) that makes ordinary numbers of it.

A *statistic* of a norm is a mean or sum of squares, a variance, a standard deviation or a vector norm with
``keepdim=True``, and what is computed of statistics and numbers alone: ``variance + eps``, its ``rsqrt``. With a scale
per tensor, the variance of a small row would be rounded to 0, and the row divided by it. The squares are activations
(a squared ReLU is one), but a statistic is computed of the values that they had before they were rounded.

All are known by attributes of the tensor, which eager and traced tensors can have.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bitplan.capture.ops import FACTORIES_LIKE, name_of, works_in_place
from bitplan.compiler.torch_private import FakeTensor
from bitplan.compiler.tracing import constant_when_traced

#: What the result of an operation is.
ACTIVATION, CONSTANT, MASK, SQUARE, STATISTIC = "activation", "constant", "mask", "square", "statistic"

#: The attribute of a tensor that is a constant, a mask or a statistic; one, because tracing takes long to read an
#: attribute.
TAG = "_bitplan_kind"
#: The attribute of squares: their values before they were rounded, or True where they are not rounded.
_SQUARE_TAG = "_bitplan_square"

#: Two bits of the tag belong to masks. An argument of ``forward`` that is called a mask may be added to scores, or
#: multiply them by 0 and 1: only a sum with it is a mask for certain.
_BY_NAME, _BY_VALUE, _MASK_BITS = 1, 2, 3
#: The bits of a constant and of a statistic.
_IS_CONSTANT, _IS_STATISTIC = 4, 8

#: Numbers from here down stand for minus infinity: BERT's -10000 is the largest in use.
_MINUS_INFINITY = -1e4
#: Arguments of ``forward`` whose names end so are masks.
_MASK_NAMES = ("mask", "attn_bias", "attention_bias")

#: Operations that add a mask, or keep the mask of an operand.
_KEEPS_MASK = frozenset(
    """
    add sub mul div neg where masked_fill masked_scatter scatter index_fill index_put maximum max baddbmm addmm addbmm
    cat stack clamp clamp_min clamp_max tril triu log_softmax pad
    """.split()  # noqa: SIM905 - a paragraph of names reads better than a page of quotes
)
#: Those that multiply: a factor of 0 and 1 is no mask here.
_MULTIPLIES = frozenset(("mul", "div"))
#: Those whose numbers are bounds, and no entries.
_BOUNDS = frozenset(("clamp", "clamp_min", "clamp_max"))

#: Reductions of squares -> the position of ``keepdim`` among their arguments.
_REDUCES_SQUARES = {"mean": 2, "sum": 2}
#: Reductions of any tensor that are statistics -> the same.
_MAKES_STATISTIC = {"var": 3, "std": 3, "var_mean": 3, "std_mean": 3, "norm": 3, "linalg_vector_norm": 3}
#: Operations whose result is a statistic if all of their operands are, or constants.
_KEEPS_STATISTIC = frozenset(
    """
    add sub mul div neg pow sqrt rsqrt reciprocal clamp clamp_min clamp_max maximum minimum max min abs mean sum
    """.split()  # noqa: SIM905 - a paragraph of names reads better than a page of quotes
)
_MAY_SQUARE = frozenset(("pow", "square", "mul"))
#: Operations whose result is more than an activation, though their first argument is one.
_MAY_BE_SPECIAL = _KEEPS_MASK | _KEEPS_STATISTIC | _MAY_SQUARE | _MAKES_STATISTIC.keys()


def mask_arguments(module: nn.Module) -> tuple[tuple[int, str], ...]:
    """Positions and names of the arguments of ``forward`` that are masks: ``attention_mask``, not ``mask_features``.

    >>> mask_arguments(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8), 1))
    ((1, 'mask'), (2, 'src_key_padding_mask'))
    """
    try:
        parameters = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # not written in Python
        return ()
    return tuple((position, name) for position, name in enumerate(parameters) if name.endswith(_MASK_NAMES))


def with_mask_tags(names: tuple[tuple[int, str], ...], args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of a module with its masks tagged. These are aliases: the caller's tensors stay as they are."""
    for position, name in names:
        if name in kwargs:
            kwargs = {**kwargs, name: named_mask(kwargs[name])}
        elif position < len(args):
            args = (*args[:position], named_mask(args[position]), *args[position + 1 :])
    return args, kwargs


def named_mask(value: Any) -> Any:
    """An alias of a floating-point tensor that is called a mask, tagged so; other values as they are."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or _tag(value) & _MASK_BITS:
        return value
    alias = value.view_as(value)
    setattr(alias, TAG, _tag(value) | _BY_NAME)
    return alias


def _tag(tensor: Tensor) -> int:
    """The tag of a tensor; 0: none."""
    return getattr(tensor, TAG, None) or 0


class FloatBuffers(NamedTuple):
    """Names of a module's buffers of real and complex numbers, which are constants, and of other masks it holds."""

    names: tuple[str, ...]
    #: Those that hold a number that stands for minus infinity, as the mask of causal attention does; plain attributes
    #: and frozen parameters, too.
    masks: tuple[str, ...]


def float_buffers(module: nn.Module) -> FloatBuffers:
    buffers = {
        name: buffer
        for name, buffer in module._buffers.items()
        if buffer is not None and (buffer.is_floating_point() or buffer.is_complex())
    }
    attributes = {
        name: value
        for name, value in (*vars(module).items(), *module._parameters.items())
        if isinstance(value, Tensor) and value.is_floating_point() and not value.requires_grad
    }
    masks = tuple(name for name, tensor in (attributes | buffers).items() if _holds_minus_infinity(tensor))
    return FloatBuffers((*buffers, *(name for name in masks if name not in buffers)), masks)


def _holds_minus_infinity(buffer: Tensor) -> bool:
    has_values = not buffer.is_meta and not isinstance(buffer, FakeTensor) and not buffer.is_complex()
    if not has_values or buffer.layout != torch.strided or not buffer.numel():
        return False
    with torch.no_grad():
        return bool((buffer <= _MINUS_INFINITY).any())


def kind_of_result(
    module: nn.Module, buffers: FloatBuffers, op: str, args: Any, kwargs: dict[str, Any]
) -> tuple[str, int]:
    """What an operation will return, and the tag of its mask (0: none)."""
    first: Any = args[0] if args else None
    is_untagged = isinstance(first, Tensor) and getattr(first, TAG, None) is None and first.dtype.is_floating_point
    names, masks = buffers
    if is_untagged and not (names and _is_buffer(module, names, first)):  # an activation first, as mostly
        if op not in _MAY_BE_SPECIAL:
            return ACTIVATION, 0
        if len(args) == 2 and not kwargs and op in _KEEPS_MASK and op not in _MAY_SQUARE:
            second = args[1]
            if isinstance(second, Tensor):
                if getattr(second, TAG, None) is None and not (masks and _is_buffer(module, masks, second)):
                    return ACTIVATION, 0
            elif isinstance(second, (int, float)) and second > _MINUS_INFINITY:
                return ACTIVATION, 0
    tensors = _float_tensors(args, kwargs)
    is_constant = True
    for tensor in tensors:
        if not _tag(tensor) & _IS_CONSTANT and not _is_buffer(module, names, tensor):
            is_constant = False
            break
    mask = 0
    if is_constant or op in _KEEPS_MASK:
        mask = _mask_of(module, buffers.masks, op, tensors, args, kwargs, is_constant)
    if is_constant:
        return CONSTANT, mask
    if mask == _BY_VALUE:
        return MASK, mask
    if op in _MAY_SQUARE and _is_square(op, args, kwargs):
        return SQUARE, mask
    return (STATISTIC if _is_statistic(op, tensors, args, kwargs) else ACTIVATION), mask


def _is_square(op: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operation squares a tensor that is no statistic."""
    if not args or (isinstance(args[0], Tensor) and _tag(args[0]) & _IS_STATISTIC):
        return False
    other = args[1] if len(args) > 1 else kwargs.get("exponent", kwargs.get("other"))
    if op == "pow":
        return isinstance(args[0], Tensor) and isinstance(other, (int, float)) and other == 2
    return op == "square" or args[0] is other


def _is_statistic(op: str, tensors: list[Tensor], args: Any, kwargs: dict[str, Any]) -> bool:
    if op in _MAKES_STATISTIC and _keeps_dim(_MAKES_STATISTIC[op], args, kwargs):
        return True
    if op in _REDUCES_SQUARES and getattr(tensors[0], _SQUARE_TAG, None) is not None:
        return _keeps_dim(_REDUCES_SQUARES[op], args, kwargs)
    if op not in _KEEPS_STATISTIC:
        return False
    is_statistic = False
    for tensor in tensors:
        tag = _tag(tensor)
        if tag & _IS_STATISTIC:
            is_statistic = True
        elif not tag & _IS_CONSTANT:
            return False
    return is_statistic


def _keeps_dim(position: int, args: Any, kwargs: dict[str, Any]) -> bool:
    value = args[position] if len(args) > position else kwargs.get("keepdim", kwargs.get("keepdims"))
    return value is True


def keep_unrounded(squares: Tensor, unrounded: Tensor) -> None:
    """Remember the values that `squares`, which are rounded, had before."""
    setattr(squares, _SQUARE_TAG, unrounded)


def with_unrounded_squares(args: Any) -> Any:
    """The arguments of an operation that makes a statistic, with squares as they were before they were rounded."""
    unrounded = getattr(args[0], _SQUARE_TAG, None) if args else None
    return (unrounded, *args[1:]) if isinstance(unrounded, Tensor) else args


def _mask_of(
    module: nn.Module,
    masks: tuple[str, ...],
    op: str,
    tensors: list[Tensor],
    args: Any,
    kwargs: dict[str, Any],
    is_constant: bool,
) -> int:
    """The mask's tag of a result."""
    tag = 0
    is_sum_with_other = False
    for tensor in tensors:
        own = _own_mask(module, masks, tensor)
        if own == 0:
            is_sum_with_other = is_sum_with_other or not _tag(tensor) & _IS_CONSTANT
        elif own > tag:
            tag = own
    if op not in _BOUNDS and _has_minus_infinity(args, kwargs):
        return _BY_VALUE
    if is_constant and (op == "log" or (op == "mul" and _has_infinity(args))):  # log(0), and 1e10 * hidden to subtract
        return _BY_VALUE
    if tag == _BY_NAME and not is_constant and is_sum_with_other:
        return 0 if op in _MULTIPLIES else _BY_VALUE
    return tag


def _own_mask(module: nn.Module, masks: tuple[str, ...], tensor: Tensor) -> int:
    """The mask's tag of a tensor."""
    own = _tag(tensor) & _MASK_BITS
    return own or (_BY_VALUE if masks and _is_buffer(module, masks, tensor) else 0)


def tag_result(result: Any, kind: str, mask: int) -> Any:
    """The result of an operation with its tags: the same object, or views of several while a graph is traced."""
    if kind == ACTIVATION and not mask:
        return result
    if isinstance(result, (tuple, list)):
        # Dynamo lets nothing be noted of one of several results, but of a view of it.
        parts = [_view_when_traced(part) for part in result]
        for part in parts:
            tag_result(part, kind, mask)
        return tuple(parts) if torch.compiler.is_compiling() else result
    if isinstance(result, Tensor) and (result.is_floating_point() or result.is_complex()):
        tag = _tag(result)
        if kind == SQUARE and getattr(result, _SQUARE_TAG, None) is None:
            setattr(result, _SQUARE_TAG, True)
        bit = {CONSTANT: _IS_CONSTANT, STATISTIC: _IS_STATISTIC}.get(kind, 0)
        tag = bit | tag & (_IS_CONSTANT | _IS_STATISTIC) | (mask or tag & _MASK_BITS)
        if tag:
            setattr(result, TAG, tag)
    return result


def _view_when_traced(part: Any) -> Any:
    return part.view_as(part) if isinstance(part, Tensor) and torch.compiler.is_compiling() else part


def has_tags(tensor: Any) -> bool:
    """Whether a tensor is known to be more than an activation."""
    return getattr(tensor, TAG, None) is not None or getattr(tensor, _SQUARE_TAG, None) is not None


def is_constant(tensor: Tensor) -> bool:
    """Whether a tensor is known to be a constant."""
    return bool(_tag(tensor) & _IS_CONSTANT)


def clear_tags(result: Any) -> None:
    """Forget what is known of a tensor that an activation was written into."""
    for tag in (TAG, _SQUARE_TAG):
        if getattr(result, tag, None) is not None:
            setattr(result, tag, None)


def tag_view(
    module: nn.Module,
    buffers: FloatBuffers,
    func: Callable[..., Any],
    args: Any,
    kwargs: dict[str, Any],
    result: Any,
) -> Any:
    """The result of a function that makes no values of its own, with the tags of its source."""
    use = _use_of_source(func)
    if use == _NONE:
        return tag_result(result, CONSTANT, _BY_VALUE if _has_minus_infinity(args, kwargs) else 0)
    first = args[0] if args else None
    if not isinstance(first, Tensor):
        return result
    if use == _WRITES:
        kind, mask = kind_of_result(module, buffers, "where", args, kwargs)
        if kind != CONSTANT:
            clear_tags(first)
        tag_result(first, kind, mask)
        return result
    tag = getattr(first, TAG, None) or 0
    if buffers.names and _is_buffer(module, buffers.names, first):
        tag |= _IS_CONSTANT | _own_mask(module, buffers.masks, first)
    if use == _CASTS and not first.is_floating_point() and not first.is_complex():
        tag |= _IS_CONSTANT  # indices.type_as(activation)
    if use == _PADS and _has_minus_infinity(args[1:], kwargs):
        tag = tag & ~_MASK_BITS | _BY_VALUE
    if not tag:
        return result
    kind = CONSTANT if tag & _IS_CONSTANT else STATISTIC if tag & _IS_STATISTIC else ACTIVATION
    return tag_result(result, kind, tag & _MASK_BITS)


def tag_made_of_no_floats(
    module: nn.Module, buffers: FloatBuffers, args: Any, kwargs: dict[str, Any], result: Any
) -> Any:
    """The result of a function that was given no floating-point tensor: a constant, unless a complex one is none."""
    if isinstance(result, Tensor):
        if not result.dtype.is_floating_point and not result.dtype.is_complex:
            return result
    elif not isinstance(result, (tuple, list)):
        return result
    for value in (*args, *kwargs.values()):
        is_complex = isinstance(value, Tensor) and value.dtype.is_complex
        if is_complex and not is_constant(value) and not _is_buffer(module, buffers.names, value):
            return result  # rotary embeddings multiply queries and keys as complex numbers
    return tag_result(result, CONSTANT, _BY_VALUE if _has_minus_infinity(args, kwargs) else 0)


#: What a function that makes no values of its own does with its first argument: takes only its shape, writes into it,
#: pads it with a number, or returns its values.
_NONE, _WRITES, _PADS, _CASTS, _RETURNS = "none", "writes", "pads", "casts", "returns"


@constant_when_traced
def _use_of_source(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", "")
    if name in FACTORIES_LIKE:
        return _NONE
    if name in ("__setitem__", "copy_", "fill_", "zero_") or (name_of(func) is not None and works_in_place(func)):
        return _WRITES
    if name in ("to", "type_as"):
        return _CASTS
    return _PADS if name in ("pad", "constant_pad_nd") else _RETURNS


def _float_tensors(args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    tensors: list[Tensor] = []
    _collect(args, tensors)
    if kwargs:
        _collect(tuple(kwargs.values()), tensors)
    return tensors


def _collect(values: Iterable[Any], tensors: list[Tensor]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            if value.is_floating_point():
                tensors.append(value)
        elif isinstance(value, (list, tuple)):
            _collect(value, tensors)


def _is_buffer(module: nn.Module, names: tuple[str, ...], tensor: Tensor) -> bool:
    for name in names:
        if (module._buffers.get(name) if name in module._buffers else getattr(module, name, None)) is tensor:
            return True
    return False


def _has_minus_infinity(args: Any, kwargs: dict[str, Any]) -> bool:
    for value in (*args, *kwargs.values()):
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value <= _MINUS_INFINITY:
            return True
    return False


def _has_infinity(args: Any) -> bool:
    return any(isinstance(value, (int, float)) and value >= -_MINUS_INFINITY for value in args)
