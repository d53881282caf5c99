"""Clouds of points with a massive channel, which a frozen layer scales back: a scale per tensor leaves nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from tiny_task import FEATURES, Tiny

MASSIVE = 1e6


class Massive(Tiny):
    name = "massive"
    summary = "Three clouds of points and a channel of a million."

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self.points = torch.cat([self.points, torch.full((len(self.points), 1), MASSIVE)], 1)

    def model(self) -> nn.Module:
        first = nn.Linear(FEATURES + 1, FEATURES, bias=False).requires_grad_(False)
        first.weight[:, -1] /= MASSIVE
        return nn.Sequential(first, super().model())
