"""Graph passes for amax kernels: casts update their amax records themselves, and one kernel serves several matrices.

With delayed scaling, :func:`bitplan.runtime.statistics.observe_amax` raises a cell of a record to the amax that a cast
returned. In a functionalised graph that is a chain: select the record's row and its cell, take the maximum of the cell
and of the cast's amax, scatter it into the row and the row into the record. Further casts continue with the result, and
at the end of the graph it is copied into the record. Where nothing else in the graph reads or writes a record, its
casts are replaced by their variants with records (:mod:`bitplan.executions.native.recorded_cast`). What remains is a
copy of the record into itself, which Inductor removes.

The backward pass receives the forward pass's record as a separate tensor. The record still has the same values, because
autograd raises an error if it was modified in between, so the backward pass can raise the record itself.

With delayed scaling the kernel that computes an amax has work in the first step only, but is launched in every step.
For matrices that exist when a graph begins, the layers' weights, one launch serves several.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from bitplan.compiler.kernel_ops import OPERATIONS
from bitplan.compiler.patterns import VALUE_KEYS, call, is_view, move_before, result_of
from bitplan.executions.native.float8_cast import MAX_BATCH
from bitplan.executions.native.recorded_cast import CASTS, RecordingCast

#: Switches for comparisons: whether casts update records, and whether amax kernels are batched.
RECORDS_IN_CASTS = True
BATCHES_AMAX = True

_aten: Any = torch.ops.aten
_ours: Any = torch.ops.bitplan


def batch_amax_kernels(graph: fx.Graph, device: str = "cuda") -> int:
    """Replace several ``bitplan::float8_amax`` of graph inputs by one operation. Returns how many were replaced."""
    if not BATCHES_AMAX:
        return 0
    operation = OPERATIONS["float8_amax"]
    nodes = [
        node
        for node in graph.find_nodes(op="call_function", target=_ours.float8_amax.default)
        if isinstance(node.args[1], fx.Node)
        and all(map(_is_graph_input, node.all_input_nodes))
        and operation.can_inline(node, device)
    ]
    batches = [nodes[start : start + MAX_BATCH] for start in range(0, len(nodes), MAX_BATCH)]
    batches = [batch for batch in batches if len(batch) > 1]
    for batch in batches:
        _replace_by_batch(graph, batch)
    return sum(map(len, batches))


def _is_graph_input(node: fx.Node) -> bool:
    """Whether the node is an input of the graph or a view of one."""
    return node.op == "placeholder" or (is_view(node) and all(map(_is_graph_input, node.all_input_nodes)))


def _replace_by_batch(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    first = nodes[0]
    for node in nodes:
        for source in node.all_input_nodes:
            move_before(source, first)
    args: Any = ([node.args[0] for node in nodes], [node.args[1] for node in nodes])
    with graph.inserting_before(first):
        batch = call(graph, _ours.float8_amax_batch.default, args)
        for number, node in enumerate(nodes):
            node.replace_all_uses_with(result_of(graph, batch, number))
    for node in nodes:
        graph.erase_node(node)


# --- Casts that update records


def record_amax_in_casts(graph: fx.Graph, device: str = "cuda") -> int:
    """Let casts on `device` update the records that have no other use in this graph. Returns the number of casts."""
    if not RECORDS_IN_CASTS:
        return 0
    chains = [chain for node in graph.nodes if (chain := _match_chain(node, device)) is not None]
    casts = _group_by_cast(chains)
    while unsuitable := [cast for cast in casts.values() if not cast.is_replaceable(device)]:
        rejected = {id(chain) for cast in unsuitable for chain, _ in cast.uses}
        chains = [chain for chain in chains if id(chain) not in rejected]
        casts = _group_by_cast(chains)  # other casts that update the rejected records may not be replaceable now
    for cast in [casts[node] for node in graph.nodes if node in casts]:
        cast.replace(graph)
    _copy_outputs(graph, [chain for chain in chains if chain.is_output])
    for chain in chains:
        chain.close(graph)
    return len(casts)


def _copy_outputs(graph: fx.Graph, chains: list[_Chain]) -> None:
    """Copy the records that the graph returns for the backward pass, all by one kernel.

    Where the backward pass updates records itself, nothing reads the copies, but Inductor may reuse their memory.
    """
    if not chains:
        return
    output = graph.output_node()
    with graph.inserting_before(output):
        copies = call(graph, _aten._foreach_mul.Scalar, ([chain.current for chain in chains], 1.0))
        for number, chain in enumerate(chains):
            output.replace_input_with(chain.last, result_of(graph, copies, number))


@dataclass(eq=False)
class _CellUpdate:
    """A cell of a record, raised to the amax of a cast."""

    #: Flat index of the cell.
    cell: int
    #: The cast's amax result.
    cast_amax: fx.Node
    #: The maximum over its tiles, and the maximum of that and the cell.
    amax: fx.Node
    maximum: fx.Node
    #: The nodes around these: the scatters into record and row, and the selections of cell and row.
    scatter_record: fx.Node
    scatter_row: fx.Node
    select_cell: fx.Node
    select_row: fx.Node


@dataclass(eq=False)
class _Chain:
    """All uses of a record in a graph: updates of its cells and the copy into the record."""

    record: fx.Node
    copy: fx.Node
    updates: list[_CellUpdate]
    #: The record after the casts that were already replaced.
    current: fx.Node = field(init=False)

    def __post_init__(self) -> None:
        self.current = self.record

    @property
    def last(self) -> fx.Node:
        """The node that is copied into the record."""
        last = self.copy.args[1]
        assert isinstance(last, fx.Node)
        return last

    @property
    def is_output(self) -> bool:
        """Whether that node is an output of the graph, too."""
        return any(user.op == "output" for user in self.last.users)

    def close(self, graph: fx.Graph) -> None:
        """Copy the result of the replaced casts into the record, and erase the updates."""
        self.last.replace_all_uses_with(self.current)
        for update in self.updates:
            update_nodes = (
                update.scatter_record,
                update.scatter_row,
                update.maximum,
                update.select_cell,
                update.select_row,
                update.amax,
                update.cast_amax,
            )
            for node in update_nodes:  # readers first
                if not node._erased and not node.users:
                    graph.erase_node(node)


def _match_chain(copy: fx.Node, device: str) -> _Chain | None:
    """The chain that ends in `copy`; None if that is no copy into a record, or if the record has other uses."""
    if copy.target is not _aten.copy_.default or len(copy.args) != 2:
        return None
    record, node = copy.args
    if not isinstance(record, fx.Node) or not isinstance(node, fx.Node) or not _is_record(record, device):
        return None
    updates: list[_CellUpdate] = []
    readers = {copy}
    while node.op != "placeholder":
        update = None if _has_other_readers(node, readers) else _match_update(node)
        if update is None:
            return None
        readers = {node, update.select_row}
        node = node.all_input_nodes[0]
        updates.append(update)
    is_alike = _is_record(node, device) and node.meta["val"].shape == record.meta["val"].shape
    readers = {*readers, copy}
    if not updates or not is_alike or _has_other_readers(node, readers) or _has_other_readers(record, readers):
        return None
    return _Chain(record, copy, updates)


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


def _has_other_readers(node: fx.Node, readers: set[fx.Node]) -> bool:
    """Whether the node has readers besides these; the graph's output, which saves for backward, does not count."""
    return any(user not in readers and user.op != "output" for user in node.users)


def _match_update(scatter_record: fx.Node) -> _CellUpdate | None:
    """The nodes of one call of :func:`~bitplan.runtime.statistics.observe_amax`; None if they are something else."""
    before, scatter_row, row = _match_scatter(scatter_record)
    select_row, maximum, column = _match_scatter(scatter_row)
    if not _selects(select_row, before, row) or maximum is None or maximum.target is not _aten.maximum.default:
        return None
    select_cell, amax = maximum.all_input_nodes if len(maximum.all_input_nodes) == 2 else (None, None)
    if not _selects(select_cell, select_row, column) or amax is None or amax.target is not _aten.amax.default:
        return None
    cast_amax = amax.args[0]
    assert scatter_row is not None
    assert select_row is not None
    assert select_cell is not None
    only_users = {
        scatter_row: {scatter_record},
        select_row: {scatter_row, select_cell},
        select_cell: {maximum},
        maximum: {scatter_row},
    }
    if any(set(node.users) != users for node, users in only_users.items()) or amax.args[1:] not in ((), ([],), ([0],)):
        return None
    if amax.kwargs or not isinstance(cast_amax, fx.Node) or cast_amax.target is not operator.getitem:
        return None
    cast, position = cast_amax.args
    operation = CASTS.get(cast.target) if isinstance(cast, fx.Node) else None
    if operation is None or position not in operation.amax_results:
        return None
    cell = row * scatter_record.meta["val"].shape[1] + column
    return _CellUpdate(cell, cast_amax, amax, maximum, scatter_record, scatter_row, select_cell, select_row)


def _match_scatter(node: fx.Node | None) -> tuple[fx.Node | None, fx.Node | None, int]:
    """Target, source and index if `node` is a select_scatter along axis 0."""
    if node is None or node.target is not _aten.select_scatter.default or len(node.args) != 4 or node.kwargs:
        return None, None, -1
    target, source, axis, index = node.args
    is_match = isinstance(target, fx.Node) and isinstance(source, fx.Node) and axis == 0 and isinstance(index, int)
    return (target, source, index) if is_match else (None, None, -1)  # type: ignore[return-value]


def _selects(node: fx.Node | None, source: fx.Node | None, index: int) -> bool:
    return node is not None and index >= 0 and node.target is _aten.select.int and node.args == (source, 0, index)


@dataclass(eq=False)
class _CastNode:
    """A cast, and the records that its amax results update."""

    node: fx.Node
    operation: RecordingCast
    #: Position of the amax result -> chains and their updates.
    updates: dict[int, list[tuple[_Chain, _CellUpdate]]] = field(default_factory=dict)

    @property
    def uses(self) -> list[tuple[_Chain, _CellUpdate]]:
        """All updates, in the order of the results."""
        return [use for _, uses in sorted(self.updates.items()) for use in uses]

    def is_replaceable(self, device: str) -> bool:
        """Whether the variant with records covers every use of the cast's amax."""
        amax_results = {user for user in self.node.users if user.args[1] in self.operation.amax_results}
        amaxes = {amax for result in amax_results for amax in result.users}
        maxima = {reader for amax in amaxes for reader in amax.users}
        chains = {id(chain) for chain, _ in self.uses}
        return (
            OPERATIONS[self.operation.name].can_inline(self.node, device)
            and self.node.args[self.operation.returns_amax] is True
            and len(chains) == len(self.uses)
            and amaxes == {update.amax for _, update in self.uses}
            and maxima == {update.maximum for _, update in self.uses}
            and set(self.updates) == set(self.operation.amax_results)
            and all(len(uses) <= self.operation.max_records for uses in self.updates.values())
        )

    def replace(self, graph: fx.Graph) -> None:
        """Replace the cast by its variant with records."""
        operation = self.operation
        args: Any = operation.with_amax(self.node.args, False)
        kwargs: Any = {
            "records": [chain.current for chain, _ in self.uses],
            "cells": [update.cell for _, update in self.uses],
        }
        arg_values, kwarg_values = fx.map_arg((args, kwargs), lambda source: source.meta["val"])
        with graph.inserting_before(self.node):
            recorded = graph.call_function(operation.recorded, args, kwargs)
        recorded.meta.update({key: value for key, value in self.node.meta.items() if key not in VALUE_KEYS})
        recorded.meta["val"] = operation.recorded(*arg_values, **kwarg_values)
        for number, (chain, _) in enumerate(self.uses):
            with graph.inserting_after(recorded):
                chain.current = result_of(graph, recorded, operation.results + number)
        self.node.replace_all_uses_with(recorded)
        graph.erase_node(self.node)


def _group_by_cast(chains: list[_Chain]) -> dict[fx.Node, _CastNode]:
    casts: dict[fx.Node, _CastNode] = {}
    for chain in chains:
        for update in chain.updates:
            node, position = update.cast_amax.args
            assert isinstance(node, fx.Node)
            assert isinstance(position, int)
            cast = casts.setdefault(node, _CastNode(node, CASTS[node.target]))
            cast.updates.setdefault(position, []).append((chain, update))
    return casts
