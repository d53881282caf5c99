"""What autograd keeps for the backward pass, counted at its own hooks: a second opinion beside the allocator's.

The allocator says how much more lives after a forward pass than before; here every tensor that autograd wants to keep
is looked at, and each piece of memory is counted once. Bitplan's own functions also hold bits and codes that are no
tensors of autograd's, so the graph's nodes are asked for what they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from bitplan.keeping import Keeper
from bitplan.memory.storages import held, parts_of


def kept_bytes(
    forward: Callable[[], Tensor], living_anyway: Iterable[Tensor] = (), keeper: Keeper | None = None
) -> int:
    """Bytes that are kept for the backward pass when `forward`, which returns the loss, has ended.

    :param living_anyway: parameters, buffers and the batch, which are not kept for autograd's sake.
    :param keeper: of a plan in packed execution, whose hooks are asked instead of ours.
    """
    kept: list[Any] = []
    with _hooks(kept) if keeper is None else _listening(keeper, kept):
        loss = forward()
    kept.extend(vars(node) for node in _nodes(loss) if hasattr(node, "__dict__"))
    known = {part.untyped_storage()._cdata for tensor in living_anyway for part in parts_of(tensor)}
    sizes: dict[int, int] = {}
    for tensor in _tensors(kept, set()):
        for part in parts_of(tensor):
            storage = part.untyped_storage()
            if storage._cdata not in known:
                sizes[storage._cdata] = held(storage.nbytes(), part.device)
    return sum(sizes.values())


@contextmanager
def _hooks(kept: list[Any]) -> Iterator[None]:
    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield


@contextmanager
def _listening(keeper: Keeper, kept: list[Any]) -> Iterator[None]:
    """The plan's own hooks, overheard: two pairs of hooks cannot be at work at once."""
    own = keeper.pack

    def noted(tensor: Tensor) -> Any:
        kept.append(own(tensor))
        return kept[-1]

    keeper.pack = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        del keeper.pack


def _nodes(loss: Tensor) -> Iterator[Node]:
    seen: set[Node] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting.extend(following for following, _ in node.next_functions)


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """All tensors in lists, dictionaries and bitplan's own small objects."""
    if isinstance(value, Tensor):
        yield value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, (list, tuple, set)):
        inner = value
    elif is_dataclass(value) and not isinstance(value, type):
        inner = [getattr(value, field.name) for field in fields(value)]
    elif type(value).__module__ in ("bitplan.keeping", "bitplan.sparing", "bitplan.numbers.packing"):
        inner = [getattr(value, name, None) for name in _attributes(value)]
    for item in inner:
        yield from _tensors(item, seen)


def _attributes(value: Any) -> Iterable[str]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return (*vars(value), *slots) if hasattr(value, "__dict__") else slots
