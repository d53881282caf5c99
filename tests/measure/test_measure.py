"""Measuring whole models: every product, all passes, nothing of the training touched."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import bitplan
from bitplan.analysis.measure import DEFAULT_CANDIDATES, Candidate, Measurement, Watch, measure
from bitplan.errors import MetricError
from bitplan.plans.match import PASSES

FEW = ("int8 tensor", "e4m3 vector")


class Small(nn.Module):
    """A convolution, a norm with buffers, dropout, attention and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.drop = nn.Dropout(0.3)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x)).relu().flatten(2).transpose(1, 2)
        mixed, _ = self.attention(y, y, y, need_weights=False)
        logits: Tensor = self.fc(self.drop(mixed).mean(1))
        return logits


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 2, 6, 6, generator=generator), torch.randint(3, (4,), generator=generator)


def test_every_product_in_all_its_passes() -> None:
    torch.manual_seed(0)
    result = measure(Small(), [batch()], F.cross_entropy)
    assert not result.skipped
    passes = {product: [row.pass_ for row in result.select(product=product)] for product in result.products}
    assert list(passes) == [
        *("conv/conv2d.0", "attention/linear.0", "attention/matmul.0", "attention/matmul.1"),
        *("attention/linear.1", "fc/linear.0"),
    ]
    for product, own in passes.items():
        # The first layer's input needs no gradient.
        assert list(dict.fromkeys(own)) == (
            [p for p in PASSES if p != "dgrad"] if product[:4] == "conv" else list(PASSES)
        )
    names = set(map(str, DEFAULT_CANDIDATES))
    assert {row.candidate for row in result.select(pass_="wgrad")} == names
    assert {row.candidate for row in result.select(pass_="fprop")} == {n for n in names if not n.endswith("-dy")}
    for row in result.rows:
        assert 0 <= row.median <= row.p99
        assert 0 <= row.underflow <= 1
        assert row.left.slot.startswith(row.pass_)
        assert row.k <= row.length
        # One operand's error alone is no more than both together, but for chance.
        assert row.left.mean <= 2 * row.mean


def trained(steps: int, probe: bool) -> tuple[dict[str, Tensor], list[Tensor], list[float]]:
    """State, gradients and random draws after some steps, with or without a probe between all of them."""
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    model = Small()
    optimizer = torch.optim.Adam(model.parameters())
    draws = []
    for step in range(steps):
        inputs, target = batch(step)
        F.cross_entropy(model(inputs), target).backward()
        if probe:
            measure(model, [batch(step + 1)], F.cross_entropy, FEW)
        optimizer.step()
        grads = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.zero_grad()
        draws += [torch.rand(()).item(), random.random(), float(np.random.rand())]
    state = {**model.state_dict(), **{f"adam {k}": v["exp_avg"] for k, v in optimizer.state_dict()["state"].items()}}
    assert model.training
    assert type(model.conv) is nn.Conv2d
    return state, grads, draws


def test_a_probe_changes_no_bit_of_the_training_it_watches() -> None:
    plain, watched = trained(3, probe=False), trained(3, probe=True)
    for name, tensor in plain[0].items():
        assert torch.equal(tensor, watched[0][name]), name
    assert all(map(torch.equal, plain[1], watched[1]))
    assert plain[2] == watched[2]


def test_a_model_under_a_plan_is_measured_in_its_own_precision_and_keeps_its_plan() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(32, 16)
    before = measure(model, [x], candidates=FEW)
    with bitplan.attach(model, "fp8-linear", example=x) as run:
        y, table = model(x), run.table()
        assert measure(model, [x], candidates=FEW) == before
        assert torch.equal(model(x), y)
        assert run.table() == table


def test_the_same_seed_gives_the_same_figures_and_batches_are_averaged() -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    batches = [torch.randn(128, 64) for _ in range(2)]
    one, again = (measure(model, batches[:1], candidates=FEW, terms=32) for _ in range(2))
    assert one == again
    assert measure(model, batches[:1], candidates=FEW, terms=32, seed=1) != one
    both = measure(model, batches, candidates=FEW, terms=32)
    other = measure(model, batches[1:], candidates=FEW, terms=32)
    for mean, first, second in zip(both.rows, one.rows, other.rows, strict=True):
        assert mean.median == pytest.approx((first.median + second.median) / 2)
        assert mean.right.sqnr == pytest.approx((first.right.sqnr + second.right.sqnr) / 2)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_opened_and_a_middle_step_is_taken(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    result = measure(kind(6, 5), [torch.randn(7, 4, 6)], lambda out: out[0].square().mean(), FEW)
    assert result.products == ["/linear.0", "/linear.1"]
    assert {row.inside for row in result.rows} == {kind.__name__.lower() + ("_tanh" if kind is nn.RNN else "")}
    hidden = result.select(product="/linear.1", pass_="fprop", candidate="int8 tensor")[0]
    assert hidden.median > 0
    assert {row.pass_ for row in result.select(product="/linear.1")} == set(PASSES)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_regions(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.second, self.first(x), use_reentrant=reentrant)  # type: ignore[no-untyped-call]
            return y

    torch.manual_seed(0)
    model = Checkpointed()
    x = torch.randn(16, 8)
    plain = measure(nn.Sequential(copy.deepcopy(model.first), copy.deepcopy(model.second)), [x], candidates=FEW)
    result = measure(model, [x], candidates=FEW)
    assert [(row.pass_, row.candidate) for row in result.rows] == [(row.pass_, row.candidate) for row in plain.rows]


def test_what_cannot_be_measured_is_told_of() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(3, 3)
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = torch.einsum("ij,jk,kl->il", self.fc(self.cell(x)), self.fc.weight, self.fc.weight)
            return y

    result = measure(Odd(), [torch.randn(4, 3)], candidates=FEW)
    assert result.products == ["fc/linear.0"]
    assert set(result.skipped) == {"cell/gru_cell.0", "/einsum.0"}


def test_a_broken_tensor_does_not_look_good() -> None:
    model = nn.Linear(4, 4)
    x = torch.randn(8, 4)
    x[0, 0] = float("nan")
    row = measure(model, [x], candidates=["e4m3 tensor"], rows=8).select(pass_="fprop")[0]
    assert np.isnan([row.median, row.sqnr, row.left.underflow, row.underflow]).all()


def test_a_measurement_is_written_and_read(tmp_path: Path) -> None:
    result = measure(nn.Linear(8, 8), [torch.zeros(4, 8)], candidates=FEW, target="a layer")
    result.save(tmp_path / "m.json")
    again = Measurement.load(tmp_path / "m.json")
    assert again.target == "a layer"
    assert str(again.rows) == str(result.rows)  # NaN is not equal to itself
    (tmp_path / "broken.json").write_text('{"bitplan_measurement": 1, "rows": [{}], "skipped": {}}')
    for name, sentence in (("broken.json", "damaged"), ("none.json", "cannot read")):
        with pytest.raises(MetricError, match=sentence):
            Measurement.load(tmp_path / name)


def test_candidates_in_words() -> None:
    assert str(Candidate.of("e4m3")) == "e4m3 tensor"
    mixed = Candidate.of("e5m2/e4m3 vector stochastic-dy")
    assert [str(spec) for spec in mixed.specs("wgrad")] == ["e5m2 vector stochastic", "e4m3 vector"]
    assert [str(spec) for spec in mixed.specs("fprop")] == ["e5m2 vector", "e4m3 vector"]
    assert Candidate.of("int8 unscaled").scale is None
    for candidate in DEFAULT_CANDIDATES:
        assert Candidate.of(str(candidate)) == candidate
    for wrong, sentence in (("e4m3 row", "'row'"), ("e4m99", "does not work"), ("", "does not work")):
        with pytest.raises(MetricError, match=sentence):
            Candidate.of(wrong)


def test_misfits_are_one_sentence() -> None:
    model = nn.Linear(2, 2)
    for arguments, sentence in (
        ({"batches": torch.ones(1, 2)}, "put a single batch into a list"),
        ({"batches": []}, "no batch"),
        ({"batches": [torch.ones(1, 2)], "candidates": []}, "at least one candidate"),
        ({"batches": [torch.ones(1, 2)], "rows": 0}, "rows is 0"),
        ({"batches": [torch.ones(1, 2)], "loss": lambda y: 3.0}, "not a tensor"),
    ):
        with pytest.raises(MetricError, match=sentence):
            measure(model, **arguments)  # type: ignore[arg-type]
    model.last = model(torch.ones(1, 2))
    with pytest.raises(MetricError, match="the model cannot be copied"):
        measure(model, [torch.ones(1, 2)])
    with pytest.raises(MetricError, match="no product"):
        measure(nn.ReLU(), [torch.ones(1, 2)])


def test_a_watch_in_a_loop_of_ones_own() -> None:
    """A weight that grows a thousandfold is named at the next look, and other steps cost nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    watch = Watch(model, every=2, rows=8)
    for step in range(10):
        if step == 7:
            with torch.no_grad():
                model[2].weight[0, 0] = 1000 * model[2].weight.abs().max()
        alarm = watch.step(torch.randn(64, 16))
        assert (alarm is not None) == (step == 8)
    assert [item.site for item in watch.alarms] == ["2/linear.0:fprop.w"]
    assert watch.alarms[0].step == 8
    assert watch.measurement is not None
    assert watch.measurement.candidates == ["int8 tensor", "e4m3 tensor"]
    with pytest.raises(MetricError, match="every is 0"):
        Watch(model, every=0)


def test_the_formats_of_a_plan_are_a_candidate() -> None:
    """Those of an operand that the plan leaves alone are exact; selectors find their products in the model."""
    torch.manual_seed(0)
    int8 = {"format": "int8", "scale": "tensor"}
    rules = [{"match": "fc", "op": "linear", "fprop": int8, "dgrad.dy": int8}]
    plan = bitplan.Plan.from_dict({"version": 1, "rules": rules})
    model = Small()
    result = measure(model, [batch(), batch(1)], F.cross_entropy, ["int8 tensor"], plan=plan)
    rows = {(row.product, row.pass_, row.candidate): row for row in result.rows}
    planned = {(product, pass_) for product, pass_, candidate in rows if candidate == "plan"}
    assert planned == {("fc/linear.0", "fprop"), ("fc/linear.0", "dgrad")}
    assert rows["fc/linear.0", "fprop", "plan"].median == rows["fc/linear.0", "fprop", "int8 tensor"].median
    assert 0 < rows["fc/linear.0", "dgrad", "plan"].median < rows["fc/linear.0", "dgrad", "int8 tensor"].median
    selected = {"version": 1, "rules": [{"select": "last-product", "fprop": int8}]}
    by_selector = measure(model, [batch()], F.cross_entropy, ["int8 tensor"], plan=bitplan.Plan.from_dict(selected))
    assert {row.product for row in by_selector.rows if row.candidate == "plan"} == {"fc/linear.0"}
    with pytest.raises(MetricError, match="the plan rounds no operand"):
        measure(model, [batch()], F.cross_entropy, ["int8 tensor"], plan="packed-fp8")


@pytest.mark.parametrize("rounding", [{"format": "int4", "scale": "tensor"}, {"format": "mxfp4"}])
def test_operands_that_a_plan_rotates_are_measured_rotated(rounding: dict[str, str]) -> None:
    """The error of the weight's gradient is that of a training step with the plan."""
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(45, 32, generator=generator) for _ in range(2))
    for tensor in (x, dy):
        tensor[torch.rand(45, 32, generator=generator) < 1 / 16] *= 6
    layer = nn.Linear(32, 32, bias=False)
    exact = dy.t() @ x
    medians = []
    for rotation in ({"rotate": "hadamard"}, {}):
        rules = [{"match": "*", "op": "linear", "wgrad": {**rounding, **rotation}}]
        plan = bitplan.Plan.from_dict({"version": 1, "rules": rules})
        result = measure(layer, [(x, dy)], lambda y, dy: (y * dy).sum(), ["int8 tensor"], plan=plan, rows=32)
        (row,) = (row for row in result.rows if row.candidate == "plan")
        layer.zero_grad()
        with bitplan.attach(layer, plan, example=x, execution="emulate"):
            layer(x).backward(dy)
        assert layer.weight.grad is not None
        trained = (layer.weight.grad - exact).abs() / (dy.abs().t() @ x.abs())
        assert row.mean == pytest.approx(float(trained.mean()), rel=1e-3)
        medians.append(row.median)
    assert 0 < medians[0] < 0.85 * medians[1]


def test_batches_of_a_loader_may_have_a_target_that_the_model_does_not_take() -> None:
    model, x = nn.Sequential(nn.Linear(16, 8)), torch.randn(8, 16)
    pairs = [[x, torch.zeros(8)]]
    assert measure(model, pairs, candidates=["int8 tensor"]) == measure(model, [x], candidates=["int8 tensor"])
