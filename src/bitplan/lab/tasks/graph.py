"""Node classification: the class of a graph's nodes from their features and neighbours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, Optimizer

from bitplan.errors import TaskError, nearest_names
from bitplan.lab.models.graph_networks import (
    GAT,
    GAT_HEADS,
    GCN,
    NORMS,
    GraphSAGE,
    Neighbours,
    PublishedGCN,
    PublishedSAGE,
    mean_neighbours,
    symmetric_neighbours,
)
from bitplan.lab.sources.graphs import read_graph
from bitplan.lab.tasks.graph_data import GraphData, Sampler, digits_graph
from bitplan.lab.tasks.task import LoadingTask, Metric, Settings, decayed, fused_for, generator, shuffled
from bitplan.numerics.wire_format import NEIGHBOURS

#: Name -> the network, and the form in which it takes the edges.
NETWORKS: dict[str, tuple[Callable[..., nn.Module], Callable[[Tensor, int], Neighbours]]] = {
    "gcn": (GCN, symmetric_neighbours),
    "sage": (GraphSAGE, mean_neighbours),
    "gat": (GAT, symmetric_neighbours),
    "gcn-published": (PublishedGCN, symmetric_neighbours),
    "sage-published": (PublishedSAGE, mean_neighbours),
}

#: The target of nodes outside the training set, which torch's cross-entropy ignores.
NOT_ASKED = -100


@dataclass(frozen=True)
class GraphSettings(Settings):
    """Settings of node classification; all nodes are one batch, so that a step is an epoch."""

    steps: int = 200
    evaluate_every: int = 20
    lr: float = 1e-2
    #: Nodes per batch, if neighbours are sampled; otherwise all nodes are one batch.
    batch: int = 1024
    #: gcn, sage with the mean of neighbours, gat, or gcn-published and sage-published: layers as in the authors' code.
    model: str = "gcn"
    layers: int = 2
    #: Of all layers but the last.
    features: int = 64
    dropout: float = 0.2
    #: Between layers: none, batch, layer, or whole: over all nodes and features, as in the authors' code.
    norm: str = "none"
    weight_decay: float = 0.0
    #: The learning rate decays as a cosine to this share of its peak.
    last: float = 0.1
    #: Divide the features of each node by their sum.
    normalise: bool = False
    #: For sage: the number of neighbours to sample per layer, such as 10,10; "" takes all.
    fanout: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, choices in (("model", NETWORKS), ("norm", NORMS)):
            if getattr(self, name) not in choices:
                wrong = getattr(self, name)
                raise TaskError(f"there is no {name} {wrong!r}; {nearest_names(wrong, choices)}")
        for name in ("layers", "features"):
            if getattr(self, name) < 1:
                raise TaskError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if not 0 <= self.dropout < 1:
            raise TaskError(f"dropout is {self.dropout}; it must be at least 0 and below 1.")
        if not self.weight_decay >= 0:
            raise TaskError(f"weight_decay is {self.weight_decay}; it must be at least 0.")
        if not 0 <= self.last <= 1:
            raise TaskError(f"last is {self.last}; it must be from 0 to 1, a share of lr.")
        if self.fanout and NETWORKS[self.model][1] is not mean_neighbours:
            raise TaskError("fanout samples neighbours for their mean, which is sage's: set model=sage, or fanout= .")
        if self.model == "gat" and self.layers > 1 and self.features % GAT_HEADS:
            raise TaskError(f"features is {self.features}; gat has {GAT_HEADS} heads, which must divide it.")
        if self.fanout and len(self.fanouts) != self.layers:
            raise TaskError(
                f"fanout={self.fanout} has {len(self.fanouts)} numbers for {self.layers} layers: give each one."
            )

    @property
    def fanouts(self) -> tuple[int, ...]:
        """Neighbours of a node per layer; empty: all of them."""
        if not self.fanout:
            return ()
        numbers = self.fanout.split(",")
        if not all(number.strip().isdigit() and int(number) > 0 for number in numbers):
            raise TaskError(f"fanout={self.fanout}: write a whole number for each layer, such as 10,10.")
        return tuple(map(int, numbers))


class NodeClassification(LoadingTask[GraphData]):
    """Node classification; a graph derives from this and loads its data."""

    settings_class: ClassVar[type[GraphSettings]] = GraphSettings
    settings: GraphSettings

    #: The whole graph on the device of the last evaluation.
    _there: tuple[torch.device, tuple[Tensor, ...]] | None = None

    @property
    def classes(self) -> int:
        return self.data.classes

    @property
    def inputs(self) -> int:
        """Features per node in the data."""
        return self.data.features.shape[1]

    @cached_property
    def metric(self) -> Metric:
        """Accuracy on the test nodes; the trivial predictor always answers the most common class of the graph.

        Training sets of graphs are often balanced, so that theirs is an arbitrary class.
        """
        labels = self.data.labels
        commonest = torch.bincount(labels).argmax()
        return Metric("accuracy", "higher", float((labels[self.data.test] == commonest).double().mean()))

    def model(self) -> nn.Module:
        recipe = self.settings
        network, _ = NETWORKS[recipe.model]
        sizes = (self.inputs, *[recipe.features] * (recipe.layers - 1), self.classes)
        return network(sizes, recipe.dropout, recipe.norm)

    # --- data ---

    @cached_property
    def features(self) -> Tensor:
        """Features per node that the network receives."""
        values = self.data.features
        return values / values.sum(1, keepdim=True).clamp(min=1e-12) if self.settings.normalise else values

    @cached_property
    def _whole(self) -> tuple[Tensor, ...]:
        """All nodes: their features, and the graph in the network's form. The same tensors at every call."""
        with torch.device("cpu"):
            _, neighbours = NETWORKS[self.settings.model]
            return self.features, *neighbours(self.data.edges, self.data.nodes)

    @cached_property
    def _asked(self) -> Tensor:
        """The class of every training node."""
        labels = torch.full((self.data.nodes,), NOT_ASKED)
        labels[self.data.training] = self.data.labels[self.data.training]
        return labels

    @cached_property
    def _sampler(self) -> Sampler:
        return Sampler(self.data.edges, self.data.nodes, self.settings.fanouts)

    def batch(self, step: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """The whole graph, the same tensors in every step; or a sample of nodes and of their neighbours."""
        if not self.settings.fanout:
            return self._whole, self._asked
        training = self.data.training
        chosen = training[shuffled(step, self.settings.batch, len(training), self.seed)]
        nodes, graph = self._sampler.sample(chosen, generator(NEIGHBOURS, self.seed, step))
        return (self.features[nodes], *graph), self.data.labels[chosen]

    # --- recipe ---

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, ignore_index=NOT_ASKED)

    def optimizer(self, model: nn.Module) -> Optimizer:
        recipe, trained = self.settings, list(model.parameters())
        return Adam(trained, recipe.lr, weight_decay=recipe.weight_decay, fused=fused_for(trained))

    def learning_rate(self, step: int) -> float:
        last = self.settings.last
        return last + (1 - last) * decayed("cosine", step, self.settings.steps)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Accuracy on the test nodes, always of the whole graph."""
        device = next(model.parameters()).device
        logits = model(*self._whole_on(device)).float()
        labels = self.data.labels.to(device)
        hits = (logits.argmax(1) == labels).double()
        validation, test = self.data.validation.to(device), self.data.test.to(device)
        return {
            "accuracy": float(hits[test].mean()),
            "validation_accuracy": float(hits[validation].mean()),
            "validation_loss": float(F.cross_entropy(logits[validation], labels[validation])),
        }

    def _whole_on(self, device: torch.device) -> tuple[Tensor, ...]:
        """The whole graph on `device`, copied once."""
        if device.type == "cpu":
            return self._whole
        if self._there is None or self._there[0] != device:
            self._there = device, tuple(part.to(device) for part in self._whole)
        return self._there[1]


@dataclass(frozen=True)
class OwnGraphSettings(GraphSettings):
    """A recipe for graphs of some thousand nodes."""

    #: A graph in an .npz file; without one, the digits and their nearest neighbours.
    data: str = ""


class Graph(NodeClassification):
    """The nearest-neighbour graph of the handwritten digits, or a graph of your own."""

    name = "graph"
    summary = "nodes of a graph of digits, or of yours"
    settings_class = OwnGraphSettings
    settings: OwnGraphSettings

    def load(self) -> GraphData:
        return read_graph(self.settings.data) if self.settings.data else digits_graph()
