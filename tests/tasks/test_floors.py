"""Each task with data of its own is trained: in FP32 up to its floor, and some of the way in 8 bits."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import bitplan
from bitplan.capture.recording import call_arguments
from bitplan.lab.tasks.registry import CARDS, find_task, times_trivial
from bitplan.lab.tasks.task import Task

EIGHT_BITS = "int8-minmax"
EIGHT_BIT_STEPS = 12
WITH_FLOOR = [name for name, card in CARDS.items() if card.floor is not None]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """So small models gain nothing from a second thread, and lose much where other processes want the core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trained(task: Task, plan: str | None = None, steps: int | None = None) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(task.seed)
    model = task.model().train()
    optimizer = task.optimizer(model)
    peaks = [group["lr"] for group in optimizer.param_groups]
    run = None if plan is None else bitplan.attach(model, plan, seed=task.seed)
    losses = []
    for step in range(steps or task.settings.steps):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * task.learning_rate(step)
        inputs, target = task.batch_of(model, step)
        args, kwargs = call_arguments(inputs)
        loss = task.loss(model(*args, **kwargs), target)
        loss.backward()
        if task.settings.clip:
            nn.utils.clip_grad_norm_(model.parameters(), task.settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        if run is not None:
            run.step()
        losses.append(loss.item())
    return model, losses


def test_every_kind_of_task_has_a_floor() -> None:
    assert WITH_FLOOR == [
        "digits",
        "detection",
        "lstm-lm",
        "lm",
        "mlm",
        "text-classification",
        "graph",
        "forecast",
        "rl",
    ]
    assert all(card.embedded for card in CARDS.values() if card.floor is not None)


@pytest.mark.parametrize("name", WITH_FLOOR)
def test_fp32_reaches_the_floor_and_eight_bits_train_otherwise(name: str) -> None:
    if CARDS[name].model.startswith("BERT"):
        pytest.importorskip("transformers")
    card = CARDS[name]
    assert card.floor is not None
    task = find_task(name, card.floor.settings)
    model, losses = trained(task)
    with torch.no_grad():
        figures = task.evaluate(model.eval())
    assert (task.metric.name, task.metric.better) == (card.metric, card.better)
    assert times_trivial(task.metric, figures[card.metric]) >= card.floor.times_trivial

    _, rounded = trained(find_task(name, card.floor.settings), EIGHT_BITS, EIGHT_BIT_STEPS)
    assert all(math.isfinite(loss) for loss in rounded)
    assert min(rounded[-3:]) < rounded[0]  # it learns
    pairs = [*zip(losses, rounded, strict=False)]
    assert all(first != second for first, second in pairs)  # every step was rounded
    assert abs(pairs[0][0] - pairs[0][1]) < 0.1 * pairs[0][0]  # and not by much
