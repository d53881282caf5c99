from __future__ import annotations

import pytest
import torch

from bitplan.lab.models.graph_networks import GraphSAGE, SageLayer, mean_neighbours

#: A path of three nodes and one node alone.
EDGES = torch.tensor([[0, 1], [1, 2]])
MEAN = torch.tensor([[0, 1, 0, 0], [0.5, 0, 0.5, 0], [0, 1, 0, 0], [0, 0, 0, 0]])


def test_the_network_equals_its_dense_formula() -> None:
    model, x = GraphSAGE((3, 5, 2)).eval(), torch.randn(4, 3)
    layers = [layer for layer in model.layers if isinstance(layer, SageLayer)]
    expected = x
    for number, layer in enumerate(layers):
        expected = torch.relu(expected) if number else expected
        # As the paper has it: the mean first, and then the weight.
        expected = layer.itself(expected) + layer.others(MEAN @ expected)
    torch.testing.assert_close(model(x, *mean_neighbours(EDGES, 4)), expected)


def test_layers_may_have_graphs_of_their_own() -> None:
    model, x = GraphSAGE((3, 5, 2)).eval(), torch.randn(4, 3)
    graph = mean_neighbours(EDGES, 4)
    torch.testing.assert_close(model(x, *graph, *graph), model(x, *graph))
    # The second layer is asked about node 0 alone, whose neighbour is node 1.
    one = (torch.tensor([1]), torch.tensor([0]), torch.ones(1, 1))
    torch.testing.assert_close(model(x, *graph, *one), model(x, *graph)[:1])


@pytest.mark.parametrize("norm", ["none", "batch", "layer"])
def test_every_parameter_learns(norm: str) -> None:
    model = GraphSAGE((3, 5, 2), dropout=0.0, norm=norm)
    model(torch.randn(4, 3), *mean_neighbours(EDGES, 4)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert sum(parameter.grad.abs().sum() > 0 for parameter in model.parameters() if parameter.grad is not None) >= 5


def test_one_size_is_no_network() -> None:
    with pytest.raises(ValueError, match="at least two sizes"):
        GraphSAGE((3,))
