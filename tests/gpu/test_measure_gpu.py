"""Measuring on a CUDA device: the figures of the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from bitplan.analysis.measure import measure

pytestmark = pytest.mark.gpu


class Net(nn.Module):
    """A convolution, a recurrent layer and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.rnn(self.conv(x).flatten(2).transpose(1, 2))[0]
        mixed: Tensor = self.attention(y, y, y, need_weights=False)[0]
        return mixed


def test_figures_are_those_of_the_cpu() -> None:
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(4, 3, 8, 8, dtype=torch.float64)
    here = measure(model, [x])
    there = measure(copy.deepcopy(model).cuda(), [x.cuda()])
    assert [(row.product, row.pass_, row.candidate) for row in there.rows] == [
        (row.product, row.pass_, row.candidate) for row in here.rows
    ]
    # Operands differ by float64's last bits, and a rounding may flip now and then.
    close = sum(abs(a.median - b.median) <= 1e-3 * a.median + 1e-12 for a, b in zip(here.rows, there.rows, strict=True))
    assert close >= 0.98 * len(here.rows)
