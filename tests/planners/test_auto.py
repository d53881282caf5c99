"""`bitplan.auto`: what is chosen, measured and verified, and what is said where nothing fits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import bitplan as bp
from bitplan.analysis.memory import measure_memory
from bitplan.analysis.targets import Target
from bitplan.capture.recording import record
from bitplan.errors import PlanError
from bitplan.executions.native.crossover import ProductTime
from bitplan.numerics.quantizer import make_quantizer
from bitplan.planners.assign.budget import Budget
from bitplan.planners.auto import AutoResult, Limits, LocalTrials, Problem, ProcessTrials, search
from bitplan.planners.auto.cache import TrialCache
from bitplan.planners.auto.candidates import Item, cheapest, least_damage, levels, lowered, make_candidate, make_items
from bitplan.planners.auto.damage import measure_damage
from bitplan.planners.auto.groups import SiteKey, activation_groups, product_groups, second_halves
from bitplan.planners.auto.products import TimedProducts
from bitplan.planners.auto.trials import OUT_OF_MEMORY, Failure, Outcome, Trial, Trials, failure_of
from bitplan.planners.auto.verify import LossGap


class Gated(nn.Module):
    """A gated MLP with a residual sum, as the blocks of language models have it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up, self.down = nn.Linear(width, 96), nn.Linear(width, 96), nn.Linear(96, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def problem(samples: int = 256) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), Gated(), Gated(), nn.Linear(32, 4))
    return model, (torch.randn(samples, 16), torch.randint(4, (samples,)))


def load_problem() -> Problem:
    """For trials in other processes."""
    model, batch = problem()
    return Problem(Target(model, batch, functional.cross_entropy), "sgd")


TRIALS = import_module("bitplan.planners.auto.trials")


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def reuse_trials(shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches for the same model measure its candidates once, however busy this machine is."""
    monkeypatch.setenv("BITPLAN_CACHE", str(shared_cache))
    monkeypatch.setattr(TRIALS, "WIDEST_SPREAD", 1e9)


@pytest.fixture
def cache(reuse_trials: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("BITPLAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def found(model: nn.Module, batch: Any, **limits: Any) -> AutoResult:
    return bp.auto(model, batch, functional.cross_entropy, "sgd", steps=4, seeds=2, **limits)


def test_a_budget_is_met_as_measured_again() -> None:
    model, batch = problem()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = found(model, batch, memory="75%")
    assert result.meets_limits
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    plain = measure_memory(model, batch, functional.cross_entropy, "sgd").peak
    planned = measure_memory(model, batch, functional.cross_entropy, "sgd", result.plan).peak
    assert planned <= 0.75 * plain
    (chosen,) = (row for row in result.rows if row.verdict == "chosen")
    assert chosen.name == result.chosen
    assert chosen.loss_gap is not None
    assert chosen.loss_gap.on_one_batch
    assert chosen.loss_gap.low <= chosen.loss_gap.gap <= chosen.loss_gap.high
    assert chosen.trial is not None
    assert abs(chosen.trial.peak - planned) <= 0.02 * planned
    assert abs((chosen.predicted_peak or 0) - planned) <= 0.05 * planned


def test_the_plan_says_everything_and_is_attached() -> None:
    model, batch = problem()
    result = found(model, batch, memory="75%")
    plan = bp.Plan.from_yaml(result.plan.to_yaml())
    assert plan == result.plan
    assert plan.declared_execution == bp.Packed()
    assert isinstance(plan.made_by, dict)
    assert plan.made_by["planner"] == "bitplan auto"
    plain = model(batch[0]).detach()
    with result.attach(model, example=batch[0]) as run:
        assert not torch.equal(model(batch[0]).detach(), plain)
        assert run.execution == bp.Packed()
    assert torch.equal(model(batch[0]).detach(), plain)


def test_an_impossible_budget_names_the_nearest() -> None:
    model, batch = problem()
    result = found(model, batch, memory="5%")
    assert not result.meets_limits
    assert result.chosen in result.summary
    assert "nearest" in result.summary
    peaks = [row.trial.peak for row in result.rows if row.trial]
    (chosen,) = (row for row in result.rows if row.verdict == "chosen")
    assert chosen.trial is not None
    assert chosen.trial.peak == min(peaks)


def test_nothing_is_returned_that_is_slower_and_larger_than_no_plan() -> None:
    torch.manual_seed(0)
    model = nn.Linear(512, 4)  # all of its memory is weights
    result = bp.auto(model, (torch.randn(8, 512), torch.randint(4, (8,))), functional.cross_entropy, "sgd", steps=0)
    assert result.chosen == "no plan"
    assert not result.plan.all_rules
    assert "Nothing helps" in result.summary


def test_without_limits_there_are_three_picks_and_a_table() -> None:
    model, batch = problem()
    result = found(model, batch)
    assert set(result.picks) == {"fastest", "smallest", "balanced"}
    trials = {row.name: row.trial for row in result.rows if row.trial}
    assert trials[result.picks["smallest"]].peak == min(trial.peak for trial in trials.values())
    assert trials[result.picks["fastest"]].milliseconds == min(trial.milliseconds for trial in trials.values())
    assert result.plan_of("smallest").to_dict()["rules"]
    assert max(map(len, str(result.table()).splitlines())) <= 80
    document = json.loads(json.dumps(result.to_dict()))
    assert [row["name"] for row in document["candidates"]] == [row.name for row in result.rows]
    with pytest.raises(PlanError, match="no candidate"):
        result.plan_of("largest")


def test_ctrl_c_returns_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module("bitplan.planners.auto.search"), "measure_loss_gap", interrupt)
    model, batch = problem()
    result = found(model, batch, memory="75%")
    assert result.is_interrupted
    assert result.meets_limits
    assert "not verified" in result.summary


def test_a_worse_loss_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    worse = LossGap.of([1.0, 1.0], [2.0, 2.0], 10, False)
    monkeypatch.setattr(
        import_module("bitplan.planners.auto.search"), "measure_loss_gap", lambda *args, **options: worse
    )
    model, batch = problem()
    result = found(model, batch, memory="75%")
    assert "its loss is worse" in {row.verdict for row in result.rows}
    (chosen,) = (row for row in result.rows if row.verdict == "chosen")
    assert chosen.loss_gap is None


def test_the_same_call_again_uses_what_was_measured(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    measured: list[int] = []
    measure = LocalTrials.measure_each

    def counted(self: LocalTrials, plans: Any) -> Any:
        measured.append(len(plans))
        return measure(self, plans)

    monkeypatch.setattr(LocalTrials, "measure_each", counted)
    model, batch = problem()
    for _ in range(2):
        bp.auto(model, batch, functional.cross_entropy, "sgd", steps=0)
    assert sum(measured[: len(measured) // 2]) > 0
    assert sum(measured[len(measured) // 2 :]) == 0


def test_measurements_of_other_machines_are_not_remembered(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Neither their times nor their peaks are those of this one."""
    monkeypatch.setattr(TRIALS, "WIDEST_SPREAD", float("inf"))

    class Elsewhere(LocalTrials):
        are_here = False

    torch.manual_seed(0)
    model, batch = nn.Linear(64, 4), (torch.randn(8, 64), torch.randint(4, (8,)))
    small = Problem(Target(model, batch, functional.cross_entropy), "sgd")
    result = search(small, Limits(), Elsewhere(small), steps=0)
    assert result.rows[0].trial is not None
    assert not TrialCache().trials
    search(small, Limits(), LocalTrials(small), steps=0)
    assert TrialCache().trials


def test_an_interruption_keeps_what_was_measured_of_a_group(cache: Path) -> None:
    """Candidates that compile side by side are measured one after the other, which takes minutes on a GPU."""

    class Interrupted(CountedTrials):
        def measure_each(self, plans: Any) -> Iterator[tuple[int, Outcome]]:
            yield from list(super().measure_each(plans))[: self.first]
            raise KeyboardInterrupt

        def __init__(self, first: int) -> None:
            self.first = first

    with pytest.raises(KeyboardInterrupt):
        search(load_problem(), Limits(), Interrupted(0))
    result = search(load_problem(), Limits(), Interrupted(2))
    assert result.is_interrupted
    first, _ = result.rows
    assert first.name == "no plan"
    assert all(row.trial for row in result.rows)


def test_an_interruption_before_the_first_row_is_one_though_others_are_remembered(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(TRIALS, "WIDEST_SPREAD", 0.5)

    class Noisy(CountedTrials):
        def measure_each(self, plans: Any) -> Iterator[tuple[int, Outcome]]:
            for number, outcome in super().measure_each(plans):
                assert isinstance(outcome, Trial)
                yield number, outcome if plans[number] else replace(outcome, spread=1.0)

    class Interrupted(CountedTrials):
        def measure_each(self, plans: Any) -> Iterator[tuple[int, Outcome]]:
            assert None in plans
            raise KeyboardInterrupt

    search(load_problem(), Limits(), Noisy(), steps=0)
    assert TrialCache().trials
    with pytest.raises(KeyboardInterrupt):
        search(load_problem(), Limits(), Interrupted(), steps=0)


def test_a_candidate_without_room_beside_others_is_measured_alone() -> None:
    class Crowded(ProcessTrials):
        def _measure_group(self, plans: Any) -> Iterator[Outcome]:
            for number, _ in enumerate(plans):
                yield OUT_OF_MEMORY if number and len(plans) > 1 else Trial(len(plans), 0, 1.0, 0.0, 0.0)

    crowded = Crowded(load_problem, (), 2)
    assert [number for number, _ in crowded.measure_each([None] * 3)] == [0, 2, 1]
    assert [outcome.peak for outcome in crowded.measure([None] * 3)] == [2, 1, 1]  # type: ignore[union-attr]


def test_busy_measurements_are_not_remembered(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(TRIALS, "WIDEST_SPREAD", -1.0)
    sentences: list[str] = []
    batch = torch.randn(8, 512), torch.randint(4, (8,))
    bp.auto(nn.Linear(512, 4), batch, functional.cross_entropy, "sgd", steps=0, report=sentences.append)
    assert any("busy" in sentence for sentence in sentences)
    assert not (cache / "trials.json").exists()


def test_searches_at_the_same_time_keep_each_others_measurements(cache: Path) -> None:
    first, second = TrialCache(), TrialCache()
    first.add("a", Trial(1, 2, 3.0, 0.0, 4.0))
    second.add("b", Trial(5, 6, 7.0, 0.0, 8.0))
    assert sorted(TrialCache().trials) == ["a", "b"]
    for damage in ("", "[1]", '{"a": 3}', '{"a": {"peak": 1}}'):
        (cache / "trials.json").write_text(damage)
        assert TrialCache().trials == {}


def test_trials_in_processes_have_the_peaks_of_trials_here() -> None:
    plan = bp.Plan.from_dict(
        {"version": 1, "execution": "packed", "rules": [{"match": "1", "op": "linear", "activation": "e4m3"}]}
    )
    here = LocalTrials(load_problem()).measure([None, plan])
    trials = ProcessTrials(load_problem, (), 2)
    try:
        there = trials.measure([None, plan])
        losses = trials.final_losses(plan, 3, 2)
    finally:
        trials.close()
    assert all(isinstance(trial, Trial) for trial in (*here, *there))
    assert [trial.peak for trial in here] == [trial.peak for trial in there]  # type: ignore[union-attr]
    assert losses == LocalTrials(load_problem()).final_losses(plan, 3, 2)


def test_a_candidate_that_fails_has_a_reason() -> None:
    broken = bp.Plan.from_dict({"version": 1, "rules": [{"match": "nowhere", "activation": "e4m3"}]})
    (outcome,) = LocalTrials(load_problem()).measure([broken])
    assert isinstance(outcome, Failure)
    assert "nowhere" in outcome.reason


def test_errors_are_told_with_what_caused_them() -> None:
    """Libraries that import parts of themselves when these are needed say of any error that the import failed."""

    def failure(cause: Exception, message: str = "could not import Llama") -> str:
        try:
            raise ImportError(message) from cause
        except ImportError as error:
            return str(failure_of(error))

    assert failure(RuntimeError("CUDA error: out of memory\nmore")) == "out of memory"
    assert failure(KeyError("rope")) == "ImportError: could not import Llama (KeyError: 'rope')"
    own = PlanError("the plan does not fit.")
    own.__context__, own.__suppress_context__ = RuntimeError("out of memory"), True
    assert str(failure_of(own)) == "the plan does not fit."


def test_groups_are_known_without_names() -> None:
    model, batch = problem()
    operations = record(model, batch, functional.cross_entropy)
    groups = {(group.name, group.kind) for group in activation_groups(operations, is_compiled=True)}
    assert ("*.gate/linear.0", "gate") in groups
    assert ("*.up/linear.0", "gate") in groups
    assert ("*/add.0", "residual") in groups
    assert not any(name == "3/linear.0" for name, _ in groups)  # the last product decides the loss
    products = {group.name: group for group in product_groups(operations)}
    assert products["*.gate/linear.0"].shape == (256, 32, 96)
    assert [group.name for group in products.values() if group.is_last] == ["*/linear.0"]


class CountedTrials(Trials):
    """Trials whose peak is counted from the plan: 100 bytes, less 10 for each rule, less 40 for recomputed products."""

    def measure_each(self, plans: Any) -> Iterator[tuple[int, Outcome]]:
        for number, plan in enumerate(plans):
            yield number, Trial(self.peak(plan), 0, 1.0, 0.0, 0.0)

    def peak(self, plan: bp.Plan | None) -> int:
        if plan is None:
            return 200
        execution = plan.declared_execution
        is_recomputing = isinstance(execution, bp.Native) and "products" in execution.recomputed
        return 100 - 10 * len(plan.all_rules) - 40 * is_recomputing

    def final_losses(self, plan: bp.Plan | None, steps: int, seeds: int) -> list[float]:
        return [1.0] * seeds


@pytest.mark.parametrize(("limit", "is_recomputed"), [("35", True), ("75", False)])
def test_halves_of_gates_are_recomputed_where_codes_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, limit: str, is_recomputed: bool
) -> None:
    model, batch = problem()
    operations = record(model, batch, functional.cross_entropy)
    assert second_halves(operations) == {SiteKey("1.up", "linear.0"), SiteKey("2.up", "linear.0")}
    timed = [TimedProducts(group, "fp8", ProductTime(2.0, 1.0, 0.0)) for group in product_groups(operations)]
    monkeypatch.setattr(import_module("bitplan.planners.auto.search"), "time_products", lambda *_: timed)
    task = Problem(Target(model, batch, functional.cross_entropy), compile=True)
    result = search(task, Limits(Budget.parse(f"{limit}B")), CountedTrials(), steps=0)
    assert result.meets_limits
    execution = result.plan.declared_execution
    assert isinstance(execution, bp.Native)
    assert ("products" in execution.recomputed) == is_recomputed
    assert any(row.name.endswith("recomputed") for row in result.rows) == is_recomputed
    rounded = [rule for rule in result.plan.to_dict()["rules"] if "activation" in rule]
    assert any("gate" in str(rule["match"]) for rule in rounded)
    assert any("up" in str(rule["match"]) for rule in rounded) == (not is_recomputed)


def test_kinds_that_save_little_are_no_set_of_their_own() -> None:
    def item(name: str, kind: str, saving: int, damage: float) -> Item:
        return Item(SiteKey(name, "linear.0"), kind, "e4m3", saving, damage)

    items = [item("a", "gate", 50, 9.0), item("b", "product", 3, 0.1), item("c", "other", 47, 4.0)]
    assert [(name, len(chosen)) for name, chosen in levels(items)] == [("gate", 1), ("gate + product + other", 3)]
    items[1] = item("b", "product", 30, 0.1)
    assert [name for name, _ in levels(items)] == ["gate", "gate + product", "gate + product + other"]


def test_damage_is_the_squared_change_of_the_loss() -> None:
    """For a loss that is linear in an activation, the score is exactly the sum of (error x gradient)^2."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    torch.manual_seed(0)
    model, x, weights = Model(), torch.randn(4, 8), torch.randn(4, 8)
    quantizers = {"e4m3": make_quantizer("e4m3"), "e2m1": make_quantizer("e2m1")}
    site = SiteKey("fc", "linear.0")
    damage = measure_damage(Target(model, x, lambda y: (y * weights).sum()), frozenset({site}), quantizers)[site]
    y = model.fc(x).detach()
    for name, quantizer in quantizers.items():
        expected = float(((quantizer.quantize(y) - y) * weights).square().sum())
        assert damage[name] == pytest.approx(expected, rel=1e-5)
    assert 0 < damage["e4m3"] < damage["e2m1"]


def test_fewer_bits_only_where_eight_are_too_many() -> None:
    sites = [SiteKey(str(number), "linear.0") for number in range(3)]
    items = [Item(site, "gate", "e4m3", 30, 1.0 + number, 10) for number, site in enumerate(sites)]
    damage = {site: {"e3m2": 10.0 * (number + 1)} for number, site in enumerate(sites)}
    lower = lowered(items, damage)
    assert [item.saving for item in lower] == [32, 32, 32]
    assert cheapest(items, lower, 60) == least_damage(items, 60) == items[:2]
    chosen = cheapest(items, lower, 91)
    assert chosen is not None
    assert [item.quantizer for item in chosen] == ["e3m2", "e4m3", "e4m3"]
    assert cheapest(items, lower, 97) is None
    assert cheapest(items, [], 91) is None


def test_a_scale_is_used_where_values_leave_the_range() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 4)), torch.randn(32, 8)
    with torch.no_grad():
        model[0].weight.mul_(1e4)  # type: ignore[operator]
    target = Target(model, x)
    groups = activation_groups(record(model, x), is_compiled=False)
    sites = [site for group in groups for site, _ in group.bytes_by_site]
    quantizers = {name: make_quantizer("e4m3", **options) for name, options in SCALES.items()}
    quantizers["e3m2"] = make_quantizer("e3m2")
    items = make_items(groups, measure_damage(target, frozenset(sites), quantizers))
    assert {item.quantizer for item in items if item.site.module == "0"} == {"scaled"}
    plan = make_candidate("scaled", "packed", items, all_sites=sites).plan
    assert plan is not None
    with bp.attach(model, plan, example=x):
        assert model(x).isfinite().all()


SCALES: dict[str, dict[str, Any]] = {"e4m3": {}, "scaled": {"scale": "tensor", "power_of_two": True}}


@pytest.mark.parametrize(
    ("options", "token"),
    [
        ({"memory": "lots"}, "lots"),
        ({"slowdown": 0}, "slowdown"),
        ({"loss_gap": -1.0}, "loss_gap"),
        ({"seeds": 0}, "seed"),
        ({"steps": -1}, "steps"),
    ],
)
def test_wrong_limits_are_one_sentence(options: dict[str, Any], token: str) -> None:
    model, batch = problem(8)
    with pytest.raises(bp.BitplanError, match=token) as error:
        bp.auto(model, batch, functional.cross_entropy, **options)
    assert "\n" not in str(error.value)


def test_a_model_without_weights_values_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(PlanError, match="real weights"):
        bp.auto(model, torch.empty(2, 4, device="meta"))
