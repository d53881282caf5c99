from __future__ import annotations

import torch
from torch.nn import functional as F

import bitplan
from bitplan.lab.models.graph_networks import (
    GCN,
    both_ways,
    mean_neighbours,
    normalised_adjacency,
    symmetric_neighbours,
)

#: A path of three nodes and one node alone; the first edge is given twice, and one leads back to its node.
EDGES = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 2]])


def test_edges_go_both_ways_once_and_to_their_own_node_only_if_asked() -> None:
    assert both_ways(EDGES, 4).T.tolist() == [[0, 1], [1, 0], [1, 2], [2, 1]]
    assert both_ways(EDGES, 4, with_itself=True).shape == (2, 4 + 4)


def test_three_tensors_say_what_the_sparse_matrix_says() -> None:
    model, x = GCN((3, 5, 2)).eval(), torch.randn(4, 3)
    torch.testing.assert_close(model(x, *symmetric_neighbours(EDGES, 4)), model(x, normalised_adjacency(EDGES, 4)))


def test_the_mean_is_of_neighbours_alone() -> None:
    _, _, scale = mean_neighbours(EDGES, 4)
    assert scale.flatten().tolist() == [1, 0.5, 1, 1]


def test_a_compiled_graph_network_is_whole_and_keeps_its_numbers() -> None:
    """Sums of neighbours, their features rounded as well, in one graph."""
    torch.manual_seed(0)
    edges, x, labels = torch.randint(50, (2, 200)), torch.randn(50, 8), torch.randint(3, (50,))
    graph = symmetric_neighbours(edges, 50)
    model = GCN((8, 3), dropout=0.0)
    plan = bitplan.planners.cpt_plan(model, ((x, *graph), labels), F.cross_entropy, quantized_aggregation=True)
    gradients = []
    with bitplan.attach(model, plan, steps=8, example=(x, *graph)) as run:
        for called in (model, run.compile(fullgraph=True)):
            F.cross_entropy(called(x, *graph), labels).backward()
            gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
            model.zero_grad()
    for eager, compiled in zip(*gradients, strict=True):
        torch.testing.assert_close(compiled, eager)
