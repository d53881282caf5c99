"""Decoder blocks in the shape of Llama (Touvron et al. 2023, arXiv 2302.13971), for measuring products.

Embeddings, rotations and the head are left out: what is measured is the linear layers, none of which has a bias, with
the attention and the pointwise work that lie between them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LlamaBlock(nn.Module):
    """Causal attention, then a SwiGLU perceptron, each behind an RMS norm and added to its input."""

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        parts = (layer(normed).unflatten(-1, (self.heads, -1)) for layer in (self.query, self.key, self.value))
        query, key, value = (part.transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        perceived: Tensor = self.down(F.silu(self.gate(normed)) * self.up(normed))
        return x + perceived


class LlamaBlocks(nn.Module):
    """Several blocks: (batch, tokens, width) to the same."""

    def __init__(self, width: int, layers: int, hidden: int, heads: int | None = None) -> None:
        super().__init__()
        count = max(1, width // 128) if heads is None else heads
        if width % count:
            raise ValueError(f"width {width} is not a multiple of {count} heads.")
        self.blocks = nn.ModuleList(LlamaBlock(width, hidden, count) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def random_states(batch: int, tokens: int, width: int) -> Tensor:
    """What blocks are fed with when only their speed matters."""
    return torch.randn(batch, tokens, width)
