"""The life of a plan on a model: attaching, stepping, saving, copying and leaving."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.optim.swa_utils import AveragedModel
from torch.utils import checkpoint

import bitplan
from bitplan.errors import BitplanWarning, PlanError
from bitplan.plans import Plan
from bitplan.runtime.attach import Attachment, attach

NOISY = {"format": "e3m2", "rounding": "stochastic"}
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def plan_of(*rules: dict[str, Any], **named: Any) -> Plan:
    return Plan.from_dict({"version": 1, "quantizers": named, "rules": list(rules)})


def attached(model: nn.Module, *rules: dict[str, Any], **options: Any) -> Attachment:
    return attach(model, plan_of(*rules), **options)


class Net(nn.Module):
    """Layers, a buffer, a norm, and operations between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.norm(self.first(x)))) + x


def net() -> Net:
    torch.manual_seed(0)
    return Net()


EVERYTHING = {"match": "*", "weight": NOISY, "activation": "e4m3", "grad_activation": "e5m2", "x": "e3m2"}


def train(model: nn.Module, run: Attachment | None, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(X).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if run is not None:
            run.step()
        losses.append(loss.item())
    return losses


# --- coming and going ---


def anatomy(model: nn.Module) -> list[Any]:
    return [
        (name, type(module), sorted(module.__dict__), list(module._buffers), module._non_persistent_buffers_set)
        for name, module in model.named_modules()
    ]


def test_an_empty_plan_enters_no_mode_and_changes_nothing() -> None:
    depths: list[int] = []
    model = net()
    model.first.register_forward_hook(lambda *_: depths.append(torch._C._len_torch_function_stack()))
    before, plain = anatomy(model), train(copy.deepcopy(model), None, SGD(model.parameters(), 0.1), 1)
    with attach(model, Plan(), stats=True) as run:
        assert anatomy(model) == before
        assert train(model, run, SGD(model.parameters(), 0.1), 1) == plain
        assert run.loss(F.mse_loss) is F.mse_loss
    assert depths == [0, 0]


def test_detaching_leaves_the_model_exactly_as_it_was() -> None:
    from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

    model = net().eval()
    before, plain, known = anatomy(model), model(X), dict(hooks)
    inner = checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction
    state = copy.deepcopy(model.state_dict())
    run = attached(model, EVERYTHING, mutable_formats=True, stats=True, example=X)
    assert type(model) is not Net
    assert not torch.equal(model(X), plain)
    run.detach()
    assert anatomy(model) == before
    assert torch.equal(model(X), plain)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert (checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction) == inner
    assert dict(hooks) == known
    run.detach()  # again, which does nothing
    assert anatomy(model) == before


def test_what_was_detached_neither_compiles_nor_takes_a_loss() -> None:
    model = nn.Linear(8, 8)
    run = bitplan.attach(model, "int8-all", example=torch.randn(2, 8))
    run.detach()
    for late in (run.compile, lambda: run.loss(nn.functional.mse_loss)):
        with pytest.raises(PlanError, match="was detached from this model: attach it again first"):
            late()


def test_training_goes_on_bit_for_bit_after_detaching() -> None:
    first, second = net(), net()
    attached(first, EVERYTHING, example=X).detach()
    assert train(first, None, SGD(first.parameters(), 0.1), 3) == train(second, None, SGD(second.parameters(), 0.1), 3)


def test_the_context_manager_detaches_also_when_something_goes_wrong() -> None:
    model = net()
    with pytest.raises(RuntimeError, match="mine"), attached(model, EVERYTHING):
        raise RuntimeError("mine")
    assert type(model) is Net


def test_a_second_plan_is_refused_while_the_first_is_attached() -> None:
    model = net()
    with attached(model, EVERYTHING):
        for target in (model, model.first, nn.Sequential(model)):
            with pytest.raises(PlanError, match="attached to this model already: detach it first"):
                attached(target, EVERYTHING)
    attached(model, EVERYTHING).detach()


def test_two_models_have_plans_of_their_own() -> None:
    first, second = net().eval(), net().eval()
    plain = first(X)
    with attached(first, {"match": "*", "weight": "e3m2"}):
        with attached(second, {"match": "*", "weight": "e2m1"}):
            assert not torch.equal(first(X), second(X))
        assert torch.equal(second(X), plain)
        assert not torch.equal(first(X), plain)


def test_presets_and_files_attach_by_name(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("version: 1\nrules: [{match: first, weight: e2m1}]\n")
    for plan in (str(path), "bf16-all"):
        model = net().eval()
        plain = model(X)
        with attach(model, plan):
            assert not torch.equal(model(X), plain)


def test_the_first_line_in_the_log_says_that_nothing_is_saved(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "bitplan"), attached(net(), EVERYTHING):
        assert "emulate" in caplog.messages[0]
        assert "no memory or time is saved" in caplog.messages[0]
    with pytest.raises(PlanError, match="no execution 'fast'"):
        attached(net(), EVERYTHING, execution="fast")


# --- copies ---


def test_the_state_dict_has_plain_keys_and_values() -> None:
    model = net()
    plain = copy.deepcopy(model.state_dict())
    with attached(model, EVERYTHING, mutable_formats=True, stats=True) as run:
        assert list(model.state_dict()) == list(plain)
        assert all(torch.equal(value, plain[key]) for key, value in model.state_dict().items())
        train(model, run, SGD(model.parameters(), 0.1), 1)
        assert list(model.state_dict()) == list(plain)
        model.load_state_dict(plain)


def zeroed(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model.eval()


@pytest.mark.parametrize("make", [net, lambda: nn.LSTM(6, 6, 2), lambda: nn.MultiheadAttention(6, 2)])
def test_copies_run_on_their_own_weights(make: Callable[[], nn.Module]) -> None:
    model = make().eval()
    x = (X[:, None],) * (3 if isinstance(model, nn.MultiheadAttention) else 1) if not isinstance(model, Net) else (X,)

    def run_on(module: nn.Module) -> Tensor:
        y = module(*x)
        return y if isinstance(y, Tensor) else y[0]

    plain = run_on(model)
    nothing = X if isinstance(model, Net) else torch.zeros(4, 1, 6)
    with attached(model, {"match": "*", "weight": "e3m2"}):
        seen = run_on(model)
        assert not torch.equal(seen, plain)
        twin = copy.deepcopy(model)
        assert torch.equal(run_on(twin), seen)  # it follows the plan
        loaded = pickle.loads(pickle.dumps(model))
        assert type(loaded) is type(make())
        assert torch.equal(run_on(loaded), plain)  # it is the plain model
        for other in (twin, loaded):
            assert torch.equal(run_on(zeroed(other)), nothing)
        assert torch.equal(run_on(model), seen)
        twin = copy.deepcopy(model)
    assert torch.equal(run_on(twin), plain)  # a copy becomes plain together with its original


def test_a_model_saved_whole_loads_without_bitplan_in_it() -> None:
    file = io.BytesIO()
    model = net().eval()
    with attached(model, EVERYTHING, mutable_formats=True, stats=True):
        torch.save(model, file)
    assert b"bitplan" not in file.getvalue()
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(X), model(X))
    assert [name for name, _ in loaded.named_buffers()] == [name for name, _ in model.named_buffers()]


def test_an_average_of_the_model_rounds_its_own_weights() -> None:
    model = net()
    with attached(model, {"match": "*", "weight": "e3m2"}) as run:
        average = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
        average.update_parameters(model)
        train(model, run, SGD(model.parameters(), 1.0), 2)
        average.update_parameters(model)
        average.eval()
        plain = Net().eval()
        plain.load_state_dict(average.module.state_dict())
        with attached(plain, {"match": "*", "weight": "e3m2"}):
            expected = plain(X)
        assert torch.equal(average(X), expected)
        assert not torch.equal(average(X), model.eval()(X))
        assert not torch.equal(average(X), plain(X))


def test_a_copy_keeps_step_with_its_original() -> None:
    model = net().eval()
    with attached(model, {"match": "*", "weight": NOISY}) as run:
        twin = copy.deepcopy(model)
        first = model(X)
        run.step()
        assert not torch.equal(model(X), first)
        assert torch.equal(twin(X), model(X))


# --- rules without effect ---


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"match": "frist", "weight": "e3m2"}, r"no module fits 'frist'; the closest are first"),
        ({"match": "first", "op": "linaer", "x": "e3m2"}, r"no operation fits 'linaer'; the closest are linear"),
        ({"match": "norm", "op": "linear", "x": "e3m2"}, "no such operation runs in such a module"),
        ({"match": "norm", "x": "e3m2"}, r"nothing under the rule has 'x'; its operations \(batch_norm\) have weight"),
        ({"match": "*", "op": "relu", "x": "e3m2"}, r"nothing under the rule has 'x'; its operations \(relu\)"),
        ({"match": "*", "op": "add", "weight": "e3m2"}, r"nothing under the rule has 'weight'"),
    ],
)
def test_a_rule_without_effect_raises_before_the_first_step(rule: dict[str, Any], message: str) -> None:
    model = net()
    useful = {"match": "*", "activation": "e4m3"}
    with pytest.raises(PlanError, match=message):
        attached(model, useful, rule, example=X)
    assert type(model) is Net
    before = copy.deepcopy(model.state_dict())["first.weight"]
    if rule["match"] == "frist":  # known without a batch
        with pytest.raises(PlanError, match=message):
            attached(model, useful, rule)
        return
    with attached(model, useful, rule) as run:
        model.eval()(X)
        with pytest.raises(PlanError, match=message):
            train(model.train(), run, SGD(model.parameters(), 0.1), 1)
    assert torch.equal(model.first.weight, before)
    with attached(model, useful, rule) as run:
        model(X)
        with pytest.raises(PlanError, match=message):
            run.step()


@pytest.mark.parametrize("example", [X, None])
def test_a_rule_that_is_not_strict_only_warns(example: Tensor | None) -> None:
    model = net()
    rules = [{"match": "*", "weight": "e3m2"}, {"match": "frist", "keep": True, "strict": False}]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with attached(model, *rules, example=example) as run:
            train(model, run, SGD(model.parameters(), 0.1), 2)
    assert ["no module fits 'frist'" in str(item.message) for item in seen] == [True]


@pytest.mark.parametrize("op", ["lstm", "linear"])
def test_a_rule_for_an_opened_operation_or_for_what_is_inside_finds_it_without_an_example(op: str) -> None:
    model = nn.LSTM(6, 6)
    with attached(model, {"match": "*", "op": op, "x": "e3m2"}) as run:
        planned = model(X[:, None])[0]
        planned.sum().backward()
        SGD(model.parameters(), 0.0).step()
        run.step()
    assert not torch.equal(planned, model(X[:, None])[0])


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_rule_that_covers_a_scripted_module_raises_unless_it_is_kept() -> None:
    model = nn.Sequential(nn.Linear(6, 6), torch.jit.script(nn.Linear(6, 6)))
    with pytest.raises(PlanError, match=r"1 is .*script.* keep: true"):
        attached(model, {"match": "*", "weight": "e3m2"})
    assert type(model) is nn.Sequential
    with attached(model, {"match": "*", "weight": "e2m1"}, {"match": "1", "keep": True}):
        kept = model[1](X)
        assert not torch.equal(model(X), model[1](F.linear(X, model[0].weight, model[0].bias)))
    assert torch.equal(model[1](X), kept)


# --- the loop ---


def test_a_forgotten_step_is_warned_about_once() -> None:
    model = net()
    optimizer = SGD(model.parameters(), 0.1)
    with attached(model, EVERYTHING), pytest.warns(BitplanWarning, match=r"without run.step\(\)") as seen:
        train(model, None, optimizer, 5)
    assert len(seen) == 1


def test_two_optimizers_and_those_of_other_models_are_no_forgotten_step() -> None:
    model, other = net(), net()
    optimizers = [SGD(model.first.parameters(), 0.1), Adam(model.last.parameters())]
    stranger = SGD(other.parameters(), 0.1)
    with warnings.catch_warnings(), attached(model, EVERYTHING) as run:
        warnings.simplefilter("error")
        for _ in range(3):
            model(X).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            train(other, None, stranger, 2)
            run.step()
        assert run.state_dict()["step"] == 3


# --- the loss ---


def test_a_loss_that_is_brought_in_is_rounded_by_the_rules_for_it() -> None:
    y = torch.randn(4, 6)
    model = net().eval()
    with attached(model, {"match": "loss", "activation": "e3m2"}, example=X) as run:
        seen = run.loss(lambda out, target: (out - target).square().mean())(model(X), y)
        train(model, run, SGD(model.parameters(), 0.0), 1)
    difference = bitplan.quantize(model(X) - y, "e3m2")
    expected = bitplan.quantize(bitplan.quantize(difference.square(), "e3m2").mean(), "e3m2")
    assert torch.equal(seen, expected)
    assert not torch.equal(seen, (model(X) - y).square().mean())


@pytest.mark.parametrize("example", [X, None])
@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"match": "loss", "activation": "e3m2"}, "module fits 'loss'"),
        ({"match": "*", "op": "log", "x": "e3m2"}, "'log'"),
    ],
)
def test_a_rule_for_a_loss_that_is_not_brought_in_raises(
    example: Tensor | None, rule: dict[str, Any], message: str
) -> None:
    model = net()
    rules = [{"match": "*", "weight": "e3m2"}, rule]
    with attached(model, *rules, example=example) as run, pytest.raises(PlanError, match=message):
        train(model, run, SGD(model.parameters(), 0.1), 1)


# --- saving and going on ---


def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    plan = plan_of({**EVERYTHING, "activation": {"format": "int8", "scale": "tensor", "eval": "ema"}}, mine=NOISY)

    def start() -> tuple[Net, torch.optim.Optimizer, Attachment]:
        model = net()
        return model, Adam(model.parameters(), 0.1), attach(model, plan, seed=7, mutable_formats=True, stats=True)

    model, optimizer, run = start()
    train(model, run, optimizer, 2)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "run": run.state_dict()}, file)
    losses, stats, evaluated = train(model, run, optimizer, 2), run.stats(), model.eval()(X)

    model, optimizer, run = start()
    file.seek(0)
    saved = torch.load(file, weights_only=True)  # plain numbers and tensors only
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    run.load_state_dict(saved["run"])
    assert train(model, run, optimizer, 2) == losses
    assert run.stats() == stats
    assert torch.equal(model.eval()(X), evaluated)
    assert next(iter(stats.values())).steps == 4


def test_the_state_of_another_plan_is_refused() -> None:
    with attached(net(), EVERYTHING) as run:
        state = run.state_dict()
    with attached(net(), {"match": "*", "weight": "e3m2"}) as run, pytest.raises(PlanError, match="another plan"):
        run.load_state_dict(state)


# --- what it tells ---


def test_the_table_tells_of_every_tensor_once_a_batch_was_seen() -> None:
    model = net()
    with attached(model, {"match": "first", "weight": "e3m2"}) as run:
        with pytest.raises(PlanError, match="has not seen a batch yet"):
            run.table()
        model(X)
        result = {row.site.name: str(row.quantizer) for row in run.table()}
    assert result["first/linear.0:weight"] == "e3m2"
    assert result["/add.0:activation"] == "None"


def test_the_cost_counts_the_steps_that_were_made() -> None:
    model = net()
    with attached(model, {"match": "*", "x": "int4", "w": "int4"}, example=X) as run:
        one = run.cost().bit_operations
        train(model, run, SGD(model.parameters(), 0.1), 3)
        assert run.cost().bit_operations == 3 * one
