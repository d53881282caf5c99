"""Advice: different data, different formats; reasons; and plans that other plans join."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bitplan
from bitplan.analysis.measure import Measurement, measure
from bitplan.errors import PlanError
from bitplan.planners.advise import UNSEEN, Advice, advise, advise_on, default_tau
from bitplan.plans import Plan


def layer_fed(nu: float, seed: int = 0) -> Advice:
    """Advice for a linear layer whose weight, input and gradient have tails of that weight."""
    generator = np.random.default_rng(seed)

    def entries(*shape: int) -> Tensor:
        drawn = generator.standard_normal(shape) if math.isinf(nu) else generator.standard_t(nu, shape)
        return torch.from_numpy(drawn).float()

    model = nn.Linear(256, 256, bias=False)
    model.weight.data = entries(256, 256) / 16
    dy = entries(512, 256)
    x = entries(512, 256).requires_grad_()
    return advise(model, [x], lambda y: (y * dy).sum(), seed=seed)


def formats(advice: Advice) -> dict[str, str]:
    return {slot.slot: str(slot.spec) for slot in advice.slots}


def test_the_same_layer_gets_other_advice_for_other_data() -> None:
    gaussian, cauchy = layer_fed(math.inf), layer_fed(1)
    assert set(formats(gaussian).values()) == {"int8 tensor"}
    assert not any("int" in text for text in formats(cauchy).values())
    assert set(formats(gaussian)) == set(formats(cauchy)) == {*bitplan.plans.SLOTS}
    tail = next(slot for slot in cauchy.slots if slot.slot == "wgrad.dy")
    assert "heavy tail, kurtosis" in tail.why
    assert "x worse than" in tail.why
    assert str(tail).startswith("wgrad.dy of the model: ")


def test_tau_decides_and_is_fair_between_lengths() -> None:
    """The same kind of numbers in sums of 16 and of 1024 terms: errors differ by 8, levels and advice do not."""
    torch.manual_seed(0)
    short, long = nn.Linear(16, 64, bias=False), nn.Linear(1024, 64, bias=False)
    for model in (short, long):
        nn.init.normal_(model.weight)
    actual = [
        measure(m, [torch.randn(256, m.in_features)], candidates=["e4m3 tensor", "int4 tensor", "int8 tensor"], rows=32)
        for m in (short, long)
    ]
    rows = [item.select(pass_="fprop", candidate="e4m3 tensor")[0] for item in actual]
    assert rows[0].median / rows[1].median == pytest.approx(8, rel=0.3)
    assert rows[0].level == pytest.approx(rows[1].level, rel=0.3)
    only = [replace(item, rows=tuple(item.select(pass_="fprop"))) for item in actual]
    for tau, expected in ((1e-3, "bf16"), (0.05, "int8 tensor"), (10.0, "int4 tensor")):
        for slot_advice in only:
            assert set(formats(advise_on(slot_advice, tau=tau)).values()) == {expected}


def test_the_default_tau_is_the_reference_in_nine_of_ten() -> None:
    result = layer_fed(math.inf).measurement
    levels = sorted(row.level for row in result.rows if row.candidate == "e4m3 tensor")
    assert default_tau(result) == levels[-1]  # three passes: nine of ten are all of them
    assert layer_fed(math.inf).tau == pytest.approx(levels[-1])
    without = replace(result, rows=tuple(row for row in result.rows if row.candidate != "e4m3 tensor"))
    with pytest.raises(PlanError, match="was not measured"):
        advise_on(without)


class Net(nn.Module):
    """Products of several kinds, a module above others with a product of its own, and two of a kind in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.own = nn.Parameter(torch.randn(8, 8))
        self.rnn = nn.LSTM(8, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).flatten(2).transpose(1, 2)
        y = F.linear(F.linear(self.inner(y), self.own), self.own)
        mixed = F.scaled_dot_product_attention(y, y, y)
        out: Tensor = self.rnn(mixed)[0].mean((1, 2))
        return out


def advised_net(**options: object) -> tuple[Net, Tensor, Advice]:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 3, 6, 6)
    return model, x, advise(model, [x], lambda y: y.square().sum(), **options)  # type: ignore[arg-type]


def test_the_plan_gives_every_slot_what_was_advised() -> None:
    model, x, advice = advised_net()
    assert not advice.measurement.skipped
    again = Plan.from_yaml(advice.plan.to_yaml())
    assert again == advice.plan
    rounded = {
        (item.site.module, item.site.op, item.site.role): str(item.quantizer)
        for item in bitplan.explain(model, again, x, lambda y: y.square().sum())
        if item.quantizer is not None
    }
    for slot_advice in advice.slots:
        module, _, op = slot_advice.product.rpartition("/")
        if op == "lstm":
            assert rounded[module, "linear.1", slot_advice.slot] == str(slot_advice.spec)
        else:
            assert rounded[module, op, slot_advice.slot] == str(slot_advice.spec), slot_advice
    roles = {role for _, _, role in rounded}
    assert roles == set(bitplan.plans.SLOTS)
    with bitplan.attach(model, again, example=x):
        model(x).square().sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters() if parameter.grad is not None)


def test_reasons_are_in_the_plan_and_say_what_is_not_seen(tmp_path: Path) -> None:
    _, _, advice = advised_net()
    advice.plan.save(tmp_path / "plan.yaml")
    made_by = Plan.load(tmp_path / "plan.yaml").made_by
    assert isinstance(made_by, dict)
    assert made_by["unseen"] == list(UNSEEN)
    assert made_by["why"]["conv"]["fprop.w"].startswith(formats_of(advice, "conv/conv2d.0")["fprop.w"])
    assert made_by["tau"] == pytest.approx(advice.tau, rel=1e-3)
    assert len(advice.reasons) == len(advice.slots)


def formats_of(advice: Advice, product: str) -> dict[str, str]:
    return {slot.slot: str(slot.spec) for slot in advice.slots if slot.product == product}


@pytest.mark.parametrize("cost", ["bitops", "memory", "time"])
def test_no_dearer_pair_is_taken_than_needed(cost: str) -> None:
    """Whatever the cost, every product stays under tau, and time never mixes integers with floats in 8 bits."""
    _, _, advice = advised_net(cost=cost)
    by_pass: dict[tuple[str, str], list[float]] = {}
    kinds: dict[tuple[str, str], set[str]] = {}
    for slot in advice.slots:
        key = slot.product, slot.slot.split(".")[0]
        by_pass.setdefault(key, []).append(slot.level)
        kinds.setdefault(key, set()).add(str(slot.spec)[0])
    assert all(math.hypot(*levels) <= advice.tau for levels in by_pass.values())
    if cost == "time":
        assert all(len(kind) == 1 for kind in kinds.values())
        assert "int4 tensor" not in advice.counts


def test_advice_joins_an_assignment_and_keeps_its_budget() -> None:
    model, x, _ = advised_net()
    low = {"format": "e4m3", "scale": "tensor"}
    base = Plan.from_dict(
        {
            "version": 1,
            "rules": [
                {"match": "*", "weight": "bf16", "activation": "bf16", "grad_activation": "bf16"},
                {"match": "inner", "weight": low, "activation": low, "grad_activation": low},
            ],
        }
    )
    _, _, advice = advised_net(base=base, candidates=["int8 tensor", "e4m3 tensor"])
    joined = bitplan.estimate_cost(model, advice.plan, x, lambda y: y.square().sum())
    alone = bitplan.estimate_cost(model, base, x, lambda y: y.square().sum())
    assert joined.tensors == alone.tensors
    assert joined.bit_operations < alone.bit_operations
    # What the base keeps in 8 bits is not rounded once more on its way into a product.
    decided = advice.plan.decide("inner.0", "linear.0")
    assert (decided["fprop.w"].quantizer, decided["dgrad.dy"].quantizer) == (None, None)
    assert advice.plan.decide("conv", "conv2d.0")["fprop.w"].quantizer is not None


def test_advice_joins_an_assignment_that_was_made_for_a_ratio() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(256, 10))
    batch = torch.randn(8, 3, 8, 8), torch.randint(10, (8,))
    base = bitplan.assign(model, batch, F.cross_entropy, ratio=0.5)
    advice = advise(model, [batch], F.cross_entropy, candidates=["int8 tensor", "e4m3 tensor"], base=base)
    joined, alone = (bitplan.estimate_cost(model, plan, batch, F.cross_entropy) for plan in (advice.plan, base))
    assert joined.tensors == alone.tensors
    assert joined.bit_operations < alone.bit_operations
    peaks = [
        bitplan.estimate_memory(model, batch, F.cross_entropy, plan=plan, execution="packed").peak
        for plan in (advice.plan, base)
    ]
    assert peaks[0] <= peaks[1]


def test_integers_follow_a_schedule() -> None:
    model, x, advice = advised_net(
        schedule=bitplan.schedule("CR", low=4, high=8), candidates=["int8 tensor", "e4m3 tensor"]
    )
    assert set(advice.plan.schedules) == {"advised"}
    spec = advice.plan.decide("conv", "conv2d.0")["fprop.w"].quantizer
    assert spec is not None
    assert str(spec).startswith("int CR")
    again = Plan.from_yaml(advice.plan.to_yaml())
    with bitplan.attach(model, again, steps=20, example=x) as run:
        model(x).sum().backward()
        run.step()


def test_misfits_are_one_sentence() -> None:
    result = layer_fed(math.inf).measurement
    for options, sentence in (({"cost": "money"}, "there is no cost"), ({"tau": 0.0}, "tau is 0")):
        with pytest.raises(PlanError, match=sentence):
            advise_on(result, **options)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="nothing was measured"):
        advise_on(Measurement(()))


def test_what_is_broken_stays_in_sixteen_bits() -> None:
    model = nn.Linear(8, 8)
    x = torch.randn(16, 8)
    x[3] = float("nan")
    advice = advise(model, [x], lambda y: y.sum(), rows=16, tau=1.0)
    assert formats(advice)["fprop.x"] == "bf16"
    assert "is finite" in next(slot.why for slot in advice.slots if slot.slot == "fprop.x")
