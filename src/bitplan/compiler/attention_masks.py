"""A pass over the graph that Dynamo makes: attention with a constant mask becomes attention without one.

Eager code of transformers looks at a mask's values and passes none if it is plainly causal; the fast kernels of
scaled-dot-product attention (flash, cuDNN) take no mask, and skip the upper half. Code that is traced cannot look at
values. It builds the mask in the graph, and torch falls back to a kernel that reads masks of tokens x tokens and
computes both halves. Keys and values are then repeated in memory for every group of query heads, because that kernel
does not support grouped heads.

The values of such a mask depend on nothing but shapes. They are computed here, once, while compiling: if the mask is
causal or hides nothing it is dropped, and repeated heads with it, as eager code does. Masks that depend on an input of
the graph stay.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from bitplan.compiler.torch_private import DisableTorchFunction, OpOverload, TorchDispatchMode, unset_fake_temporarily

#: A switch for comparisons: whether constant masks are dropped.
FOLDS = True
#: The most elements of a mask that is computed while compiling; a larger one hardly fits into memory in any case.
MOST_ELEMENTS = 2**31
#: The widest head for which torch's fast kernels take grouped heads.
_WIDEST_HEAD = 256
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
#: Where Dynamo notes a node's result.
_VALUE = "example_value"
_ALL = slice(None, None, None)
#: Operators that write to their first argument, as functions and as methods.
_IN_PLACE = frozenset(
    (
        operator.setitem,
        operator.iadd,
        operator.iand,
        operator.ifloordiv,
        operator.ilshift,
        operator.imod,
        operator.imul,
        operator.ior,
        operator.ipow,
        operator.irshift,
        operator.isub,
        operator.itruediv,
        operator.ixor,
    )
)
_IN_PLACE_METHODS = frozenset(f"__{function.__name__}__" for function in _IN_PLACE)


def fold_attention_masks(gm: fx.GraphModule) -> int:
    """Drop constant masks of attention, in place. Returns the number of attention operations that were changed."""
    if not FOLDS:
        return 0
    attention: Any = torch.nn.functional.scaled_dot_product_attention
    masks: dict[fx.Node, bool | None] = {}
    count = 0
    for node in gm.graph.find_nodes(op="call_function", target=attention):
        arguments = {**dict(zip(_ARGUMENTS, node.args, strict=False)), **node.kwargs}
        mask = arguments.get("attn_mask")
        if not isinstance(mask, fx.Node) or arguments.get("is_causal", False) is not False:
            continue
        if not _is_square(mask, arguments["query"], arguments["key"]):
            continue
        if mask not in masks:
            masks[mask] = _is_causal(mask)
        is_causal = masks[mask]
        if is_causal is None:
            continue
        arguments |= {"attn_mask": None, "is_causal": is_causal, **_without_repeated_heads(arguments)}
        node.args, node.kwargs = (), arguments
        count += 1
    if count:
        gm.recompile()
    return count


def _is_square(mask: fx.Node, query: Any, key: Any) -> bool:
    """Whether it is a mask of booleans, with as many queries as keys."""
    values: list[Any] = [node.meta.get(_VALUE) if isinstance(node, fx.Node) else None for node in (mask, query, key)]
    if not all(isinstance(value, Tensor) and value.dim() >= 2 for value in values):
        return False
    mask_value, query_value, key_value = values
    sizes = (*mask_value.shape, query_value.shape[-2], key_value.shape[-2])
    if mask_value.dtype != torch.bool or not all(isinstance(size, int) for size in sizes):
        return False
    tokens = query_value.shape[-2]
    is_square = tuple(mask_value.shape[-2:]) == (tokens, tokens) and key_value.shape[-2] == tokens
    return is_square and 0 < mask_value.numel() <= MOST_ELEMENTS


# --- The values of a mask


def _is_causal(mask: fx.Node) -> bool | None:
    """Whether a mask is causal; False if it hides nothing, None if it is neither or not constant."""
    nodes = _constant_sources(mask)
    if nodes is None:
        return None
    try:
        with unset_fake_temporarily(), DisableTorchFunction(), torch.no_grad(), _Deterministic():  # type: ignore[no-untyped-call]
            values: dict[fx.Node, Any] = {}
            for node in nodes:
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = _call(node, args, kwargs)
            value = values[mask]
            if bool(value.all()):
                return False
            tokens = value.shape[-1]
            position = torch.arange(tokens, device=value.device)
            return True if bool((value == (position[None, :] <= position[:, None])).all()) else None
    except Exception:  # random, too large, or an operation that only works inside the graph: the mask stays
        return None


def _call(node: fx.Node, args: Any, kwargs: Any) -> Any:
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _constant_sources(mask: fx.Node) -> list[fx.Node] | None:
    """The nodes that compute a mask, in order; None if one is an input of the graph, or may be written to."""
    sources: set[fx.Node] = set()
    pending = [mask]
    while pending:
        node = pending.pop()
        if node in sources:
            continue
        if node.op not in ("call_function", "call_method") or isinstance(node.target, OpOverload):
            return None
        sources.add(node)
        pending.extend(node.all_input_nodes)
    if any(map(_writes, _aliases(sources))):
        return None
    return sorted(sources)


def _aliases(sources: set[fx.Node]) -> Iterator[fx.Node]:
    """The nodes, and all that read them or a tensor that may share their memory: floating-point tensors do not."""
    seen = set(sources)
    pending = list(sources)
    while pending:
        node = pending.pop()
        yield node
        value = node.meta.get(_VALUE)
        if isinstance(value, Tensor) and value.is_floating_point():
            continue
        for user in node.users:
            if user not in seen:
                seen.add(user)
                pending.append(user)


def _writes(node: fx.Node) -> bool:
    """Whether an operation may write to one of its inputs, by its name: ``add_``, ``__iand__``, ``out=``."""
    if "out" in node.kwargs or node.target in _IN_PLACE:
        return True
    if getattr(node.target, "__module__", None) == operator.and_.__module__:  # its name is no sign of writing
        return False
    name = _name_of(node)
    return name in _IN_PLACE_METHODS or (name.endswith("_") and not name.endswith("__"))


class _Deterministic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations with random or uninitialised results."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_empty = func._overloadpacket._qualified_op_name.rpartition("::")[2].startswith(("empty", "new_empty"))
        if is_empty or torch.Tag.nondeterministic_seeded in func.tags:
            raise RuntimeError(f"{func} is not determined by its arguments")
        return func(*args, **(kwargs or {}))


# --- Repeated heads


def _without_repeated_heads(arguments: dict[str, Any]) -> dict[str, Any]:
    """Key and value before their heads were repeated, and ``enable_gqa``; nothing where they were not."""
    if arguments.get("enable_gqa"):
        return {}
    key, value = (_unrepeated(arguments[name]) for name in ("key", "value"))
    if key is None or value is None:
        return {}
    key_size, value_size = (node.meta[_VALUE].shape for node in (key, value))
    if key_size != value_size or key_size[-1] > _WIDEST_HEAD:
        return {}
    return {"key": key, "value": value, "enable_gqa": True}


def _unrepeated(node: Any) -> fx.Node | None:
    """The tensor (batch, heads, tokens, features) whose every head was repeated, by indexing, expanding, reshaping."""
    expanded = _input_of(node, "reshape")
    inserted = _input_of(expanded, "expand")
    source = _input_of(inserted, "getitem")
    if source is None or inserted is None or inserted.args[1:] != ((_ALL, _ALL, None, _ALL, _ALL),):
        return None
    sizes = [tuple(item.meta[_VALUE].shape) for item in (source, expanded, node) if item is not None]
    if len(sizes) != 3 or len(sizes[0]) != 4 or not all(isinstance(size, int) for shape in sizes for size in shape):
        return None
    (batch, heads, tokens, features), repeated, result = sizes
    groups = repeated[2]
    is_repeated = repeated == (batch, heads, groups, tokens, features)
    return source if is_repeated and result == (batch, heads * groups, tokens, features) else None


def _input_of(node: Any, name: str) -> fx.Node | None:
    """The first argument of a node that calls the function or method of that name; None if it calls another."""
    if not isinstance(node, fx.Node) or not node.args or _name_of(node).strip("_") != name:
        return None
    source = node.args[0]
    return source if isinstance(source, fx.Node) else None


def _name_of(node: fx.Node) -> str:
    """The name of the function or method that a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
