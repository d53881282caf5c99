"""Casts of an RMS norm's result, joined with what computes it (see :mod:`bitplan.executions.native.norm_cast`).

Of a norm only the end is looked for: a tensor times a number for each row, times a weight for each feature, rounded to
bfloat16. The row's number is read as the graph has it in memory: the backward pass gets the mean of the squares or the
inverse of its root from the forward pass.

A norm's input is most often a sum. In the forward pass Inductor adds, takes the mean and normalises in one kernel, and
goes on with the sum before that is rounded to bfloat16 in memory. A kernel that reads the sum from there has it rounded
(as it is without torch.compile, and as the backward pass has it). So that no bit changes, such norms stay as they are;
see :data:`FUSES_SUMS`.
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
    is_given,
    is_kept,
    match_pattern,
    ours,
    replace_cast,
    traced_pattern,
    viewed,
)
from bitplan.executions.native.norm_cast import READ

#: Whether compiled graphs have casts joined with the norms whose result they cast; to compare.
FUSES = True
#: Whether also with norms of what Inductor computes, and which it would normalise before that is rounded to bfloat16.
FUSES_SUMS = False


def fuse_norms(graph: fx.Graph, device: str = "cuda") -> int:
    """Replace casts of a norm's result on that device. How many there were."""
    if not FUSES:
        return 0
    number = 0
    for cast in find_casts(graph, device):
        found = _matched(cast)
        number += found is not None and _join(graph, cast, found)
    return number


@cache
def _pattern() -> fx.Node:
    """A norm written out as in a graph, down to the number for each row."""

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight)

    result = traced_pattern(normed, x=(2, 3), weight=(3,))
    (inverse,) = result.graph.find_nodes(op="call_function", target=aten.rsqrt.default)
    inverse.meta["name"] = "inverse"
    return result


def _matched(cast: CastPattern) -> Match | None:
    """Input, weight and the rows' numbers, if each can be read by a kernel."""
    size = tuple(cast.source.meta["val"].shape)
    if size[-1] != cast.matrix[1]:
        return None
    sizes = {"x": size, "weight": size[-1:], "inverse": (*size[:-1], 1)}

    def fits(name: str, node: fx.Node) -> bool:
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or tuple(value.shape) != sizes[name]:
            return False
        if name == "inverse":
            is_known = node.op == "placeholder" or node.target is aten.rsqrt.default
            return is_known and value.dtype == torch.float32 and value.is_contiguous()
        return value.dtype in READ and (is_given(node) or (FUSES_SUMS and name == "x" and is_kept(node)))

    return match_pattern(_pattern(), cast.source, fits)


def _spread(inverse: fx.Node) -> tuple[fx.Node, float | None]:
    """Which tensor of the rows' numbers to read, and the eps if that is before the inverse of the root is taken.

    The one that came from the forward pass. In the forward pass the inverse, as the kernel has it that takes the mean:
    it is small, and nothing says that a machine adds eps to a mean in memory as it does to one in a register.
    """
    if inverse.op == "placeholder":
        return inverse, None
    summed = inverse.args[0]
    assert isinstance(summed, fx.Node)
    if is_given(summed):
        return summed, 0.0
    if summed.target in (aten.add.Scalar, aten.add.Tensor) and not summed.kwargs:
        mean, eps = summed.args
        is_mean = isinstance(mean, fx.Node) and mean.meta["val"].dtype == torch.float32 and is_given(mean)
        if is_mean and isinstance(eps, (int, float)):
            return mean, float(eps)  # type: ignore[return-value]
    return inverse, None


def _join(graph: fx.Graph, cast: CastPattern, found: Match) -> bool:
    _, dtype, parts, reach, _, *rest, after = cast.args
    spread, eps = _spread(found["inverse"])
    x, weight = found["x"], found["weight"]
    if not all(each < cast.first for each in (x, spread, weight)):
        return False
    rows, features = cast.matrix
    with graph.inserting_before(cast.first):
        given = (viewed(graph, x, (rows, features)), viewed(graph, spread, (rows,)), weight, eps)
        if cast.amax is not None:
            parts = call(graph, ours.norm_amax.default, (*given, cast.amax.args[1]), cast.amax)
            cast.amax.replace_all_uses_with(parts)
    with graph.inserting_before(cast.node):
        joined = call(graph, ours.norm_cast.default, (*given, dtype, parts, reach, *rest, after), cast.node)
    replace_cast(graph, cast, joined, 0, x)
    return True
