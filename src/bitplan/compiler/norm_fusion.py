"""A graph pass that fuses RMS norms with the casts of their results (:mod:`bitplan.executions.native.norm_cast`).

The patterns are only the end of a norm: a tensor times a number per row, times a weight per feature, rounded to
bfloat16. Norms that are written out in Python, as in models of transformers, round before the weight as well. The
number per row is read in the form that the graph has in memory: the backward pass receives the mean square or its
inverse root from the forward pass.

The input of a norm is usually a sum. In the forward pass one Inductor kernel adds, takes the mean square and normalises
the sum before it is rounded to bfloat16 in memory. A kernel of ours reads the rounded sum, as eager execution and the
backward pass do. Where a norm rounds twice, Inductor leaves out the first rounding, too, and the fused norm is the one
that is nearer to eager execution: such norms of sums are fused if the sum is written to memory in any case. Others are
not, so that no bit changes; see :data:`FUSES_SUMS`.
"""

from __future__ import annotations

from functools import cache, partial

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

#: Switches for comparisons: whether norms are fused with casts, and also norms that round once of sums that Inductor
#: computes.
FUSES = True
FUSES_SUMS = False


def fuse_norms(graph: fx.Graph, device: str = "cuda") -> int:
    """Fuse norms with the casts of their results on that device. Returns the number of fusions."""
    if not FUSES:
        return 0
    count = 0
    for cast in find_casts(graph, device):
        norm = _match_norm(cast)
        count += norm is not None and _fuse(graph, cast, *norm)
    return count


@cache
def _patterns() -> dict[bool, fx.Node]:
    """The end of a norm as in a graph, from the number per row on, by whether it rounds twice."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight)

    def written_out(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * normalised.to(x.dtype)

    patterns = {}
    for rounds_twice, function in ((False, norm), (True, written_out)):
        result = trace_pattern(function, x=(2, 3), weight=(3,))
        (inverse,) = result.graph.find_nodes(op="call_function", target=aten.rsqrt.default)
        inverse.meta["name"] = "inverse"
        patterns[rounds_twice] = result
    return patterns


def _match_norm(cast: CastPattern) -> tuple[Match, bool] | None:
    """Input, weight and the number per row of the norm, if a kernel can read each of them, and whether it rounds
    twice."""
    size = tuple(cast.source.meta["val"].shape)
    if size[-1] != cast.matrix[1] or cast.sources is not None:
        return None
    for rounds_twice, pattern in _patterns().items():
        match = match_pattern(pattern, cast.source, partial(_accepts, size, rounds_twice))
        if match is not None:
            return match, rounds_twice
    return None


def _accepts(size: tuple[int, ...], rounds_twice: bool, name: str, node: fx.Node) -> bool:
    """Whether a node can be that input of a norm of a tensor of this size."""
    sizes = {"x": size, "weight": size[-1:], "inverse": (*size[:-1], 1)}
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or tuple(value.shape) != sizes[name]:
        return False
    if name == "inverse":
        is_inverse = node.op == "placeholder" or node.target is aten.rsqrt.default
        return is_inverse and value.dtype == torch.float32 and value.is_contiguous()
    if value.dtype not in INPUT_DTYPES:
        return False
    if name == "weight":
        # Computed from a parameter, as 1 + weight, it is small, and in float32 writing it to memory changes no bit.
        return is_external(node) or (value.dtype == torch.float32 and value.is_contiguous())
    return is_external(node) or ((FUSES_SUMS or rounds_twice) and is_output(node))


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


def _fuse(graph: fx.Graph, cast: CastPattern, match: Match, rounds_twice: bool) -> bool:
    _, dtype, partial_amax, history_amax, _, *flags, after = cast.args
    row_stats, eps = _row_stats(match["inverse"])
    x, weight = match["x"], match["weight"]
    if not all(source < cast.first for source in (x, row_stats, weight)):
        return False
    rows, features = cast.matrix
    with graph.inserting_before(cast.first):
        inputs = (view_as(graph, x, (rows, features)), view_as(graph, row_stats, (rows,)), weight, eps)
        if cast.amax is not None:
            partial_amax = call(graph, ours.norm_amax.default, (*inputs, cast.amax.args[1], rounds_twice), cast.amax)
            cast.amax.replace_all_uses_with(partial_amax)
    args = (*inputs, dtype, partial_amax, history_amax, *flags, after, rounds_twice)
    with graph.inserting_before(cast.node):
        fused = call(graph, ours.norm_cast.default, args, cast.node)
    replace_cast(graph, cast, fused, 0, x)
    return True
