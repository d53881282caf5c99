"""Sums over the neighbours of a graph's nodes.

A graph comes in one of two forms. A sparse matrix is the shorter one, but torch.compile cannot trace sparse tensors. So
graphs for training are three dense tensors: the source and the target of each edge, and a scale for the sum of each
node. Compiled, the gather is fused with the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: Sources and targets of all edges, sorted by target, and the scale of every node, (nodes, 1).
Neighbours = tuple[Tensor, Tensor, Tensor]


def both_ways(edges: Tensor, nodes: int, with_itself: bool = False) -> Tensor:
    """The indices (2, E) of every edge of `edges` in both directions, each once, and sorted; self-loops are all present
    or all absent.
    """
    edges = edges[:, edges[0] != edges[1]]
    parts = [edges, edges.flip(0)]
    if with_itself:
        parts.append(torch.arange(nodes, device=edges.device).expand(2, -1))
    places: Tensor = torch.cat(parts, 1).unique(dim=1)  # type: ignore[no-untyped-call]
    return places


def symmetric_neighbours(edges: Tensor, nodes: int) -> Neighbours:
    """Kipf & Welling's D^-1/2 (A + I) D^-1/2: the scale is D^-1/2, applied before and after the sum."""
    targets, sources = both_ways(edges, nodes, with_itself=True)
    return sources, targets, _degrees(targets, nodes).rsqrt()


def mean_neighbours(edges: Tensor, nodes: int) -> Neighbours:
    """The mean over neighbours; 0 for a node without any."""
    targets, sources = both_ways(edges, nodes)
    return sources, targets, 1 / _degrees(targets, nodes).clamp(min=1)


def _degrees(targets: Tensor, nodes: int) -> Tensor:
    return torch.bincount(targets, minlength=nodes).float().unsqueeze(1)


class SymmetricSum(nn.Module):
    """D^-1/2 (A + I) D^-1/2 x, with a sparse matrix of the whole factor or with :func:`symmetric_neighbours`."""

    def forward(self, x: Tensor, *graph: Tensor) -> Tensor:
        if len(graph) == 1:
            product: Tensor = torch.sparse.mm(graph[0], x)
            return product
        sources, targets, scale = graph
        return _summed(x * scale, sources, targets, scale)


class NeighbourMean(nn.Module):
    """The mean of the neighbours' x, by :func:`mean_neighbours`. There are as many results as scales."""

    def forward(self, x: Tensor, sources: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
        return _summed(x, sources, targets, scale)


def _summed(x: Tensor, sources: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    zeros = x.new_zeros(scale.shape[0], x.shape[1])
    return zeros.index_add(0, targets, x.index_select(0, sources)) * scale


# --- A graph convolutional network (Kipf & Welling 2016, arXiv 1609.02907)


#: Normalisations of a layer's features, before the activation function.
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "none": lambda features: nn.Identity(),
    "batch": nn.BatchNorm1d,
    "layer": nn.LayerNorm,
}


def normalised_adjacency(edges: Tensor, nodes: int) -> Tensor:
    """D^-1/2 (A + I) D^-1/2 as a sparse matrix: every edge of `edges` (2, E) in both directions, with self-loops. D is
    the diagonal of row sums of A + I, so that nodes of high degree do not dominate.
    """
    places = both_ways(edges, nodes, with_itself=True)
    weight = torch.bincount(places[0], minlength=nodes).float().rsqrt()
    values = weight[places[0]] * weight[places[1]]
    # Explicit, because torch warns if the argument is missing.
    with torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
        return torch.sparse_coo_tensor(places, values, (nodes, nodes), is_coalesced=True)


class GCN(nn.Module):
    """Features (nodes, inputs) to logits (nodes, classes): a linear layer and a neighbour sum per layer.

    The graph is a sparse matrix (:func:`normalised_adjacency`), or three tensors (:func:`symmetric_neighbours`) that
    torch.compile can trace.
    """

    def __init__(self, sizes: Sequence[int], dropout: float = 0.2, norm: str = "none") -> None:
        super().__init__()
        if len(sizes) < 2:
            raise ValueError("a GCN needs at least two sizes: of the inputs and of the classes.")
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))
        self.sums = nn.ModuleList(SymmetricSum() for _ in self.layers)
        self.norms = nn.ModuleList(NORMS[norm](features) for features in sizes[1:-1])
        self.dropout = dropout

    def forward(self, x: Tensor, *graph: Tensor) -> Tensor:
        for number, (layer, neighbours) in enumerate(zip(self.layers, self.sums, strict=True)):
            if number > 0:
                x = F.dropout(F.relu(self.norms[number - 1](x)), self.dropout, self.training)
            x = neighbours(layer(x), *graph)
        return x


# --- GraphSAGE with mean aggregation (Hamilton et al. 2017, arXiv 1706.02216)


class SageLayer(nn.Module):
    """W x_i + V mean(x_j) over the neighbours j of i.

    V is applied before the mean, which changes only the order of a sum: so the averaged tensor is always the result of
    an operation, and has as few features as the layer's output. There may be more input nodes than results; the nodes
    with results come first.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.itself = nn.Linear(inputs, outputs)
        self.others = nn.Linear(inputs, outputs, bias=False)
        self.mean = NeighbourMean()

    def forward(self, x: Tensor, sources: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
        mean: Tensor = self.mean(self.others(x), sources, targets, scale)
        own: Tensor = self.itself(x.narrow(0, 0, scale.shape[0]))
        return mean + own


class GraphSAGE(nn.Module):
    """Features (nodes, inputs) to logits (nodes, classes).

    The graph is that of :func:`mean_neighbours` for all layers, or three such tensors per layer if neighbours were
    sampled.
    """

    def __init__(self, sizes: Sequence[int], dropout: float = 0.2, norm: str = "none") -> None:
        super().__init__()
        if len(sizes) < 2:
            raise ValueError("GraphSAGE needs at least two sizes: of the inputs and of the classes.")
        self.layers = nn.ModuleList(SageLayer(*pair) for pair in pairwise(sizes))
        self.norms = nn.ModuleList(NORMS[norm](features) for features in sizes[1:-1])
        self.dropout = dropout

    def forward(self, x: Tensor, *graph: Tensor) -> Tensor:
        if len(graph) == 3:
            graph = graph * len(self.layers)
        for number, layer in enumerate(self.layers):
            if number > 0:
                x = F.dropout(F.relu(self.norms[number - 1](x)), self.dropout, self.training)
            x = layer(x, *graph[3 * number : 3 * number + 3])
        return x
