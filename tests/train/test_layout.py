"""Images and convolutions lie channels-last on a GPU; what a run computes, saves and goes on from stays the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from bitplan.lab.tasks.registry import find_task
from bitplan.lab.train import session as sessions
from bitplan.lab.train import train
from bitplan.lab.train.checkpoint import Checkpoint, checkpoints_in
from bitplan.lab.train.session import Session, laid_out, lay_out, layout_for
from bitplan.plans import Plan

SETTINGS = ("steps=6", "batch=8", "evaluate_every=6", "width=0.25", "model=resnet8")


@pytest.mark.parametrize(
    ("model", "on_gpu"),
    [
        (nn.Conv2d(3, 4, 3), torch.channels_last),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv3d(3, 4, 3)), torch.contiguous_format),
        (nn.Linear(3, 4), torch.contiguous_format),
        (nn.LSTM(3, 4), torch.contiguous_format),
        (nn.ReLU(), torch.contiguous_format),
    ],
)
def test_only_images_on_a_gpu_lie_otherwise(model: nn.Module, on_gpu: torch.memory_format) -> None:
    assert layout_for(model, "cuda") == on_gpu
    assert layout_for(model, "cpu") == torch.contiguous_format
    assert layout_for(model, "cpu", "native") == on_gpu
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = list(model.parameters())
    assert lay_out(model, on_gpu) is model
    assert all(first is second for first, second in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.is_contiguous(memory_format=on_gpu) for p in model.parameters() if p.dim() == 4)


def test_only_images_of_a_batch_lie_otherwise() -> None:
    images, labels, indices = torch.randn(2, 3, 4, 4), torch.arange(2), torch.zeros(2, 3, 4, 4, dtype=torch.int64)
    moved = laid_out(images, torch.channels_last)
    assert moved.stride() == (48, 1, 12, 3)
    assert torch.equal(moved, images)
    assert laid_out(labels, torch.channels_last) is labels
    assert laid_out(indices, torch.channels_last) is indices
    assert laid_out(images, torch.contiguous_format) is images


PLAIN_STEPS = f"""
import torch
from bitplan.lab.tasks.registry import find_task
model = find_task("digits", {SETTINGS!r}).model().to(memory_format=torch.channels_last)
for _ in range(6):
    model(torch.randn(8, 3, 8, 8).to(memory_format=torch.channels_last)).sum().backward()
"""


@pytest.fixture(scope="module")
def channels_last_works() -> None:
    """torch 2.13 corrupts its heap in plain channels-last convolutions of few channels on some CPUs without AVX-512."""
    plain = subprocess.run([sys.executable, "-c", PLAIN_STEPS], capture_output=True, check=False)
    if plain.returncode < 0:
        pytest.skip("torch alone crashes here in the backward pass of channels-last convolutions")


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch, channels_last_works: None) -> None:
    monkeypatch.setattr(sessions, "layout_for", lambda model, *where: layout_for(model, "cuda"))


@pytest.mark.usefixtures("as_on_gpu")
def test_a_run_goes_on_bit_for_bit_in_its_layout(tmp_path: Path, noisy: Plan, fingerprint: Any) -> None:
    whole, parts, seen = tmp_path / "whole", tmp_path / "parts", list[int]()
    train(find_task("digits", SETTINGS), noisy, folder=whole)
    train(
        find_task("digits", SETTINGS),
        noisy,
        folder=parts,
        on_progress=lambda now: seen.append(now.step),
        stop=lambda: seen[-1] >= 3,
    )
    train(find_task("digits", SETTINGS), noisy, folder=parts)
    assert fingerprint(parts) == fingerprint(whole)


@pytest.mark.usefixtures("as_on_gpu")
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_checkpoint_holds_values_and_a_resumed_run_its_layout(
    tmp_path: Path, noisy: Plan, optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}

    def session() -> Session:
        task = find_task("digits", SETTINGS)
        # A fused step goes through memory, and would mix up what lies otherwise.
        monkeypatch.setattr(task, "optimizer", lambda m: optimizer(m.parameters(), lr=0.01, fused=True, **more))
        return Session(task, noisy, execution="emulate", device=torch.device("cpu"), compile=False)

    first, second = session(), session()
    for _ in range(2):
        first.forward_backward()
        first.apply()
    Checkpoint(tmp_path, 2).save(first.state())
    (saved,) = checkpoints_in(tmp_path)
    tensors = load_file(saved.tensors_file)
    second.load(2, saved.load())
    for name, parameter in second.model.named_parameters():
        assert torch.equal(tensors[f"model.{name}"], parameter)
        assert parameter.is_contiguous(memory_format=torch.channels_last) or parameter.dim() != 4
        moments = [value for value in second.optimizer.state[parameter].values() if value.shape == parameter.shape]
        assert len(moments) == (1 if more else 2)
        assert all(moment.stride() == parameter.stride() for moment in moments)
    for _ in range(2):
        assert first.forward_backward() == second.forward_backward()
        first.apply(), second.apply()
    assert all(map(torch.equal, first.model.state_dict().values(), second.model.state_dict().values()))
    first.close(), second.close()
