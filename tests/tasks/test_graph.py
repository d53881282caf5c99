from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitplan.errors import TaskError
from bitplan.lab.tasks.graph import NOT_ASKED, Graph, OwnGraphSettings
from bitplan.lab.tasks.graph_data import (
    GraphData,
    Sampler,
    digits_graph,
    first_of_each,
    nearest_neighbours,
    usual_split,
)
from bitplan.lab.tasks.registry import find_task
from bitplan.lab.train import RunFolder, train
from bitplan.planners import cpt_plan


def test_the_graph_of_digits() -> None:
    graph = digits_graph()
    assert (graph.nodes, graph.classes, graph.features.shape[1]) == (1797, 10, 64)
    assert float(graph.features.max()) == 1.0
    assert torch.bincount(graph.labels[graph.training]).tolist() == [20] * 10
    parts = [set(part.tolist()) for part in (graph.training, graph.validation, graph.test)]
    assert [len(part) for part in parts] == [200, 300, 360]
    assert len(set.union(*parts)) == sum(map(len, parts))
    # Neighbours look alike: they are mostly the same digit, which is what there is to learn.
    sources, targets = graph.edges
    assert float((graph.labels[sources] == graph.labels[targets]).float().mean()) > 0.9


def test_nearest_neighbours_are_those_that_a_search_finds() -> None:
    points = torch.randint(0, 17, (40, 5), generator=torch.Generator().manual_seed(0))
    edges = nearest_neighbours(points, 3)
    for node in range(40):
        apart = (points - points[node]).square().sum(1)
        others = sorted((int(apart[other]), other) for other in range(40) if other != node)
        assert edges[1, edges[0] == node].tolist() == [other for _, other in others[:3]]


def test_the_usual_split_takes_twenty_and_thirty_of_each_class() -> None:
    labels = torch.arange(300) % 4
    reported, validation, test = usual_split(labels)
    assert torch.bincount(labels[reported]).tolist() == [20] * 4
    assert torch.bincount(labels[validation]).tolist() == [30] * 4
    assert sorted(torch.cat([reported, validation, test]).tolist()) == list(range(300))
    assert all(torch.equal(a, b) for a, b in zip(usual_split(labels), (reported, validation, test), strict=True))


def test_a_class_with_few_nodes_gives_all_of_them() -> None:
    assert first_of_each(torch.arange(3), torch.tensor([0, 1, 1]), 2)[0].tolist() == [0, 1, 2]


class Knows(nn.Module):
    """Tells the right class of every node but the first `wrong` of the test nodes."""

    def __init__(self, graph: GraphData, wrong: int) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(1))
        self.told = graph.labels.clone()
        self.told[graph.test[:wrong]] = (self.told[graph.test[:wrong]] + 1) % graph.classes

    def forward(self, x: Tensor, *graph: Tensor) -> Tensor:
        return nn.functional.one_hot(self.told, 10).float()


def test_accuracy_is_that_of_test_nodes() -> None:
    task = Graph()
    figures = task.evaluate(Knows(task.data, wrong=36))
    assert figures["accuracy"] == pytest.approx(0.9)
    assert figures["validation_accuracy"] == 1.0
    commonest = torch.bincount(task.data.labels).argmax()
    assert task.metric.trivial == pytest.approx(float((task.data.labels[task.data.test] == commonest).float().mean()))


def test_the_trivial_predictor_answers_the_largest_class_of_the_graph() -> None:
    """A balanced training set has no largest class; 60 of the graph's 100 nodes are of class 2."""
    labels = torch.tensor([0] * 20 + [1] * 20 + [2] * 60)
    training, test = torch.tensor([0, 20, 40]), torch.arange(10, 100)

    class Unbalanced(Graph):
        def load(self) -> GraphData:
            nodes = torch.randn(100, 3), torch.zeros(2, 0, dtype=torch.long)
            return GraphData(*nodes, labels, training, torch.tensor([1]), test)

    assert Unbalanced().metric.trivial == pytest.approx(60 / 90)


def test_only_training_nodes_are_learnt_from_and_every_step_is_the_same_batch() -> None:
    task = Graph()
    inputs, requests = task.batch(0)
    assert sorted((requests != NOT_ASKED).nonzero().flatten().tolist()) == sorted(task.data.training.tolist())
    again, _ = task.batch(5)
    assert all(first is second for first, second in zip(inputs, again, strict=True))  # so that nobody copies it again


def test_labels_of_other_nodes_do_not_matter() -> None:
    task = Graph()
    (_, target), logits = task.batch(0), torch.randn(1797, 10)
    before = task.loss(logits, target)
    logits[task.data.test] += 1
    assert torch.equal(task.loss(logits, target), before)


@pytest.mark.parametrize("model", ["gcn", "sage", "gat", "gcn-published", "sage-published"])
@pytest.mark.parametrize("norm", ["none", "layer", "whole"])
def test_networks_take_a_batch(model: str, norm: str) -> None:
    task = Graph(OwnGraphSettings(model=model, norm=norm, layers=3, features=8))
    inputs, _ = task.batch(0)
    assert task.model()(*inputs).shape == (1797, 10)


def test_the_learning_rate_falls_to_its_last_share() -> None:
    task = find_task("ogbn-arxiv")
    assert task.learning_rate(0) == 1.0
    assert task.learning_rate(250) == pytest.approx(0.55)
    assert task.learning_rate(500) == pytest.approx(0.1)
    sizes = [parameter.shape[1] for parameter in task.model().parameters() if parameter.dim() == 2]
    assert sizes == [128, 512, 512]


# --- samples ---


def test_a_sample_says_what_the_whole_graph_says_on_average() -> None:
    edges = torch.tensor([[0, 0, 0, 4], [1, 2, 3, 1]])
    sampler = Sampler(edges, 6, (400,))
    nodes, (sources, targets, scale) = sampler.sample(torch.tensor([0, 5]), torch.Generator().manual_seed(0))
    assert nodes[:2].tolist() == [0, 5]
    drawn = nodes[sources[targets == 0]]
    assert set(drawn.tolist()) == {1, 2, 3}
    assert float((drawn == 1).float().mean()) == pytest.approx(1 / 3, abs=0.1)
    assert scale.flatten().tolist() == pytest.approx([1 / 400, 0])  # node 5 has no neighbour, and so no mean


def test_shapes_of_samples_never_change_and_fit_the_network() -> None:
    task = find_task("graph", ["model=sage", "fanout=3,2", "batch=10"])
    shapes = {tuple(part.shape for part in task.batch(step)[0]) for step in range(3)}
    assert len(shapes) == 1
    inputs, target = task.batch(0)
    assert len(inputs[0]) == Sampler.sizes(10, (3, 2))[0] == 10 * 3 * 4
    assert task.model()(*inputs).shape == (10, 10)
    assert target.shape == (10,)


def test_samples_are_a_function_of_seed_and_step() -> None:
    chosen = ["model=sage", "fanout=3,2", "batch=10"]
    first, again, other = (find_task("graph", chosen, seed=seed) for seed in (1, 1, 2))
    third = first.batch(3)
    again.batch(0)
    assert all(torch.equal(a, b) for a, b in zip(third[0], again.batch(3)[0], strict=True))
    assert not torch.equal(third[1], other.batch(3)[1]) or not torch.equal(third[0][0], other.batch(3)[0][0])


# --- runs ---


@pytest.mark.parametrize("settings", [[], ["model=sage", "fanout=2,2", "batch=20"]])
def test_a_stopped_run_under_a_plan_goes_on_bit_for_bit(tmp_path: Path, settings: list[str]) -> None:
    chosen = ["steps=6", "evaluate_every=3", "features=8", *settings]
    task = find_task("graph", chosen)
    target = task.target()
    plan = cpt_plan(target.model, target.batch, target.loss, quantized_aggregation=True)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(find_task("graph", chosen), plan, folder=whole)
    seen: list[int] = []
    options: dict[str, Any] = {"on_progress": lambda now: seen.append(now.step), "stop": lambda: seen[-1:] == [4]}
    assert train(find_task("graph", chosen), plan, folder=parts, **options).status == "stopped"
    assert train(find_task("graph", chosen), plan, folder=parts).status == "finished"
    first, second = (RunFolder(folder) for folder in (whole, parts))
    assert first.metrics_file.read_bytes() == second.metrics_file.read_bytes()
    assert first.model_file.read_bytes() == second.model_file.read_bytes()


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        (["model=gin"], r"there is no model 'gin'"),
        (["model=gat", "features=12"], r"features is 12; gat has 8 heads"),
        (["model=gat", "fanout=5,5"], r"which is sage's: set model=sage"),
        (["norm=group"], r"there is no norm 'group'"),
        (["layers=0"], r"layers is 0; it must be at least 1\."),
        (["dropout=1"], r"dropout is 1\.0; it must be at least 0 and below 1\."),
        (["last=2"], r"last is 2\.0; it must be from 0 to 1"),
        (["weight_decay=-1"], r"weight_decay is -1\.0"),
        (["fanout=5,5"], r"which is sage's: set model=sage"),
        (["model=sage", "fanout=5"], r"fanout=5 has 1 numbers for 2 layers"),
        (["model=sage", "fanout=5,x"], r"fanout=5,x: write a whole number for each layer"),
    ],
)
def test_settings_that_make_no_sense_are_one_sentence(setting: list[str], sentence: str) -> None:
    with pytest.raises(TaskError, match=sentence):
        find_task("graph", setting)
