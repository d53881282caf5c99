"""What attach and its state are given and cannot use: a sentence each, and nothing is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bitplan
from bitplan.capture.recording import inputs_of
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


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        y: torch.Tensor = self.fc(x) * scale
        return y


@pytest.mark.parametrize(
    ("model", "example"),
    [
        (net(), (X, torch.zeros(5))),
        (net(), [X, torch.zeros(5)]),
        (net(), {"input": X, "labels": torch.zeros(5)}),
        (Named(), {"x": X, "labels": torch.zeros(5), "ids": torch.zeros(5)}),
    ],
    ids=["pair", "list", "mapping", "named"],
)
def test_a_target_that_the_model_does_not_take_is_left_out_of_the_example(model: nn.Module, example: Any) -> None:
    with attached(model, {"match": "*", "op": "linear", "w": "e4m3"}, example=example) as run:
        assert any(row.quantizer is not None for row in run.table())


def test_what_the_model_takes_stays_in_the_example() -> None:
    assert inputs_of(Named(), (X, 2.0)) == (X, 2.0)
    assert inputs_of(Named(), {"x": X, "scale": 2.0}) == {"x": X, "scale": 2.0}
    three = (X, 2.0, X)  # neither a call of the model nor a pair
    assert inputs_of(Named(), three) is three


@pytest.mark.parametrize(
    ("example", "sentence"),
    [
        (DataLoader(TensorDataset(X), 2), r"not a DataLoader: give next\(iter\(loader\)\)"),
        (TensorDataset(X), "not a Dataset"),
        (X.numpy(), r"torch\.from_numpy"),
    ],
)
def test_what_is_no_batch_is_refused_in_a_sentence(example: Any, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        attached(net(), {"match": "*", "weight": "e4m3"}, example=example)


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        ({"rules": [{"match": "*", "weight": "e4m3"}]}, "version: 1"),
        ([{"match": "*", "weight": "e4m3"}], "'rules': \\[...\\]"),
        ({"version": 1, "rules": [{"match": "*", "weight": "fp8"}]}, "e4m3 for weights and activations, e5m2"),
        ({"version": 1, "rules": [{"match": "*", "weight": "FP4"}]}, "mxfp4 or nvfp4"),
        ({"version": 1, "rules": [{"match": "*", "weight": torch.float8_e4m3fn}]}, "has a name, such as e4m3"),
        ({"version": 1, "rules": [{"match": "*", "weight": 8}]}, "8 bits are int8"),
    ],
)
def test_a_plan_that_is_nearly_right_is_told_what_is_meant(plan: Any, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        bitplan.attach(net(), plan)


def test_a_star_without_quotes_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text("version: 1\nrules:\n- {match: *, weight: e4m3}\n")
    with pytest.raises(PlanError, match=r'plan\.yaml:3: a \* begins an alias in YAML: .* match: "\*"'):
        bitplan.attach(net(), file)


def test_swapped_arguments_are_noticed() -> None:
    with pytest.raises(PlanError, match=r"The model comes first: attach\(model, plan\)"):
        bitplan.attach("fp8-linear", net())  # type: ignore[arg-type]
