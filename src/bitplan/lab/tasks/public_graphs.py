"""Node classification on public graphs, from local files or downloaded by OGB's package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from bitplan.errors import TaskError
from bitplan.lab.models.graph_networks import symmetric_neighbours
from bitplan.lab.sources.files import DOWNLOADS, Sought, read_set
from bitplan.lab.sources.graphs import read_npz, read_ogb, read_planetoid, with_ogb
from bitplan.lab.tasks.graph import NETWORKS, GraphSettings, NodeClassification
from bitplan.lab.tasks.graph_data import GraphData, Sampler
from bitplan.lab.tasks.task import generator
from bitplan.numerics.wire_format import NEIGHBOURS


@dataclass(frozen=True)
class PublicGraphSettings(GraphSettings):
    """The usual recipe for citation graphs: the features of a node sum to 1."""

    #: The graph's .npz file, or its folder.
    data: str = ""
    normalise: bool = True
    weight_decay: float = 5e-4


class PublicGraph(NodeClassification):
    """A graph whose sizes are known without its files, so that sites, plans and costs need no download."""

    settings_class: ClassVar[type[PublicGraphSettings]] = PublicGraphSettings
    settings: PublicGraphSettings
    #: Nodes, features per node, classes, and edges counted in both directions.
    sizes: ClassVar[tuple[int, int, int, int]]
    #: Possible names of its file, without .npz.
    files: ClassVar[Sequence[str]]

    @property
    def inputs(self) -> int:
        return self.sizes[1]

    @property
    def classes(self) -> int:
        return self.sizes[2]

    def example(self) -> tuple[tuple[Tensor, ...], Tensor]:
        nodes, features, _, edges = self.sizes
        recipe = self.settings
        if not recipe.fanout:
            count = edges + nodes * (NETWORKS[recipe.model][1] is symmetric_neighbours)
            ends = [torch.zeros(count, dtype=torch.long) for _ in range(2)]
            return (torch.zeros(nodes, features), *ends, torch.ones(nodes, 1)), torch.zeros(nodes, dtype=torch.long)
        sizes = Sampler.sizes(recipe.batch, recipe.fanouts)
        graph: list[Tensor] = []
        for count, fanout in zip(sizes[1:], recipe.fanouts, strict=True):
            graph += [torch.zeros(count * fanout, dtype=torch.long) for _ in range(2)]
            graph.append(torch.ones(count, 1))
        return (torch.zeros(sizes[0], features), *graph), torch.zeros(recipe.batch, dtype=torch.long)

    def load(self) -> GraphData:
        path = Path(self.settings.data).expanduser()
        if self.settings.data and path.is_file():
            return self._fitting(read_npz(path))
        names = [f"{name}.npz" for name in self.files]
        folder = path if self.settings.data else Path(DOWNLOADS)
        for name in names:
            if (folder / name).is_file():
                return self._fitting(read_npz(folder / name))
        graph = read_planetoid(folder, self.name)
        if graph is not None:
            return self._fitting(graph)
        where = f"{self.settings.data} holds no {self.name}" if self.settings.data else f"{self.name} is not here"
        raise TaskError(f"{where}: set data= to its file, {' or '.join(names)}, or to the folder that has it.")

    def _fitting(self, graph: GraphData) -> GraphData:
        sizes = (graph.nodes, graph.features.shape[1], graph.classes)
        if sizes != self.sizes[:3]:
            raise TaskError(
                "this is not {}, which has {} nodes, {} features and {} classes, not {}, {} and {}: read it with the "
                "task graph.".format(self.name, *self.sizes[:3], *sizes)
            )
        return graph


class Cora(PublicGraph):
    """Cora in Planetoid's split: papers that cite each other."""

    name = "cora"
    summary = "Cora: subjects of papers that cite each other"
    sizes = (2708, 1433, 7, 10_556)
    files = ("planetoid_cora", "cora")


class Citeseer(PublicGraph):
    """Citeseer in Planetoid's split."""

    name = "citeseer"
    summary = "Citeseer, the same"
    sizes = (3327, 3703, 6, 9104)
    files = ("planetoid_citeseer", "citeseer")


@dataclass(frozen=True)
class LargerGraphSettings(PublicGraphSettings):
    """Without weight decay: there is more to learn from."""

    weight_decay: float = 0.0
    steps: int = 300


class AmazonPhoto(PublicGraph):
    """Photographic products that are bought together."""

    name = "amazon-photo"
    summary = "goods that are bought together"
    settings_class = LargerGraphSettings
    sizes = (7650, 745, 8, 238_162)
    files = ("amazon_photo", "amazon_electronics_photo")


class CoauthorCS(PublicGraph):
    """Computer scientists who wrote papers together."""

    name = "coauthor-cs"
    summary = "fields of authors who wrote together"
    settings_class = LargerGraphSettings
    sizes = (18_333, 6805, 15, 163_788)
    files = ("coauthor_cs", "ms_academic_cs")


@dataclass(frozen=True)
class ArxivSettings(PublicGraphSettings):
    """The recipe of Wolfe & Kyrillidis: three layers, 128-512-512-40, full batch, Adam at 1e-3."""

    steps: int = 500
    evaluate_every: int = 25
    lr: float = 1e-3
    layers: int = 3
    features: int = 512
    normalise: bool = False
    weight_decay: float = 0.0
    #: Download it with OGB's package.
    download: bool = False


class OgbGraph(PublicGraph):
    """A graph of OGB, read from the text files of its archive."""

    @property
    def sought(self) -> Sought:
        """The files, in words."""
        folder, archive = self.name.replace("-", "_"), self.name.removeprefix("ogbn-")
        return Sought(
            self.name,
            f"a folder with {folder}/raw and {folder}/split",
            f"unpack the archive {archive}.zip of OGB",
        )

    def load(self) -> GraphData:
        folder = self.name.replace("-", "_")
        fetch = partial(with_ogb, self.name) if self.settings.download else None  # type: ignore[attr-defined]
        return self._fitting(read_set(self.sought, partial(read_ogb, name=folder), self.settings.data, download=fetch))


class OgbnArxiv(OgbGraph):
    """OGB's graph of computer-science papers on arXiv, split by year."""

    name = "ogbn-arxiv"
    summary = "subjects of arXiv's papers"
    settings_class = ArxivSettings
    settings: ArxivSettings
    sizes = (169_343, 128, 40, 2_315_598)
    files = ()


@dataclass(frozen=True)
class ProductsSettings(ArxivSettings):
    """The recipe of Wolfe & Kyrillidis: GraphSAGE of two layers and 512 features, 32 neighbours each, 80 epochs."""

    #: 80 epochs of 193 batches.
    steps: int = 15_440
    batch: int = 1024
    evaluate_every: int = 965
    model: str = "sage-published"
    layers: int = 2
    norm: str = "whole"
    fanout: str = "32,32"
    #: Batches of each evaluation, which samples neighbours as training does; 0: all nodes of the split.
    evaluation: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.evaluation < 0:
            raise TaskError(f"evaluation is {self.evaluation}; it must be at least 0 (which is all nodes).")


class OgbnProducts(OgbGraph):
    """OGB's graph of products that are bought together, split by sales rank.

    Its 2.4 million nodes do not fit into one batch: evaluation samples neighbours, too, the same in each evaluation.
    """

    name = "ogbn-products"
    summary = "categories of goods that are bought together"
    settings_class = ProductsSettings
    settings: ProductsSettings
    sizes = (2_449_029, 100, 47, 123_718_280)
    files = ()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        if not self.settings.fanout:
            return super().evaluate(model)
        test, _ = self._sampled(model, self.data.test, "test")
        validation, loss = self._sampled(model, self.data.validation, "validation")
        return {"accuracy": test, "validation_accuracy": validation, "validation_loss": loss}

    def _sampled(self, model: nn.Module, nodes: Tensor, split: str) -> tuple[float, float]:
        """Accuracy and mean loss on nodes of a split, with sampled neighbours."""
        device, recipe = next(model.parameters()).device, self.settings
        last = min(len(nodes), (recipe.evaluation or len(nodes)) * recipe.batch)
        hits = losses = count = 0.0
        for number, first in enumerate(range(0, last, recipe.batch)):
            chosen = nodes[first : first + recipe.batch]
            # A short last batch is filled up with its own nodes: one shape for compiled models.
            filled = chosen[torch.arange(recipe.batch) % len(chosen)]
            sampled, graph = self._sampler.sample(filled, generator(NEIGHBOURS, split, number))
            inputs = (self.features[sampled], *graph)
            logits = model(*(tensor.to(device) for tensor in inputs))[: len(chosen)].float().cpu()
            labels = self.data.labels[chosen]
            hits += float((logits.argmax(1) == labels).sum())
            losses += float(functional.cross_entropy(logits, labels, reduction="sum"))
            count += len(chosen)
        return hits / count, losses / count
