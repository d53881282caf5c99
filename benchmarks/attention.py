"""Attention by itself: what ``speed --shape attention`` measures."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class SelfAttention(nn.Module):
    """Causal attention without projections: queries, keys and values are the same states."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        states = x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)
        return F.scaled_dot_product_attention(states, states, states, is_causal=True).transpose(1, 2).flatten(2)
