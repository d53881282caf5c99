from __future__ import annotations

import torch

from bitplan.lab.tasks.task import generator, shuffled


def drawn(*where: int | str) -> list[float]:
    return torch.rand(4, generator=generator(*where)).tolist()


def test_draws_belong_to_their_place_alone() -> None:
    assert drawn("crop", 1, 2) == drawn("crop", 1, 2)
    places = [("crop", 1, 2), ("crop", 2, 1), ("flip", 1, 2), ("crop", 12), ("crop", 1, -2), ("crop", 10**30, 2)]
    assert len({tuple(drawn(*place)) for place in places}) == len(places)


def test_every_epoch_has_each_sample_once_in_an_order_of_its_own() -> None:
    batches = torch.cat([shuffled(step, 4, 10, seed=0) for step in range(5)])
    first, second = batches[:10].tolist(), batches[10:].tolist()
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert torch.cat([shuffled(step, 4, 10, seed=1) for step in range(5)])[:10].tolist() != first


def test_a_step_depends_on_no_other() -> None:
    alone = shuffled(7, 4, 10, seed=0)
    for step in (9, 0, 3):
        shuffled(step, 4, 10, seed=0)
    assert torch.equal(shuffled(7, 4, 10, seed=0), alone)


def test_a_batch_may_be_larger_than_the_set() -> None:
    assert torch.bincount(shuffled(0, 25, 10, seed=0), minlength=10).tolist() == [
        2 + (sample in shuffled(0, 25, 10, seed=0)[20:].tolist()) for sample in range(10)
    ]
