"""A graph pass that fuses silu(gate) * up and its gradients with their casts
(:mod:`bitplan.executions.native.gated_cast`)."""

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
    is_external,
    is_output,
    is_view,
    match_pattern,
    move_before,
    ours,
    readers,
    replace_cast,
    result_of,
    trace_pattern,
    view_as,
)
from bitplan.executions.native.gated_cast import INPUT_DTYPES

#: A switch for comparisons: whether gates are fused with casts.
FUSES = True


def fuse_gates(graph: fx.Graph, device: str = "cuda") -> int:
    """Fuse casts of a gate's product, and pairs of casts of its gradients, on that device. Returns the number."""
    if not FUSES:
        return 0
    casts = find_casts(graph, device)
    if not casts:
        return 0
    product_pattern, gate_grad_pattern = _patterns()
    gate_grads = [(cast, match) for cast in casts if (match := _match_gate(gate_grad_pattern, cast.source)) is not None]
    products = {cast: match for cast in casts if (match := _match_gate(product_pattern, cast.source)) is not None}
    count = 0
    for gate_cast, match in gate_grads:
        # The gradient of `up` is a product, too: of silu(gate) and the incoming gradient.
        inputs = {"gate": match["gate"], "up": match["grad"]}
        up_casts = (cast for cast, parts in products.items() if parts == inputs and _can_share_kernel(cast, gate_cast))
        up_cast = next(up_casts, None)
        if up_cast is not None and _fuse_grads(graph, gate_cast, up_cast, match):
            del products[up_cast]
            count += 1
    for cast, match in products.items():
        count += _fuse_product(graph, cast, match)
    return count


@cache
def _patterns() -> tuple[fx.Node, fx.Node]:
    """The product and the gradient of the gate, as in a graph."""

    def product(gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate) * up

    def gate_grad(grad: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.detach().requires_grad_()
        with torch.enable_grad():
            (result,) = torch.autograd.grad(product(gate, up), gate, grad)
        return result

    size = (2, 3)
    return trace_pattern(product, gate=size, up=size), trace_pattern(gate_grad, grad=size, gate=size, up=size)


def _match_gate(pattern: fx.Node, source: fx.Node) -> Match | None:
    """The pattern's inputs if `source` is computed as the pattern is and a kernel can read each of them."""
    size = source.meta["val"].shape

    def accepts(name: str, node: fx.Node) -> bool:
        value = node.meta.get("val")
        dtypes = INPUT_DTYPES[:1] if name == "grad" else INPUT_DTYPES
        return isinstance(value, Tensor) and value.shape == size and value.dtype in dtypes and _is_in_memory(node)

    return match_pattern(pattern, source, accepts)


def _is_in_memory(node: fx.Node) -> bool:
    """Whether a tensor is written to memory in any case: otherwise it would have to be, for a kernel to read it.

    Codes are small, and usually saved.
    """
    return is_external(node) or is_output(node) or node.meta["val"].dtype in INPUT_DTYPES[1:]


def _can_share_kernel(cast: CastPattern, other: CastPattern) -> bool:
    """Whether one kernel can write both casts."""
    return (
        cast is not other
        and cast.amax is not None
        and other.amax is not None
        and len(cast.amax.users) == len(other.amax.users) == 1
        and (cast.matrix, cast.sources) == (other.matrix, other.sources)
        and (cast.args[1], cast.args[5:8]) == (other.args[1], other.args[5:8])
    )


def _fuse_product(graph: fx.Graph, cast: CastPattern, match: Match) -> bool:
    _, dtype, partial_amax, history_amax, _, as_rows, as_columns, returns_amax, after = cast.args
    if not all(source < cast.first for source in match.values()):
        return False
    with graph.inserting_before(cast.first):
        gate, up = (view_as(graph, match[name], cast.matrix) for name in ("gate", "up"))
        if cast.amax is not None:
            partial_amax = call(graph, ours.gated_amax.default, (gate, up, cast.amax.args[1], False), cast.amax)
            cast.amax.replace_all_uses_with(partial_amax)
    with graph.inserting_before(cast.node):
        args = (gate, up, dtype, partial_amax, history_amax, as_rows, as_columns, returns_amax, False, after)
        args = (*args, *_padding(cast))
        fused = call(graph, ours.gated_cast.default, args, cast.node)
    replace_cast(graph, cast, fused, 0, match["gate"])
    _fuse_input_casts(graph, fused, partial_amax if cast.amax is not None else None, (match["gate"], match["up"]))
    return True


def _fuse_grads(graph: fx.Graph, gate_cast: CastPattern, up_cast: CastPattern, match: Match) -> bool:
    """Cast both gradients before the casts that wait for either of them, so that their inputs can be freed.

    Not before recasts of weights: in Inductor's order that raised the peak.
    """
    first = min(gate_cast, up_cast, key=lambda cast: cast.node)
    waiting = [*gate_cast.waiting, *up_cast.waiting]
    casts_weights = any(_cast_tensor(cast).op == "placeholder" for cast in waiting)
    position = first.node if casts_weights else min([first.node, *waiting])
    history_amaxes = [cast.args[3] for cast in (gate_cast, up_cast)]
    can_move = all(_can_move_before(node, position) for node in history_amaxes)
    read = [*match.values(), *_padding(first)]
    if not can_move or not all(source < position for source in read):
        return False
    for history_amax in history_amaxes:
        move_before(history_amax, position)
    _, dtype, _, _, _, *flags, after = first.args
    with graph.inserting_before(position):
        matrices = [view_as(graph, match[name], first.matrix) for name in ("grad", "gate", "up")]
        amaxes = call(graph, ours.gated_grads_amax.default, (*matrices, *history_amaxes), first.node)
        partial_amaxes = [result_of(graph, amaxes, number) for number in range(2)]
        awaited = after if after is not None and after < position else None
        args = (*matrices, dtype, *partial_amaxes, *history_amaxes, *flags, awaited, *_padding(first))
        fused = call(graph, ours.gated_grads_cast.default, args, first.node)
    for number, cast in enumerate((gate_cast, up_cast)):
        replace_cast(graph, cast, fused, 4 * number, match["grad"])
    for waiting_cast in waiting:
        if fused < waiting_cast:
            _delay_inputs(waiting_cast, fused)
    return True


def _padding(cast: CastPattern) -> tuple[fx.Node, ...]:
    """The last argument of the casts of groups of rows."""
    return () if cast.sources is None else (cast.sources,)


def _delay_inputs(cast: fx.Node, behind: fx.Node) -> None:
    """Compute the inputs of a cast after the node `behind`, the peak, unless something before it reads them."""
    delayed: set[fx.Node] = set()
    pending = [cast]
    while pending:
        for node in pending.pop().all_input_nodes:
            is_movable = node.op == "call_function" and node < behind and not node.is_impure()
            if is_movable and node not in delayed and all(user in delayed or behind < user for user in node.users):
                delayed.add(node)
                pending.append(node)
    for node in sorted(delayed, reverse=True):
        behind.append(node)


def _cast_tensor(cast: fx.Node) -> fx.Node:
    """The tensor that is cast, before views."""
    node = cast.all_input_nodes[0]
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def _fuse_input_casts(graph: fx.Graph, fused: fx.Node, amax: fx.Node | None, inputs: tuple[fx.Node, fx.Node]) -> None:
    """If gate and up are rounded to codes in this graph, let the fused cast round them, too."""
    unrounded = []
    for codes in dict.fromkeys(inputs):
        source = codes.args[0] if codes.target is convert else None
        if not isinstance(source, fx.Node) or source.meta["val"].dtype != torch.bfloat16 or not _is_in_memory(source):
            return
        unrounded.append(source)
    if len(unrounded) < len(inputs):  # gate and up are the same tensor
        return
    other_readers = {reader for codes in inputs for reader, _ in readers(codes)} - {fused, amax}
    if not all(fused < reader for reader in other_readers):
        return
    size = fused.args[0].meta["val"].shape  # type: ignore[union-attr]
    with graph.inserting_before(amax or fused):
        matrices = [view_as(graph, source, tuple(size)) for source in unrounded]
    old_views = list(fused.args[:2])
    for node, codes_position in ((fused, 8), (amax, 3)):
        if node is not None:
            node.args = (*matrices, *node.args[2:codes_position], True, *node.args[codes_position + 1 :])
    fused.meta["val"] = fused.target(*fx.map_arg(fused.args, lambda source: source.meta["val"]))  # type: ignore[operator]
    for number, (codes, view) in enumerate(zip(inputs, old_views, strict=True)):
        if view is not codes and not view.users:  # type: ignore[union-attr]
            graph.erase_node(view)  # type: ignore[arg-type]
        with graph.inserting_after(fused):
            result = result_of(graph, fused, 4 + number)
        with graph.inserting_after(result):
            reshaped = view_as(graph, result, tuple(codes.meta["val"].shape))
        codes.replace_all_uses_with(reshaped)
        graph.erase_node(codes)


def _can_move_before(node: fx.Node, position: fx.Node) -> bool:
    """Whether a node can be computed before `position`: it is there already, or a view of nodes that can."""
    sources = node.all_input_nodes
    return node < position or (is_view(node) and all(_can_move_before(source, position) for source in sources))
