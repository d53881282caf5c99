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
    # One number for each edge: to sort pairs takes ten times as long, and 123 million edges more memory than there is.
    pairs = torch.cat(parts, 1)
    numbers: Tensor = (pairs[0] * nodes + pairs[1]).unique()  # type: ignore[no-untyped-call]
    return torch.stack([numbers // nodes, numbers % nodes])


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


class WholeNorm(nn.Module):
    """Mean 0 and variance 1 over all nodes and features at once, without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape)


#: Normalisations of a layer's features, before the activation function.
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "none": lambda features: nn.Identity(),
    "batch": nn.BatchNorm1d,
    "layer": nn.LayerNorm,
    "whole": lambda features: WholeNorm(),
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


# --- The layers of the authors of arXiv 2403.02243, who used those of DGL


class GraphConvolution(nn.Module):
    """D^-1/2 (A + I) D^-1/2 x W + b, where the bias comes last, and W comes first if it makes the features fewer."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Tensor, sources: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
        x = x * scale
        if self.weight.shape[0] > self.weight.shape[1]:
            x = _plain_sum(x @ self.weight, sources, targets, scale)
        else:
            x = _plain_sum(x, sources, targets, scale) @ self.weight
        return x * scale + self.bias


class SageConvolution(nn.Module):
    """W x_i + V mean(x_j) + b, where V comes before the mean only if it makes the features fewer."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.others = nn.Linear(inputs, outputs, bias=False)
        self.itself = nn.Linear(inputs, outputs, bias=False)
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.mean = NeighbourMean()
        nn.init.xavier_uniform_(self.others.weight, gain=nn.init.calculate_gain("relu"))

    def forward(self, x: Tensor, sources: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
        if self.others.in_features > self.others.out_features:
            others: Tensor = self.mean(self.others(x), sources, targets, scale)
        else:
            others = self.others(self.mean(x, sources, targets, scale))
        both: Tensor = self.itself(x.narrow(0, 0, scale.shape[0])) + others
        return both + self.bias


def _plain_sum(x: Tensor, sources: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    return x.new_zeros(scale.shape[0], x.shape[1]).index_add(0, targets, x.index_select(0, sources))


class PublishedGraphNetwork(nn.Module):
    """Layers as the authors stack them: the activation function, then the norm, then dropout, between two layers.

    The graph is that of :func:`symmetric_neighbours` or :func:`mean_neighbours` for all layers, or three such tensors
    per layer.
    """

    layer: type[GraphConvolution] | type[SageConvolution]

    def __init__(self, sizes: Sequence[int], dropout: float = 0.2, norm: str = "none") -> None:
        super().__init__()
        if len(sizes) < 2:
            raise ValueError("a graph network needs at least two sizes: of the inputs and of the classes.")
        self.layers = nn.ModuleList(self.layer(*pair) for pair in pairwise(sizes))
        self.norms = nn.ModuleList(NORMS[norm](features) for features in sizes[1:-1])
        self.dropout = dropout

    def forward(self, x: Tensor, *graph: Tensor) -> Tensor:
        graphs = [graph[first : first + 3] for first in range(0, len(graph), 3)]
        graphs = graphs * len(self.layers) if len(graphs) == 1 else graphs
        x = self.layers[0](x, *graphs[0])
        for norm, layer, neighbours in zip(self.norms, self.layers[1:], graphs[1:], strict=True):
            x = layer(F.dropout(norm(F.relu(x)), self.dropout, self.training), *neighbours)
        return x


class PublishedGCN(PublishedGraphNetwork):
    """The GCN of arXiv 2403.02243."""

    layer = GraphConvolution


class PublishedSAGE(PublishedGraphNetwork):
    """The GraphSAGE of arXiv 2403.02243."""

    layer = SageConvolution


# --- Graph attention (Velickovic et al. 2017, arXiv 1710.10903)


class GATLayer(nn.Module):
    """Each head multiplies features by a matrix, scores every edge by a linear function of both of its ends, and sums
    the neighbours' features with weights that are a softmax over each node's edges. Heads are joined, or averaged.
    """

    def __init__(self, inputs: int, outputs: int, heads: int, *, joined: bool, dropout: float) -> None:
        """`outputs` are those of each head."""
        super().__init__()
        self.heads, self.outputs, self.joined, self.dropout = heads, outputs, joined, dropout
        self.features = nn.Linear(inputs, heads * outputs, bias=False)
        # One linear function of both ends is the sum of one of each; per head, hence no linear layer.
        self.source_score = nn.Parameter(torch.empty(heads, outputs))
        self.target_score = nn.Parameter(torch.empty(heads, outputs))
        self.bias = nn.Parameter(torch.zeros(heads * outputs if joined else outputs))
        nn.init.xavier_uniform_(self.features.weight)
        nn.init.xavier_uniform_(self.source_score)
        nn.init.xavier_uniform_(self.target_score)

    def forward(self, x: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
        nodes = x.shape[0]
        made = self.features(F.dropout(x, self.dropout, self.training)).view(nodes, self.heads, self.outputs)
        scores = (made * self.source_score).sum(-1).index_select(0, sources)
        scores = scores + (made * self.target_score).sum(-1).index_select(0, targets)
        weights = F.dropout(_edge_softmax(F.leaky_relu(scores, 0.2), targets, nodes), self.dropout, self.training)
        weighted = made.index_select(0, sources) * weights.unsqueeze(-1)
        summed = torch.zeros_like(made).index_add(0, targets, weighted)
        joined = summed.flatten(1) if self.joined else summed.mean(1)
        return joined + self.bias


def _edge_softmax(scores: Tensor, targets: Tensor, nodes: int) -> Tensor:
    """The softmax over the edges that end in the same node, head by head."""
    index = targets.unsqueeze(-1).expand_as(scores)
    largest = scores.new_full((nodes, scores.shape[1]), float("-inf"))
    largest = largest.scatter_reduce(0, index, scores.detach(), "amax")
    powers = (scores - largest.index_select(0, targets)).exp()
    sums = powers.new_zeros(nodes, powers.shape[1]).index_add(0, targets, powers)
    return powers / sums.index_select(0, targets)


#: Heads of every layer of a GAT but the last, which has one.
GAT_HEADS = 8


class GAT(nn.Module):
    """Features (nodes, inputs) to logits (nodes, classes); the width of hidden layers is that of all heads together.

    The graph is that of :func:`symmetric_neighbours`, whose scale is not used: attention makes weights of its own.
    """

    def __init__(self, sizes: Sequence[int], dropout: float = 0.6, norm: str = "none", heads: int = GAT_HEADS) -> None:
        super().__init__()
        if len(sizes) < 2:
            raise ValueError("a GAT needs at least two sizes: of the inputs and of the classes.")
        if any(size % heads for size in sizes[1:-1]):
            raise ValueError(f"a GAT with {heads} heads has hidden layers of multiples of {heads}, not {sizes[1:-1]}.")
        hidden = [
            GATLayer(inputs, outputs // heads, heads, joined=True, dropout=dropout)
            for inputs, outputs in pairwise(sizes[:-1])
        ]
        last = GATLayer(sizes[-2], sizes[-1], 1, joined=False, dropout=dropout)
        self.layers = nn.ModuleList([*hidden, last])
        self.norms = nn.ModuleList(NORMS[norm](features) for features in sizes[1:-1])

    def forward(self, x: Tensor, sources: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number > 0:
                x = self.norms[number - 1](F.elu(x))
            x = layer(x, sources, targets)
        return x
