"""A graph convolutional network (Kipf & Welling 2016, arXiv 1609.02907) on a sparse adjacency matrix."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def normalised_adjacency(edges: Tensor, nodes: int) -> Tensor:
    """D^-1/2 (A + I) D^-1/2 as a sparse matrix: every edge of `edges` (2, E) in both directions, and every node
    joined to itself. D is the diagonal of row sums of A + I, so that high degrees do not drown low ones.
    """
    itself = torch.arange(nodes, device=edges.device).expand(2, -1)
    places = torch.cat([edges, edges.flip(0), itself], 1).unique(dim=1)  # type: ignore[no-untyped-call]
    ones = torch.ones(places.shape[1], device=edges.device)
    weight = torch.zeros(nodes, device=edges.device).index_add(0, places[0], ones).rsqrt()
    values = weight[places[0]] * weight[places[1]]
    # Asked for, because torch warns where nothing is said about it.
    with torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
        return torch.sparse_coo_tensor(places, values, (nodes, nodes), is_coalesced=True)


class GCN(nn.Module):
    """Features (nodes, inputs) to logits (nodes, classes): a linear and a neighbour sum in every layer."""

    def __init__(self, sizes: Sequence[int], dropout: float = 0.2) -> None:
        super().__init__()
        if len(sizes) < 2:
            raise ValueError("a GCN needs at least two sizes: of the inputs and of the classes.")
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))
        self.dropout = dropout

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number > 0:
                x = F.dropout(F.relu(x), self.dropout, self.training)
            x = torch.sparse.mm(adjacency, layer(x))
        return x
