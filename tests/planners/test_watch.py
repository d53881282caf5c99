"""A training loop of a user's own: what a Watch keeps, and planted failures that it diagnoses."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

import bitplan as bp
from bitplan.errors import PlanError

INT8 = {"format": "int8", "scale": "tensor"}
E5M2 = {"format": "e5m2", "scale": "tensor"}
LINEAR = {"match": "*", "op": "linear", "x": INT8, "w": INT8, "dy": E5M2}


def plan(*rules: dict[str, Any]) -> dict[str, Any]:
    return {"version": 1, "rules": [LINEAR, *rules]}


def clouds(step: int) -> tuple[Tensor, Tensor]:
    """Three clouds of points; a last feature that is always 0, which no weight of its own can matter for."""
    own = torch.Generator().manual_seed(step)
    labels = torch.randint(3, (32,), generator=own)
    points = 2.0 * nn.functional.one_hot(labels, 8) + 0.5 * torch.randn(32, 8, generator=own)
    points[:, -1] = 0
    return points, labels


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


class Loop:
    """A user's loop over the clouds."""

    def __init__(self, model: nn.Module, document: Any, lr: float = 0.1, **options: Any) -> None:
        self.model = model
        self.optimizer = SGD(model.parameters(), lr, momentum=0.9)
        self.run = bp.attach(model, document, optimizer=self.optimizer)
        self.watch = bp.Watch(self.run, self.train_step, **options)

    def train_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        loss.backward()
        self.optimizer.step()
        return loss

    def go(self, steps: int, first: int = 0) -> list[float]:
        losses = []
        for step in range(first, first + steps):
            losses.append(float(self.watch.step(clouds(step)).detach()))
            if self.watch.is_bad:
                break
        return losses


def test_a_gradient_in_four_bits_of_a_transformers_model_is_found() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads))
    optimizer = AdamW(model.parameters(), 5e-3)
    document = plan({"match": "lm_head", "op": "linear", "dgrad.dy": "e2m1"})
    batches = [torch.randint(16, (4, 16)).sort(1).values for _ in range(24)]
    run = bp.attach(model, document, optimizer=optimizer, example={"input_ids": batches[0]})

    def train_step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss

    watch = bp.Watch(run, train_step, every=24)
    losses = [float(watch.step(tokens).detach()) for tokens in batches]
    diagnosis = watch.diagnose()
    assert [str(tensor) for tensor in diagnosis.culprits] == ["lm_head/linear.0:dgrad.dy"]
    assert "in the backward pass" in diagnosis.summary
    assert diagnosis.plan is not None
    run = watch.rewind(diagnosis.plan)
    assert str(run.plan.decide("lm_head", "linear.0")["dgrad.dy"].quantizer) not in ("None", "e2m1")
    mended = [float(watch.step(tokens).detach()) for tokens in batches]
    assert mended[0] == losses[0]  # from the same weights
    assert mended[-1] < losses[-1] - 0.3


@pytest.mark.parametrize(
    ("layer", "operands"), [(0, {"fprop.w"}), (2, {"fprop.w", "dgrad.w"})], ids=["first", "second"]
)
def test_an_outlier_in_the_weights_of_a_layer_is_found(layer: int, operands: set[str]) -> None:
    """It is multiplied by zeros only, and leaves no other weight of its tensor a code but 0."""
    model = perceptron()
    with torch.no_grad():
        if layer:  # a unit of the first layer that is never active
            model[0].weight[-1] = 0
            model[0].bias[-1] = -1
        model[layer].weight[0, -1] = 1e3
    loop = Loop(model, plan(), every=40)
    losses = loop.go(40)
    diagnosis = loop.watch.diagnose()
    assert diagnosis.cause == "plan"
    assert {tensor.module for tensor in diagnosis.culprits} == {str(layer)}
    assert "fprop.w" in {tensor.place for tensor in diagnosis.culprits} <= operands
    assert diagnosis.plan is not None
    spec = diagnosis.plan.decide(str(layer), "linear.0")["fprop.w"].quantizer
    assert str(spec) not in ("None", "int8 tensor")
    loop.watch.rewind(diagnosis.plan)
    assert loop.go(40)[-1] < 0.5 * losses[-1]


def test_an_outlier_in_a_channel_of_the_data_is_found() -> None:
    model = perceptron()
    with torch.no_grad():
        model[0].weight[:, -1] = 0

    class Massive(Loop):
        def train_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            points = batch[0].clone()
            points[:, -1] = 1e4
            self.model[0].weight.register_hook(_without_last_column)
            return super().train_step((points, batch[1]))

    def _without_last_column(gradient: Tensor) -> Tensor:
        return gradient * (torch.arange(8) < 7)

    loop = Massive(model, plan(), every=40)
    loop.go(40)
    diagnosis = loop.watch.diagnose()
    assert {str(tensor) for tensor in diagnosis.culprits} <= {"0/linear.0:fprop.x", "0/linear.0:wgrad.x"}
    assert "0/linear.0:fprop.x" in map(str, diagnosis.culprits)
    assert diagnosis.plan is not None


def test_a_loss_that_is_not_finite_names_its_tensor_and_its_remedy() -> None:
    """Outputs of a layer that is scaled up, and back in the next: E4M3 without a scale holds 448, from step 7 on."""
    model = perceptron()
    with torch.no_grad():
        model[2].weight *= 1e4
        model[4].weight /= 1e4
    narrow = {"until": 6, "use": "bf16", "then": {"format": "e4m3", "overflow": "special"}}
    document = plan({"match": "2", "op": "linear", "activation": narrow})
    optimizer = SGD(model.parameters(), 1e-9)
    run = bp.attach(model, document, optimizer=optimizer, steps=40)

    def train_step(batch: tuple[Tensor, Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    watch = bp.Watch(run, train_step, every=3)
    while not watch.is_bad:
        watch.step(clouds(watch.steps))
    assert watch.steps == 7
    diagnosis = watch.diagnose()
    assert "step 7 broke at 2/linear.0:activation" in diagnosis.summary
    assert "4 steps from step 3 on" in diagnosis.summary  # the state of step 6 is too near
    assert [str(tensor) for tensor in diagnosis.culprits] == ["2/linear.0:activation"]
    assert diagnosis.plan is not None
    watch.rewind(diagnosis.plan)
    assert watch.steps == 3
    for step in range(3, 9):
        watch.step(clouds(step))
        assert not watch.is_bad


def test_a_learning_rate_that_is_too_high_blames_no_operand() -> None:
    loop = Loop(perceptron(), plan(), lr=300.0, every=50)
    loop.go(50)
    assert loop.watch.is_bad
    diagnosis = loop.watch.diagnose()
    assert (diagnosis.cause, diagnosis.plan, diagnosis.culprits) == ("not the plan", None, ())
    assert "learning rate" in diagnosis.summary


def test_a_run_without_trouble_is_left_alone() -> None:
    loop = Loop(perceptron(), plan(), every=10)
    loop.go(20)
    assert loop.watch.diagnose().cause == "none"


def test_a_run_is_diagnosed_by_its_watch() -> None:
    loop = Loop(perceptron(), plan({"match": "4", "op": "linear", "dgrad.dy": "e2m1"}), every=20)
    loop.go(20)
    first = loop.run.diagnose(most_replays=40)
    assert [str(tensor) for tensor in first.culprits] == ["4/linear.0:dgrad.dy"]
    assert loop.watch.run is not loop.run  # attached anew by the replays, and diagnosed by the same watch
    assert str(loop.watch.run.diagnose(most_replays=40)) == str(loop.run.diagnose(most_replays=40)) == str(first)


def state_of(loop: Loop) -> tuple[Any, ...]:
    moments = [state["momentum_buffer"] for state in loop.optimizer.state.values()]
    generators = random.random(), np.random.rand(), torch.rand(2)
    return [p.detach().clone() for p in loop.model.parameters()], moments, generators, loop.watch.run.steps_done


def test_a_diagnosis_changes_nothing() -> None:
    """Also with dropout, stochastic rounding and delayed scales: the loop goes on as if it had not been looked at."""
    delayed = {"format": "e4m3", "scale": "tensor", "history": 4}
    document = plan({"match": "2", "op": "linear", "x": delayed, "dy": {**E5M2, "rounding": "stochastic"}})

    def trained(looks: bool) -> tuple[Any, ...]:
        random.seed(0)
        np.random.seed(0)
        model = perceptron()
        model.insert(2, nn.Dropout(0.2))
        model[3], model[2] = model[2], model[3]
        loop = Loop(model, document, every=6)
        loop.go(15)
        if looks:
            loop.watch.diagnose()
        return [loop.go(5, 15), *state_of(loop)]

    looked, plain = trained(True), trained(False)
    torch.testing.assert_close(looked, plain, rtol=0, atol=0)


@pytest.mark.parametrize("execution", ["packed", bp.Native(min_macs=0)], ids=["packed", "native"])
def test_executions_and_compiled_steps_go_on_after_a_diagnosis(execution: Any) -> None:
    model = perceptron()
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    document = plan({"match": "4", "op": "linear", "dgrad.dy": "e2m1"})
    run = bp.attach(model, document, optimizer=optimizer, execution=execution, example=clouds(0)[0])
    compiled = model if execution == "packed" else torch.compile(model, backend="eager")

    def train_step(batch: tuple[Tensor, Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(compiled(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    watch = bp.Watch(run, train_step, every=20)
    for step in range(20):
        watch.step(clouds(step))
    assert [str(tensor) for tensor in watch.diagnose().culprits] == ["4/linear.0:dgrad.dy"]
    assert torch.isfinite(watch.step(clouds(20)))
    assert (watch.run.steps_done, watch.run.execution.kind) == (21, run.execution.kind)


def test_the_state_of_a_scheduler_is_replayed_too() -> None:
    loop = Loop(perceptron(), plan({"match": "4", "op": "linear", "dgrad.dy": "e2m1"}))
    scheduler = LambdaLR(loop.optimizer, lambda step: 1 / (1 + step))
    rates: list[float] = []

    def train_step(batch: tuple[Tensor, Tensor]) -> Tensor:
        rates.append(loop.optimizer.param_groups[0]["lr"])
        loss = loop.train_step(batch)
        scheduler.step()
        return loss

    watch = bp.Watch(loop.run, train_step, every=50, stateful=[scheduler])
    for step in range(6):
        watch.step(clouds(step))
    first = list(rates)
    watch.diagnose(most_replays=4)
    assert rates[6:12] == first
    assert loop.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 7)


def test_two_states_and_their_batches_are_kept() -> None:
    loop = Loop(perceptron(), plan(), every=4)
    loop.go(11)
    assert [kept.step for kept in loop.watch._snapshots] == [4, 8]
    assert len(loop.watch._batches) == 11 - 4


def test_weights_that_are_broken_are_not_kept() -> None:
    loop = Loop(perceptron(), plan(), every=1)
    loop.go(3)
    with torch.no_grad():
        loop.model[0].weight[0, 0] = torch.nan
    assert loop.go(1) != []
    assert loop.watch.is_bad
    assert all(bool(t.isfinite().all()) for kept in loop.watch._snapshots for t in kept.tensors.values())


BAD: dict[str, Callable[[nn.Module, Any], Any]] = {
    "optimizer": lambda model, step: bp.Watch(bp.attach(model, plan()), step),
    "every": lambda model, step: bp.Watch(attached(model), step, every=0),
    "spike": lambda model, step: bp.Watch(attached(model), step, spike=1.0),
    "bp.Watch": lambda model, step: attached(model).diagnose(),
    "replay": lambda model, step: bp.Watch(attached(model), step).diagnose(),
    "go back": lambda model, step: bp.Watch(attached(model), step).rewind(),
    "loss": lambda model, step: bp.Watch(attached(model), lambda batch: "done").step(None),
}


def attached(model: nn.Module) -> bp.Attachment:
    return bp.attach(model, plan(), optimizer=SGD(model.parameters(), 0.1))


@pytest.mark.parametrize("word", BAD)
def test_what_a_watch_cannot_do_is_said(word: str) -> None:
    with pytest.raises(PlanError, match=word):
        BAD[word](perceptron(), lambda batch: 0.0)
