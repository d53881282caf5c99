"""GraphSAGE with mean aggregation (Hamilton et al. 2017, arXiv 1706.02216)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from bitplan.models.gcn import NORMS
from bitplan.models.neighbours import NeighbourMean


class SageLayer(nn.Module):
    """W x_i + V mean(x_j) over the neighbours j of i.

    V comes before the mean, which changes nothing but the order of a sum: so what is averaged is always the result of
    an operation, and has as few features as the layer gives. Nodes whose x is given may be more than those whose
    results are wanted, which come first.
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

    The graph is that of :func:`~bitplan.models.neighbours.mean_neighbours` for all layers, or three such tensors for
    each layer, where neighbours were sampled.
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
