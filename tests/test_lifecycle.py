"""A plan from attach to detach, while other code patches, copies, moves and replaces the modules of the model."""

from __future__ import annotations

import copy
import functools
import io
import operator
import pickle
import types
import warnings
from pathlib import Path
from typing import Any

import ddp_worker
import pytest
import torch
from ranks import on_ranks
from small import attached
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import bitplan
from bitplan.errors import BitplanWarning, PlanError, QuantizeError

NOISY = {"format": "e3m2", "rounding": "stochastic"}
COARSE = {"match": "*", "weight": "e2m1", "activation": "e3m2", "grad_activation": "e3m2"}
HISTORY = {"match": "*", "x": {"format": "int8", "scale": "tensor", "history": 2}, "weight": NOISY}
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Has operations of its own, and submodules."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) * 1.37) + x

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))


def result_of(model: nn.Module, x: Tensor = X, called: Any = None) -> list[Tensor]:
    """The result and the gradients of one step."""
    model.zero_grad()
    y = (model if called is None else called)(x)
    y.square().sum().backward()
    return [y.detach().float(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_same(first: list[Tensor], second: list[Tensor]) -> None:
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def expected(rule: Any = COARSE, model: nn.Module | None = None) -> list[Tensor]:
    model = Net() if model is None else model
    with attached(model, rule):
        return result_of(model)


# --- a forward on the instance ---


def patched_method(model: nn.Module) -> None:
    model.forward = types.MethodType(Net.forward, model)  # type: ignore[method-assign]


def patched_partial(model: nn.Module) -> None:
    model.forward = functools.partial(Net.forward, model)  # type: ignore[method-assign]


def patched_call_of_old(model: nn.Module) -> None:
    old = model.forward

    @functools.wraps(old)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return old(*args, **kwargs)

    model.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize("patch", [patched_method, patched_partial, patched_call_of_old])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("execution", ["emulate", "packed"])
def test_a_forward_on_the_instance_is_rounded(patch: Any, is_first: bool, execution: str) -> None:
    plain, planned = result_of(Net()), expected()
    model = Net()
    if is_first:
        patch(model)
    before = dict(model.__dict__)
    run = attached(model, COARSE, execution=execution)
    if not is_first:
        patch(model)
    assert_same(result_of(model), planned)
    if patch is not patched_call_of_old:  # which is bound to the original
        assert_same(result_of(copy.deepcopy(model)), planned)
    run.detach()
    assert type(model) is Net
    assert_same(result_of(model), plain)
    if is_first:
        assert model.__dict__ == before
    with attached(model, COARSE):  # once more: the patch is still there
        assert_same(result_of(model), planned)
    assert_same(result_of(model), plain)


def test_operations_of_a_patch_are_rounded_too() -> None:
    class Sum(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 0.77

    model = Net()
    with attached(model, COARSE):
        old = model.forward
        model.forward = lambda x: old(x) * 0.77  # type: ignore[method-assign]
        assert_same(result_of(model), expected(model=Sum()))
        del model.forward
        assert_same(result_of(model), expected())


@pytest.mark.parametrize("is_first", [True, False])
def test_a_forward_on_the_instance_compiles(is_first: bool) -> None:
    plain, planned, model = result_of(Net()), expected(), Net()
    if is_first:
        patched_method(model)
    outer = nn.Sequential(model)
    run = attached(outer, {**COARSE, "match": ["0", "0.*"]}, example=X)
    if not is_first:
        patched_method(model)
    compiled = torch.compile(outer, backend="aot_eager", fullgraph=True)
    assert_same(result_of(outer, called=compiled), planned)
    run.detach()
    assert_same(result_of(outer, called=compiled), plain)


@pytest.mark.parametrize("is_first", [True, False])
def test_accelerate_with_mixed_precision(is_first: bool) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    rule = {"match": "*", "activation": "e3m2"}
    with torch.autocast("cpu", torch.bfloat16):
        plain, planned = result_of(Net())[0], expected(rule)[0]
    model = Net()
    if is_first:
        model = accelerator.prepare_model(model)
        run = attached(model, rule)
    else:
        run = attached(model, rule)
        model = accelerator.prepare_model(model)
    assert torch.equal(model(X), planned)
    assert not torch.equal(planned, plain)
    run.detach()
    assert torch.equal(model(X), plain)
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)(X)
    accelerate.state.AcceleratorState._reset_state(True)


# --- buffers: moved, emptied, broadcast ---


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_to_empty_keeps_what_the_plan_stores(device: str) -> None:
    weights = Net().state_dict()
    results = []
    for attaches_first in (False, True):
        model = Net().to(device)
        run = attached(model, HISTORY) if attaches_first else None
        model.to_empty(device="cpu")
        model.load_state_dict(weights)
        run = attached(model, HISTORY) if run is None else run
        for factor in (3.0, 1.0, 0.1):
            step = result_of(model, X * factor)
            run.step()
        results.append(step)
    assert_same(*results)


def test_to_empty_in_mid_run_keeps_history() -> None:
    results = []
    for empties in (False, True):
        model = Net()
        with attached(model, HISTORY) as run:
            result_of(model, X * 5)
            run.step()
            if empties:
                model.to_empty(device="cpu")
            model.load_state_dict(Net().state_dict())
            results.append(result_of(model))
    assert_same(*results)


def test_ranks_keep_what_they_have_observed(tmp_path: Path) -> None:
    assert on_ranks(2, ddp_worker.observe, tmp_path) == [[1000.0] * 3] * 2


# --- methods, replaced modules, parametrizations ---


def test_a_method_beside_forward_that_runs_submodules_warns_once() -> None:
    model = Net()
    with attached(model, COARSE, example=X):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(X)
            model.second(model.first(X))  # nobody's method
        with pytest.warns(BitplanWarning, match=r"Net\.encode"):
            model.encode(X)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.encode(X)


def test_lightnings_training_step_warns_where_it_does_what_forward_should() -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, calls_forward: bool) -> None:
            super().__init__()
            self.net, self.calls_forward = Net(), calls_forward

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)  # type: ignore[no-any-return]

        def training_step(self, batch: list[Tensor]) -> Tensor:
            return (self(batch[0]) if self.calls_forward else self.net(batch[0])).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X), batch_size=4)
    for calls_forward in (True, False):
        model = Module(calls_forward)
        trainer = lightning.Trainer(
            max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        with attached(model, COARSE, example=X), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(model, data)
        messages = [str(warning.message) for warning in caught if issubclass(warning.category, BitplanWarning)]
        assert ["training_step" in message for message in messages] == [True] * (not calls_forward)


def replace_attribute(model: Net) -> None:
    model.second = nn.Linear(8, 6)


def replace_by_name(model: Net) -> None:
    model.add_module("second", nn.Identity())


@pytest.mark.parametrize("replace", [replace_attribute, replace_by_name])
def test_a_replaced_module_raises(replace: Any) -> None:
    model = Net()
    run = attached(model, {"match": "second", "weight": "e2m1"}, example=X)
    with pytest.raises(PlanError, match=r"second.*detach"):
        replace(model)
    replace(copy.deepcopy(model))  # a copy has no attachment
    run.detach()
    replace(model)


def test_wrapped_modules_keep_their_rules_and_added_parameters_warn() -> None:
    model, plain = Net(), expected()
    with attached(model, COARSE):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.second = nn.Sequential(model.second)  # type: ignore[assignment]
            model.metric = nn.MSELoss()
            model.active = model.first
            model.active = model.second  # the first is still in the model
            del model.active
        assert_same(result_of(model), plain)
        with pytest.warns(BitplanWarning, match="adapter"):
            model.adapter = nn.Linear(2, 2)


def test_adapters_added_after_attach_warn_once() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["first", "second"], r=2)
    model = Net()
    model.config = None  # type: ignore[assignment]
    with attached(model, COARSE), pytest.warns(BitplanWarning, match="first") as caught:
        peft.get_peft_model(model, config)
    assert len([w for w in caught if issubclass(w.category, BitplanWarning)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", BitplanWarning)
        model = peft.get_peft_model(Net(), config)
        with attached(model, COARSE, example=X):
            model(X)


def parametrized(kind: str) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.Linear(6, 5)
    if kind == "weight_norm":
        parametrizations.weight_norm(layer)
    elif kind == "orthogonal":
        parametrizations.orthogonal(layer)
    else:
        parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.abs().mean() + torch.tanh(x)


@pytest.mark.parametrize("kind", ["weight_norm", "orthogonal", "own"])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_weight_that_a_parametrization_makes_is_rounded(kind: str, is_compiled: bool) -> None:
    layer = parametrized(kind)
    weight, bias = layer.weight.detach(), layer.bias.detach()  # type: ignore[operator, union-attr]
    rule = {"match": "*", "weight": "e2m1", "activation": "e3m2"}
    exact = torch.nn.functional.linear(X, bitplan.quantize(weight, "e2m1"), bitplan.quantize(bias, "e2m1"))
    for options in ({}, {"example": X}):
        with attached(layer, rule, **options) as run:  # type: ignore[arg-type]
            called = torch.compile(layer, backend="aot_eager", fullgraph=True) if is_compiled and options else layer
            y = called(X)
            assert torch.equal(y, bitplan.quantize(exact, "e3m2"))
            y.sum().backward()
            assert all(parameter.grad is not None for parameter in layer.parameters())
            assert {row.site.name: row.site.parameter for row in run.table() if row.quantizer} == {
                "/linear.0:weight": "weight",
                "/linear.0:weight(bias)": "bias",
                "/linear.0:activation": None,
            }


def test_parametrizing_an_attached_model() -> None:
    model = nn.Sequential(nn.Linear(6, 5))
    weights, y = copy.deepcopy(model.state_dict()), None
    with attached(model, {"match": "*", "weight": "e2m1"}):
        parametrize.register_parametrization(model[0], "weight", nn.Tanh())
        y = model(X)
    rounded = bitplan.quantize(torch.tanh(weights["0.weight"]), "e2m1")
    assert torch.equal(y, torch.nn.functional.linear(X, rounded, bitplan.quantize(weights["0.bias"], "e2m1")))
    assert not hasattr(model[0], "_bitplan")
    assert type(model[0]).__mro__[1] is nn.Linear
    copied = copy.deepcopy(model)
    assert torch.equal(copied(X), model(X))
    parametrize.remove_parametrizations(model[0], "weight", leave_parametrized=False)
    assert type(model[0]) is nn.Linear
    assert torch.equal(model[0].weight, weights["0.weight"])


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("hook", [torch.nn.utils.weight_norm, torch.nn.utils.spectral_norm])
def test_a_weight_that_a_hook_makes_warns(hook: Any) -> None:
    with pytest.warns(BitplanWarning, match=r"0\.weight.*parametrizations"):
        attached(nn.Sequential(hook(nn.Linear(6, 5))), {"match": "*", "weight": "e2m1"}).detach()


class Scaled(Tensor):
    """A weight that handles functions itself, as those of torchao do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def test_weights_that_handle_functions_themselves_raise() -> None:
    model = nn.Sequential(nn.Linear(6, 5))
    model[0].weight = nn.Parameter(torch.zeros(5, 6).as_subclass(Scaled))
    with pytest.raises(PlanError, match=r"0\.weight is a Scaled"):
        attached(model, COARSE)


# --- copies, pickles and other classes ---


def test_a_copy_outlives_the_plan_and_may_get_another() -> None:
    model, plain = Net(), result_of(Net())
    run = attached(model, COARSE)
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    other = attached(first, {"match": "*", "weight": "e2m1"})
    assert_same(result_of(first), expected({"match": "*", "weight": "e2m1"}))
    assert_same(result_of(second), expected())
    run.detach()
    other.detach()
    for twin in (first, second):
        assert_same(result_of(twin), plain)
        with attached(twin, COARSE):
            assert_same(result_of(twin), expected())
        assert type(twin) is Net


def test_an_evaluation_may_come_first() -> None:
    rule = {"match": "*", "activation": {"format": "int8", "scale": "tensor", "history": 2}, "weight": NOISY}
    results = []
    for evaluates in (False, True):
        model = Net()
        with torch.inference_mode(evaluates):
            run = attached(model, rule)
        average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
        if evaluates:
            with torch.inference_mode():
                model.eval()(X * 3)
            model.train()
        for factor in (2.0, 1.0):
            result = result_of(model, X * factor)
            average.update_parameters(model)
            assert [*dict(average.module.named_buffers())] == [*dict(model.named_buffers())]
            run.step()
        results.append(result)
    assert_same(*results)


def test_a_module_that_holds_its_run_is_copied_and_pickled() -> None:
    model = Net()
    model.run = run = attached(model, HISTORY)  # type: ignore[assignment]
    result_of(model, X * 5)
    run.step()
    assert copy.deepcopy(model).run is run
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    assert type(loaded) is Net
    with pytest.raises(PlanError, match="load_state_dict"):
        loaded.run.step()
    with attached(loaded, HISTORY) as again:
        again.load_state_dict(loaded.run.state)
        assert_same(result_of(loaded), result_of(model))
    assert pickle.loads(pickle.dumps(run)).state["step"] == 1


def test_sharding_an_attached_model_and_detaching(tmp_path: Path) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, plain = Net(), Net()(X)
        rule = {"match": "*", "w": "e2m1"}
        planned = expected(rule)[0]
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        run = attached(model, rule)
        fsdp.fully_shard(model.first, mesh=mesh)
        fsdp.fully_shard(model, mesh=mesh)
        assert torch.equal(model(X), planned)
        run.detach()
        assert isinstance(model, fsdp.FSDPModule)
        assert torch.equal(model(X), plain)
        model.reshard()
        before = [*model.parameters()]
        with attached(model, {"match": "*", "weight": "e2m1"}, example=X):
            assert all(map(operator.is_, model.parameters(), before))
            assert torch.equal(model(X), expected({"match": "*", "weight": "e2m1"})[0])
    finally:
        torch.distributed.destroy_process_group()


def test_a_lazy_module_keeps_the_plan_when_it_gets_its_class() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.LazyLinear(5))
    plain(X)
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(5))
    run = attached(model, {"match": "*", "weight": "e2m1"})
    y = model(X)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))  # initialised as without a plan
    rounded = [bitplan.quantize(parameter, "e2m1") for parameter in model.parameters()]
    assert torch.equal(y, torch.nn.functional.linear(X, *rounded))
    run.detach()
    assert type(model[0]) is nn.Linear


# --- torch.func, tracers, in-place operations in packed execution ---


@pytest.mark.parametrize(
    "rule", [COARSE, {"match": "*", "fprop.x": "e4m3", "w": "e4m3", "dy": "e5m2", "wgrad.x": "e3m2"}]
)
def test_gradients_by_torch_func_are_those_of_backward(rule: Any) -> None:
    model = nn.Sequential(Net(), nn.ReLU(), nn.Linear(6, 3))

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    with attached(model, rule):
        gradients = result_of(model)[1:]
        parameters = dict(model.named_parameters())
        assert_same([*torch.func.grad(loss)(parameters, X).values()], gradients)
        _, pullback = torch.func.vjp(lambda parameters: loss(parameters, X), parameters)
        assert_same([*pullback(torch.tensor(1.0))[0].values()], gradients)


@pytest.mark.parametrize("transform", ["vmap", "jacrev", "jacfwd", "hessian"])
def test_other_transforms_of_torch_func_raise(transform: str) -> None:
    with attached(Net(), COARSE) as run, pytest.raises(QuantizeError, match=r"torch\.func"):
        getattr(torch.func, transform)(run.model)(X)


@pytest.mark.parametrize("options", [{"execution": "packed"}, {"stats": True}])
def test_what_torch_func_cannot_record_raises(options: Any) -> None:
    with attached(Net(), COARSE, **options) as run, pytest.raises(QuantizeError, match=r"torch\.func"):
        torch.func.grad(lambda x: run.model(x).sum())(X)


@pytest.mark.parametrize("trace", [lambda m: torch.jit.trace(m, X), torch.fx.symbolic_trace])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tracers_raise_a_sentence(trace: Any) -> None:
    with attached(Net(), COARSE) as run, pytest.raises(PlanError, match=r"torch\.(jit|fx).*torch\.export"):
        trace(run.model)


@pytest.mark.parametrize("function", [torch.nn.functional.hardtanh_, torch.sigmoid_, torch.exp_])
def test_packed_execution_recomputes_no_in_place_operation(function: Any) -> None:
    results = []
    for execution in ("emulate", "packed"):
        model = nn.Sequential(Net(), Function(function))
        with attached(model, {"match": "*", "weight": "e2m1"}, execution=execution):
            results.append(result_of(model))
    assert_same(*results)


class Function(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x * 1.3)


# --- models without gradients ---


@pytest.mark.parametrize("plan", ["fp8-all", "int8-linear", "fp8-linear"])
@pytest.mark.parametrize("has_example", [True, False])
def test_a_preset_fits_a_model_that_is_only_evaluated(plan: str, has_example: bool) -> None:
    model = Net().eval().requires_grad_(False)
    expected_result = Net().eval()
    with bitplan.attach(expected_result, plan, example=X):
        y = expected_result(X)
    run = bitplan.attach(model, plan, example=X if has_example else None)
    with torch.no_grad():
        assert torch.equal(model(X), y)
    run.step()
    with pytest.raises(PlanError, match="grad_weight"), attached(Net().requires_grad_(False), GRADIENT, example=X):
        pass


GRADIENT = {"match": "*", "grad_weight": "e5m2"}


# --- recording models that need values ---


class Counting(nn.Module):
    """Its shapes depend on values; it draws random numbers, and keeps statistics and a cache."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.cache = x.mul_(2.0)
        positive = x[x[:, 0] > 0]
        return self.drop(self.norm(self.first(positive)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_training", [True, False])
def test_a_model_that_needs_values_is_recorded_on_the_example(is_training: bool) -> None:
    model = Counting().train(is_training)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    state, batch, random_state = copy.deepcopy(model.state_dict()), x.clone(), torch.get_rng_state()
    with torch.no_grad(), attached(model, COARSE, example=x) as run:
        sites = {row.site.name for row in run.table() if row.quantizer}
        assert model.training == is_training
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(x, batch)
    assert model.cache is None
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])
    assert {"first/linear.0:weight", "first/linear.0:grad_activation", "norm/batch_norm.0:activation"} <= sites
    assert ("drop/dropout.0:activation" in sites) == is_training
    assert all(not name.startswith("_bitplan") for name, _ in model.named_buffers())


def test_a_recording_keeps_no_values() -> None:
    x = torch.randn(8, 6)
    with attached(Counting(), COARSE, example=x) as run:
        tensors = [tensor for operation in run._cost_tracker.operations() for tensor in operation.outputs]
    assert {type(tensor).__name__ for tensor in tensors} == {"FakeTensor"}


@pytest.mark.parametrize("batch", [torch.ones(8, 6, device="meta"), "fake"])
def test_a_model_that_needs_values_and_gets_none_raises_a_sentence(batch: Any) -> None:
    if isinstance(batch, str):
        with torch._subclasses.FakeTensorMode():
            batch = torch.ones(8, 6)
    with pytest.raises(bitplan.BitplanError, match=r"nonzero.*example="):
        attached(Counting(), COARSE, example=batch)


def test_an_example_that_does_not_fit_names_the_reason() -> None:
    with pytest.raises(PlanError, match=r"mat1 and mat2|size mismatch|shapes"):
        attached(Counting(), COARSE, example=torch.randn(8, 5))


def test_a_transformers_model_with_a_mask_and_experts_takes_an_example() -> None:
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(3, 60, (2, 8))
    small = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    opt = transformers.OPTConfig(**small, ffn_dim=16, max_position_embeddings=16, word_embed_proj_dim=16)
    moe = transformers.MixtralConfig(**small, intermediate_size=16, num_key_value_heads=1, num_local_experts=2)
    for kind, config in ((transformers.OPTForCausalLM, opt), (transformers.MixtralForCausalLM, moe)):
        model, batch = kind(config), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with bitplan.attach(model, "int8-minmax", example=batch):
            model(**batch).logits.sum().backward()


def test_offloaded_weights_are_recorded() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = Net()
    accelerate.cpu_offload(model, torch.device("cpu"))
    with attached(model, COARSE, example=X):
        assert torch.equal(model(X), expected()[0])


# --- the first optimizer step ---


def test_a_closure_may_run_the_first_forward_pass() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        return loss

    with attached(model, COARSE, optimizer=optimizer):
        optimizer.step(closure)  # type: ignore[arg-type]
        optimizer.step(closure)  # type: ignore[arg-type]
    unmatched = {"match": "*", "op": "conv2d", "weight": "e2m1"}
    with attached(model, COARSE, unmatched, optimizer=optimizer), pytest.raises(PlanError, match="conv2d"):
        optimizer.step(closure)  # type: ignore[arg-type]
    model.zero_grad()
    with attached(model, COARSE), pytest.raises(PlanError, match="example="):
        optimizer.step()


# --- dropout that drops nothing ---


@pytest.mark.parametrize("probability", [0.0, 0.5])
def test_dropout_that_drops_nothing_is_no_operation(probability: float) -> None:
    scaled = {"format": "int8", "scale": "tensor", "rounding": "stochastic", "history": 2}
    rule = {"match": "*", "activation": scaled}
    x = torch.randn(2, 3, 4, 4)
    results = []
    for dropout in (nn.Identity(), nn.Dropout(probability), nn.Dropout(probability)):
        model = nn.Sequential(nn.ReLU(), dropout.train(probability == 0.0))
        is_compiled = len(results) == 2
        with attached(model, rule, example=x):
            called = torch.compile(model, backend="aot_eager", fullgraph=True) if is_compiled else model
            results.append(called(x))
    assert_same([results[0]] * 2, results[1:])
