"""Records of largest magnitudes, written by the casts themselves (see :mod:`bitplan.executions.native.recorded_cast`).

In a graph that torch has made free of changes in place, what :func:`bitplan.runtime.statistics.observe_amax` does is a
chain: the record's row and its cell are selected, the larger of that and the largest of what a cast tells is put into
the row, the row into the record; further casts go on with what came out, and at the end all of it is copied into the
record. Where that is all that happens to a record, the casts are given the record, and what is left is one copy of it
into itself, which Inductor leaves out.

The backward pass begins with what the forward pass made of the record, which it is given as a tensor of its own. The
record still has just that in it, since autograd refuses to go back where something has changed it in between; so it is
the record that is raised.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from bitplan.compiler.kernel_ops import OPERATIONS
from bitplan.executions.native.recorded_cast import CASTS, RecordingCast

#: Whether casts in compiled graphs write into the records; to compare.
NOTES = True

_aten: Any = torch.ops.aten
#: What is told of a node besides its value.
_VALUES = ("val", "eager_input_vals", "tensor_meta")


def record_amax_in_casts(graph: fx.Graph, device: str = "cuda") -> int:
    """Let casts on that device raise the records that hold nothing else in this graph. How many casts there were."""
    if not NOTES:
        return 0
    chains = [chain for node in graph.nodes if (chain := _chain(node, device)) is not None]
    casts = _by_cast(chains)
    while unfit := {id(chain) for cast in casts.values() if not cast.is_fit(device) for chain, _ in cast.places}:
        chains = [chain for chain in chains if id(chain) not in unfit]
        casts = _by_cast(chains)  # of what is left: other casts that wrote into the same records may not be fit now
    for cast in [casts[node] for node in graph.nodes if node in casts]:
        cast.note(graph)
    _keep(graph, [chain for chain in chains if chain.is_kept])
    for chain in chains:
        chain.close(graph)
    return len(casts)


def _keep(graph: fx.Graph, chains: list[_Chain]) -> None:
    """What leaves the graph, to begin the backward pass with, stays a copy: all of them made by one kernel.

    Nothing reads it where the backward pass raises records itself; but Inductor may use its memory again there.
    """
    if not chains:
        return
    given = ([chain.now for chain in chains], 1.0)
    output = graph.output_node()
    with graph.inserting_before(output):
        copies = graph.call_function(_aten._foreach_mul.Scalar, given)
        copies.meta["val"] = _aten._foreach_mul.Scalar(*fx.map_arg(given, lambda each: each.meta["val"]))
        for number, chain in enumerate(chains):
            copy = graph.call_function(operator.getitem, (copies, number))
            copy.meta["val"] = copies.meta["val"][number]
            output.replace_input_with(chain.last, copy)


@dataclass(eq=False)
class _Raise:
    """One cell of a record, raised to the largest of what a cast tells."""

    cell: int
    #: Which of a cast's results.
    told: fx.Node
    #: The largest of these, and the larger of that and the cell.
    top: fx.Node
    larger: fx.Node
    #: What is computed besides, the last first.
    others: tuple[fx.Node, ...]


@dataclass(eq=False)
class _Chain:
    """All that happens to a record."""

    record: fx.Node
    copy: fx.Node
    raises: list[_Raise]
    #: What the record is after the casts that have noted.
    now: fx.Node = field(init=False)

    def __post_init__(self) -> None:
        self.now = self.record

    @property
    def last(self) -> fx.Node:
        """What is copied into the record."""
        last = self.copy.args[1]
        assert isinstance(last, fx.Node)
        return last

    @property
    def is_kept(self) -> bool:
        """Whether that leaves the graph, too."""
        return any(user.op == "output" for user in self.last.users)

    def close(self, graph: fx.Graph) -> None:
        """Copy what the casts have made of the record, in place of what was copied."""
        self.last.replace_all_uses_with(self.now)
        for each in self.raises:
            outer, row, cell, old = each.others
            for node in (outer, row, each.larger, cell, old, each.top, each.told):
                if not node._erased and not node.users:
                    graph.erase_node(node)


def _chain(copy: fx.Node, device: str) -> _Chain | None:
    """What is copied into a record that nothing else in the graph reads or changes; None where it is something else."""
    if copy.target is not _aten.copy_.default or len(copy.args) != 2:
        return None
    record, node = copy.args
    if not isinstance(record, fx.Node) or not isinstance(node, fx.Node) or not _is_record(record, device):
        return None
    raises: list[_Raise] = []
    readers = {copy}
    while node.op != "placeholder":
        found = None if _others(node, readers) else _raised(node)
        if found is None:
            return None
        readers = {node, found.others[-1]}
        node = node.all_input_nodes[0]
        raises.append(found)
    first = node.meta["val"]
    is_same_kind = _is_record(node, device) and first.shape == record.meta["val"].shape
    if not raises or not is_same_kind or _others(node, {*readers, copy}) or _others(record, {*readers, copy}):
        return None
    return _Chain(record, copy, raises)


def _is_record(node: fx.Node, device: str) -> bool:
    value = node.meta.get("val")
    return (
        node.op == "placeholder"
        and isinstance(value, Tensor)
        and value.dim() == 2
        and value.dtype == torch.float32
        and value.device.type == device
        and all(isinstance(size, int) for size in value.shape)
        and value.is_contiguous()
    )


def _others(node: fx.Node, readers: set[fx.Node]) -> bool:
    """Whether something reads a node besides these, and what leaves the graph: that is what is kept for backward."""
    return any(user not in readers and user.op != "output" for user in node.users)


def _raised(outer: fx.Node) -> _Raise | None:
    """How what :func:`~bitplan.runtime.statistics.observe_amax` does once is written in a graph; None where it is
    not."""
    before, row, number = _put(outer)
    old, larger, column = _put(row)
    if not _is_selected(old, before, number) or larger is None or larger.target is not _aten.maximum.default:
        return None
    cell, top = larger.all_input_nodes if len(larger.all_input_nodes) == 2 else (None, None)
    if not _is_selected(cell, old, column) or top is None or top.target is not _aten.amax.default:
        return None
    told = top.args[0]
    assert row is not None
    assert old is not None
    assert cell is not None
    alone = {row: {outer}, old: {row, cell}, cell: {larger}, larger: {row}}
    if any(set(node.users) != users for node, users in alone.items()) or top.args[1:] not in ((), ([],), ([0],)):
        return None
    if top.kwargs or not isinstance(told, fx.Node) or told.target is not operator.getitem:
        return None
    cast, which = told.args
    kind = CASTS.get(cast.target) if isinstance(cast, fx.Node) else None
    if kind is None or which not in kind.tops:
        return None
    width = outer.meta["val"].shape[1]
    return _Raise(number * width + column, told, top, larger, (outer, row, cell, old))


def _put(node: fx.Node | None) -> tuple[fx.Node | None, fx.Node | None, int]:
    """What is put into what, and at which place of its first axis."""
    if node is None or node.target is not _aten.select_scatter.default or len(node.args) != 4 or node.kwargs:
        return None, None, -1
    whole, part, axis, place = node.args
    is_found = isinstance(whole, fx.Node) and isinstance(part, fx.Node) and axis == 0 and isinstance(place, int)
    return (whole, part, place) if is_found else (None, None, -1)  # type: ignore[return-value]


def _is_selected(node: fx.Node | None, whole: fx.Node | None, place: int) -> bool:
    return node is not None and place >= 0 and node.target is _aten.select.int and node.args == (whole, 0, place)


@dataclass(eq=False)
class _Cast:
    """A cast, and where what it tells is noted."""

    node: fx.Node
    kind: RecordingCast
    #: Which result -> records and cells.
    noted: dict[int, list[tuple[_Chain, _Raise]]] = field(default_factory=dict)

    @property
    def places(self) -> list[tuple[_Chain, _Raise]]:
        """All of these, in the order of the results."""
        return [place for _, each in sorted(self.noted.items()) for place in each]

    def is_fit(self, device: str) -> bool:
        """Whether the cast can note all that it tells, to all that want to know."""
        told = {user for user in self.node.users if user.args[1] in self.kind.tops}
        tops = {top for each in told for top in each.users}
        larger = {reader for top in tops for reader in top.users}
        chains = {id(chain) for chain, _ in self.places}
        return (
            OPERATIONS[self.kind.name].can_inline(self.node, device)
            and self.node.args[self.kind.gathers] is True
            and len(chains) == len(self.places)
            and tops == {raised.top for _, raised in self.places}
            and larger == {raised.larger for _, raised in self.places}
            and set(self.noted) == set(self.kind.tops)
            and all(len(each) <= self.kind.most for each in self.noted.values())
        )

    def note(self, graph: fx.Graph) -> None:
        """Put the operation that notes in its place."""
        kind = self.kind
        given: Any = kind.telling(self.node.args, False)
        places: Any = {
            "records": [chain.now for chain, _ in self.places],
            "cells": [raised.cell for _, raised in self.places],
        }
        args, kwargs = fx.map_arg((given, places), lambda each: each.meta["val"])
        with graph.inserting_before(self.node):
            noting = graph.call_function(kind.noted, given, places)
        noting.meta.update({key: value for key, value in self.node.meta.items() if key not in _VALUES})
        noting.meta["val"] = kind.noted(*args, **kwargs)
        for number, (chain, _) in enumerate(self.places):
            with graph.inserting_after(noting):
                chain.now = graph.call_function(operator.getitem, (noting, kind.results + number))
            chain.now.meta["val"] = noting.meta["val"][kind.results + number]
        self.node.replace_all_uses_with(noting)
        graph.erase_node(self.node)


def _by_cast(chains: list[_Chain]) -> dict[fx.Node, _Cast]:
    casts: dict[fx.Node, _Cast] = {}
    for chain in chains:
        for raised in chain.raises:
            node, which = raised.told.args
            assert isinstance(node, fx.Node)
            assert isinstance(which, int)
            cast = casts.setdefault(node, _Cast(node, CASTS[node.target]))
            cast.noted.setdefault(which, []).append((chain, raised))
    return casts
