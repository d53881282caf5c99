"""Scales that come from the largest magnitudes of past steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import bitplan
from bitplan import Plan
from bitplan.errors import BitplanWarning, PlanError
from bitplan.executions.native.backends import Float8Backend
from bitplan.runtime.sharding import Ranks

LATE: dict[str, Any] = {"format": "e4m3", "scale": "tensor", "history": 2, "margin": 1}
LATE_GRAD: dict[str, Any] = {"format": "e5m2", "scale": "tensor", "history": 3}
ALL = {"x": LATE, "w": LATE, "dy": LATE_GRAD}


def plan_of(**rule: Any) -> Plan:
    return Plan.from_dict({"version": 1, "rules": [{"match": "*", "op": "linear", **rule}]})


def by_hand(x: Tensor, amax: float) -> Tensor:
    """E4M3 with a scale that makes room for twice `amax`."""
    scale = torch.tensor(2 * amax) / 448
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def training(model: nn.Module, called: Any, run: Any, factors: list[float], seed: int = 0) -> list[Tensor]:
    """Steps on inputs of other magnitudes; results and gradients of all."""
    result = []
    for number, factor in enumerate(factors):
        torch.manual_seed(seed + number)
        x = (factor * torch.randn(8, 16)).requires_grad_()
        model.zero_grad()
        y = called(x)
        (y * factor).square().sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-3 * parameter.grad.sign()
        run.step()
        result += [y.detach(), x.grad, *(parameter.grad.clone() for parameter in model.parameters())]
    return result


def fresh(execution: Any = "emulate", **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 4))
    if execution == "native":
        execution = bitplan.Native(min_macs=0)
    return model, bitplan.attach(model, plan_of(**ALL), example=torch.randn(8, 16), execution=execution, **options)


FACTORS = [1.0, 3.0, 0.5, 0.25, 0.25, 40.0, 2.0]


def test_a_scale_is_made_of_the_steps_before() -> None:
    model = nn.Linear(4, 4, bias=False)
    nn.init.eye_(model.weight)
    run = bitplan.attach(model, plan_of(x=LATE))
    past: list[float] = []
    for factor in (1.0, 30.0, 0.1, 0.1, 0.1):
        x = factor * torch.tensor([[1.0, -0.3, 0.01, 0.7]])
        amax = float(x.abs().max())
        y = model(x)
        # The first step has no past and looks at the tensor itself, as a dynamic scale does.
        room = 2 * max(past[-2:]) if past else amax
        assert torch.equal(y, by_hand(x, room / 2))
        y.sum().backward()
        run.step()
        past.append(amax)
    run.detach()


def test_evaluation_has_the_same_scale_and_leaves_no_trace() -> None:
    model, run = fresh()
    training(model, model, run, FACTORS[:2])
    before = run.state_dict()["records"]
    x = torch.randn(8, 16)
    with torch.no_grad():
        unlearned = model(x)
        model(100 * x)
    model.eval()
    assert torch.equal(model(x), unlearned)
    model(100 * x)
    run.step()
    for path, (_, record) in run.state_dict()["records"].items():
        assert torch.equal(record, before[path][1])
    assert torch.equal(model(x), unlearned)


def test_what_is_not_finite_and_what_is_zero_is_no_past() -> None:
    model = nn.Linear(2, 1, bias=False)
    run = bitplan.attach(model, plan_of(**{"fprop.x": LATE}))
    for value in (3.0, torch.inf, torch.nan, 0.0):
        model(torch.full((1, 2), value)).sum().backward()
        run.step()
    assert model._buffers["_bitplan_reach"].tolist() == [6.0]  # type: ignore[union-attr]


@pytest.mark.parametrize("execution", ["emulate", "native"])
def test_compiled_it_is_the_same_in_one_graph(execution: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Float8Backend, "is_available", lambda self, device: device.type == "cpu")
    torch._dynamo.reset()
    model, run = fresh(execution)
    eager = training(model, model, run, FACTORS)
    kept = run.state_dict()["records"]
    model, run = fresh(execution)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = training(model, torch.compile(model, fullgraph=True, backend=counter), run, FACTORS)
    assert counter.frame_count == 1
    for ours, theirs in zip(compiled, eager, strict=True):
        assert torch.equal(ours, theirs)
    for path, (names, record) in run.state_dict()["records"].items():
        assert names == kept[path][0]
        assert torch.equal(record, kept[path][1])


def test_native_multiplies_the_operands_of_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Float8Backend, "is_available", lambda self, device: device.type == "cpu")
    model, run = fresh()
    emulated = training(model, model, run, FACTORS)
    expected = run.state_dict()["records"]
    model, run = fresh("native")
    assert run.fallbacks() == []
    native = training(model, model, run, FACTORS)
    for ours, theirs in zip(native, emulated, strict=True):
        assert (ours - theirs).norm() <= 1e-4 * theirs.norm()
    for path, (names, record) in run.state_dict()["records"].items():
        assert names == expected[path][0]
        torch.testing.assert_close(record, expected[path][1], rtol=1e-4, atol=0)


def test_packed_is_the_same() -> None:
    model, run = fresh()
    emulated = training(model, model, run, FACTORS)
    model, run = fresh("packed")
    for ours, theirs in zip(training(model, model, run, FACTORS), emulated, strict=True):
        assert torch.equal(ours, theirs)


def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    model, run = fresh()
    whole = training(model, model, run, FACTORS)
    model, run = fresh()
    training(model, model, run, FACTORS[:3])
    weights, state = model.state_dict(), copy.deepcopy(run.state_dict())
    model, run = fresh()
    model.load_state_dict(weights)
    run.load_state_dict(state)
    rest = training(model, model, run, FACTORS[3:], seed=3)
    for ours, theirs in zip(rest, whole[-len(rest) :], strict=True):
        assert torch.equal(ours, theirs)


def test_a_copy_of_the_model_evaluates_with_the_same_scales() -> None:
    model, run = fresh()
    training(model, model, run, FACTORS[:2])
    twin = copy.deepcopy(model)
    training(model, model, run, FACTORS[2:4])
    twin.load_state_dict(model.state_dict())
    x = 3 * torch.randn(8, 16)
    assert torch.equal(twin.eval()(x), model.eval()(x))


def test_what_saturates_is_counted() -> None:
    model = nn.Linear(4, 2, bias=False)
    x = torch.tensor([[1.0, 0.5, -0.5, 0.2]])
    run = bitplan.attach(model, plan_of(x=LATE), example=x, stats=True)
    for factor in (1.0, 8.0):  # the first step makes room for itself, the second for 2: 8, 4 and -4 lie beyond that
        model(factor * x).sum().backward()
        run.step()
    assert run.stats()["/linear.0:fprop.x"].overflow == pytest.approx((0 + 3 / 4) / 2)


def test_micro_batches_add_up() -> None:
    model = nn.Linear(2, 1, bias=False)
    run = bitplan.attach(model, plan_of(**{"fprop.x": LATE}))
    for value in (1.0, 5.0, 2.0):
        model(torch.full((1, 2), value)).sum().backward()
    run.step()
    assert model._buffers["_bitplan_reach"].tolist() == [10.0]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("quantizer", "message"),
    [
        ({"format": "e4m3", "history": 4}, "needs scale: tensor"),
        ({"format": "e4m3", "scale": "vector", "history": 4}, "needs scale: tensor"),
        ({"format": "int8", "scale": "tensor", "range": "minmax", "history": 4}, "needs range: amax"),
        ({"format": "uint8", "scale": "tensor", "history": 4}, "needs range: amax"),
        ({"format": "e4m3", "scale": "tensor", "history": 4, "eval": "ema"}, "drop one"),
        ({"format": "e4m3", "scale": "tensor", "margin": 1}, "give history"),
        ({"format": "e4m3", "scale": "tensor", "history": 99}, "1 to 32"),
        ({"format": "e4m3", "promote": {"to": {**LATE, "format": "e4m7"}}}, "without history"),
    ],
)
def test_what_does_not_go_together_is_refused(quantizer: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        bitplan.attach(nn.Linear(2, 2), plan_of(x=quantizer))


def test_a_plan_says_it_as_it_was_written() -> None:
    plan = plan_of(**ALL)
    assert Plan.from_dict(plan.to_dict()) == plan
    assert plan.to_dict()["rules"][0]["x"] == LATE
    with bitplan.attach(nn.Linear(2, 2), plan, example=torch.randn(1, 2)) as run:
        assert any("e4m3 tensor of 2 steps margin=1" in str(row) for row in run.table())


def test_processes_tell_each_other_their_largest_magnitudes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Others(Ranks):
        def largest(self, values: torch.Tensor) -> torch.Tensor:
            return values.clamp_min(7.0)

    monkeypatch.setattr("bitplan.runtime.run_tables.Ranks.of", lambda model: Others(()))
    model = nn.Linear(2, 1, bias=False)
    run = bitplan.attach(model, plan_of(**{"fprop.x": LATE}))
    model(torch.ones(1, 2)).sum().backward()
    run.step()
    assert model._buffers["_bitplan_reach"].tolist() == [14.0]  # type: ignore[union-attr]


def test_a_checkpointed_model_is_the_same() -> None:
    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]

    result = []
    for wrap in (nn.Sequential, Checkpointed):
        torch.manual_seed(0)
        model = wrap(nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 4)))
        run = bitplan.attach(model, plan_of(**ALL))
        result.append(training(model, model, run, FACTORS[:4]))
        run.detach()
    for ours, theirs in zip(*result, strict=True):
        assert torch.equal(ours, theirs)


def test_a_history_rule_that_matches_nothing_does_not_stop_the_others() -> None:
    history = {"format": "e8m0", "scale": "tensor", "history": 1}
    rules = [
        {"match": "*", "dgrad.w": "e2m1"},
        {"match": "*", "op": "conv2d", "fprop.w": history, "strict": False},
    ]
    model, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    plan = Plan.from_dict({"version": 1, "rules": rules})
    run = bitplan.attach(model, plan, example=x, stats=True)
    model(x).sum().backward()
    with pytest.warns(BitplanWarning, match="conv2d"):
        run.step()  # until then the rule may match operations of a loss
    assert list(run.stats())
    run.detach()
