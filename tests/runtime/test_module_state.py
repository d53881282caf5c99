"""The tables of a run go to their device when something in them has changed, and only then."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import bitplan
from bitplan import Plan
from bitplan.runtime import module_state


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many buffers were written, each time."""
    counts: list[int] = []
    write = module_state._DeviceCopy.write

    def counted(device_copy: module_state._DeviceCopy) -> None:
        counts.append(len(device_copy.buffers))
        write(device_copy)

    monkeypatch.setattr(module_state._DeviceCopy, "write", counted)
    return counts


def attached(model: nn.Module, **quantizer: Any) -> bitplan.Attachment:
    quantizers = {"q": {"format": "e4m3", **quantizer}}
    rules = [{"match": "*", "op": "linear", "activation": "q"}]
    plan = Plan.from_dict({"version": 1, "quantizers": quantizers, "rules": rules})
    return bitplan.attach(model, plan, example=torch.randn(2, 4), mutable_formats=True)


def test_nothing_is_sent_where_nothing_changed(sent: list[int]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    run = attached(model)
    for _ in range(5):
        model(torch.randn(2, 4)).sum().backward()
        run.step()
    assert len(sent) <= 1
    run.set_format("q", "e5m2")
    before = len(sent)
    model(torch.randn(2, 4))
    run.step()
    y = model(torch.randn(2, 4)).detach()
    assert torch.equal(y, bitplan.quantize(y, "e5m2"))
    for _ in range(3):
        model(torch.randn(2, 4))
        run.step()
    assert len(sent) <= before + 1


def test_random_bits_are_new_every_step(sent: list[int]) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    run = attached(model, rounding="stochastic")
    for _ in range(3):
        model(torch.randn(2, 4))
        run.step()
    assert len(sent) == 3


def test_a_copy_of_the_model_is_served(sent: list[int]) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    run = attached(model)
    run.step()
    twin = copy.deepcopy(model)
    x = torch.tensor([[1.0625, 1.1875, 3.3, 0.7]])
    run.set_format("q", "e5m2")
    model(x)
    run.step()
    assert torch.equal(twin(x), model(x))
    assert sent[-1] == 2 * sent[0]


def test_a_model_that_was_moved_is_served(sent: list[int]) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    run = attached(model)
    run.step()
    model._apply(torch.clone)
    x = torch.tensor([[1.0625, 1.1875, 3.3, 0.7]])
    for _ in range(2):
        model(x)
        run.step()
    assert len(sent) == 2  # the new buffers are not known to hold what the old ones did
    run.set_format("q", "e5m2")
    y = model(x).detach()
    assert torch.equal(y, bitplan.quantize(y, "e5m2"))
    assert not torch.equal(y, bitplan.quantize(y, "e3m1"))


def test_all_tables_are_copied_to_another_device_at_once() -> None:
    numbers = torch.arange(12, dtype=torch.int32).view(6, 2)
    parts = torch.split(numbers, [1, 2, 3])
    here = [(number, torch.empty_like(parts[number], device="meta")) for number in (0, 2, 1, 2)]
    device_copy = module_state._DeviceCopy(numbers, parts, torch.device("meta"), here)
    device_copy.write()
    assert [row.shape for row in device_copy.rows] == [parts[number].shape for number, _ in here]
    assert all(row.untyped_storage() is not numbers.untyped_storage() for row in device_copy.rows)
    assert [row.storage_offset() for row in device_copy.rows] == [0, 6, 2, 6]
