"""Matching float8 casts and the computation of their inputs in a graph, and replacing both by one operation.

Graph passes run after partitioning, when torch's functions are already decomposed. A pattern is therefore made by
tracing a function with torch's own decompositions, whatever these are in its version. Conversions to wider dtypes
change no value, so matching ignores them. Tensors that have other readers are left as they are. The patterns are in
:mod:`bitplan.compiler.gated_fusion` and :mod:`bitplan.compiler.norm_fusion`.
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
#: Products that torch does not list as such.
GROUPED = [aten._grouped_mm.default, aten._scaled_grouped_mm.default]
_COMMUTATIVE = (aten.mul.Tensor, aten.add.Tensor)
#: Metadata of a node that describes its value.
VALUE_KEYS = ("val", "eager_input_vals", "tensor_meta")
#: The nodes that match a pattern's inputs, by the inputs' names.
Match = dict[str, fx.Node]
#: Whether a node can be the input of that name.
InputFilter = Callable[[str, fx.Node], bool]


@dataclass(frozen=True, eq=False)
class CastPattern:
    """A cast with delayed scaling by powers of two, and the nodes around it."""

    node: fx.Node
    #: The tensor that is cast, before views; the cast is its only reader.
    source: fx.Node
    #: The node that computes the source's amax, if it is in this graph.
    amax: fx.Node | None
    #: Casts that wait for the source (their argument `after`) without reading it.
    waiting: tuple[fx.Node, ...]

    @property
    def args(self) -> tuple[Any, ...]:
        """All nine arguments of ``float8_cast``."""
        return _arguments(self.node)

    @property
    def sources(self) -> fx.Node | None:
        """The rows in the padded columns, where these are padded."""
        sources = self.node.args[1] if self.node.target is ours.float8_padded_cast.default else None
        return sources if isinstance(sources, fx.Node) else None

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and features of the matrix that is cast."""
        rows, features = self.args[0].meta["val"].shape
        return rows, features

    @property
    def first(self) -> fx.Node:
        """The first reader of the source."""
        return self.amax or self.node


def find_casts(graph: fx.Graph, device: str) -> list[CastPattern]:
    """The casts on a device whose input is in bfloat16, has a static shape and no other readers."""
    casts = [cast for cast in map(_find_cast, graph.nodes) if cast is not None]
    return [cast for cast in casts if cast.source.meta["val"].device.type == device]


def _find_cast(node: fx.Node) -> CastPattern | None:
    if node.target not in (ours.float8_cast.default, ours.float8_padded_cast.default):
        return None
    x, _, partial_amax, history_amax, is_power, *_ = _arguments(node)
    source = source_of_view(x) if isinstance(x, fx.Node) else None
    is_delayed = isinstance(partial_amax, fx.Node) and isinstance(history_amax, fx.Node)
    if source is None or not is_delayed or not is_power:
        return None
    value = source.meta["val"]
    is_static = all(isinstance(size, int) for size in value.shape)
    if source.op != "call_function" or value.dtype != torch.bfloat16 or not is_static or not value.numel():
        return None
    amax, waiting = None, []
    for reader, view in readers(source):
        if reader is partial_amax and reader.target is ours.float8_amax.default:
            amax = reader
        elif reader.target is ours.float8_cast.default and reader.args[0] is not view and view not in reader.args[1:8]:
            waiting.append(reader)
        elif reader is not node:
            return None
    return CastPattern(node, source, amax, tuple(dict.fromkeys(waiting)))


def _arguments(cast: fx.Node) -> tuple[Any, ...]:
    """The nine arguments of ``float8_cast``, without the sources of a padded cast, which always writes columns."""
    args = cast.args
    if cast.target is ours.float8_padded_cast.default:
        x, _, dtype, partial_amax, history_amax, is_power, as_rows, *rest = args
        args = (x, dtype, partial_amax, history_amax, is_power, as_rows, True, *rest)
    return (*args, *[None] * (9 - len(args)))


# --- Tensors in memory


def source_of_view(node: fx.Node) -> fx.Node | None:
    """The tensor that a node is a view of, in the same memory order; None if the order differs."""
    while _is_contiguous(node) and is_view(node):
        node = node.all_input_nodes[0]
    return node if _is_contiguous(node) else None


def is_view(node: fx.Node) -> bool:
    """Whether the node is a view, or the reshape that Inductor makes of one."""
    return node.target is aten.reshape.default or bool(get_default_op_list().is_view(node))


def _is_contiguous(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_contiguous()


def readers(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The readers of a node and of its views, each with the node or view that it reads."""
    for user in node.users:
        if is_view(user):
            yield from readers(user)
        else:
            yield user, node


def is_external(node: fx.Node) -> bool:
    """Whether a tensor is contiguous in memory and not computed by an Inductor kernel: a graph input, or the result of
    an operation that Inductor calls.

    Inside its kernels Inductor continues with unrounded values; only what it stores is rounded.
    """
    kinds = get_default_op_list()
    source = source_of_view(node)
    if source is None:
        return False
    if source.target is operator.getitem:
        producer = source.all_input_nodes[0]
        return not kinds.is_view(producer) and not kinds.is_fusible(producer)
    return source.op == "placeholder" or bool(kinds.is_compute_intensive(source)) or source.target in GROUPED


def is_output(node: fx.Node) -> bool:
    """Whether a tensor is contiguous in memory because the graph returns it."""
    source = source_of_view(node)
    return source is not None and any(user.op == "output" for user in source.users)


# --- Matching


def trace_pattern(function: Callable[..., Tensor], **inputs: tuple[int, ...]) -> fx.Node:
    """The result node of a function of bfloat16 tensors with these shapes; its input nodes carry their names."""
    with torch.inference_mode(False), FakeTensorMode():  # whatever mode the graph is compiled in
        tensors = [torch.empty(size, dtype=torch.bfloat16) for size in inputs.values()]
        graph = make_fx(function, decomposition_table=select_decomp_table())(*tensors).graph
    for node, name in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta["name"] = name
    result = graph.output_node().args[0]
    assert isinstance(result, fx.Node)
    return result


def match_pattern(pattern: fx.Node, node: fx.Node, accepts: InputFilter) -> Match | None:
    """The nodes that are the pattern's inputs if `node` is computed as the pattern is; otherwise None."""
    match: Match = {}
    return match if _match(pattern, node, match, accepts) else None


def _match(pattern: Any, node: Any, match: Match, accepts: InputFilter) -> bool:
    if not isinstance(pattern, fx.Node) or not isinstance(node, fx.Node):
        return type(pattern) is type(node) and bool(pattern == node)
    pattern, node = _before_widening(pattern), _before_widening(node)
    name = pattern.meta.get("name")
    if name is not None:
        return match.setdefault(name, node) is node and accepts(name, node)
    if pattern.target is not node.target or pattern.kwargs != node.kwargs or len(pattern.args) != len(node.args):
        return False
    orders = [node.args, node.args[::-1]] if pattern.target in _COMMUTATIVE else [node.args]
    for args in orders:
        attempt = dict(match)
        if all(_match(expected, arg, attempt, accepts) for expected, arg in zip(pattern.args, args, strict=True)):
            match.update(attempt)
            return True
    return False


def _before_widening(node: fx.Node) -> fx.Node:
    """The node before its conversions to wider dtypes."""
    while _is_conversion(node) and _is_wider(node, node.all_input_nodes[0]):
        node = node.all_input_nodes[0]
    return node


def _is_conversion(node: fx.Node) -> bool:
    return node.target in (convert, aten.detach.default, aten.alias.default)


def _is_wider(node: fx.Node, source: fx.Node) -> bool:
    wide: torch.dtype = node.meta["val"].dtype
    narrow: torch.dtype = source.meta["val"].dtype
    return wide == narrow or (narrow.is_floating_point and wide.is_floating_point and wide.itemsize > narrow.itemsize)


# --- Replacing


def view_as(graph: fx.Graph, node: fx.Node, size: tuple[int, ...]) -> fx.Node:
    if node.meta["val"].shape == size:
        return node
    return call(graph, aten.view.default, (node, list(size)), node)


def call(graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node | None = None) -> fx.Node:
    """Insert a call of an operation, with the metadata of the node `like`, which it replaces."""
    node = graph.call_function(target, args)
    if like is not None:
        node.meta.update({key: value for key, value in like.meta.items() if key not in VALUE_KEYS})
    node.meta["val"] = target(*fx.map_arg(args, lambda source: source.meta["val"]))
    return node


def result_of(graph: fx.Graph, node: fx.Node, number: int) -> fx.Node:
    """Insert the getitem of one of a node's results."""
    result = graph.call_function(operator.getitem, (node, number))
    result.meta["val"] = node.meta["val"][number]
    return result


def move_before(node: fx.Node, position: fx.Node) -> None:
    """Move a node, and what it reads, before `position`."""
    if not node < position:
        for source in node.all_input_nodes:
            move_before(source, position)
        position.prepend(node)


def replace_cast(graph: fx.Graph, cast: CastPattern, fused: fx.Node, offset: int, source: fx.Node) -> None:
    """Replace the results of a cast by those of `fused` from `offset` on, and erase the cast and its input.

    Casts that waited for the input wait for the codes or, if they come before these, for `source`, of which the input
    was computed.
    """
    for user in list(cast.node.users):
        with graph.inserting_after(fused):
            result = result_of(graph, fused, offset + int(user.args[1]))  # type: ignore[arg-type]
        user.replace_all_uses_with(result)
        graph.erase_node(user)
    for node in cast.waiting:
        if not node._erased:
            codes = next(user for user in fused.users if user.target is operator.getitem)
            node.args = (*node.args[:8], codes if fused < node else source)
    _erase(graph, cast)


def _erase(graph: fx.Graph, cast: CastPattern) -> None:
    """Erase a cast that has no readers, and the nodes that were computed for it alone."""
    pending = [cast.node, *([] if cast.amax is None else [cast.amax])]
    while pending:
        node = pending.pop()
        if node._erased or node.users or node.op != "call_function" or node.is_impure():
            continue
        pending.extend(node.all_input_nodes)
        graph.erase_node(node)
