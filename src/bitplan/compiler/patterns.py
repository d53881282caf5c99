"""Casts in a graph, what computes the tensors that they read, and how one operation takes the place of both.

When a graph has been cut into forward and backward, torch's functions are already decomposed.
What to look for is had by spelling out a function by torch's own rules, whatever these are in its version; conversions
to wider types change nothing, so they are looked through. A tensor that something else reads stays as it is. What is
looked for is in :mod:`bitplan.compiler.gated_fusion` and :mod:`bitplan.compiler.norm_fusion`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from bitplan.compiler.torch_private import FakeTensorMode, get_default_op_list, select_decomp_table

aten: Any = torch.ops.aten
ours: Any = torch.ops.bitplan
convert: Any = torch.ops.prims.convert_element_type.default
_COMMUTES = (aten.mul.Tensor, aten.add.Tensor)
#: What is told of a node besides its value.
_VALUES = ("val", "eager_input_vals", "tensor_meta")
#: What stands for the inputs of a pattern, by their names.
Match = dict[str, fx.Node]
#: Whether a node can stand for the input of that name.
InputFilter = Callable[[str, fx.Node], bool]


@dataclass(frozen=True, eq=False)
class CastPattern:
    """A cast in a graph, by a scale from past steps that is a power of two, and what there is around it."""

    node: fx.Node
    #: What it casts, behind views; nothing else reads that.
    source: fx.Node
    #: What looks for the largest magnitude, if that is in this graph.
    amax: fx.Node | None
    #: Casts that wait for the source without looking at it.
    waiting: tuple[fx.Node, ...]

    @property
    def args(self) -> tuple[Any, ...]:
        """All nine."""
        given = self.node.args
        return (*given, *[None] * (9 - len(given)))

    @property
    def matrix(self) -> tuple[int, int]:
        rows, features = self.args[0].meta["val"].shape
        return rows, features

    @property
    def first(self) -> fx.Node:
        """Where the source is read first."""
        return self.amax or self.node


def find_casts(graph: fx.Graph, device: str) -> list[CastPattern]:
    """Those on a device whose input is in bfloat16, of known size, and read by nothing else."""
    found = [each for each in map(_find_cast, graph.nodes) if each is not None]
    return [each for each in found if each.source.meta["val"].device.type == device]


def _find_cast(node: fx.Node) -> CastPattern | None:
    if node.target is not ours.float8_cast.default:
        return None
    x, _, parts, reach, is_power = node.args[:5]
    source = source_of_view(x) if isinstance(x, fx.Node) else None
    if source is None or not isinstance(parts, fx.Node) or not isinstance(reach, fx.Node) or not is_power:
        return None
    value = source.meta["val"]
    sizes_known = all(isinstance(size, int) for size in value.shape)
    if source.op != "call_function" or value.dtype != torch.bfloat16 or not sizes_known or not value.numel():
        return None
    amax, waiting = None, []
    for reader, seen in readers(source):
        if reader is parts and reader.target is ours.float8_amax.default:
            amax = reader
        elif reader.target is node.target and reader.args[0] is not seen and seen not in reader.args[1:8]:
            waiting.append(reader)
        elif reader is not node:
            return None
    return CastPattern(node, source, amax, tuple(dict.fromkeys(waiting)))


# --- what lies where ----------------------------------------------------------------------------------------


def source_of_view(node: fx.Node) -> fx.Node | None:
    """What a node is a view of, in the same order in memory; None where the order is another."""
    while _is_dense(node) and is_view(node):
        node = node.all_input_nodes[0]
    return node if _is_dense(node) else None


def is_view(node: fx.Node) -> bool:
    """Also reshaping, which Inductor makes of views."""
    return node.target is aten.reshape.default or bool(get_default_op_list().is_view(node))


def _is_dense(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_contiguous()


def readers(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """What reads a node, behind views of it, and which view it reads."""
    for user in node.users:
        if is_view(user):
            yield from readers(user)
        else:
            yield user, node


def is_given(node: fx.Node) -> bool:
    """Whether a tensor lies densely in memory before any kernel that Inductor writes: it came, or an operation made it.

    What a kernel of Inductor computes it goes on with as it is: it is rounded only in memory, for those who read that.
    """
    kinds = get_default_op_list()
    source = source_of_view(node)
    if source is None:
        return False
    if source.target is operator.getitem:
        made_by = source.all_input_nodes[0]
        return not kinds.is_view(made_by) and not kinds.is_fusible(made_by)
    return source.op == "placeholder" or bool(kinds.is_compute_intensive(source))


def is_kept(node: fx.Node) -> bool:
    """Whether a tensor lies densely in memory since it leaves the graph."""
    source = source_of_view(node)
    return source is not None and any(user.op == "output" for user in source.users)


# --- what to look for ---------------------------------------------------------------------------------------


def traced_pattern(function: Callable[..., Tensor], **inputs: tuple[int, ...]) -> fx.Node:
    """The result of a function of bfloat16 tensors of these sizes, as in a graph; its inputs are told their names."""
    with torch.inference_mode(False), FakeTensorMode():  # whatever the graph is compiled for
        given = [torch.empty(size, dtype=torch.bfloat16) for size in inputs.values()]
        graph = make_fx(function, decomposition_table=select_decomp_table())(*given).graph
    for node, name in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta["name"] = name
    result = graph.output_node().args[0]
    assert isinstance(result, fx.Node)
    return result


def match_pattern(pattern: fx.Node, node: fx.Node, fits: InputFilter) -> Match | None:
    """What stands for the pattern's inputs where `node` is computed as it says."""
    found: Match = {}
    return found if _match(pattern, node, found, fits) else None


def _match(pattern: Any, node: Any, found: Match, fits: InputFilter) -> bool:
    if not isinstance(pattern, fx.Node) or not isinstance(node, fx.Node):
        return type(pattern) is type(node) and bool(pattern == node)
    pattern, node = _narrow(pattern), _narrow(node)
    name = pattern.meta.get("name")
    if name is not None:
        return found.setdefault(name, node) is node and fits(name, node)
    if pattern.target is not node.target or pattern.kwargs != node.kwargs or len(pattern.args) != len(node.args):
        return False
    orders = [node.args, node.args[::-1]] if pattern.target in _COMMUTES else [node.args]
    for args in orders:
        tried = dict(found)
        if all(_match(one, other, tried, fits) for one, other in zip(pattern.args, args, strict=True)):
            found.update(tried)
            return True
    return False


def _narrow(node: fx.Node) -> fx.Node:
    """What a node was before it was converted to wider types."""
    while _is_conversion(node) and _is_wider(node, node.all_input_nodes[0]):
        node = node.all_input_nodes[0]
    return node


def _is_conversion(node: fx.Node) -> bool:
    return node.target in (convert, aten.detach.default, aten.alias.default)


def _is_wider(node: fx.Node, than: fx.Node) -> bool:
    wide: torch.dtype = node.meta["val"].dtype
    narrow: torch.dtype = than.meta["val"].dtype
    return wide == narrow or (narrow.is_floating_point and wide.is_floating_point and wide.itemsize > narrow.itemsize)


# --- what takes its place -----------------------------------------------------------------------------------


def viewed(graph: fx.Graph, node: fx.Node, size: tuple[int, ...]) -> fx.Node:
    if node.meta["val"].shape == size:
        return node
    return call(graph, aten.view.default, (node, list(size)), node)


def call(graph: fx.Graph, target: Any, given: tuple[Any, ...], like: fx.Node) -> fx.Node:
    node = graph.call_function(target, given)
    node.meta.update({key: value for key, value in like.meta.items() if key not in _VALUES})
    node.meta["val"] = target(*fx.map_arg(given, lambda each: each.meta["val"]))
    return node


def part(graph: fx.Graph, whole: fx.Node, number: int) -> fx.Node:
    one = graph.call_function(operator.getitem, (whole, number))
    one.meta["val"] = whole.meta["val"][number]
    return one


def replace_cast(graph: fx.Graph, cast: CastPattern, joined: fx.Node, offset: int, instead: fx.Node) -> None:
    """Let the readers of a cast's results read those of `joined`, which begin at `offset`; what was cast is gone.

    What waits for it waits for its codes or, if it comes before, for what they are made of: `instead`.
    """
    for user in list(cast.node.users):
        with graph.inserting_after(joined):
            one = part(graph, joined, offset + int(user.args[1]))  # type: ignore[arg-type]
        user.replace_all_uses_with(one)
        graph.erase_node(user)
    for node in cast.waiting:
        if not node._erased:
            later = next(each for each in joined.users if each.target is operator.getitem)
            node.args = (*node.args[:8], later if joined < node else instead)
    _erase(graph, cast)


def _erase(graph: fx.Graph, cast: CastPattern) -> None:
    """A cast without readers, and what was computed for it alone."""
    waiting = [cast.node, *([] if cast.amax is None else [cast.amax])]
    while waiting:
        node = waiting.pop()
        if node._erased or node.users or node.op != "call_function" or node.is_impure():
            continue
        waiting.extend(node.all_input_nodes)
        graph.erase_node(node)
