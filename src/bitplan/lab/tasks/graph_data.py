"""Graphs whose nodes have features and classes, for node classification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from bitplan.errors import TaskError
from bitplan.lab.models.graph_networks import both_ways
from bitplan.lab.tasks.images import digits
from bitplan.lab.tasks.task import generator
from bitplan.numerics.wire_format import DIGITS_GRAPH, GRAPH_SPLIT

# --- Samples of a graph: nodes, neighbours, and neighbours of these, in constant shapes


class Sampler:
    """Samples a fixed number of neighbours per node and layer.

    Neighbours are drawn uniformly with replacement, so that the mean of the sample is an unbiased estimate of the mean
    of all. Every sample has the same shapes, so that one compiled graph serves all of them.
    """

    def __init__(self, edges: Tensor, nodes: int, fanouts: Sequence[int]) -> None:
        targets, self.sources = both_ways(edges, nodes)
        self.degrees = torch.bincount(targets, minlength=nodes)
        self.firsts = self.degrees.cumsum(0) - self.degrees
        self.fanouts = tuple(fanouts)

    def sample(self, nodes: Tensor, draws: torch.Generator) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The nodes whose features are needed, and the tensors of each layer, first to last, as GraphSAGE takes them.

        The given nodes come first, then the sampled neighbours of each, then those of all these.
        """
        layers: list[tuple[Tensor, Tensor, Tensor]] = []
        for fanout in reversed(self.fanouts):
            count = len(nodes)
            degrees = self.degrees[nodes]
            chance = torch.rand(count, fanout, generator=draws, dtype=torch.float64)
            places = self.firsts[nodes, None] + (chance * degrees[:, None]).long()
            # A node without neighbours samples any node, with a scale of zero.
            drawn = self.sources[places.clamp(max=len(self.sources) - 1)]
            scale = (degrees > 0).float().unsqueeze(1) / fanout
            layers.append((count + torch.arange(count * fanout), torch.arange(count).repeat_interleave(fanout), scale))
            nodes = torch.cat([nodes, drawn.flatten()])
        return nodes, tuple(part for layer in reversed(layers) for part in layer)

    @staticmethod
    def sizes(batch: int, fanouts: Sequence[int]) -> list[int]:
        """The number of nodes before the first layer, before the second, ..., and after the last.

        >>> Sampler.sizes(2, (10, 5))
        [132, 12, 2]
        """
        return [*reversed([*accumulate(reversed(fanouts), lambda count, fanout: count * (1 + fanout), initial=batch)])]


#: Digits of each class in the training set, and in the validation set.
DIGITS_TOLD, DIGITS_VALIDATION = 20, 300
#: Each digit is connected to its nearest neighbours.
DIGITS_NEIGHBOURS = 8

#: The usual split of graphs that come without one (Shchur et al. 2018, arXiv 1811.05868), nodes of each class.
USUAL_TOLD, USUAL_VALIDATION = 20, 30


@dataclass(frozen=True)
class GraphData:
    """A graph with its training, validation and test nodes."""

    #: (nodes, features), float32.
    features: Tensor
    #: (2, edges); directions and duplicates do not matter.
    edges: Tensor
    #: The class of every node.
    labels: Tensor
    #: Indices of nodes.
    training: Tensor
    validation: Tensor
    test: Tensor

    def __post_init__(self) -> None:
        if self.features.dim() != 2 or self.labels.shape != (self.nodes,):
            raise TaskError(
                f"features of shape {[*self.features.shape]} and {self.labels.numel()} labels do not make a graph: "
                f"each node has a row and a label."
            )
        if self.edges.dim() != 2 or self.edges.shape[0] != 2:
            raise TaskError(f"edges are of shape {[*self.edges.shape]}; they must be two rows: from and to.")
        for numbers, what in (
            *((self.edges, "an edge"), (self.training, "the training set")),
            *((self.validation, "the validation set"), (self.test, "the test set")),
        ):
            if numbers.numel() == 0 and numbers is not self.edges:
                raise TaskError(f"{what} of this graph has no node: it takes some of each.")
            if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < self.nodes:
                raise TaskError(
                    f"{what} names node {int(numbers.max())}, and the graph has {self.nodes}: it is damaged."
                )
        if not self.nodes or int(self.labels.min()) < 0:
            raise TaskError("every node of a graph needs a class, a number from 0 up.")

    @property
    def nodes(self) -> int:
        return self.features.shape[0]

    @property
    def classes(self) -> int:
        return int(self.labels.max()) + 1


def nearest_neighbours(points: Tensor, count: int) -> Tensor:
    """The edges (2, n count) from each of n points to its nearest ones; ties go to the point listed first.

    >>> nearest_neighbours(torch.tensor([[0], [1], [3]]), 1).tolist()
    [[0, 1, 2], [1, 0, 1]]
    """
    wide = points.double()  # integers stay exact: the graph is the same on every machine
    squares = wide.square().sum(1)
    apart = squares[:, None] + squares - 2 * wide @ wide.T
    apart.fill_diagonal_(torch.inf)
    near = apart.argsort(dim=1, stable=True)[:, :count]
    return torch.stack([torch.arange(len(points)).repeat_interleave(count), near.flatten()])


def digits_graph() -> GraphData:
    """The nearest neighbours among the 1,797 handwritten digits. Other writers wrote the test digits."""
    pictures = digits()
    parts = (pictures.training, pictures.held_out)
    pixels = torch.cat([part.take(torch.arange(len(part)))[:, 0].flatten(1) for part in parts])
    labels = torch.cat([part.labels for part in parts])
    own = len(pictures.training)
    order = torch.randperm(own, generator=generator(DIGITS_GRAPH))
    labelled, rest = first_of_each(order, labels, DIGITS_TOLD)
    edges = nearest_neighbours(pixels, DIGITS_NEIGHBOURS)
    return GraphData(pixels / 16, edges, labels, labelled, rest[:DIGITS_VALIDATION], torch.arange(own, len(labels)))


def first_of_each(order: Tensor, labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` nodes of each class in an order of nodes, and the remaining ones.

    >>> first_of_each(torch.tensor([2, 0, 1, 3]), torch.tensor([5, 5, 5, 6]), 2)
    (tensor([2, 0, 3]), tensor([1]))
    """
    seen: dict[int, int] = {}
    taken = []
    for label in labels[order].tolist():
        seen[label] = seen.get(label, 0) + 1
        taken.append(seen[label] <= count)
    chosen = torch.tensor(taken)
    return order[chosen], order[~chosen]


def usual_split(labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Training, validation and test nodes: the same for every seed of a run."""
    order = torch.randperm(len(labels), generator=generator(GRAPH_SPLIT))
    labelled, rest = first_of_each(order, labels, USUAL_TOLD)
    validation, test = first_of_each(rest, labels, USUAL_VALIDATION)
    return labelled, validation, test
