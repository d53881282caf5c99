"""The number of steps given later, scalars of a run, and the loggers that take them."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bitplan as bp
from bitplan.errors import PlanError
from bitplan.runtime.statistics import COLUMNS

CYCLE: dict[str, Any] = {
    "version": 1,
    "schedules": {"cycle": {"name": "steps", "bits": [4, 8], "at": [3]}},
    "rules": [{"match": "*", "op": "linear", "w": {"format": "int", "bits": "cycle", "scale": "tensor"}}],
}
SHARES: dict[str, Any] = {**CYCLE, "schedules": {"cycle": {"name": "steps", "bits": [4, 8], "at": ["50%"]}}}


def make() -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(8, 16)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, steps: int) -> list[str]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    return losses


# --- The number of steps given later


def test_a_total_that_is_given_later_is_that_of_attach() -> None:
    losses = []
    for later in (False, True):
        model, optimizer, x = make()
        run = bp.attach(model, SHARES, optimizer=optimizer, steps="later" if later else 6, example=x)
        if later:
            run.set_total_steps(6)
            run.set_total_steps(6)  # a trainer may say so twice
        losses.append(train(model, optimizer, x, 6))
        assert run.scalars()["bitplan/bits/cycle"] == 8
        run.detach()
    assert losses[0] == losses[1]
    model, optimizer, x = make()
    with bp.attach(model, SHARES, optimizer=optimizer, steps=12, example=x):
        assert train(model, optimizer, x, 6) != losses[0]  # the total matters


def test_a_plan_that_moves_takes_no_step_before_its_total_is_known() -> None:
    model, optimizer, x = make()
    with bp.attach(model, SHARES, steps="later", example=x) as run:
        before = copy.deepcopy(model.state_dict())
        model(x).sum().backward()
        with pytest.raises(PlanError, match="set_total_steps"):
            optimizer.step()
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        with pytest.raises(PlanError, match="set_total_steps"):
            run.step()


def test_a_plan_that_does_not_move_needs_no_total() -> None:
    model, optimizer, x = make()
    with bp.attach(model, "fp8-linear", optimizer=optimizer, steps="later"):
        train(model, optimizer, x, 2)


@pytest.mark.parametrize("steps", [0, -1, True, 2.5, "progress"])
def test_a_total_is_a_number(steps: Any) -> None:
    model, _, x = make()
    with bp.attach(model, SHARES, steps="later", example=x) as run, pytest.raises(PlanError, match="at least 1"):
        run.set_total_steps(steps)


def test_a_total_that_is_known_cannot_be_changed() -> None:
    model, _, x = make()
    with bp.attach(model, SHARES, steps=6, example=x) as run, pytest.raises(PlanError, match="steps=6"):
        run.set_total_steps(7)


def test_a_run_may_start_in_the_middle() -> None:
    """Random bits and schedules are those of the step, as in a run that was resumed."""
    plan = {**SHARES, "rules": [*SHARES["rules"], {"match": "0", "w": {"format": "int4", "rounding": "stochastic"}}]}
    model, optimizer, x = make()
    with bp.attach(model, plan, optimizer=optimizer, steps=6, example=x) as run:
        train(model, optimizer, x, 4)
        state, weights = run.state_dict(), copy.deepcopy(model.state_dict())
        expected = model(x)
    fresh, _, _ = make()
    fresh.load_state_dict(weights)
    with bp.attach(fresh, plan, steps="later", example=x) as run:
        run.set_total_steps(6)
        assert not torch.equal(fresh(x), expected)
        run.start_at(4)
        assert torch.equal(fresh(x), expected)
        assert run.state_dict()["step"] == state["step"]
        with pytest.raises(PlanError, match="-1"):
            run.start_at(-1)


# --- Scalars


def test_bits_and_costs_are_those_of_the_formula() -> None:
    model, optimizer, x = make()
    with bp.attach(model, "fp8-linear", optimizer=optimizer, example=x) as run:
        assert run.scalars()["bitplan/gbitops"] == 0
        train(model, optimizer, x, 3)
        scalars = run.scalars()
    macs = 8 * 16 * (16 + 4)
    assert scalars["bitplan/step"] == 3
    assert scalars["bitplan/bits"] == 8
    assert scalars["bitplan/cost"] == 64 / 1024
    assert scalars["bitplan/gbitops"] == pytest.approx(3 * 3 * macs * 64 / 1e9)
    assert all(isinstance(value, float) and math.isfinite(value) for value in scalars.values())
    assert not {"bitplan/overflow", "bitplan/amax_max", "bitplan/promotions"} & set(scalars)


def test_bits_follow_a_schedule() -> None:
    model, optimizer, x = make()
    plan = {
        **CYCLE,
        "rules": [
            {
                "match": "*",
                "op": "linear",
                **{key: {"format": "int", "bits": "cycle", "scale": "tensor"} for key in ("x", "w", "dy")},
            }
        ],
    }
    with bp.attach(model, plan, optimizer=optimizer, steps=6, example=x) as run:
        bits = []
        run.log_to(lambda scalars, step: bits.append((step, scalars["bitplan/bits"], scalars["bitplan/bits/cycle"])))
        train(model, optimizer, x, 5)
    assert bits == [(1, 4, 4), (2, 4, 4), (3, 4, 8), (4, 8, 8), (5, 8, 8)]  # of the last step, and of the next


def test_statistics_and_promotions_are_those_of_the_run() -> None:
    plan = {
        "version": 1,
        "rules": [
            {
                "match": "*",
                "op": "linear",
                "x": {"format": "e2m1", "promote": {"to": "bf16", "overflow": 0.001}},
            }
        ],
    }
    model, optimizer, x = make()
    with bp.attach(model, plan, optimizer=optimizer, example=50 * x, stats=True) as run:
        train(model, optimizer, 50 * x, 2)
        scalars, stats, promotions = run.scalars(), list(run.stats().values()), run.promotions()
    assert scalars["bitplan/promotions"] == len(promotions) > 0
    assert scalars["bitplan/overflow"] == pytest.approx(sum(s.overflow for s in stats) / len(stats))
    assert scalars["bitplan/overflow_max"] == max(s.overflow for s in stats) > 0
    assert scalars["bitplan/underflow_max"] == max(s.underflow for s in stats)
    assert scalars["bitplan/amax_max"] == max(s.amax for s in stats)
    assert scalars["bitplan/amax_min"] == min(s.amax for s in stats)


def test_delayed_scales_have_the_amax_of_the_last_step() -> None:
    plan = {"version": 1, "rules": [{"match": "0", "x": {"format": "e4m3", "scale": "tensor", "history": 4}}]}
    model, optimizer, x = make()
    with bp.attach(model, plan, optimizer=optimizer, example=x) as run:
        train(model, optimizer, x, 1)
        train(model, optimizer, x / 2, 1)
        scalars = run.scalars()
    assert scalars["bitplan/amax_max"] == scalars["bitplan/amax_min"] == (x / 2).abs().max()


def test_without_known_operations_there_are_no_costs_and_no_second_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, x = make()
    attempts = []

    def fail(*_: Any, **__: Any) -> Any:
        attempts.append(1)
        raise RuntimeError("no fake tensors")

    monkeypatch.setattr("bitplan.runtime.cost_tracker.record", fail)
    with bp.attach(model, "fp8-linear", optimizer=optimizer) as run:
        assert set(run.scalars()) == {"bitplan/step"}
        train(model, optimizer, x, 2)
        assert "bitplan/cost" not in run.scalars()
        assert set(run.scalars()) == {"bitplan/step"}
    assert attempts == [1]


# --- Loggers


class Written:
    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []


class TensorBoard(Written):
    """As SummaryWriter has it."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None, walltime: Any = None) -> None:
        assert global_step is not None
        if not self.lines or self.lines[-1][0] != global_step:
            self.lines.append((global_step, {}))
        self.lines[-1][1][tag] = scalar_value


class WeightsAndBiases(Written):
    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        assert step is not None
        self.lines.append((step, data))


class MLflow(Written):
    def log_metrics(self, metrics: dict[str, float], step: int | None = None, synchronous: bool | None = None) -> None:
        assert step is not None
        self.lines.append((step, metrics))


class Function(Written):
    def __call__(self, scalars: dict[str, float], step: int) -> None:
        self.lines.append((step, scalars))


@pytest.mark.parametrize("kind", [TensorBoard, WeightsAndBiases, MLflow, Function])
def test_loggers_of_all_kinds_get_every_nth_step(kind: type[Written]) -> None:
    model, optimizer, x = make()
    logger = kind()
    with bp.attach(model, "fp8-linear", optimizer=optimizer, example=x) as run:
        run.log_to(logger, every=2)
        train(model, optimizer, x, 5)
    assert [step for step, _ in logger.lines] == [2, 4]
    assert [line["bitplan/bits"] for _, line in logger.lines] == [8, 8]
    assert all(line["bitplan/seconds_per_step"] > 0 for _, line in logger.lines)


def test_a_step_that_is_not_logged_reads_nothing_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, x = make()
    reads = []
    tolist = Tensor.tolist

    def counted(tensor: Tensor) -> Any:
        if tensor.dim() == 2 and tensor.shape[1] == COLUMNS:
            reads.append(1)
        return tolist(tensor)

    monkeypatch.setattr(Tensor, "tolist", counted)
    with bp.attach(model, "fp8-linear", optimizer=optimizer, example=x, stats=True) as run:
        run.log_to(lambda scalars, step: None, every=3)
        train(model, optimizer, x, 2)
        assert reads == []
        train(model, optimizer, x, 1)
        assert reads == [1]


@pytest.mark.parametrize("logger", [logging.getLogger("bitplan"), 3, None, object()])
def test_what_takes_no_scalars_is_refused(logger: Any) -> None:
    model, _, _ = make()
    with bp.attach(model, "fp8-linear") as run, pytest.raises(PlanError, match="add_scalar"):
        run.log_to(logger)


@pytest.mark.parametrize("every", [0, -1, 2.5, True])
def test_the_interval_is_a_number_of_steps(every: Any) -> None:
    model, _, _ = make()
    with bp.attach(model, "fp8-linear") as run, pytest.raises(PlanError, match="every"):
        run.log_to(print, every=every)


# --- Compiling in place, and checking again


@pytest.mark.usefixtures("without_inductor")
def test_a_model_that_is_compiled_in_place_stays_the_same_object_and_copies_run_their_own_weights() -> None:
    model, optimizer, x = make()
    run = bp.attach(model, "fp8-linear", optimizer=optimizer, example=x, execution="packed")
    expected = model(x)
    torch._dynamo.utils.counters.clear()
    assert run.compile(in_place=True) is model
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert twin(x).abs().max() == 0
    run.detach()
    assert model._compiled_call_impl is None
    assert type(model) is nn.Sequential


def test_rules_are_checked_again_on_what_really_runs() -> None:
    """A forward that was exchanged after the plan was attached may not run what the example did."""
    plan = {"version": 1, "rules": [{"match": "2", "w": "int4"}]}
    model, optimizer, x = make()
    with bp.attach(model, plan, optimizer=optimizer, example=x) as run:
        train(model, optimizer, x, 1)
        run.check_again()
        train(model, optimizer, x, 1)
        first = model[0]
        model.forward = lambda x: first(x)  # type: ignore[method-assign]
        run.check_again()
        with pytest.raises(PlanError, match="2"):
            train(model, optimizer, x, 1)
