"""Estimate on fake tensors beside what the allocator's events say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import bitplan
from bitplan.analysis.memory import Memory, estimate_memory, measure_memory
from bitplan.analysis.memory.fakes import Fakes, copy_without_plan
from bitplan.analysis.targets import Target
from bitplan.capture.scopes import is_planned
from bitplan.errors import MemoryEstimateError, PlanError
from bitplan.numerics import chunks
from bitplan.plans import Plan

MakeTarget = Callable[[str], Target]
KINDS = ("resnet8", "mobilenet-v2", "gpt", "gpt2", "bert", "lstm", "gcn")
#: Every class that lives when a phase ends is found by walking the same step; only what kernels take is estimated.
KEPT, PEAK = 0.02, 0.10
#: Attention with dropout keeps the state of the random generator, 5 KB a layer, which no operation makes.
STATES = 2**14


def both(target: Target, optimizer: str, plan: Plan | str | None, execution: str) -> tuple[Memory, Memory]:
    arguments = (target.model, target.batch, target.loss, optimizer, plan, execution)
    return estimate_memory(*arguments), measure_memory(*arguments, steps=2)


def assert_near(estimated: Memory, measured: Memory) -> None:
    assert estimated.weights == measured.weights
    assert estimated.gradients == measured.gradients
    assert estimated.optimizer == measured.optimizer
    assert estimated.activations == pytest.approx(measured.activations, rel=KEPT, abs=STATES)
    assert estimated.peak == pytest.approx(measured.peak, rel=PEAK)


@pytest.mark.parametrize("name", KINDS)
def test_a_plain_step_is_foreseen(make_target: MakeTarget, name: str) -> None:
    assert_near(*both(make_target(name), "adamw", None, "emulate"))


@pytest.mark.parametrize("name", KINDS)
def test_a_packed_step_is_foreseen(make_target: MakeTarget, eight_bits: Plan, name: str) -> None:
    assert_near(*both(make_target(name), "sgd", eight_bits, "packed"))


@pytest.mark.parametrize("plan", ["int4-all", "mxfp8-linear"])
def test_packed_scales_and_blocks_are_foreseen(make_target: MakeTarget, plan: str) -> None:
    assert_near(*both(make_target("gpt"), "none", plan, "packed"))


@pytest.mark.parametrize("name", ["resnet8", "gpt"])
def test_a_packed_step_that_may_promote_is_foreseen(make_target: MakeTarget, name: str) -> None:
    target = make_target(name)
    plan = bitplan.assign(target.model, target.batch, target.loss, ratio=1.0)  # low are the loss's tensors, too
    assert any(spec.promote for spec in plan.all_quantizers.values())
    assert_near(*both(target, "sgd", plan, "packed"))


def test_an_emulated_step_is_foreseen_and_saves_nothing(make_target: MakeTarget, eight_bits: Plan) -> None:
    target = make_target("resnet8")
    estimated, measured = both(target, "sgd", eight_bits, "emulate")
    assert_near(estimated, measured)
    plain = estimate_memory(target.model, target.batch, target.loss)
    assert estimated.activations >= plain.activations


def test_eight_bits_keep_a_quarter_of_32(make_target: MakeTarget, eight_bits: Plan) -> None:
    target = make_target("resnet8")
    plain = estimate_memory(target.model, target.batch, target.loss)
    packed = estimate_memory(target.model, target.batch, target.loss, plan=eight_bits, execution="packed")
    assert 3.5 < plain.activations / packed.activations < 4.5


def test_autocast_is_foreseen(make_target: MakeTarget) -> None:
    target = make_target("gpt")
    arguments = (target.model, target.batch, target.loss)
    halved = estimate_memory(*arguments, autocast=torch.bfloat16)
    assert_near(halved, measure_memory(*arguments, autocast=torch.bfloat16))
    assert halved.activations < 0.85 * estimate_memory(*arguments).activations


def test_the_bytes_of_a_perceptron_are_those_counted_by_hand(make_target: MakeTarget) -> None:
    target = make_target("perceptron")
    held = estimate_memory(target.model, target.batch, target.loss, "sgd")
    parameters = 4 * (64 * 128 + 128 + 128 * 10 + 10)
    assert (held.weights, held.gradients, held.optimizer) == (parameters, parameters, parameters)
    # ReLU's result, the logarithm of softmax, the loss's weight and the loss; the first input is the batch's.
    assert held.activations == 4 * (32 * 128 + 32 * 10 + 1 + 1)


# --- without running ---


def test_a_model_that_no_machine_holds_can_be_asked() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2**20, 2**20, bias=False), nn.ReLU())
        batch = torch.empty(2**10, 2**20)
    held = estimate_memory(model, batch, lambda y: y.sum(), "adamw")
    assert held.weights == held.gradients == 4 * 2**40
    assert held.optimizer == 2 * 4 * 2**40 + 4  # two moments, and a count of steps
    assert held.activations == 4 * 2**30 + 4
    assert next(model.parameters()).is_meta


def test_the_model_is_left_as_it_is(make_target: MakeTarget, eight_bits: Plan) -> None:
    target = make_target("resnet8")
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    draws = torch.get_rng_state()
    estimate_memory(target.model, target.batch, target.loss, plan=eight_bits, execution="packed")
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.model.state_dict().items())
    assert all(parameter.grad is None for parameter in target.model.parameters())
    assert not any(is_planned(module) for module in target.model.modules())
    assert torch.equal(draws, torch.get_rng_state())


def test_shared_weights_and_shared_inputs_are_held_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    assert estimate_memory(model, torch.randn(4, 8)).weights == 4 * 64
    x = torch.randn(1000, 8)

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return (a.sum() + b.sum()) * self.scale

    once, twice = (estimate_memory(Sum(), arguments, optimizer="none").peak for arguments in ((x, x), (x, x.clone())))
    assert twice - once == x.numel() * 4


def test_memory_that_lives_for_a_moment_counts_for_the_peak_only() -> None:
    class Detour(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                far = x.repeat(1000, 1).mean(0)
            return (far * self.weight).sum()

    arguments = (Detour(), torch.randn(16, 8), lambda y: y)
    estimated, measured = estimate_memory(*arguments), measure_memory(*arguments)
    for held in (estimated, measured):
        assert held.peak > 1000 * 16 * 8 * 4
        assert held.activations < 1000
    assert_near(estimated, measured)


def test_a_model_without_a_loss_is_asked_by_its_outputs() -> None:
    assert estimate_memory(nn.Linear(8, 8), torch.randn(4, 8)).gradients == 4 * (64 + 8)
    with pytest.raises(MemoryEstimateError, match="give a loss"):
        estimate_memory(nn.Identity(), torch.randn(4, 8), optimizer="none")


def test_keywords_and_a_whole_batch_are_taken() -> None:
    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, a: Tensor, *, b: Tensor) -> Tensor:
            y: Tensor = self.layer(a) + b
            return y

    held = estimate_memory(Keyed(), {"a": torch.randn(4, 8), "b": torch.randn(4, 8)})
    assert held.gradients == 4 * (64 + 8)


def test_an_optimizer_of_ones_own_is_asked_for_its_state() -> None:
    def adagrad(model: nn.Module) -> Optimizer:
        return torch.optim.Adagrad(model.parameters())

    held = estimate_memory(nn.Linear(8, 8, bias=False), torch.randn(4, 8), optimizer=adagrad)
    assert held.optimizer == 4 * 64 + 4


# --- what cannot be estimated ---


def test_a_model_that_looks_into_its_tensors_is_told_so() -> None:
    class Peeks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)
            return y if bool(y.sum() > 0) else -y

    with pytest.raises(MemoryEstimateError, match="values of its tensors"):
        estimate_memory(Peeks(), torch.randn(4, 8))


def test_a_model_that_cannot_be_copied_is_told_so() -> None:
    model = nn.Linear(8, 8)
    model.generator = (number for number in range(3))  # type: ignore[assignment]
    with pytest.raises(MemoryEstimateError, match=r"copy\.deepcopy\(model\)"):
        estimate_memory(model, torch.randn(4, 8))


def test_unknown_optimizers_executions_and_rules_without_effect_raise() -> None:
    arguments = (nn.Linear(8, 8), torch.randn(4, 8), None)
    with pytest.raises(MemoryEstimateError, match="did you mean adamw"):
        estimate_memory(*arguments, optimizer="adam")
    with pytest.raises(PlanError, match="there is no execution"):
        estimate_memory(*arguments, plan="bf16-all", execution="pocket")
    nothing = Plan.from_dict({"version": 1, "rules": [{"match": "absent", "activation": "e4m3"}]})
    with pytest.raises(PlanError):
        estimate_memory(*arguments, plan=nothing)


# --- copies ---


def test_a_copy_of_a_planned_model_is_plain(make_target: MakeTarget, eight_bits: Plan) -> None:
    target = make_target("perceptron")
    with bitplan.attach(target.model, eight_bits, example=target.batch[0], execution="packed"):
        for twin in (copy_without_plan(target.model), Fakes().model(target.model)):
            assert not any(is_planned(module) for module in twin.modules())
            assert {name for name, _ in twin.named_buffers()} == set()
        assert all(is_planned(module) for module in target.model.modules())


def test_a_plain_copy_has_none_of_the_buffers_of_delayed_scaling(make_target: MakeTarget) -> None:
    target = make_target("perceptron")
    delayed = {"format": "e4m3", "scale": "tensor", "history": 2, "rounding": "stochastic"}
    plan = Plan.from_dict({"version": 1, "rules": [{"match": "*", "op": "linear", "x": delayed, "w": delayed}]})
    with bitplan.attach(target.model, plan, example=target.batch[0]):
        planned = {name.rpartition(".")[2] for name, _ in target.model.named_buffers()}
        assert planned == {"_bitplan_table", "_bitplan_record", "_bitplan_reach"}
        for twin in (copy_without_plan(target.model), Fakes().model(target.model)):
            assert dict(twin.named_buffers()) == {}
            assert not any(module._non_persistent_buffers_set for module in twin.modules())


# --- optimizer state in few bits ---


@pytest.mark.parametrize(("state", "share"), [("int8", 1 / 4), ("int4", 1 / 8), ("e4m3", 1 / 4)])
def test_small_optimizer_state_is_foreseen(make_target: MakeTarget, state: str, share: float) -> None:
    pytest.importorskip("torchao")
    target = make_target("perceptron")
    plan = Plan.from_dict({"version": 1, "optimizer": {"state": state}})
    arguments = (target.model, target.batch, target.loss)
    estimated = estimate_memory(*arguments, plan=plan)
    with torch.compiler.set_stance("force_eager"):  # the state is the same, and compiling it takes a while
        measured = measure_memory(*arguments, plan=plan)
    assert (estimated.weights, estimated.gradients) == (measured.weights, measured.gradients)
    assert estimated.optimizer == measured.optimizer
    assert estimated.activations == measured.activations
    large, rest = 64 * 128, 128 + 128 * 10 + 10
    block, table = (128, 4 * 16) if state == "int4" else (256, 0 if state == "e4m3" else 4 * 256)
    steps = 4 * 4  # a count of steps for each parameter
    assert estimated.optimizer == 2 * (4 * large * share + 4 * large / block + table + 4 * rest) + steps


def test_a_step_without_an_optimizer_needs_no_small_state(make_target: MakeTarget) -> None:
    pytest.importorskip("torchao")
    target = make_target("perceptron")
    plan = Plan.from_dict({"version": 1, "optimizer": {"state": "int8"}})
    assert estimate_memory(target.model, target.batch, target.loss, "none", plan).optimizer == 0
    with pytest.raises(PlanError, match=r"SGD has no version with state in int8"):
        estimate_memory(target.model, target.batch, target.loss, "sgd", plan)


def test_a_large_tensor_is_rounded_in_two_parts_and_foreseen_like_in_many() -> None:
    """On a CPU rounding goes through a tensor in parts of 2^18 values; here in seven."""
    model = nn.Sequential(nn.Linear(4, 7 * 2**10), nn.ReLU())
    plan = Plan.from_dict({"version": 1, "rules": [{"match": "*", "activation": "e3m2"}]})
    arguments = (model, torch.randn(2**8, 4), None, "none", plan, "packed")
    parts = chunks.chunks_of
    estimated = estimate_memory(*arguments)
    assert chunks.chunks_of is parts
    assert estimated.peak == pytest.approx(measure_memory(*arguments).peak, rel=0.01)
