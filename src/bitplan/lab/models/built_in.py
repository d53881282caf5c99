"""The built-in models by name, each with a training batch and its loss.

Batches are random, of the right shapes and dtypes. Everything but a graph's adjacency is created on the current default
device, so ``with torch.device("meta")`` gives shapes without data.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitplan.analysis.targets import Target
from bitplan.errors import TargetError
from bitplan.lab.models.graph_networks import GAT, GCN, normalised_adjacency, symmetric_neighbours
from bitplan.lab.models.language_models import GPT, LSTMModel, gpt2_small, next_token_loss
from bitplan.lab.models.resnet import cifar_resnet, imagenet_resnet, preactivated_resnet, resnet18
from bitplan.lab.models.retinanet import MOST_LEVELS, RetinaNet, level_grids
from bitplan.lab.models.small_cnns import MobileNetV2, ShuffleNetV2, SqueezeNet


def _images(model: nn.Module, classes: int, size: int = 32, batch: int = 128) -> Target:
    images, labels = torch.randn(batch, 3, size, size), torch.randint(classes, (batch,))
    return Target(model, (images, labels), F.cross_entropy)


def _tokens(model: nn.Module, tokens: int, shape: tuple[int, int]) -> Target:
    inputs, following = torch.randint(tokens, shape), torch.randint(tokens, shape)
    return Target(model, (inputs, following), next_token_loss)


def _wide_gpt(tokens: int) -> GPT:
    return GPT(tokens, length=1024, layers=12, heads=16, features=1024)


def _graph(nodes: int = 2048, edges: int = 8192) -> Target:
    """The layers used for OGBN-Arxiv (128-512-512-40) on a random graph."""
    with torch.device("cpu"):  # the adjacency's nonzeros must be real data
        adjacency = normalised_adjacency(torch.randint(nodes, (2, edges)), nodes)
        batch = ((torch.randn(nodes, 128), adjacency), torch.randint(40, (nodes,)))
        return Target(GCN((128, 512, 512, 40)), batch, F.cross_entropy)


def _attention_graph(nodes: int = 2048, edges: int = 8192) -> Target:
    """Two layers of graph attention (1433-64-7, as for Cora) on a random graph."""
    with torch.device("cpu"):  # the edges must be real data
        graph = symmetric_neighbours(torch.randint(nodes, (2, edges)), nodes)
        batch = ((torch.randn(nodes, 1433), *graph), torch.randint(7, (nodes,)))
        return Target(GAT((1433, 64, 7)), batch, F.cross_entropy)


def _scenes(depth: int, classes: int = 20, side: int = 320, batch: int = 4) -> Target:
    """RetinaNet on random images with random targets, of VOC's number of classes."""
    model = RetinaNet(classes, depth=depth)
    anchors = sum(cells * cells for _, cells in level_grids(side, MOST_LEVELS)) * 9
    images = torch.randn(batch, 3, side, side)
    targets = (torch.zeros(batch, anchors, dtype=torch.long), torch.randn(batch, anchors, 4))

    def loss(output: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
        logits, offsets = output
        return F.cross_entropy(logits.flatten(0, 1), target[0].flatten()) + F.smooth_l1_loss(offsets, target[1])

    return Target(model, (images, targets), loss)


#: Networks for 32x32 images of any width, for any number of classes.
SIZED: dict[str, Callable[..., nn.Module]] = {
    "resnet18": resnet18,
    "squeezenet": SqueezeNet,
    "mobilenet-v2": MobileNetV2,
    "shufflenet-v2": ShuffleNetV2,
    **{f"resnet{depth}": partial(cifar_resnet, depth) for depth in (20, 38, 56, 74, 110, 152)},
    "resnet164": partial(preactivated_resnet, 164),
}


def sized_target(text: str, classes: int | None = None, width: float | None = None) -> Target:
    """One of :data:`SIZED` in another size than its own; by default 100 classes (10 for the deep ResNets)."""
    name = text.replace("_", "-")
    if name not in SIZED:
        raise TargetError(f"classes and width can be chosen of {', '.join(SIZED)}, not of {text}.")
    own = 10 if isinstance(SIZED[name], partial) else 100
    number = own if classes is None else classes
    try:
        return _images(SIZED[name](classes=number, width=1.0 if width is None else width), number)
    except ValueError as error:
        raise TargetError(str(error)) from error


#: Name -> function that makes the model, its batch and its loss.
BUILT_IN: dict[str, Callable[[], Target]] = {
    "resnet20": lambda: _images(cifar_resnet(20), 10),
    "resnet38": lambda: _images(cifar_resnet(38), 10),
    "resnet56": lambda: _images(cifar_resnet(56), 10),
    "resnet74": lambda: _images(cifar_resnet(74), 10),
    "resnet110": lambda: _images(cifar_resnet(110), 10),
    "resnet152": lambda: _images(cifar_resnet(152), 10),
    "resnet164": lambda: _images(preactivated_resnet(164), 10),
    "resnet18": lambda: _images(resnet18(100), 100),
    "mobilenet-v2": lambda: _images(MobileNetV2(100), 100),
    "squeezenet": lambda: _images(SqueezeNet(100), 100),
    "shufflenet-v2": lambda: _images(ShuffleNetV2(100), 100),
    "resnet18-imagenet": lambda: _images(imagenet_resnet(18), 1000, size=224, batch=64),
    "resnet34-imagenet": lambda: _images(imagenet_resnet(34), 1000, size=224, batch=64),
    "resnet50": lambda: _images(imagenet_resnet(50), 1000, size=224, batch=64),
    "mobilenet-v2-imagenet": lambda: _images(MobileNetV2(1000, big_images=True), 1000, size=224, batch=64),
    "gpt2-small": lambda: _tokens(gpt2_small(), 50257, (8, 1024)),
    # For memory measurements: twelve layers of 1024, with GPT-2's vocabulary and with bytes.
    "gpt-1024": lambda: _tokens(_wide_gpt(50257), 50257, (32, 1024)),
    "gpt-1024-bytes": lambda: _tokens(_wide_gpt(256), 256, (32, 1024)),
    "gpt-tiny": lambda: _tokens(GPT(tokens=256, length=64, layers=2, heads=2, features=64), 256, (8, 64)),
    # One layer of 800 on Penn Treebank's 10,000 words, 35 steps of 20 texts.
    "lstm": lambda: _tokens(LSTMModel(10_000, 800), 10_000, (35, 20)),
    "gcn": _graph,
    "gat": _attention_graph,
    "retinanet-resnet18": lambda: _scenes(18),
    "retinanet-resnet101": lambda: _scenes(101),
}
