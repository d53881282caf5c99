"""Fused optimizers, which GPUs take: rates, clipping, loss scales and checkpoints work with them as with others.

torch has them for CPUs, too, which is where they are tried here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from bitplan.lab.tasks import images, language
from bitplan.lab.tasks.registry import find_task
from bitplan.lab.train import train
from bitplan.lab.train.session import LossScale, Session
from bitplan.plans import Plan
from bitplan.runtime.optimizers import load_plain_state, plain_state

IMAGES = ("digits", "steps=6", "batch=8", "evaluate_every=6", "width=0.25", "model=resnet8")
TEXT = ("lm", "steps=6", "evaluate_every=6", "layers=1", "features=16", "batch=2", "length=8", "evaluation=1")


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (images, language):
        monkeypatch.setattr(module, "fused_for", lambda parameters: True)


def rates_and_weights(settings: tuple[str, ...]) -> tuple[list[float], list[Any]]:
    task = find_task(settings[0], [*settings[1:], "warmup=3", "clip=0.5"])
    session = Session(task, Plan(), execution="emulate", device=torch.device("cpu"), compile=False)
    rates = []
    for _ in range(5):
        session.forward_backward()
        rates.append(session.apply())
    session.close()
    return rates, [parameter.detach() for parameter in session.model.parameters()]


@pytest.mark.parametrize("settings", [IMAGES, TEXT])
def test_a_run_learns_as_without(settings: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    rates, weights = rates_and_weights(settings)
    request.getfixturevalue("fused")
    fused_rates, fused_weights = rates_and_weights(settings)
    assert fused_rates == rates
    assert len(set(rates)) > 3
    for first, second in zip(weights, fused_weights, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize(
    "settings", [IMAGES, TEXT, (*IMAGES, "loss_scale=1e38", "scale_window=2"), (*TEXT, "loss_scale=1e38")]
)
def test_a_stopped_run_goes_on_bit_for_bit(settings: tuple[str, ...], tmp_path: Path, fingerprint: Any) -> None:
    whole, parts, seen = tmp_path / "whole", tmp_path / "parts", list[int]()

    def task() -> Any:
        return find_task(settings[0], settings[1:])

    assert train(task(), folder=whole).status == "finished"
    train(task(), folder=parts, on_progress=lambda now: seen.append(now.step), stop=lambda: seen[-1] >= 3)
    train(task(), folder=parts)
    assert fingerprint(parts) == fingerprint(whole)


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_a_step_that_overflows_is_skipped(kind: Any) -> None:
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = kind([weight], lr=0.5, fused=True)
    scale = LossScale(torch.device("cpu"), 1024.0, window=9)
    seen = []
    for factor in (0.25, float("inf"), 0.25):
        optimizer.zero_grad()
        scale.of((weight * factor).sum()).backward()  # type: ignore[no-untyped-call]
        scale.undone(optimizer)
        nn.utils.clip_grad_norm_([weight], 0.125)
        scale.step(optimizer)
        seen.append(weight.item())
    assert seen[0] == seen[1] != seen[2]
    assert seen[0] == pytest.approx(0.9375 if kind is SGD else 0.495)
    assert scale.value == 512.0


@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize("was_fused", [True, None])
def test_state_of_the_other_way_to_make_a_step_is_taken(kind: Any, was_fused: bool | None) -> None:
    """A checkpoint of an older version, or of another device."""
    more = {"momentum": 0.9} if kind is SGD else {}
    weights = [nn.Parameter(torch.linspace(-1, 1, 5)) for _ in range(2)]
    way = [was_fused, None if was_fused else True]
    first, second = (kind([weight], lr=0.1, fused=each, **more) for weight, each in zip(weights, way, strict=True))

    def step(number: int) -> None:
        weights[number].grad = weights[number].detach() ** 2
        (first, second)[number].step()

    step(0)
    with torch.no_grad():
        weights[1].copy_(weights[0])
    load_plain_state(second, plain_state(first))
    assert second.param_groups[0]["fused"] is way[1]
    step(0), step(1)
    torch.testing.assert_close(weights[0], weights[1])
