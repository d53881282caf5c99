from __future__ import annotations

import pytest
import torch

from bitplan.lab.models.graph_networks import GCN, normalised_adjacency

#: A path of three nodes and one node alone; the first edge is given twice, in both directions.
EDGES = torch.tensor([[0, 1, 1], [1, 0, 2]])


def test_the_adjacency_is_that_of_kipf_and_welling() -> None:
    with_itself = torch.tensor([[1.0, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]])
    root = torch.diag(with_itself.sum(1).rsqrt())
    adjacency = normalised_adjacency(EDGES, 4)
    assert adjacency.layout == torch.sparse_coo
    assert adjacency._nnz() == 8
    assert torch.allclose(adjacency.to_dense(), root @ with_itself @ root)


def test_the_network_equals_its_dense_formula() -> None:
    model, x, adjacency = GCN((3, 5, 2)).eval(), torch.randn(4, 3), normalised_adjacency(EDGES, 4)
    dense = adjacency.to_dense()
    first, second = model.layers
    expected = dense @ second(torch.relu(dense @ first(x)))
    assert torch.allclose(model(x, adjacency), expected, atol=1e-6)


def test_a_node_alone_hears_of_nobody() -> None:
    model, x, adjacency = GCN((3, 5, 2)).eval(), torch.randn(4, 3), normalised_adjacency(EDGES, 4)
    other = x.clone()
    other[0] += 1
    changed = (model(x, adjacency) != model(other, adjacency)).any(1)
    assert changed.tolist() == [True, True, True, False]


def test_every_parameter_learns_through_the_sparse_product() -> None:
    model = GCN((3, 5, 2), dropout=0.0)
    model(torch.randn(4, 3), normalised_adjacency(EDGES, 4)).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())


def test_one_size_is_no_network() -> None:
    with pytest.raises(ValueError, match="at least two sizes"):
        GCN((3,))
