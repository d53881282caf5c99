"""Mistakes that newcomers make, each answered by one sentence that names what to write instead.

Mistakes in examples and whole plans are also in test_attach_misfits.py, those of commands in tests/cli.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import bitplan as bp
from bitplan.errors import BitplanError
from bitplan.plans import Plan

X = torch.randn(4, 16)


class Block(nn.Module):
    """Half of a transformer's block, with the names that transformers gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        y: Tensor = self.lm_head(x)
        return y


def rule(**keys: Any) -> Callable[[], object]:
    return lambda: bp.attach(Model(), {"version": 1, "rules": [{"match": "*", **keys}]}, example=X)


def quantizer(**options: Any) -> Callable[[], object]:
    return rule(w={"format": "int8", **options})


def attached(**options: Any) -> Callable[[], object]:
    return lambda: bp.attach(Model(), "fp8-linear", **options)


def plan(document: Any) -> Callable[[], object]:
    return lambda: bp.attach(Model(), document, example=X)


def yaml(rules: str) -> Callable[[], object]:
    return lambda: Plan.from_yaml(f"version: 1\nrules:\n{rules}")


#: Mistake -> what is called, and what the sentence must name.
MISTAKES: Mapping[str, tuple[Callable[[], object], str]] = {
    # Where a rule applies.
    "part of a layer's name": (rule(match="*.gate", w="e4m3"), r"'\*\.gate'; the closest are \*\.gate_proj"),
    "a layer's name misspelt": (rule(match="layers.0.gate_porj", w="e4m3"), r"layers\.0\.gate_proj"),
    "a prefix of a wrapper": (rule(match="model.layers.*", w="e4m3"), "the closest are layers"),
    "a class as a path": (rule(match="Linear", w="e4m3"), "op: linear"),
    "a class as an operation": (rule(op="nn.Linear", w="e4m3"), "did you mean linear?"),
    "any convolution": (rule(op="conv", w="e4m3"), "conv2d"),
    "layer instead of match": (rule(layer="lm_head", w="e4m3"), "did you mean match?"),
    # What is rounded.
    "weights": (rule(weights="e4m3"), "weight"),
    "input": (rule(input="e4m3"), "did you mean x"),
    "gradient": (rule(gradient="e5m2"), "grad_activation"),
    "grad_output": (rule(grad_output="e5m2"), "did you mean dy"),
    "forward": (rule(forward="e4m3"), "did you mean fprop"),
    # Formats.
    "fp8 as a format": (rule(w="fp8"), "e4m3 for weights and activations, e5m2 for gradients"),
    "fp8 outside of plans": (lambda: bp.quantize(X, "fp8"), "e5m2 for gradients"),
    "torch's name of a format": (rule(w="float8_e4m3fn"), "did you mean e4m3"),
    "bfloat16": (rule(w="bfloat16"), "did you mean bf16?"),
    "half": (rule(w="half"), "did you mean fp16?"),
    "a dtype": (lambda: bp.quantize(X, torch.int8), "such as 'e4m3' or 'int8', not by torch.int8"),  # type: ignore[arg-type]
    "bits as a format": (lambda: bp.quantize(X, 8), "are int8"),  # type: ignore[arg-type]
    "bits of a fixed format": (quantizer(bits=8), "drop bits"),
    "bits alone": (rule(w={"bits": 8}), "format: int8"),
    "dtype instead of format": (rule(w={"dtype": "int8"}), "did you mean format?"),
    # Scales and roundings.
    "per_tensor": (quantizer(scale="per_tensor"), "did you mean tensor"),
    "rowwise": (quantizer(scale="rowwise"), "did you mean vector?"),
    "group_size": (quantizer(group_size=32), "did you mean block?"),
    "a block without its size": (quantizer(scale="block"), "needs block="),
    "sr": (quantizer(rounding="sr"), "did you mean stochastic?"),
    "stochastic as a key": (quantizer(stochastic=True), "did you mean rounding?"),
    "promote: true": (rule(w={"format": "e4m3", "promote": True}), "{to: bf16}"),
    # Documents.
    "version as text": (plan({"version": "1", "rules": []}), "drop the quotes"),
    "one rule without a list": (plan({"version": 1, "rules": {"match": "*", "w": "e4m3"}}), r"\[\.\.\.\]"),
    "the text of a plan": (plan("version: 1\nrules: []"), r"Plan\.from_yaml"),
    "a file's name as text": (lambda: Plan.from_yaml("plan.yaml"), r"Plan\.load"),
    "a preset loaded as a file": (lambda: Plan.load("fp8-linear"), r"Plan\.preset\('fp8-linear'\)"),
    "a preset with an underscore": (plan("fp8_linear"), "did you mean fp8-linear"),
    "no space after a colon": (yaml("- {match:'*', weight: e4m3}"), "a space is missing after match:"),
    "a star without quotes": (yaml("- {match: *, weight: e4m3}"), 'match: "\\*"'),
    "a tab": (yaml("\t- {match: a}"), "indent with spaces"),
    # attach() and the other functions.
    "swapped model and plan": (lambda: bp.attach("fp8-linear", Model()), r"attach\(model, plan\)"),  # type: ignore[arg-type]
    "a class as a model": (lambda: bp.attach(Model, "fp8-linear"), "the class Model"),  # type: ignore[arg-type]
    "a class as an optimizer": (attached(optimizer=torch.optim.SGD), r"SGD\(model\.parameters\(\)"),
    "a class as an execution": (attached(execution=bp.Packed, example=X), r"add \(\)"),
    "a class as a loss": (lambda: bp.list_sites(Model(), (X, X), nn.MSELoss), r"MSELoss\(\)"),
    "an execution by its formats": (attached(execution="fp8"), "did you mean native?"),
    "steps as text": (attached(steps="100"), "whole number"),
    "an iterator as an example": (attached(example=iter([X])), r"next\(\)"),
    "a shape as an example": (attached(example=(4, 16)), r"torch\.randn"),
    "a plan after the batch": (lambda: bp.explain(Model(), X, "fp8-linear"), "comes before the batch"),  # type: ignore[arg-type]
    "no batch": (lambda: bp.list_sites(Model(), None), r"torch\.randn"),
    "a number as a batch": (lambda: bp.estimate_memory(Model(), 32), r"torch\.randn"),
    "a single batch to measure": (lambda: bp.measure(Model(), X), "into a list"),
    "a loader where a batch belongs": (lambda: bp.list_sites(Model(), DataLoader([X])), r"next\(iter\(loader\)\)"),  # type: ignore[arg-type]
    "one plan to compare": (lambda: bp.compare("own.py:train", "int8-all"), "put a single one into a list"),
    "a model to compare": (lambda: bp.compare(nn.Linear, ["fp32"]), r"train\(plan, seed\)"),  # type: ignore[arg-type]
    "whole numbers to round": (lambda: bp.quantize(torch.arange(4), "int8"), r"\.float\(\)"),
    "a list to round": (lambda: bp.quantize([1.0], "int8"), r"torch\.tensor\(\)"),  # type: ignore[arg-type]
    "swapped tensor and format": (lambda: bp.quantize("int8", X), "by a Tensor"),  # type: ignore[arg-type]
    "a channel without an axis": (lambda: bp.quantize(X, "int8", scale="channel"), "needs axis="),
    "a schedule by its shape": (lambda: bp.schedule("cosine", low=3, high=8), "did you mean CR?"),
    "swapped bits": (lambda: bp.schedule("CR", low=8, high=3), "exchange"),
    "fast accumulation by another name": (lambda: bp.Native(fast_accumulation="forward"), "did you mean fprop?"),  # type: ignore[arg-type]
    "stats that were not gathered": (lambda: attached(example=X)().stats(), "stats=True"),  # type: ignore[attr-defined]
}


def test_there_are_many() -> None:
    assert len(MISTAKES) >= 35


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_by_a_sentence_that_names_the_fix(mistake: str) -> None:
    call, token = MISTAKES[mistake]
    with pytest.raises(BitplanError, match=token) as raised:
        call()
    message = str(raised.value)
    assert "\n" not in message
    assert len(message) < 400
    assert not message.endswith("?.")


@pytest.mark.parametrize("value", [True, ["fprop", "dgrad", "wgrad"], ("fprop", "dgrad", "wgrad")])
def test_fast_accumulation_may_be_said_of_all_passes(value: Any) -> None:
    assert bp.Native(fast_accumulation=value).fast_accumulation == ("fprop", "dgrad", "wgrad")
    document = {"version": 1, "execution": {"kind": "native", "fast_accumulation": True}, "rules": []}
    assert Plan.from_dict(document).execution == bp.Native(fast_accumulation=value)


def test_a_mapping_is_a_plan_everywhere() -> None:
    document = {"version": 1, "rules": [{"match": "*", "op": "linear", "w": "e4m3"}]}
    assert any(site.quantizer is not None for site in bp.explain(Model(), document, X))
    assert bp.estimate_cost(Model(), document, X).relative < 1
    assert bp.estimate_memory(Model(), X, plan=document).peak > 0
