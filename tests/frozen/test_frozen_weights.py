"""Frozen weights in few bits: numbers, memory, gradients, state and life cycle, on plain torch modules."""

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from frozen_models import NF4, PLANS, Model, batch, make, plan, same, train
from torch import Tensor, nn
from torch.nn import functional as F

import bitplan as bp
from bitplan.errors import BitplanWarning, PlanError


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_has_the_bits_of_emulate(name: str, dtype: torch.dtype) -> None:
    results = {}
    for execution in ("emulate", "packed"):
        model = make(dtype)
        run = bp.attach(model, PLANS[name], execution=execution)
        is_stored = model.first.base._parameters["weight"] is None
        assert is_stored == (execution == "packed")
        results[execution] = train(model, run=run)
    assert same(results["emulate"], results["packed"])
    plain = train(make(dtype))
    assert not torch.equal(plain[0], results["packed"][0])
    assert torch.allclose(plain[0], results["packed"][0], rtol=0.2)


def test_the_weight_is_rounded_as_quantize_would_up_to_its_stored_scale() -> None:
    model = make()
    original = model.first.base.weight.clone()
    bp.attach(model, plan(NF4), execution="packed")
    ideal = bp.quantize(original, "nf4", scale="block", block=64)
    stored = model.first.base.weight
    assert stored.shape == original.shape
    assert 0 < (stored - original).norm() / original.norm() < 0.11
    assert (stored - ideal).norm() / original.norm() < 0.02


def test_gradients_reach_the_input_as_through_the_decoded_weight() -> None:
    model = make()
    bp.attach(model, plan(NF4), execution="packed")
    layer = model.first.base
    x = batch().requires_grad_()
    layer(x).square().sum().backward()
    weight, bias = layer.weight.as_subclass(Tensor), layer.bias
    expected = torch.autograd.grad(F.linear(y := batch().requires_grad_(), weight, bias).square().sum(), y)[0]
    assert torch.equal(x.grad, expected)


def bytes_in_memory(model: nn.Module) -> int:
    return sum(t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers()))


def test_a_4_bit_weight_takes_0_53_bytes_a_value_and_frees_the_parameter() -> None:
    layer = nn.Linear(512, 512, bias=False).requires_grad_(False)
    parameter = layer.weight
    bp.attach(layer, plan(NF4), execution="packed")
    assert bytes_in_memory(layer) / 512**2 <= 0.53
    assert parameter.untyped_storage().nbytes() == 0
    assert [*layer.parameters()] == []


def test_nothing_of_the_decoded_weight_is_saved() -> None:
    model = make()
    bp.attach(model, plan(NF4), execution="packed")
    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        model.first.base(batch().requires_grad_())
    assert all(t.numel() < 96 * 128 for t in saved if t.is_floating_point())
    assert any(t.dtype == torch.uint8 for t in saved)


def test_frozen_weights_without_frozen_are_rounded_again_instead_of_being_saved() -> None:
    rule = {"match": "base", "op": "linear", "x": "e4m3", "w": "e4m3", "dy": "e5m2"}
    for execution in ("emulate", "packed"):
        model = make().first
        bp.attach(model, plan(rule), execution=execution)
        sizes: list[int] = []

        def note(tensor: Tensor, owner: nn.Module = model, sizes: list[int] = sizes) -> Tensor:
            own = {p.untyped_storage().data_ptr() for p in owner.parameters()}
            sizes.append(0 if tensor.untyped_storage().data_ptr() in own else tensor.untyped_storage().nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            model.base(batch().requires_grad_())
        assert sum(sizes) < 96 * 128  # bytes; a rounded copy has four times as many


@pytest.mark.parametrize("execution", ["emulate", "packed"])
def test_checkpointing_changes_nothing(execution: str) -> None:
    results = []
    for checkpoints in (False, True):
        model = make(checkpoints=checkpoints)
        bp.attach(model, PLANS["operands"], execution=execution)
        results.append(train(model, steps=1))
    assert same(*results)


def test_state_dict_has_plain_tensors_under_the_same_names() -> None:
    model = make()
    before = model.state_dict()
    run = bp.attach(model, plan(NF4), execution="packed")
    state = model.state_dict()
    assert [*state] == [*before]
    assert all(type(t) is Tensor and t.dtype == before[name].dtype for name, t in state.items())
    assert torch.equal(state["first.base.weight"], model.first.base.weight)
    plain = make()
    plain.load_state_dict(state)
    assert torch.equal(plain(batch()), F.linear(batch(), torch.eye(96)) * 0 + model(batch()))
    run.detach()


@pytest.mark.parametrize("execution", ["emulate", "packed"])
def test_what_is_loaded_is_encoded_again(execution: str) -> None:
    model = make()
    bp.attach(model, plan(NF4), execution=execution)
    torch.manual_seed(5)
    other = Model()
    result = model.load_state_dict(other.state_dict())
    assert not result.missing_keys
    assert not result.unexpected_keys
    bp.attach(other, plan(NF4), execution="packed")
    assert torch.equal(model.first.base.weight, other.first.base.weight)
    assert (model.first.base._parameters["weight"] is None) == (execution == "packed")
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**make().state_dict(), "first.base.weight": torch.zeros(3, 3)})
    assert torch.equal(model.first.base.weight, other.first.base.weight)


@pytest.mark.parametrize("execution", ["emulate", "packed"])
def test_detach_gives_the_parameters_back_with_the_rounded_values(execution: str) -> None:
    model = make()
    kinds, parameter = [type(m) for m in model.modules()], model.first.base.weight
    names = [name for name, _ in model.named_parameters()]
    run = bp.attach(model, plan(NF4), execution=execution)
    decoded, output = model.first.base.weight.clone(), model(batch())
    run.detach()
    assert [type(m) for m in model.modules()] == kinds
    assert [name for name, _ in model.named_parameters()] == names
    assert model.first.base.weight is parameter
    assert not parameter.requires_grad
    assert torch.equal(parameter, decoded)
    assert torch.equal(model(batch()), output)
    assert not [name for m in model.modules() for name in (*m.__dict__, *m._buffers) if "bitplan" in name]


def test_copies_pickles_and_dtypes_follow() -> None:
    model = make()
    bp.attach(model, plan(NF4), execution="packed")
    output = model(batch())
    twin = copy.deepcopy(model)
    assert torch.equal(twin(batch()), output)
    assert twin.first.base._parameters["weight"] is None
    assert (
        twin.first.base._buffers["_bitplan_frozen_weight_0"]
        is not model.first.base._buffers["_bitplan_frozen_weight_0"]
    )
    plain = pickle.loads(pickle.dumps(model))
    assert type(plain.first.base) is nn.Linear
    assert torch.equal(plain(batch()), output)
    model.to(torch.bfloat16)
    assert model.first.base.weight.dtype == torch.bfloat16
    assert torch.equal(model.first.base.weight, twin.first.base.weight.to(torch.bfloat16))
    assert model(batch(torch.bfloat16)).dtype == torch.bfloat16


def test_a_weight_that_is_written_to_becomes_a_parameter() -> None:
    model = make()
    run = bp.attach(model, plan(NF4), execution="packed")
    layer = model.first.base
    decoded = layer.weight.clone()
    with pytest.warns(BitplanWarning, match=r"first.base.weight"):
        layer.weight.data += 1.0
    assert isinstance(layer.weight, nn.Parameter)
    assert torch.equal(layer.weight, decoded + 1)
    with torch.no_grad():
        model.second.base.weight.mul_(2)
    assert isinstance(model.second.base.weight, nn.Parameter)
    model(batch())
    run.detach()
    assert torch.equal(layer.weight, decoded + 1)


def test_a_stored_weight_cannot_be_trained() -> None:
    model = make()
    bp.attach(model, plan(NF4), execution="packed")
    with pytest.raises(PlanError, match=r"first.base.weight"):
        model.first.base.weight.requires_grad_(True)
    model.first.base.weight.requires_grad_(False)


def test_a_rule_without_frozen_weights_raises_and_changes_nothing() -> None:
    model = make()
    before = copy.deepcopy(model.state_dict())
    for rules, token in (
        ([{"match": "first.down", "frozen": "nf4"}], "trained"),
        ([NF4, {"match": "*", "frozen": "int4"}], "frozen"),
        ([NF4, {"match": "nowhere", "frozen": "int4"}], "nowhere"),
        ([NF4, {"match": "first", "op": "conv2d", "x": "e4m3"}], "conv2d"),
    ):
        with pytest.raises(PlanError, match=token):
            bp.attach(model, plan(*rules), execution="packed", example=batch())
        assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
        assert type(model.first.base) is nn.Linear
    with pytest.warns(BitplanWarning, match="trained"):
        bp.attach(model, plan(NF4, {"match": "first.down", "frozen": "nf4", "strict": False}), execution="packed")


def test_shared_and_broken_weights_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(16, 32), nn.Linear(32, 16, bias=False)).requires_grad_(False)
    model[1].weight = model[0].weight
    with pytest.raises(PlanError, match=r"0.weight"):
        bp.attach(model, plan(NF4), execution="packed")
    broken = nn.Linear(64, 64).requires_grad_(False)
    broken.weight[0, 0] = torch.nan
    with pytest.raises(bp.BitplanError, match="NaN"):
        bp.attach(nn.Sequential(broken), plan(NF4), execution="packed")
    assert type(broken) is nn.Linear


@pytest.mark.parametrize("dims", [1, 2])
def test_embeddings_and_convolutions_are_stored_too(dims: int) -> None:
    conv: Any = {1: nn.Conv1d, 2: nn.Conv2d}[dims]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 8), conv(8 if dims == 1 else 3, 12, 3, padding=1)).requires_grad_(False)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.scale = model, nn.Parameter(torch.ones(1))

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.layers[0](tokens) * self.scale
            return self.layers[1](x.transpose(-1, -2) if dims == 1 else x.view(2, 3, 8, -1))

    results = []
    for execution in ("emulate", "packed"):
        both = copy.deepcopy(Both())
        bp.attach(both, plan({"match": "*", "frozen": "int4"}), execution=execution)
        tokens = torch.arange(48).view(2, 24)
        both(tokens).square().sum().backward()
        results.append([both(tokens), both.scale.grad])
        assert (both.layers[1]._parameters["weight"] is None) == (execution == "packed")
    assert same(*results)


def test_the_model_is_freed_with_its_codes() -> None:
    model = make()
    bp.attach(model, plan(NF4), execution="packed")
    model(batch())
    import weakref

    reference = weakref.ref(model.first.base._buffers["_bitplan_frozen_weight_0"])
    del model
    gc.collect()
    assert reference() is None
