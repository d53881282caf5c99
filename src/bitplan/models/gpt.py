"""A decoder-only transformer in the shape of GPT-2 (Radford et al. 2019)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Causal self-attention: Q, K and V of all heads by one linear."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(features, 3 * features)
        self.out = nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return y


class Block(nn.Module):
    """Attention, then a perceptron four times as wide, each behind a layer norm and added to its input."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(features)
        self.attention = Attention(features, heads)
        self.norm2 = nn.LayerNorm(features)
        self.up = nn.Linear(features, 4 * features)
        self.down = nn.Linear(4 * features, features)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        perceived: Tensor = self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + perceived


class GPT(nn.Module):
    """Tokens (batch, length) to logits (batch, length, tokens). The token embedding is also the output's weight."""

    def __init__(self, tokens: int, length: int, layers: int, heads: int, features: int) -> None:
        super().__init__()
        if features % heads:
            raise ValueError(f"{features} features cannot be shared out among {heads} heads.")
        self.token_embedding = nn.Embedding(tokens, features)
        self.place_embedding = nn.Embedding(length, features)
        self.blocks = nn.Sequential(*(Block(features, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(features)
        self.head = nn.Linear(features, tokens, bias=False)
        self.head.weight = self.token_embedding.weight
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        """GPT-2's start: normal weights of 0.02, smaller where a residual branch ends, so that the sum stays level."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                ends_a_branch = name.endswith(("attention.out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if ends_a_branch else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.place_embedding(places)
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def gpt2_small() -> GPT:
    """The smallest GPT-2: 124M parameters."""
    return GPT(tokens=50257, length=1024, layers=12, heads=12, features=768)


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of every token given those before it; `tokens` are those that the logits should name."""
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
