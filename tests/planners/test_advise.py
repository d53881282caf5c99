"""Advice: different data, different formats; reasons; and plans that other plans join."""

from __future__ import annotations

import copy
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
from bitplan.lab.targets import load_target
from bitplan.planners.advise import TAU, UNSEEN, Advice, advise, advise_on, products_above
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
    assert "nothing stays under tau" in tail.why
    assert str(tail).startswith("wgrad.dy of the model: ")
    heavy = next(slot for slot in layer_fed(5).slots if slot.slot == "wgrad.x")
    assert (str(heavy.spec), "x worse than" in heavy.why) == ("e4m3 tensor", True)


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


def test_the_default_tau_does_not_depend_on_the_model() -> None:
    """It is the level of E4M3 with a scale per tensor on healthy models; heavy tails have a higher one."""
    healthy, sick = layer_fed(math.inf), layer_fed(1)
    assert healthy.tau == sick.tau == 0.06
    levels = {
        advice.tau_from: max(row.level for row in advice.measurement.rows if row.candidate == "e4m3 tensor")
        for advice in (healthy,)
    }
    assert 0.03 < levels["the level of e4m3 tensor on healthy models"] < 0.06
    assert not products_above(healthy.measurement, healthy.tau)
    (above,) = products_above(sick.measurement, sick.tau).values()
    assert above > 2
    without = replace(
        healthy.measurement, rows=tuple(row for row in healthy.measurement.rows if row.candidate != "e4m3 tensor")
    )
    assert formats(advise_on(without)) == formats(healthy)


@pytest.mark.parametrize("target", ["gpt-tiny", "lstm", "gcn", "digits"])
def test_tau_is_that_of_nine_of_ten_products_of_healthy_models(target: str) -> None:
    """All of them train in E4M3: 0.050 to 0.070 is the 90 % level of each."""
    made = load_target(target)
    measurement = measure(made.model, [made.batch], made.loss, ["e4m3 tensor"], rows=32)
    levels = sorted(row.level for row in measurement.rows)
    assert levels[math.ceil(0.9 * len(levels)) - 1] == pytest.approx(TAU, rel=0.25)


class Branches(nn.Module):
    """Four parallel branches. `faults` multiplies channels of each branch's input."""

    def __init__(self, normalised: bool) -> None:
        super().__init__()
        end = nn.LayerNorm(32) if normalised else nn.Identity()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), copy.deepcopy(end)) for _ in range(4)
        )
        self.register_buffer("faults", torch.ones(4, 64))
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        parts = [branch(x * fault) for branch, fault in zip(self.branches, self.faults, strict=True)]
        out: Tensor = self.head(torch.cat(parts, 1))
        return out


def branch_formats(fault: int | None, value: float, normalised: bool) -> dict[tuple[str, str], str]:
    torch.manual_seed(0)
    model, batch = Branches(normalised), (torch.randn(256, 64), torch.randint(10, (256,)))
    if fault is not None:
        model.faults[fault, 3] = value  # type: ignore[index,operator]
        if not normalised:  # the layer scales the massive channel back, as those of language models do
            with torch.no_grad():
                model.branches[fault][0].weight[:, 3] /= value  # type: ignore[index]
    advice = advise(model, [batch], F.cross_entropy)
    return {(slot.product, slot.slot): str(slot.spec) for slot in advice.slots}


@pytest.mark.parametrize("normalised", [False, True], ids=["scaled back", "normalised"])
@pytest.mark.parametrize("fault", range(4))
def test_a_fault_in_one_of_four_branches_changes_the_advice_there_only(fault: int, normalised: bool) -> None:
    clean, faulty = (branch_formats(where, 1e8, normalised) for where in (None, fault))
    changed = {key for key in clean if clean[key] != faulty[key]}
    assert changed
    assert all(product.startswith(f"branches.{fault}.") for product, _ in changed), changed
    if not normalised:  # where the channel dominates all sums, the others' errors are small beside it
        assert not any("int4" in faulty[key] for key in changed)


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
    assert advice.plan.schedules
    assert all(name.startswith("advised") for name in advice.plan.schedules)
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
