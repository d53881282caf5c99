"""What a plan does to a tensor is a value: immutable, equal keys for equal roundings, and gone with its model."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest
import torch
from torch import nn

import bitplan
from bitplan.capture import scopes
from bitplan.numerics.formats import get_format
from bitplan.plans import Plan
from bitplan.plans.spec import QuantizerSpec
from bitplan.runtime import rounding_op
from bitplan.runtime.rounding_op import RoundingOp, op_of_key


def make_op(format: str = "e4m3", **fields: Any) -> RoundingOp:
    return RoundingOp(QuantizerSpec(format, scale="tensor"), "fprop.x", "linear", **fields)


def test_a_rounding_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_op().watched = True  # type: ignore[misc]


def test_equal_roundings_have_equal_keys_and_others_do_not() -> None:
    ops = [make_op(), make_op("e5m2"), make_op(watched=True), make_op(row=1), make_op(keeps_codes=True)]
    ops.append(make_op(is_packed=True))
    ops.append(make_op(is_packed=True, stored_format=get_format("e4m3")))
    assert len({op.key for op in ops}) == len(ops)
    assert make_op().key == ops[0].key


def test_a_key_is_resolved_while_any_equal_rounding_lives() -> None:
    first, second = make_op("e3m4", row=77), make_op("e3m4", row=77)
    key = first.key
    del first
    gc.collect()
    assert op_of_key(key).spec == second.spec
    del second
    gc.collect()
    with pytest.raises(KeyError):
        op_of_key(key)


def test_roundings_are_gone_with_their_models() -> None:
    gc.collect()
    before = len(rounding_op._OPS)
    for bits in range(3, 9):
        plan = Plan.from_dict(
            {"version": 1, "rules": [{"match": "*", "x": {"format": f"int{bits}", "scale": "tensor"}}]}
        )
        model = nn.Linear(4, 4)
        run = bitplan.attach(model, plan, example=torch.randn(2, 4))
        model(torch.randn(2, 4))
        run.detach()
        del model, run
    gc.collect()
    assert len(rounding_op._OPS) <= before + 4  # of the last model, which an optimizer hook may still hold


def test_counts_of_traced_calls_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scopes, "_MAX_TRACED_CALLS", 3)
    monkeypatch.setattr(scopes, "_traced_counts", {})
    numbers = [scopes._new_counts() for _ in range(5)]
    assert list(scopes._traced_counts) == numbers[-3:]
    assert [scopes._count_when_traced(numbers[-1], "add") for _ in range(2)] == [0, 1]
