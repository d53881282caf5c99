"""Casts of a gate's product and gradients, joined with what computes them (see :mod:`bitplan.native.gated_cast`).

When a graph has been cut into forward and backward, silu(gate) * up has been spelled out in operations of numbers. What
to look for is had by spelling out the same here, by torch's own rules, whatever these are in its version; conversions
to wider types change nothing, so they are looked through. A tensor that something else reads stays as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.partitioners import get_default_op_list
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from bitplan.native.gated_cast import READ

#: Whether compiled graphs have casts joined with what they cast; to compare.
FUSES = True

_aten: Any = torch.ops.aten
_ours: Any = torch.ops.bitplan
_convert: Any = torch.ops.prims.convert_element_type.default
_COMMUTES = (_aten.mul.Tensor, _aten.add.Tensor)
#: What is told of a node besides its value.
_VALUES = ("val", "eager_input_vals", "tensor_meta")
Found = dict[str, fx.Node]


def fuse_gates(graph: fx.Graph, device: str = "cuda") -> int:
    """Replace casts of a gate's product, and pairs of casts of its gradients, on that device. How many there were."""
    if not FUSES:
        return 0
    casts = [each for each in map(_seen, graph.nodes) if each is not None and each.is_on(device)]
    if not casts:
        return 0
    product, to_gate = _patterns()
    slopes = [(each, found) for each in casts if (found := _matched(to_gate, each.source)) is not None]
    products = {each: found for each in casts if (found := _matched(product, each.source)) is not None}
    number = 0
    for first, found in slopes:
        # The gradient by `up` is a product, too: of silu(gate) and the gradient that comes.
        wanted = {"gate": found["gate"], "up": found["grad"]}
        second = next((each for each, parts in products.items() if parts == wanted and each.goes_with(first)), None)
        if second is not None and _join_grads(graph, first, second, found):
            del products[second]
            number += 1
    for each, found in products.items():
        number += _join_product(graph, each, found)
    return number


@dataclass(frozen=True, eq=False)
class _Cast:
    """A cast in a graph, by a scale from past steps, and what there is around it."""

    node: fx.Node
    #: What it casts, behind views.
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

    def is_on(self, device: str) -> bool:
        return self.source.meta["val"].device.type == device  # type: ignore[no-any-return]

    def goes_with(self, other: _Cast) -> bool:
        """Whether one kernel can write both."""
        return (
            self is not other
            and self.amax is not None
            and other.amax is not None
            and len(self.amax.users) == len(other.amax.users) == 1
            and (self.matrix, self.args[1], self.args[5:8]) == (other.matrix, other.args[1], other.args[5:8])
        )


def _seen(node: fx.Node) -> _Cast | None:
    """A cast whose input nothing else reads."""
    if node.target is not _ours.float8_cast.default:
        return None
    x, _, parts, reach, is_power = node.args[:5]
    source = _behind_views(x) if isinstance(x, fx.Node) else None
    if source is None or not isinstance(parts, fx.Node) or not isinstance(reach, fx.Node) or not is_power:
        return None
    value = source.meta["val"]
    sizes_known = all(isinstance(size, int) for size in value.shape)
    if source.op != "call_function" or value.dtype != torch.bfloat16 or not sizes_known or not value.numel():
        return None
    amax, waiting = None, []
    for reader, seen in _readers(source):
        if reader is parts and reader.target is _ours.float8_amax.default:
            amax = reader
        elif reader.target is node.target and reader.args[0] is not seen and seen not in reader.args[1:8]:
            waiting.append(reader)
        elif reader is not node:
            return None
    return _Cast(node, source, amax, tuple(dict.fromkeys(waiting)))


def _behind_views(node: fx.Node) -> fx.Node | None:
    """What a node is a view of, in the same order in memory; None where the order is another."""
    while _is_dense(node) and is_view(node):
        node = node.all_input_nodes[0]
    return node if _is_dense(node) else None


def is_view(node: fx.Node) -> bool:
    """Also reshaping, which Inductor makes of views."""
    return node.target is _aten.reshape.default or bool(get_default_op_list().is_view(node))


def _is_dense(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_contiguous()


def _readers(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """What reads a node, behind views of it, and which view it reads."""
    for user in node.users:
        if is_view(user):
            yield from _readers(user)
        else:
            yield user, node


# --- what to look for ---------------------------------------------------------------------------------------


@cache
def _patterns() -> tuple[fx.Node, fx.Node]:
    """The product, and its gradient by the gate, spelled out as in a graph."""
    from torch._inductor.decomposition import select_decomp_table

    def product(gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate) * up

    def to_gate(grad: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.detach().requires_grad_()
        with torch.enable_grad():
            (found,) = torch.autograd.grad(product(gate, up), gate, grad)
        return found

    with torch.inference_mode(False), FakeTensorMode():  # whatever the graph is compiled for
        x = [torch.empty(2, 3, dtype=torch.bfloat16) for _ in range(3)]
        rules = select_decomp_table()
        traced = make_fx(product, decomposition_table=rules)(*x[:2]), make_fx(to_gate, decomposition_table=rules)(*x)
    one, other = (
        _spelled(each.graph, names)
        for each, names in zip(traced, (("gate", "up"), ("grad", "gate", "up")), strict=True)
    )
    return one, other


def _spelled(graph: fx.Graph, names: tuple[str, ...]) -> fx.Node:
    """The result of a graph, whose inputs are told their names: torch has numbered these."""
    inputs = (node for node in graph.nodes if node.op == "placeholder")
    for node, name in zip(inputs, names, strict=True):
        node.meta["name"] = name
    result = graph.output_node().args[0]
    assert isinstance(result, fx.Node)
    return result


def _matched(pattern: fx.Node, node: fx.Node) -> Found | None:
    """What stands for the pattern's inputs where `node` is computed as it says, if each can be read by a kernel."""
    found: Found = {}
    if not _match(pattern, node, found):
        return None
    size = node.meta["val"].shape
    for name, each in found.items():
        value = each.meta.get("val")
        dtypes = READ[:1] if name == "grad" else READ
        if not isinstance(value, Tensor) or value.shape != size or value.dtype not in dtypes or not _is_written(each):
            return None
    return found


def _is_written(node: fx.Node) -> bool:
    """Whether a tensor lies densely in memory anyway: else it would now have to be written, to be read by a kernel.

    Codes are small, and most often kept.
    """
    source = _behind_views(node)
    if source is None:
        return False
    is_made = source.op == "placeholder" or source.target is operator.getitem
    is_code = source.meta["val"].dtype in READ[1:]
    is_kept = any(user.op == "output" for user in source.users)
    return is_made or is_code or is_kept or bool(get_default_op_list().is_compute_intensive(source))


def _match(pattern: Any, node: Any, found: Found) -> bool:
    if not isinstance(pattern, fx.Node) or not isinstance(node, fx.Node):
        return type(pattern) is type(node) and bool(pattern == node)
    pattern, node = _narrow(pattern), _narrow(node)
    if pattern.op == "placeholder":
        return found.setdefault(pattern.meta["name"], node) is node
    if pattern.target is not node.target or pattern.kwargs != node.kwargs or len(pattern.args) != len(node.args):
        return False
    orders = [node.args, node.args[::-1]] if pattern.target in _COMMUTES else [node.args]
    for args in orders:
        tried = dict(found)
        if all(_match(one, other, tried) for one, other in zip(pattern.args, args, strict=True)):
            found.update(tried)
            return True
    return False


def _narrow(node: fx.Node) -> fx.Node:
    """What a node was before it was converted to wider types."""
    while _is_conversion(node) and _is_wider(node, node.all_input_nodes[0]):
        node = node.all_input_nodes[0]
    return node


def _is_conversion(node: fx.Node) -> bool:
    return node.target in (_convert, _aten.detach.default, _aten.alias.default)


def _is_wider(node: fx.Node, than: fx.Node) -> bool:
    wide: torch.dtype = node.meta["val"].dtype
    narrow: torch.dtype = than.meta["val"].dtype
    return wide == narrow or (narrow.is_floating_point and wide.is_floating_point and wide.itemsize > narrow.itemsize)


# --- what takes its place -----------------------------------------------------------------------------------


def _join_product(graph: fx.Graph, cast: _Cast, found: Found) -> bool:
    _, dtype, parts, reach, _, as_rows, as_columns, gathers, after = cast.args
    first = cast.amax or cast.node
    if not all(each < first for each in found.values()):
        return False
    with graph.inserting_before(first):
        gate, up = (_as_matrix(graph, found[name], cast.matrix) for name in ("gate", "up"))
        if cast.amax is not None:
            parts = _call(graph, _ours.gated_amax.default, (gate, up, cast.amax.args[1], False), cast.amax)
            cast.amax.replace_all_uses_with(parts)
    with graph.inserting_before(cast.node):
        given = (gate, up, dtype, parts, reach, as_rows, as_columns, gathers, False, after)
        joined = _call(graph, _ours.gated_cast.default, given, cast.node)
    _replace(graph, cast.node, joined, 0)
    _tell_waiting(cast, found["gate"], joined)
    _erase(graph, cast)
    _take_codes(graph, joined, parts if cast.amax is not None else None, (found["gate"], found["up"]))
    return True


def _join_grads(graph: fx.Graph, by_gate: _Cast, by_up: _Cast, found: Found) -> bool:
    """Both gradients are cast before what waits for either of them: then what they are made of can go.

    Not before weights that are cast again: in the code that Inductor made, the order then held more at the peak.
    """
    first = min(by_gate, by_up, key=lambda each: each.node)
    waiting = [*by_gate.waiting, *by_up.waiting]
    casts_weights = any(_root(each).op == "placeholder" for each in waiting)
    place = first.node if casts_weights else min([first.node, *waiting])
    reaches = [each.args[3] for each in (by_gate, by_up)]
    if not all(each < place for each in found.values()) or not all(_can_come(each, place) for each in reaches):
        return False
    for reach in reaches:
        bring(reach, place)
    _, dtype, _, _, _, *rest, after = first.args
    with graph.inserting_before(place):
        matrices = [_as_matrix(graph, found[name], first.matrix) for name in ("grad", "gate", "up")]
        both = _call(graph, _ours.gated_grads_amax.default, (*matrices, *reaches), first.node)
        parts = [_part(graph, both, number) for number in range(2)]
        given = (*matrices, dtype, *parts, *reaches, *rest, after if after is not None and after < place else None)
        joined = _call(graph, _ours.gated_grads_cast.default, given, first.node)
    _replace(graph, by_gate.node, joined, 0)
    _replace(graph, by_up.node, joined, 4)
    for cast in (by_gate, by_up):
        _tell_waiting(cast, found["grad"], joined)
        _erase(graph, cast)
    for each in waiting:
        if joined < each:
            _delay(each, joined)
    return True


def _delay(cast: fx.Node, behind: fx.Node) -> None:
    """Have what a cast reads computed behind a node, where nothing wants it earlier: at that node the most is held."""
    late: set[fx.Node] = set()
    pending = [cast]
    while pending:
        for node in pending.pop().all_input_nodes:
            is_late = node.op == "call_function" and node < behind and not node.is_impure()
            if is_late and node not in late and all(user in late or behind < user for user in node.users):
                late.add(node)
                pending.append(node)
    for node in sorted(late, reverse=True):
        behind.append(node)


def _root(cast: fx.Node) -> fx.Node:
    """What a cast reads, behind any views."""
    node = cast.all_input_nodes[0]
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def _as_matrix(graph: fx.Graph, node: fx.Node, size: tuple[int, int]) -> fx.Node:
    if node.meta["val"].shape == size:
        return node
    return _call(graph, _aten.view.default, (node, list(size)), node)


def _call(graph: fx.Graph, target: Any, given: tuple[Any, ...], like: fx.Node) -> fx.Node:
    node = graph.call_function(target, given)
    node.meta.update({key: value for key, value in like.meta.items() if key not in _VALUES})
    node.meta["val"] = target(*fx.map_arg(given, lambda each: each.meta["val"]))
    return node


def _part(graph: fx.Graph, whole: fx.Node, number: int) -> fx.Node:
    part = graph.call_function(operator.getitem, (whole, number))
    part.meta["val"] = whole.meta["val"][number]
    return part


def _replace(graph: fx.Graph, cast: fx.Node, joined: fx.Node, offset: int) -> None:
    """Let the readers of a cast's results read those of `joined`, which begin at `offset`."""
    for user in list(cast.users):
        with graph.inserting_after(joined):
            part = _part(graph, joined, offset + int(user.args[1]))  # type: ignore[arg-type]
        user.replace_all_uses_with(part)
        graph.erase_node(user)


def _tell_waiting(cast: _Cast, instead: fx.Node, joined: fx.Node) -> None:
    """What waits for a tensor that is no more waits for its codes or, if it comes before, for what they are made of."""
    for node in cast.waiting:
        if not node._erased:
            later = next(part for part in joined.users if part.target is operator.getitem)
            node.args = (*node.args[:8], later if joined < node else instead)


def _erase(graph: fx.Graph, cast: _Cast) -> None:
    """A cast without readers, and what was computed for it alone."""
    waiting = [cast.node, *([] if cast.amax is None else [cast.amax])]
    while waiting:
        node = waiting.pop()
        if node._erased or node.users or node.op != "call_function" or node.is_impure():
            continue
        waiting.extend(node.all_input_nodes)
        graph.erase_node(node)


def _take_codes(graph: fx.Graph, joined: fx.Node, amax: fx.Node | None, halves: tuple[fx.Node, fx.Node]) -> None:
    """Where gate and up are rounded to codes in this graph, let the cast that reads them round them, too."""
    raw = []
    for half in dict.fromkeys(halves):
        given = half.args[0] if half.target is _convert else None
        if not isinstance(given, fx.Node) or given.meta["val"].dtype != torch.bfloat16 or not _is_written(given):
            return
        raw.append(given)
    if len(raw) < len(halves):  # something times itself
        return
    readers = {reader for half in halves for reader, _ in _readers(half)} - {joined, amax}
    if not all(joined < reader for reader in readers):
        return
    size = joined.args[0].meta["val"].shape  # type: ignore[union-attr]
    first = amax or joined
    with graph.inserting_before(first):
        matrices = [_as_matrix(graph, each, tuple(size)) for each in raw]
    old = list(joined.args[:2])
    for node, flag in ((joined, 8), (amax, 3)):
        if node is not None:
            node.args = (*matrices, *node.args[2:flag], True, *node.args[flag + 1 :])
    joined.meta["val"] = joined.target(*fx.map_arg(joined.args, lambda each: each.meta["val"]))  # type: ignore[operator]
    for number, (half, view) in enumerate(zip(halves, old, strict=True)):
        if view is not half and not view.users:  # type: ignore[union-attr]
            graph.erase_node(view)  # type: ignore[arg-type]
        with graph.inserting_after(joined):
            part = _part(graph, joined, 4 + number)
        with graph.inserting_after(part):
            whole = part if part.meta["val"].shape == half.meta["val"].shape else _viewed(graph, part, half)
        half.replace_all_uses_with(whole)
        graph.erase_node(half)


def _viewed(graph: fx.Graph, part: fx.Node, like: fx.Node) -> fx.Node:
    return _call(graph, _aten.view.default, (part, list(like.meta["val"].shape)), like)


def _can_come(node: fx.Node, before: fx.Node) -> bool:
    """Whether a number can be read earlier than it is: views of what is there by then."""
    return node < before or (is_view(node) and all(_can_come(each, before) for each in node.all_input_nodes))


def bring(node: fx.Node, before: fx.Node) -> None:
    if not node < before:
        for each in node.all_input_nodes:
            bring(each, before)
        before.prepend(node)
