"""Forecasting networks: DLinear (Zeng et al. 2023, arXiv 2205.13504), PatchTST (Nie et al. 2023, arXiv 2211.14730) and
an LSTM over patches of a day.

All take windows (batch, length, channels) to forecasts (batch, horizon, channels), with the same weights for every
channel.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class DLinear(nn.Module):
    """A moving average and the rest of each channel, each forecast by one linear layer."""

    #: Rows of the moving average.
    KERNEL = 25

    def __init__(self, length: int, horizon: int) -> None:
        super().__init__()
        self.seasonal = nn.Linear(length, horizon)
        self.trend = nn.Linear(length, horizon)

    def forward(self, windows: Tensor) -> Tensor:
        x = windows.transpose(1, 2)
        trend = F.avg_pool1d(F.pad(x, (self.KERNEL // 2, self.KERNEL // 2), mode="replicate"), self.KERNEL, stride=1)
        forecast: Tensor = self.seasonal(x - trend) + self.trend(trend)
        return forecast.transpose(1, 2)


class _Normalised(nn.Module):
    """A network on windows of mean 0 and variance 1, whose forecasts are scaled back (Kim et al. 2022)."""

    def forward(self, windows: Tensor) -> Tensor:
        x = windows.transpose(1, 2)
        mean = x.mean(-1, keepdim=True)
        deviation = (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
        forecast = self.forecast(((x - mean) / deviation).flatten(0, 1)).view(*x.shape[:2], -1)
        return (forecast * deviation + mean).transpose(1, 2)

    def forecast(self, x: Tensor) -> Tensor:
        """Single series (count, length) to (count, horizon)."""
        raise NotImplementedError


class EncoderLayer(nn.Module):
    """Self-attention and an MLP eight times as wide, each added to its input and followed by a batch norm."""

    def __init__(self, features: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(features, 3 * features)
        self.out = nn.Linear(features, features)
        self.norm1, self.norm2 = nn.BatchNorm1d(features), nn.BatchNorm1d(features)
        self.up = nn.Linear(features, 8 * features)
        self.down = nn.Linear(8 * features, features)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        x = self._normed(self.norm1, x + self._dropped(mixed))
        hidden = self._dropped(F.gelu(self.up(x)))
        return self._normed(self.norm2, x + self._dropped(self.down(hidden)))

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)

    def _normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = norm(x.transpose(1, 2)).transpose(1, 2)
        return y


class PatchTST(_Normalised):
    """A transformer over overlapping patches of each channel."""

    PATCH, STRIDE = 16, 8

    def __init__(self, length: int, horizon: int, features: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        # The last value is repeated for one more patch.
        patches = (length - self.PATCH) // self.STRIDE + 2
        self.dropout = dropout
        self.embed = nn.Linear(self.PATCH, features)
        self.positions = nn.Parameter(torch.empty(patches, features).uniform_(-0.02, 0.02))
        self.layers = nn.Sequential(*(EncoderLayer(features, heads, dropout) for _ in range(layers)))
        self.head = nn.Linear(patches * features, horizon)

    def forecast(self, x: Tensor) -> Tensor:
        patches = F.pad(x, (0, self.STRIDE), mode="replicate").unfold(-1, self.PATCH, self.STRIDE)
        y = F.dropout(self.embed(patches) + self.positions, self.dropout, self.training)
        forecast: Tensor = self.head(self.layers(y).flatten(1))
        return forecast


class PatchLSTM(_Normalised):
    """An LSTM over consecutive patches of each channel; its last state gives the whole forecast."""

    PATCH = 24

    def __init__(self, length: int, horizon: int, features: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        # nn.LSTM has dropout between its layers, and warns if there is only one layer.
        self.lstm = nn.LSTM(self.PATCH, features, layers, dropout=dropout if layers > 1 else 0.0)
        self.head = nn.Linear(features, horizon)

    def forecast(self, x: Tensor) -> Tensor:
        steps = x[:, x.shape[1] % self.PATCH :].reshape(len(x), -1, self.PATCH).transpose(0, 1)
        y, _ = self.lstm(steps)
        forecast: Tensor = self.head(F.dropout(y[-1], self.dropout, self.training))
        return forecast
