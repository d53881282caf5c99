"""Loss scaling: steps that overflow are skipped, clean ones double the scale, and a resumed run goes on with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from bitplan.errors import TaskError
from bitplan.lab.tasks.registry import find_task
from bitplan.lab.train import train
from bitplan.lab.train.folder import read_lines
from bitplan.lab.train.session import LossScale


def stepped(scale: LossScale, parameter: nn.Parameter, gradient: float) -> None:
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = None
    scale.of((parameter * gradient).sum()).backward()  # type: ignore[no-untyped-call]
    scale.undone(optimizer)
    scale.step(optimizer)


def test_a_step_that_overflows_is_skipped_and_the_scale_halved() -> None:
    scale, weight = LossScale(torch.device("cpu"), 65536.0, window=3), nn.Parameter(torch.tensor([1.0]))
    stepped(scale, weight, 0.25)
    assert (weight.item(), scale.value) == (0.75, 65536.0)
    stepped(scale, weight, float("inf"))
    assert (weight.item(), scale.value) == (0.75, 32768.0)
    for _ in range(2):
        stepped(scale, weight, 0.0)
    assert scale.value == 32768.0
    stepped(scale, weight, 0.0)
    assert scale.value == 65536.0  # three clean ones in a row


def test_without_a_scale_everything_passes() -> None:
    scale, weight = LossScale(torch.device("cpu"), 0.0, window=3), nn.Parameter(torch.tensor([1.0]))
    stepped(scale, weight, 0.25)
    assert weight.item() == 0.75
    assert not scale.is_used
    assert not scale.is_lost


def test_a_scale_that_only_falls_is_lost() -> None:
    scale, weight = LossScale(torch.device("cpu"), 1.0, window=3), nn.Parameter(torch.tensor([1.0]))
    for _ in range(40):
        assert not scale.is_lost
        stepped(scale, weight, float("nan"))
    assert scale.is_lost


SETTINGS = ("steps=12", "batch=16", "evaluate_every=6", "width=0.25", "loss_scale=1e30", "scale_window=4")


def test_a_stopped_run_goes_on_with_its_scale_bit_for_bit(tmp_path: Path) -> None:
    whole = train(find_task("digits", SETTINGS), "paper-low", folder=tmp_path / "whole", log_every=1)
    made = 0

    def after_seven() -> bool:
        nonlocal made
        made += 1
        return made == 7

    for stop in (after_seven, None):
        parted = train(find_task("digits", SETTINGS), "paper-low", folder=tmp_path / "parted", log_every=1, stop=stop)
    assert parted.status == whole.status == "finished"
    metrics = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "parted")]
    assert metrics[0] == metrics[1]
    scales = [line["loss_scale"] for line in read_lines(tmp_path / "whole" / "metrics.jsonl") if "loss_scale" in line]
    assert scales[0] == pytest.approx(5e29)  # 1e30 overflows: the first step was skipped


def test_a_scale_below_nothing_is_refused() -> None:
    with pytest.raises(TaskError, match="loss_scale"):
        find_task("digits", ("loss_scale=-1",))
    with pytest.raises(TaskError, match="scale_window"):
        find_task("digits", ("scale_window=-1",))
