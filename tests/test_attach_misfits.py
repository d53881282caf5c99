"""What attach and its state are given and cannot use: a sentence each, and nothing is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bitplan
from bitplan.errors import PlanError
from bitplan.plans import Plan
from bitplan.runtime.attach import Attachment

X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))


def attached(model: nn.Module, rule: dict[str, Any], **options: Any) -> Attachment:
    return bitplan.attach(model, Plan.from_dict({"version": 1, "rules": [rule]}), **options)


def test_a_state_that_does_not_fit_is_refused_in_a_sentence_and_changes_nothing() -> None:
    rule = {"match": "*", "activation": {"format": "float", "bits": 8, "exponent_bits": 4}}
    fixed = {"match": "*", "activation": "e4m3"}
    with attached(net(), rule) as run:
        saved = run.state_dict()
    with attached(net(), fixed, mutable_formats=True) as run:
        live = run.state_dict()
    with attached(net(), fixed) as run:
        for state, reason in (({}, "not the state"), (saved, "another plan"), (live, "mutable_formats=")):
            with pytest.raises(PlanError, match=reason):
                run.load_state_dict(state)
        assert run.state_dict()["step"] == 0


def test_what_is_no_model_or_no_batch_for_it_is_refused_in_a_sentence() -> None:
    with pytest.raises(PlanError, match=r"torch\.nn\.Module, not to str"):
        bitplan.attach("model", "bf16-all")  # type: ignore[arg-type]
    model = net()
    with pytest.raises(PlanError, match="does not run on the example"):
        attached(model, {"match": "*", "weight": "e4m3"}, example=torch.randn(2, 7))
    assert type(model) is nn.Sequential


def test_statistics_keep_their_precision_in_a_model_that_is_converted() -> None:
    model = net()
    with attached(model, {"match": "*", "activation": "e4m3"}, example=X, stats=True) as run:
        model.bfloat16()
        model(X.bfloat16()).sum().backward()
        run.step()
        assert {record.dtype for _, record in run._all_tables.records()} == {torch.float32}
        errors = [each.error for name, each in run.stats().items() if "linear" in name]
        assert len(errors) == 2
        assert all(0 < error < 0.1 for error in errors)
