"""The expert layers of a mixture of experts, as grouped products: what ``speed --shape experts`` measures."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: FP8 products of groups need numbers of tokens that are multiples of this, so frameworks pad the groups.
MULTIPLE = 16


class Experts(nn.Module):
    """Gated MLPs, one an expert; the tokens are sorted by expert already, in groups of unequal sizes.

    Routing, the permutation of tokens and their weighted sum are left out: they are the same in any precision.
    """

    offsets: Tensor

    def __init__(self, experts: int, width: int, hidden: int, tokens: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(experts, hidden, width) * width**-0.5)
        self.up = nn.Parameter(torch.randn(experts, hidden, width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, width, hidden) * hidden**-0.5)
        self.register_buffer("offsets", unequal_groups(experts, tokens))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (weight.transpose(-2, -1) for weight in (self.gate, self.up, self.down))
        hidden = F.silu(grouped_mm(x, gate, self.offsets)) * grouped_mm(x, up, self.offsets)
        return grouped_mm(hidden, down, self.offsets)


def grouped_mm(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """The product of each group of rows with its own matrix, under the name that torchao replaces, too."""
    product: Tensor = torch._grouped_mm(x, weights, offs=offsets)
    return product


def unequal_groups(experts: int, tokens: int) -> Tensor:
    """The ends of the groups; the largest group has 1.5 times the tokens of the smallest.

    >>> unequal_groups(4, 640).tolist()
    [128, 272, 448, 640]
    """
    shares = torch.linspace(1.0, 1.5, experts, dtype=torch.float64)
    ends = (shares.cumsum(0) / shares.sum() * tokens / MULTIPLE).round().to(torch.int32) * MULTIPLE
    ends[-1] = tokens
    return ends
