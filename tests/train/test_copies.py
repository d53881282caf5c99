"""What becomes of a task's batches on their way to the device."""

from __future__ import annotations

import torch

from bitplan.lab.train.session import Copies


def moving() -> Copies:
    return Copies(lambda tensor: tensor.to("meta"))  # a device that is not the CPU, and that every machine has


def test_what_a_task_gives_again_is_not_copied_again() -> None:
    copies, graph = moving(), torch.zeros(3)
    first = copies(((graph, torch.zeros(2)), 5))
    again = copies(((graph, torch.zeros(2)), 5))
    assert first[0][0].device.type == "meta"
    assert again[0][0] is first[0][0]
    assert again[0][1] is not first[0][1]
    assert again[1] == 5


def test_what_was_written_to_since_is_copied_again() -> None:
    copies, values = moving(), torch.zeros(3)
    first = copies(values)
    values.add_(1)
    assert copies(values) is not first


def test_only_the_last_batch_is_kept() -> None:
    copies = moving()
    for _ in range(5):
        copies([torch.zeros(1), torch.zeros(1)])
    assert len(copies._last) == 2


def test_copies_of_copies_are_not_made_again() -> None:
    pinned, moved, graph = Copies(torch.clone), moving(), torch.zeros(3)
    assert moved(pinned(graph)) is moved(pinned(graph))
