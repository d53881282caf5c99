"""The bytes that autograd saves for the backward pass, counted by saved-tensor hooks instead of the allocator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from bitplan.analysis.memory.fakes import allocated_bytes, components
from bitplan.executions.packed.saved_tensors import SavedTensorPacker


def saved_tensor_bytes(
    forward: Callable[[], Tensor], excluded: Iterable[Tensor] = (), packer: SavedTensorPacker | None = None
) -> int:
    """Bytes of the tensors that are saved for the backward pass at the end of `forward`, which returns the loss.

    :param excluded: parameters, buffers and the batch, which stay in memory anyway.
    :param packer: of a plan in packed execution, whose hooks are used instead of ours.
    """
    saved: list[Any] = []
    with _record_hooks(saved) if packer is None else _record_packer(packer, saved):
        loss = forward()
    saved.extend(vars(node) for node in _nodes(loss) if hasattr(node, "__dict__"))
    excluded_storages = {part.untyped_storage()._cdata for tensor in excluded for part in components(tensor)}
    sizes: dict[int, int] = {}
    for tensor in _tensors(saved, set()):
        for part in components(tensor):
            storage = part.untyped_storage()
            if storage._cdata not in excluded_storages:
                sizes[storage._cdata] = allocated_bytes(storage.nbytes(), part.device)
    return sum(sizes.values())


@contextmanager
def _record_hooks(saved: list[Any]) -> Iterator[None]:
    def record(tensor: Tensor) -> Tensor:
        # Saved tensors refer to this hook, and it to them: with their history, the graph would never be freed.
        saved.append(tensor.detach())
        return saved[-1]  # type: ignore[no-any-return]

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        yield


@contextmanager
def _record_packer(packer: SavedTensorPacker, saved: list[Any]) -> Iterator[None]:
    """Record through the plan's own hooks: two pairs of hooks cannot be active at once."""
    pack = packer.pack

    def record(tensor: Tensor) -> Any:
        saved.append(pack(tensor))
        return saved[-1]

    packer.pack = record  # type: ignore[method-assign]
    try:
        yield
    finally:
        del packer.pack


def _nodes(loss: Tensor) -> Iterator[Node]:
    seen: set[Node] = set()
    pending = [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        pending.extend(parent for parent, _ in node.next_functions)


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
    elif type(value).__module__ in _MODULES_OF_SAVED_TENSORS:
        inner = [getattr(value, name, None) for name in _attributes(value)]
    for item in inner:
        yield from _tensors(item, seen)


#: Modules whose objects stand for a saved tensor in packed execution; their attributes hold the bytes.
_MODULES_OF_SAVED_TENSORS = frozenset(
    {"bitplan.executions.packed.saved_tensors", "bitplan.executions.packed.recompute", "bitplan.numerics.packing"}
)


def _attributes(value: Any) -> Iterable[str]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return (*vars(value), *slots) if hasattr(value, "__dict__") else slots
