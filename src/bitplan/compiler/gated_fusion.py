"""Casts of a gate's product and gradients, joined with what computes them (see
:mod:`bitplan.executions.native.gated_cast`)."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, fx

from bitplan.compiler.patterns import (
    CastPattern,
    Match,
    call,
    convert,
    find_casts,
    is_given,
    is_kept,
    is_view,
    match_pattern,
    ours,
    part,
    readers,
    replace_cast,
    traced_pattern,
    viewed,
)
from bitplan.executions.native.gated_cast import READ

#: Whether compiled graphs have casts joined with what they cast; to compare.
FUSES = True


def fuse_gates(graph: fx.Graph, device: str = "cuda") -> int:
    """Replace casts of a gate's product, and pairs of casts of its gradients, on that device. How many there were."""
    if not FUSES:
        return 0
    casts = find_casts(graph, device)
    if not casts:
        return 0
    product, to_gate = _patterns()
    slopes = [(each, found) for each in casts if (found := _matched(to_gate, each.source)) is not None]
    products = {each: found for each in casts if (found := _matched(product, each.source)) is not None}
    number = 0
    for first, found in slopes:
        # The gradient by `up` is a product, too: of silu(gate) and the gradient that comes.
        wanted = {"gate": found["gate"], "up": found["grad"]}
        second = next((each for each, parts in products.items() if parts == wanted and _go_together(each, first)), None)
        if second is not None and _join_grads(graph, first, second, found):
            del products[second]
            number += 1
    for each, found in products.items():
        number += _join_product(graph, each, found)
    return number


# --- what to look for ---------------------------------------------------------------------------------------


@cache
def _patterns() -> tuple[fx.Node, fx.Node]:
    """The product, and its gradient by the gate, written out as in a graph."""

    def product(gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate) * up

    def to_gate(grad: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.detach().requires_grad_()
        with torch.enable_grad():
            (found,) = torch.autograd.grad(product(gate, up), gate, grad)
        return found

    size = (2, 3)
    return traced_pattern(product, gate=size, up=size), traced_pattern(to_gate, grad=size, gate=size, up=size)


def _matched(pattern: fx.Node, node: fx.Node) -> Match | None:
    """What stands for the pattern's inputs where `node` is computed as it says, if each can be read by a kernel."""
    size = node.meta["val"].shape

    def fits(name: str, each: fx.Node) -> bool:
        value = each.meta.get("val")
        dtypes = READ[:1] if name == "grad" else READ
        is_read = isinstance(value, Tensor) and value.shape == size and value.dtype in dtypes
        return is_read and _is_written(each)

    return match_pattern(pattern, node, fits)


def _is_written(node: fx.Node) -> bool:
    """Whether a tensor lies in memory anyway: else it would now have to be written, to be read by a kernel.

    Codes are small, and most often kept.
    """
    return is_given(node) or is_kept(node) or node.meta["val"].dtype in READ[1:]


def _go_together(one: CastPattern, other: CastPattern) -> bool:
    """Whether one kernel can write both."""
    return (
        one is not other
        and one.amax is not None
        and other.amax is not None
        and len(one.amax.users) == len(other.amax.users) == 1
        and (one.matrix, one.args[1], one.args[5:8]) == (other.matrix, other.args[1], other.args[5:8])
    )


# --- what takes its place -----------------------------------------------------------------------------------


def _join_product(graph: fx.Graph, cast: CastPattern, found: Match) -> bool:
    _, dtype, parts, reach, _, as_rows, as_columns, gathers, after = cast.args
    if not all(each < cast.first for each in found.values()):
        return False
    with graph.inserting_before(cast.first):
        gate, up = (viewed(graph, found[name], cast.matrix) for name in ("gate", "up"))
        if cast.amax is not None:
            parts = call(graph, ours.gated_amax.default, (gate, up, cast.amax.args[1], False), cast.amax)
            cast.amax.replace_all_uses_with(parts)
    with graph.inserting_before(cast.node):
        given = (gate, up, dtype, parts, reach, as_rows, as_columns, gathers, False, after)
        joined = call(graph, ours.gated_cast.default, given, cast.node)
    replace_cast(graph, cast, joined, 0, found["gate"])
    _take_codes(graph, joined, parts if cast.amax is not None else None, (found["gate"], found["up"]))
    return True


def _join_grads(graph: fx.Graph, by_gate: CastPattern, by_up: CastPattern, found: Match) -> bool:
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
        matrices = [viewed(graph, found[name], first.matrix) for name in ("grad", "gate", "up")]
        both = call(graph, ours.gated_grads_amax.default, (*matrices, *reaches), first.node)
        parts = [part(graph, both, number) for number in range(2)]
        given = (*matrices, dtype, *parts, *reaches, *rest, after if after is not None and after < place else None)
        joined = call(graph, ours.gated_grads_cast.default, given, first.node)
    for number, cast in enumerate((by_gate, by_up)):
        replace_cast(graph, cast, joined, 4 * number, found["grad"])
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


def _take_codes(graph: fx.Graph, joined: fx.Node, amax: fx.Node | None, halves: tuple[fx.Node, fx.Node]) -> None:
    """Where gate and up are rounded to codes in this graph, let the cast that reads them round them, too."""
    raw = []
    for half in dict.fromkeys(halves):
        given = half.args[0] if half.target is convert else None
        if not isinstance(given, fx.Node) or given.meta["val"].dtype != torch.bfloat16 or not _is_written(given):
            return
        raw.append(given)
    if len(raw) < len(halves):  # something times itself
        return
    others = {reader for half in halves for reader, _ in readers(half)} - {joined, amax}
    if not all(joined < reader for reader in others):
        return
    size = joined.args[0].meta["val"].shape  # type: ignore[union-attr]
    first = amax or joined
    with graph.inserting_before(first):
        matrices = [viewed(graph, each, tuple(size)) for each in raw]
    old = list(joined.args[:2])
    for node, flag in ((joined, 8), (amax, 3)):
        if node is not None:
            node.args = (*matrices, *node.args[2:flag], True, *node.args[flag + 1 :])
    joined.meta["val"] = joined.target(*fx.map_arg(joined.args, lambda each: each.meta["val"]))  # type: ignore[operator]
    for number, (half, view) in enumerate(zip(halves, old, strict=True)):
        if view is not half and not view.users:  # type: ignore[union-attr]
            graph.erase_node(view)  # type: ignore[arg-type]
        with graph.inserting_after(joined):
            codes = part(graph, joined, 4 + number)
        with graph.inserting_after(codes):
            whole = viewed(graph, codes, tuple(half.meta["val"].shape))
        half.replace_all_uses_with(whole)
        graph.erase_node(half)


def _can_come(node: fx.Node, before: fx.Node) -> bool:
    """Whether a number can be read earlier than it is: views of what is there by then."""
    return node < before or (is_view(node) and all(_can_come(each, before) for each in node.all_input_nodes))


def bring(node: fx.Node, before: fx.Node) -> None:
    if not node < before:
        for each in node.all_input_nodes:
            bring(each, before)
        before.prepend(node)
