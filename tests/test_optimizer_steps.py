"""Steps of optimizers, as a run notices them."""

from __future__ import annotations

import warnings

import pytest
from torch import nn
from torch.optim import SGD, Optimizer

from bitplan.errors import BitplanWarning
from bitplan.runtime.optimizers import OptimizerSteps, before_every_step


class Watcher:
    def __init__(self) -> None:
        self.seen: list[Optimizer] = []

    def note(self, optimizer: Optimizer, has_closure: bool) -> None:
        self.seen.append(optimizer)


def test_an_optimizer_is_the_models_by_any_of_its_parameters() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    steps = OptimizerSteps(model)
    assert steps.is_of_model(SGD([{"params": [other.bias]}, {"params": [model.bias]}], 0.1))
    assert not steps.is_of_model(SGD(other.parameters(), 0.1))


def test_a_second_step_that_nobody_told_of_is_warned_about_once() -> None:
    model = nn.Linear(2, 2)
    steps, optimizer, another = OptimizerSteps(model), SGD([model.weight], 0.1), SGD([model.bias], 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            steps.before_step(optimizer)
            steps.before_step(another)
            steps.mark_counted()
        steps.before_step(optimizer)
    with pytest.warns(BitplanWarning, match=r"without run\.step\(\)"):
        steps.before_step(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps.before_step(optimizer)


def test_the_hook_holds_until_it_is_removed_or_its_object_is_gone() -> None:
    optimizer = SGD(nn.Linear(2, 2).parameters(), 0.1)
    kept, removed, gone = Watcher(), Watcher(), Watcher()
    seen = gone.seen
    removals = [before_every_step(item.note) for item in (kept, removed, gone)]
    try:
        optimizer.step()
        removals[1]()
        del gone
        optimizer.step()
    finally:
        for remove in removals:
            remove()
    assert [len(kept.seen), len(removed.seen), len(seen)] == [2, 1, 1]
