"""TensorBoard's events: there where it is installed, and missed by nobody where it is not."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from bitplan.lab.train import train
from bitplan.lab.train.summary import Events, open_events


def test_without_tensorboard_nothing_is_written(tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "tensorboard" else find(name, *rest)
    )
    train(tiny("steps=2"), folder=tmp_path / "run")
    assert not (tmp_path / "run" / "tensorboard").exists()
    assert type(open_events(tmp_path, 0)) is Events


def test_every_figure_is_a_scalar_and_a_resumed_run_purges_later_steps(
    tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[Any] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int | None) -> None:
            reported.append((Path(folder).name, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            reported.append((name, step))

        def close(self) -> None:
            reported.append("closed")

    pretended = types.ModuleType("torch.utils.tensorboard")
    pretended.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", pretended)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: object())
    train(tiny("steps=2"), folder=tmp_path / "run", stop=lambda: True)
    names = ("loss", "lr", "bits", "mean_bits", "cost")
    assert reported == [("tensorboard", None), *((f"training/{name}", 1) for name in names), "closed"]
    reported.clear()
    train(tiny("steps=2"), folder=tmp_path / "run")
    last = [*((f"training/{name}", 2) for name in names), ("evaluation/accuracy", 2), "closed"]
    assert reported == [("tensorboard", 2), *last]


def test_an_installation_that_does_not_work_stops_no_run(
    tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # importing it raises
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: object())
    assert train(tiny("steps=2"), folder=tmp_path / "run").status == "finished"


def test_events_are_written_where_tensorboard_is_installed(tmp_path: Path, tiny: Any) -> None:
    pytest.importorskip("tensorboard")
    train(tiny(), folder=tmp_path / "run")
    assert any((tmp_path / "run" / "tensorboard").iterdir())
