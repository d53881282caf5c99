"""The models of the papers' tables: sizes against published numbers, and one training step under a plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bitplan as bp
from bitplan.lab.models.graph_networks import (
    GAT,
    GraphConvolution,
    PublishedGCN,
    PublishedSAGE,
    SageConvolution,
    mean_neighbours,
    symmetric_neighbours,
)
from bitplan.lab.models.resnet import imagenet_resnet, preactivated_resnet
from bitplan.lab.models.retinanet import RetinaNet
from bitplan.planners import cpt_plan


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("resnet34", 21_797_672),  # torchvision's resnet34
        ("resnet101", 44_549_160),  # torchvision's resnet101
        ("resnet164", 1_703_258),  # 1.70 million: He et al. 2016, table 4
        ("gat", 92_373),  # PyTorch Geometric's GAT for Cora, 8 heads of 8
        ("gcn", 349_224),  # 128-512-512-40, with biases
        # torchvision's retinanet_resnet50_fpn has 34,014,999; here P6 is a convolution of C5, with 2048 channels in the
        # place of 256, and the 53,120 parameters of batch norms are trained.
        ("retinanet50", 34_014_999 + 9 * 256 * (2048 - 256) + 53_120),
    ],
)
def test_sizes_are_those_that_are_published(name: str, count: int) -> None:
    with torch.device("meta"):
        models: dict[str, Any] = {
            "resnet34": lambda: imagenet_resnet(34),
            "resnet101": lambda: imagenet_resnet(101),
            "resnet164": lambda: preactivated_resnet(164),
            "gat": lambda: GAT((1433, 64, 7)),
            "gcn": lambda: PublishedGCN((128, 512, 512, 40)),
            "retinanet50": lambda: RetinaNet(91, depth=50),
        }
        assert size(models[name]()) == count


def test_a_retinanet_of_depth_101_has_its_backbone_and_no_classifier() -> None:
    with torch.device("meta"):
        detector, backbone = RetinaNet(20, depth=101), imagenet_resnet(101)
    assert size(detector.backbone) == size(backbone) - size(backbone.fc)
    assert detector.pyramid.lateral[2].in_channels == 2048


def test_other_depths_are_refused() -> None:
    for make in (lambda: preactivated_resnet(100), lambda: imagenet_resnet(152), lambda: GAT((8, 12, 3))):
        with pytest.raises(ValueError, match=r"such as 164|18, 34, 50 or 101|multiples of 8"):
            make()


NODES = 12
EDGES = torch.randint(NODES, (2, 30), generator=torch.Generator().manual_seed(3))


def adjacency(own: bool) -> Tensor:
    """The dense matrix of the graph, with or without self-loops."""
    matrix = torch.zeros(NODES, NODES)
    matrix[EDGES[0], EDGES[1]] = matrix[EDGES[1], EDGES[0]] = 1.0
    return matrix.fill_diagonal_(1.0 if own else 0.0)


@pytest.mark.parametrize("sizes", [(6, 3), (3, 6)])
def test_a_published_graph_convolution_adds_its_bias_last(sizes: tuple[int, int]) -> None:
    """The same as dense matrices, in either order of weight and sum."""
    torch.manual_seed(0)
    layer, x = GraphConvolution(*sizes), torch.randn(NODES, sizes[0])
    nn.init.normal_(layer.bias)
    matrix = adjacency(own=True)
    root = matrix.sum(1).rsqrt()
    expected = (root[:, None] * matrix * root) @ x @ layer.weight + layer.bias
    torch.testing.assert_close(layer(x, *symmetric_neighbours(EDGES, NODES)), expected)


@pytest.mark.parametrize("sizes", [(6, 3), (3, 6)])
def test_a_published_sage_layer_is_a_mean_and_the_node_itself(sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    layer, x = SageConvolution(*sizes), torch.randn(NODES, sizes[0])
    nn.init.normal_(layer.bias)
    matrix = adjacency(own=False)
    mean = matrix @ x / matrix.sum(1, keepdim=True).clamp(min=1)
    expected = layer.itself(x) + layer.others(mean) + layer.bias
    torch.testing.assert_close(layer(x, *mean_neighbours(EDGES, NODES)), expected)


def test_graph_attention_is_that_of_the_paper() -> None:
    """Against the formula on dense matrices: a softmax over each node's neighbours, itself among them."""
    torch.manual_seed(0)
    model = GAT((5, 8, 3), dropout=0.0, heads=2).eval()
    x, graph = torch.randn(NODES, 5), symmetric_neighbours(EDGES, NODES)
    absent = adjacency(own=True) == 0

    def dense(layer: Any, x: Tensor) -> Tensor:
        made = layer.features(x).view(NODES, layer.heads, layer.outputs)
        heads = []
        for head in range(layer.heads):
            source, target = made[:, head] @ layer.source_score[head], made[:, head] @ layer.target_score[head]
            scores = F.leaky_relu(target[:, None] + source[None, :], 0.2).masked_fill(absent, float("-inf"))
            heads.append(scores.softmax(1) @ made[:, head])
        return (torch.cat(heads, 1) if layer.joined else torch.stack(heads).mean(0)) + layer.bias

    first, last = model.layers
    torch.testing.assert_close(model(x, *graph), dense(last, F.elu(dense(first, x))))


def graph_batch(model: nn.Module, form: Any) -> tuple[nn.Module, Any, Any]:
    generator = torch.Generator().manual_seed(0)
    inputs = (torch.randn(NODES, 5, generator=generator), *form(EDGES, NODES))
    return model, (inputs, torch.randint(3, (NODES,), generator=generator)), F.cross_entropy


def image_batch(model: nn.Module) -> tuple[nn.Module, Any, Any]:
    generator = torch.Generator().manual_seed(0)
    return model, (torch.randn(2, 3, 32, 32, generator=generator), torch.tensor([0, 1])), F.cross_entropy


def detector() -> tuple[nn.Module, Any, Any]:
    images = torch.randn(2, 3, 32, 32)
    return RetinaNet(2, width=0.05, levels=3, head_layers=1, depth=101), images, lambda out: out[0].sum() + out[1].sum()


TINY = {
    "resnet164": lambda: image_batch(preactivated_resnet(11, 4, width=0.5)),
    "resnet34": lambda: image_batch(imagenet_resnet(34, 4, width=0.1)),
    "retinanet101": detector,
    "gat": lambda: graph_batch(GAT((5, 8, 3)), symmetric_neighbours),
    "gcn-published": lambda: graph_batch(PublishedGCN((5, 8, 3), norm="whole"), symmetric_neighbours),
    "sage-published": lambda: graph_batch(PublishedSAGE((5, 8, 3), norm="whole"), mean_neighbours),
}


@pytest.mark.parametrize("name", TINY)
def test_one_training_step_under_the_papers_plan(name: str) -> None:
    torch.manual_seed(0)
    model, batch, loss = TINY[name]()
    plan = cpt_plan(model, batch, loss, low=4, high=8)
    inputs, target = batch if isinstance(batch, tuple) else (batch, None)
    call = (lambda: model(*inputs)) if isinstance(inputs, tuple) else (lambda: model(inputs))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    torch.manual_seed(1)
    plain = call()
    model.load_state_dict(before)  # statistics of batch norms
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with bp.attach(model, plan, optimizer=optimizer, steps=4, example=inputs) as run:
        torch.manual_seed(1)
        rounded = call()
        value = loss(rounded) if target is None else run.loss(loss)(rounded, target)
        value.backward()
        optimizer.step()
        assert any(row.quantizer is not None for row in run.table())
    first, second = (made[0] if isinstance(made, tuple) else made for made in (plain, rounded))
    assert not torch.equal(first, second)  # the formats were applied
    assert torch.isfinite(value)
    changed = [key for key, parameter in model.named_parameters() if not torch.equal(parameter, before[key])]
    assert len(changed) > 0.9 * len(list(model.parameters()))
