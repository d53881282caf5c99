"""Plans that change over time, at work: the numbers of every step are those of a plan that stands still there."""

from __future__ import annotations

import copy
import gc
import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from graph_backend import compile_without_inductor
from torch import Tensor, nn
from torch._dynamo.utils import counters

from bitplan.analysis.cost import Cost, estimate_cost
from bitplan.errors import BitplanWarning, CostError, PlanError, ScheduleError
from bitplan.plans import Plan
from bitplan.plans.schedules import TEN, Deficit, Function, Position, RunPoint, schedule
from bitplan.runtime.attach import Attachment, attach
from bitplan.runtime.clock import ScheduleClock

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
STEPS = 12

BITS = Plan.from_yaml("""
version: 1
schedules:
  up: {name: LR, low: 3, high: 8, cycles: 2}
  down: {name: decay, low: 5, high: 12}
quantizers:
  w: {format: int, bits: up, scale: channel, range: minmax}
rules:
- {match: "*", op: linear, w: w, x: {format: int, bits: up, scale: tensor, range: minmax, eval: ema}}
- {match: "0", dy: {format: int8, scale: tensor, range: minmax, rounding: stochastic}}
- match: "2"
  grad_weight: {format: float, exponent_bits: 4, bits: down}
  activation: {format: int, bits: down, scale: tensor}
""")
SWITCH = Plan.from_yaml("""
version: 1
schedules: {up: {name: LR, low: 4, high: 6, cycles: 1}}
quantizers:
  f8:
    until: 50%
    use: {format: e4m3, scale: tensor, rounding: stochastic}
    then: {format: int, bits: up, scale: channel}
  g8: {until: 9, use: keep, then: e5m2}
rules:
- {match: "*", op: linear, fprop: f8, dgrad.dy: g8}
- {match: "1", activation: {until: 50%, use: {format: int8, scale: tensor, eval: ema}, then: bf16}}
""")
CHOOSING = Plan.from_yaml("""
version: 1
schedules: {turns: {name: LT, low: 4, high: 8, cycles: 4}}
rules:
- {match: "*", weight: {by: turns, choose: {4: mxfp4, 6: {format: int, bits: turns, scale: tensor}}}}
""")
PLANS = {"bits": BITS, "switch": SWITCH, "choosing": CHOOSING}


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


def step_of(model: nn.Module, called: Any = None) -> list[Tensor]:
    model.zero_grad()
    y = (model if called is None else called)(X)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters())]  # type: ignore[union-attr]


def standing_still(plan: Plan, step: int) -> list[Tensor]:
    """The same step under a plan whose quantizers are constants."""
    model = small()
    still = plan.at(Position(step, STEPS), fixed=True)
    if all(still.decide(path, "linear").changes_nothing for path in ("0", "2")):
        return step_of(model)
    assert not still.moves
    with attach(model, still) as run:
        run._step = step  # random bits are those of the step
        run._write_tables()
        return step_of(model)


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@pytest.mark.parametrize("execution", ["emulate", "packed"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_step_has_the_numbers_of_its_own_plan(plan: Plan, execution: str) -> None:
    model = small()
    seen = []
    with attach(model, plan, steps=STEPS, example=X, execution=execution) as run:
        for step in range(STEPS):
            seen.append(step_of(model))
            assert same(seen[-1], standing_still(plan, step)), step
            run.step()
    assert len({tuple(item[0].flatten().tolist()) for item in seen}) > 2
    assert same(step_of(model), step_of(small()))


@pytest.mark.parametrize(("name", "execution"), [("bits", "emulate"), ("switch", "packed")])
def test_compiled_steps_have_these_numbers_too(name: str, execution: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    plan, model = PLANS[name], small()
    eager = small()
    with (
        attach(model, plan, steps=STEPS, example=X, execution=execution) as run,
        attach(eager, plan, steps=STEPS, example=X) as other,
    ):
        called = compile_without_inductor(run, model, monkeypatch)
        for _ in range(STEPS):
            for actual, expected in zip(step_of(model, called), step_of(eager), strict=True):
                torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
            run.step()
            other.step()
    torch._dynamo.reset()


def test_a_packed_run_may_have_a_graph_for_every_width() -> None:
    config = torch._dynamo.config
    before = config.recompile_limit
    widths = zip(*(item.table(STEPS) for item in BITS.followed.values()), strict=True)
    phases = len(set(widths))
    assert phases > 8
    with attach(small(), BITS, steps=STEPS, example=X):
        assert config.recompile_limit == before  # bits are no matter of graphs here
    with attach(small(), BITS, steps=STEPS, example=X, execution="packed"):
        assert config.recompile_limit == 2 * phases
    assert config.recompile_limit == before


def test_bits_move_without_a_recompilation_and_a_switch_with_one() -> None:
    torch._dynamo.reset()
    for plan, compilations in ((BITS, 0), (SWITCH, 2)):
        model = small()
        with attach(model, plan, steps=STEPS, example=X) as run:
            called = torch.compile(model, backend="aot_eager", fullgraph=True)
            step_of(model, called)
            counters.clear()
            for step in range(STEPS):
                result = step_of(model, called)
                assert same(result, standing_still(plan, step))
                run.step()
            assert counters["stats"]["unique_graphs"] == compilations  # at 50 %, and at step 9
    torch._dynamo.reset()


def test_compiled_code_is_used_again_when_a_schedule_comes_back_to_a_quantizer() -> None:
    torch._dynamo.reset()
    model = small()
    with attach(model, CHOOSING, steps=STEPS, example=X) as run:
        called = torch.compile(model, backend="aot_eager", fullgraph=True)
        kinds = []
        counters.clear()
        for step in range(STEPS):
            assert same(step_of(model, called), standing_still(CHOOSING, step))
            kinds.append(run._installation.phase)
            run.step()
        assert len(kinds) - 1 > sum(a != b for a, b in pairwise(kinds)) >= 3
        assert counters["stats"]["unique_graphs"] == 2
    torch._dynamo.reset()


def test_a_plan_moves_though_nobody_holds_the_attachment() -> None:
    plan = Plan.from_dict(
        {"version": 1, "rules": [{"match": "*", "w": {"until": 2, "use": "e2m1", "then": "keep"}}]},
    )
    model = nn.Linear(6, 3)
    expected = model(X)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    attach(model, plan, steps=4, optimizer=optimizer)
    gc.collect()
    outputs = []
    for _ in range(4):
        outputs.append(model(X))
        outputs[-1].sum().backward()
        optimizer.step()
    assert [torch.equal(output, expected) for output in outputs] == [False, False, True, True]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_costs_add_up_over_all_periods(plan: Plan) -> None:
    model = small()
    with attach(model, plan, steps=STEPS, example=X) as run:
        for _ in range(STEPS):
            step_of(model)
            run.step()
        whole = run.cost()
    steps = (estimate_cost(small(), plan.at(Position(step, STEPS), fixed=True), X) for step in range(STEPS))
    assert whole == sum(steps, Cost())
    assert estimate_cost(small(), plan, X, steps=STEPS) == whole
    assert sum(plan.periods(STEPS).values()) == STEPS
    with pytest.raises(CostError, match="number of steps"):
        estimate_cost(small(), plan, X)


def test_the_cost_of_a_cyclic_run_is_that_of_its_schedule() -> None:
    text = """
version: 1
schedules: {cpt: {name: CR, low: 3, high: 8, cycles: 2}}
rules: [{match: "*", w: {format: int, bits: cpt, scale: tensor}, x: {format: int, bits: cpt, scale: tensor}, dy: int8}]
"""
    model = nn.Linear(6, 6)
    with attach(model, Plan.from_yaml(text), steps=50, example=X) as run:
        for _ in range(50):
            step_of(model)
            run.step()
        static = estimate_cost(nn.Linear(6, 6), "int8-minmax", X).bit_operations * 50
        assert run.cost().bit_operations / static == pytest.approx(
            schedule("CR", low=3, high=8, cycles=2).summary(50).relative_cost
        )


@pytest.mark.parametrize("execution", ["emulate", "packed"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("stop", [1, 7, 10, STEPS])
def test_a_resumed_run_goes_on_bit_for_bit(plan: Plan, stop: int, execution: str) -> None:
    def go(run: Attachment, model: nn.Module, steps: int) -> list[list[Tensor]]:
        result = []
        for _ in range(steps):
            result.append(step_of(model))
            run.step()
        return result

    model = small()
    with attach(model, plan, steps=STEPS, example=X, execution=execution, seed=3) as run:
        first = go(run, model, stop)[0]
        state = copy.deepcopy(run.state_dict())
        rest = go(run, model, STEPS - stop)
        rest.append([model.eval()(X).detach()])
        price, last = run.cost(), run.state_dict()
    again = small()
    with attach(again, plan, steps=STEPS, example=X, execution=execution) as run:
        run.load_state_dict(state)
        resumed = go(run, again, STEPS - stop)
        resumed.append([again.eval()(X).detach()])
        assert all(same(*pair) for pair in zip(rest, resumed, strict=True))
        assert run.cost() == price
        assert run.state_dict()["formats"] == last["formats"]
        run.load_state_dict({**run.state_dict(), "step": 0})  # and from the beginning
        again.train()
        assert same(go(run, again, 1)[0], first)


def test_a_state_of_a_run_of_another_length_is_refused() -> None:
    with attach(small(), BITS, steps=STEPS, example=X) as run:
        state = run.state_dict()
    with (
        attach(small(), BITS, steps=STEPS + 1, example=X) as run,
        pytest.raises(PlanError, match="attach with the same steps="),
    ):
        run.load_state_dict(state)


def test_progress_in_place_of_steps() -> None:
    model, counted = small(), small()
    with (
        attach(model, BITS, steps="progress", example=X) as run,
        attach(counted, BITS, steps=STEPS, example=X) as other,
    ):
        for step in range(STEPS):
            run.progress(step / STEPS)
            assert same(step_of(model), step_of(counted)) or step == STEPS - 1
            run.step()
            other.step()
        run.progress(1.0)
        assert same([model(X)], [counted(X)])
        state = run.state_dict()
        with pytest.raises(ScheduleError, match="0 to 1"):
            run.progress(1.5)
    with attach(model, BITS, steps="progress", example=X) as run:
        run.load_state_dict(state)
        with attach(counted, BITS, steps=STEPS, example=X) as other:
            other.load_state_dict({**state, "total": STEPS})
            assert same([model(X)], [counted(X)])


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_missing_total_is_one_sentence(plan: Plan) -> None:
    model = small()
    with pytest.raises(PlanError, match=r"changes over time .*: give attach\(\) steps=.*run\.progress"):
        attach(model, plan, example=X)
    assert not any("_bitplan" in vars(module) for module in model.modules())


def test_other_mistakes_are_sentences() -> None:
    with pytest.raises(PlanError, match="names step 9, and this run counts no steps"):
        attach(small(), SWITCH, steps="progress")
    with pytest.raises(PlanError, match="at least 1"):
        attach(small(), BITS, steps=0)
    with pytest.raises(PlanError, match='"progress" or "later"'):
        attach(small(), BITS, steps="all")  # type: ignore[arg-type]
    with attach(small(), BITS, steps=STEPS, example=X) as run:
        with pytest.raises(PlanError, match="counts its steps itself"):
            run.progress(0.5)
        with pytest.raises(PlanError, match="follows the schedule LR 3-8 x2"):
            run.set_format("w", "int4")


def test_a_run_that_goes_on_too_long_stays_where_it_ended_and_says_so() -> None:
    model = small()
    with attach(model, BITS, steps=3, example=X) as run:
        for _ in range(3):
            step_of(model)
            run.step()
        last = [row.format.name for tables in run._all_tables.per_module for row in tables.formats]
        run.step()
        with pytest.warns(BitplanWarning, match="goes on after its 3 steps"):
            run.step()
        assert [row.format.name for tables in run._all_tables.per_module for row in tables.formats] == last
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run.step()


@pytest.mark.parametrize("execution", ["emulate", "packed"])
def test_evaluation_at_the_bits_of_the_moment_or_at_the_top(execution: str) -> None:
    def plan(rule: str, bits: str = "s") -> Plan:
        return Plan.from_yaml(
            "version: 1\nschedules: {s: {name: growth, low: 3, high: 8}}\nrules:\n"
            f"- {{match: '*', op: linear, w: {{format: int, bits: {bits}, scale: channel, eval: {rule}}}}}"
        )

    def evaluated(plan: Plan) -> Tensor:
        model = small()
        with attach(model, plan, steps=STEPS, example=X, execution=execution) as run:
            step_of(model)
            run.step()
            trained = model(X).detach()
            still = small()
            with attach(still, plan_of_bits(run)):
                assert torch.equal(trained, still(X))  # training stays at the bits of the moment
            return model.eval()(X).detach()

    def plan_of_bits(run: Attachment) -> Plan:
        return run.plan.at(Position(1, STEPS), fixed=True)

    def constant(bits: int) -> Tensor:
        model = small()
        with attach(model, plan("same", str(bits))):
            return model(X).detach()

    assert torch.equal(evaluated(plan("top")), constant(8))
    assert torch.equal(evaluated(plan("same")), constant(3))
    assert torch.equal(evaluated(plan("off")), small()(X))
    assert not torch.equal(constant(3), constant(8))


def test_evaluation_at_the_top_compiled() -> None:
    torch._dynamo.reset()
    text = "version: 1\nschedules: {s: {name: growth, low: 3, high: 8}}\nrules:\n"
    plan = Plan.from_yaml(text + "- {match: '*', op: linear, w: {format: int, bits: s, scale: channel, eval: top}}")
    top = Plan.from_yaml(text + "- {match: '*', op: linear, w: {format: int8, scale: channel}}")
    model, still = small().eval(), small().eval()
    with attach(model, plan, steps=STEPS, example=X), attach(still, top), torch.no_grad():
        called = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert torch.equal(called(X), still(X))
    torch._dynamo.reset()


def test_copies_of_the_model_follow() -> None:
    for plan in PLANS.values():
        model = small()
        with attach(model, plan, steps=STEPS, example=X) as run:
            twin = copy.deepcopy(model)
            for _ in range(STEPS):
                assert torch.equal(model(X), twin(X))
                step_of(model)
                run.step()


def test_tables_tell_the_whole_story() -> None:
    with attach(small(), SWITCH, steps=STEPS, example=X) as run:
        rows = {row.site.name: row.words for row in run.table()}
    assert rows["0/linear.0:fprop.x"] == "e4m3 tensor stochastic until 50%, then int LR 4-6 x1 channel"
    assert rows["0/linear.0:dgrad.dy"] == "left alone until step 9, then e5m2"


def test_a_loss_that_is_brought_in_follows() -> None:
    plan = Plan.from_yaml(
        "version: 1\nschedules: {s: {name: growth, low: 2, high: 8}}\nrules:\n"
        "- {match: loss, activation: {format: int, bits: s, scale: tensor, range: minmax}}"
    )
    model = small()
    with attach(model, plan, steps=4) as run:
        loss = run.loss(lambda y: (y * 0.37).abs().sum())
        result = []
        for _ in range(4):
            result.append(loss(model(X)).item())
            run.step()
    assert len(set(result)) > 2


def test_plans_that_differ_in_their_schedules_share_one_graph() -> None:
    torch._dynamo.reset()
    counters.clear()
    outputs = []
    for name in ("CR", "RR", "static"):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(4, 8)
        bits = {"bits": 3} if name == "static" else {"low": 3, "high": 8}
        moved = {"format": "int", "bits": "cpt", "scale": "tensor"}
        rule = {"match": "*", "op": "linear", "x": moved, "w": moved}
        plan = Plan.from_dict({"version": 1, "schedules": {"cpt": {"name": name, **bits}}, "rules": [rule]})
        with attach(model, plan, steps=16, example=x) as run:
            called = torch.compile(model, fullgraph=True, backend="aot_eager")
            for _ in range(15):
                called(x).sum().backward()
                run.step()
            outputs.append(called(x).detach())
            assert torch.equal(outputs[-1], model(x))
    assert counters["stats"]["unique_graphs"] == 1
    assert not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("total", [1, 7, 256, 700])
@pytest.mark.parametrize("name", [*TEN, "deficit"])
def test_bits_are_those_of_the_schedule_at_every_step_in_any_order(name: str, total: int) -> None:
    window = Deficit(3, 8, RunPoint.of("25%"), RunPoint.of("50%"))
    moving = window if name == "deficit" else schedule(name, low=3, high=8)
    clock = ScheduleClock(BITS, total, fixed=False)
    for step in (*range(total), total - 1, 0, total // 2, total, total + 300):
        clock.position = Position(step, total)
        assert clock.bits_of(moving) == moving.bits(step, total)


def test_a_function_is_asked_when_its_step_has_come() -> None:
    requests: list[int] = []
    own = Function(lambda step, total: requests.append(step) or 4, 3, 8)  # type: ignore[func-returns-value]
    clock = ScheduleClock(BITS, 9, fixed=False)
    for step in range(3):
        clock.position = Position(step, 9)
        assert clock.bits_of(own) == 4
    assert requests == [0, 1, 2]
