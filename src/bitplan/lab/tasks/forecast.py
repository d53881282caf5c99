"""Forecasting of time series over a long horizon, as in the comparison of Zeng et al. 2023 (arXiv 2205.13504)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, Optimizer

from bitplan.errors import TaskError, nearest_names
from bitplan.lab.models.forecasters import DLinear, PatchLSTM, PatchTST
from bitplan.lab.sources.series import INSTALLED, Series, read_series
from bitplan.lab.tasks.task import DECAYS, LoadingTask, Metric, Settings, decayed, fused_for, shuffled

MODELS = ("dlinear", "patchtst", "lstm")

#: Attention heads of PatchTST.
HEADS = 4

#: Windows of an evaluation at a time.
_EVALUATED = 256


@dataclass(frozen=True)
class ForecastSettings(Settings):
    """Adam with a cosine; the sizes are those of PatchTST for small data."""

    steps: int = 1000
    batch: int = 32
    evaluate_every: int = 250
    lr: float = 1e-3
    decay: str = "cosine"
    warmup: int = 0
    #: dlinear, patchtst or lstm.
    model: str = "dlinear"
    #: Rows to forecast.
    horizon: int = 96
    #: Rows that the forecast is made from.
    length: int = 336
    #: Of patchtst and lstm.
    layers: int = 3
    features: int = 16
    dropout: float = 0.3
    #: demand (Victoria's electricity), temperatures (of two cities), or a CSV file.
    data: str = "demand"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, choices in (("model", MODELS), ("decay", DECAYS)):
            if getattr(self, name) not in choices:
                wrong = getattr(self, name)
                raise TaskError(f"there is no {name} {wrong!r}; {nearest_names(wrong, choices)}")
        for name in ("horizon", "layers", "features"):
            if getattr(self, name) < 1:
                raise TaskError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.length < PatchLSTM.PATCH:
            raise TaskError(f"length is {self.length}; it must be at least {PatchLSTM.PATCH}, a patch of the lstm.")
        if self.model == "patchtst" and self.features % HEADS:
            raise TaskError(f"features is {self.features}; patchtst has {HEADS} heads, which must divide it.")
        if not 0 <= self.dropout < 1:
            raise TaskError(f"dropout is {self.dropout}; it must be at least 0 and below 1.")
        if not self.warmup >= 0:
            raise TaskError(f"warmup is {self.warmup}; it must be at least 0.")


class Forecast(LoadingTask[Series]):
    """All channels of a series over the next rows, from the rows before."""

    name = "forecast"
    summary = "the next hours of a time series"
    settings_class: ClassVar[type[ForecastSettings]] = ForecastSettings
    settings: ForecastSettings

    def load(self) -> Series:
        recipe = self.settings
        read, _ = INSTALLED.get(recipe.data, (None, 0))
        series = read_series(Path(recipe.data).expanduser()) if read is None else read()
        training, validation, test = series.borders
        shortest = min(training - recipe.length, validation - training, test - validation)
        if shortest < recipe.horizon:
            raise TaskError(
                f"{recipe.data} has {test} rows: its parts for training, validation and test need "
                f"length={recipe.length} and horizon={recipe.horizon} rows, so lower these, or use a longer series."
            )
        return series

    @cached_property
    def metric(self) -> Metric:
        """The mean squared error on the test rows; the trivial predictor repeats the last value."""
        errors = [
            (window[:, -1:] - target).square().mean((1, 2)) for window, target in self._windows(*self.data.borders[1:])
        ]
        return Metric("mse", "lower", float(torch.cat(errors).double().mean()))

    def model(self) -> nn.Module:
        recipe = self.settings
        if recipe.model == "dlinear":
            return DLinear(recipe.length, recipe.horizon)
        sizes = recipe.length, recipe.horizon, recipe.features, recipe.layers
        return (
            PatchTST(*sizes, HEADS, recipe.dropout) if recipe.model == "patchtst" else PatchLSTM(*sizes, recipe.dropout)
        )

    # --- data

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        count = self.data.borders[0] - self.settings.length - self.settings.horizon + 1
        return self._parts(shuffled(step, self.settings.batch, count, self.seed))

    def example(self) -> tuple[Tensor, Tensor]:
        recipe = self.settings
        _, channels = INSTALLED.get(recipe.data, (None, 0))
        channels = channels or self.data.values.shape[1]
        return torch.zeros(recipe.batch, recipe.length, channels), torch.zeros(recipe.batch, recipe.horizon, channels)

    def _parts(self, firsts: Tensor) -> tuple[Tensor, Tensor]:
        """The windows that begin in these rows, and the rows after each."""
        recipe = self.settings
        rows = self.data.values[firsts[:, None] + torch.arange(recipe.length + recipe.horizon)]
        return rows[:, : recipe.length].contiguous(), rows[:, recipe.length :].contiguous()

    def _windows(self, begin: int, end: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All windows whose forecasts lie in the rows from `begin` to `end`."""
        recipe = self.settings
        firsts = torch.arange(begin - recipe.length, end - recipe.length - recipe.horizon + 1)
        return map(self._parts, torch.split(firsts, _EVALUATED))

    # --- recipe

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return Adam(model.parameters(), self.settings.lr, fused=fused_for(model.parameters()))

    def learning_rate(self, step: int) -> float:
        recipe = self.settings
        return decayed(recipe.decay, step, recipe.steps, recipe.warmup)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Errors of all channels and all rows of the forecasts, standardised as published ones are."""
        training, validation, test = self.data.borders
        mse, mae = self._errors(model, validation, test)
        return {"mse": mse, "mae": mae, "validation_mse": self._errors(model, training, validation)[0]}

    def _errors(self, model: nn.Module, begin: int, end: int) -> tuple[float, float]:
        """The mean squared and the mean absolute error."""
        device = next(model.parameters()).device
        squared = absolute = torch.zeros((), dtype=torch.float64)
        count = 0
        for window, target in self._windows(begin, end):
            error = model(window.to(device)).float().cpu() - target
            squared = squared + error.double().square().sum()
            absolute = absolute + error.double().abs().sum()
            count += error.numel()
        return float(squared) / count, float(absolute) / count
