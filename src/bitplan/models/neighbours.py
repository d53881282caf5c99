"""Sums over the neighbours of a graph's nodes.

A graph comes in one of two forms. A sparse matrix is the shorter one, but torch.compile follows no sparse tensor. So
graphs that are trained on are three plain tensors: from which node each edge comes, to which it goes, and a number by
which the sum of each node is scaled. Compiled, the gather becomes part of the sum.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

#: Sources and targets of all edges, by target, and the scale of every node, (nodes, 1).
Neighbours = tuple[Tensor, Tensor, Tensor]


def both_ways(edges: Tensor, nodes: int, with_itself: bool = False) -> Tensor:
    """The places (2, E) of every edge of `edges` in both directions, each once, and sorted; edges of a node to itself
    are all there or none is.
    """
    edges = edges[:, edges[0] != edges[1]]
    parts = [edges, edges.flip(0)]
    if with_itself:
        parts.append(torch.arange(nodes, device=edges.device).expand(2, -1))
    places: Tensor = torch.cat(parts, 1).unique(dim=1)  # type: ignore[no-untyped-call]
    return places


def symmetric_neighbours(edges: Tensor, nodes: int) -> Neighbours:
    """For Kipf & Welling's D^-1/2 (A + I) D^-1/2: the scale is that of D^-1/2, before the sum and after it."""
    targets, sources = both_ways(edges, nodes, with_itself=True)
    return sources, targets, _degrees(targets, nodes).rsqrt()


def mean_neighbours(edges: Tensor, nodes: int) -> Neighbours:
    """For the mean over neighbours; a node without any has the mean 0."""
    targets, sources = both_ways(edges, nodes)
    return sources, targets, 1 / _degrees(targets, nodes).clamp(min=1)


def _degrees(targets: Tensor, nodes: int) -> Tensor:
    return torch.bincount(targets, minlength=nodes).float().unsqueeze(1)


class SymmetricSum(nn.Module):
    """D^-1/2 (A + I) D^-1/2 x, of a sparse matrix that is all of this, or of :func:`symmetric_neighbours`."""

    def forward(self, x: Tensor, *graph: Tensor) -> Tensor:
        if len(graph) == 1:
            product: Tensor = torch.sparse.mm(graph[0], x)
            return product
        sources, targets, scale = graph
        return _summed(x * scale, sources, targets, scale)


class NeighbourMean(nn.Module):
    """The mean of the neighbours' x, by :func:`mean_neighbours`. Results are of as many nodes as there are scales."""

    def forward(self, x: Tensor, sources: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
        return _summed(x, sources, targets, scale)


def _summed(x: Tensor, sources: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    zeros = x.new_zeros(scale.shape[0], x.shape[1])
    return zeros.index_add(0, targets, x.index_select(0, sources)) * scale
