"""Rules for a head hold when its loss is computed in chunks of tokens: the numbers are those of the whole product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from head_losses import CHUNK, RULES, VECTOR, ChunkedLoss, Model, WholeLoss, assert_same, batch, trained
from torch import Tensor, nn

import bitplan
from bitplan.errors import PlanError
from bitplan.runtime import head_loss_ops
from bitplan.runtime.head_loss import linear_cross_entropy


@pytest.mark.parametrize("execution", ["emulate", "packed", "aligned"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_numbers_are_those_of_the_whole_product(
    rule: dict[str, Any], execution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if execution == "aligned":  # logits with further columns, as on a GPU
        monkeypatch.setitem(head_loss_ops._ALIGNMENT, "cpu", 512)
        execution = "emulate"
    actual = trained(ChunkedLoss, rule, execution)
    assert_same(actual, trained(WholeLoss, rule, execution))
    _, unrounded = trained(ChunkedLoss, None)
    assert (
        max(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in zip(actual[1], unrounded, strict=True))
        > 1e-3
    )


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("rule", ["delayed", "slots apart"])
def test_compiled(rule: str) -> None:
    assert_same(trained(ChunkedLoss, RULES[rule], compiled=True), trained(WholeLoss, RULES[rule]))


def test_a_schedule_of_bits() -> None:
    rounded = {"format": "int", "bits": "grow", "scale": "tensor"}
    plan = {
        "version": 1,
        "schedules": {"grow": {"name": "steps", "bits": [3, 6], "at": [2]}},
        "rules": [{"match": "head", "x": rounded, "w": rounded, "dy": rounded}],
    }
    losses: list[list[float]] = []
    for kind in (ChunkedLoss, WholeLoss):
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with bitplan.attach(model, plan, example=batch()[0], optimizer=optimizer, steps=4):
            losses.append([])
            for _ in range(4):
                optimizer.zero_grad()
                loss = kind(model)(*batch())
                loss.backward()
                optimizer.step()
                losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_the_head_counts_as_used_without_an_example() -> None:
    model = Model()
    plan = {"version": 1, "rules": [{"match": "head", "x": "e4m3", "w": "e4m3"}]}
    with bitplan.attach(model, plan) as run:
        ChunkedLoss(model)(*batch()).backward()
        run.step()
    wrong = {"version": 1, "rules": [{"match": "head", "op": "matmul", "x": "e4m3"}]}
    run = bitplan.attach(model, wrong)
    ChunkedLoss(model)(*batch()).backward()
    with pytest.raises(PlanError, match="matmul"):
        run.step()
    run.detach()


@pytest.mark.parametrize(
    ("rule", "token"),
    [
        ({"activation": "e4m3"}, "logits"),
        ({"grad_activation": "e5m2"}, "logits"),
        ({"dy": {"format": "e5m2", "rounding": "stochastic"}}, "stochastic"),
        ({"wgrad.dy": VECTOR}, "wgrad.dy"),
        ({"dy": {"format": "int8", "scale": "channel"}}, "reach across"),
        ({"dy": "nvfp4"}, "reach across"),
        ({"x": {"format": "e4m3", "promote": {"to": "bf16", "overflow": 0.1}}}, "promotes"),
    ],
)
def test_rules_that_need_the_whole_logits_are_refused(rule: dict[str, Any], token: str) -> None:
    model = Model()
    with (
        bitplan.attach(model, {"version": 1, "rules": [{"match": "head", **rule}]}),
        pytest.raises(PlanError, match=token) as error,
    ):
        ChunkedLoss(model)(*batch())
    assert "head/linear.0" in str(error.value)


def test_a_plan_without_rules_for_the_head_leaves_it_alone() -> None:
    model = Model()
    expected = ChunkedLoss(model)(*batch())
    with bitplan.attach(model, {"version": 1, "rules": [{"match": "body", "x": "bf16"}]}, example=batch()[0]):
        rounded = ChunkedLoss(model)(*batch())
    assert 0 < abs(float(rounded - expected)) < 0.01
    assert torch.equal(ChunkedLoss(model)(*batch()), expected)


class RawWeight(nn.Module):
    """A head whose weight is a parameter of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 32)
        self.weight = nn.Parameter(torch.randn(64, 32))

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        return linear_cross_entropy(self.body(x), self.weight, classes, chunk=CHUNK)


def test_rules_do_not_reach_a_plain_weight() -> None:
    torch.manual_seed(0)
    model = RawWeight()
    expected = model(*batch())
    everywhere = {"version": 1, "rules": [{"match": "body", "x": "e4m3"}, {"match": "*", "op": "linear", "w": "e4m3"}]}
    with bitplan.attach(model, everywhere), pytest.raises(PlanError, match=r"nn\.Linear"):
        model(*batch())
    below = {"version": 1, "rules": [{"match": "*", "activation": "bf16"}]}  # no part of the loss is an activation
    with bitplan.attach(model, below):
        hidden = model.body(batch()[0])
        actual = model(*batch())
    assert torch.equal(actual, linear_cross_entropy(hidden, model.weight, batch()[1], chunk=CHUNK))
    assert not torch.equal(actual, expected)


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize(
    "execution", ["packed", bitplan.Native(min_macs=0, recompute="inputs")], ids=["packed", "native"]
)
def test_no_partitioner_recomputes_chunks(execution: Any) -> None:
    """Each operation of ours runs once in a step, whatever else is recomputed."""
    torch.compiler.reset()
    model = Model()
    activations = {"match": "body", "activation": "e4m3", "grad_activation": "e5m2"}
    for rule, expected in (
        (activations, {"bitplan::head_loss_and_grads": 1}),
        (
            {"match": "head", "x": "e4m3", "w": "e4m3", "dy": "e5m2"},
            {"bitplan::head_losses": 1, "bitplan::head_grads": 1},
        ),
    ):
        with bitplan.attach(model, {"version": 1, "rules": [rule]}, example=batch()[0], execution=execution) as run:
            step = run.compile(ChunkedLoss(model))
            step(*batch()).backward()
            with torch.profiler.profile() as profile:
                step(*batch()).backward()
        events = {event.key: event.count for event in profile.key_averages()}
        assert {name: count for name, count in events.items() if name.startswith("bitplan::head")} == expected
