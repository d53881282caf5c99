"""Measuring by the allocator, and counting at autograd's hooks: two opinions that must agree."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from saved_bytes import saved_tensor_bytes
from torch import fx, nn

import bitplan
from bitplan.analysis.memory import estimate_memory, measure_memory
from bitplan.analysis.memory.fakes import copy_without_plan, storage_bytes
from bitplan.analysis.memory.measure import HostAllocator, make_allocator
from bitplan.analysis.memory.step import TrainingStep, split_call
from bitplan.analysis.targets import Target
from bitplan.errors import MemoryEstimateError
from bitplan.plans import Plan
from bitplan.runtime.attach import Attachment

MakeTarget = Callable[[str], Target]
KINDS = ("resnet8", "mobilenet-v2", "gpt", "gpt2", "bert", "gcn")
#: The loss itself lives when the forward pass has ended, and a plan's first call may leave a number or two.
NUMBERS = 64


def counted(target: Target, plan: Plan | None, execution: str) -> int:
    model = copy_without_plan(target.model)
    args, kwargs, expected = split_call(target.batch, target.loss)
    run: Attachment | None = None
    loss = target.loss
    if plan is not None:
        run = bitplan.attach(model, plan, example=kwargs or args, execution=execution)
        loss = run.loss(loss) if loss is not None else None
    step = TrainingStep(model, (args, kwargs, expected), loss, "none", run)
    packer = run._execution.packer if run is not None and run._execution.packs_saved_tensors else None
    return saved_tensor_bytes(step.loss_of_batch, [*step.weights(), *step.batch()], packer)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("execution", [None, "emulate", "packed"])
def test_the_allocator_and_the_hooks_agree(
    make_target: MakeTarget, eight_bits: Plan, name: str, execution: str | None
) -> None:
    target = make_target(name)
    plan = None if execution is None else eight_bits
    how = execution or "emulate"
    measured = measure_memory(target.model, target.batch, target.loss, "none", plan, how, steps=2)
    assert measured.activations == pytest.approx(counted(target, plan, how), abs=NUMBERS)


def test_the_bytes_of_a_perceptron_are_those_counted_by_hand(make_target: MakeTarget) -> None:
    target = make_target("perceptron")
    held = measure_memory(target.model, target.batch, target.loss, "adamw")
    parameters = 4 * (64 * 128 + 128 + 128 * 10 + 10)
    assert (held.weights, held.gradients) == (parameters, parameters)
    assert held.optimizer == 2 * parameters + 4 * 4
    assert held.activations == 4 * (32 * 128 + 32 * 10 + 1 + 1)
    assert held.peak >= held.weights + held.optimizer + held.gradients


def test_more_copies_of_a_model_are_compiled_than_torch_allows_graphs_of_one(
    make_target: MakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each plan's graph is of the same code; a planner that measures several plans is no recompilation gone wrong."""
    target = make_target("perceptron")
    graphs: list[fx.GraphModule] = []

    def noted(graph: fx.GraphModule, arguments: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    compiled = partial(torch.compile, backend=noted, fullgraph=True)
    monkeypatch.setattr("bitplan.analysis.memory.measure.compile_model", lambda model, run: compiled(model))
    with torch._dynamo.config.patch(recompile_limit=1):
        for name in ("bf16-all", "int8-all", "fp8-all"):
            measure_memory(target.model, target.batch, target.loss, "none", name, compile=True)
    assert len(graphs) == 3


def test_the_model_is_left_as_it_is(make_target: MakeTarget, eight_bits: Plan) -> None:
    target = make_target("resnet8")
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    measure_memory(target.model, target.batch, target.loss, plan=eight_bits, execution="packed", steps=2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.model.state_dict().items())
    assert all(parameter.grad is None for parameter in target.model.parameters())


def test_a_run_can_be_asked_while_it_goes_on(make_target: MakeTarget, eight_bits: Plan) -> None:
    target = make_target("perceptron")
    run = bitplan.attach(target.model, eight_bits, execution="packed")
    inputs, labels = target.batch
    assert target.loss is not None
    target.loss(target.model(inputs), labels).backward()
    estimated = run.memory().estimated
    assert run.memory().measured is None
    assert estimated.weights == storage_bytes(target.model.parameters())
    both = run.memory(target.batch, target.loss, optimizer="none")
    assert both.estimated.activations == pytest.approx(both.measured.activations, abs=NUMBERS)
    plain = estimate_memory(copy_without_plan(target.model), target.batch, target.loss)
    assert both.estimated.activations < plain.activations / 3
    run.step()
    run.detach()


def test_a_run_that_has_seen_nothing_says_what_it_needs(make_target: MakeTarget, eight_bits: Plan) -> None:
    run = bitplan.attach(make_target("perceptron").model, eight_bits)
    with pytest.raises(MemoryEstimateError, match="give one, or run the model once"):
        run.memory()


def test_the_host_allocator_tells_every_byte() -> None:
    with HostAllocator() as allocator:
        allocator.note("start")
        kept = torch.empty(1000, dtype=torch.uint8)
        passing = torch.empty(5000, dtype=torch.uint8)
        allocator.note("forward")
        del passing
        allocator.note("backward")
    assert allocator.notes == [("start", 0), ("forward", 6000), ("backward", 1000)]
    assert allocator.peak == 6000
    assert allocator.last("forward") == 6000
    assert len(kept) == 1000


def test_inside_of_a_profiler_nothing_can_be_measured(make_target: MakeTarget) -> None:
    target = make_target("perceptron")
    with torch.profiler.profile(), pytest.raises(MemoryEstimateError, match="measure outside of it"):
        measure_memory(target.model, target.batch, target.loss)


def test_one_step_and_other_devices_are_refused() -> None:
    with pytest.raises(MemoryEstimateError, match="at least 2"):
        measure_memory(nn.Linear(2, 2), torch.randn(1, 2), steps=1)
    with pytest.raises(MemoryEstimateError, match="on cpu and cuda, not on meta"):
        make_allocator(torch.device("meta"))


def test_what_a_sparse_tensor_holds_is_counted_and_shared_memory_once() -> None:
    sparse = torch.eye(8).to_sparse()
    assert storage_bytes([sparse]) == 8 * 4 + 2 * 8 * 8
    whole = torch.empty(100)
    assert storage_bytes([whole, whole[:10], whole.view(10, 10)]) == 400
