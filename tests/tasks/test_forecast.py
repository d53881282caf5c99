from __future__ import annotations

import gzip
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitplan.errors import TaskError
from bitplan.lab.models.forecasters import DLinear, PatchLSTM, PatchTST
from bitplan.lab.sources import series as sources
from bitplan.lab.sources.series import ETT_COLUMNS, Series, demand, read_series, temperatures
from bitplan.lab.tasks.forecast import Forecast
from bitplan.lab.tasks.registry import find_task
from bitplan.lab.train import RunFolder, train
from bitplan.planners import cpt_plan

SMALL = ("length=24", "horizon=4", "batch=8", "features=8", "layers=1")


def write(path: Path, rows: list[list[float]], names: tuple[str, ...], dated: bool = True) -> Path:
    lines = [",".join([*(["date"] if dated else []), *names])]
    for number, row in enumerate(rows):
        lines.append(",".join([*([f"2016-07-01 {number}:00"] if dated else []), *map(str, row)]))
    text = "\n".join(lines) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    draws = torch.Generator().manual_seed(0)
    return write(tmp_path / "small.csv", torch.randn(200, 2, generator=draws).cumsum(0).tolist(), ("a", "b"))


def small(path: Path, *settings: str) -> Forecast:
    chosen = dict(text.split("=", 1) for text in (*SMALL, f"data={path}", *settings))
    task = find_task("forecast", [f"{key}={value}" for key, value in chosen.items()])
    assert isinstance(task, Forecast)
    return task


# --- series


@pytest.mark.parametrize("per_hour", [1, 4])
def test_the_ett_files_have_their_published_split(tmp_path: Path, per_hour: int) -> None:
    rows = 14_500 * per_hour
    columns = {name: [float(row % 7) for row in range(rows)] for name in ETT_COLUMNS}
    assert Series.of(columns).borders == (8640 * per_hour, 11_520 * per_hour, 14_400 * per_hour)
    assert Series.of({"other": columns["OT"]}).borders == (rows // 10 * 7, rows // 10 * 8, rows)


def test_dates_are_left_out_and_training_rows_standardise(tmp_path: Path) -> None:
    rows = [[float(row % 5), 3.0] for row in range(70)] + [[1000.0, 4.0]] * 30
    plain = read_series(write(tmp_path / "a.csv", rows, ("x", "constant")))
    assert plain.values.shape == (100, 2)
    training = plain.values[:70, 0]
    assert float(training.mean()) == pytest.approx(0, abs=1e-6)
    assert float(training.std(correction=0)) == pytest.approx(1)
    assert float(plain.values[-1, 0]) == pytest.approx((1000 - 2) / 2**0.5)
    assert plain.values[:, 1].tolist() == [0.0] * 70 + [1.0] * 30  # not divided by a deviation of 0
    for path, dated in ((tmp_path / "b.csv.gz", True), (tmp_path / "c.csv", False)):
        assert torch.equal(read_series(write(path, rows, ("x", "constant"), dated)).values, plain.values)


@pytest.mark.parametrize(
    ("text", "token"),
    [
        ("a,b\n", "no rows"),
        ("date,a\n2016-07-01,1\n2016-07-02\n", "line 3"),
        ("a,b\n1,2\n3,\n", "line 3: b is ''"),
        ("a,b\n1,2\n3,nan\n", "line 3: b is 'nan'"),
        ("date\n2016-07-01\n", "no column of numbers"),
        ("a\nred\n", "line 2: a is 'red'"),
    ],
)
def test_a_file_that_is_no_series_is_one_sentence(tmp_path: Path, text: str, token: str) -> None:
    path = tmp_path / "wrong.csv"
    path.write_text(text)
    with pytest.raises(TaskError, match=token) as raised:
        read_series(path)
    assert "\n" not in str(raised.value)


def test_absent_files_packages_and_rows_are_one_sentence(
    tmp_path: Path, small_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TaskError, match=r"there is no file.*demand or temperatures"):
        small(tmp_path / "absent.csv").batch(0)
    with pytest.raises(TaskError, match=r"200 rows.*horizon=30"):
        small(small_file, "horizon=30").batch(0)
    folder = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    for name, package in (("demand", "statsmodels"), ("temperatures", "vega_datasets")):
        for spec, token in ((None, "not installed"), (folder, "has no ")):
            monkeypatch.setattr(sources, "find_spec", lambda name, spec=spec: spec)
            with pytest.raises(TaskError, match=rf"{package}.*{token}.*bitplan\[forecast\]"):
                find_task("forecast", [f"data={name}"]).batch(0)


@pytest.mark.parametrize(("settings", "shape"), [((), (3600, 1)), (("data=temperatures",), (8759, 2))])
def test_series_of_installed_packages(settings: tuple[str, ...], shape: tuple[int, int]) -> None:
    task = find_task("forecast", settings)
    assert isinstance(task, Forecast)
    assert task.data.values.shape == shape
    inputs, target = task.batch(0)
    assert (inputs.shape, target.shape) == ((32, 336, shape[1]), (32, 96, shape[1]))
    assert [part.shape for part in task.example()] == [inputs.shape, target.shape]


def test_the_demand_changes_from_day_to_day_and_the_temperatures_hardly() -> None:
    changes = [(source().values[24:] - source().values[:-24]).square().mean() for source in (demand, temperatures)]
    assert changes[0] > 0.3
    assert changes[1] < 0.01


# --- windows and metrics


def test_targets_follow_their_windows_and_are_training_rows(small_file: Path) -> None:
    task = small(small_file, "batch=113")
    values, (training, _, _) = task.data.values, task.data.borders
    inputs, target = task.batch(0)  # an epoch, since 140 - 24 - 4 + 1 = 113
    rows = torch.cat([inputs, target], 1)
    starts = [int((values == row[0]).all(1).nonzero()[0]) for row in rows]
    assert {*starts} == {*range(113)}
    assert max(starts) + 28 == training
    assert all(torch.equal(row, values[start : start + 28]) for row, start in zip(rows, starts, strict=True))


class LastValue(nn.Module):
    def __init__(self, horizon: int) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(1))
        self.horizon, self.windows = horizon, 0

    def forward(self, windows: Tensor) -> Tensor:
        self.windows += len(windows)
        return windows[:, -1:].expand(-1, self.horizon, -1)


def test_errors_are_those_of_all_windows_and_the_trivial_predictor_repeats_the_last_value(small_file: Path) -> None:
    task = small(small_file)
    model = LastValue(4)
    figures = task.evaluate(model)
    values = task.data.values.double()
    errors = [values[row + step] - values[row - 1] for row in range(160, 197) for step in range(4)]
    assert figures["mse"] == pytest.approx(float(torch.stack(errors).square().mean()), rel=1e-5)
    assert figures["mae"] == pytest.approx(float(torch.stack(errors).abs().mean()), rel=1e-5)
    assert task.metric.trivial == pytest.approx(figures["mse"], rel=1e-6)
    assert figures["validation_mse"] != figures["mse"]
    assert model.windows == 37 + 17  # forecasts begin in rows 160 to 196, and 140 to 156


# --- models


def test_dlinear_adds_the_forecasts_of_a_moving_average_and_of_the_rest() -> None:
    model, series = DLinear(30, 2), torch.randn(1, 30, 1)
    nn.init.zeros_(model.seasonal.weight)
    nn.init.zeros_(model.trend.weight)
    with torch.no_grad():
        model.trend.weight[0, 0], model.seasonal.weight[1, 20] = 1.0, 1.0
    bias = (model.trend.bias + model.seasonal.bias).tolist()
    x = [series[0, min(max(row, 0), 29), 0].item() for row in range(-12, 42)]
    averages = [sum(x[row : row + 25]) / 25 for row in range(30)]
    expected = [averages[0] + bias[0], x[20 + 12] - averages[20] + bias[1]]
    assert model(series).flatten().tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "model", [PatchTST(48, 5, 8, 2, 4, 0.1), PatchLSTM(50, 5, 8, 2, 0.1)], ids=lambda model: type(model).__name__
)
def test_forecasts_shift_and_scale_with_each_channel(model: nn.Module) -> None:
    length = 48 if isinstance(model, PatchTST) else 50
    x, scale, shift = torch.randn(3, length, 2), torch.tensor([2.0, 0.5]), torch.tensor([-1.0, 30.0])
    y = model.eval()(x)
    assert y.shape == (3, 5, 2)
    torch.testing.assert_close(model(scale * x + shift), scale * y + shift, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(model(x.flip(-1)), y.flip(-1))  # the same weights for every channel


def test_patchtst_has_the_published_patches() -> None:
    task = find_task("forecast", ["model=patchtst"])
    model: Any = task.model()
    assert model.positions.shape == (42, 16)
    assert model.head.weight.shape == (96, 42 * 16)


# --- runs


@pytest.mark.parametrize("model", ["dlinear", "patchtst", "lstm"])
def test_a_stopped_run_under_a_plan_goes_on_bit_for_bit(tmp_path: Path, small_file: Path, model: str) -> None:
    chosen = (f"model={model}", "steps=4", "evaluate_every=4")
    target = small(small_file, *chosen).target()
    plan = cpt_plan(target.model, target.batch, target.loss)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(small(small_file, *chosen), plan, folder=whole)
    seen: list[int] = []
    options: dict[str, Any] = {"on_progress": lambda now: seen.append(now.step), "stop": lambda: seen[-1:] == [2]}
    assert train(small(small_file, *chosen), plan, folder=parts, **options).status == "stopped"
    assert train(small(small_file, *chosen), plan, folder=parts).status == "finished"
    first, second = (RunFolder(folder) for folder in (whole, parts))
    assert first.metrics_file.read_bytes() == second.metrics_file.read_bytes()
    assert first.model_file.read_bytes() == second.model_file.read_bytes()


@pytest.mark.parametrize(
    ("setting", "token"),
    [
        ("model=nbeats", "there is no model 'nbeats'"),
        ("decay=exponential", "there is no decay 'exponential'"),
        ("horizon=0", "horizon is 0"),
        ("length=20", "length is 20"),
        ("dropout=1", "dropout is 1.0"),
        ("warmup=-1", "warmup is -1"),
    ],
)
def test_settings_that_make_no_sense_are_one_sentence(setting: str, token: str) -> None:
    with pytest.raises(TaskError, match=token):
        find_task("forecast", [setting])


def test_patchtst_s_heads_share_the_features() -> None:
    with pytest.raises(TaskError, match="features is 10"):
        find_task("forecast", ["model=patchtst", "features=10"])
