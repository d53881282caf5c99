"""Largest magnitudes of several matrices, looked for by one kernel.

With scales from past steps the kernel that looks for a matrix's largest magnitude has something to do in the first step
only, but it is launched in all. For matrices that are there when a graph begins, the layers' weights, one launch does
for several.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from bitplan.compiler.gated_fusion import bring
from bitplan.compiler.kernel_ops import OPERATIONS
from bitplan.compiler.patterns import is_view
from bitplan.executions.native.float8_cast import JOINED

#: Whether compiled graphs have them joined; to compare.
JOINS = True

_ours: Any = torch.ops.bitplan


def join_amax_kernels(graph: fx.Graph, device: str = "cuda") -> int:
    """Replace several ``bitplan::float8_amax`` of what the graph is given by one operation. How many were replaced."""
    if not JOINS:
        return 0
    operation = OPERATIONS["float8_amax"]
    found = [
        node
        for node in graph.find_nodes(op="call_function", target=_ours.float8_amax.default)
        if isinstance(node.args[1], fx.Node)
        and all(map(_is_given, node.all_input_nodes))
        and operation.can_inline(node, device)
    ]
    groups = [found[start : start + JOINED] for start in range(0, len(found), JOINED)]
    for group in groups:
        if len(group) > 1:
            _join(graph, group)
    return sum(len(group) for group in groups if len(group) > 1)


def _is_given(node: fx.Node) -> bool:
    """Whether it is there when the graph begins, as it is or seen otherwise."""
    return node.op == "placeholder" or (is_view(node) and all(map(_is_given, node.all_input_nodes)))


def _join(graph: fx.Graph, group: list[fx.Node]) -> None:
    place = group[0]
    for node in group:
        for each in node.all_input_nodes:
            bring(each, place)
    given: Any = ([node.args[0] for node in group], [node.args[1] for node in group])
    with graph.inserting_before(place):
        joined = graph.call_function(_ours.float8_amax_joined.default, given)
        joined.meta["val"] = joined.target(*fx.map_arg(given, lambda each: each.meta["val"]))  # type: ignore[operator]
        for number, node in enumerate(group):
            part = graph.call_function(operator.getitem, (joined, number))
            part.meta["val"] = joined.meta["val"][number]
            node.replace_all_uses_with(part)
    for node in group:
        graph.erase_node(node)
