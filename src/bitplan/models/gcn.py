"""A graph convolutional network (Kipf & Welling 2016, arXiv 1609.02907)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitplan.models.neighbours import SymmetricSum, both_ways

#: What a layer's features may be normalised by, before their activation function.
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "none": lambda features: nn.Identity(),
    "batch": nn.BatchNorm1d,
    "layer": nn.LayerNorm,
}


def normalised_adjacency(edges: Tensor, nodes: int) -> Tensor:
    """D^-1/2 (A + I) D^-1/2 as a sparse matrix: every edge of `edges` (2, E) in both directions, and every node
    joined to itself. D is the diagonal of row sums of A + I, so that high degrees do not drown low ones.
    """
    places = both_ways(edges, nodes, with_itself=True)
    weight = torch.bincount(places[0], minlength=nodes).float().rsqrt()
    values = weight[places[0]] * weight[places[1]]
    # Asked for, because torch warns where nothing is said about it.
    with torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
        return torch.sparse_coo_tensor(places, values, (nodes, nodes), is_coalesced=True)


class GCN(nn.Module):
    """Features (nodes, inputs) to logits (nodes, classes): a linear and a neighbour sum in every layer.

    The graph is a sparse matrix (:func:`normalised_adjacency`), or three tensors
    (:func:`~bitplan.models.neighbours.symmetric_neighbours`) that torch.compile can follow.
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
