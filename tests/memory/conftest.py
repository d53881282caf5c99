"""The models that memory is compared on: small, and each of another kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitplan.analysis.targets import Target
from bitplan.lab.models.graph_networks import GCN, normalised_adjacency
from bitplan.lab.models.language_models import GPT, LSTMModel, next_token_loss
from bitplan.lab.models.resnet import cifar_resnet
from bitplan.lab.models.small_cnns import MobileNetV2
from bitplan.plans import Plan

MakeTarget = Callable[[str], Target]


@pytest.fixture
def eight_bits() -> Plan:
    """Every activation in E4M3, its gradient in E5M2, weights as they are."""
    return Plan.from_dict({"version": 1, "rules": [{"match": "*", "activation": "e4m3", "grad_activation": "e5m2"}]})


@pytest.fixture
def make_target() -> MakeTarget:
    """A target by name, each time with the same weights and data."""

    def make(name: str) -> Target:
        torch.manual_seed(0)
        return MODELS[name]()

    return make


def _images(model: nn.Module, batch: int) -> Target:
    return Target(model, (torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))), F.cross_entropy)


def _tokens(model: nn.Module, shape: tuple[int, int]) -> Target:
    return Target(model, (torch.randint(256, shape), torch.randint(256, shape)), next_token_loss)


def _own_loss(output: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


def _hugging_face(kind: str) -> Target:
    transformers = __import__("transformers")
    tokens = torch.randint(256, (4, 32))
    if kind == "gpt2":
        special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "loss_type": "ForCausalLM"}
        config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=256, n_positions=64, **special)
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.BertConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256, vocab_size=256
        )
        model = transformers.BertForMaskedLM(config)
    return Target(model, {"input_ids": tokens, "labels": tokens}, _own_loss)


def _graph() -> Target:
    adjacency = normalised_adjacency(torch.randint(256, (2, 1024)), 256)
    return Target(
        GCN((32, 64, 64, 10)), ((torch.randn(256, 32), adjacency), torch.randint(10, (256,))), F.cross_entropy
    )


def _perceptron() -> Target:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return Target(model, (torch.randn(32, 64), torch.randint(10, (32,))), F.cross_entropy)


MODELS: dict[str, Callable[[], Target]] = {
    "resnet8": lambda: _images(cifar_resnet(8), 8),
    "mobilenet-v2": lambda: _images(MobileNetV2(10, width=0.25), 4),
    "gpt": lambda: _tokens(GPT(tokens=256, length=32, layers=2, heads=2, features=64), (4, 32)),
    "gpt2": lambda: _hugging_face("gpt2"),
    "bert": lambda: _hugging_face("bert"),
    "lstm": lambda: _tokens(LSTMModel(256, 64, layers=2), (16, 8)),
    "gcn": _graph,
    # Its bytes can be counted by hand.
    "perceptron": _perceptron,
}
