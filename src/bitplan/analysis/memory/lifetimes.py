"""Estimates the memory that a compiled graph needs beyond that at its start.

Inductor fuses elementwise operations and reductions into kernels, and values inside a kernel take no memory. So only
these are counted: inputs and outputs of library kernels (products, convolutions, attention), results of reductions, and
outputs of the graph. As in Inductor, an elementwise kernel reuses the memory of an operand of the same size whose last
use it is.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from bitplan.compiler.torch_private import tree_leaves

_REDUCTIONS = frozenset(
    "sum mean amax amin max min prod var std var_mean std_mean argmax argmin any all logsumexp cumsum".split()  # noqa: SIM905
)
#: Operations that Inductor fuses, though they have no pointwise tag.
_ELEMENTWISE = frozenset(
    """
    convert_element_type _to_copy to clone copy copy_ full full_like empty zeros ones zeros_like ones_like arange iota
    where constant_pad_nd gather embedding index select_scatter slice_scatter cat bernoulli rand randn inductor_random
    inductor_seeds inductor_lookup_seed scalar_tensor lift_fresh_copy view_as_complex bitwise_and
    """.split()  # noqa: SIM905 - a paragraph of names reads better than a page of quotes
)


def extra_bytes(module: GraphModule, releases_inputs: bool) -> int:
    """The peak of allocated bytes beyond those at the start.

    :param releases_inputs: whether inputs are released after their last use, as the saved tensors of a backward pass.
    """
    return _Lifetimes(module.graph, releases_inputs).peak()


class _Lifetimes:
    def __init__(self, graph: Graph, releases_inputs: bool) -> None:
        self.nodes = list(graph.nodes)
        self.releases_inputs = releases_inputs
        #: Node -> the node that owns its memory, for views their base.
        self.owner: dict[Node, Node] = {}
        for node in self.nodes:
            source = _source_of_view(node)
            self.owner[node] = node if source is None else self.owner[source]
        self.allocated = {node for node in self.nodes if self._takes_memory(node)}

    def _takes_memory(self, node: Node) -> bool:
        if node.op == "placeholder":
            return True
        if node.op != "call_function" or self.owner[node] is not node:
            return False
        if not _is_elementwise(node):
            return True
        return any(user.op == "output" or not _is_fused(user) for user in self._users(node))

    def _users(self, node: Node) -> Iterator[Node]:
        """The users of a node and of its views."""
        for user in node.users:
            if self.owner[user] is user or user.op == "output":
                yield user
            else:
                yield from self._users(user)

    def _operands(self, node: Node) -> set[Node]:
        """The allocated nodes that a kernel reads, through views and fused operations."""
        operands: set[Node] = set()
        pending = [self.owner[operand] for operand in node.all_input_nodes]
        seen: set[Node] = set()
        while pending:
            operand = pending.pop()
            if operand in seen:
                continue
            seen.add(operand)
            if operand in self.allocated:
                operands.add(operand)
            else:
                pending.extend(self.owner[source] for source in operand.all_input_nodes)
        return operands

    def peak(self) -> int:
        kernels = [node for node in self.nodes if node.op == "call_function" and node in self.allocated]
        operands = {kernel: self._operands(kernel) for kernel in kernels}
        last_use: dict[Node, Node] = {}
        for kernel in kernels:
            last_use.update(dict.fromkeys(operands[kernel], kernel))
        output = self.nodes[-1]
        returned = self._operands(output)
        live = peak = 0
        for kernel in kernels:
            size = _count_bytes(kernel)
            released = [
                _count_bytes(operand)
                for operand in operands[kernel]
                if last_use[operand] is kernel and operand not in returned and self._is_released(operand)
            ]
            if not (_is_elementwise(kernel) and size in released):
                peak = max(peak, live + size)
            live += size - sum(released)
            peak = max(peak, live)
            if kernel not in last_use and kernel not in returned:
                live -= size
        return peak

    def _is_released(self, node: Node) -> bool:
        if node.op != "placeholder":
            return True
        # Parameters and inputs of the model, which AOTAutograd names primals, stay allocated.
        return self.releases_inputs and not node.name.startswith("primals")


def _op_name(node: Node) -> str:
    target: Any = node.target
    packet = getattr(target, "overloadpacket", target)
    return str(getattr(packet, "__name__", packet))


def _source_of_view(node: Node) -> Node | None:
    if node.op != "call_function":
        return None
    is_view = (
        node.target is operator.getitem or getattr(node.target, "is_view", False) or _op_name(node) == "_unsafe_view"
    )
    return node.all_input_nodes[0] if is_view and node.all_input_nodes else None


def _is_elementwise(node: Node) -> bool:
    tags: Iterable[Any] = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or _op_name(node) in _ELEMENTWISE


def _is_fused(node: Node) -> bool:
    return _is_elementwise(node) or _op_name(node) in _REDUCTIONS


def _count_bytes(node: Node) -> int:
    values = [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]
    return sum(value.numel() * value.element_size() for value in values)
