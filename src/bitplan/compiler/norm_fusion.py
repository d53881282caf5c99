"""A graph pass that fuses RMS norms with the casts of their results (:mod:`bitplan.executions.native.norm_cast`).

The pattern is only the end of a norm: a tensor times a number per row, times a weight per feature, rounded to bfloat16.
The number per row is read in the form that the graph has in memory: the backward pass receives the mean square or its
inverse root from the forward pass.

The input of a norm is usually a sum. In the forward pass one Inductor kernel adds, takes the mean square and normalises
the sum before it is rounded to bfloat16 in memory. A kernel of ours reads the rounded sum (as eager execution and the
backward pass do). So that no bit changes, norms of such sums are not fused; see :data:`FUSES_SUMS`.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, fx

from bitplan.compiler.patterns import (
    CastPattern,
    Match,
    aten,
    call,
    find_casts,
    is_external,
    is_output,
    match_pattern,
    ours,
    replace_cast,
    trace_pattern,
    view_as,
)
from bitplan.executions.native.norm_cast import INPUT_DTYPES

#: Switches for comparisons: whether norms are fused with casts, and also norms of sums that Inductor computes.
FUSES = True
FUSES_SUMS = False


def fuse_norms(graph: fx.Graph, device: str = "cuda") -> int:
    """Fuse norms with the casts of their results on that device. Returns the number of fusions."""
    if not FUSES:
        return 0
    count = 0
    for cast in find_casts(graph, device):
        match = _match_norm(cast)
        count += match is not None and _fuse(graph, cast, match)
    return count


@cache
def _pattern() -> fx.Node:
    """The end of a norm as in a graph, from the number per row on."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight)

    result = trace_pattern(norm, x=(2, 3), weight=(3,))
    (inverse,) = result.graph.find_nodes(op="call_function", target=aten.rsqrt.default)
    inverse.meta["name"] = "inverse"
    return result


def _match_norm(cast: CastPattern) -> Match | None:
    """Input, weight and the number per row of the norm, if a kernel can read each of them."""
    size = tuple(cast.source.meta["val"].shape)
    if size[-1] != cast.matrix[1]:
        return None
    sizes = {"x": size, "weight": size[-1:], "inverse": (*size[:-1], 1)}

    def accepts(name: str, node: fx.Node) -> bool:
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or tuple(value.shape) != sizes[name]:
            return False
        if name == "inverse":
            is_inverse = node.op == "placeholder" or node.target is aten.rsqrt.default
            return is_inverse and value.dtype == torch.float32 and value.is_contiguous()
        is_readable = is_external(node) or (FUSES_SUMS and name == "x" and is_output(node))
        return value.dtype in INPUT_DTYPES and is_readable

    return match_pattern(_pattern(), cast.source, accepts)


def _row_stats(inverse: fx.Node) -> tuple[fx.Node, float | None]:
    """The number per row to read, and eps if it is the mean square.

    In the backward pass it is the tensor that the forward pass saved. In the forward pass it is the inverse root, as
    the kernel that takes the mean computes it: it is small, and adding eps to a mean in memory need not give the same
    bits as adding it in a register.
    """
    if inverse.op == "placeholder":
        return inverse, None
    summed = inverse.args[0]
    assert isinstance(summed, fx.Node)
    if is_external(summed):
        return summed, 0.0
    if summed.target in (aten.add.Scalar, aten.add.Tensor) and not summed.kwargs:
        mean, eps = summed.args
        is_mean = isinstance(mean, fx.Node) and mean.meta["val"].dtype == torch.float32 and is_external(mean)
        if is_mean and isinstance(eps, (int, float)):
            return mean, float(eps)  # type: ignore[return-value]
    return inverse, None


def _fuse(graph: fx.Graph, cast: CastPattern, match: Match) -> bool:
    _, dtype, partial_amax, history_amax, _, *flags, after = cast.args
    row_stats, eps = _row_stats(match["inverse"])
    x, weight = match["x"], match["weight"]
    if not all(source < cast.first for source in (x, row_stats, weight)):
        return False
    rows, features = cast.matrix
    with graph.inserting_before(cast.first):
        inputs = (view_as(graph, x, (rows, features)), view_as(graph, row_stats, (rows,)), weight, eps)
        if cast.amax is not None:
            partial_amax = call(graph, ours.norm_amax.default, (*inputs, cast.amax.args[1]), cast.amax)
            cast.amax.replace_all_uses_with(partial_amax)
    args = (*inputs, dtype, partial_amax, history_amax, *flags, after)
    with graph.inserting_before(cast.node):
        fused = call(graph, ours.norm_cast.default, args, cast.node)
    replace_cast(graph, cast, fused, 0, x)
    return True
