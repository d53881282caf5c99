"""What a session does with a task's batches on their way to the device."""

from __future__ import annotations

import torch

from bitplan.train.session import Session


def moving_session() -> Session:
    session = Session.__new__(Session)  # no model is needed to move a batch
    session.device = torch.device("meta")  # a device that is not the CPU, and that every machine has
    session._there = {}
    return session


def test_what_a_task_gives_again_is_not_copied_again() -> None:
    session, graph = moving_session(), torch.zeros(3)
    first = session._moved(((graph, torch.zeros(2)), 5))
    again = session._moved(((graph, torch.zeros(2)), 5))
    assert first[0][0].device.type == "meta"
    assert again[0][0] is first[0][0]
    assert again[0][1] is not first[0][1]
    assert again[1] == 5


def test_what_was_written_to_since_is_copied_again() -> None:
    session, values = moving_session(), torch.zeros(3)
    first = session._moved(values)
    values.add_(1)
    assert session._moved(values) is not first


def test_only_the_last_batch_is_kept() -> None:
    session = moving_session()
    for _ in range(5):
        session._moved([torch.zeros(1), torch.zeros(1)])
    assert len(session._there) == 2
