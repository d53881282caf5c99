"""Promotion at work: which tensor, when, and what it becomes; eager, compiled and packed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import ddp_worker
import pytest
import torch
from graph_backend import compile_without_inductor
from ranks import on_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bitplan
from bitplan import Plan
from bitplan.numerics import chunks
from bitplan.numerics.formats import get_format
from bitplan.numerics.mutable_format import MutableFormat
from bitplan.plans.spec import Promotion
from bitplan.runtime.rounding_op import promotion_signal

#: The formats of Lee, Sharma & Aiken 2023: from 31 on values overflow.
LOW = {"format": "e4m3b4", "rounding": "nearest-away", "promote": {"to": "e6m9b0"}}
WAYS = ["eager", "compiled", "packed", "packed and compiled"]


def plan_of(*rules: dict[str, Any]) -> Plan:
    return Plan.from_dict({"version": 1, "rules": list(rules)})


class Net(nn.Module):
    """A convolution, a norm, a residual."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.mix = nn.Conv2d(4, 4, 1)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.conv(x)))
        return self.head((y + self.mix(y)).mean((2, 3)))


def train(
    way: str, plan: Plan, steps: int, planted: int = 2, monkeypatch: pytest.MonkeyPatch | None = None
) -> tuple[list[float], bitplan.Attachment, nn.Module]:
    """The losses; from step `planted` on one bias of the norm is far too large."""
    torch._dynamo.reset()
    model = Net()
    x = torch.randn(4, 3, 6, 6)
    run = bitplan.attach(model, plan, example=x, execution="packed" if "packed" in way else "emulate")
    called: Any = model
    if "compiled" in way:
        assert monkeypatch is not None
        called = compile_without_inductor(run, model, monkeypatch)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    torch.manual_seed(1)
    losses = []
    for step in range(steps):
        if step == planted:
            with torch.no_grad():
                model.norm.bias[0] = 100.0
        optimizer.zero_grad()
        loss = called(torch.randn(4, 3, 6, 6)).square().mean()
        loss.backward()
        optimizer.step()
        run.step()
        losses.append(loss.item())
    return losses, run, model


RULE = {"match": "*", "weight": LOW, "activation": LOW}


@pytest.fixture(scope="module")
def eager_losses() -> list[float]:
    return train("eager", plan_of(RULE), 6)[0]


@pytest.mark.parametrize("way", WAYS)
def test_a_planted_overflow_promotes_what_overflows_one_step_later_and_nothing_else(
    way: str, eager_losses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Packed, every promotion makes another graph: two of them will do.
    losses, run, _ = train(way, plan_of(RULE), 4 if way == "packed and compiled" else 6, monkeypatch=monkeypatch)
    step_of = {promotion.site: promotion.step for promotion in run.promotions()}
    # A rounded value is at most 30: what follows overflows only when what came before is rounded no longer so.
    assert step_of["norm/batch_norm.0:weight(bias)"] == 3
    assert step_of["norm/batch_norm.0:activation"] == 3  # 30 and a normal number: one in 25 is over 31
    assert step_of["/relu.0:activation"] == 4
    assert "norm/batch_norm.0:weight" not in step_of
    assert not any(site.startswith("conv/") for site in step_of)
    assert losses == eager_losses[: len(losses)]


def test_without_a_rule_of_promotion_nothing_is_promoted(eager_losses: list[float]) -> None:
    losses, run, _ = train("eager", plan_of({**RULE, "weight": _never(LOW), "activation": _never(LOW)}), 6)
    assert run.promotions() == []
    assert losses[:3] == eager_losses[:3]
    assert losses[3] != eager_losses[3]


def _never(low: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in low.items() if key != "promote"}


class Seen(nn.Module):
    """One operation whose result is its input's double."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 * self.weight


def watched(x: Tensor, low: dict[str, Any], steps: int = 1) -> tuple[bitplan.Attachment, nn.Module]:
    model = Seen()
    run = bitplan.attach(model, plan_of({"match": "*", "op": "mul.0", "activation": low}))
    for _ in range(steps):
        model(x).sum().backward()
        run.step()
    return run, model


@pytest.mark.parametrize(("count", "size", "value"), [(1, 100, 15.5), (2, 200, 16.0), (1, 1, torch.inf)])
def test_at_the_limit_it_is_promoted(count: int, size: int, value: float) -> None:
    x = torch.zeros(size)
    x[:count] = -value  # its double has the magnitude 31, from which on e4m3b4 overflows
    (promotion,) = watched(x, LOW)[0].promotions()
    assert (promotion.site, promotion.step, promotion.measure, promotion.to) == (
        "/mul.0:activation",
        1,
        "overflow",
        "e6m9b0",
    )
    assert promotion.share == pytest.approx(count / size)


@pytest.mark.parametrize(("count", "size", "value"), [(1, 101, 16.0), (100, 100, 15.499), (1, 1, torch.nan)])
def test_below_the_limit_it_is_not(count: int, size: int, value: float) -> None:
    x = torch.zeros(size)
    x[:count] = value
    assert watched(x, LOW)[0].promotions() == []


def test_it_goes_one_way_and_holds_in_evaluation_and_in_copies() -> None:
    large, small = torch.full((4,), 40.03), torch.full((4,), 1.37)
    model = Seen()
    run = bitplan.attach(model, plan_of({"match": "*", "op": "mul.0", "activation": LOW}))
    twin = copy.deepcopy(model)
    for x in (large, small, small):
        model(x).sum().backward()
        run.step()
    for item in (model, twin, model.eval()):
        assert torch.equal(item(small), bitplan.quantize(small * 2, "e6m9b0"))
        assert not torch.equal(item(small), bitplan.quantize(small * 2, "e4m3b4"))


def test_evaluation_and_what_nothing_learns_from_promote_nothing() -> None:
    large = torch.full((4,), 40.0)
    model = Seen()
    run = bitplan.attach(model, plan_of({"match": "*", "op": "mul.0", "activation": LOW}))
    model(torch.ones(4)).sum().backward()
    with torch.no_grad():
        model(large)
    model.eval()(large)
    run.step()
    assert run.promotions() == []


@pytest.mark.parametrize(("limit", "promoted"), [(0.25, True), (0.26, False)])
def test_underflow_is_the_share_of_values_that_vanish(limit: float, promoted: bool) -> None:
    x = torch.tensor([0.0, 1e-9, 1.0, 2.0])
    low = {"format": "e4m3", "scale": "tensor", "promote": {"to": "bf16", "underflow": limit}}
    assert bool(watched(x, low)[0].promotions()) is promoted


@pytest.mark.parametrize("measure", ["overflow", "underflow", "error"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "with gaps"])
def test_a_large_tensors_sign_is_that_of_its_parts_together(measure: str, layout: str) -> None:
    x = torch.randn(1 << 9, 1 << 10)
    x = {"contiguous": x, "transposed": x.t(), "with gaps": x[:, ::2]}[layout]
    assert (len(chunks.chunks_of(x)) > 1) == (layout != "with gaps")
    low = bitplan.quantize(x, "e2m1")
    part, whole = promotion_signal(Promotion("e4m3", **{measure: 0.5}), x, low, 2.0)
    if measure == "error":
        expected = ((low.double() - x.double()).square().sum(), x.double().square().sum())
    else:
        bad = x.abs() >= 2.0 if measure == "overflow" else (low == 0) & (x != 0)
        expected = (bad.sum().double(), torch.tensor(float(x.numel()), dtype=torch.float64))
    assert 0 < part < whole
    torch.testing.assert_close(torch.stack((part, whole)).double(), torch.stack(expected), rtol=1e-5, atol=0.0)


def test_error_is_relative_and_a_promotion_may_lead_to_no_rounding() -> None:
    x = torch.linspace(1, 2, 50)
    before = 2 * x
    error = float(((bitplan.quantize(before, "e2m1") - before).square().sum() / before.square().sum()).sqrt())
    for factor, promoted in ((0.999, True), (1.001, False)):
        low = {"format": "e2m1", "promote": {"to": "keep", "error": factor * error}}
        run, model = watched(x, low)
        assert bool(run.promotions()) is promoted
        assert torch.equal(model(x), before) is promoted
        if promoted:
            assert run.promotions()[0].share == pytest.approx(error, rel=1e-6)
            assert run.promotions()[0].to == "unrounded"


def test_the_worst_micro_batch_counts_and_recomputation_counts_nothing_twice() -> None:
    bad, good = torch.zeros(100), torch.zeros(100)
    bad[0] = 16.0
    for batches in ((bad, good), (good, bad)):
        model = Seen()
        run = bitplan.attach(model, plan_of({"match": "*", "op": "mul.0", "activation": LOW}))
        for x in batches:
            checkpoint(model, x.requires_grad_(), use_reentrant=False).sum().backward()
        run.step()
        (promotion,) = run.promotions()
        assert promotion.share == pytest.approx(0.01)


class Spread(nn.Module):
    """One operation with two results."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.var_mean(x * self.weight, 0)


@pytest.mark.parametrize("execution", ["emulate", "packed"])
def test_all_results_of_an_operation_are_promoted_when_the_largest_is(execution: str) -> None:
    model = Spread()
    x = torch.tensor([[-20.0, 1.37], [20.0, 1.37]])
    run = bitplan.attach(model, plan_of({"match": "*", "op": "var_mean", "activation": LOW}), execution=execution)
    for means in (torch.tensor([0.0, 1.375]), torch.tensor([0.0, 1.37])):
        variance, mean = model(x)
        torch.testing.assert_close(mean.detach(), means, rtol=0, atol=1e-3)
        (variance.sum() + mean.sum()).backward()
        run.step()
    assert [promotion.site for promotion in run.promotions()] == ["/var_mean.0:activation"]


def test_a_resumed_run_knows_its_promotions() -> None:
    _, run, model = train("eager", plan_of(RULE), 4)
    state, weights = run.state_dict(), copy.deepcopy(model.state_dict())
    for execution in ("emulate", "packed"):
        again = Net()
        again.load_state_dict(weights)
        other = bitplan.attach(again, plan_of(RULE), example=torch.randn(4, 3, 6, 6), execution=execution)
        x = torch.randn(4, 3, 6, 6)
        assert not torch.equal(again(x), model(x))  # nothing is promoted there yet
        other.load_state_dict(state)
        assert other.promotions() == run.promotions() != []
        assert torch.equal(again(x), model(x))
        other.detach()


def test_promotions_raise_the_cost_and_are_told_in_the_table() -> None:
    plan = plan_of({"match": "*", "op": "mul.0", "activation": LOW})
    x = torch.full((1000,), 40.0)
    model = Seen()
    run = bitplan.attach(model, plan, example=x)
    for _ in range(3):
        model(x).sum().backward()
        run.step()
    one = bitplan.estimate_cost(Seen(), plan, x)
    low_bits = one.tensors["activation"].bits
    assert run.cost().tensors["activation"].bits == 3 * low_bits + 2 * 1000 * 8  # two steps of sixteen bits
    (row,) = [row for row in run.table() if row.site.name == "/mul.0:activation"]
    assert row.words == "e4m3b4 nearest-away until step 1, then e6m9b0"
    assert row.quantizer == bitplan.plans.QuantizerSpec("e6m9b0")


def test_in_emulate_a_promotion_recompiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    torch._dynamo.config.error_on_recompile = True
    try:
        _, run, _ = train("compiled", plan_of(RULE), 5, monkeypatch=monkeypatch)
    finally:
        torch._dynamo.config.error_on_recompile = False
    assert run.promotions()


@pytest.mark.parametrize("name", ["e4m3b4", "e4m3", "e5m2", "e3m2", "bf16", "e6m9b0", "int8", "int4"])
def test_the_overflow_threshold_lies_half_a_step_above_the_largest_value(name: str) -> None:
    target = get_format(name)
    assert not isinstance(target, bitplan.numerics.formats.BlockFormat)
    thresholds = {"e4m3b4": 31.0, "e4m3": 464.0, "e5m2": 61440.0, "e6m9b0": 8.5857402e9, "int8": 127.5}
    if name in thresholds:
        assert target.overflow_threshold == pytest.approx(thresholds[name], rel=1e-6)
    live = MutableFormat(target)
    assert float(live.overflow_threshold_in(live.row)) == target.overflow_threshold


def test_ranks_add_up_before_they_decide(tmp_path: Path) -> None:
    assert on_ranks(2, ddp_worker.watch, tmp_path) == [[[("0/mul.0:activation", 1, 0.01)], []]] * 2
